"""Adafactor over the buckets of one rank: its boxes, its statistics, their pieces.

Every grid has statistics of its own, because its data and tensor groups are its own.
Statistics are whole on every rank of a shard group, and saved once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_lite.mesh.groups import local_group
from megatron_lite.optim.adafactor import Adafactor, AdafactorUpdates, OwnedPart
from megatron_lite.optim.elementwise import GroupTensors
from megatron_lite.optim.factored import Spread
from megatron_lite.optim.groups import StepRates
from megatron_lite.optim.segments import KindState, OwnedSegment, RankPlace, find_segment
from megatron_lite.shard.buffers import FlatBuffers
from megatron_lite.shard.pieces import StatePiece

_Key = tuple[str, tuple[int, ...]]


class FactoredUpdates:
    """Updates all groups by Adafactor."""

    def __init__(
        self,
        rule: Adafactor,
        buffers: FlatBuffers,
        segments: Sequence[OwnedSegment],
        groups: Sequence[GroupTensors],
        weights: Mapping[int, Tensor],
        state: Mapping[str, KindState],
        place: RankPlace,
    ) -> None:
        """Find the parts and allocate the statistics.

        Args:
            rule: the hyper-parameters.
            buffers: of this rank.
            segments: owned, all.
            groups: their tensors.
            weights: what is updated, by bucket.
            state: of the weights' shape, by kind.
            place: of this rank.
        """
        self._groups, self._place = groups, place
        parts = list(_owned_parts(buffers, segments, weights, state))
        self._updates: list[AdafactorUpdates] = []
        dtype = getattr(torch, buffers.precision.master)
        for grid in dict.fromkeys(piece.spec.grid for piece in buffers.pieces):
            shard = local_group("shard")
            if buffers.ownership.stage > 0:
                shard = buffers.ownership.groups[grid].shard
            self._updates.append(
                AdafactorUpdates(
                    rule,
                    [(p.spec, p.box) for p in buffers.pieces if p.spec.grid == grid],
                    [part for part in parts if part.spec.grid == grid],
                    Spread(shard, place.tensor_groups[grid], dtype, buffers.device),
                )
            )

    def step(self, update: int, rates: StepRates, clip: float | Tensor) -> None:
        """Update weights, state and parameters; the gradients are used up.

        Comm: see `AdafactorUpdates.step`.
        """
        for tensors in self._groups:
            tensors.scale_gradients(clip)
        for updates in self._updates:
            updates.step(update, rates.of)
        for tensors in self._groups:
            tensors.round()

    def state_pieces(self) -> Iterator[StatePiece]:
        """Logical pieces of the statistics; writable."""
        for updates in self._updates:
            for kind, spec, tensor in updates.moments.statistics():
                if tensor.numel():
                    yield StatePiece(kind, spec, tensor, *self._place.of(spec))


def _owned_parts(
    buffers: FlatBuffers,
    segments: Sequence[OwnedSegment],
    weights: Mapping[int, Tensor],
    state: Mapping[str, KindState],
) -> Iterator[OwnedPart]:
    found: dict[str, dict[_Key, Tensor]] = {
        kind: {(p.spec.name, p.box.offset): p.tensor for p in tensors.state_pieces(kind)}
        for kind, tensors in state.items()
    }
    for piece in buffers.owned_pieces:
        segment = find_segment(segments, piece)
        if piece.box.elements == 0 or segment is None:
            continue
        key = (piece.spec.name, piece.box.offset)
        yield OwnedPart(
            piece.spec,
            piece.box,
            segment.group,
            piece.of(weights),
            piece.of(buffers.owned_gradients),
            found.get("exp_avg", {}).get(key),
            found.get("exp_avg_sq", {}).get(key),
        )
