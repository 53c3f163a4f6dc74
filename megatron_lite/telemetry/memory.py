"""The memory ledger: bytes per rank, closed form, before anything is allocated.

One function serves the start-up summary, the planner and the tests that compare it with
measured bytes. State (parameters, gradients, masters, moments) is exact; activations are
what the modules save for the backward pass by construction, an estimate without
allocator overhead, temporaries and communication buffers. MiB = 2**20 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_lite.telemetry.flops import local_kv_heads

if TYPE_CHECKING:
    from megatron_lite.config.plan import ModelShape, ParallelShape, PrecisionShape

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "uint8": 1,
    "int64": 8,
}

MOMENTS: Mapping[str, int] = {"adam": 2, "sgd": 1, "sgd_plain": 0}


@dataclass(frozen=True)
class StateSharding:
    """Over how many ranks each kind of state is divided (1 = replicated)."""

    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1


@dataclass(frozen=True)
class MemoryLedger:
    """Bytes of one rank by purpose. `total` is their sum at the peak of a step."""

    parameters_bytes: int
    main_grads_bytes: int
    masters_bytes: int
    moments_bytes: int
    activations_bytes: int
    logits_bytes: int

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state: what is there between steps."""
        return (
            self.parameters_bytes + self.main_grads_bytes + self.masters_bytes + self.moments_bytes
        )

    @property
    def total_bytes(self) -> int:
        """State, saved activations and the logits chunk."""
        return self.state_bytes + self.activations_bytes + self.logits_bytes

    def rows(self) -> tuple[tuple[str, int], ...]:
        """(purpose, bytes) in printing order."""
        return (
            ("parameters", self.parameters_bytes),
            ("main gradients", self.main_grads_bytes),
            ("master weights", self.masters_bytes),
            ("optimizer moments", self.moments_bytes),
            ("activations (estimate)", self.activations_bytes),
            ("logits chunk (estimate)", self.logits_bytes),
            ("total", self.total_bytes),
        )


