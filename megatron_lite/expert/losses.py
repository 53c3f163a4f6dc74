"""Auxiliary losses of a router: balance over a microbatch, a sample, or the last step; z.

Balance is E * sum_e f_e P_e: f_e the share of choices that went to expert e, P_e its mean
score. Both are over one microbatch with all of its tensor and context parts (f of the
global form: over the step before), so a loss is the same in every layout; only the running
form of the global one is not, see `running.py`. Each rank adds
the part of its own tokens, gradients are sums; the step's value is the mean over its
microbatches. Sources: Fedus et al., "Switch transformers" (2021); Zoph et al., "ST-MoE"
(2022), the z-loss; DeepSeek-V2 (2024), the form per sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.expert_plan import AUX_LOSSES, ExpertShape
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.mesh import collectives
from megatron_lite.microbatch import MicrobatchContext

Z_LOSS = "z_loss"
DENOMINATOR = "moe"


def loss_terms(shape: ExpertShape) -> tuple[str, ...]:
    """Names of the auxiliary losses in force, in the order of the log."""
    kinds = tuple(kind for kind in AUX_LOSSES if shape.coefficient(kind))
    return (*kinds, Z_LOSS) if shape.z_loss_coeff else kinds


def count_choices(ids: Tensor, num_experts: int, samples: int) -> Tensor:
    """Choices per sample and expert: [t, k] of tokens in (s, b) order -> [b, E] int64."""
    sample = torch.arange(ids.shape[0], device=ids.device) % samples
    flat = (sample.unsqueeze(1) * num_experts + ids).flatten()
    counts = flat.new_zeros(samples * num_experts)
    return counts.scatter_add_(0, flat, torch.ones_like(flat)).view(samples, num_experts)


class MicrobatchCounts:
    """Choices per sample and expert, summed over the ranks of a microbatch.

    Comm: one all-reduce over tp_cp of E elements, b E where a loss is per sample, started at
        once; none where no loss needs it.
    """

    def __init__(self, own: Tensor, parts: ExpertParts) -> None:
        self._per_sample = parts.shape.coefficient("seq_aux_loss") > 0
        self._own = own.sum(0)
        self._counts, self._work = own, None
        if self._per_sample or parts.shape.coefficient("aux_loss"):
            self._counts = own.clone() if self._per_sample else own.sum(0, keepdim=True)
            self._work = collectives.all_reduce(self._counts, parts.tp_cp, async_op=True)

    @property
    def own(self) -> Tensor:
        """[E] int64, of this rank's tokens alone."""
        return self._own

    def wait(self) -> Tensor:
        """Return the counts, [b or 1, E] int64."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._counts


def global_shares(counts: Tensor | None, like: Tensor) -> Tensor:
    """f of the step before; uniform before the first."""
    assert counts is not None, "global_aux_loss comes with the router's expert_counts"
    total = counts.sum()
    uniform = torch.full_like(counts, 1.0 / counts.numel())
    return torch.where(total > 0, counts / total.clamp(min=1), uniform).to(like.dtype)


def balance_losses(
    parts: ExpertParts,
    mixture: Tensor,
    counts: MicrobatchCounts,
    samples: int,
    mb: MicrobatchContext,
) -> dict[str, Tensor]:
    """Compute this rank's part of every balance loss in force.

    Args:
        mixture: [t, E] scores that sum to 1 per token; tokens in (s, b) order.
        counts: of the choices before dropping.
        samples: b.
        mb: the microbatch.

    Returns:
        term -> 0-dim, differentiable, partial over tp_cp.
    """
    shape = parts.shape
    tokens = mixture.shape[0] * parts.tp_cp.size
    found: dict[str, Tensor] = {}
    for kind, weight in shape.balancing:
        scale = weight * shape.num_experts
        if kind == "seq_aux_loss":
            share = counts.wait().to(mixture.dtype) * (samples / (tokens * shape.topk))
            part = mixture.view(-1, samples, shape.num_experts).sum(0)
            # Mean over b samples of f_b P_b, whose P_b is a mean over T / b tokens.
            found[kind] = (share * part).sum() * (scale / tokens)
            continue
        if kind == "aux_loss":
            share = counts.wait().sum(0).to(mixture.dtype) / (tokens * shape.topk)
        elif parts.running is not None:
            share = parts.running.share(counts.own, mb).to(mixture.dtype)
        else:
            share = global_shares(parts.state("expert_counts"), mixture)
        found[kind] = (share * mixture.sum(0)).sum() * (scale / tokens)
    return found


def z_loss(logits: Tensor, coefficient: float, tokens: int) -> Tensor:
    """coefficient * mean of logsumexp(logits)^2: this rank's part of `tokens`, 0-dim."""
    return logits.logsumexp(-1).square().sum() * (coefficient / tokens)


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, mb: MicrobatchContext) -> Tensor:
        ctx.dtype, ctx.mb = loss.dtype, mb
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Read here and not in the forward pass: the count may still be in flight there.
        scale = 1.0 / ctx.mb.denominators[DENOMINATOR]
        return grads[0], scale.to(ctx.dtype), None


def add_losses(carrier: Tensor, losses: dict[str, Tensor], mb: MicrobatchContext) -> Tensor:
    """Let the backward pass through `carrier` start that of the losses too.

    Their weight against the training loss, which starts with 1, is one over the number
    of microbatches of the global batch, `mb.denominators["moe"]`.

    Args:
        carrier: a tensor whose gradient is wanted in every backward pass.
        losses: 0-dim terms, coefficients included.
    """
    if not losses:
        return carrier
    total = torch.stack(list(losses.values())).sum()
    return _AddLoss.apply(carrier, total, mb)  # type: ignore[no-any-return]
