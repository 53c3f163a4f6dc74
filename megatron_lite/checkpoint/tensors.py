"""Between torch tensors and bytes: entries to save, snapshots, whole safetensors files.

A snapshot fixes which pieces a rank writes. A synchronous save reads each tensor when its
turn comes (nothing changes it meanwhile, and one piece is in host memory at a time); a
save in the background copies them to shared memory first (`snapshot.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_lite.checkpoint.attempt import SnapshotPiece
from megatron_lite.checkpoint.boxes import is_inside
from megatron_lite.checkpoint.files import FileSystem, storage_error
from megatron_lite.checkpoint.manifest import is_legal_name, piece_key
from megatron_lite.checkpoint.shards import DTYPES, ShardItem, read_header, write_shard
from megatron_lite.checkpoint.strict_json import MAX_DIMS
from megatron_lite.checkpoint.verify import map_range

TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# A smaller piece is not worth cutting: every part costs a header entry and a hash.
CUT_BYTES = 64 * 2**10


@dataclass(frozen=True)
class Share:
    """Which part of a piece a rank writes when the holders of equal copies share the work.

    Attributes:
        index, count: this holder among those of the copies.
        holders: entries of one rank with equal `holders` are held by the same ranks.
    """

    index: int = 0
    count: int = 1
    holders: str = ""


WHOLE = Share()


@dataclass(frozen=True, eq=False)
class StateEntry:
    """A rank's piece of one logical tensor.

    `tensor` is the piece without padding, `offset` its place in `logical_shape`. A rank
    that does not say `owned` writes nothing of it; those that do say, by their `share`,
    each write a part, and together each logical element exactly once.
    """

    name: str
    tensor: Tensor
    logical_shape: tuple[int, ...]
    offset: tuple[int, ...]
    owned: bool
    share: Share = WHOLE


def take_snapshot(entries: Iterable[StateEntry]) -> tuple[SnapshotPiece, ...]:
    """Fix what this rank writes of its entries; their tensors are read when they are written."""
    return tuple(map(snapshot_piece, written_entries(entries)))


def snapshot_piece(entry: StateEntry) -> SnapshotPiece:
    """Return the piece that a rank writes whole."""
    key = piece_key(entry.name, entry.logical_shape, entry.offset, tuple(entry.tensor.shape))
    item = shard_item(key, entry.tensor)
    return SnapshotPiece(entry.name, entry.logical_shape, entry.offset, item)


def written_entries(entries: Iterable[StateEntry]) -> list[StateEntry]:
    """Return what this rank writes: its own entries, and its part of shared ones.

    A piece that several ranks hold is cut along dim 0, a range of rows for each. Small
    pieces go whole to one holder, the largest first to the one with the least so far: a
    rule that all holders follow alike, because all see the same pieces.
    """
    held = list(entries)
    for entry in held:
        _check_entry(entry)
    writers = _writers_of_small(held)
    written = []
    for position, entry in enumerate(held):
        share = entry.share
        if not entry.owned or writers.get(position, share.index) != share.index:
            continue
        if share.count > 1 and position not in writers:
            first, stop = _rows(entry.tensor.shape[0], share)
            if first == stop:
                continue
            offset = (entry.offset[0] + first, *entry.offset[1:])
            entry = replace(entry, tensor=entry.tensor[first:stop], offset=offset)
        written.append(replace(entry, share=WHOLE))
    return written


def _check_entry(entry: StateEntry) -> None:
    shape = tuple(entry.tensor.shape)
    if not is_legal_name(entry.name):
        raise ValueError(f"{entry.name!r} is no legal tensor name")
    if len(shape) > MAX_DIMS or not is_inside((entry.offset, shape), entry.logical_shape):
        raise ValueError(
            f"{entry.name}: piece {shape} at {entry.offset} is not inside {entry.logical_shape}"
        )


def _rows(rows: int, share: Share) -> tuple[int, int]:
    return rows * share.index // share.count, rows * (share.index + 1) // share.count


def _writers_of_small(entries: Sequence[StateEntry]) -> dict[int, int]:
    """Position of each entry that is not cut -> which of its holders writes it."""
    small = [
        (-entry.tensor.nbytes, entry.name, position)
        for position, entry in enumerate(entries)
        if entry.share.count > 1 and (entry.tensor.nbytes < CUT_BYTES or not entry.tensor.dim())
    ]
    loads: dict[str, list[int]] = {}
    writers = {}
    for negative_bytes, _, position in sorted(small):
        share = entries[position].share
        load = loads.setdefault(share.holders, [0] * share.count)
        writers[position] = load.index(min(load))
        load[writers[position]] -= negative_bytes
    return writers


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
