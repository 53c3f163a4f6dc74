"""Reading any box of any logical tensor, whatever layout wrote the checkpoint.

Only the pieces that touch a box are read, straight into their place where they are one run
of bytes there. A piece is verified against its sha256 at its first use, as a whole, before
anything of it is handed out. Nothing is converted: the dtype is that of the file.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.boxes import Region, intersect, is_inside, relative_slices
from megatron_lite.checkpoint.catalog import Found, find_checkpoint
from megatron_lite.checkpoint.manifest import Piece, TensorRecord, piece_key, shard_file
from megatron_lite.checkpoint.pieces import PieceWork
from megatron_lite.checkpoint.ranges import already_here, run_jobs
from megatron_lite.checkpoint.shards import ShardHeader
from megatron_lite.checkpoint.strict_json import encode_json
from megatron_lite.checkpoint.tensors import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    tensor_bytes,
)
from megatron_lite.checkpoint.verify import load_shard_header
from megatron_lite.errors import UserError

ALLOWED_KINDS = ("missing", "unexpected", "dtype", "shape")
BoxRequest = tuple[str, tuple[int, ...] | None, tuple[int, ...] | None]
MAX_TOLD = 8  # differences of a kind listed in a message; a deep model has thousands


@dataclass(frozen=True)
class NameCheck:
    """Names that differ between a model and a checkpoint; all empty when they agree."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()


