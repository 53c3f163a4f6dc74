"""Floating-point operations of one step: what the model needs and what one rank executes.

Model FLOPs are a property of the model and the batch alone: no padding, no recomputation,
no replicated work, so that MFU of two runs can be compared. A multiply-add is 2 FLOPs, the
backward pass costs twice the forward pass, only matrix products count. Two conventions
for attention: `full_square` counts all s*s pairs (Megatron's), `causal_half` exactly half; of
a layer whose queries see w keys the band, s*w pairs, and without its cut corner s*w - w*w/2.
Counted FLOPs are the matrix products one rank really runs, for tests to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_lite.config.plan import ModelShape, ParallelShape

CONVENTIONS = ("full_square", "causal_half")

FLOPS_PER_MULTIPLY_ADD = 2
FORWARD_AND_BACKWARD = 3  # the backward pass has two products for each of the forward pass


def _check_convention(convention: str) -> None:
    if convention not in CONVENTIONS:
        legal = ", ".join(CONVENTIONS)
        raise ValueError(f"unknown FLOPs convention {convention!r}; legal: {legal}")


def attention_matmul_weights(model: ModelShape) -> int:
    """Weights of q, k, v and proj of one layer, or of those to the latents and from them."""
    query_size = model.num_attention_heads * model.kv_channels
    latent = model.latent
    if latent is not None:
        heads, low = model.num_attention_heads, latent.kv_lora_rank
        context_size = heads * latent.v_head_dim
        queries = query_size * (latent.q_lora_rank or model.hidden_size)
        pairs = heads * (latent.qk_head_dim + latent.v_head_dim) * low
        inside = queries + pairs + model.hidden_size * context_size
        return inside + replicated_matmul_weights(model)
    kv_size = model.num_query_groups * model.kv_channels
    return model.hidden_size * (2 * query_size + 2 * kv_size)


def replicated_matmul_weights(model: ModelShape) -> int:
    """Weights of one layer that every tp rank has: to the latents. They see tokens as norms do."""
    latent = model.latent
    if latent is None:
        return 0
    widths = latent.q_lora_rank + latent.kv_lora_rank + latent.qk_pos_emb_head_dim
    return model.hidden_size * widths


def mlp_matmul_weights(model: ModelShape, width: int) -> int:
    """Weights of one MLP of an inner width."""
    return (3 if model.gated else 2) * model.hidden_size * width


def sliced_matmul_weights(model: ModelShape, layer: int) -> int:
    """Weights that multiply a token on one tp rank only: a MoE layer's router and its experts."""
    experts = model.experts
    if experts is None or not model.is_moe(layer):
        return 0
    chosen = experts.topk * mlp_matmul_weights(model, experts.ffn_hidden_size)
    return experts.num_experts * model.hidden_size + chosen


def dense_mlp_width(model: ModelShape, layer: int) -> int:
    """Inner width of a layer's MLP, or of its shared expert."""
    if model.experts is not None and model.is_moe(layer):
        return model.experts.shared_ffn_hidden_size
    return model.ffn_hidden_size


def layer_matmul_weights(model: ModelShape, layer: int) -> int:
    """Weights of one layer that multiply each token once: attention, MLP, chosen experts."""
    mlp = mlp_matmul_weights(model, dense_mlp_width(model, layer))
    return attention_matmul_weights(model) + mlp + sliced_matmul_weights(model, layer)


def _twice_visible(model: ModelShape, layer: int, convention: str) -> int:
    """Twice the keys that count for a token, on average."""
    s, left = model.seq_length, model.window_left(layer)
    width = s if left < 0 else min(left + 1, s)
    return 2 * width if convention == "full_square" else (2 * s * width - width * width) // s


def model_flops_per_token(model: ModelShape, convention: str = "full_square") -> int:
    """Forward and backward FLOPs of the model for one token of a full sequence.

    Args:
        model: the model's shape; the true vocabulary counts, not the padded one.
        convention: "full_square" or "causal_half".

    Returns:
        FLOPs: 6 per matrix weight (layers and output head) plus attention's
        scores and values, 12*s*n*d per layer by the full square, half by `causal_half`.
        A depth of multi-token prediction is a join, a layer and the head once more.
    """
    _check_convention(convention)
    layers = range(model.num_layers + model.mtp_depths)
    weights = sum(layer_matmul_weights(model, layer) for layer in layers)
    weights += model.mtp_depths * 2 * model.hidden_size**2
    weights += (1 + model.mtp_depths) * model.hidden_size * model.vocab_size
    channels = model.num_attention_heads * (model.kv_channels + model.value_channels)
    visible = sum(_twice_visible(model, layer, convention) for layer in layers)
    pairs = channels * visible // 2  # scores and values
    linear_flops = FORWARD_AND_BACKWARD * FLOPS_PER_MULTIPLY_ADD * weights
    attention_flops = FORWARD_AND_BACKWARD * FLOPS_PER_MULTIPLY_ADD * pairs
    return linear_flops + attention_flops


def model_flops_per_iteration(
    model: ModelShape, global_batch_size: int, convention: str = "full_square"
) -> int:
    """Forward and backward FLOPs of one step over `global_batch_size` full sequences."""
    tokens = global_batch_size * model.seq_length
    return tokens * model_flops_per_token(model, convention)


