"""Attention: softmax(q k^T * scale) v per head, grouped KV heads, never the [s, s] scores.

`attention_forward(q, k, v, ...) -> (out, lse)` and `attention_backward(dout, q, k, v, out, lse,
dlse, ...) -> (dq, dk, dv)` know causal (bottom-right) and window masks, documents by cumulative
lengths, start offsets, soft cap and dropout keyed by logical position,
(head * s + query) * s + key, so that it does not depend on which rank holds the head. out and
lse given to the backward may be merged ones (ring attention). Rows that see nothing give 0 and
lse -inf. FLOPs per visible pair: 2 (d + d_v) forward, 2 (3 d + 2 d_v) backward. Scores, softmax
and sums are fp32 (fp64 of fp64).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.attention_sinks import add_sinks, softmax_with_sinks
from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.ops.random import decision_counter, flat_words, keep_mask
from megatron_lite.ops.registration import define_operation

_OPTIONS = (
    "bool causal, int offset, int window, float scale, float softcap, Tensor? q_starts,"
    " Tensor? k_starts, float dropout, int[] decisions, Tensor? samples"
)


@dataclass(frozen=True)
class Options:
    """What attends to what, and how; the operations take the fields in this order.

    Attributes:
        causal: query i sees keys j <= i + s_k - s_q + offset (per document).
        offset: moves the diagonal (parts of a ring).
        window: >= 0: only keys j >= i + s_k - s_q + offset - window.
        scale: of the scores; > 0.
        softcap: > 0: scores become softcap * tanh(score / softcap).
        q_starts: [documents + 1] int32, where each document's queries begin, then the end; the
            batch is 1.
        k_starts: the same of the keys.
        dropout: probability of dropping a probability.
        decisions: with dropout [seed, c3, sequence, first head, first query, first key] as
            signed 64-bit numbers; see ops/random.py.
        samples: with dropout [b] int32, low halves of the samples' indices.
    """

    causal: bool
    offset: int
    window: int
    scale: float
    softcap: float = 0.0
    q_starts: Tensor | None = None
    k_starts: Tensor | None = None
    dropout: float = 0.0
    decisions: tuple[int, ...] = ()
    samples: Tensor | None = None

    def arguments(self) -> tuple[Any, ...]:
        """The last arguments of both operations."""
        return (
            *(self.causal, self.offset, self.window, self.scale, self.softcap),
            *(self.q_starts, self.k_starts, self.dropout, list(self.decisions), self.samples),
        )


def _documents(starts: Tensor | None, s: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Document of every row, and the row's number inside; -1 outside of documents."""
    rows = torch.arange(s, device=device)
    if starts is None:
        return torch.zeros_like(rows), rows
    document = torch.searchsorted(starts.to(rows.dtype), rows, right=True) - 1
    document = torch.where(document >= starts.numel() - 1, -1, document)
    return document, rows - starts.to(rows.dtype)[document.clamp(min=0)]


def _visible(q: Tensor, k: Tensor, o: Options) -> Tensor:
    """[s_q, s_k] bool."""
    s_q, s_k, device = q.shape[0], k.shape[0], q.device
    q_document, i = _documents(o.q_starts, s_q, device)
    k_document, j = _documents(o.k_starts, s_k, device)
    shift = torch.full_like(i, s_k - s_q)
    if o.q_starts is not None and o.k_starts is not None:
        lengths = o.k_starts.diff() - o.q_starts.diff()
        shift = lengths.to(i.dtype)[q_document.clamp(min=0)]
    diagonal = (i + shift + o.offset).unsqueeze(1)
    seen = (q_document.unsqueeze(1) == k_document) & (q_document >= 0).unsqueeze(1)
    if o.causal:
        seen &= j <= diagonal
    if o.window >= 0:
        seen &= j >= diagonal - o.window
    return seen


def _kept(q: Tensor, k: Tensor, o: Options) -> Tensor:
    """[b, n, s_q, s_k] in the softmax's dtype: 0 or 1 / (1 - dropout)."""
    assert o.samples is not None
    seed, c3, sequence, first_head, first_query, first_key = o.decisions
    heads = torch.arange(q.shape[2], device=q.device) + first_head
    rows = heads[:, None] * sequence + first_query + torch.arange(q.shape[0], device=q.device)
    rows = rows.unsqueeze(0).expand(q.shape[1], -1, -1)
    c2 = (o.samples.to(torch.int64) & 0xFFFFFFFF).view(-1, 1, 1).expand_as(rows)
    words = flat_words(rows, sequence, first_key, k.shape[0], c2, c3 & 0xFFFFFFFF, seed)
    return keep_mask(words, o.dropout).to(accumulation_dtype(q.dtype)) * (1.0 / (1.0 - o.dropout))