class Checkpoint:
    """An open checkpoint. `state` is the JSON object that was saved with it."""

    def __init__(self, found: Found):
        self.directory: Path = found.directory
        self.step: int = found.step
        self.found = found
        self._manifest = found.manifest
        self._headers: dict[int, ShardHeader] = {}
        self._verified: set[tuple[str, tuple[int, ...]]] = set()
        self.bytes_read = 0  # from shard files, headers apart

    @property
    def state(self) -> Mapping[str, Any]:
        return self._manifest.state

    @property
    def names(self) -> tuple[str, ...]:
        """All logical names, sorted."""
        return tuple(sorted(self._manifest.tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the logical shape of a tensor."""
        return self._record(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the file."""
        return TORCH_DTYPES[self._record(name).dtype]

    def read(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Return a box of a logical tensor (by default all of it), verified, in memory.

        Raises:
            DamagedError: a piece that is needed differs from its sha256, or its file is
                gone or truncated.
        """
        return self.read_many([(name, offset, shape)])[0]

    def read_many(
        self,
        requests: Iterable[BoxRequest],
        room: Callable[[int, torch.dtype], Tensor | None] | None = None,
    ) -> list[Tensor]:
        """Return many boxes, (name, offset, shape) as `read` takes them, in their order.

        `room` may give a tensor of the shape to read request number i of a dtype into.
        Pieces are read and verified side by side by a few threads; memory beyond the
        result is two chunks per thread. All or nothing: damage in one piece is an error,
        and nothing is returned.
        """
        results: list[Tensor] = []
        works: list[PieceWork] = []
        for number, (name, offset, shape) in enumerate(requests):
            record = self._record(name)
            offset = (0,) * len(record.shape) if offset is None else tuple(offset)
            if shape is None:
                shape = tuple(full - low for full, low in zip(record.shape, offset, strict=True))
            wanted = (offset, tuple(shape))
            if not is_inside(wanted, record.shape):
                raise UserError(
                    f"{name} {list(record.shape)}: no box {list(shape)} at {list(offset)}"
                )
            dtype = TORCH_DTYPES[record.dtype]
            given = room(number, dtype) if room is not None else None
            out = torch.empty(shape, dtype=dtype) if given is None else given
            results.append(out)
            for piece in record.pieces:
                common = intersect(wanted, (piece.offset, piece.shape))
                if common is not None:
                    target = out[relative_slices(common, offset)]
                    works.append(self._piece_work(name, record, piece, common, target))
        self._run(works)
        self.bytes_read += sum(work.num_bytes for work in works)
        self._verified.update(work.identity for work in works)
        return results

    def _run(self, works: list[PieceWork]) -> None:
        mirror = self.found.mirror
        fetch = already_here if mirror is None else mirror.fetch
        try:
            run_jobs([(work.num_bytes, partial(work.run, fetch)) for work in works])
        except UserError as error:
            if mirror is None:
                raise
            raise type(error)(mirror.words(str(error))) from error

    def _piece_work(
        self, name: str, record: TensorRecord, piece: Piece, common: Region, out: Tensor
    ) -> PieceWork:
        if piece.rank not in self._headers:
            if self.found.mirror is not None:
                self.found.mirror.shard(self.directory / shard_file(piece.rank))
            header = load_shard_header(self.directory, self._manifest, piece.rank)
            self._headers[piece.rank] = header
        key = piece_key(name, record.shape, piece.offset, piece.shape)
        low = tuple(a - b for a, b in zip(common[0], piece.offset, strict=True))
        identity = (name, piece.offset)
        return PieceWork(
            path=self.directory / shard_file(piece.rank),
            key=key,
            tensor=self._headers[piece.rank].tensors[key],
            sha256=None if identity in self._verified else piece.sha256,
            part=(low, common[1]),
            out=out,
            identity=identity,
        )

    def check_names(
        self,
        expected: Mapping[str, tuple[torch.dtype | str, tuple[int, ...]]],
        allow: Collection[str] = (),
    ) -> NameCheck:
        """Compare names, dtypes and shapes with what the run expects, before any read.

        Args:
            expected: logical name -> (dtype, logical shape).
            allow: kinds of difference to accept (`--ckpt-allow`): "missing" (in the run,
                not in the checkpoint), "unexpected" (the reverse), "dtype" (the caller
                converts), "shape" (the caller keeps its own value).

        Returns:
            The accepted differences.

        Raises:
            UserError: listing the differences of kinds that are not allowed.
        """
        unknown = sorted(set(allow) - set(ALLOWED_KINDS))
        if unknown:
            raise UserError(
                f"--ckpt-allow {' '.join(unknown)}: legal kinds are {' '.join(ALLOWED_KINDS)}"
            )
        tensors = {name: (DTYPE_NAMES[self.dtype(name)], self.shape(name)) for name in self.names}
        both = sorted(expected.keys() & tensors.keys())
        dtypes = [n for n in both if _dtype_name(expected[n][0]) != tensors[n][0]]
        shapes = [n for n in both if tuple(expected[n][1]) != tensors[n][1]]
        check = NameCheck(
            missing=tuple(sorted(expected.keys() - tensors.keys())),
            unexpected=tuple(sorted(tensors.keys() - expected.keys())),
            dtype=tuple(dtypes),
            shape=tuple(shapes),
        )
        lines = []
        for name in check.missing if "missing" not in allow else ():
            lines.append(f"missing: {name} {list(expected[name][1])}")
        for name in check.unexpected if "unexpected" not in allow else ():
            lines.append(f"unexpected: {name} {list(tensors[name][1])}")
        for name in check.dtype if "dtype" not in allow else ():
            found = tensors[name][0]
            lines.append(f"dtype: {name} is {found}, expected {_dtype_name(expected[name][0])}")
        for name in check.shape if "shape" not in allow else ():
            found_shape = list(tensors[name][1])
            lines.append(f"shape: {name} is {found_shape}, expected {list(expected[name][1])}")
        if lines:
            told = []
            for kind in ALLOWED_KINDS:
                alike = [line for line in lines if line.startswith(f"{kind}:")]
                rest = len(alike) - MAX_TOLD
                told += alike[:MAX_TOLD] + ([f"{kind}: {rest} more"] if rest > 0 else [])
            raise UserError(
                f"{self.directory}: the checkpoint does not fit this run "
                f"({len(lines)} differences; --ckpt-allow KIND accepts a kind):\n  "
                + "\n  ".join(told)
            )
        return check

    def _record(self, name: str) -> TensorRecord:
        record = self._manifest.tensors.get(name)
        if record is None:
            raise UserError(f"{self.directory}: no tensor {name!r} in this checkpoint")
        return record


def open_checkpoint(
    path: str | Path, step: int | None = None, *, verify: str = "full"
) -> Checkpoint:
    """Open what `find_checkpoint` finds."""
    return Checkpoint(find_checkpoint(path, step, verify=verify))


def logical_hash(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> str:
    """Return one sha256 over gathered tensors in name order, equal for every layout.

    Hashed per tensor: its name, dtype and shape as a JSON line, then its bytes in
    row-major order. One tensor at a time is in memory.
    """
    digest = hashlib.sha256()
    for name in sorted(checkpoint.names if names is None else names):
        tensor = checkpoint.read(name)
        digest.update(encode_json([name, DTYPE_NAMES[tensor.dtype], list(tensor.shape)]))
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def _dtype_name(dtype: torch.dtype | str) -> str:
    return dtype if isinstance(dtype, str) else DTYPE_NAMES[dtype]
