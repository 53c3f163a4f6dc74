"""Writing a checkpoint from one process, tensor by tensor: conversion, merging.

The same transaction as a run's save - attempt, receipt, manifest, publish - with one shard.
Tensors arrive as an iterable of recipes: only the one being written is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.checkpoint.files import FileSystem, storage_error
from megatron_lite.checkpoint.manifest import is_legal_name, piece_key
from megatron_lite.checkpoint.save import SaveResult, save_snapshot
from megatron_lite.checkpoint.shards import ShardItem
from megatron_lite.checkpoint.tensors import SnapshotPiece, tensor_bytes
from megatron_lite.mesh.groups import local_group


@dataclass(frozen=True)
class LogicalTensor:
    """A logical tensor to write; `load` computes it when its turn has come.

    `load` must return exactly this dtype (a name such as "bfloat16") and shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


def write_directly(
    root: str | Path,
    step: int,
    tensors: Iterable[LogicalTensor],
    state: Mapping[str, Any],
    *,
    overwrite: bool = False,
    files: FileSystem | None = None,
) -> SaveResult:
    """Write and publish a checkpoint of whole logical tensors from this process.

    Args:
        root: the SAVE directory, created when missing.
        state: see `checkpoint.state`.
        overwrite: replace a checkpoint of this step.

    Raises:
        UserError, DamagedError: nothing was published; the attempt is removed.
    """
    pieces = tuple(_snapshot_piece(tensor) for tensor in tensors)
    try:
        return save_snapshot(
            root, step, pieces, state, local_group("world"), overwrite=overwrite, files=files
        )
    except OSError as error:
        raise storage_error(error, Path(root)) from error


def _snapshot_piece(tensor: LogicalTensor) -> SnapshotPiece:
    if not is_legal_name(tensor.name):
        raise ValueError(f"{tensor.name!r} is no legal tensor name")

    def load() -> memoryview:
        value = tensor.load()
        found = (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if found != (tensor.dtype, tensor.shape):
            wanted = (tensor.dtype, tensor.shape)
            raise ValueError(f"{tensor.name}: computed as {found}, declared as {wanted}")
        return tensor_bytes(value)

    offset = (0,) * len(tensor.shape)
    key = piece_key(tensor.name, tensor.shape, offset, tensor.shape)
    item = ShardItem(key, tensor.dtype, tensor.shape, load)
    return SnapshotPiece(tensor.name, tensor.shape, offset, item)
