"""Rules of where optimizer state lies, of its dtypes and of narrow main gradients."""

from __future__ import annotations

from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.schema import Config
from megatron_lite.config.state_plan import offload_kind

AWARE = "--use-precision-aware-optimizer"
OFFLOAD = "--optimizer-offload"


def narrow_flags(config: Config) -> list[str]:
    """The state dtypes that are not fp32, as given."""
    fields = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    return [
        f"--{field.replace('_', '-')} {getattr(config, field)}"
        for field in fields
        if getattr(config, field) != "fp32"
    ]


def narrow_gradients(config: Config) -> str:
    """The flag that makes main gradients narrow, or ''."""
    if config.grad_reduce_in_bf16:
        return "--grad-reduce-in-bf16"
    return "--main-grads-dtype bf16" if config.main_grads_dtype == "bf16" else ""


def is_offloaded(f: Facts) -> bool:
    """Say whether state lies elsewhere than beside the parameters."""
    return offload_kind(f.config) != "none"


STATE_RULES: tuple[Rule, ...] = (
    Rule(
        "offload-once",
        lambda f: f.config.optimizer_cpu_offload and f.config.optimizer_offload == "disk",
        lambda f: f"--optimizer-cpu-offload and {OFFLOAD} disk exclude each other",
    ),
    Rule(
        "offload-directory",
        lambda f: (f.config.optimizer_offload == "disk") != (f.config.offload_dir is not None),
        lambda f: (
            f"{OFFLOAD} disk needs --offload-dir DIR, a directory on a local disk"
            if f.config.offload_dir is None
            else f"--offload-dir {f.config.offload_dir} needs {OFFLOAD} disk"
        ),
    ),
    Rule(
        "offload-fraction",
        lambda f: not 0.0 <= f.config.optimizer_offload_fraction <= 1.0,
        lambda f: (
            f"--optimizer-offload-fraction {f.config.optimizer_offload_fraction} is no share; "
            "legal: 0 to 1"
        ),
    ),
    Rule(
        "offload-fraction-idle",
        lambda f: f.config.optimizer_offload_fraction != 1.0 and not is_offloaded(f),
        lambda f: (
            f"--optimizer-offload-fraction {f.config.optimizer_offload_fraction} changes nothing "
            f"without {OFFLOAD} cpu or disk"
        ),
    ),
    Rule(
        "offload-optimizer",
        lambda f: is_offloaded(f) and f.config.optimizer not in ("adam", "sgd"),
        lambda f: (
            f"{OFFLOAD} {offload_kind(f.config)} with --optimizer {f.config.optimizer} is not "
            "yet supported; legal: adam, sgd"
        ),
    ),
    Rule(
        "offload-average",
        lambda f: is_offloaded(f) and f.config.weight_ema_decay is not None,
        lambda f: (
            f"{OFFLOAD} {offload_kind(f.config)} with --weight-ema-decay is not yet supported"
        ),
    ),
    Rule(
        "state-dtypes-gate",
        lambda f: bool(narrow_flags(f.config)) and not f.config.use_precision_aware_optimizer,
        lambda f: f"{', '.join(narrow_flags(f.config))}: only with {AWARE}",
    ),
    Rule(
        "state-dtypes-optimizer",
        lambda f: f.config.use_precision_aware_optimizer and f.config.optimizer != "adam",
        lambda f: f"{AWARE} is for --optimizer adam, not {f.config.optimizer}",
    ),
    Rule(
        "state-dtypes-fp64",
        lambda f: f.config.fp64 and bool(narrow_flags(f.config)),
        lambda f: f"{', '.join(narrow_flags(f.config))}: --fp64 keeps everything in float64",
    ),
    Rule(
        "gradients-in-bf16",
        lambda f: bool(narrow_gradients(f.config)) and not f.config.bf16,
        lambda f: f"{narrow_gradients(f.config)} needs --bf16",
    ),
    Rule(
        "one-gradient-dtype",
        lambda f: (
            f.config.accumulate_allreduce_grads_in_fp32 and f.config.main_grads_dtype == "bf16"
        ),
        lambda f: (
            "--accumulate-allreduce-grads-in-fp32 and --main-grads-dtype bf16 exclude each other"
        ),
    ),
    Rule(
        "bf16-gradients-optimizer",
        lambda f: bool(narrow_gradients(f.config)) and f.config.optimizer not in ("adam", "sgd"),
        lambda f: (
            f"{narrow_gradients(f.config)} with --optimizer {f.config.optimizer} is not yet "
            "supported; legal: adam, sgd"
        ),
    ),
)
