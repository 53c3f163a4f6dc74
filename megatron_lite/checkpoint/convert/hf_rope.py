"""Rotary positions as Hugging Face spells them: three generations of one setting.

YaRN's cosine and sine grow by `attention_factor`, or by the logarithm of the factor, divided
by what `mscale_all_dim` makes of it where `mscale` and that are both given.

`rope_theta` with `rope_scaling` (whose kind is `type`, later `rope_type`), and since
transformers 5 `rope_parameters` with everything in it. What we cannot compute is refused
with its value. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_lite.config.attention_plan import YarnShape
from megatron_lite.config.plan import RotaryShape
from megatron_lite.errors import UserError

# Llama 3's scaling is published with these constants, and only they are computed.
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KNOWN_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", *LLAMA3}),
    "yarn": frozenset(
        {
            *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
            *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
        }
    ),
}
COMMON_KEYS = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})


def rope_flags(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return our flags of the rotary positions of a configuration.

    Args:
        values: config.json with the family's defaults.
        source: its name for messages.

    Raises:
        UserError: a kind, a constant or a combination that is not computed here.
    """
    scaling = _one_dictionary(values, source)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str) or kind not in KNOWN_KEYS:
        legal = ", ".join(KNOWN_KEYS)
        raise UserError(f"{source}: rope type {kind!r} is not supported; supported are {legal}")
    odd = sorted(
        key
        for key, value in scaling.items()
        if key not in COMMON_KEYS | KNOWN_KEYS[kind] and value is not None
    )
    if odd:
        told = ", ".join(f"{key} {scaling[key]!r}" for key in odd)
        raise UserError(f"{source}: rope type {kind!r} has {told}, which is not supported")
    _whole_heads(values, scaling, source)
    theta = scaling.get("rope_theta") or values["rope_theta"]
    flags: dict[str, Any] = {
        "rotary_base": _whole(theta, "rope_theta", source),
        "use_rope_scaling": kind == "llama3",
        "rotary_seq_len_interpolation_factor": None,
    }
    if kind == "linear":
        factor = _whole(scaling.get("factor"), "the factor of linear rope scaling", source)
        flags["rotary_seq_len_interpolation_factor"] = factor
    if kind == "llama3":
        _check_llama3(values, scaling, source)
        flags["rope_scaling_factor"] = float(scaling["factor"])
    if kind == "yarn":
        flags |= _yarn_flags(values, scaling, source)
    return flags


def _number(values: Mapping[str, Any], field: str, source: str, default: float) -> float:
    value = values.get(field)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e9:
        raise UserError(f"{source}: {field} {value!r} of yarn rope scaling must be a number >= 0")
    return float(value)


def _yarn_flags(
    values: Mapping[str, Any], scaling: Mapping[str, Any], source: str
) -> dict[str, Any]:
    field = "original_max_position_embeddings"
    original = scaling.get(field) or values.get(field)
    if original is None:
        raise UserError(f"{source}: yarn rope scaling needs {field}")
    original = _whole(original, field, source)
    factor = _number(scaling, "factor", source, values["max_position_embeddings"] / original)
    if factor < 1:
        raise UserError(f"{source}: factor {factor!r} of yarn rope scaling must be at least 1")
    mscale = _number(scaling, "mscale", source, 0.0)
    all_dim = _number(scaling, "mscale_all_dim", source, 0.0)
    shape = YarnShape(factor, original, 32.0, 1.0, mscale or 1.0, all_dim, True)
    plain = replace(shape, mscale=1.0, mscale_all_dim=0.0)
    implied = (shape if mscale and all_dim else plain).magnitude
    wanted = _number(scaling, "attention_factor", source, implied)
    if not math.isclose(wanted, shape.magnitude, rel_tol=1e-12):
        # What mscale_all_dim divides by is known, so mscale follows.
        growth = wanted / replace(shape, mscale=0.0).magnitude
        if factor <= 1 or growth < 1 - 1e-12:
            raise UserError(
                f"{source}: attention_factor {wanted!r} of yarn rope scaling is not supported"
            )
        shape = replace(shape, mscale=max(growth - 1, 0.0) / (0.1 * math.log(factor)))
    truncate = scaling.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UserError(f"{source}: truncate {truncate!r} must be true or false")
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": _number(scaling, "beta_fast", source, 32.0) or 32.0,
        "yarn_beta_slow": _number(scaling, "beta_slow", source, 1.0) or 1.0,
        "mscale": shape.mscale,
        "mscale_all_dim": all_dim,
        "yarn_correction_range_round_to_int": truncate,
    }


