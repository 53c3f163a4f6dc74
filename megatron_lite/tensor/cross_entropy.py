"""Output projection and cross-entropy in one pass over chunks of tokens.

Logits are formed for one chunk at a time, in fp32 (fp64 under --fp64), and turned at once
into the loss, the gradient of the hidden states and the weight gradient: they are neither
kept nor recomputed. That is possible because the loss is divided by a denominator that is
known before the work starts; the caller's backward pass must therefore start with gradient 1.
Padding rows of the vocabulary take no part.

FLOPs: 6*t*v*h in training, 2*t*v*h in evaluation. Memory: 2 copies of one chunk's logits.
Comm per chunk: one MAX of the chunk's tokens, one SUM of twice that; and once per
microbatch the reduction of the hidden gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.mesh import collectives
from megatron_lite.mesh.groups import Group
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.tensor.linear import gather_sequence, reduce_scatter_sequence

_CHUNK_BYTES = 32 * 2**20


def chunk_count(tokens: int, vocab_rows: int, most: int) -> int:
    """Chunks of a microbatch: as few as keep fp32 logits near 32 MiB, at most `most`."""
    wanted = math.ceil(tokens * max(vocab_rows, 1) * 4 / _CHUNK_BYTES)
    return max(1, min(wanted, most, tokens))


def _chunk_loss(logits: Tensor, target: Tensor, tp_group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and softmax pieces of one chunk; `logits` becomes the exponentials in place.

    Args:
        logits: [t, v_local] of this rank's rows.
        target: [t] int64 local row of the label, or -1 where another rank holds it.

    Returns:
        loss [t], sum of exponentials [t] (both global), rows [t] that hold their target.
    """
    if logits.shape[1]:
        peak = logits.amax(dim=-1)
    else:  # all of this rank's rows are padding
        peak = logits.new_full((logits.shape[0],), float("-inf"))
    collectives.all_reduce(peak, tp_group, op="max")
    logits.sub_(peak.unsqueeze(-1))
    held = target >= 0
    sums = logits.new_zeros(2, logits.shape[0])
    if logits.shape[1]:
        picked = logits.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        sums[1] = picked.masked_fill(~held, 0.0)
        logits.exp_()
        sums[0] = logits.sum(dim=-1)
    collectives.all_reduce(sums, tp_group)
    return sums[0].log() - sums[1], sums[0], held


def _head(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    scale: Tensor | None,
    chunks: int,
    tp_group: Group,
    main: Tensor | None,
    grad_hidden: Tensor | None,
) -> Tensor:
    """Loop over chunks; returns per-token losses [t], fills `main` and `grad_hidden`."""
    wide = accumulation_dtype(hidden.dtype)
    losses = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
    rows = math.ceil(hidden.shape[0] / chunks)
    for first in range(0, hidden.shape[0], rows):
        part = slice(first, first + rows)
        logits = (hidden[part] @ weight.t()).to(wide)
        loss, total, held = _chunk_loss(logits, target[part], tp_group)
        losses[part] = loss
        if grad_hidden is None or scale is None:
            continue
        factor = scale[part]
        grad = logits.mul_((factor / total).unsqueeze(-1))
        if grad.shape[1]:
            index = target[part].clamp(min=0).unsqueeze(-1)
            grad.scatter_add_(-1, index, (-factor * held).unsqueeze(-1))
        grad = grad.to(hidden.dtype)
        torch.mm(grad, weight, out=grad_hidden[part])
        if main is not None:
            if main.dtype == grad.dtype:
                main.addmm_(grad.t(), hidden[part])
            else:
                main.add_(grad.t() @ hidden[part])
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
        denominator: Tensor,
    ) -> Tensor:
        full = gather_sequence(hidden, tp_group) if sequence_parallel else hidden
        s, b, h = full.shape
        flat = full.reshape(s * b, h)
        first, rows = vocab_range
        target = labels.reshape(-1) - first
        target = torch.where((target >= 0) & (target < rows), target, -1)
        assert mb.loss_weights is not None
        weights = mb.loss_weights.reshape(-1).to(accumulation_dtype(hidden.dtype))
        needs_grad = mb.wgrads is not None
        grad_flat = torch.empty_like(flat) if needs_grad else None
        main = mb.wgrads.main_grad(weight) if mb.wgrads is not None else None
        chunks = chunk_count(s * b, rows, most_chunks)
        losses = _head(
            flat,
            weight.detach()[:rows],
            target,
            weights / denominator if needs_grad else None,
            chunks,
            tp_group,
            main[:rows] if main is not None else None,
            grad_flat,
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
        mb.losses.per_sample["lm"] = weighted.sum(0)
        mb.losses.add("lm", weighted.sum())
        return weighted.sum() / denominator

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
        mb: loss weights, denominators["lm"], sinks. `mb.losses` receives the undivided sum
            and the sums per sample.

    Returns:
        0-dim loss; call backward with gradient 1.
    """
    sliced = sequence_parallel and tp_group.size > 1
    return _HeadLoss.apply(  # type: ignore[no-any-return]
        hidden,
        weight,
        labels,
        vocab_range,
        most_chunks,
        tp_group,
        sliced,
        mb,
        mb.denominators["lm"],
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
