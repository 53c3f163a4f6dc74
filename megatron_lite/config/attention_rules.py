"""Rules of attention windows and of gated activations."""

from __future__ import annotations

from megatron_lite.config.attention_plan import parse_window, windowed_layers
from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.plan import is_gated

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
