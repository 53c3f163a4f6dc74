"""Logical parameters inside buckets, and the ranges that a norm runs over.

A stored parameter is a stack of logical pieces along dim 0 (spec/physical.py), so each
piece is one contiguous range of its bucket. A shard cuts such a range anywhere; what it
holds of a piece is again a few boxes (part of a row, full rows, part of a row), so that
everything that speaks about logical tensors - checkpoint, gradient dump, initial values -
reads one index and knows nothing of shards. Invariant: a piece never contains padding
rows, and over all ranks the owned ranges contain every logical element once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_lite.config.plan import ParallelShape
from megatron_lite.shard.flat import FlatLayout, Window
from megatron_lite.shard.ownership import Ownership
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.shards import Box, Replica, is_owner, local_box, replica


@dataclass(frozen=True)
class Piece:
    """This rank's part of one logical parameter: elements [start, stop) of a bucket.

    Attributes:
        spec: the logical parameter.
        box: region of the logical tensor; empty when the rank holds only padding.
        bucket: index of the bucket.
        start: first element, counted from the start of what is held of the bucket.
        stop: end of the held rows, padding rows included.
        owned: whether this rank speaks for the region, over all replicas.
        speaks_for_tensor: the same, leaving data and context replicas aside.
        replica: which of the region's copies this is.
    """

    spec: ParamSpec
    box: Box
    bucket: int
    start: int
    stop: int
    owned: bool
    speaks_for_tensor: bool
    replica: Replica

    def of(self, tensors: Mapping[int, Tensor]) -> Tensor:
        """View of one bucket's tensor in the box's shape, without padding."""
        flat = tensors[self.bucket][self.start : self.start + self.box.elements]
        return flat.view(self.box.shape)


class StatePiece(NamedTuple):
    """A logical piece of one kind of state ("param", "master", "exp_avg", "grad", ...)."""

    kind: str
    spec: ParamSpec
    tensor: Tensor  # writable view of box.shape
    box: Box
    owned: bool
    replica: Replica


class Range(NamedTuple):
    """Elements [start, stop) of the tensor of a bucket."""

    bucket: int
    start: int
    stop: int


def find_pieces(
    layout: FlatLayout,
    coordinates: Mapping[str, Mapping[str, int]],
    parallel: ParallelShape,
) -> tuple[Piece, ...]:
    """Index the logical parameters of a rank's whole buckets, in buffer order.

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
                    bucket=slot.bucket,
                    start=start,
                    stop=start + view.rows * row,
                    owned=is_owner(spec, coordinate, parallel),
                    speaks_for_tensor=is_owner(spec, same_data, parallel),
                    replica=replica(spec, coordinate, parallel),
                )
            )
    return tuple(pieces)


def cut_pieces(
    pieces: Sequence[Piece],
    layout: FlatLayout,
    ownership: Ownership,
    coordinates: Mapping[str, Mapping[str, int]],
    parallel: ParallelShape,
) -> tuple[Piece, ...]:
    """What a rank owns of `pieces`, counted from the start of its windows.

    Args:
        pieces: of whole buckets; pieces of buckets that are not cut stay as they are.
        layout, coordinates, parallel: as for `find_pieces`.
        ownership: the windows.
    """
    cut: list[Piece] = []
    for piece in pieces:
        bucket = layout.buckets[piece.bucket]
        if not ownership.is_cut(bucket):
            cut.append(piece)
            continue
        window, spec = ownership.window(bucket), piece.spec
        at = ownership.as_owner(bucket, coordinates[spec.grid], parallel)
        copy = replica(spec, *at)
        held = window.cut(piece.start, piece.start + piece.box.elements)
        first, start = window.start + held.start - piece.start, held.start
        for box in boxes_of_range(piece.box, first, first + held.elements):
            stop = start + box.elements
            cut.append(
                Piece(
                    spec, box, piece.bucket, start, stop,
                    copy.index == 0, piece.speaks_for_tensor, copy,
                )
            )  # fmt: skip
            start = stop
    return tuple(cut)