def _per_head(x_sbgd: Tensor, heads: int) -> Tensor:
    """[s, b, g, d] -> [b, n, s, d] in the softmax's dtype, KV heads repeated."""
    wide = x_sbgd.to(accumulation_dtype(x_sbgd.dtype)).permute(1, 2, 0, 3)
    return wide.repeat_interleave(heads // wide.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    """Masked scores [b, n, s_q, s_k], and the derivative of the soft cap."""
    n = q.shape[2]
    scores = _per_head(q, n) @ _per_head(k, n).transpose(-1, -2) * o.scale
    slope = torch.ones_like(scores)
    if o.softcap > 0:
        capped = torch.tanh(scores / o.softcap)
        scores, slope = capped * o.softcap, 1 - capped.square()
    return scores.masked_fill(~_visible(q, k, o), float("-inf")), slope


def _forward_reference(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    o = Options(*options)
    scores, _ = _scores(q, k, o)
    lse = torch.logsumexp(scores, dim=-1)
    probs = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    if o.dropout > 0:
        probs = probs * _kept(q, k, o)
    out = probs @ _per_head(v, q.shape[2])
    return out.permute(2, 0, 1, 3).contiguous().to(q.dtype), lse


def _backward_reference(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    o = Options(*options)
    n, g = q.shape[2], k.shape[2]
    scores, slope = _scores(q, k, o)
    empty = (lse == float("-inf")).unsqueeze(-1)
    probs = torch.exp(scores - lse.unsqueeze(-1).masked_fill(empty, float("inf")))
    kept = _kept(q, k, o) if o.dropout > 0 else torch.ones_like(probs)
    grad = _per_head(dout, n)
    delta = (grad * _per_head(out, n)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    dscores = probs * ((grad @ _per_head(v, n).transpose(-1, -2)) * kept - delta.unsqueeze(-1))
    dscores = dscores * slope * o.scale

    def gathered(per_head: Tensor) -> Tensor:
        summed = per_head.unflatten(1, (g, n // g)).sum(2)
        return summed.permute(2, 0, 1, 3).contiguous().to(q.dtype)

    dq = (dscores @ _per_head(k, n)).permute(2, 0, 1, 3).contiguous().to(q.dtype)
    dk = gathered(dscores.transpose(-1, -2) @ _per_head(q, n))
    return dq, dk, gathered((probs * kept).transpose(-1, -2) @ grad)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    s, b, n, _d = q.shape
    out = q.new_empty((s, b, n, v.shape[3]))
    return out, q.new_empty((b, n, s), dtype=accumulation_dtype(q.dtype))


def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    o = Options(*options)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, o.q_starts, o.k_starts, o.samples)
    ctx.options = (o.causal, o.offset, o.window, o.scale, o.softcap, o.dropout, o.decisions)


def _backward_rule(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, q_starts, k_starts, samples = ctx.saved_tensors
    *numbers, dropout, decisions = ctx.options
    dout = torch.zeros_like(out) if dout is None else dout
    gradients = attention_backward(
        *(dout, q, k, v, out, lse, dlse),
        *(*numbers, q_starts, k_starts, dropout, decisions, samples),
    )
    return (*gradients, *[None] * 10)


attention_backward = define_operation(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" Tensor? dlse, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _backward_reference,
    _backward_fake,
)
attention_forward = define_operation(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward_reference,
    _forward_fake,
    _backward_rule,
    _keep_for_backward,
)


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Attend with the native operation (its reference where there is none); differentiable.

    Args:
        q: [s_q, b, n, d], any strides; without copies where the last dim is contiguous.
        k: [s_k, b, g, d], n a multiple of g; head i reads KV head i // (n / g).
        v: [s_k, b, g, d_v].
        options: mask, scale, dropout.

    Returns:
        out [s_q, b, n, d_v] in q's dtype, and the log-sum-exp [b, n, s_q] in fp32 (fp64).
    """
    return attention_forward(q, k, v, *options.arguments())  # type: ignore[no-any-return]


def attention_mask(
    first_head: int, n: int, s: int, probability: float, layer: int, mb: MicrobatchContext
) -> Tensor:
    """[b, n, s, s] bool: kept attention probabilities of the n heads from `first_head` on."""
    heads = torch.arange(n, device=mb.full_positions.device) + first_head
    rows = heads[:, None] * s + mb.full_positions[None, :]  # (head * s + query)
    rows = rows.unsqueeze(0).expand(mb.sample_ids.numel(), -1, -1)
    c2 = (mb.sample_ids & 0xFFFFFFFF).view(-1, 1, 1).expand_as(rows)
    counter = decision_counter("attention_dropout", layer, mb.step)
    return keep_mask(flat_words(rows, s, 0, s, c2, counter, mb.seed), probability)


@dataclass(frozen=True, eq=False)
class Form:
    """What a layer's causal attention is like.

    Attributes:
        scale: of the scores.
        window: earlier keys that a query sees; -1: all.
        sinks: [n], this rank's logits of keys without value; None: no sinks.
    """

    scale: float
    window: int = -1
    sinks: Tensor | None = None


def _seen(s_q: int, s_k: int, window: int, device: torch.device) -> Tensor:
    """[s_q, s_k] bool; queries end where keys end (bottom-right)."""
    seen = torch.ones(s_q, s_k, dtype=torch.bool, device=device).tril(s_k - s_q)
    return seen if window < 0 else seen.triu(s_k - s_q - window)


def _explicit(
    q_bnsd: Tensor,
    k_bgsd: Tensor,
    v_bgsd: Tensor,
    keep: Tensor | None,
    probability: float,
    form: Form,
    mb: MicrobatchContext,
) -> Tensor:
    """Attention with materialised probabilities."""
    b, n, s_q, d = q_bnsd.shape
    g, s_k = k_bgsd.shape[1], k_bgsd.shape[2]
    wide = accumulation_dtype(q_bnsd.dtype)
    grouped = q_bnsd.reshape(b, g, n // g * s_q, d)
    scores = (grouped @ k_bgsd.transpose(-1, -2)).view(b, n, s_q, s_k).to(wide) * form.scale
    unseen = ~_seen(s_q, s_k, form.window, scores.device)
    scores = scores.masked_fill(unseen, float("-inf"))
    if form.sinks is None:
        probs = torch.softmax(scores, dim=-1)
    else:
        probs = softmax_with_sinks(scores, form.sinks, mb)
    if keep is not None:
        probs = probs * keep * (1.0 / (1.0 - probability))
    probs = probs.to(q_bnsd.dtype).reshape(b, g, n // g * s_q, s_k)
    return (probs @ v_bgsd).view(b, n, s_q, v_bgsd.shape[3])


def _signed(word: int) -> int:
    """A 64-bit pattern as the signed number that operations take."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _causal_options(
    q: Tensor, first_head: int, probability: float, layer: int, mb: MicrobatchContext, form: Form
) -> Options:
    base = Options(True, 0, form.window, form.scale)
    if probability == 0.0:
        return base
    # In training this rank's heads follow each other and the positions are the whole sequence.
    decisions = (
        *(_signed(mb.seed), decision_counter("attention_dropout", layer, mb.step)),
        *(q.shape[0], first_head, 0, 0),
    )
    samples = (mb.sample_ids & 0xFFFFFFFF).to(torch.int32)
    return Options(
        *(base.causal, base.offset, base.window, base.scale),
        dropout=probability,
        decisions=decisions,
        samples=samples,
    )


def _native_serves(q: Tensor, v: Tensor) -> bool:
    """The one place that says which calls the native operation takes."""
    if not q.is_cuda:
        return True
    half = q.dtype in (torch.bfloat16, torch.float16)
    return half and q.shape[3] % 8 == 0 and v.shape[3] % 8 == 0 and q.shape[3] <= 256


def causal_attention(
    q_sbnd: Tensor,
    k_sbgd: Tensor,
    v_sbgd: Tensor,
    first_head: int,
    probability: float,
    layer: int,
    mb: MicrobatchContext,
    fused: bool = True,
    form: Form | None = None,
) -> Tensor:
    """Attend causally.

    Args:
        q_sbnd: [s_q, b, n, d], this rank's query heads.
        k_sbgd: [s_k, b, g, d], its KV heads; n divides by g, head i reads KV head i // (n/g).
            With s_k > s_q (cached keys) the queries are the last positions.
        v_sbgd: [s_k, b, g, d_v].
        first_head: logical number of the first of the query heads, which follow each other
            (dropout).
        probability: of dropping a probability; off outside training.
        layer: global layer index (dropout).
        mb: positions, sample ids, step.
        fused: never materialise probabilities where a kernel can do without: the native one
            always, torch's without dropout, sinks and values of another width.
        form: scale, window, sinks; default: scores over sqrt(d), no window, no sinks.

    Returns:
        [s_q, b, n * d_v], same dtype.
    """
    form = form or Form(1.0 / math.sqrt(q_sbnd.shape[3]))
    dropping = probability > 0.0 and mb.training
    if fused and mb.native and _native_serves(q_sbnd, v_sbgd):
        rate = probability if dropping else 0.0
        options = _causal_options(q_sbnd, first_head, rate, layer, mb, form)
        out, lse = attend(q_sbnd, k_sbgd, v_sbgd, options)
        if form.sinks is not None:
            out = add_sinks(out, lse, form.sinks, mb)
        return out.flatten(2)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_sbnd, k_sbgd, v_sbgd))
    plain = not dropping and form.sinks is None and q.shape[2] == k.shape[2]
    if fused and plain and q.shape[3] == v.shape[3]:
        seen = None
        if form.window >= 0:
            seen = _seen(q.shape[2], k.shape[2], form.window, q.device)
        out = functional.scaled_dot_product_attention(
            *(q, k, v, seen),
            is_causal=seen is None,
            scale=form.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    else:
        keep = None
        if dropping:
            n, s = q.shape[1:3]
            keep = attention_mask(first_head, n, s, probability, layer, mb)
        out = _explicit(q, k, v, keep, probability, form, mb)
    return out.permute(2, 0, 1, 3).flatten(2)
