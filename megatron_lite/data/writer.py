"""Write and merge indexed datasets (the format is described in `indexed.py`).

Data goes to temporary names; the final names appear only when everything is complete,
the .idx last, so a reader never meets half a dataset. Sizes are kept in machine arrays
(4 + 8 bytes per document): a billion documents do not need a Python list.
"""

import errno
import hashlib
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron_lite.data.indexed import (
    CHECK_BLOCK,
    DTYPE_CODES,
    MAGIC,
    VERSION,
    IndexedDataset,
    bin_path,
    dtype_code,
    idx_path,
    sequence_pointers,
)
from megatron_lite.data.meta import DatasetMeta, meta_path, save_meta
from megatron_lite.errors import DamagedError, UserError

COPY_BYTES = 16 << 20


class DatasetWriter:
    """Collect documents into PREFIX.bin/.idx; use as a context manager.

    Leaving the block with an exception removes the temporary files and leaves whatever
    lay under the final names untouched.

    Args:
        prefix: path without suffix; its folder is created.
        dtype: stored token type, see `indexed.token_dtype`.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike) -> None:
        self.prefix = str(prefix)
        self.dtype = DTYPE_CODES[dtype_code(dtype)]
        self.max_token_id = -1
        self.num_tokens = 0
        self._lengths = array("i")
        self._document_ends = array("q", [0])
        self._digest = hashlib.sha256()
        self._bin_temporary = self._temporary(bin_path(prefix))
        self._idx_temporary = self._temporary(idx_path(prefix))
        self._bin_temporary.parent.mkdir(parents=True, exist_ok=True)
        self._bin: BinaryIO = self._bin_temporary.open("wb")

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DamagedError(f"no space left while writing {self.prefix}.bin and .idx") from None

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._document_ends) - 1

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Append one document.

        Args:
            tokens: [tokens] ids.
            lengths: tokens of each of its sequences; None makes it one sequence.

        Raises:
            DamagedError: an id does not fit the stored type.
        """
        flat = np.asarray(tokens)
        parts = [len(flat)] if lengths is None else list(lengths)
        if sum(parts) != len(flat):
            raise ValueError(f"sequence lengths sum to {sum(parts)}, the document has {len(flat)}")
        self._append(flat)
        self._lengths.extend(parts)
        self._document_ends.append(len(self._lengths))

    def add_documents(self, tokens: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Append many one-sequence documents at once.

        Args:
            tokens: [sum of lengths] ids, documents back to back.
            lengths: [documents] tokens of each.
        """
        if int(lengths.sum()) != len(tokens):
            raise ValueError(f"lengths sum to {int(lengths.sum())}, there are {len(tokens)} tokens")
        self._append(tokens)
        first = len(self._lengths)
        self._lengths.frombytes(np.ascontiguousarray(lengths, dtype=np.intc).tobytes())
        ends = np.arange(first + 1, first + len(lengths) + 1, dtype=np.int64)
        self._document_ends.frombytes(ends.tobytes())

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Append another dataset of the same token type with its document boundaries."""
        if dataset.dtype != self.dtype:
            raise UserError(
                f"cannot merge {dataset.prefix} ({dataset.dtype.name}) into {self.dtype.name} "
                f"data: preprocess it with the same tokenizer"
            )
        with bin_path(dataset.prefix).open("rb") as source:
            while block := source.read(COPY_BYTES):
                self._bin.write(block)
                self._digest.update(block)
                self.max_token_id = max(
                    self.max_token_id, int(np.frombuffer(block, self.dtype).max())
                )
        base = len(self._lengths)
        self.num_tokens += dataset.num_tokens
        self._lengths.frombytes(dataset.lengths.astype(np.intc).tobytes())
        ends = dataset.document_indices[1:].astype(np.int64) + base
        self._document_ends.frombytes(ends.tobytes())

    def finalize(self, meta: DatasetMeta | None = None) -> None:
        """Write the .idx and publish all files; `meta` is completed with the .bin's hash."""
        self._sync(self._bin)
        with self._idx_temporary.open("wb") as file:
            self._write_index(file)
            self._sync(file)
        # An old .idx beside a new .bin would be a wrong pair: take it away first.
        idx_path(self.prefix).unlink(missing_ok=True)
        meta_path(self.prefix).unlink(missing_ok=True)
        self._bin_temporary.replace(bin_path(self.prefix))
        if meta is not None:
            content = {**vars(meta), "bin_sha256": self._digest.hexdigest()}
            save_meta(self.prefix, DatasetMeta(**content))
        self._idx_temporary.replace(idx_path(self.prefix))

    def abort(self) -> None:
        """Close and remove the temporary files; does nothing after `finalize`."""
        with suppress(OSError):  # a full disk refuses the last buffer once more
            self._bin.close()
        self._bin_temporary.unlink(missing_ok=True)
        self._idx_temporary.unlink(missing_ok=True)

    def _append(self, tokens: NDArray[Any]) -> None:
        if len(tokens) == 0:
            return
        low, high = int(tokens.min()), int(tokens.max())
        self.max_token_id = max(self.max_token_id, high)
        if self.dtype.kind in "iu":
            info = np.iinfo(self.dtype)
            if low < info.min or high > info.max:
                bad = low if low < info.min else high
                raise DamagedError(
                    f"token id {bad} does not fit {self.dtype.name} (at most {info.max}) "
                    f"in dataset {self.prefix}"
                )
        data = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
        self._bin.write(data)
        self._digest.update(data)
        self.num_tokens += len(tokens)

    def _write_index(self, file: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.intc)
        ends = np.frombuffer(self._document_ends, dtype=np.int64)
        code = dtype_code(self.dtype)
        file.write(MAGIC + struct.pack("<QBQQ", VERSION, code, len(lengths), len(ends)))
        file.write(lengths.astype("<i4", copy=False).data)
        start = 0
        for low in range(0, len(lengths), CHECK_BLOCK):
            block = lengths[low : low + CHECK_BLOCK].astype(np.int64)
            pointers = start + sequence_pointers(block, self.dtype.itemsize)
            file.write(pointers.astype("<i8", copy=False).data)
            start += int(block.sum()) * self.dtype.itemsize
        file.write(ends.astype("<i8", copy=False).data)

    @staticmethod
    def _sync(file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()

    @staticmethod
    def _temporary(path: Path) -> Path:
        return path.with_name(f"{path.name}.tmp-{os.getpid()}")


def merge_datasets(prefixes: Sequence[str], output_prefix: str) -> DatasetMeta | None:
    """Join datasets in the given order; document boundaries and records are kept.

    Returns:
        The record of the result; None (and no .meta.json) when an input has none.

    Raises:
        UserError: nothing to merge, token types differ, or made by different tokenizers.
    """
    if not prefixes:
        raise UserError("no dataset to merge")
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    if any(part.modes is not None for part in parts):
        raise UserError("multimodal datasets (with modes) cannot be merged")
    metas = [part.meta for part in parts]
    known = [meta for meta in metas if meta is not None]
    makers = {(m.tokenizer_type, m.tokenizer_sha256, m.vocab_size, m.eod) for m in known}
    if len(makers) > 1:
        raise UserError(
            "the datasets were made by different tokenizers: "
            + ", ".join(
                f"{kind} with vocabulary {size}" for kind, _, size, _ in sorted(makers, key=str)
            )
        )
    with DatasetWriter(output_prefix, parts[0].dtype) as writer:
        for part in parts:
            writer.add_dataset(part)
        merged = None
        if len(known) == len(metas):
            merged = _merge_metas(known, writer)
        writer.finalize(merged)
    return merged


def _merge_metas(metas: Sequence[DatasetMeta], writer: DatasetWriter) -> DatasetMeta:
    skipped: dict[str, int] = {}
    for meta in metas:
        _add_counts(skipped, meta.skipped)
    first = metas[0]
    return DatasetMeta(
        tokenizer_type=first.tokenizer_type,
        tokenizer_sha256=first.tokenizer_sha256,
        vocab_size=first.vocab_size,
        eod=first.eod,
        max_token_id=writer.max_token_id,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        skipped=skipped,
    )


def _add_counts(total: dict[str, int], part: Mapping[str, int]) -> None:
    for key, count in part.items():
        total[key] = total.get(key, 0) + count
