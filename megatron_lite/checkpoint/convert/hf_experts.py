"""Mixtures of experts and latents in config.json, both ways, family by family. Torch-free.

What a family has no word for is refused when written; a combination that ours computes
otherwise is refused when read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.checkpoint.convert.hf_families import Family
from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.config.plan import ModelShape
from megatron_lite.errors import UserError


def whole_number(values: Mapping[str, Any], field: str, source: str, least: int = 1) -> int:
    """A number of a config.json.

    Raises:
        UserError: it is none, or out of range.
    """
    value = values.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise UserError(f"{source}: {field} {value!r} must be an integer, at least {least}")
    return value


def latent_flags(values: Mapping[str, Any], heads: int, source: str) -> dict[str, Any]:
    """Flags of multi-latent attention beside its numbers.

    Raises:
        UserError: fewer key/value heads than heads, or no number.
    """
    groups = values.get("num_key_value_heads")
    if groups not in (None, heads):
        raise UserError(
            f"{source}: num_key_value_heads {groups!r} must be num_attention_heads {heads}: all "
            "heads have keys of their own"
        )
    rank = values.get("q_lora_rank")
    return {
        "multi_latent_attention": True,
        "q_lora_rank": None if rank is None else whole_number(values, "q_lora_rank", source),
    }


def latent_fields(model: ModelShape) -> dict[str, Any]:
    """Fields of multi-latent attention beside its numbers."""
    assert model.latent is not None
    return {
        "q_lora_rank": model.latent.q_lora_rank or None,
        "qk_head_dim": model.kv_channels,
        "head_dim": model.latent.qk_pos_emb_head_dim,
        "num_key_value_heads": model.num_attention_heads,
    }


def expert_flags(
    family: Family, values: Mapping[str, Any], num_layers: int, source: str
) -> dict[str, Any]:
    """Flags of the mixture; none where every layer is dense.

    Raises:
        UserError: a number is none, or the router is one that is not computed here.
    """
    if family.mixture == "mixtral":
        return {
            "num_experts": whole_number(values, "num_local_experts", source),
            "moe_router_topk": whole_number(values, "num_experts_per_tok", source),
            "moe_ffn_hidden_size": whole_number(values, "intermediate_size", source),
        }
    layers = _moe_layers(family, values, num_layers, source)
    if not any(layers):
        return {}
    flags = {
        "moe_router_topk": whole_number(values, "num_experts_per_tok", source),
        "moe_ffn_hidden_size": whole_number(values, "moe_intermediate_size", source),
        "moe_layer_freq": "1" if all(layers) else str(list(map(int, layers))).replace(" ", ""),
    }
    if family.mixture == "qwen3":
        field = "num_local_experts" if "num_local_experts" in values else "num_experts"
        return flags | {
            "num_experts": whole_number({field: 128, **values}, field, source),
            "moe_router_pre_softmax": not _switch(values, "norm_topk_prob", source),
        }
    return flags | _deepseek_flags(values, flags, source)


def _moe_layers(
    family: Family, values: Mapping[str, Any], num_layers: int, source: str
) -> list[bool]:
    if family.mixture == "deepseek":
        dense = whole_number(values, "first_k_dense_replace", source, least=0)
        return [layer >= dense for layer in range(num_layers)]
    step = whole_number(values, "decoder_sparse_step", source)
    dense_layers = values.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or any(type(n) is not int for n in dense_layers):
        raise UserError(f"{source}: mlp_only_layers {dense_layers!r} is no list of layers")
    return [(n + 1) % step == 0 and n not in dense_layers for n in range(num_layers)]


def _switch(values: Mapping[str, Any], field: str, source: str) -> bool:
    value = values.get(field)
    if not isinstance(value, bool):
        raise UserError(f"{source}: {field} {value!r} must be true or false")
    return value


def _deepseek_flags(
    values: Mapping[str, Any], flags: Mapping[str, Any], source: str
) -> dict[str, Any]:
    topk, groups = flags["moe_router_topk"], whole_number(values, "n_group", source)
    chosen = whole_number(values, "topk_group", source)
    if _switch(values, "norm_topk_prob", source) != (topk > 1):
        raise UserError(
            f"{source}: norm_topk_prob {values['norm_topk_prob']!r} with num_experts_per_tok "
            f"{topk} is not supported: several scores are divided by their sum, one is not"
        )
    limited = groups > 1 and chosen < groups
    if limited and topk != 2 * chosen:
        raise UserError(
            f"{source}: topk_group {chosen} with num_experts_per_tok {topk} is not supported: a "
            "group counts by its num_experts_per_tok / topk_group largest scores, which there "
            "are 2"
        )
    scale = values.get("routed_scaling_factor")
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not scale > 0:
        raise UserError(f"{source}: routed_scaling_factor {scale!r} must be above 0")
    found = {
        "num_experts": whole_number(values, "n_routed_experts", source),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(scale),
    }
    if limited:
        found |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    if values.get("n_shared_experts"):
        count = whole_number(values, "n_shared_experts", source)
        found["moe_shared_expert_intermediate_size"] = count * flags["moe_ffn_hidden_size"]
    return found


def expert_misfit(family: Family, model: ModelShape) -> str | None:
    """Say what of the mixture the family cannot express, None when it fits."""
    experts = model.experts
    if experts is None:
        # Of these only DeepSeek-V3 says itself that layers are dense.
        return "it has experts" if family.mixture in ("mixtral", "qwen3") else None
    if not family.mixture:
        return "it has no experts"
    sigmoid = family.mixture == "deepseek"
    reasons = {
        f"{experts.score_function} scores of the router": experts.score_function
        != ("sigmoid" if sigmoid else "softmax"),
        "a bias in the choice of experts, or none": experts.expert_bias != sigmoid,
        "a factor of the scores": experts.scaling_factor != 1.0 and not sigmoid,
        "groups of experts": experts.is_limited
        and not (sigmoid and experts.topk == 2 * experts.group_topk),
        "softmax over all experts": experts.pre_softmax and family.mixture == "mixtral",
        "dense layers": len(experts.layers) < model.num_layers and family.mixture == "mixtral",
        "dense layers behind others": sigmoid
        and experts.layers != tuple(range(min(experts.layers), model.num_layers)),
        "a shared expert": bool(experts.shared_ffn_hidden_size) and not sigmoid,
        "a gate of the shared expert": experts.shared_gate,
        "a shared expert that is no multiple of one": bool(
            experts.shared_ffn_hidden_size % experts.ffn_hidden_size
        ),
        "no shared expert": sigmoid and not experts.shared_ffn_hidden_size,
        "a capacity of experts": experts.capacity_factor is not None,
        "Sinkhorn's choice": experts.sinkhorn,
    }
    return next((f"it cannot have {name}" for name, present in reasons.items() if present), None)


def expert_fields(family: Family, model: ModelShape) -> dict[str, Any]:
    """Fields of config.json; the family fits."""
    experts = model.experts
    if experts is None:
        return {"first_k_dense_replace": model.num_layers}
    fields: dict[str, Any] = {"num_experts_per_tok": experts.topk}
    if family.mixture == "mixtral":
        return fields | {
            "num_local_experts": experts.num_experts,
            "intermediate_size": experts.ffn_hidden_size,
        }
    fields["moe_intermediate_size"] = experts.ffn_hidden_size
    if family.mixture == "qwen3":
        dense = [n for n in range(model.num_layers) if n not in experts.layers]
        return fields | {
            "num_experts": experts.num_experts,
            "norm_topk_prob": not experts.pre_softmax,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
        }
    return fields | _deepseek_fields(experts)


def _deepseek_fields(experts: ExpertShape) -> dict[str, Any]:
    return {
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_ffn_hidden_size // experts.ffn_hidden_size,
        "first_k_dense_replace": min(experts.layers),
        "n_group": experts.num_groups,
        "topk_group": experts.group_topk,
        "norm_topk_prob": experts.topk > 1,
        "routed_scaling_factor": experts.scaling_factor,
    }
