"""Rules of the optimizers beside Adam, of parameter groups, freezing and weight averages."""

from __future__ import annotations

from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.model_rules import above_zero_rule, at_least_rule, fraction_rule
from megatron_lite.config.muon_coefficients import COEFFICIENTS, steps_fault
from megatron_lite.config.options import build_options
from megatron_lite.config.param_groups import parse_group_rule
from megatron_lite.config.schema import Config

# Without the flag on the right, those on the left say nothing.
OF_OPTIMIZER = {
    "muon": (
        *("muon_momentum", "muon_nesterov", "muon_scale_mode", "muon_extra_scale_factor"),
        *("muon_coefficient_type", "muon_num_ns_steps", "muon_fp32_matmul_prec"),
        *("muon_tp_mode", "muon_scalar_optimizer"),
    ),
    "adafactor": (
        *("adafactor_beta2_decay", "adafactor_beta1", "adafactor_eps"),
        "adafactor_clip_threshold",
    ),
}


def unused_flags(config: Config) -> dict[str, list[str]]:
    """Return the given flags of optimizers that do not run, by optimizer."""
    options = build_options()
    found: dict[str, list[str]] = {}
    for optimizer, fields in OF_OPTIMIZER.items():
        if config.optimizer == optimizer:
            continue
        for field in fields:
            if getattr(config, field) != options[field].default:
                found.setdefault(optimizer, []).append(options[field].name)
    return found


def unused_message(f: Facts) -> str:
    """Tell which optimizer the flags are of."""
    found = unused_flags(f.config)
    return "; ".join(
        f"{', '.join(names)}: only with --optimizer {optimizer}, which is {f.config.optimizer}"
        for optimizer, names in found.items()
    )


def ns_steps_fault(f: Facts) -> str:
    """Say what is wrong with the number of Newton-Schulz iterations, or ''."""
    kind = f.config.muon_coefficient_type
    return steps_fault(kind, f.config.muon_num_ns_steps) if kind in COEFFICIENTS else ""


def group_faults(config: Config) -> str:
    """Say what is wrong with the words of --param-group, or ''."""
    faults = []
    for word in config.param_group:
        try:
            parse_group_rule(word)
        except ValueError as fault:
            faults.append(str(fault))
    return "; ".join(faults)


def decoupled_min(config: Config) -> float:
    """Lowest rate of embeddings and output layer in force."""
    return config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr


OPTIMIZER_RULES: tuple[Rule, ...] = (
    fraction_rule("muon_momentum"),
    above_zero_rule("muon_extra_scale_factor"),
    fraction_rule("adafactor_beta1"),
    above_zero_rule("adafactor_eps"),
    above_zero_rule("adafactor_beta2_decay"),
    at_least_rule("adafactor_clip_threshold", 0),
    at_least_rule("decoupled_lr", 0),
    at_least_rule("decoupled_min_lr", 0),
    fraction_rule("weight_ema_decay"),
    Rule(
        "muon-steps",
        lambda f: bool(ns_steps_fault(f)),
        lambda f: f"--muon-num-ns-steps {f.config.muon_num_ns_steps} {ns_steps_fault(f)}",
    ),
    Rule(
        "muon-whole-matrices",
        lambda f: f.config.muon_tp_mode == "blockwise",
        lambda f: (
            "--muon-tp-mode blockwise: orthogonalises the blocks of a tensor rank, so the result "
            "would depend on --tensor-model-parallel-size; legal: duplicated, distributed"
        ),
    ),
    Rule("optimizer-flags", lambda f: bool(unused_flags(f.config)), unused_message),
    Rule(
        "param-groups",
        lambda f: bool(group_faults(f.config)),
        lambda f: f"--param-group: {group_faults(f.config)}",
    ),
    Rule(
        "decoupled-min-lr",
        lambda f: (
            f.config.decoupled_lr is not None
            and 0 <= f.config.decoupled_lr < decoupled_min(f.config)
        ),
        lambda f: (
            f"--decoupled-min-lr {decoupled_min(f.config)} exceeds --decoupled-lr "
            f"{f.config.decoupled_lr}; nearest legal: {f.config.decoupled_lr}"
            + (" (unset, it is --min-lr)" if f.config.decoupled_min_lr is None else "")
        ),
    ),
    Rule(
        "decoupled-warmup-init",
        lambda f: (
            f.config.decoupled_lr is not None
            and 0 <= f.config.decoupled_lr < f.config.lr_warmup_init
        ),
        lambda f: (
            f"--lr-warmup-init {f.config.lr_warmup_init} exceeds --decoupled-lr "
            f"{f.config.decoupled_lr}; nearest legal: {f.config.decoupled_lr}"
        ),
    ),
    Rule(
        "decoupled-needs-lr",
        lambda f: f.config.decoupled_min_lr is not None and f.config.decoupled_lr is None,
        lambda f: "--decoupled-min-lr needs --decoupled-lr, which is not given",
    ),
    Rule(
        "average-to-evaluate",
        lambda f: f.config.eval_with_ema and f.config.weight_ema_decay is None,
        lambda f: "--eval-with-ema needs --weight-ema-decay, which is not given",
    ),
)
