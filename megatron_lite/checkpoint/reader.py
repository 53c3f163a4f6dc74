"""Reading any box of any logical tensor, whatever layout wrote the checkpoint.

Only the pieces that touch the box are mapped; each is verified against its sha256 once,
before its first use. Nothing is converted: what comes back has the dtype of the file.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.boxes import intersect, is_inside, relative_slices
from megatron_lite.checkpoint.catalog import Found, find_checkpoint
from megatron_lite.checkpoint.manifest import Piece, TensorRecord, piece_key, shard_file
from megatron_lite.checkpoint.shards import ShardHeader
from megatron_lite.checkpoint.strict_json import encode_json
from megatron_lite.checkpoint.tensors import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    tensor_bytes,
    tensor_over,
)
from megatron_lite.checkpoint.verify import check_hash, load_shard_header, map_range
from megatron_lite.errors import UserError

ALLOWED_KINDS = ("missing", "unexpected", "dtype", "shape")
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
        record = self._record(name)
        offset = (0,) * len(record.shape) if offset is None else tuple(offset)
        if shape is None:
            shape = tuple(full - low for full, low in zip(record.shape, offset, strict=True))
        wanted = (offset, tuple(shape))
        if not is_inside(wanted, record.shape):
            raise UserError(f"{name} {list(record.shape)}: no box {list(shape)} at {list(offset)}")
        out = torch.empty(shape, dtype=TORCH_DTYPES[record.dtype])
        for piece in record.pieces:
            common = intersect(wanted, (piece.offset, piece.shape))
            if common is None:
                continue
            target = out[relative_slices(common, offset)]
            self._copy_piece(name, record, piece, relative_slices(common, piece.offset), target)
        return out

    def _copy_piece(
        self, name: str, record: TensorRecord, piece: Piece, part: tuple[slice, ...], out: Tensor
    ) -> None:
        if piece.rank not in self._headers:
            header = load_shard_header(self.directory, self._manifest, piece.rank)
            self._headers[piece.rank] = header
        key = piece_key(name, record.shape, piece.offset, piece.shape)
        path = self.directory / shard_file(piece.rank)
        with map_range(path, self._headers[piece.rank].tensors[key]) as data:
            if (name, piece.offset) not in self._verified:
                check_hash(data, piece.sha256, f"{path}: {key}")
                self._verified.add((name, piece.offset))
            view = tensor_over(data, record.dtype, piece.shape)
            out.copy_(view[part])
            del view  # the mapping cannot be closed while a tensor looks into it

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
        tensors = self._manifest.tensors
        both = sorted(expected.keys() & tensors.keys())
        dtypes = [n for n in both if _dtype_name(expected[n][0]) != tensors[n].dtype]
        shapes = [n for n in both if tuple(expected[n][1]) != tensors[n].shape]
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
            lines.append(f"unexpected: {name} {list(tensors[name].shape)}")
        for name in check.dtype if "dtype" not in allow else ():
            found = tensors[name].dtype
            lines.append(f"dtype: {name} is {found}, expected {_dtype_name(expected[name][0])}")
        for name in check.shape if "shape" not in allow else ():
            found_shape = list(tensors[name].shape)
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
