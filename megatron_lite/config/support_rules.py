"""Rules for what is legal but not built yet, or not part of this program.

They stand beside the arithmetic rules, not before them: a layout that cannot work is
told so even when its axis does not exist yet. Reasons come from the table of known
flags; the later owner of an axis deletes its rows here or changes their status there.
"""

from __future__ import annotations

from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.options import Option, build_options
from megatron_lite.config.schema import Config

OPTIMIZERS = ("adam", "sgd", "muon", "adafactor")
POSITIONS = ("learned_absolute", "rope", "yarn", "none")
TOKENIZERS = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
)


def shown(option: Option, value: object) -> str:
    """Write an option and its value as on the command line."""
    if isinstance(value, bool):
        return option.name
    if isinstance(value, tuple):
        return f"{option.name} {' '.join(str(item) for item in value)}"
    return f"{option.name} {value}"


def refused_options(config: Config) -> dict[str, list[str]]:
    """Return what is given but refused by name, by reason.

    Covers fields of the schema whose value asks for something, and Megatron's flags
    outside the schema that the parser recorded.
    """
    found: dict[str, list[str]] = {}
    options = build_options()
    for option in options.values():
        if not option.group or option.status != "refused":
            continue
        value = getattr(config, option.dest)
        gate = options.get(option.gate)
        if value == option.default or (gate and getattr(config, gate.dest) == gate.default):
            continue
        found.setdefault(option.reason, []).append(shown(option, value))
    for flag in config.refused_flags:
        found.setdefault(flag.reason, []).append(flag.text)
    return found


def refused_message(f: Facts) -> str:
    """List all refused flags by reason."""
    found = refused_options(f.config)
    return "; ".join(f"{', '.join(texts)}: {reason}" for reason, texts in found.items())


def value_rule(field: str, legal: tuple[str, ...]) -> Rule:
    """A choice of which only some are built."""
    name = f"--{field.replace('_', '-')}"
    return Rule(
        f"built-{name[2:]}",
        lambda f: getattr(f.config, field) is not None and getattr(f.config, field) not in legal,
        lambda f: (
            f"{name} {getattr(f.config, field)} is not yet supported; legal: {', '.join(legal)}"
        ),
    )


SUPPORT_RULES: tuple[Rule, ...] = (
    Rule("refused-flags", lambda f: bool(refused_options(f.config)), refused_message),
    value_rule("optimizer", OPTIMIZERS),
    value_rule("position_embedding_type", POSITIONS),
    value_rule("tokenizer_type", TOKENIZERS),
    value_rule("dataloader_type", ("single",)),
    value_rule("nan_policy", ("skip", "stop")),
    value_rule("moe_token_dispatcher_type", ("allgather", "alltoall")),
    Rule(
        "built-balancing",
        lambda f: "quantile_balancing" in f.config.moe_router_load_balancing_type,
        lambda f: (
            "--moe-router-load-balancing-type quantile_balancing is not yet supported; legal: "
            "aux_loss, seq_aux_loss, global_aux_loss, sinkhorn, none"
        ),
    ),
    value_rule("muon_scalar_optimizer", ("adam",)),
    value_rule("main_params_dtype", ("fp32",)),
    value_rule("exp_avg_dtype", ("fp32", "bf16")),
    value_rule("exp_avg_sq_dtype", ("fp32", "bf16")),
    Rule(
        "built-dry-run",
        lambda f: f.config.dry_run,
        lambda f: "--dry-run is not yet supported: needs the planner",
    ),
    Rule(
        "recompute-modules-built",
        lambda f: any(name != "core_attn" for name in f.config.recompute_modules or ()),
        lambda f: (
            f"--recompute-modules {' '.join(f.config.recompute_modules or ())}: only core_attn is "
            "supported yet"
        ),
    ),
)
