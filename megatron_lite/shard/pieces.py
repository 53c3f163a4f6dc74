"""Logical parameters inside flat buffers, and the ranges that a norm runs over.

A stored parameter is a stack of logical pieces along dim 0 (spec/physical.py), so each
piece is one contiguous range of its buffer. Everything that speaks about logical tensors -
norm, checkpoint, gradient dump, initial values - reads the same index. Invariant: a
piece never contains padding rows, and over all ranks the owned ranges contain every
logical element once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_lite.config.plan import ParallelShape
from megatron_lite.shard.flat import BufferKey, FlatLayout
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.shards import Box, Replica, is_owner, local_box, replica


@dataclass(frozen=True)
class Piece:
    """This rank's part of one logical parameter: `buffer[start : start + box.elements]`.

    Attributes:
        spec: the logical parameter.
        box: region of the logical tensor; empty when the rank holds only padding.
        key: which buffer.
        start: first element in the buffer.
        stop: end of the held rows, padding rows included.
        owned: whether this rank speaks for the region, over all replicas.
        speaks_for_tensor: the same, leaving data and context replicas aside.
        replica: which of the region's copies this is.
    """

    spec: ParamSpec
    box: Box
    key: BufferKey
    start: int
    stop: int
    owned: bool
    speaks_for_tensor: bool
    replica: Replica

    def of(self, buffer: Tensor) -> Tensor:
        """View of a flat buffer in the box's shape, without padding."""
        return buffer[self.start : self.start + self.box.elements].view(self.box.shape)


class StatePiece(NamedTuple):
    """A logical piece of one kind of state ("param", "master", "exp_avg", "grad", ...)."""

    kind: str
    spec: ParamSpec
    tensor: Tensor  # writable view of box.shape
    box: Box
    owned: bool
    replica: Replica


class Range(NamedTuple):
    """`buffer[start:stop]` of the buffer `key`."""

    key: BufferKey
    start: int
    stop: int


def find_pieces(
    layout: FlatLayout,
    coordinates: Mapping[str, Mapping[str, int]],
    parallel: ParallelShape,
) -> tuple[Piece, ...]:
    """Index the logical parameters of a rank's buffers, in buffer order.

    Args:
        layout: of this rank.
        coordinates: grid name -> the rank's coordinate on it.
        parallel: sizes of the axes.
    """
    pieces = []
    for slot in layout.slots.values():
        row = math.prod(slot.physical.shape[1:])
        for view in slot.physical.views:
            spec = view.spec
            coordinate = coordinates[spec.grid]
            box = local_box(spec, coordinate, parallel)
            if box.shape[1:] != slot.physical.shape[1:]:
                raise ValueError(f"{spec.name}: a piece of {box.shape} is not a range of rows")
            same_data = {**coordinate, **dict.fromkeys(("dp", "cp", "edp"), 0)}
            start = slot.start + view.start * row
            pieces.append(
                Piece(
                    spec=spec,
                    box=box,
                    key=slot.key,
                    start=start,
                    stop=start + view.rows * row,
                    owned=is_owner(spec, coordinate, parallel),
                    speaks_for_tensor=is_owner(spec, same_data, parallel),
                    replica=replica(spec, coordinate, parallel),
                )
            )
    return tuple(pieces)


def state_pieces(
    kind: str, buffers: Mapping[BufferKey, Tensor], pieces: Sequence[Piece]
) -> Iterator[StatePiece]:
    """View every non-empty logical piece of flat buffers."""
    for piece in pieces:
        if piece.box.elements:
            tensor = piece.of(buffers[piece.key])
            yield StatePiece(kind, piece.spec, tensor, piece.box, piece.owned, piece.replica)


def norm_ranges(pieces: Sequence[Piece], part: Mapping[str, tuple[int, int]]) -> tuple[Range, ...]:
    """Ranges whose squares this rank adds to the global norm.

    After the reductions the ranks of a data group hold equal gradients. So they share the
    work: of the elements this tensor rank speaks for, each data rank takes its share.
    Neighbouring ranges grow together over alignment gaps, which are always zero.

    Args:
        pieces: in buffer order.
        part: grid -> (index, size) of this rank in the grid's data group.

    Returns:
        Disjoint ranges; over all ranks every logical element is in one of them.
    """
    ranges: list[Range] = []
    open_key: BufferKey | None = None  # the buffer in which the last range may still grow
    for piece in pieces:
        stop = piece.start + piece.box.elements
        if not piece.speaks_for_tensor or stop == piece.start:
            open_key = None
            continue
        if open_key == piece.key:
            ranges[-1] = ranges[-1]._replace(stop=stop)
        else:
            ranges.append(Range(piece.key, piece.start, stop))
        # Padding rows end a range: their gradients are not logical elements.
        open_key = piece.key if stop == piece.stop else None
    shared: list[Range] = []
    for grid in dict.fromkeys(piece.key.grid for piece in pieces):
        of_grid = [entry for entry in ranges if entry.key.grid == grid]
        shared += _share(of_grid, *part[grid])
    return tuple(shared)


def _share(ranges: Sequence[Range], index: int, size: int) -> list[Range]:
    """The index-th of `size` equal shares of the ranges' elements."""
    total = sum(entry.stop - entry.start for entry in ranges)
    first, end = total * index // size, total * (index + 1) // size
    taken, passed = [], 0
    for key, start, stop in ranges:
        low = max(start, start + first - passed)
        high = min(stop, start + end - passed)
        if low < high:
            taken.append(Range(key, low, high))
        passed += stop - start
    return taken
