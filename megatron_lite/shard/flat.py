"""The layout of flat buffers: arithmetic on names, shapes and offsets, without torch.

Parameters of one key (grid, dtype) share one buffer, in reverse forward order, because
that is the order in which a backward pass completes their gradients. Buckets cut the
buffer into ranges that are reduced together; inside a bucket parameters of one optimizer
group lie side by side, so an update works on a few long segments however many parameters
there are. Invariant: the layout depends on the parameters and the bucket size only, never
on the rank or on whether reductions overlap; so every rank reduces the same buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from megatron_lite.spec.physical import PhysicalParam

# Elements; 64 of them are a cache line or more in every dtype, and a multiple of every
# vector width of the kernels.
ALIGNMENT = 64


@dataclass(frozen=True)
class BufferKey:
    """What all parameters of one buffer have in common; `grid` fixes the reduce group."""

    grid: str
    dtype: str


@dataclass(frozen=True)
class Slot:
    """One stored parameter's place: `buffer[start : start + numel]`."""

    physical: PhysicalParam
    key: BufferKey
    start: int
    numel: int
    bucket: int  # index into FlatLayout.buckets
    uses: int  # gradient contributions per microbatch


@dataclass(frozen=True)
class Bucket:
    """A range of a buffer that is reduced with one collective."""

    key: BufferKey
    start: int
    stop: int
    names: tuple[str, ...]

    @property
    def elements(self) -> int:
        """Length of the message, alignment gaps included."""
        return self.stop - self.start


@dataclass(frozen=True)
class Segment:
    """A range of a buffer whose parameters are all in one optimizer group."""

    key: BufferKey
    group: Hashable
    start: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """All places of one rank's trained parameters.

    Attributes:
        slots: by physical name, in buffer order.
        sizes: elements of each buffer.
        buckets: in the order of their reductions.
        segments: ranges of optimizer groups, ascending within a buffer.
    """

    slots: Mapping[str, Slot]
    sizes: Mapping[BufferKey, int]
    buckets: tuple[Bucket, ...]
    segments: tuple[Segment, ...]


def default_bucket_size(dp_size: int) -> int:
    """Elements of a bucket when `--ddp-bucket-size` is not given (Megatron's rule)."""
    return max(40_000_000, 1_000_000 * dp_size)


def build_layout(
    physicals: Sequence[PhysicalParam],
    *,
    dtype_of: Callable[[PhysicalParam], str],
    group_of: Callable[[PhysicalParam], Hashable],
    bucket_size: int,
    uses: Mapping[str, int] | None = None,
) -> FlatLayout:
    """Lay the trained parameters of one rank out.

    Args:
        physicals: in forward order of their first use on this rank; a tied embedding thus
            lies where its last gradient contribution arises, not its first.
        dtype_of: compute dtype of a parameter ("float32", ...).
        group_of: optimizer group of a parameter.
        bucket_size: a bucket closes when it has at least this many elements.
        uses: use-sites on this rank by physical name, where a rank has not all of them
            (pipeline stages); default all.
    """
    members = _fill_buckets(physicals, dtype_of, bucket_size)
    slots: dict[str, Slot] = {}
    sizes: dict[BufferKey, int] = {}
    buckets: list[Bucket] = []
    segments: list[Segment] = []
    for key, bucket in members:
        start = sizes.get(key, 0)
        ordered = _side_by_side(bucket, group_of)
        cursor = start
        for physical in ordered:
            numel = math.prod(physical.shape)
            count = len(physical.uses) if uses is None else uses[physical.name]
            slots[physical.name] = Slot(physical, key, cursor, numel, len(buckets), count)
            stop = cursor + _aligned(numel)
            _extend(segments, Segment(key, group_of(physical), cursor, stop))
            cursor = stop
        sizes[key] = cursor
        buckets.append(Bucket(key, start, cursor, tuple(p.name for p in ordered)))
    return FlatLayout(slots, sizes, tuple(buckets), tuple(segments))


def _fill_buckets(
    physicals: Sequence[PhysicalParam],
    dtype_of: Callable[[PhysicalParam], str],
    bucket_size: int,
) -> list[tuple[BufferKey, list[PhysicalParam]]]:
    """Members of every bucket, buckets ordered by when their last gradient is complete."""
    filling: dict[BufferKey, list[PhysicalParam]] = {}
    filled: dict[BufferKey, int] = {}  # elements of the bucket that is being filled
    last: dict[BufferKey, int] = {}
    closed: list[tuple[int, BufferKey, list[PhysicalParam]]] = []
    for position, physical in enumerate(reversed(physicals)):
        key = BufferKey(physical.views[0].spec.grid, dtype_of(physical))
        bucket = filling.setdefault(key, [])
        bucket.append(physical)
        filled[key] = filled.get(key, 0) + _aligned(math.prod(physical.shape))
        last[key] = position
        if filled[key] >= bucket_size:
            closed.append((position, key, filling.pop(key)))
            filled[key] = 0
    closed += [(last[key], key, bucket) for key, bucket in filling.items()]
    return [(key, bucket) for _, key, bucket in sorted(closed, key=lambda entry: entry[0])]


def _side_by_side(
    bucket: Sequence[PhysicalParam], group_of: Callable[[PhysicalParam], Hashable]
) -> list[PhysicalParam]:
    """The bucket's members with those of one group adjacent, else in their order."""
    by_group: dict[Hashable, list[PhysicalParam]] = {}
    for physical in bucket:
        by_group.setdefault(group_of(physical), []).append(physical)
    return [physical for group in by_group.values() for physical in group]


def _extend(segments: list[Segment], new: Segment) -> None:
    """Append a segment, or lengthen the last one when it continues it."""
    if segments:
        last = segments[-1]
        if (last.key, last.group, last.stop) == (new.key, new.group, new.start):
            segments[-1] = Segment(last.key, last.group, last.start, new.stop)
            return
    segments.append(new)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
