"""The layout of flat buffers: arithmetic on names, shapes and offsets, without torch.

Parameters that are reduced together form a bucket, one range of memory; buckets follow in
reverse forward order, because that is the order in which a backward pass completes their
gradients. Inside a bucket parameters of one optimizer group lie side by side, so an update
works on a few long segments however many parameters there are. Every bucket divides into
equal aligned shards, one per rank of the shard group; a shard may begin and end anywhere in
a parameter. Invariant: the layout depends on the parameters, the bucket size and the number
of shards only, never on the rank or on whether reductions overlap; so every rank reduces
the same buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from megatron_lite.spec.physical import PhysicalParam

# Elements; 64 of them are a cache line or more in every dtype, and a multiple of every
# vector width of the kernels.
ALIGNMENT = 64
TIED = "tied_ends"


@dataclass(frozen=True)
class BufferKey:
    """What all parameters of one bucket have in common; `grid` fixes the reduce group."""

    grid: str
    dtype: str


@dataclass(frozen=True)
class Slot:
    """One stored parameter's place: elements [start, start + numel) of a bucket."""

    physical: PhysicalParam
    bucket: int
    start: int
    numel: int
    uses: int  # gradient contributions per microbatch


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced with one collective.

    Attributes:
        key: grid and dtype.
        elements: length of the message, alignment gaps and the padding of shards included.
        shards: equal parts that the elements divide into.
        names: stored parameters, in order.
    """

    key: BufferKey
    elements: int
    shards: int
    names: tuple[str, ...]

    def shard(self, index: int) -> Window:
        """Elements of one of the equal parts."""
        length = self.elements // self.shards
        return Window(index * length, (index + 1) * length)


@dataclass(frozen=True)
class Window:
    """Elements [start, stop) of a bucket."""

    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Its length."""
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> Window:
        """What of [start, stop) lies inside, counted from the window's start; may be empty."""
        low, high = max(start, self.start), min(stop, self.stop)
        return Window(low - self.start, max(high, low) - self.start)


@dataclass(frozen=True)
class Segment:
    """A range of a bucket whose parameters are all in one optimizer group."""

    bucket: int
    group: Hashable
    start: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """All places of one rank's trained parameters.

    Attributes:
        slots: by physical name, in buffer order.
        buckets: in the order of their reductions.
        segments: ranges of optimizer groups, ascending within a bucket.
    """

    slots: Mapping[str, Slot]
    buckets: tuple[Bucket, ...]
    segments: tuple[Segment, ...]


def default_bucket_size(dp_size: int, physicals: Sequence[PhysicalParam]) -> int:
    """Elements of a bucket when `--ddp-bucket-size` is not given.

    Megatron's rule, which suits large models; a smaller one gets eight buckets all the same,
    or its gradients would leave when the backward pass is over. Below a million elements
    a message costs more in latency than it hides.
    """
    elements = sum(math.prod(physical.shape) for physical in physicals)
    return min(max(40_000_000, 1_000_000 * dp_size), max(1_000_000, elements // 8))


def build_layout(
    physicals: Sequence[PhysicalParam],
    *,
    dtype_of: Callable[[PhysicalParam], str],
    group_of: Callable[[PhysicalParam], Hashable],
    bucket_size: int,
    shards: Mapping[str, int] | None = None,
    unit_of: Callable[[PhysicalParam], Hashable] = lambda physical: None,
) -> FlatLayout:
    """Lay the trained parameters of one rank out.

    Args:
        physicals: in forward order of their first use on this rank; a tied embedding thus
            lies where its last gradient contribution arises, not its first.
        dtype_of: compute dtype of a parameter ("float32", ...).
        group_of: optimizer group of a parameter.
        bucket_size: a bucket closes when it has at least this many elements.
        shards: grid -> number of equal parts of its buckets; default 1.
        unit_of: parameters of different units are in different buckets. Whatever it says,
            a parameter whose copy lies in another layout (tied ends of a pipeline) has a
            bucket of its own: both layouts then cut it at the same elements.
    """
    slots: dict[str, Slot] = {}
    buckets: list[Bucket] = []
    segments: list[Segment] = []
    for key, members in _fill_buckets(physicals, dtype_of, bucket_size, unit_of):
        ordered, cursor = _side_by_side(members, group_of), 0
        for physical in ordered:
            numel = math.prod(physical.shape)
            place = Slot(physical, len(buckets), cursor, numel, len(physical.uses))
            slots[physical.name] = place
            stop = cursor + _aligned(numel, ALIGNMENT)
            _extend(segments, Segment(place.bucket, group_of(physical), cursor, stop))
            cursor = stop
        parts = (shards or {}).get(key.grid, 1)
        elements = _aligned(cursor, ALIGNMENT * parts)
        buckets.append(Bucket(key, elements, parts, tuple(p.name for p in ordered)))
    return FlatLayout(slots, tuple(buckets), tuple(segments))


def _fill_buckets(
    physicals: Sequence[PhysicalParam],
    dtype_of: Callable[[PhysicalParam], str],
    bucket_size: int,
    unit_of: Callable[[PhysicalParam], Hashable],
) -> list[tuple[BufferKey, list[PhysicalParam]]]:
    """Members of every bucket, buckets ordered by when their last gradient is complete."""
    filling: dict[tuple[BufferKey, Hashable], list[PhysicalParam]] = {}
    filled: dict[tuple[BufferKey, Hashable], int] = {}  # elements of the one being filled
    last: dict[tuple[BufferKey, Hashable], int] = {}
    closed: list[tuple[int, BufferKey, list[PhysicalParam]]] = []
    for position, physical in enumerate(reversed(physicals)):
        spec = physical.views[0].spec
        unit = physical.name if TIED in spec.partial_axes else unit_of(physical)
        place = (BufferKey(spec.grid, dtype_of(physical)), unit)
        bucket = filling.setdefault(place, [])
        bucket.append(physical)
        filled[place] = filled.get(place, 0) + _aligned(math.prod(physical.shape), ALIGNMENT)
        last[place] = position
        if filled[place] >= bucket_size:
            closed.append((position, place[0], filling.pop(place)))
            filled[place] = 0
    closed += [(last[place], place[0], bucket) for place, bucket in filling.items()]
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
        if (last.bucket, last.group, last.stop) == (new.bucket, new.group, new.start):
            segments[-1] = Segment(last.bucket, last.group, last.start, new.stop)
            return
    segments.append(new)


def _aligned(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
