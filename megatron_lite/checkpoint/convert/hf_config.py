"""config.json and our configuration, either from the other, by the tables of the families.

A field whose value changes numbers in a way that this model cannot follow is refused with
its name and value; a field that nobody here knows is told. Torch-free.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.checkpoint.convert.hf_experts import (
    expert_fields,
    expert_flags,
    expert_misfit,
    latent_fields,
    latent_flags,
)
from megatron_lite.checkpoint.convert.hf_families import HANDLED, Choice, Family
from megatron_lite.checkpoint.convert.hf_gpt_oss import (
    GPT_OSS,
    gpt_oss_fields,
    gpt_oss_flags,
    gpt_oss_misfit,
)
from megatron_lite.checkpoint.convert.hf_registry import FAMILIES
from megatron_lite.checkpoint.convert.hf_rope import rope_fields, rope_flags
from megatron_lite.config.model_rules import LARGEST_LAYERS
from megatron_lite.config.plan import ModelShape
from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Architecture:
    """What a config.json says: the flags of the model, and what to tell about it."""

    family: Family
    config: Config
    vocab_size: int
    tied: bool
    dtype: str | None
    notes: tuple[str, ...]


def parse_config(raw: Mapping[str, Any], source: str) -> Architecture:
    """Translate a config.json.

    Raises:
        UserError: an unknown or unsupported family, or a field that cannot be followed.
    """
    family = _family(raw, source)
    values = {**family.defaults, **raw}
    if values.get("quantization_config"):
        raise UserError(f"{source}: quantization_config is set: quantized weights do not convert")
    if values.get("pruned_heads"):
        raise UserError(f"{source}: pruned_heads {values['pruned_heads']!r} is not supported")
    flags = dict(family.flags)
    for choice in family.choices:
        flags |= _chosen(choice, values, source)
    flags |= _numbers(family, values, source)
    if family.latent:
        flags |= latent_flags(values, flags["num_attention_heads"], source)
    else:
        flags |= _heads(family, values, flags, source)
    if family is GPT_OSS:
        flags |= gpt_oss_flags(values, flags["num_layers"], source)
    else:
        if family.mixture:
            flags |= expert_flags(family, values, flags["num_layers"], source)
        _check_windows(family, values, flags, source)
    if family.further and values.get("num_nextn_predict_layers"):
        flags["mtp_num_layers"] = _integer(values, "num_nextn_predict_layers", source)
    flags |= _dropouts(family, values)
    if family.rotary:
        flags |= rope_flags(values, source)
    tied = values["tie_word_embeddings"]
    if not isinstance(tied, bool):
        raise UserError(f"{source}: tie_word_embeddings {tied!r} must be true or false")
    config = Config(
        **flags,
        untie_embeddings_and_output_weights=not tied,
        seq_length=flags["max_position_embeddings"],
    )
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    return Architecture(
        family=family,
        config=config,
        vocab_size=_integer(values, "vocab_size", source),
        tied=tied,
        dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        notes=_unknown_fields(family, raw, source),
    )


def _family(raw: Mapping[str, Any], source: str) -> Family:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        by_type = [f for f in FAMILIES.values() if f.model_type == raw.get("model_type")]
        if not names and by_type:
            return by_type[0]
        raise UserError(f"{source}: architectures is {names!r}; expected one name")
    (name,) = names
    if name not in FAMILIES:
        legal = ", ".join(FAMILIES)
        raise UserError(f"{source}: architecture {name!r} is not known; supported are {legal}")
    return FAMILIES[name]


def _chosen(choice: Choice, values: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    found = tuple(values.get(field) for field in choice.fields)
    for legal, flags in choice.flags.items():
        if found == legal and all(type(a) is type(b) for a, b in zip(found, legal, strict=True)):
            return flags
    told = ", ".join(f"{f} {v!r}" for f, v in zip(choice.fields, found, strict=True))
    options = " or ".join(", ".join(map(repr, legal)) for legal in choice.flags)
    raise UserError(f"{source}: {told} is not supported; supported: {options}")


def _integer(values: Mapping[str, Any], field: str, source: str) -> int:
    value = values.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
        raise UserError(f"{source}: {field} {value!r} must be an integer in 1..{LARGEST}")
    return value


def _numbers(family: Family, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for theirs, ours in family.numbers.items():
        value = values.get(theirs)
        if theirs == "n_inner" and value is None:
            value = 4 * _integer(values, "n_embd", source)
        if ours in ("layernorm_epsilon", "init_method_std"):
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0:
                raise UserError(f"{source}: {theirs} {value!r} must be a number, at least 0")
            flags[ours] = float(value)
        else:
            flags[ours] = _integer({theirs: value}, theirs, source)
            if ours == "num_layers" and flags[ours] > LARGEST_LAYERS:
                raise UserError(f"{source}: {theirs} {value!r} must be at most {LARGEST_LAYERS}")
    return flags


def _heads(
    family: Family, values: Mapping[str, Any], flags: Mapping[str, Any], source: str
) -> dict[str, Any]:
    heads, hidden = flags["num_attention_heads"], flags["hidden_size"]
    channels = values.get("head_dim")
    if channels is None and hidden % heads:
        raise UserError(f"{source}: hidden size {hidden} is not a multiple of {heads} heads")
    if channels is None:
        channels = hidden // heads
    channels = _integer({"head_dim": channels}, "head_dim", source)
    if not family.grouped:
        return {"kv_channels": channels}
    groups = values.get("num_key_value_heads")
    groups = _integer({"n": heads if groups is None else groups}, "n", source)
    if heads % groups:
        raise UserError(
            f"{source}: num_key_value_heads {groups} must divide num_attention_heads {heads}"
        )
    return {
        "kv_channels": channels,
        "group_query_attention": True,
        "num_query_groups": groups,
    }


def _dropouts(family: Family, values: Mapping[str, Any]) -> dict[str, float]:
    """Dropout of training: what a run would continue with, no number of the model."""
    fields = ("attention_dropout", None) if family.rotary else ("attn_pdrop", "resid_pdrop")
    found = [values.get(field) if field else 0.0 for field in fields]
    usable = [float(v) if isinstance(v, (int, float)) and 0 <= v < 1 else 0.0 for v in found]
    return {"attention_dropout": usable[0], "hidden_dropout": usable[1]}


def _check_windows(
    family: Family, values: Mapping[str, Any], flags: Mapping[str, Any], source: str
) -> None:
    """Refuse sliding windows unless they are as long as the positions, that is, no windows."""
    positions = flags["max_position_embeddings"]
    window, used = values.get("sliding_window"), values.get("use_sliding_window", True)
    kinds = values.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise UserError(f"{source}: layer_types {kinds!r} is no list")
    odd = sorted({str(k) for k in kinds or () if k not in ("full_attention", "sliding_attention")})
    if odd:
        raise UserError(f"{source}: layer_types has {', '.join(odd)}, which is not supported")
    if not used or window is None:
        return
    if kinds is not None and "sliding_attention" not in kinds:
        return
    windowed_from = values["max_window_layers"] if "max_window_layers" in family.defaults else 0
    if not isinstance(windowed_from, int):
        raise UserError(f"{source}: max_window_layers {windowed_from!r} is no number of layers")
    if kinds is None and windowed_from >= flags["num_layers"]:
        return
    if not isinstance(window, int) or window < positions:
        raise UserError(
            f"{source}: sliding_window {window!r} is smaller than the {positions} positions, and "
            "this model attends to all of them: the logits of long texts would differ. Set the "
            f"positions to {window!r}, or sliding_window to null for full attention"
        )


def _unknown_fields(family: Family, raw: Mapping[str, Any], source: str) -> tuple[str, ...]:
    known = {*family.numbers, *family.harmless, *family.defaults, *HANDLED}
    known |= {field for choice in family.choices for field in choice.fields}
    odd = sorted(k for k, v in raw.items() if k not in known and v not in (None, False))
    if not odd:
        return ()
    told = ", ".join(f"{name} {raw[name]!r}"[:80] for name in odd)
    return (f"note: {source} has fields that are not known here and not followed: {told}",)


def canonical_flags(model: ModelShape) -> dict[str, Any]:
    """Return the flags that name an architecture, whatever spelling built it."""
    return {
        "position_embedding_type": "rope" if model.position == "yarn" else model.position,
        "normalization": model.normalization,
        "swiglu": model.activation == "silu" and model.gated,
        "quick_geglu": model.activation == "quick_gelu" and model.gated,
        "squared_relu": model.activation == "squared_relu",
        "openai_gelu": model.activation == "gelu_tanh",
        "qk_layernorm": model.qk_norm,
        "add_bias_linear": model.linear_bias,
        "add_qkv_bias": model.qkv_bias and not model.linear_bias,
    }


def choose_family(model: ModelShape, preferred: str | None, asked: str | None) -> Family:
    """Return the family that expresses this model.

    Args:
        model: half-split rotary, plain norms.
        preferred: architecture to take when it fits, such as the one it came from.
        asked: architecture that the user demands.

    Raises:
        UserError: none fits, with the reason for each.
    """
    if asked is not None and asked not in FAMILIES:
        raise UserError(f"architecture {asked!r} is not known; legal: {', '.join(FAMILIES)}")
    names: Sequence[str] = (asked,) if asked else sorted(FAMILIES, key=lambda n: n != preferred)
    reasons = []
    for name in names:
        reason = _misfit(FAMILIES[name], model)
        if reason is None:
            return FAMILIES[name]
        reasons.append(f"\n  {name}: {reason}")
    raise UserError(f"no Hugging Face architecture expresses this model:{''.join(reasons)}")


def _misfit(family: Family, model: ModelShape) -> str | None:
    """Say what the family cannot express, None when it fits."""
    newer = [] if family is GPT_OSS else _newer_parts(model)
    if model.mtp_depths and not family.further:
        newer.append("multi-token prediction")
    if newer:
        return f"it has no {newer[0]}"
    if family.latent != (model.latent is not None):
        return f"it has {'only' if family.latent else 'no'} multi-latent attention"
    experts = gpt_oss_misfit(model) if family is GPT_OSS else expert_misfit(family, model)
    if experts is not None:
        return experts
    have = canonical_flags(model)
    for name, value in family.flags.items():
        if have[name] != value:
            return f"{name} is {have[name]!r}, not {value!r}"
    for choice in family.choices:
        if _inverse(choice, have) is None:
            names = sorted({name for flags in choice.flags.values() for name in flags})
            return ", ".join(f"{name} {have[name]!r} is not possible" for name in names)
    whole = model.num_attention_heads * model.kv_channels == model.hidden_size
    if not family.grouped and (model.num_query_groups != model.num_attention_heads or not whole):
        return "grouped queries or head channels other than hidden size / heads"
    if model.latent is not None:
        return None
    if model.rotary is not None and model.rotary.dim != model.kv_channels:
        return f"only {model.rotary.dim} of {model.kv_channels} channels per head are rotated"
    return None


def _newer_parts(model: ModelShape) -> list[str]:
    """Parts that no family of the table has."""
    parts = {
        "attention sinks": model.sinks != "none",
        "sliding windows": model.window is not None,
        "clamped gate": model.activation_limit != math.inf or model.linear_offset != 0,
        "gate by quick GELU": model.activation == "quick_gelu",
    }
    return [name for name, present in parts.items() if present]


def _inverse(choice: Choice, have: Mapping[str, Any]) -> tuple[Any, ...] | None:
    for legal, flags in choice.flags.items():
        if all(have[name] == value for name, value in flags.items()):
            return legal
    return None


def build_config(family: Family, model: ModelShape, dtype: str) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        family: fits, by `choose_family`.
        model: the architecture.
        dtype: name of the weights' dtype.
    """
    ours: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "layernorm_epsilon": model.norm_epsilon,
        "init_method_std": model.init_std,
    }
    if model.latent is not None:
        ours |= dataclasses.asdict(model.latent)
    have = canonical_flags(model)
    fields: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    fields |= {theirs: ours[name] for theirs, name in family.numbers.items()}
    for choice in family.choices:
        values = _inverse(choice, have)
        assert values is not None
        fields |= dict(zip(choice.fields, values, strict=True))
    if family.latent:
        fields |= latent_fields(model)
    elif family.grouped:
        fields["num_key_value_heads"] = model.num_query_groups
        fields["head_dim"] = model.kv_channels
    if model.rotary is not None:
        fields |= rope_fields(model.rotary)
        fields["attention_dropout"] = model.attention_dropout
    else:
        hidden = model.hidden_dropout
        fields |= {"attn_pdrop": model.attention_dropout, "resid_pdrop": hidden}
        fields["embd_pdrop"] = hidden
    if family is GPT_OSS:
        return fields | gpt_oss_fields(model)
    if family.mixture:
        fields |= expert_fields(family, model)
    if family.further:
        fields["num_nextn_predict_layers"] = model.mtp_depths
    off = {"sliding_window": None, "use_sliding_window": False}
    return fields | {field: value for field, value in off.items() if field in family.defaults}
