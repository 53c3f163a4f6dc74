"""The router: which experts a token goes to, and how much each of them counts.

Every rank routes its own slice of the tokens. The product and the scores are in the
router's dtype (fp32 at least); the choice has no gradient and prefers the lower expert
where scores are equal. What a router leaves for the step is set under its layer and not
added, so a layer that runs twice (recomputation) counts once. Sources: Shazeer et al. 2017;
DeepSeek-V3 (2024) for sigmoid scores, group limits and the bias in the choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.expert.capacity import Choices, limit_capacity
from megatron_lite.expert.gathered import gather_rows, slice_positions
from megatron_lite.expert.losses import (
    Z_LOSS,
    MicrobatchCounts,
    add_losses,
    balance_losses,
    count_choices,
    z_loss,
)
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.expert.sinkhorn import sinkhorn
from megatron_lite.microbatch import MicrobatchContext, RoutingRecord
from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.ops.random import decision_counter, flat_words

TINY = 1e-20  # of a sum of scores that may all be 0


@dataclass(frozen=True, eq=False)
class Routing:
    """Where the tokens of a slice go.

    Attributes:
        ids: [t, k] int32, the chosen experts, largest first; -1 where dropped.
        probs: [t, k] in the router's dtype, what each counts; 0 where dropped.
    """

    ids: Tensor
    probs: Tensor


@dataclass(frozen=True, eq=False)
class _Jitter:
    """Noise of a router's input: a function of seed, step, layer, sample, position, channel."""

    eps: float
    counter: int
    positions: Tensor
    mb: MicrobatchContext

    def apply(self, x: Tensor) -> Tensor:
        """Multiply [s, b, h] by uniform numbers of 1 - eps to 1 + eps."""
        h = x.shape[-1]
        rows = self.positions.unsqueeze(1).expand(x.shape[:2])
        samples = (self.mb.sample_ids & 0xFFFFFFFF).unsqueeze(0).expand_as(rows)
        words = flat_words(rows, h, 0, h, samples, self.counter, self.mb.seed)
        return x * (1.0 + self.eps * ((words.to(x.dtype) + 0.5) / 2.0**31 - 1.0))


class _RouterProduct(torch.autograd.Function):
    """logits = x W^T + bias in the router's dtype; keeps x in its own dtype, makes noise again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        dtype: torch.dtype,
        jitter: _Jitter | None,
        mb: MicrobatchContext,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.dtype, ctx.jitter, ctx.mb = weight, bias, dtype, jitter, mb
        wide = x.to(dtype)
        wide = wide if jitter is None else jitter.apply(wide)
        shift = None if bias is None else bias.to(dtype)
        return functional.linear(wide.flatten(0, 1), weight.to(dtype), shift)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad, jitter = grads[0], ctx.jitter

        def accumulate(main: Tensor) -> None:
            wide = x.to(ctx.dtype)
            wide = wide if jitter is None else jitter.apply(wide)
            main.add_(grad.T @ wide.flatten(0, 1))

        ctx.mb.wgrads.put(ctx.weight, accumulate, deferrable=True)
        if ctx.bias is not None:
            ctx.mb.wgrads.put(ctx.bias, lambda main: main.add_(grad.sum(0)))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ ctx.weight.to(ctx.dtype)).view(x.shape)
            grad_x = (grad_x if jitter is None else jitter.apply(grad_x)).to(x.dtype)
        return grad_x, None, None, None, None, None


def router_logits(parts: ExpertParts, x: Tensor, mb: MicrobatchContext) -> Tensor:
    """Multiply tokens and router: [s, b, h] -> [s * b, E], in the router's dtype."""
    shape, weight = parts.shape, parts.params["router.weight"]
    dtype = torch.promote_types(accumulation_dtype(x.dtype), getattr(torch, shape.router_dtype))
    jitter = None
    if shape.jitter and mb.training:
        counter = decision_counter("router_jitter", parts.layer, mb.step)
        jitter = _Jitter(shape.jitter, counter, slice_positions(parts, x.shape[0], mb), mb)
    bias = parts.params.get("router.bias")
    return _RouterProduct.apply(x, weight, bias, dtype, jitter, mb)  # type: ignore[no-any-return]


def token_scores(logits: Tensor, shape: ExpertShape) -> Tensor:
    """Scores that the choice compares and the weights come from, [t, E].

    The softmax of the chosen alone ("post") compares logits.
    """
    if shape.score_function == "sigmoid":
        return logits.sigmoid()
    if shape.score_function == "sqrtsoftplus":
        return functional.softplus(logits).sqrt()
    return logits.softmax(-1) if shape.pre_softmax else logits


def token_mixture(logits: Tensor, scores: Tensor, shape: ExpertShape) -> Tensor:
    """Scores of all experts that sum to 1 per token, [t, E]."""
    if shape.score_function != "softmax":
        return scores / (scores.sum(-1, keepdim=True) + TINY)
    return scores if shape.pre_softmax and not shape.sinkhorn else logits.softmax(-1)


def largest(scores: Tensor, k: int, further: int = 0) -> Tensor:
    """Indices of the k largest along the last dim, the lower one first where equal.

    Args:
        further: so many of the next largest behind them.
    """
    k += further
    if scores.device.type != "cpu":
        return _sorted(scores)[..., :k]
    # topk costs a quarter of the sort but leaves open which of equal scores it takes: where
    # the next ones down are all different, there is nothing to settle.
    values, ids = scores.topk(min(k + 1, scores.shape[-1]), dim=-1)
    tied = (values[..., 1:] == values[..., :-1]).any(-1)
    if bool(tied.any()):
        ids[tied] = _sorted(scores[tied])[..., : ids.shape[-1]]
    return ids[..., :k]


