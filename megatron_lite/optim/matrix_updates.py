"""Muon over shards: momentum where the gradient is owned, matrices whole for a moment.

Bucket after bucket: the owned directions are gathered, the matrices that touch the owned
range are orthogonalised, and its own part updates the owned weights. The next bucket's
gather is on the wire meanwhile. Per update a bucket with matrices costs one all-gather of
its elements over the shard group (none without sharding) and one over tp of the cut
matrices that a rank works on; a matrix on a border of shards is worked on by both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.mesh.groups import Group, local_group
from megatron_lite.optim.elementwise import GroupTensors, collect_groups
from megatron_lite.optim.groups import ParamGroup, StepRates
from megatron_lite.optim.muon import Muon
from megatron_lite.optim.segments import KindState, OwnedSegment
from megatron_lite.optim.whole_matrices import BucketMatrices, MatrixView, matrix_views
from megatron_lite.shard.buffers import FlatBuffers


@dataclass(frozen=True, eq=False)
class _BucketParts:
    """What is updated in one bucket; `groups` are empty where this rank owns no matrix."""

    matrices: BucketMatrices
    groups: list[GroupTensors]
    places: list[list[slice]]  # of each group's segments in what is owned
    weights: Tensor  # all that is owned of the bucket


class MatrixUpdates:
    """Updates the groups of matrices by Muon."""

    def __init__(
        self,
        rule: Muon,
        buffers: FlatBuffers,
        segments: Sequence[OwnedSegment],
        weights: Mapping[int, Tensor],
        masters: Mapping[int, Tensor],
        state: Mapping[str, KindState],
        tensor_groups: Mapping[str, Group],
    ) -> None:
        """Prepare every bucket with matrices, also those whose matrices others own.

        Args:
            rule: the hyper-parameters.
            buffers: of this rank.
            segments: of groups of matrices, owned.
            weights, masters, state: as for `collect_groups`.
            tensor_groups: grid -> the group that its matrices are cut over.
        """
        self.rule = rule
        self._buckets: list[_BucketParts] = []
        views = _matrix_views(buffers)
        for index in sorted(views):
            bucket = buffers.layout.buckets[index]
            shard = local_group("shard")
            if buffers.ownership.is_cut(bucket):
                shard = buffers.ownership.groups[bucket.key.grid].shard
            tensor = tensor_groups[bucket.key.grid]
            here = [segment for segment in segments if segment.bucket == index]
            groups = collect_groups(buffers, here, weights, masters, state)
            places = [
                [slice(s.start, s.stop) for s in here if s.group == tensors.group]
                for tensors in groups
            ]
            self._buckets.append(
                _BucketParts(
                    BucketMatrices(views[index], bucket.elements, shard, tensor),
                    groups,
                    places,
                    weights[index],
                )
            )

    def step(self, update: int, rates: StepRates, clip: float | Tensor) -> None:
        """Update weights, momentum and parameters; gradients are scaled afterwards.

        Comm: see the module.
        """
        owned = self._start(0, clip)
        for number, bucket in enumerate(self._buckets):
            ahead = self._start(number + 1, clip)
            wholes = bucket.matrices.whole()
            matrices = self.rule.updates(wholes, bucket.weights.dtype)
            # Nothing but zeros where no matrix is.
            changes = owned.to(bucket.weights.dtype)
            bucket.matrices.take(matrices, changes)
            for tensors, places in zip(bucket.groups, bucket.places, strict=True):
                lr, weight_decay = rates.of(tensors.group)
                torch._foreach_mul_(tensors.weights, 1.0 - lr * weight_decay)
                parts = [changes[place] for place in places]
                torch._foreach_add_(tensors.weights, parts, alpha=-lr)
                tensors.round()
            owned = ahead

    def _start(self, number: int, clip: float | Tensor) -> Tensor:
        """Update the momenta of a bucket and begin to gather it; nothing after the last."""
        if number >= len(self._buckets):
            return torch.empty(0)
        bucket = self._buckets[number]
        matrices = bucket.matrices
        dtype = self.rule.message_dtype(bucket.weights)
        owned = torch.zeros_like(bucket.weights, dtype=dtype)
        for tensors, places in zip(bucket.groups, bucket.places, strict=True):
            tensors.scale_gradients(clip)
            gradients = [g.to(bucket.weights.dtype) for g in tensors.gradients]
            (kind,) = self.rule.kinds
            directions = self.rule.directions(gradients, tensors.state[kind])
            torch._foreach_copy_([owned[place] for place in places], directions)
        matrices.start_gather(owned)
        return owned


def _matrix_views(buffers: FlatBuffers) -> dict[int, list[MatrixView]]:
    """Bucket -> this rank's pieces of its matrices, in whole buckets, ascending."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for segment in buffers.layout.segments:
        if isinstance(segment.group, ParamGroup) and segment.group.matrix:
            ranges.setdefault(segment.bucket, []).append((segment.start, segment.stop))
    views: dict[int, list[MatrixView]] = {index: [] for index in ranges}
    for piece in buffers.pieces:
        inside = any(a <= piece.start < b for a, b in ranges.get(piece.bucket, ()))
        if inside:
            views[piece.bucket] += matrix_views(piece.spec, piece.box, piece.start)
    return views
