"""What one rank owns of the optimizer groups, and where the state of each kind lies.

A segment is a run of parameters of one group in what is owned of a bucket. State of a kind
has one tensor per bucket, as long as the segments whose groups have that kind: where all
have it, as long as what is owned, padding included.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megatron_lite.config.plan import ParallelShape
from megatron_lite.mesh.groups import Group
from megatron_lite.optim.groups import ParamGroup
from megatron_lite.optim.state_home import StateHome
from megatron_lite.shard.buffers import FlatBuffers
from megatron_lite.shard.pieces import Piece, StatePiece, state_pieces
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.shards import Box, Replica, local_box, replica


@dataclass(frozen=True, eq=False)
class RankPlace:
    """Where a rank stands, for state that is not cut like a bucket.

    Attributes:
        coordinates: grid name -> its coordinate.
        parallel: sizes of the axes.
        tensor_groups: grid name -> the group that matrices are cut over.
    """

    coordinates: Mapping[str, Mapping[str, int]]
    parallel: ParallelShape
    tensor_groups: Mapping[str, Group]

    def of(self, spec: ParamSpec) -> tuple[Box, bool, Replica]:
        """The region that the rank holds, whether it speaks for it, and which copy it is."""
        coordinate = self.coordinates[spec.grid]
        copy = replica(spec, coordinate, self.parallel)
        return local_box(spec, coordinate, self.parallel), copy.index == 0, copy


@dataclass(frozen=True)
class OwnedSegment:
    """Elements [start, stop) of what is owned of a bucket."""

    bucket: int
    group: ParamGroup
    start: int
    stop: int

    def of(self, tensors: Mapping[int, Tensor]) -> Tensor:
        """Its part of tensors that are as long as what is owned."""
        return tensors[self.bucket][self.start : self.stop]


def owned_segments(buffers: FlatBuffers) -> tuple[OwnedSegment, ...]:
    """The non-empty segments of a rank, ascending within a bucket."""
    found = []
    for segment in buffers.layout.segments:
        group = segment.group
        if not isinstance(group, ParamGroup):
            raise TypeError(f"the layout was built with groups {type(group).__name__}")
        window = buffers.windows[segment.bucket].cut(segment.start, segment.stop)
        if window.elements:
            found.append(OwnedSegment(segment.bucket, group, window.start, window.stop))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class KindState:
    """State of one kind.

    Attributes:
        tensors: by bucket.
        places: segment -> its start in the bucket's tensor.
        pieces: the logical parameters inside.
    """

    tensors: Mapping[int, Tensor]
    places: Mapping[OwnedSegment, int]
    pieces: tuple[Piece, ...]

    def of(self, segment: OwnedSegment) -> Tensor:
        """The state of a segment."""
        start = self.places[segment]
        return self.tensors[segment.bucket][start : start + segment.stop - segment.start]

    def state_pieces(self, kind: str) -> Iterator[StatePiece]:
        """Logical pieces, as `kind`."""
        return state_pieces(kind, self.tensors, self.pieces)


def allocate_state(
    buffers: FlatBuffers,
    segments: Sequence[OwnedSegment],
    kinds_of: Callable[[ParamGroup], tuple[str, ...]],
    home: StateHome,
) -> dict[str, KindState]:
    """Zero state of every kind that some group has, in the kind's dtype.

    Args:
        buffers: of this rank.
        segments: of `owned_segments`.
        kinds_of: state kinds of a group.
        home: where it lies.
    """
    groups = {s.group for s in buffers.layout.segments if isinstance(s.group, ParamGroup)}
    by_group = {group: kinds_of(group) for group in sorted(groups)}
    kinds = dict.fromkeys(kind for found in by_group.values() for kind in found)
    state = {}
    for kind in kinds:
        if all(kind in found for found in by_group.values()):
            state[kind] = _whole(buffers, segments, kind, home)
        else:
            members = [s for s in segments if kind in by_group[s.group]]
            state[kind] = _packed(buffers, members, kind, home)
    return state


def _whole(
    buffers: FlatBuffers, segments: Sequence[OwnedSegment], kind: str, home: StateHome
) -> KindState:
    dtype = buffers.precision.state(kind)
    tensors = {
        index: home.zeros(index, window.elements, dtype)
        for index, window in buffers.windows.items()
    }
    return KindState(tensors, {s: s.start for s in segments}, buffers.owned_pieces)


def _packed(
    buffers: FlatBuffers, segments: Sequence[OwnedSegment], kind: str, home: StateHome
) -> KindState:
    """Segments of a bucket behind one another."""
    lengths: dict[int, int] = {}
    places: dict[OwnedSegment, int] = {}
    for segment in segments:
        places[segment] = lengths.get(segment.bucket, 0)
        lengths[segment.bucket] = places[segment] + segment.stop - segment.start
    pieces = []
    for piece in buffers.owned_pieces:
        found = find_segment(segments, piece)
        if found is not None:
            shift = places[found] - found.start
            pieces.append(replace(piece, start=piece.start + shift, stop=piece.stop + shift))
    dtype = buffers.precision.state(kind)
    tensors = {i: home.zeros(i, length, dtype) for i, length in lengths.items()}
    return KindState(tensors, places, tuple(pieces))


def find_segment(segments: Sequence[OwnedSegment], piece: Piece) -> OwnedSegment | None:
    """The segment that an owned piece lies in; None where it is none of these.

    Args:
        segments: ascending within each bucket, buckets ascending.
        piece: of `buffers.owned_pieces`.
    """
    at = bisect.bisect_right(
        segments, (piece.bucket, piece.start), key=lambda s: (s.bucket, s.start)
    )
    if at == 0:
        return None
    found = segments[at - 1]
    return found if found.bucket == piece.bucket and piece.start < found.stop else None
