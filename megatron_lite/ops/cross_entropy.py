"""Cross-entropy over logits, whole or one rank's shard of the vocabulary.

Per token, with m the largest logit, s = sum exp(x - m), p = x[target] - m and
q = sum (x - m), all over the `classes` columns of the whole vocabulary:

    loss = log s - (1 - e) p - e q / classes + z (m + log s)^2
    d loss / d x_j = (1 + 2 z (m + log s)) exp(x_j - m) / s - (1 - e) [j == target] - e / classes

e is label smoothing as in torch (Megatron's flag is e (classes - 1) / classes of it), z the
coefficient of the z-loss; both 0 by default. Statistics, exponentials and losses are fp32
(fp64 of fp64 logits) whatever the logits are; the gradient is rounded once, to their dtype.
Bound by memory: the native operations read the logits once for loss and statistics and, for
the gradient, read and write them once more from the cache (`cross_entropy_`) or from memory.

Three operations work on logits in place, as a loss that is computed chunk by chunk needs it:
`cross_entropy_statistics` of a shard; `cross_entropy_gradient_` from the reduced statistics
(between them the caller combines shards, see `rebase`); `cross_entropy_` does both where one
rank holds the whole vocabulary. A target outside [0, columns) is held by another rank; columns
from `columns` on are padding, never read, gradient 0; a token whose scale is 0 gets a gradient
of exactly 0. `cross_entropy` is the differentiable one and leaves its input alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.ops.registration import define_operation


def _held(target: Tensor, columns: int) -> Tensor:
    return (target >= 0) & (target < columns)


def _base(peak: Tensor) -> Tensor:
    """What exponents are taken relative to: the maximum, 0 where that is -inf."""
    return peak.masked_fill(peak == float("-inf"), 0.0)


def statistics_reference(
    logits: Tensor, target: Tensor, columns: int, totals: bool
) -> tuple[Tensor, Tensor]:
    """Statistics of a shard in plain torch.

    Args:
        logits: [t, stored].
        target: [t] int64, column of the label in this shard; outside: held elsewhere.
        columns: real columns; the rest is padding.
        totals: also q, which label smoothing needs.

    Returns:
        m [t] (-inf of no columns); s, p (0 where held elsewhere) and with `totals` q, [2 or 3,
        t]; fp32, fp64 of fp64 logits.
    """
    wide = logits[:, :columns].to(accumulation_dtype(logits.dtype))
    sums = wide.new_zeros(3 if totals else 2, wide.shape[0])
    if columns == 0:
        return wide.new_full((wide.shape[0],), float("-inf")), sums
    peak = wide.amax(dim=-1)
    base = _base(peak)
    picked = wide.gather(-1, target.clamp(0, columns - 1).unsqueeze(-1)).squeeze(-1)
    sums[1] = (picked - base).masked_fill(~_held(target, columns), 0.0)
    shifted = wide - base.unsqueeze(-1)
    if totals:
        sums[2] = shifted.sum(dim=-1)
    sums[0] = shifted.exp_().sum(dim=-1)
    return peak, sums


def rebase(sums: Tensor, local_peak: Tensor, peak: Tensor, target: Tensor, columns: int) -> Tensor:
    """Statistics of a shard relative to the maximum of all shards: then they add up.

    Args:
        sums: [2 or 3, t] of `cross_entropy_statistics`; changed in place.
        local_peak: [t], the shard's maximum.
        peak: [t], the maximum over the shards.
        target: [t] int64, as before.
        columns: real columns of the shard.

    Returns:
        sums.
    """
    sums[0].mul_((local_peak - peak).exp_())
    shift = _base(local_peak) - peak
    sums[1].add_(shift.masked_fill(~_held(target, columns), 0.0))
    if sums.shape[0] == 3 and columns:
        sums[2].add_(shift, alpha=columns)
    return sums


def gradient_reference(
    logits: Tensor,
    target: Tensor,
    peak: Tensor,
    sums: Tensor,
    scale: Tensor | None,
    columns: int,
    classes: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """Losses [t]; with `scale` the logits become the gradient. Plain torch.

    Args:
        logits: [t, stored]; changed in place where there is a scale.
        target: [t] int64, as in `statistics_reference`.
        peak: [t], the maximum over the whole vocabulary.
        sums: [2 or 3, t], over the whole vocabulary.
        scale: [t], gradient with respect to each loss; None: the losses only.
        columns: real columns of this shard.
        classes: real columns of all shards.
        label_smoothing: e.
        z_loss: z.
    """
    log_sum = sums[0].log()
    loss = log_sum - (1 - label_smoothing) * sums[1]
    if label_smoothing:
        loss = loss - label_smoothing * sums[2] / classes
    if z_loss:
        loss = loss + z_loss * (peak + log_sum).square()
    if scale is None:
        return loss
    share = scale / sums[0]
    if z_loss:
        share = share * (1 + 2 * z_loss * (peak + log_sum))
    wide = logits[:, :columns].to(sums.dtype)
    grad = wide.sub_(_base(peak).unsqueeze(-1)).exp_().mul_(share.unsqueeze(-1))
    if columns:
        label = (-(1 - label_smoothing) * scale).masked_fill(~_held(target, columns), 0.0)
        index = target.clamp(0, columns - 1).unsqueeze(-1)
        grad.scatter_add_(-1, index, label.unsqueeze(-1))
    if label_smoothing:
        grad.sub_((scale * (label_smoothing / classes)).unsqueeze(-1))
    grad.masked_fill_((scale == 0).unsqueeze(-1), 0.0)
    logits[:, :columns] = grad
    logits[:, columns:] = 0.0
    return loss


def whole_reference(
    logits: Tensor,
    target: Tensor,
    scale: Tensor | None,
    columns: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """Statistics and `gradient_reference` of a vocabulary in one piece; plain torch."""
    peak, sums = statistics_reference(logits, target, columns, label_smoothing != 0)
    return gradient_reference(
        logits, target, peak, sums, scale, columns, columns, label_smoothing, z_loss
    )


def _fake_losses(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=accumulation_dtype(logits.dtype))


cross_entropy_statistics = define_operation(
    "cross_entropy_statistics(Tensor logits, Tensor target, int columns, bool totals)"
    " -> (Tensor, Tensor)",
    statistics_reference,
)
cross_entropy_gradient_ = define_operation(
    "cross_entropy_gradient_(Tensor(a!) logits, Tensor target, Tensor peak, Tensor sums,"
    " Tensor? scale, int columns, int classes, float label_smoothing, float z_loss) -> Tensor",
    gradient_reference,
    _fake_losses,
)
cross_entropy_ = define_operation(
    "cross_entropy_(Tensor(a!) logits, Tensor target, Tensor? scale, int columns,"
    " float label_smoothing, float z_loss) -> Tensor",
    whole_reference,
    _fake_losses,
)


def _differentiable(
    logits: Tensor, target: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    v = logits.shape[1]
    peak, sums = cross_entropy_statistics(logits, target, v, label_smoothing != 0)
    # The operation that may write to the logits would count as a change of them.
    loss = gradient_reference(logits, target, peak, sums, None, v, v, label_smoothing, z_loss)
    return loss.masked_fill_(~_held(target, v), 0.0), peak, sums


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, ctx.label_smoothing, ctx.z_loss = inputs
    _, peak, sums = output
    ctx.mark_non_differentiable(peak, sums)
    ctx.save_for_backward(logits, target, peak, sums)


def _backward_rule(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    logits, target, peak, sums = ctx.saved_tensors
    v = logits.shape[1]
    scale = grads[0].masked_fill(~_held(target, v), 0.0)
    grad = logits.clone(memory_format=torch.contiguous_format)
    cross_entropy_gradient_(grad, target, peak, sums, scale, v, v, ctx.label_smoothing, ctx.z_loss)
    return grad, None, None, None


_cross_entropy = define_operation(
    "cross_entropy(Tensor logits, Tensor target, float label_smoothing, float z_loss)"
    " -> (Tensor, Tensor, Tensor)",
    _differentiable,
    backward=_backward_rule,
    setup_context=_keep_for_backward,
)


def cross_entropy(
    logits: Tensor, target: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Loss of every token, differentiable with respect to the logits.

    Args:
        logits: [..., v], fp32, bf16, fp16 or fp64.
        target: [...] int64; a token whose target is outside [0, v) is ignored: loss 0,
            gradient 0.
        label_smoothing: e of the formula.
        z_loss: z of the formula.

    Returns:
        [...], fp32 (fp64 of fp64 logits).
    """
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits: must be [..., v] with v >= 1, not {list(logits.shape)}")
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target: must have shape {list(logits.shape[:-1])}, not {list(target.shape)}"
        )
    flat = logits.reshape(-1, logits.shape[-1])
    loss, _, _ = _cross_entropy(flat, target.reshape(-1), label_smoothing, z_loss)
    return loss.view(target.shape)  # type: ignore[no-any-return]