def _ceil_div(count: int, parts: int) -> int:
    return -(-count // parts)


def estimate_state_bytes(
    local_elements: Mapping[str, int],
    precision: PrecisionShape,
    *,
    optimizer: str = "adam",
    sharding: StateSharding | None = None,
) -> tuple[int, int, int, int]:
    """Bytes of parameters, main gradients, masters and moments on one rank.

    Args:
        local_elements: elements this rank holds, by the dtype they are stored in
            (sum of `local_shape` over the specs, padding rows included).
        precision: master and main-gradient dtypes. A parameter stored in the master
            dtype has no separate master.
        optimizer: "adam" (two moments), "sgd" (one momentum), "sgd_plain" (none).
        sharding: ranks that share each kind of state; shards are rounded up.
    """
    cut = sharding or StateSharding()
    parameters = grads = masters = moments = 0
    for dtype, elements in local_elements.items():
        owned = _ceil_div(elements, cut.optimizer)
        parameters += _ceil_div(elements, cut.parameters) * DTYPE_BYTES[dtype]
        grads += _ceil_div(elements, cut.gradients) * DTYPE_BYTES[precision.main_grad]
        if dtype != precision.master:
            masters += owned * DTYPE_BYTES[precision.master]
        moments += MOMENTS[optimizer] * owned * DTYPE_BYTES[precision.master]
    return parameters, grads, masters, moments


def layer_input_elements(model: ModelShape, parallel: ParallelShape, samples: int) -> int:
    """Elements of one residual-stream tensor on a rank: s*b*h, cut by cp and under SP by tp."""
    tokens = _ceil_div(model.seq_length, parallel.cp) * samples
    sequence_parts = parallel.tp if parallel.sequence_parallel else 1
    return _ceil_div(tokens, sequence_parts) * model.hidden_size


def layer_activation_elements(
    model: ModelShape, parallel: ParallelShape, samples: int, *, keep_attention: bool
) -> int:
    """Elements one layer saves for its backward pass, compute dtype.

    Saved: both norms' inputs and outputs (only this rank's sequence slice under SP), q, k,
    v, the attention context, fc1's output and fc2's input (cut over tp). With
    `keep_attention` also the [n/tp, s, s] probabilities of each sample, twice when they
    are dropped out. Dropout masks are recomputed from their counters, never saved.
    """
    tokens = _ceil_div(model.seq_length, parallel.cp) * samples
    local_query = model.num_attention_heads // parallel.tp * model.kv_channels
    local_kv = local_kv_heads(model, parallel.tp) * model.kv_channels
    local_ffn = _ceil_div(model.ffn_hidden_size, parallel.tp)
    fc1_outputs = 2 if model.gated else 1
    elements = 4 * layer_input_elements(model, parallel, samples)
    elements += tokens * (2 * local_query + 2 * local_kv + (fc1_outputs + 1) * local_ffn)
    if keep_attention:
        copies = 2 if model.attention_dropout > 0.0 else 1
        heads = model.num_attention_heads // parallel.tp
        elements += copies * heads * tokens * model.seq_length
    return elements


def estimate_activation_bytes(
    model: ModelShape,
    parallel: ParallelShape,
    precision: PrecisionShape,
    *,
    micro_batch_size: int,
    layers: int,
    recompute: str = "none",
    recomputed_layers: int | None = None,
    microbatches_in_flight: int = 1,
) -> int:
    """Bytes of saved activations on one rank at the peak of a step.

    Args:
        micro_batch_size: samples of a microbatch.
        layers: transformer layers on this rank.
        recompute: "none", "selective" (attention probabilities are not kept) or "full"
            (only the layer's input is kept, plus one layer at work).
        recomputed_layers: layers under "full"; None = all.
        microbatches_in_flight: microbatches whose backward pass is outstanding.
    """
    keep = recompute == "none"
    one_layer = layer_activation_elements(model, parallel, micro_batch_size, keep_attention=keep)
    one_input = layer_input_elements(model, parallel, micro_batch_size)
    working = 0
    if recompute == "full":
        light = layers if recomputed_layers is None else min(recomputed_layers, layers)
        one_layer = layer_activation_elements(
            model, parallel, micro_batch_size, keep_attention=True
        )
        elements = light * one_input + (layers - light) * one_layer
        working = one_layer if light else 0
    else:
        elements = layers * one_layer
    elements += 2 * one_input  # the final norm's input and output
    return (elements * microbatches_in_flight + working) * DTYPE_BYTES[precision.compute]


def estimate_logits_bytes(
    model: ModelShape,
    parallel: ParallelShape,
    precision: PrecisionShape,
    *,
    chunk_tokens: int,
) -> int:
    """Bytes of one logits chunk: compute-dtype logits and their softmax/gradient in fp32.

    The softmax is in fp32, fp64 when the compute dtype is.
    """
    local_vocab = model.padded_vocab_size(parallel.tp) // parallel.tp
    softmax = "float64" if precision.compute == "float64" else "float32"
    per_logit = DTYPE_BYTES[precision.compute] + DTYPE_BYTES[softmax]
    return chunk_tokens * local_vocab * per_logit


def estimate_memory(
    model: ModelShape,
    parallel: ParallelShape,
    precision: PrecisionShape,
    local_elements: Mapping[str, int],
    *,
    micro_batch_size: int,
    layers: int,
    has_head: bool = True,
    optimizer: str = "adam",
    sharding: StateSharding | None = None,
    recompute: str = "none",
    recomputed_layers: int | None = None,
    microbatches_in_flight: int = 1,
    logits_chunk_tokens: int | None = None,
) -> MemoryLedger:
    """Fill the ledger of one rank. Arguments are those of the three estimates above.

    `logits_chunk_tokens` None means the whole microbatch is one chunk.
    """
    parameters, grads, masters, moments = estimate_state_bytes(
        local_elements, precision, optimizer=optimizer, sharding=sharding
    )
    activations = estimate_activation_bytes(
        model,
        parallel,
        precision,
        micro_batch_size=micro_batch_size,
        layers=layers,
        recompute=recompute,
        recomputed_layers=recomputed_layers,
        microbatches_in_flight=microbatches_in_flight,
    )
    tokens = _ceil_div(model.seq_length, parallel.cp) * micro_batch_size
    chunk = tokens if logits_chunk_tokens is None else min(logits_chunk_tokens, tokens)
    logits = 0
    if has_head:
        logits = estimate_logits_bytes(model, parallel, precision, chunk_tokens=chunk)
    return MemoryLedger(parameters, grads, masters, moments, activations, logits)
