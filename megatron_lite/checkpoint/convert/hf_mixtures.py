"""Families of Hugging Face with a mixture of experts: Mixtral, Qwen3-MoE, DeepSeek-V3.

Their files hold every expert's matrices apart; ours are stacks. Torch-free.
"""

from __future__ import annotations

from megatron_lite.checkpoint.convert.hf_families import (
    ATTENTION,
    HARMLESS,
    LAYER,
    LLAMA_DEFAULTS,
    LLAMA_FLAGS,
    LLAMA_NUMBERS,
    LLAMA_WEIGHTS,
    NO_BIAS,
    ROTARY_BUFFERS,
    SILU,
    WINDOWED,
    Choice,
    Family,
    Weight,
    pair,
)

# Of the loss in training: their weight is a flag of the run, not of the model.
LOSSES = frozenset(("router_aux_loss_coef", "output_router_logits", "router_jitter_noise"))
EXPERTS = LAYER + "mlp.experts."
SHARED = LAYER + "mlp.shared_experts."


def experts(place: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """Matrices of every expert, [out, in], at `place` with its names of the three."""
    return (
        Weight(f"{place}.experts.{{e}}.{gate}.weight", (EXPERTS + "linear_gate.weight",)),
        Weight(f"{place}.experts.{{e}}.{up}.weight", (EXPERTS + "linear_up.weight",)),
        Weight(f"{place}.experts.{{e}}.{down}.weight", (EXPERTS + "linear_fc2.weight",)),
        Weight(f"{place}.gate.weight", (LAYER + "mlp.router.weight",)),
    )


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    prefix="model.",
    numbers=LLAMA_NUMBERS,
    flags=LLAMA_FLAGS,
    choices=(SILU,),
    defaults=LLAMA_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "sliding_window": None,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    harmless=HARMLESS | LOSSES,
    weights=LLAMA_WEIGHTS + experts("model.layers.{i}.block_sparse_moe", "w1", "w3", "w2"),
    derived=ROTARY_BUFFERS,
    mixture="mixtral",
)
QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    prefix="model.",
    numbers=LLAMA_NUMBERS,
    flags=LLAMA_FLAGS | {"qk_layernorm": True},
    choices=(SILU, NO_BIAS),
    defaults=LLAMA_DEFAULTS
    | WINDOWED
    | {
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    harmless=HARMLESS | LOSSES | {"num_experts", "num_local_experts"},
    weights=LLAMA_WEIGHTS + experts("model.layers.{i}.mlp", "gate_proj", "up_proj", "down_proj"),
    derived=ROTARY_BUFFERS,
    mixture="qwen3",
)
_LATENTS = (
    *pair("model.layers.{i}.self_attn.q_proj", ATTENTION + "linear_q_proj"),
    *pair("model.layers.{i}.self_attn.q_a_proj", ATTENTION + "linear_q_down_proj"),
    *pair("model.layers.{i}.self_attn.q_a_layernorm", ATTENTION + "q_layernorm"),
    *pair("model.layers.{i}.self_attn.q_b_proj", ATTENTION + "linear_q_up_proj"),
    *pair("model.layers.{i}.self_attn.kv_a_proj_with_mqa", ATTENTION + "linear_kv_down_proj"),
    *pair("model.layers.{i}.self_attn.kv_a_layernorm", ATTENTION + "kv_layernorm"),
    *pair("model.layers.{i}.self_attn.kv_b_proj", ATTENTION + "linear_kv_up_proj"),
)
_SHARED = tuple(
    Weight(f"model.layers.{{i}}.mlp.shared_experts.{theirs}.weight", (SHARED + f"{ours}.weight",))
    for theirs, ours in (
        ("gate_proj", "linear_gate"),
        ("up_proj", "linear_up"),
        ("down_proj", "linear_fc2"),
    )
)
_LLAMA_HEADS = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    prefix="model.",
    numbers=LLAMA_NUMBERS
    | {
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_head_dim",
        "qk_rope_head_dim": "qk_pos_emb_head_dim",
        "v_head_dim": "v_head_dim",
    },
    flags=LLAMA_FLAGS | {"qk_layernorm": True},
    choices=(
        SILU,
        NO_BIAS,
        Choice(("rope_interleave",), {(True,): {}}),
        Choice(("scoring_func",), {("sigmoid",): {}}),
        Choice(("topk_method",), {("noaux_tc",): {}}),
        Choice(("moe_layer_freq",), {(1,): {}}),
    ),
    defaults=LLAMA_DEFAULTS
    | {
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    harmless=HARMLESS
    | LOSSES
    | {"num_nextn_predict_layers", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux"}
    | {"auto_map"},
    weights=(
        *(w for w in LLAMA_WEIGHTS if not any(f".{name}." in w.name for name in _LLAMA_HEADS)),
        *_LATENTS,
        *experts("model.layers.{i}.mlp", "gate_proj", "up_proj", "down_proj"),
        Weight(
            "model.layers.{i}.mlp.gate.e_score_correction_bias", (LAYER + "mlp.router.expert_bias",)
        ),
        *_SHARED,
    ),
    derived=ROTARY_BUFFERS,
    mixture="deepseek",
    latent=True,
    further=(
        Weight("model.layers.{i}.enorm.weight", ("mtp.{d}.enorm.weight",)),
        Weight("model.layers.{i}.hnorm.weight", ("mtp.{d}.hnorm.weight",)),
        Weight("model.layers.{i}.eh_proj.weight", ("mtp.{d}.eh_proj.weight",)),
        Weight("model.layers.{i}.shared_head.norm.weight", ("mtp.{d}.final_layernorm.weight",)),
    ),
    copies=(
        ("model.layers.{i}.embed_tokens.weight", "embedding.word_embeddings.weight"),
        ("model.layers.{i}.shared_head.head.weight", "output_layer.weight"),
    ),
)