def _yarn_fields(yarn: YarnShape) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.whole_channels,
    }
    if yarn.mscale and yarn.mscale_all_dim:
        return fields | {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    if yarn.mscale_all_dim:
        fields["mscale_all_dim"] = yarn.mscale_all_dim
    if yarn.mscale_all_dim or yarn.mscale != 1.0:
        fields["attention_factor"] = yarn.magnitude
    return fields


def rope_fields(rotary: RotaryShape) -> dict[str, Any]:
    """Return the fields of config.json, in both spellings, for a half-split rotary.

    Raises:
        UserError: a combination that Hugging Face has no word for.
    """
    scaling: dict[str, Any] | None = None
    if rotary.llama3_factor is not None:
        if rotary.interpolation_factor != 1.0:
            raise UserError(
                "--use-rope-scaling together with --rotary-seq-len-interpolation-factor "
                f"{rotary.interpolation_factor} has no form in Hugging Face's rope_parameters"
            )
        scaling = {"rope_type": "llama3", "factor": rotary.llama3_factor, **LLAMA3}
    elif rotary.yarn is not None:
        scaling = _yarn_fields(rotary.yarn)
    elif rotary.interpolation_factor != 1.0:
        scaling = {"rope_type": "linear", "factor": rotary.interpolation_factor}
    parameters = (scaling or {"rope_type": "default"}) | {"rope_theta": rotary.base}
    return {"rope_theta": rotary.base, "rope_scaling": scaling, "rope_parameters": parameters}


def _one_dictionary(values: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The settings of whichever spelling is used; two that disagree are refused."""
    old, new = values.get("rope_scaling"), values.get("rope_parameters")
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{source}: {name} {value!r} is no object")
        if value and any(isinstance(item, dict) for item in value.values()):
            raise UserError(f"{source}: {name} differs from layer to layer, which is not supported")
    if old and new:
        plain = [
            {key: value for key, value in item.items() if key not in ("type", "rope_theta")}
            for item in ({"rope_type": old.get("type")} | old, new)
        ]
        if plain[0] != plain[1]:
            raise UserError(f"{source}: rope_scaling {old!r} and rope_parameters {new!r} disagree")
    found: Mapping[str, Any] = new or old or {}
    return found


def _whole_heads(values: Mapping[str, Any], scaling: Mapping[str, Any], source: str) -> None:
    for place in (values, scaling):
        share = place.get("partial_rotary_factor")
        if share not in (None, 1, 1.0):
            raise UserError(
                f"{source}: partial_rotary_factor {share!r} is not supported; supported is 1.0"
            )


def _check_llama3(values: Mapping[str, Any], scaling: Mapping[str, Any], source: str) -> None:
    factor = scaling.get("factor")
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or factor <= 0:
        raise UserError(f"{source}: factor {factor!r} of llama3 rope scaling must be above 0")
    found = {key: scaling.get(key) for key in LLAMA3}
    key = "original_max_position_embeddings"
    found[key] = values.get(key) or found[key] or values.get("max_position_embeddings")
    for name, wanted in LLAMA3.items():
        if found[name] != wanted:
            raise UserError(
                f"{source}: {name} {found[name]!r} of llama3 rope scaling is not supported; "
                f"supported is {wanted}"
            )


def _whole(value: Any, name: str, source: str) -> int:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != int(value):
        raise UserError(f"{source}: {name} {value!r} must be a whole number here")
    if value < 1:
        raise UserError(f"{source}: {name} {value!r} must be at least 1")
    return int(value)
