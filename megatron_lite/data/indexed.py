"""Read indexed datasets: PREFIX.bin (raw little-endian tokens) and PREFIX.idx (their lengths).

The format is Megatron-LM's, byte for byte: magic, version, dtype code, counts, int32
sequence lengths, int64 byte pointers, int64 document indices (documents + 1 of them),
optionally one int8 mode per sequence. Every field of the .idx is checked against the
others and against the size of the .bin when a dataset is opened, because dtype codes
differ between projects that share the magic and a shifted read looks like real data.
"""

import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron_lite.data.block_check import sampled_blocks
from megatron_lite.data.meta import DatasetMeta, load_meta
from megatron_lite.errors import DamagedError, UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34
DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
# What other projects mean by the same code under the same magic; used only to explain.
FOREIGN_CODES: dict[int, tuple[tuple[str, np.dtype[Any]], ...]] = {
    6: (("DeepSpeed", np.dtype("<u2")),),
    7: (("DeepSpeed", np.dtype("<u4")), ("nanotron", np.dtype("<f8"))),
    8: (("DeepSpeed", np.dtype("<u8")),),
}
UINT16_VOCAB_LIMIT = 65536
CHECK_BLOCK = 1 << 20
PREFETCH_BYTES = 16 << 10


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Choose the stored type: uint16 holds exactly the vocabularies up to 65,536 ids."""
    return np.dtype("<u2") if vocab_size <= UINT16_VOCAB_LIMIT else np.dtype("<i4")


def dtype_code(dtype: DTypeLike) -> int:
    """Return the .idx code of a token type.

    Raises:
        UserError: the format has no code for it.
    """
    wanted = np.dtype(dtype).newbyteorder("<")
    for code, known in DTYPE_CODES.items():
        if known == wanted:
            return code
    raise UserError(f"the indexed format has no code for token type {np.dtype(dtype)}")


def bin_path(prefix: str | Path) -> Path:
    """Return the path of the token file of a prefix."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of the index file of a prefix."""
    return Path(f"{prefix}.idx")


def sequence_pointers(lengths: NDArray[np.integer[Any]], itemsize: int) -> NDArray[np.int64]:
    """Compute byte offsets into the .bin, in 64 bit whatever type the lengths have.

    Args:
        lengths: [sequences], tokens per sequence.
        itemsize: bytes per token.

    Returns:
        [sequences] int64, exclusive prefix sum of length * itemsize.
    """
    wide = lengths.astype(np.int64)
    return (np.cumsum(wide) - wide) * itemsize


