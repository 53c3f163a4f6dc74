"""Gradients that are partial over a tensor axis: one coalesced reduction per axis and step.

Under sequence parallelism norms and row biases see one slice of the tokens, query/key
norms see one rank's heads, and replicated KV rows see one rank's queries. Their main
gradients are summed after the data reduction: a bucket can then leave as soon as it is
complete, the message is the same length either way (the sum is linear), and the ranks of
a data group, holding equal bits, obtain equal bits again. With shards each rank sums what
it owns; the ranks of an axis cut these parameters at the same elements, because their
layouts are equal or the parameter has a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_lite.mesh.collectives import all_reduce
from megatron_lite.mesh.groups import Group
from megatron_lite.shard.flat import Window
from megatron_lite.shard.pieces import Piece, Range, cut_ranges


def partial_axes(pieces: Iterable[Piece]) -> tuple[str, ...]:
    """Axes over which some gradient is partial, in the order in which they are reduced."""
    found = {axis for piece in pieces for axis in piece.spec.partial_axes}
    return tuple(sorted(found, reverse=True))  # tp before kv_replica; any fixed order will do


class PartialReduction:
    """Sums the main gradients that are partial over one axis, with one all-reduce."""

    def __init__(
        self,
        axis: str,
        pieces: Sequence[Piece],
        windows: Mapping[int, Window],
        gradients: Mapping[int, Tensor],
        group: Group,
    ) -> None:
        """Collect the ranges.

        Args:
            axis: whose partial sums.
            pieces: of whole buckets.
            windows: what this rank owns of them.
            gradients: bucket -> the owned gradients.
            group: ranks of the axis.
        """
        whole = _joined(piece for piece in pieces if axis in piece.spec.partial_axes)
        ranges = cut_ranges(whole, windows)
        self.group = group
        self.elements = sum(stop - start for _, start, stop in ranges)
        self._ranges = [gradients[bucket][start:stop] for bucket, start, stop in ranges]
        if self._ranges:
            # All main gradients of a run have one dtype, in which the sum is formed too.
            self._packed = self._ranges[0].new_empty(self.elements)
            self._slots = list(self._packed.split([len(part) for part in self._ranges]))

    @torch.no_grad()
    def run(self) -> None:
        """Reduce in place.

        Comm: one all-reduce of `elements` over the axis' group, main gradient dtype; none
            on a group of one, nor where its ranks own no such element.
        """
        if self.group.size == 1 or not self._ranges:
            return
        torch._foreach_copy_(self._slots, self._ranges)
        all_reduce(self._packed, self.group)
        torch._foreach_copy_(self._ranges, self._slots)


def _joined(pieces: Iterable[Piece]) -> list[Range]:
    """Ranges of the pieces' held rows; only exact neighbours join, so no gap is ever sent."""
    ranges: list[Range] = []
    for piece in pieces:
        last = ranges[-1] if ranges else None
        if last is not None and (last.bucket, last.stop) == (piece.bucket, piece.start):
            ranges[-1] = last._replace(stop=piece.stop)
        elif piece.stop > piece.start:
            ranges.append(Range(piece.bucket, piece.start, piece.stop))
    return ranges
