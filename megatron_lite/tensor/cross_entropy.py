"""Output projection and cross-entropy in one pass over chunks of tokens.

Logits are formed for one chunk at a time in one buffer, in the dtype of the hidden states, and
turned in place into their gradient, which leaves at once for the hidden states and the weight:
they are neither kept nor recomputed. That is possible because the loss is divided by a
denominator that is known before the work starts; the caller's backward pass must therefore
start with gradient 1. Padding rows of the vocabulary take no part.

Rounded to bf16 or fp16 are each logit (after an fp32 sum) and each gradient of a logit; maxima,
exponentials, sums and losses are fp32 (fp64 under --fp64), see `ops/cross_entropy.py`.

FLOPs: 6*t*v*h in training, 2*t*v*h in evaluation. Memory: one chunk's logits (plain torch: and
fp32 copies of them). Comm per chunk: one MAX of the chunk's tokens, one SUM of twice that; and
once per microbatch the reduction of the hidden gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.mesh import collectives
from megatron_lite.mesh.groups import Group
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops import cross_entropy as ops
from megatron_lite.ops.matrix import accumulate_product
from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.tensor.linear import gather_sequence, reduce_scatter_sequence

_CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True, eq=False)
class LossTerm:
    """One of the losses that a step adds up.

    Attributes:
        name: of its denominator and of its sums.
        weights: [s, b], of each target.
        factor: of the loss in what is minimised.
    """

    name: str
    weights: Tensor
    factor: float = 1.0


def chunk_count(tokens: int, vocab_rows: int, most: int, element_bytes: int = 4) -> int:
    """Chunks of a microbatch: as few as keep the logits near 32 MiB, at most `most`.

    `element_bytes` is that of the widest copy of the logits: theirs in native operations, 4
    (or 8) in plain torch.
    """
    wanted = math.ceil(tokens * max(vocab_rows, 1) * element_bytes / _CHUNK_BYTES)
    return max(1, min(wanted, most, tokens))


def _chunk_losses(
    logits: Tensor, target: Tensor, scale: Tensor | None, tp_group: Group, native: bool
) -> Tensor:
    """Losses [t] of one chunk; with `scale` the logits become their gradient in place.

    Args:
        logits: [t, v_local] of this rank's rows.
        target: [t] int64 local row of the label, or -1 where another rank holds it.
        scale: [t], gradient with respect to each loss.
    """
    v = logits.shape[1]
    if tp_group.size == 1:
        whole = ops.cross_entropy_ if native else ops.whole_reference
        return whole(logits, target, scale, v, 0.0, 0.0)  # type: ignore[no-any-return]
    statistics = ops.cross_entropy_statistics if native else ops.statistics_reference
    gradient = ops.cross_entropy_gradient_ if native else ops.gradient_reference
    local_peak, sums = statistics(logits, target, v, False)
    peak = local_peak.clone()
    collectives.all_reduce(peak, tp_group, op="max")
    ops.rebase(sums, local_peak, peak, target, v)
    collectives.all_reduce(sums, tp_group)
    # Without label smoothing the number of classes does not matter.
    return gradient(logits, target, peak, sums, scale, v, v, 0.0, 0.0)  # type: ignore[no-any-return]


def _head(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    scale: Tensor | None,
    chunks: int,
    tp_group: Group,
    main: Tensor | None,
    grad_hidden: Tensor | None,
    native: bool,
) -> Tensor:
    """Loop over chunks; returns per-token losses [t], fills `main` and `grad_hidden`."""
    losses = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype))
    rows = math.ceil(hidden.shape[0] / chunks)
    buffer = hidden.new_empty(rows, weight.shape[0])
    for first in range(0, hidden.shape[0], rows):
        part = slice(first, first + rows)
        x = hidden[part]
        logits = buffer[: x.shape[0]]
        torch.mm(x, weight.t(), out=logits)
        factor = None if scale is None else scale[part]
        losses[part] = _chunk_losses(logits, target[part], factor, tp_group, native)
        if grad_hidden is None or scale is None:
            continue
        torch.mm(logits, weight, out=grad_hidden[part])
        if main is not None:
            accumulate_product(main, logits, x, native)
    return losses


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: nn.Parameter,
        labels: Tensor,
        vocab_range: tuple[int, int],
        most_chunks: int,
        tp_group: Group,
        sequence_parallel: bool,
        mb: MicrobatchContext,
        term: LossTerm,
    ) -> Tensor:
        denominator = mb.denominators[term.name]
        full = gather_sequence(hidden, tp_group) if sequence_parallel else hidden
        s, b, h = full.shape
        flat = full.reshape(s * b, h)
        first, rows = vocab_range
        target = labels.reshape(-1) - first
        target = torch.where((target >= 0) & (target < rows), target, -1)
        weights = term.weights.reshape(-1).to(accumulation_dtype(hidden.dtype))
        needs_grad = mb.wgrads is not None
        grad_flat = torch.empty_like(flat) if needs_grad else None
        main = mb.wgrads.main_grad(weight) if mb.wgrads is not None else None
        element_bytes = flat.element_size() if mb.native else 4
        chunks = chunk_count(s * b, rows, most_chunks, element_bytes)
        losses = _head(
            flat,
            weight.detach()[:rows],
            target,
            weights * term.factor / denominator if needs_grad else None,
            chunks,
            tp_group,
            main[:rows] if main is not None else None,
            grad_flat,
            mb.native,
        )
        if mb.wgrads is not None:
            mb.wgrads.written(weight)
        if grad_flat is not None:
            grad = grad_flat.view(s, b, h)
            if sequence_parallel:
                grad = reduce_scatter_sequence(grad, tp_group)
            else:
                collectives.all_reduce(grad, tp_group)
            ctx.save_for_backward(grad)
        weighted = (losses * weights).view(s, b)
        mb.losses.per_sample[term.name] = weighted.sum(0)
        mb.losses.add(term.name, weighted.sum())
        return weighted.sum() * term.factor / denominator

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The weight gradient is already in place, scaled for an outer gradient of 1.
        (grad,) = ctx.saved_tensors
        return grad, None, None, None, None, None, None, None, None


def head_cross_entropy(
    hidden: Tensor,
    weight: nn.Parameter,
    labels: Tensor,
    vocab_range: tuple[int, int],
    most_chunks: int,
    tp_group: Group,
    sequence_parallel: bool,
    mb: MicrobatchContext,
    term: LossTerm | None = None,
) -> Tensor:
    """Weighted token loss of a microbatch, divided by the step's denominator.

    Args:
        hidden: [s, b, h] replicated over tp, or [s/tp, b, h] shard(0).
        weight: [padded_v/tp, h], shard(0): the output layer or the tied embedding.
        labels: [s, b] int64.
        vocab_range: first vocabulary id of this rank and how many of its rows are real.
        most_chunks: upper bound of the number of chunks.
        tp_group: the tensor-parallel group.
        sequence_parallel: hidden is a slice of the sequence.
        mb: loss weights, denominators, sinks. `mb.losses` receives the undivided sum and the
            sums per sample, under the term's name.
        term: which loss; "lm" with the weights of `mb` when None.

    Returns:
        0-dim loss; call backward with gradient 1.
    """
    sliced = sequence_parallel and tp_group.size > 1
    if term is None:
        assert mb.loss_weights is not None
        term = LossTerm("lm", mb.loss_weights)
    return _HeadLoss.apply(  # type: ignore[no-any-return]
        hidden,
        weight,
        labels,
        vocab_range,
        most_chunks,
        tp_group,
        sliced,
        mb,
        term,
    )


def vocabulary_logits(hidden: Tensor, weight: Tensor, vocab_size: int, tp_group: Group) -> Tensor:
    """Full logits for sampling: [s, b, h] -> [s, b, v], replicated over tp. No gradient.

    Comm: all-gather of s*b*padded_v elements.
    """
    local = hidden.detach() @ weight.detach().t()
    if tp_group.size == 1:
        return local[..., :vocab_size]
    stacked = local.new_empty(tp_group.size * local.shape[0], *local.shape[1:])
    collectives.all_gather_into(stacked, local, tp_group)
    parts = stacked.chunk(tp_group.size, dim=0)
    return torch.cat(parts, dim=-1)[..., :vocab_size]