class IndexedDataset:
    """One opened dataset; token data is memory-mapped unless `use_mmap` is false.

    Args:
        prefix: path without suffix.
        use_mmap: map the .bin; otherwise every read is one positioned read.

    Raises:
        UserError: a file is missing.
        DamagedError: truncated, inconsistent or in another project's dialect.
    """

    def __init__(self, prefix: str | Path, *, use_mmap: bool = True) -> None:
        self.prefix = str(prefix)
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise UserError(f"dataset {prefix}: {path} does not exist (a prefix has no suffix)")
        raw = np.fromfile(idx_path(prefix), dtype=np.uint8, count=HEADER_BYTES)
        self.dtype, sequences, boundaries = self._parse_header(raw.tobytes())
        self._map_index(sequences, boundaries)
        self.bin_bytes = bin_path(prefix).stat().st_size
        self.meta: DatasetMeta | None = load_meta(prefix)
        self._check_index()
        self._file: int | None = None
        self._map: mmap.mmap | None = None
        self._tokens: NDArray[Any] | None = None
        if self.bin_bytes == 0:
            self._tokens = np.empty(0, dtype=self.dtype)
        elif use_mmap:
            self._map_tokens()
        else:
            self._file = os.open(bin_path(prefix), os.O_RDONLY)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]
            self._file = None

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def name(self) -> str:
        """The prefix, for messages."""
        return self.prefix

    @property
    def num_documents(self) -> int:
        """Documents; each is one or more consecutive sequences."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole dataset."""
        return self.bin_bytes // self.dtype.itemsize

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Read tokens of one sequence.

        Args:
            sequence: number of the sequence.
            offset: first token inside it.
            length: tokens to read; None reads to its end.

        Returns:
            [length] in the stored type; a read-only view of the map where there is one.
        """
        size = int(self.lengths[sequence])
        count = size - offset if length is None else length
        if not 0 <= offset <= offset + count <= size:
            raise IndexError(
                f"dataset {self.prefix}: tokens [{offset}, {offset + count}) of sequence "
                f"{sequence}, which has {size}"
            )
        first = int(self.pointers[sequence]) // self.dtype.itemsize + offset
        itemsize = self.dtype.itemsize
        if self._tokens is not None:
            if self._map is not None and count * itemsize > PREFETCH_BYTES:
                start = first * itemsize // mmap.PAGESIZE * mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, start, (first + count) * itemsize - start)
            return self._tokens[first : first + count]
        assert self._file is not None
        data = os.pread(self._file, count * itemsize, first * itemsize)
        if len(data) != count * itemsize:
            raise DamagedError(f"dataset {self.prefix}: the .bin became shorter while in use")
        return np.frombuffer(data, dtype=self.dtype)

    def read_into(self, out: NDArray[np.int64], sequence: int, offset: int) -> None:
        """Copy `len(out)` tokens of a sequence, starting at `offset`, widening to int64."""
        out[:] = self.read(sequence, offset, len(out))

    def document(self, number: int) -> NDArray[Any]:
        """Return all tokens of one document, its sequences joined."""
        first, last = (int(i) for i in self.document_indices[number : number + 2])
        if first == last:
            return np.empty(0, dtype=self.dtype)
        return np.concatenate([self.read(s) for s in range(first, last)])

    def blocks(self, block_tokens: int = CHECK_BLOCK) -> Iterator[NDArray[Any]]:
        """Yield the token stream in blocks, for scans of everything."""
        with bin_path(self.prefix).open("rb") as file:
            while block := file.read(block_tokens * self.dtype.itemsize):
                yield np.frombuffer(block, dtype=self.dtype)

    def identity(self) -> dict[str, Any]:
        """Describe the content without its path: what a cache key and a cursor compare.

        The lengths are hashed whole; of the token data its size and 64 spread blocks of
        4 KiB, so that another corpus of equal lengths is noticed at start-up's price.
        """
        with idx_path(self.prefix).open("rb") as file:
            index_hash = hashlib.file_digest(file, "sha256").hexdigest()
        sampled = hashlib.sha256()
        for block in sampled_blocks(bin_path(self.prefix), self.bin_bytes):
            sampled.update(block)
        return {
            "idx_sha256": index_hash,
            "bin_bytes": self.bin_bytes,
            "bin_sampled_sha256": sampled.hexdigest(),
        }

    def _parse_header(self, header: bytes) -> tuple[np.dtype[Any], int, int]:
        path = idx_path(self.prefix)
        if len(header) < HEADER_BYTES or header[:9] != MAGIC:
            raise DamagedError(f"{path}: not an indexed dataset (no MMIDIDX header)")
        version, code, sequences, boundaries = struct.unpack("<QBQQ", header[9:])
        if version != VERSION:
            raise DamagedError(f"{path}: version {version}; this reader knows version {VERSION}")
        if code not in DTYPE_CODES:
            legal = ", ".join(f"{c} {d.name}" for c, d in DTYPE_CODES.items())
            raise DamagedError(f"{path}: unknown dtype code {code}; legal: {legal}")
        return DTYPE_CODES[code], sequences, boundaries

    def _map_tokens(self) -> None:
        """Map the .bin for scattered reads.

        Samples are read in random order: the kernel's read-ahead around every touched page
        would cost several times the sample itself. Long pieces ask for theirs in `read`.
        """
        with bin_path(self.prefix).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_RANDOM)
        self._tokens = np.frombuffer(self._map, dtype=self.dtype)

    def _map_index(self, sequences: int, boundaries: int) -> None:
        """Map the arrays behind the header; their 34-byte offset leaves them unaligned."""
        path = idx_path(self.prefix)
        plain = HEADER_BYTES + 12 * sequences + 8 * boundaries
        found = path.stat().st_size
        if found not in (plain, plain + sequences):
            raise DamagedError(
                f"{path}: {found} bytes, but its header ({sequences} sequences, {boundaries} "
                f"document boundaries) needs {plain}: truncated or damaged"
            )
        data = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        at_pointers = HEADER_BYTES + 4 * sequences
        at_documents = at_pointers + 8 * sequences
        self.lengths: NDArray[np.int32] = data[HEADER_BYTES:at_pointers].view("<i4")
        self.pointers: NDArray[np.int64] = data[at_pointers:at_documents].view("<i8")
        self.document_indices: NDArray[np.int64] = data[at_documents:plain].view("<i8")
        has_modes = found != plain
        self.modes: NDArray[np.int8] | None = data[plain:].view("i1") if has_modes else None

    def _check_index(self) -> None:
        path = idx_path(self.prefix)
        if len(self.lengths) and self.lengths.min() < 0:
            raise DamagedError(f"{path}: negative sequence length: damaged")
        # Sizes before offsets: another project's dtype code is then told as such.
        promised = int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        if promised != self.bin_bytes:
            raise DamagedError(self._explain_size(promised))
        start = 0
        for low in range(0, len(self.lengths), CHECK_BLOCK):
            lengths = self.lengths[low : low + CHECK_BLOCK]
            expected = start + sequence_pointers(lengths, self.dtype.itemsize)
            if not np.array_equal(self.pointers[low : low + CHECK_BLOCK], expected):
                raise DamagedError(f"{path}: byte pointers do not follow from the lengths: damaged")
            start += int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        ends = self.document_indices
        if (
            len(ends) == 0
            or ends[0] != 0
            or ends[-1] != len(self.lengths)
            or np.any(np.diff(ends) < 0)
        ):
            raise DamagedError(
                f"{path}: document indices must rise from 0 to {len(self.lengths)}: damaged"
            )

    def _explain_size(self, expected: int) -> str:
        code = dtype_code(self.dtype)
        tokens = expected // self.dtype.itemsize
        message = (
            f"dataset {self.prefix}: the .bin has {self.bin_bytes} bytes, the .idx promises "
            f"{tokens} tokens of {self.dtype.name} = {expected} bytes"
        )
        for project, dtype in FOREIGN_CODES.get(code, ()):
            if tokens * dtype.itemsize == self.bin_bytes:
                return (
                    f"{message}; the size fits {dtype.name}, which is what dtype code {code} "
                    f"means in {project}'s dialect of the format: preprocess it again"
                )
        return f"{message}: truncated, damaged or not a pair"
