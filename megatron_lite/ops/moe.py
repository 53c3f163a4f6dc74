"""MoE routing, gather and combine: rows from token order to expert-major order and back.

`moe_route(ids, experts, align, rows) -> (counts, offsets, row_of, source)`: `ids` [t, k] int32
is the expert of each assignment a = token * k + slot; an id outside [0, experts), -1 by
convention, is dropped. `counts` [e] and `offsets` [e + 1] int64: assignments of an expert and
its first row, a multiple of `align`. `row_of` [t, k] int32 is the row of an assignment (-1:
dropped), `source` [rows] int32 the assignment of a row (-1: padding). Rows of an expert keep the
order of tokens; no sums of floats meet in memory, so results are bitwise repeatable.

A dispatcher over `ep` ranks: route with align 1, `moe_splits` gives the rows for each rank,
`moe_gather` packs; the first `splits.sum()` rows go through the all-to-all (the host reads
the splits for it anyway; dropped assignments only lengthen the padding at the end). Received
rows are ordered by (rank, local expert): `received_ids` of the exchanged counts is their
routing map with k = 1, routed with `align` = the tile of the experts' products and gathered
again. On the way back `moe_combine` without probs undoes the second gather, with probs the
first. Capacities are static, `route_capacity`, so nothing waits for the device.
Bound by memory: gather 2 e h rows, combine e h (t k + t) bytes for e bytes per element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.ops.registration import define_operation


def route_capacity(assignments: int, experts: int, align: int) -> int:
    """Fewest rows that hold any routing of so many assignments."""
    return assignments + min(experts, assignments) * (align - 1)


def received_ids(counts: Tensor, rows: int) -> Tensor:
    """Local experts of rows that arrive ordered by (rank, local expert).

    Args:
        counts: [ep, local experts] int64, rows from each rank for each expert of this one.
        rows: their sum, which the host knows from the splits.

    Returns:
        [rows, 1] int32, a routing map for `moe_route`.
    """
    ranks, experts = counts.shape
    ids = torch.arange(experts, dtype=torch.int32, device=counts.device).repeat(ranks)
    return ids.repeat_interleave(counts.flatten(), output_size=rows).unsqueeze(1)


# ---- routing ---------------------------------------------------------------------------
def _route_reference(
    ids: Tensor, experts: int, align: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flat = ids.flatten().long()
    expert = torch.where((flat >= 0) & (flat < experts), flat, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    padded = (counts[:experts] + align - 1) // align * align
    offsets = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    order = torch.argsort(expert, stable=True)
    ranked = expert[order]
    place = torch.arange(flat.numel(), device=ids.device) - (counts.cumsum(0) - counts)[ranked]
    placed = torch.where(ranked < experts, offsets[ranked] + place, -1)
    row_of = torch.empty_like(flat).scatter_(0, order, placed)
    source = torch.full((rows + 1,), -1, dtype=torch.int64, device=ids.device)
    source[torch.where(placed < 0, rows, placed)] = order  # the last one takes the dropped
    return (
        counts[:experts].clone(),
        offsets,
        row_of.to(torch.int32).view(ids.shape),
        source[:rows].to(torch.int32),
    )


def _route_fake(
    ids: Tensor, experts: int, align: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        ids.new_empty(experts, dtype=torch.int64),
        ids.new_empty(experts + 1, dtype=torch.int64),
        torch.empty_like(ids),
        ids.new_empty(rows),
    )


def _splits_reference(counts: Tensor, ranks: int) -> Tensor:
    return counts.view(ranks, -1).sum(1)


# ---- rows ------------------------------------------------------------------------------
def _gather_reference(
    x: Tensor, probs: Tensor | None, source: Tensor, row_of: Tensor
) -> tuple[Tensor, Tensor]:
    padding, k = source < 0, max(row_of.shape[1], 1)
    kept = source.clamp(min=0).long()
    none = x.new_zeros(0, dtype=torch.float32)
    if row_of.numel() == 0:
        packed = x.new_zeros(source.shape[0], x.shape[1])
        if x.requires_grad:  # still part of the graph: other ranks wait for its backward pass
            packed = packed + x[:0].sum()
        return packed, none if probs is None else probs.new_zeros(source.shape[0])
    narrow = x.element_size() == 1  # float8 has no masked_fill
    bits = x.view(torch.uint8) if narrow else x
    packed = bits[kept // k].masked_fill(padding.unsqueeze(1), 0)
    packed = packed.view(x.dtype) if narrow else packed
    if probs is None:
        return packed, none
    return packed, probs.flatten()[kept].masked_fill(padding, 0)


def _scatter_reference(packed_probs: Tensor, row_of: Tensor) -> Tensor:
    if packed_probs.numel() == 0:
        return packed_probs.new_zeros(row_of.shape)
    return packed_probs[row_of.clamp(min=0).long()].masked_fill(row_of < 0, 0)


def _slots(packed: Tensor, row_of: Tensor) -> Tensor:
    """[t, k, h] in the accumulation dtype: rows of the slots, 0 where dropped."""
    wide = packed.to(accumulation_dtype(packed.dtype))
    if packed.shape[0] == 0:
        # Nothing, but still part of the graph: other ranks wait for its backward pass.
        return wide.new_zeros(*row_of.shape, packed.shape[1]) + wide.sum()
    return wide[row_of.clamp(min=0).long()].masked_fill((row_of < 0).unsqueeze(2), 0)


def _combine_reference(
    packed: Tensor, probs: Tensor | None, row_of: Tensor, source: Tensor
) -> Tensor:
    slots = _slots(packed, row_of)
    return (slots if probs is None else slots * probs.unsqueeze(2)).sum(1).to(packed.dtype)


def _combine_backward_reference(
    grad: Tensor, packed: Tensor, probs: Tensor | None, row_of: Tensor, source: Tensor
) -> tuple[Tensor, Tensor]:
    rows, weights = _gather_reference(grad, probs, source, row_of)
    if probs is None:
        return rows, packed.new_zeros(0, 0, dtype=accumulation_dtype(packed.dtype))
    d_packed = (rows.to(weights.dtype) * weights.unsqueeze(1)).to(packed.dtype)
    d_probs = (_slots(packed, row_of) * grad.to(probs.dtype).unsqueeze(1)).sum(2)
    return d_packed, d_probs


def _gather_fake(
    x: Tensor, probs: Tensor | None, source: Tensor, row_of: Tensor
) -> tuple[Tensor, Tensor]:
    rows = source.shape[0]
    packed_probs = x.new_empty(0, dtype=torch.float32) if probs is None else probs.new_empty(rows)
    return x.new_empty(rows, x.shape[1]), packed_probs


def _scatter_fake(packed_probs: Tensor, row_of: Tensor) -> Tensor:
    return packed_probs.new_empty(row_of.shape)


def _combine_fake(packed: Tensor, probs: Tensor | None, row_of: Tensor, source: Tensor) -> Tensor:
    return packed.new_empty(row_of.shape[0], packed.shape[1])


def _combine_backward_fake(
    grad: Tensor, packed: Tensor, probs: Tensor | None, row_of: Tensor, source: Tensor
) -> tuple[Tensor, Tensor]:
    d_probs = packed.new_empty(
        (0, 0) if probs is None else row_of.shape, dtype=accumulation_dtype(packed.dtype)
    )
    return packed.new_empty(packed.shape), d_probs


# ---- gradients -------------------------------------------------------------------------
def _keep_for_gather(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, probs, source, row_of = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(source, row_of)
    ctx.with_probs = probs is not None


def _gather_rule(
    ctx: Any, grad: Tensor | None, grad_probs: Tensor | None
) -> tuple[Tensor | None, ...]:
    source, row_of = ctx.saved_tensors
    grad_x = None if grad is None else moe_combine(grad, None, row_of, source)
    if not ctx.with_probs or grad_probs is None:
        return grad_x, None, None, None
    return grad_x, moe_scatter_probs(grad_probs.contiguous(), row_of), None, None


def _keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    packed, probs, row_of, source = inputs
    ctx.save_for_backward(None if probs is None else packed, probs, row_of, source)


def _combine_rule(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    packed, probs, row_of, source = ctx.saved_tensors
    if probs is None:
        return moe_gather(grad, None, source, row_of)[0], None, None, None
    d_packed, d_probs = moe_combine_backward(grad, packed, probs, row_of, source)
    return d_packed, d_probs, None, None


moe_route = define_operation(
    "moe_route(Tensor ids, int experts, int align, int rows) -> (Tensor, Tensor, Tensor, Tensor)",
    _route_reference,
    fake=_route_fake,
)
moe_splits = define_operation("moe_splits(Tensor counts, int ranks) -> Tensor", _splits_reference)
moe_scatter_probs = define_operation(
    "moe_scatter_probs(Tensor packed_probs, Tensor row_of) -> Tensor",
    _scatter_reference,
    fake=_scatter_fake,
)
moe_combine_backward = define_operation(
    "moe_combine_backward(Tensor grad, Tensor packed, Tensor? probs, Tensor row_of,"
    " Tensor source) -> (Tensor, Tensor)",
    _combine_backward_reference,
    fake=_combine_backward_fake,
)
moe_combine = define_operation(
    "moe_combine(Tensor packed, Tensor? probs, Tensor row_of, Tensor source) -> Tensor",
    _combine_reference,
    fake=_combine_fake,
    backward=_combine_rule,
    setup_context=_keep_for_combine,
)
moe_gather = define_operation(
    "moe_gather(Tensor x, Tensor? probs, Tensor source, Tensor row_of) -> (Tensor, Tensor)",
    _gather_reference,
    fake=_gather_fake,
    backward=_gather_rule,
    setup_context=_keep_for_gather,
)


# ---- faces -----------------------------------------------------------------------------
def route(
    ids: Tensor, experts: int, align: int, rows: int, native: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Expert-major order of a routing map: counts, offsets, row_of, source (see the module).

    Args:
        ids: [t, k] int32.
        experts: number of experts.
        align: rows of an expert start at multiples of it.
        rows: at least `route_capacity(t * k, experts, align)`; the rest is padding.
        native: by the operation, not its reference.
    """
    run = moe_route if native else _route_reference
    return run(ids, experts, align, rows)  # type: ignore[no-any-return]


