"""Arithmetic of boxes: rectangular regions (offset, shape) of a logical tensor.

Shards hold boxes, readers ask for boxes, and a checkpoint is complete when the boxes of
each logical tensor tile it: every element in exactly one.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

Dims = tuple[int, ...]
Region = tuple[Dims, Dims]  # (offset, shape)


def is_inside(region: Region, shape: Dims) -> bool:
    """Whether `region` lies within a tensor of `shape`, with the same number of dims."""
    offset, extent = region
    return len(offset) == len(extent) == len(shape) and all(
        low >= 0 and size >= 0 and low + size <= full
        for low, size, full in zip(offset, extent, shape, strict=True)
    )


def intersect(a: Region, b: Region) -> Region | None:
    """Return the common part of two regions of one tensor, None if it has no element."""
    offset = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    stop_a = (low + size for low, size in zip(*a, strict=True))
    stop_b = (low + size for low, size in zip(*b, strict=True))
    shape = tuple(min(x, y) - low for x, y, low in zip(stop_a, stop_b, offset, strict=True))
    return (offset, shape) if all(size > 0 for size in shape) else None


def relative_slices(region: Region, origin: Dims) -> tuple[slice, ...]:
    """Return the slices that select `region` in a buffer whose first element is `origin`."""
    return tuple(
        slice(low - base, low - base + size)
        for low, size, base in zip(region[0], region[1], origin, strict=True)
    )


def contiguous_range(region: Region, shape: Dims) -> tuple[int, int] | None:
    """Return (first, stop) when `region` is one run of elements of a row-major `shape`."""
    offset, extent = region
    first, below, whole = 0, 1, True
    for low, size, full in zip(reversed(offset), reversed(extent), reversed(shape), strict=True):
        if not whole and size != 1:
            return None
        first += low * below
        below *= full
        whole = whole and size == full
    return first, first + math.prod(extent)


def tiling_fault(shape: Dims, regions: Sequence[Region]) -> str | None:
    """Say why `regions` do not cover a tensor of `shape` exactly once; None if they do."""
    for region in regions:
        if not is_inside(region, shape):
            return f"region {region} lies outside of shape {shape}"
    if math.prod(shape) == 0:
        return None if regions else "no region"
    solid = [region for region in regions if math.prod(region[1])]
    return _slab_fault(shape, solid, ())


def _slab_fault(shape: Dims, regions: Sequence[Region], corner: Dims) -> str | None:
    """Cut dim len(corner) at every edge and look into each slab: n log n for regular grids."""
    dim = len(corner)
    if dim == len(shape):
        if len(regions) == 1:
            return None
        return f"element {corner} is in {len(regions)} files"
    edges = {0, shape[dim]}
    for offset, extent in regions:
        edges.update((offset[dim], offset[dim] + extent[dim]))
    cuts = sorted(edges)
    slabs: list[list[Region]] = [[] for _ in cuts[1:]]
    for region in regions:
        first = bisect_left(cuts, region[0][dim])
        stop = bisect_left(cuts, region[0][dim] + region[1][dim])
        for index in range(first, stop):
            slabs[index].append(region)
    for low, slab in zip(cuts, slabs, strict=False):
        point = (*corner, low)
        if not slab:
            rest = (0,) * (len(shape) - dim - 1)
            return f"element {(*point, *rest)} is in no file"
        fault = _slab_fault(shape, slab, point)
        if fault is not None:
            return fault
    return None
