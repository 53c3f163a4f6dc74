"""GPT-OSS: sinks, every other layer with a window, experts with biases and a clamped gate.

Its files hold the experts of a layer as one tensor [experts, in, out], the gate's and the
linear half's columns in turn. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.checkpoint.convert.hf_experts import whole_number
from megatron_lite.checkpoint.convert.hf_families import (
    ATTENTION,
    HARMLESS,
    LAYER,
    LLAMA_DEFAULTS,
    LLAMA_FLAGS,
    LLAMA_NUMBERS,
    LLAMA_WEIGHTS,
    ROTARY_BUFFERS,
    SILU,
    Choice,
    Family,
    Weight,
    pair,
)
from megatron_lite.checkpoint.convert.hf_mixtures import EXPERTS, LOSSES
from megatron_lite.config.plan import ModelShape
from megatron_lite.errors import UserError

_OFFSET, _ALPHA = 1.0, 1.702
_PLACE = "model.layers.{i}.mlp"
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _halves(suffix: str) -> tuple[str, str]:
    return EXPERTS + "linear_gate." + suffix, EXPERTS + "linear_up." + suffix


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    prefix="model.",
    numbers=LLAMA_NUMBERS,
    flags=LLAMA_FLAGS | {"swiglu": False, "quick_geglu": True, "add_bias_linear": True},
    choices=(
        SILU,
        Choice(("attention_bias",), {(True,): {}}),
        Choice(("swiglu_alpha",), {(_ALPHA,): {}}),
    ),
    defaults={k: v for k, v in LLAMA_DEFAULTS.items() if k != "mlp_bias"}
    | {
        "attention_bias": True,
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": 7.0,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": None,
        "rope_parameters": _YARN,
    },
    harmless=HARMLESS | LOSSES | {"initial_context_length", "experts_per_token"},
    weights=(
        *(w for w in LLAMA_WEIGHTS if ".mlp." not in w.name),
        Weight("model.layers.{i}.self_attn.sinks", (ATTENTION + "core_attention.softmax_offset",)),
        *pair(f"{_PLACE}.router", LAYER + "mlp.router"),
        Weight(f"{_PLACE}.experts.gate_up_proj", _halves("weight"), True, interleaved=True),
        Weight(f"{_PLACE}.experts.gate_up_proj_bias", _halves("bias"), interleaved=True),
        Weight(f"{_PLACE}.experts.down_proj", (EXPERTS + "linear_fc2.weight",), True),
        Weight(f"{_PLACE}.experts.down_proj_bias", (EXPERTS + "linear_fc2.bias",)),
    ),
    derived=ROTARY_BUFFERS,
    mixture="gpt-oss",
)


def gpt_oss_flags(values: Mapping[str, Any], num_layers: int, source: str) -> dict[str, Any]:
    """Flags of experts, gate, sinks and windows.

    Raises:
        UserError: a number is none, or a layer is of another kind.
    """
    limit = values.get("swiglu_limit")
    if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit > 0:
        raise UserError(f"{source}: swiglu_limit {limit!r} must be above 0")
    flags = {
        "num_experts": whole_number(values, "num_local_experts", source),
        "moe_router_topk": whole_number(values, "num_experts_per_tok", source),
        "moe_ffn_hidden_size": whole_number(values, "intermediate_size", source),
        "softmax_type": "learnable",
        "activation_func_clamp_value": float(limit),
        "glu_linear_offset": _OFFSET,
    }
    kinds = values.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if n % 2 else "sliding_attention" for n in range(num_layers)]
    legal = ("full_attention", "sliding_attention")
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(k not in legal for k in kinds)
    ):
        raise UserError(
            f"{source}: layer_types must be {num_layers} times {' or '.join(legal)}, not {kinds!r}"
        )
    windowed = [kind == "sliding_attention" for kind in kinds]
    if any(windowed) and values.get("sliding_window") is not None:
        flags["window_size"] = f"{whole_number(values, 'sliding_window', source) - 1},0"
        if not all(windowed):
            flags["window_attn_skip_freq"] = str(list(map(int, windowed))).replace(" ", "")
    return flags


def gpt_oss_misfit(model: ModelShape) -> str | None:
    """Say what makes the model another one than GPT-OSS, None where nothing does."""
    experts = model.experts
    if experts is None or len(experts.layers) < model.num_layers:
        return "it has only layers with experts"
    reasons = {
        "attention sinks": model.sinks != "learned",
        "a clamped gate, its linear half plus 1": model.linear_offset != _OFFSET
        or model.activation_limit == float("inf"),
        "softmax scores of the chosen": experts.score_function != "softmax" or experts.pre_softmax,
        "no other parts of a router": experts.expert_bias
        or experts.is_limited
        or experts.scaling_factor != 1.0
        or experts.sinkhorn
        or experts.capacity_factor is not None,
        "no shared expert": bool(experts.shared_ffn_hidden_size),
    }
    return next((f"it always has {name}" for name, odd in reasons.items() if odd), None)


def gpt_oss_fields(model: ModelShape) -> dict[str, Any]:
    """Fields of config.json; the family fits."""
    experts = model.experts
    assert experts is not None
    window = model.window
    layers = window.layers if window is not None else ()
    return {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.topk,
        "intermediate_size": experts.ffn_hidden_size,
        "swiglu_limit": model.activation_limit,
        "sliding_window": None if window is None else window.left + 1,
        "layer_types": [
            "sliding_attention" if n in layers else "full_attention"
            for n in range(model.num_layers)
        ],
    }
