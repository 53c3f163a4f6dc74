"""Hot experts: those that the step before chose most are computed where their tokens are.

Their weights come to every rank of the expert group at each forward pass and stay for the
backward pass; a token's row for such an expert goes to its own expert rank. What the ranks
find of a weight's gradient is summed and added to the owner's main gradient before the
owner reports it, so a parameter still has one contribution per pass. Which experts are hot
follows from the routers' checkpointed counts: all ranks, and a resumed run, decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.expert.grouped import ExpertRows
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.mesh import collectives
from megatron_lite.microbatch import MicrobatchContext, WeightGradientStore
from megatron_lite.ops.norm import accumulation_dtype

EXPERTS = "experts."


def hot_experts(parts: ExpertParts) -> Tensor:
    """Numbers of the experts chosen most in the step before, [n] int64, most first.

    The lower number first where counts are equal: before the first step they all are.
    """
    counts = parts.state("expert_counts")
    assert counts is not None, "replicated experts come with the router's expert_counts"
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[: parts.shape.replicated]


@dataclass(frozen=True, eq=False)
class _Copy:
    """One parameter of the hot experts: the owner's, whole over ep, and this rank's copies.

    Attributes:
        own: [local experts, ...].
        param: [n, ...], a part of the exchanged buffer.
        place: of its elements in that buffer.
    """

    own: nn.Parameter
    param: nn.Parameter
    place: slice


class _CopyGradients:
    """Gradients of the copies of one pass in one buffer (`microbatch.GradientSink`)."""

    def __init__(self, copies: list[_Copy]) -> None:
        self._copies = {copy.param: copy for copy in copies if copy.param.requires_grad}
        self._buffer: Tensor | None = None
        self._missing = set(self._copies)

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Zeros at first, in the accumulation dtype."""
        if self._buffer is None:
            size = max(copy.place.stop for copy in self._copies.values())
            self._buffer = param.new_zeros(size, dtype=accumulation_dtype(param.dtype))
        return self._buffer[self._copies[param].place].view(param.shape)

    def written(self, param: nn.Parameter) -> None:
        """Note that a copy has what this rank's tokens give it."""
        self._missing.discard(param)

    def take(self) -> tuple[Tensor | None, list[_Copy]]:
        """Hand the buffer over, once; None where nothing is trained."""
        assert not self._missing, "a copy's gradient is summed before it is complete"
        buffer, self._buffer = self._buffer, None
        return buffer, list(self._copies.values())


