"""Between torch tensors and bytes: entries to save, snapshots, whole safetensors files.

A snapshot fixes which pieces a rank writes. A synchronous save reads each tensor when its
turn comes (nothing changes it meanwhile, and one piece is in host memory at a time); a
save in the background will fill host buffers instead, behind the same `ShardItem`s.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_lite.checkpoint.boxes import is_inside
from megatron_lite.checkpoint.files import FileSystem, storage_error
from megatron_lite.checkpoint.manifest import is_legal_name, piece_key
from megatron_lite.checkpoint.shards import DTYPES, ShardItem, read_header, write_shard
from megatron_lite.checkpoint.strict_json import MAX_DIMS
from megatron_lite.checkpoint.verify import map_range

TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, eq=False)
class StateEntry:
    """A rank's piece of one logical tensor.

    `tensor` is the piece without padding, `offset` its place in `logical_shape`. Exactly
    one rank says `owned` for each logical element; only owned pieces are written.
    """

    name: str
    tensor: Tensor
    logical_shape: tuple[int, ...]
    offset: tuple[int, ...]
    owned: bool


@dataclass(frozen=True)
class SnapshotPiece:
    """A piece that this rank writes, its logical place, and where its bytes come from."""

    name: str
    logical_shape: tuple[int, ...]
    offset: tuple[int, ...]
    item: ShardItem


def take_snapshot(entries: Iterable[StateEntry]) -> tuple[SnapshotPiece, ...]:
    """Fix what this rank writes.

    The place where replicas will share the work: today the owner writes its whole piece;
    a rule that cuts a piece among its replicas belongs here and changes nothing else.
    """
    pieces = []
    for entry in entries:
        shape = tuple(entry.tensor.shape)
        if not is_legal_name(entry.name):
            raise ValueError(f"{entry.name!r} is no legal tensor name")
        if len(shape) > MAX_DIMS or not is_inside((entry.offset, shape), entry.logical_shape):
            raise ValueError(
                f"{entry.name}: piece {shape} at {entry.offset} is not inside {entry.logical_shape}"
            )
        if not entry.owned:
            continue
        key = piece_key(entry.name, entry.logical_shape, entry.offset, shape)
        item = shard_item(key, entry.tensor)
        pieces.append(SnapshotPiece(entry.name, entry.logical_shape, entry.offset, item))
    return tuple(pieces)


def shard_item(key: str, tensor: Tensor) -> ShardItem:
    """Return the item that writes `tensor` under `key`; it is read when its turn comes."""
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"{key}: dtype {tensor.dtype} has no place in a checkpoint")
    detached = tensor.detach()
    return ShardItem(
        key, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), lambda: tensor_bytes(detached)
    )


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order; no copy for a contiguous CPU tensor."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data.cast("B")


def tensor_over(data: memoryview, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor over these bytes; it shares their memory."""
    if data.nbytes == 0:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    flat = torch.from_numpy(np.frombuffer(data, dtype=np.uint8))
    return flat.view(TORCH_DTYPES[dtype]).view(shape)


def write_safetensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file atomically, replacing an older one of this name.

    Args:
        tensors: any names; written one after the other, never all copied.
        metadata: strings for the header's `__metadata__`.
    """
    target = Path(path)
    files = FileSystem()
    temporary = target.with_name(f".{target.name}.tmp")
    items = [shard_item(key, tensor) for key, tensor in tensors.items()]
    try:
        files.ensure_directory(target.parent)
        files.remove_file(temporary)
        write_shard(files, temporary, items, metadata or {})
        files.rename(temporary, target)
    except OSError as error:
        needed = sum(item.num_bytes for item in items)
        temporary.unlink(missing_ok=True)
        raise storage_error(error, target, needed) from error


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Return all tensors of one safetensors file, as copies in memory.

    Raises:
        DamagedError: the file is missing, truncated or not of this format.
    """
    source = Path(path)
    tensors = {}
    for key, tensor in read_header(source).tensors.items():
        with map_range(source, tensor) as data:
            view = tensor_over(data, tensor.dtype, tensor.shape)
            tensors[key] = view.clone()
            del view  # the mapping cannot be closed while a tensor looks into it
    return tensors


def read_safetensors_metadata(path: str | Path) -> dict[str, str]:
    """Return the `__metadata__` of one safetensors file."""
    return dict(read_header(Path(path)).metadata)
