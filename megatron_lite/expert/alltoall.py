"""Tokens travel to the ranks of their experts by an all-to-all inside the expert block.

Rows are packed in the order of ranks, so one all-to-all moves them; what arrives is ordered by
(source rank, local expert) and sorted by expert. With expert tensor parallelism a row goes to
each of the etp ranks of its expert, and what they send back are more slots of the same token:
the sum over etp and over the k slots is one sum, in the accumulation dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_lite.expert.grouped import ExpertRows
from megatron_lite.expert.parts import DISPATCH_TIMER, ExpertParts
from megatron_lite.mesh import collectives
from megatron_lite.mesh.groups import Group
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.moe import combine, gather, received_ids, route


@dataclass(eq=False)
class _Journey:
    """One all-to-all of rows, and its way back in the backward pass.

    Attributes:
        sent: rows to each rank of the block.
        received: rows from each rank.
        block: the ranks.
        mb: the microbatch, which may have timers.
        work: the exchange in flight.
        cargo: what it reads, which has to live as long, and what it writes.
    """

    sent: list[int]
    received: list[int]
    block: Group
    mb: MicrobatchContext
    work: collectives.Work | None = None
    cargo: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def depart(self, rows: Tensor, back: bool) -> Tensor:
        """Start the exchange; the result may be read after `arrive`, which returns it, too."""
        here, there = (self.received, self.sent) if back else (self.sent, self.received)
        out = rows.new_empty(sum(there), rows.shape[1])
        rows = rows.contiguous()
        self.cargo = rows, out
        with self.mb.measure(DISPATCH_TIMER):
            self.work = collectives.all_to_all_single(
                out, rows, there, here, self.block, async_op=True
            )
        return out

    def arrive(self) -> Tensor:
        """Wait for the exchange."""
        assert self.work is not None
        assert self.cargo is not None
        with self.mb.measure(DISPATCH_TIMER):
            self.work.wait()
        (_, out), self.work, self.cargo = self.cargo, None, None
        return out


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return journey.depart(rows, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.journey.arrive(), None  # what it is handed stands for it, see `_Arrive`


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        journey.arrive()
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd runs later operations first: what was recorded between departure and
        # arrival is differentiated before `_Depart.backward` waits. Gradients have to have
        # the shape of their tensor, so the one that travels stays with the journey.
        ctx.journey.depart(grads[0], back=True)
        return grads[0], None


def _travel(rows: Tensor, journey: _Journey, meanwhile: Callable[[], object] | None) -> Tensor:
    """All-to-all of rows, differentiable.

    Comm: one all-to-all of rows.numel() elements in each pass.
    """
    on_the_way = _Depart.apply(rows, journey)
    if meanwhile is not None:
        meanwhile()
    return _Arrive.apply(on_the_way, journey)  # type: ignore[no-any-return]


def _slots_of_ranks(parts: ExpertParts, ids: Tensor) -> Tensor:
    """Slot for every etp rank of an expert: [t, k] -> [t, k * etp].

    Slots are numbered by (rank of the block, local expert), so that packing by slot packs by
    rank. An expert outside the model is a dropped one. With copies of experts `ids` are slots
    of expert ranks already (`Replicas.place`).
    """
    if parts.etp.size == 1:
        return ids.int().contiguous()
    local, etp = parts.slots, parts.etp.size
    copies = torch.arange(etp, device=ids.device)
    rank = (ids.long() // local).unsqueeze(-1) * etp + copies
    slots = rank * local + (ids.long() % local).unsqueeze(-1)
    return slots.masked_fill(ids.unsqueeze(-1) < 0, -1).int().flatten(1)


def _exchange_counts(
    parts: ExpertParts, counts: Tensor, mb: MicrobatchContext
) -> tuple[Tensor, list[int]]:
    """Rows from each rank for each expert here, and every number that the host needs.

    Args:
        counts: [block * slots of a rank] int64, rows for each slot.

    Returns:
        [block, slots] int64; rows to each rank, rows from each rank, rows of each slot.

    Comm: one all-to-all of block * slots int64.
    """
    arriving = torch.empty_like(counts)
    with mb.measure(DISPATCH_TIMER):
        collectives.all_to_all_single(arriving, counts, None, None, parts.block)
    arriving = arriving.view(parts.block.size, -1)
    numbers = torch.cat([counts.view_as(arriving).sum(1), arriving.sum(1), arriving.sum(0)])
    return arriving, numbers.tolist()  # waits for the device: gloo and NCCL need sizes


def run_exchanged(
    parts: ExpertParts,
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    experts: Callable[[Tensor, ExpertRows], Tensor],
    mb: MicrobatchContext,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    """`run_experts` by an all-to-all.

    Args:
        probs: [t, k] in the accumulation dtype.

    Memory: beside the results, k*t*etp*h elements, the rows on the way are not kept.

    Comm: over the block, forward and backward alike one all-to-all there and one back, each of
        k*t*etp*h elements less the dropped slots; forward one of the experts' counts.
    """
    native, size, local = mb.native, parts.block.size, parts.slots
    slots = _slots_of_ranks(parts, ids)
    counts, _, row_of, source = route(slots, size * local, 1, slots.numel(), native)
    arriving, numbers = _exchange_counts(parts, counts, mb)
    sent, received = numbers[:size], numbers[size : 2 * size]
    source = source[: sum(sent)]  # dropped ones stand at the end
    away = sum(sent) - sent[parts.block.rank]
    mb.losses.dispatched[parts.layer] = away * x.shape[1] * x.element_size()
    rows, _ = gather(x, None, source, row_of, native)
    rows = _travel(rows, _Journey(sent, received, parts.block, mb), meanwhile)
    offsets = (0, *accumulate(numbers[2 * size :]))
    ends = arriving.sum(0).cumsum(0).int()
    if local > 1:
        order = received_ids(arriving, offsets[-1])
        _, _, place, origin = route(order, local, 1, offsets[-1], native)
        rows, _ = gather(rows, None, origin, place, native)
    rows = experts(rows, ExpertRows(offsets, ends))
    if local > 1:
        # The other way round it is a permutation as well: copies, no sums.
        rows, _ = gather(rows, None, place.flatten(), origin.unsqueeze(1), native)
    rows = _travel(rows, _Journey(received, sent, parts.block, mb), None)
    if parts.etp.size > 1:
        probs = probs.repeat_interleave(parts.etp.size, dim=1)
    return combine(rows, probs, row_of, source, native)