def gather(
    x: Tensor, probs: Tensor | None, source: Tensor, row_of: Tensor, native: bool
) -> tuple[Tensor, Tensor]:
    """Rows in expert-major order, padding 0, and their probabilities (empty without probs).

    Args:
        x: [t, h], any dtype; rows at any stride.
        probs: [t, k] fp32 (fp64).
        source: of `route`.
        row_of: of `route`.
        native: by the operation, not its reference.

    Returns:
        [rows, h] and [rows]; both differentiable, the backward of rows is `combine`.
    """
    run = moe_gather if native else _gather_reference
    return run(x, probs, source, row_of)  # type: ignore[no-any-return]


def combine(
    packed: Tensor, probs: Tensor | None, row_of: Tensor, source: Tensor, native: bool
) -> Tensor:
    """Sum of each token's rows, weighted by its probabilities, in the accumulation dtype.

    Args:
        packed: [rows, h]; padding rows are not read.
        probs: [t, k] in the accumulation dtype; None: weights of 1.
        row_of: of `route`.
        source: of `route`.
        native: by the operation, not its reference.

    Returns:
        [t, h] in packed's dtype, differentiable in packed and probs; padding rows get 0.
    """
    run = moe_combine if native else _combine_reference
    return run(packed, probs, row_of, source)  # type: ignore[no-any-return]


def combine_backward(
    grad: Tensor, packed: Tensor, probs: Tensor, row_of: Tensor, source: Tensor, native: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of `combine` for packed and probs, where autograd does not form them.

    Args:
        grad: [t, h] of combine's result, packed's dtype.
        packed: of `combine`, like all that follow.
        probs: [t, k] in the accumulation dtype.
        row_of: of `route`.
        source: of `route`.
        native: by the operation, not its reference.

    Returns:
        [rows, h] in packed's dtype, [t, k] in the accumulation dtype.
    """
    run = moe_combine_backward if native else _combine_backward_reference
    return run(grad, packed, probs, row_of, source)  # type: ignore[no-any-return]