def model_tflops_per_rank(flops: int, elapsed_ms: float, world_size: int) -> float | None:
    """Model FLOPs as a rate in TFLOP/s per rank; None for an interval of no length."""
    if elapsed_ms <= 0.0:
        return None
    return flops / (elapsed_ms * 1e-3) / world_size / 1e12


@dataclass(frozen=True)
class MachinePeak:
    """What one rank's matrix products could reach, and how that is known.

    Attributes:
        flops_per_s: FLOP/s of one rank, dense (never the sparse figure of a data sheet).
        description: the convention, printed wherever MFU is.
    """

    flops_per_s: float
    description: str


def model_flops_utilization(
    flops: int, elapsed_ms: float, world_size: int, peak: MachinePeak | None
) -> float | None:
    """Model FLOPs per second over the ranks' peak; None without a peak.

    Recomputed and padded work is not in `flops`, so recomputation lowers MFU only by the
    time it takes.
    """
    rate = model_tflops_per_rank(flops, elapsed_ms, world_size)
    if peak is None or rate is None:
        return None
    return rate * 1e12 / peak.flops_per_s


@dataclass(frozen=True)
class RankGemmFlops:
    """Matrix-product FLOPs of one rank in one step, by the part that causes them.

    Attributes:
        layer_linears: q, k, v, proj and MLP, forward and backward.
        attention: scores and values, full square, forward and backward.
        head: output projection, forward and backward.
        recompute: products of the forward pass that run a second time.
    """

    layer_linears: int
    attention: int
    head: int
    recompute: int

    @property
    def total(self) -> int:
        """All matrix products of the rank."""
        return self.layer_linears + self.attention + self.head + self.recompute


def local_kv_heads(model: ModelShape, tp_size: int) -> int:
    """KV heads one tensor-parallel rank holds; never less than one (then replicated)."""
    return max(model.num_query_groups // tp_size, 1)


def local_attention_weights(model: ModelShape, tp_size: int) -> int:
    """Attention weights of one layer that a tensor-parallel rank multiplies all tokens by."""
    if model.latent is not None:
        return (attention_matmul_weights(model) - replicated_matmul_weights(model)) // tp_size
    local_query = model.num_attention_heads // tp_size * model.kv_channels
    local_kv = local_kv_heads(model, tp_size) * model.kv_channels
    return model.hidden_size * (2 * local_query + 2 * local_kv)


def count_rank_gemm_flops(
    model: ModelShape,
    parallel: ParallelShape,
    *,
    samples: int,
    layers: Sequence[int],
    head_rows: int,
    recompute: str = "none",
    recomputed_layers: int | None = None,
    selective_products: int = 2,
) -> RankGemmFlops:
    """Count the matrix products that one rank executes, closed form.

    Unlike model FLOPs this includes replicated KV heads and recomputation. What the experts of
    a rank get to do depends on the routing: counted is each rank's equal share of it, so that
    only the sum over ranks is exact. `torch.utils.flop_counter` counts the same on the
    explicit attention path once it is told of `addmm_`; of the CPU's fused attention it knows
    nothing.

    Args:
        model: the model's shape.
        parallel: sizes of the axes; tp and cp divide the work of a sample.
        samples: samples this rank works on in the step (num_microbatches * mbs).
        layers: global numbers of the transformer layers on this rank.
        head_rows: vocabulary rows this rank multiplies by in the output projection (its
            share without padding rows); 0 where the stage has no head.
        recompute: "none", "selective" (core attention) or "full" (whole layers).
        recomputed_layers: layers that are recomputed under "full"; None = all.
        selective_products: attention products run again under "selective": 2 when core
            attention runs again as a whole, 1 when only the scores do.
    """
    weights = [
        local_attention_weights(model, parallel.tp)
        + mlp_matmul_weights(model, dense_mlp_width(model, layer)) // parallel.tp
        + sliced_matmul_weights(model, layer) // parallel.tp
        for layer in layers
    ]
    tokens = samples * model.seq_length // parallel.cp
    # To the latents every rank projects its part of the residual stream.
    stream_tokens = tokens // (parallel.tp if parallel.sequence_parallel else 1)
    below = FLOPS_PER_MULTIPLY_ADD * stream_tokens * replicated_matmul_weights(model)
    linear_forward = FLOPS_PER_MULTIPLY_ADD * tokens * sum(weights) + below * len(layers)
    pairs = FLOPS_PER_MULTIPLY_ADD * tokens * model.seq_length
    pairs *= model.num_attention_heads // parallel.tp
    scores, values = pairs * model.kv_channels, pairs * model.value_channels  # of one layer
    attention_forward = (scores + values) * len(layers)
    head_forward = FLOPS_PER_MULTIPLY_ADD * tokens * model.hidden_size * head_rows

    again = 0
    if recompute == "selective":
        again = (scores + (values if selective_products > 1 else 0)) * len(layers)
    elif recompute == "full":
        repeated = weights[:recomputed_layers]
        again = FLOPS_PER_MULTIPLY_ADD * tokens * sum(repeated)
        again += (below + scores + values) * len(repeated)
    return RankGemmFlops(
        layer_linears=FORWARD_AND_BACKWARD * linear_forward,
        attention=FORWARD_AND_BACKWARD * attention_forward,
        head=FORWARD_AND_BACKWARD * head_forward,
        recompute=again,
    )
