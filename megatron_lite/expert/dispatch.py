"""Bring tokens to their experts and the results back, weighted by the router.

One interface, three transports: nothing moves between ranks where one rank has all experts
(here), an all-to-all of the routed rows (`alltoall`), an all-gather of all tokens (`allgather`).
Invariant: the rows of an expert are ordered by (source rank, token), whatever the layout.
Probabilities multiply results at the source in the accumulation dtype, so they travel in the
all-gather only, and their gradient is exact. The host reads counts once per forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from megatron_lite.expert.allgather import run_gathered
from megatron_lite.expert.alltoall import run_exchanged
from megatron_lite.expert.grouped import ExpertRows, PackedTokens
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.moe import combine, gather, route
from megatron_lite.ops.norm import accumulation_dtype

Experts = Callable[[Tensor, ExpertRows], Tensor]


def run_experts(
    parts: ExpertParts,
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    experts: Experts,
    mb: MicrobatchContext,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    """Sum over the chosen experts of probability times expert, for this rank's tokens.

    Args:
        parts: the layer; its block decides the transport.
        x: [t, h], this rank's tokens, the same t on all ranks of the block.
        ids: [t, k] int, experts chosen; -1: dropped.
        probs: [t, k], their weights; differentiable.
        experts: [rows, h] and whose rows they are -> [rows, h], a partial sum over etp; called
            once, also without rows.
        mb: the microbatch.
        meanwhile: called once, while an all-to-all carries the tokens (in the backward pass
            what it computed is differentiated while the gradients travel): a shared expert.

    Returns:
        [t, h] in x's dtype.

    Memory: kept for the backward pass are the experts' results [k*t*etp, h] and index maps,
        besides what the experts keep; rows packed on one rank are gathered once more.

    Comm: none; else as `run_exchanged`, `run_gathered`.
    """
    probs = probs.to(accumulation_dtype(x.dtype))
    if parts.block.size > 1 and parts.shape.dispatcher == "alltoall":
        return run_exchanged(parts, x, ids, probs, experts, mb, meanwhile)
    if meanwhile is not None:
        meanwhile()
    if parts.block.size > 1:
        return run_gathered(parts, x, ids, probs, experts, mb)
    return _run_local(parts, x, ids, probs, experts, mb.native)


def _run_local(
    parts: ExpertParts, x: Tensor, ids: Tensor, probs: Tensor, experts: Experts, native: bool
) -> Tensor:
    """All experts are here: pack, multiply, combine."""
    num_experts = parts.local_experts
    _, bounds, row_of, source = route(ids.int().contiguous(), num_experts, 1, ids.numel(), native)
    offsets = tuple(bounds.tolist())  # waits for the device: the sizes of the products
    source = source[: offsets[-1]]  # dropped ones stand at the end
    rows, _ = gather(x, None, source, row_of, native)
    packed = PackedTokens(x.detach(), source, row_of, weakref.ref(rows))
    result = experts(rows, ExpertRows(offsets, bounds[1:].int(), packed))
    return combine(result, probs, row_of, source, native)
