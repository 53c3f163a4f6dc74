"""One row per token of a whole microbatch, in the order of its tokens.

What overflows an expert and what Sinkhorn assigns is decided over all tokens of a
microbatch, whose parts lie on the ranks of tp x cp. Every rank gathers the rows, puts them
in (sequence, sample) order and comes to the same decision, bit for bit, in every layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.expert.parts import ExpertParts
from megatron_lite.mesh import collectives
from megatron_lite.microbatch import MicrobatchContext


def slice_positions(parts: ExpertParts, length: int, mb: MicrobatchContext) -> Tensor:
    """Logical positions of this rank's token slice, [length].

    Outside sequence parallelism the ranks of tp cut the sequence of `mb.positions`.
    """
    if mb.positions.numel() == length:
        return mb.positions
    return mb.positions.view(parts.tp.size, length)[parts.tp.rank]


def gather_rows(
    rows: Tensor, parts: ExpertParts, length: int, mb: MicrobatchContext
) -> tuple[Tensor, Tensor]:
    """Gather the rows of a microbatch and order them by (position, sample).

    Args:
        rows: [t, n] of this rank's token slice of `length` positions; a dtype that fp64 holds.

    Returns:
        ([T, n] fp64, replicated over tp x cp, not differentiable; [t] int64, which of
        them are this rank's).

    Comm: one all-gather over tp_cp of T * n + (T / b) fp64 elements.
    """
    group, width = parts.tp_cp, rows.shape[-1]
    positions = slice_positions(parts, length, mb)
    # Positions travel with the rows: context parallelism deals them out in its own order.
    own = torch.cat(
        [rows.detach().to(torch.float64).view(length, -1), positions.unsqueeze(1)], dim=1
    )
    gathered = own.new_empty(group.size * length, own.shape[1])
    collectives.all_gather_into(gathered, own, group)
    order = torch.argsort(gathered[:, -1], stable=True)
    ordered = gathered[order, :-1].reshape(-1, width)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    samples = rows.shape[0] // length
    mine = place[group.rank * length : (group.rank + 1) * length].unsqueeze(1) * samples
    return ordered, (mine + torch.arange(samples, device=mine.device)).flatten()
