"""What a model is: the facts on which a checkpoint and a run must agree, always.

Keys are the configuration fields that set them. Sizes that training may change without
changing the meaning of a weight (sequence length, dropout, padding) are not among them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.config.plan import ModelShape

EXPERT_FIELDS = {  # attribute of ExpertShape -> the configuration field that sets it
    "num_experts": "num_experts",
    "topk": "moe_router_topk",
    "ffn_hidden_size": "moe_ffn_hidden_size",
    "layers": "moe_layer_freq",
    "shared_ffn_hidden_size": "moe_shared_expert_intermediate_size",
    "shared_gate": "moe_shared_expert_gate",
    "score_function": "moe_router_score_function",
    "pre_softmax": "moe_router_pre_softmax",
    "scaling_factor": "moe_router_topk_scaling_factor",
    "num_groups": "moe_router_num_groups",
    "group_topk": "moe_router_group_topk",
    "expert_bias": "moe_router_enable_expert_bias",
}
ARCHITECTURE_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "position_embedding_type",
    "rotary_base",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "softmax_type",
    "window_size",
    "multi_latent_attention",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "num_experts",  # all that gives a router's or an expert's weight its meaning
)


def _expert_facts(experts: ExpertShape) -> dict[str, Any]:
    values = {name: getattr(experts, name) for name in EXPERT_FIELDS}
    return values | {"layers": list(experts.layers)}


def architecture_facts(model: ModelShape) -> dict[str, Any]:
    """Return the architecture as JSON-able values, by configuration field."""
    values = (
        model.num_layers,
        model.hidden_size,
        model.ffn_hidden_size,
        model.num_attention_heads,
        model.num_query_groups,
        model.kv_channels,
        model.vocab_size,
        model.position,
        dataclasses.asdict(model.rotary) if model.rotary else None,
        model.normalization,
        model.norm_epsilon,
        model.norm_one_plus,
        [model.activation, model.gated],
        model.linear_bias,
        model.qkv_bias,
        model.qk_norm,
        not model.tied,
        model.sinks,
        model.window and {"left": model.window.left, "layers": list(model.window.layers)},
        model.latent and dataclasses.asdict(model.latent),
        None if model.activation_limit == math.inf else model.activation_limit,
        model.linear_offset,
        model.experts and _expert_facts(model.experts),
    )
    return dict(zip(ARCHITECTURE_FIELDS, values, strict=True))
