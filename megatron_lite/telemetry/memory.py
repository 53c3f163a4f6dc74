"""The memory ledger: bytes per rank, closed form, before anything is allocated.

One function serves the start-up summary, the planner and the tests that compare it with
measured bytes. State (state_memory.py) is exact; activations are what the modules keep for
the backward pass, without allocator overhead, temporaries of single operations and
communication buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_lite.telemetry.expert_memory import (
    deferred_expert_bytes,
    experts_bytes,
    replica_gradient_bytes,
)
from megatron_lite.telemetry.flops import dense_mlp_width, local_kv_heads
from megatron_lite.telemetry.latent_memory import (
    deferred_latent_bytes,
    latent_channels,
    latents_bytes,
)
from megatron_lite.telemetry.state_memory import DTYPE_BYTES, StateBytes

if TYPE_CHECKING:
    from megatron_lite.config.plan import ModelShape, ParallelShape, PrecisionShape


@dataclass(frozen=True)
class MemoryLedger:
    """Bytes of one rank by purpose; `state` is exact, the others are estimates."""

    state: StateBytes
    activations_bytes: int
    logits_bytes: int
    messages_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """State, saved activations, messages of a pipeline and the logits chunk."""
        working = self.activations_bytes + self.messages_bytes + self.logits_bytes
        return self.state.resident + self.state.transient + working

    def rows(self) -> tuple[tuple[str, int], ...]:
        """(purpose, bytes) in printing order."""
        state = self.state
        passing = (
            (f"gradient buckets (largest {state.largest_unit})", state.gradient_buckets),
            (f"gathered parameters (largest {state.largest_unit})", state.gathered),
        )
        return (
            ("parameters", state.parameters),
            ("main gradients", state.main_grads),
            ("master weights", state.masters),
            ("optimizer moments", state.moments),
            *([("offloaded", state.elsewhere)] if state.elsewhere else []),
            *(row for row in passing if row[1]),
            ("activations (estimate)", self.activations_bytes),
            *([("messages (estimate)", self.messages_bytes)] if self.messages_bytes else []),
            ("logits chunk (estimate)", self.logits_bytes),
            ("total", self.total_bytes),
        )


def _ceil_div(count: int, parts: int) -> int:
    return -(-count // parts)


@dataclass(frozen=True)
class ActivationShape:
    """What one microbatch of one rank looks like to the activation formulas.

    Attributes:
        model: architecture; dropout rates decide whether masks are kept.
        parallel: tp cuts heads and ffn, cp the sequence, SP also the residual stream.
        precision: compute dtype; statistics and softmax are fp32 (fp64 under fp64).
        samples: of the microbatch.
        fused_attention: probabilities are not formed where a kernel can do without: torch's
            can where there is no attention dropout, the native one always.
        native: native operations, which draw dropout masks again instead of keeping them.
    """

    model: ModelShape
    parallel: ParallelShape
    precision: PrecisionShape
    samples: int
    fused_attention: bool = True
    native: bool = False

    @property
    def narrow(self) -> int:
        """Bytes of an element in the compute dtype."""
        return DTYPE_BYTES[self.precision.compute]

    @property
    def wide(self) -> int:
        """Bytes of a statistic, probability or logit."""
        return wide_bytes(self.precision)

    @property
    def tokens(self) -> int:
        """Tokens inside a tensor-parallel region."""
        return _ceil_div(self.model.seq_length, self.parallel.cp) * self.samples

    @property
    def stream_tokens(self) -> int:
        """Tokens of the residual stream, a slice of them under sequence parallelism."""
        parts = self.parallel.tp if self.parallel.sequence_parallel else 1
        return _ceil_div(self.tokens, parts)

    @property
    def stream_bytes(self) -> int:
        """One hidden-state tensor [s_local, b, h]."""
        return self.stream_tokens * self.model.hidden_size * self.narrow

    @property
    def statistics(self) -> int:
        """Numbers a norm keeps per row."""
        return 2 if self.model.normalization == "LayerNorm" else 1

    @property
    def explicit_attention(self) -> bool:
        """Whether [s, s] probabilities are formed."""
        model = self.model
        explicit = model.attention_dropout > 0.0 or model.sinks != "none"
        explicit = explicit or model.kv_channels != model.value_channels
        return (explicit and not self.native) or not self.fused_attention

    @property
    def keeps_masks(self) -> bool:
        """Whether the masks of hidden dropout are kept, one byte per element."""
        return self.model.hidden_dropout > 0.0 and not self.native


def wide_bytes(precision: PrecisionShape) -> int:
    """Bytes of what is never below fp32."""
    return 8 if precision.compute == "float64" else 4


def probability_bytes(shape: ActivationShape) -> int:
    """What explicit attention keeps per layer beyond q, k and v.

    Per pair the softmax (wide), its compute-dtype or dropped-out copy, the dropout mask;
    once the causal mask. Sinks are a column of the softmax.
    """
    dropping, sinks = shape.model.attention_dropout > 0.0, shape.model.sinks != "none"
    per_pair = shape.wide
    if dropping or shape.narrow != shape.wide:
        per_pair += shape.narrow
    if dropping:
        per_pair += 1
    heads = shape.model.num_attention_heads // shape.parallel.tp
    s = shape.model.seq_length
    per_row = s * per_pair + (shape.wide if sinks else 0)
    return heads * shape.tokens * per_row + s * s


def attention_bytes(shape: ActivationShape, keep_probabilities: bool) -> int:
    """What the attention core of one layer keeps: q, k, v, the context and its statistics."""
    model, parallel = shape.model, shape.parallel
    heads = model.num_attention_heads // parallel.tp
    kv_heads = local_kv_heads(model, parallel.tp)
    query, kv = heads * model.kv_channels, kv_heads * model.kv_channels
    fused_qkv = query + 2 * kv
    is_explicit = keep_probabilities and shape.explicit_attention
    extra = core_bytes(shape, is_explicit) if keep_probabilities else 0
    if model.latent is not None:
        inside = latent_channels(shape) * shape.tokens * shape.narrow
        return inside + latents_bytes(shape) + extra
    elements = query  # the context, input of the projection
    if is_explicit:
        # Per-head copies replace the fused tensor, which q/k norms still need, and where a lone
        # head is read as it lies.
        makes_heads = model.qk_norm or model.rotary is not None
        elements += query if heads > 1 or makes_heads else 0
        elements += 2 * kv if kv_heads > 1 else kv if makes_heads else 0
        elements += fused_qkv if model.qk_norm or kv_heads == 1 else 0
    else:
        # v stays a view of the fused tensor; rotary and q/k norm make new q and k.
        elements += fused_qkv
        if model.qk_norm or model.rotary is not None:
            elements += query + kv
    if model.qk_norm:
        extra += shape.tokens * (heads + kv_heads) * shape.statistics * shape.wide
    return elements * shape.tokens * shape.narrow + extra


def core_bytes(shape: ActivationShape, is_explicit: bool) -> int:
    """What the attention core keeps beside its inputs and the context."""
    model = shape.model
    if is_explicit:
        return probability_bytes(shape)
    rows = model.num_attention_heads // shape.parallel.tp * shape.tokens
    kept = rows * shape.wide  # log-sum-exp
    if model.sinks != "none":
        kept += rows * model.value_channels * shape.narrow  # the context without sinks
    if model.window is not None and not shape.native:  # torch's mask, where there is one
        mask_bytes = model.seq_length**2 * shape.narrow
        kept += mask_bytes * len(model.window.layers) // model.num_layers
    return kept


def layer_bytes(shape: ActivationShape, layer: int, keep_probabilities: bool = True) -> int:
    """What one layer keeps for its backward pass.

    Args:
        shape: the microbatch.
        layer: its global number.
        keep_probabilities: False under selective recomputation.
    """
    model = shape.model
    # Both norms' inputs and outputs: only this rank's slice under sequence parallelism.
    total = 4 * shape.stream_bytes
    total += 2 * shape.stream_tokens * shape.statistics * shape.wide
    if shape.keeps_masks:
        total += 2 * shape.stream_tokens * model.hidden_size  # one byte per element
    total += attention_bytes(shape, keep_probabilities)
    if model.is_moe(layer):
        total += experts_bytes(shape)
    return total + mlp_channels(shape, layer) * shape.tokens * shape.narrow


def mlp_channels(shape: ActivationShape, layer: int) -> int:
    """Channels inside a layer's MLP or shared expert, on this rank."""
    first = 2 if shape.model.gated else 1
    return (first + 1) * _ceil_div(dense_mlp_width(shape.model, layer), shape.parallel.tp)