def boxes_of_range(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Cut elements [start, stop) of a box, in row-major order, into boxes, in that order.

    At most 2n - 1 for n dims.
    """
    if start >= stop:
        return
    if len(box.shape) == 1:
        yield Box((box.offset[0] + start,), (stop - start,))
        return
    row = math.prod(box.shape[1:])
    first, last = -(-start // row), stop // row  # full rows [first, last)
    inner = Box(box.offset[1:], box.shape[1:])
    if first > last:  # inside one row
        yield from _in_row(box, inner, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(box, inner, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((box.offset[0] + first, *box.offset[1:]), (last - first, *box.shape[1:]))
    if last * row < stop:
        yield from _in_row(box, inner, last, 0, stop - last * row)


def _in_row(box: Box, inner: Box, row: int, start: int, stop: int) -> Iterator[Box]:
    for part in boxes_of_range(inner, start, stop):
        yield Box((box.offset[0] + row, *part.offset), (1, *part.shape))


def state_pieces(
    kind: str, tensors: Mapping[int, Tensor], pieces: Sequence[Piece]
) -> Iterator[StatePiece]:
    """View every non-empty logical piece of the buckets' tensors."""
    for piece in pieces:
        if piece.box.elements and piece.bucket in tensors:
            tensor = piece.of(tensors)
            yield StatePiece(kind, piece.spec, tensor, piece.box, piece.owned, piece.replica)


def norm_ranges(
    pieces: Sequence[Piece],
    windows: Mapping[int, Window],
    copies: Mapping[int, tuple[int, int]],
) -> tuple[Range, ...]:
    """Ranges whose squares this rank adds to the global norm.

    After the reductions the data ranks with the same window hold equal gradients. So they
    share the work: of the elements this tensor rank speaks for, each takes its share.
    Neighbouring ranges grow together over alignment gaps, which are always zero.

    Args:
        pieces: of whole buckets, in buffer order.
        windows: bucket -> what this rank holds of it.
        copies: bucket -> (index, count) among the data ranks with the same window.

    Returns:
        Disjoint ranges, counted from the windows' starts; over all ranks every logical
        element is in one of them.
    """
    ranges: list[Range] = []
    is_open = False  # the last range may still grow
    for piece in pieces:
        stop = piece.start + piece.box.elements
        if not piece.speaks_for_tensor or stop == piece.start:
            is_open = False
            continue
        if is_open and ranges[-1].bucket == piece.bucket:
            ranges[-1] = ranges[-1]._replace(stop=stop)
        else:
            ranges.append(Range(piece.bucket, piece.start, stop))
        # Padding rows end a range: their gradients are not logical elements.
        is_open = stop == piece.stop
    held = cut_ranges(ranges, windows)
    shared: list[Range] = []
    for share in dict.fromkeys(copies.values()):
        shared += _share([entry for entry in held if copies[entry.bucket] == share], *share)
    return tuple(shared)


def cut_ranges(ranges: Sequence[Range], windows: Mapping[int, Window]) -> list[Range]:
    """What of the ranges lies in the windows, counted from the windows' starts."""
    held = []
    for bucket, start, stop in ranges:
        window = windows[bucket].cut(start, stop)
        if window.elements:
            held.append(Range(bucket, window.start, window.stop))
    return held


def _share(ranges: Sequence[Range], index: int, size: int) -> list[Range]:
    """The index-th of `size` equal shares of the ranges' elements."""
    total = sum(entry.stop - entry.start for entry in ranges)
    first, end = total * index // size, total * (index + 1) // size
    taken, passed = [], 0
    for bucket, start, stop in ranges:
        low = max(start, start + first - passed)
        high = min(stop, start + end - passed)
        if low < high:
            taken.append(Range(bucket, low, high))
        passed += stop - start
    return taken