class Replicas:
    """The hot experts of one layer in one pass.

    Attributes:
        parts: the layer, with slots for the copies behind each rank's own experts.
        params: their parameters by the names of the layer's.
        mb: the microbatch, whose weight gradients are those of the copies.
    """

    def __init__(self, parts: ExpertParts, mb: MicrobatchContext) -> None:
        self.parts = replace(parts, copies=parts.shape.replicated)
        self._hot = hot_experts(parts)
        local = self._hot - parts.ep.rank * parts.local_experts
        self._is_own = (local >= 0) & (local < parts.local_experts)
        self._local = local.clamp(0, parts.local_experts - 1)
        own = {name: p for name, p in parts.params.items() if name.startswith(EXPERTS)}
        self._buffer, self._work = self._exchange(list(own.values()))
        n = len(self._hot)
        ends = accumulate(n * math.prod(param.shape[1:]) for param in own.values())
        self._copies, first = [], 0
        for param, end in zip(own.values(), ends, strict=True):
            part = self._buffer[first:end].view(n, *param.shape[1:])
            copy = nn.Parameter(part, requires_grad=param.requires_grad)
            self._copies.append(_Copy(param, copy, slice(first, end)))
            first = end
        self.params = {name: c.param for name, c in zip(own, self._copies, strict=True)}
        self._gradients = _CopyGradients(self._copies)
        self._wgrads = mb.wgrads
        wgrads = None if mb.wgrads is None else WeightGradientStore(self._gradients)
        self.mb = replace(mb, wgrads=wgrads)

    def _exchange(self, own: list[nn.Parameter]) -> tuple[Tensor, collectives.Work | None]:
        """Start to bring the copies: owners give theirs, the others zeros, so the sum is exact."""
        given = [self._of_owner(param.detach()[self._local]).flatten() for param in own]
        buffer = torch.cat(given)
        return buffer, collectives.all_reduce(buffer, self.parts.ep, async_op=True)

    def _of_owner(self, rows: Tensor) -> Tensor:
        """Keep the rows [n, ...] of experts that are this rank's, 0 elsewhere."""
        shape = (-1, *[1] * (rows.dim() - 1))
        return rows.masked_fill(~self._is_own.view(shape), 0)

    def place(self, ids: Tensor) -> Tensor:
        """Slots of chosen experts: a hot one's is behind the experts of this expert rank.

        Args:
            ids: [t, k] int, -1 where dropped.

        Returns:
            [t, k] int32 of ep * (local experts + n) slots, -1 where dropped.
        """
        parts = self.parts
        experts = torch.arange(parts.shape.num_experts, device=ids.device)
        slots = experts // parts.local_experts * parts.slots + experts % parts.local_experts
        first = parts.ep.rank * parts.slots + parts.local_experts
        slots[self._hot] = torch.arange(first, first + parts.copies, device=ids.device)
        return torch.where(ids < 0, -1, slots[ids.clamp(min=0).long()]).int()

    def arrive(self) -> None:
        """Wait for the weights."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def settle(self) -> None:
        """Sum the gradients of the copies and add each to its owner's main gradient.

        Every rank does the same, others than the owner add zeros: sinks may reduce when they
        are asked for a main gradient, and then in the same order everywhere.

        Comm: one all-reduce over ep of n experts' weights in the accumulation dtype.
        """
        total, copies = self._gradients.take()
        if total is None:
            return
        assert self._wgrads is not None
        collectives.all_reduce(total, self.parts.ep)
        for copy in copies:
            main = self._wgrads.main_grad(copy.own)
            assert main is not None
            summed = self._of_owner(total[copy.place].view(copy.param.shape))
            main.index_add_(0, self._local, summed.to(main.dtype))


def bring_replicas(parts: ExpertParts, mb: MicrobatchContext) -> Replicas | None:
    """Start to bring the hot experts to this rank; None where none travel.

    Only a pass that trains has any: what evaluation or a generated token would spare is less
    than the weights.

    Memory: kept until the end of the backward pass are n experts' weights; in it n experts'
        gradients in the accumulation dtype.

    Comm: one asynchronous all-reduce over ep of n experts' weights (their slices over etp, with
        biases); the backward pass as `Replicas.settle`. A second forward pass brings them again.
    """
    if parts.shape.replicated == 0 or parts.ep.size == 1 or not mb.training:
        return None
    return Replicas(parts, mb)


class _Settle(torch.autograd.Function):
    """Between the copies and the own experts: differentiated after the one, before the other."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, hot: Tensor, replicas: Replicas) -> tuple[Tensor, Tensor]:
        ctx.replicas = replicas
        return own.view_as(own), hot.view_as(hot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.replicas.settle()
        return grads[0], grads[1], None


def run_divided(
    replicas: Replicas,
    rows: Tensor,
    whose: ExpertRows,
    own_experts: Callable[[Tensor, ExpertRows], Tensor],
    hot_experts_here: Callable[[Tensor, ExpertRows], Tensor],
) -> Tensor:
    """Own experts and copies on their rows, [rows, h] -> [rows, h].

    Args:
        replicas: of this pass.
        rows: of own experts, then of copies.
        whose: rows of every slot.
        own_experts, hot_experts_here: the experts on rows of theirs.
    """
    replicas.arrive()
    at = replicas.parts.local_experts
    border = whose.offsets[at]
    own, hot = rows.split([border, rows.shape[0] - border])
    own = own_experts(own, ExpertRows(whose.offsets[: at + 1], whose.ends[:at]))
    # The gradient of what enters the copies is there when all of their gradients are.
    own, hot = _Settle.apply(own, hot, replicas)  # type: ignore[no-untyped-call]
    offsets = tuple(offset - border for offset in whose.offsets[at:])
    hot = hot_experts_here(hot, ExpertRows(offsets, whose.ends[at:] - border))
    return torch.cat([own, hot])