def deferred_bytes(shape: ActivationShape, layer: int) -> int:
    """What one layer leaves between I and W: inputs and output gradients of its products."""
    model, parallel = shape.model, shape.parallel
    query = model.num_attention_heads // parallel.tp * model.kv_channels
    fused_qkv = query + 2 * local_kv_heads(model, parallel.tp) * model.kv_channels
    # Under sequence parallelism, too: what was gathered for the products is kept whole.
    inner = mlp_channels(shape, layer)
    channels = (2 if inner else 0) * model.hidden_size + inner
    further = deferred_expert_bytes(shape) if model.is_moe(layer) else 0
    if model.latent is None:
        channels += 2 * model.hidden_size + query + fused_qkv
    else:
        further += deferred_latent_bytes(shape)
    return channels * shape.tokens * shape.narrow + further


def end_bytes(
    shape: ActivationShape, *, embedding: bool = True, head: bool = True, layers: bool = True
) -> int:
    """What a stage keeps once per microbatch, outside the layers.

    Token ids with their vocabulary mask (8 + 1 bytes) and the dropout mask behind the
    embedding; rotary tables; the head's input gradient, the final norm's input, statistics.
    """
    model, total = shape.model, 0
    if embedding:
        total += 9 * shape.tokens
        if shape.keeps_masks:
            total += shape.stream_tokens * model.hidden_size
    if layers and model.rotary is not None:
        total += model.seq_length * model.rotary.dim * shape.wide  # cosine and sine
    if head:
        total += 2 * shape.stream_bytes + shape.stream_tokens * shape.statistics * shape.wide
    return total


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one microbatch in one stage.

    Attributes:
        kept_bytes: between F and the start of its backward.
        deferred_bytes: between I and W.
        working_bytes: what one recomputed region brings back for a moment, and the gradients
            of one layer's hot experts.
    """

    kept_bytes: int
    deferred_bytes: int
    working_bytes: int


def estimate_stage_bytes(
    shape: ActivationShape,
    layers: Sequence[int],
    *,
    embedding: bool = True,
    head: bool = True,
    recompute: str = "none",
    recomputed_layers: int | None = None,
    recompute_group: int = 1,
) -> StageMemory:
    """Bytes that one stage keeps for one microbatch.

    Args:
        shape: the microbatch.
        layers: global numbers of the transformer layers of the stage.
        embedding, head: it begins with the one, ends with the other.
        recompute: "none", "selective" (the attention core) or "full" (whole layers).
        recomputed_layers: layers under "full"; None = all.
        recompute_group: layers that are recomputed together.
    """
    whole = [layer_bytes(shape, layer) for layer in layers]
    kept, working = sum(whole), 0
    if recompute == "selective":
        kept = sum(layer_bytes(shape, layer, keep_probabilities=False) for layer in layers)
        if shape.explicit_attention and layers:
            working = probability_bytes(shape)
    elif recompute == "full":
        light = len(layers) if recomputed_layers is None else min(recomputed_layers, len(layers))
        starts = range(0, light, recompute_group)
        kept = len(starts) * shape.stream_bytes + sum(whole[light:])
        working = max((sum(whole[:light][at : at + recompute_group]) for at in starts), default=0)
    if any(shape.model.is_moe(layer) for layer in layers):
        working += replica_gradient_bytes(shape)
    ends = end_bytes(shape, embedding=embedding, head=head, layers=len(layers) > 0)
    return StageMemory(kept + ends, sum(deferred_bytes(shape, n) for n in layers), working)


def estimate_activation_bytes(
    shape: ActivationShape,
    layers: Sequence[int],
    *,
    microbatches_in_flight: int = 1,
    **recompute: Any,
) -> int:
    """Bytes kept between forward and backward by a rank that holds the whole model.

    Args:
        shape: one microbatch.
        layers: global numbers of the transformer layers.
        microbatches_in_flight: microbatches whose backward pass is outstanding.
        recompute: see `estimate_stage_bytes`.

    Returns:
        What is kept plus, with recomputation, what one recomputed region brings back.
    """
    stage = estimate_stage_bytes(shape, layers, **recompute)
    return stage.kept_bytes * microbatches_in_flight + stage.working_bytes


def estimate_logits_bytes(
    model: ModelShape,
    parallel: ParallelShape,
    precision: PrecisionShape,
    *,
    chunk_tokens: int,
    native: bool = False,
) -> int:
    """Bytes of one logits chunk: the compute dtype, and without native operations fp32 (fp64)."""
    local_vocab = model.padded_vocab_size(parallel.tp) // parallel.tp
    wide, narrow = wide_bytes(precision), DTYPE_BYTES[precision.compute]
    per_logit = narrow if native or narrow == wide else wide + narrow
    return chunk_tokens * local_vocab * per_logit


def estimate_memory(
    model: ModelShape,
    parallel: ParallelShape,
    precision: PrecisionShape,
    state: StateBytes,
    *,
    micro_batch_size: int,
    layers: Sequence[int],
    has_head: bool = True,
    recompute: str = "none",
    recomputed_layers: int | None = None,
    recompute_group: int = 1,
    microbatches_in_flight: int = 1,
    logits_chunk_tokens: int | None = None,
    fused_attention: bool = True,
    native: bool = False,
) -> MemoryLedger:
    """Fill the ledger of one rank. Arguments are those of the estimates above.

    `logits_chunk_tokens` None means the whole microbatch is one chunk.
    """
    shape = ActivationShape(model, parallel, precision, micro_batch_size, fused_attention, native)
    activations = estimate_activation_bytes(
        shape,
        layers,
        recompute=recompute,
        recomputed_layers=recomputed_layers,
        recompute_group=recompute_group,
        microbatches_in_flight=microbatches_in_flight,
    )
    chunk = shape.tokens
    if logits_chunk_tokens is not None:
        chunk = min(chunk, logits_chunk_tokens)
    logits = estimate_logits_bytes(model, parallel, precision, chunk_tokens=chunk, native=native)
    return MemoryLedger(state, activations, logits if has_head else 0)
