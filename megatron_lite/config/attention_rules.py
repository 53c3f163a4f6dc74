"""Rules of windows, YaRN's positions, multi-latent attention and gated activations."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lite.config.attention_plan import (
    parse_window,
    plan_yarn,
    uses_yarn,
    windowed_layers,
)
from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.model_rules import (
    LARGEST_SIZE,
    at_least_rule,
    at_most_rule,
    flag_name,
)
from megatron_lite.config.plan import ROTARY, is_gated, position_kind
from megatron_lite.config.schema import Config

YARN = "--position-embedding-type yarn"
YARN_FIELDS = (
    "rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
    "mscale",
    "mscale_all_dim",
)
LATENT = "--multi-latent-attention"
LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
NOT_LATENT = (
    "group_query_attention",
    "rotary_interleaved",
    "rotary_percent",
    "add_qkv_bias",
)
SKIP = "--window-attn-skip-freq"
CLAMP = "--activation-func-clamp-value"
GATED = "a gated activation (--swiglu or --quick-geglu)"


def window_fault(f: Facts) -> str:
    """What is wrong with `--window-size`; empty if nothing is."""
    if f.config.window_size is None:
        return ""
    try:
        parse_window(f.config.window_size)
    except ValueError as fault:
        return str(fault)
    return ""


def skip_fault(f: Facts) -> str:
    """What is wrong with the pattern of windowed layers; empty if nothing is."""
    if f.config.window_attn_skip_freq is None:
        return ""
    if f.config.window_size is None:
        return f"{f.config.window_attn_skip_freq} needs --window-size"
    if not f.has("num_layers"):
        return ""
    try:
        chosen = windowed_layers(f.config, f.number("num_layers"))
    except ValueError as fault:
        return str(fault)
    return "" if chosen else f"{f.config.window_attn_skip_freq} leaves no layer a window"


def changed(f: Facts, fields: Sequence[str]) -> list[str]:
    """Flags that are given."""
    default = Config()
    return [flag_name(n) for n in fields if getattr(f.config, n) != getattr(default, n)]


def idle_yarn(f: Facts) -> list[str]:
    """Flags of YaRN that are given without it."""
    takes = uses_yarn(f.config) or f.config.multi_latent_attention
    return [] if takes else changed(f, YARN_FIELDS)


def beside_latent(f: Facts) -> list[str]:
    """Flags that are given and mean nothing in multi-latent attention."""
    return changed(f, NOT_LATENT) if f.config.multi_latent_attention else []


def unturned(f: Facts) -> bool:
    """Multi-latent attention without rotary positions."""
    return f.config.multi_latent_attention and position_kind(f.config) not in ROTARY


def yarn_turns(f: Facts) -> tuple[float, float]:
    """Turns beyond which channels are kept, and below which they are slowed down."""
    shape = plan_yarn(f.config)
    return (shape.beta_fast, shape.beta_slow) if shape else (32.0, 1.0)


ATTENTION_RULES: tuple[Rule, ...] = (
    Rule(
        "window-size",
        lambda f: bool(window_fault(f)),
        lambda f: f"--window-size {window_fault(f)}",
    ),
    Rule(
        "window-layers",
        lambda f: bool(skip_fault(f)),
        lambda f: f"{SKIP} {skip_fault(f)}",
    ),
    Rule(
        "yarn-flags",
        lambda f: bool(idle_yarn(f)),
        lambda f: f"{', '.join(idle_yarn(f))} changes nothing without {YARN}",
    ),
    Rule(
        "yarn-factor",
        lambda f: uses_yarn(f.config) and not f.config.rotary_scaling_factor >= 1,
        lambda f: (
            f"--rotary-scaling-factor {f.config.rotary_scaling_factor} must be at least 1: texts "
            "get longer by it"
        ),
    ),
    Rule(
        "yarn-turns",
        lambda f: uses_yarn(f.config) and not yarn_turns(f)[0] > yarn_turns(f)[1] > 0,
        lambda f: (
            f"--yarn-beta-fast {yarn_turns(f)[0]} must be greater than --yarn-beta-slow "
            f"{yarn_turns(f)[1]}, and both than 0"
        ),
    ),
    Rule(
        "yarn-base",
        lambda f: uses_yarn(f.config) and f.config.rotary_base < 2,
        lambda f: f"{YARN} needs --rotary-base 2 or more, not {f.config.rotary_base}",
    ),
    Rule(
        "yarn-growth",
        lambda f: uses_yarn(f.config) and (f.config.mscale < 0 or f.config.mscale_all_dim < 0),
        lambda f: (
            f"--mscale {f.config.mscale} and --mscale-all-dim {f.config.mscale_all_dim} must be "
            "at least 0"
        ),
    ),
    Rule(
        "yarn-alone",
        lambda f: (
            uses_yarn(f.config)
            and (
                f.config.use_rope_scaling
                or f.config.rotary_seq_len_interpolation_factor is not None
            )
        ),
        lambda f: (
            f"{YARN} scales the positions: leave out --use-rope-scaling and "
            "--rotary-seq-len-interpolation-factor"
        ),
    ),
    at_least_rule("yarn_original_max_position_embeddings", 1),
    *(at_least_rule(field, 1) for field in LATENT_FIELDS),
    *(at_most_rule(field, LARGEST_SIZE) for field in LATENT_FIELDS),
    Rule(
        "latent-alone",
        lambda f: bool(beside_latent(f)),
        lambda f: (
            f"{LATENT} has heads, positions and biases of its own kind: leave out "
            f"{', '.join(beside_latent(f))}"
        ),
    ),
    Rule(
        "latent-positions",
        unturned,
        lambda f: (
            f"{LATENT} needs rotary positions, not {position_kind(f.config)}; legal: "
            "--position-embedding-type rope, yarn"
        ),
    ),
    Rule(
        "clamp-needs-gate",
        lambda f: f.config.activation_func_clamp_value is not None and not is_gated(f.config),
        lambda f: f"{CLAMP} {f.config.activation_func_clamp_value} needs {GATED}",
    ),
    Rule(
        "clamp-positive",
        lambda f: (
            f.config.activation_func_clamp_value is not None
            and not f.config.activation_func_clamp_value > 0
        ),
        lambda f: (
            f"{CLAMP} {f.config.activation_func_clamp_value} must be greater than 0; leave it out "
            "for no clamp"
        ),
    ),
    Rule(
        "offset-needs-gate",
        lambda f: f.config.glu_linear_offset != 0 and not is_gated(f.config),
        lambda f: f"--glu-linear-offset {f.config.glu_linear_offset} needs {GATED}",
    ),
)