def _sorted(scores: Tensor) -> Tensor:
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices


@torch.no_grad()
def choose_experts(scores: Tensor, shape: ExpertShape, bias: Tensor | None) -> Tensor:
    """Choose k experts per token.

    Args:
        scores: [t, E].
        shape: with its limit of groups.
        bias: [E], added for the choice only; None: none.

    Returns:
        [t, k + n] int64, largest first; behind the k the n that an overflowing choice tries,
        -1 where the groups allow no more.
    """
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if shape.is_limited:
        grouped = scores.view(scores.shape[0], shape.num_groups, -1)
        best = grouped.topk(shape.topk // shape.group_topk, dim=-1).values.sum(-1)
        allowed = torch.zeros_like(best, dtype=torch.bool)
        allowed.scatter_(1, largest(best, shape.group_topk), True)
        scores = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)
    chosen = largest(scores, shape.topk, shape.reroute_candidates)
    if shape.is_limited and shape.reroute_candidates:
        chosen = chosen.masked_fill(scores.gather(1, chosen).isneginf(), -1)
    return chosen


@torch.no_grad()
def _choose_balanced(
    parts: ExpertParts, logits: Tensor, length: int, mb: MicrobatchContext
) -> Tensor:
    """Choose by Sinkhorn's assignment of the microbatch; outside training by the logits."""
    k, further = parts.shape.topk, parts.shape.reroute_candidates
    if not mb.training:
        return largest(logits, k, further)
    every, mine = gather_rows(logits, parts, length, mb)
    return largest(sinkhorn(every)[mine], k, further)


def chosen_weights(logits: Tensor, scores: Tensor, ids: Tensor, shape: ExpertShape) -> Tensor:
    """What the chosen experts count, [t, k]: differentiable in the scores.

    Beside Sinkhorn, as Megatron has it: the sigmoid of the one, else the softmax over all.
    """
    if shape.sinkhorn:
        balanced = logits.sigmoid() if shape.topk == 1 else logits.softmax(-1)
        return balanced.gather(1, ids) * shape.scaling_factor
    weights = scores.gather(1, ids)
    if shape.score_function != "softmax":
        if shape.topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    elif not shape.pre_softmax:
        weights = weights.softmax(-1)
    return weights * shape.scaling_factor


def _dropped(ids: Tensor, placed: Tensor, num_experts: int) -> Tensor:
    """Dropped choices per expert that was chosen, [E] int64."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids.flatten(), (placed < 0).flatten().long())


def route_tokens(parts: ExpertParts, x: Tensor, mb: MicrobatchContext) -> Routing:
    """Route a slice of the tokens of a microbatch.

    Args:
        parts: of the layer.
        x: [s_slice, b, h], this rank's slice: shard(0) over tp and cp.
        mb: receives the router's gradient and the layer's record. Without `wgrads`
            (evaluation) there are neither auxiliary losses nor a record.

    Returns:
        ids and probs of t = s_slice * b tokens, row-major.

    Comm: over tp_cp, and only where needed: an all-reduce of [E] or [b, E] counts for the
        losses, an all-gather of 2 (k + n) numbers per token for a capacity with n further
        candidates, of E for Sinkhorn.
    """
    shape, (length, samples) = parts.shape, x.shape[:2]
    logits = router_logits(parts, x, mb)
    scores = token_scores(logits, shape)
    if shape.sinkhorn:
        chosen = _choose_balanced(parts, logits, length, mb)
    else:
        chosen = choose_experts(scores, shape, parts.state("expert_bias"))
    ids, spare = chosen[:, : shape.topk], chosen[:, shape.topk :]
    probs = chosen_weights(logits, scores, ids, shape)
    own = counts = None
    if mb.wgrads is not None:
        own = count_choices(ids, shape.num_experts, samples)
        counts = MicrobatchCounts(own, parts)
    placed = ids
    if shape.capacity_factor is not None:
        spare_weights = spare.to(probs)
        if shape.reroute_candidates:
            mixture = token_mixture(logits, scores, shape).detach()
            spare_weights = mixture.gather(1, spare.clamp(min=0))
        choices = Choices(ids, probs, spare, spare_weights)
        placed = limit_capacity(parts, choices, length, mb)
        if shape.reroute_candidates:
            # Where a choice is dropped, its first expert still has its share of the sum.
            final = torch.where(placed < 0, ids, placed)
            probs = chosen_weights(logits, scores, final, shape)
        probs = probs * (placed >= 0)
    if own is not None and counts is not None:
        mixture = token_mixture(logits, scores, shape)
        losses = balance_losses(parts, mixture, counts, samples, mb)
        if shape.z_loss_coeff:
            losses[Z_LOSS] = z_loss(logits, shape.z_loss_coeff, ids.shape[0] * parts.tp_cp.size)
        probs = add_losses(probs, losses, mb)
        mb.losses.routing[parts.layer] = RoutingRecord(
            counts=counts.own,
            dropped=_dropped(ids, placed, shape.num_experts),
            rerouted=((placed >= 0) & (placed != ids)).sum(),
            entropy=torch.special.entr(mixture.detach()).sum(),
            losses={term: value.detach() for term, value in losses.items()},
        )
    return Routing(placed.to(torch.int32), probs)
