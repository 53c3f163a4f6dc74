"""Which region of a logical parameter a rank holds, and which rank owns an element.

A piece is a contiguous range of the cut dim. Pieces are equal in length; when the dim is
padded (vocabulary) the last pieces may reach into the padding, which belongs to no logical
tensor: a `Box` never includes it. With fewer pieces than ranks on the axis, axis/parts
consecutive ranks hold the same piece.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.config.plan import ParallelShape
from megatron_lite.spec.params import Cut, ParamSpec


@dataclass(frozen=True)
class Box:
    """A rectangular region of a logical tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements inside."""
        return math.prod(self.shape)


def axis_size(parallel: ParallelShape, axis: str) -> int:
    """Length of an axis by its name ("tp", "cp", "dp", "pp", "ep", "etp", "edp")."""
    return int(getattr(parallel, axis))


def _piece_length(spec: ParamSpec, cut: Cut) -> int:
    padded = spec.padded if cut.dim == 0 else None
    length = spec.shape[cut.dim] if padded is None else padded
    if length % cut.parts:
        raise ValueError(f"{spec.name}: {length} rows do not divide into {cut.parts} pieces")
    return length // cut.parts


def _piece_index(cut: Cut, coordinate: Mapping[str, int], parallel: ParallelShape) -> int:
    ranks_per_piece = axis_size(parallel, cut.axis) // cut.parts
    return coordinate[cut.axis] // ranks_per_piece


def local_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Shape that a rank stores, padding rows included."""
    shape = list(spec.shape)
    for cut in spec.cuts:
        shape[cut.dim] = _piece_length(spec, cut)
    return tuple(shape)


def local_box(spec: ParamSpec, coordinate: Mapping[str, int], parallel: ParallelShape) -> Box:
    """Region of the logical tensor that the rank at `coordinate` holds.

    The held tensor starts at the box's offset; rows beyond the box are padding. The box is
    empty when all of a rank's rows are padding.
    """
    offset, shape = [0] * len(spec.shape), list(spec.shape)
    for cut in spec.cuts:
        length = _piece_length(spec, cut)
        start = _piece_index(cut, coordinate, parallel) * length
        stop = min(start + length, spec.shape[cut.dim])
        offset[cut.dim] = min(start, spec.shape[cut.dim])
        shape[cut.dim] = max(stop - start, 0)
    return Box(tuple(offset), tuple(shape))


@dataclass(frozen=True)
class Replica:
    """Which of the equal copies of a region a rank holds.

    Attributes:
        index: 0 is the owner, who speaks for the region where one rank has to.
        count: copies of the region over all ranks.
        axes: what the ranks of the copies differ in. On one rank, regions of equal `axes`
            are held by the same set of ranks.
    """

    index: int = 0
    count: int = 1
    axes: str = ""


def replica(spec: ParamSpec, coordinate: Mapping[str, int], parallel: ParallelShape) -> Replica:
    """Number the copies of the region that the rank at `coordinate` holds.

    Copies are on the ranks of the data and context axes, of the axes the parameter is not
    cut over, on those that share a piece (fewer pieces than ranks on the axis), and on the
    pipeline ranks that hold it.
    """
    index, count, names = 0, 1, [spec.grid]
    axes = ("tp", "cp", "dp") if spec.grid == "dense" else ("etp", "ep", "edp")
    parts = {cut.axis: cut.parts for cut in spec.cuts}
    for axis in axes:
        size, position = axis_size(parallel, axis), coordinate.get(axis, 0)
        if axis in parts:
            size //= parts[axis]
            position %= size
        index += position * count
        count *= size
        names.append(f"{axis}{size}")
    if spec.holders:
        index += spec.holders.index(coordinate["pp"]) * count
        count *= len(spec.holders)
        names.append(f"pp{len(spec.holders)}")
    return Replica(index, count, "-".join(names))


def is_owner(spec: ParamSpec, coordinate: Mapping[str, int], parallel: ParallelShape) -> bool:
    """Whether this rank speaks for its region (norm, dump): exactly one of its copies does."""
    return replica(spec, coordinate, parallel).index == 0


def copies(spec: ParamSpec, parallel: ParallelShape) -> int:
    """How many ranks of one data replica hold each element (1 when fully cut over tp)."""
    axis = "tp" if spec.grid == "dense" else "etp"
    return axis_size(parallel, axis) // spec.tensor_parts
