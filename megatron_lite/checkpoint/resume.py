"""What may differ between a checkpoint and the run that resumes from it.

`RULES` is the list; the first rule whose pattern matches a path of the state decides. An
architecture that differs is always refused; another fact that would silently make it
another run (dataset, tokenizer, sequence length, seed, batch, ...) is refused unless
`--allow-resume-change FIELD` names it; layout, versions and all other flags are logged.
Progress (counters, schedules, cursor) is ignored here: its owners compare it while loading.
From the differences follows which of two contracts the resume keeps. Torch-free.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megatron_lite.checkpoint.state import is_converted
from megatron_lite.checkpoint.strict_json import plain_json
from megatron_lite.config.architecture import ARCHITECTURE_FIELDS, EXPERT_FIELDS
from megatron_lite.config.options import build_options
from megatron_lite.config.schema import PrecisionConfig, RecomputeConfig, flag_fields
from megatron_lite.errors import UserError

ABSENT = "absent"
REPLAY = "deterministic replay: same layout, bitwise"
COVERAGE = "coverage-equivalent: layout changed ({}), same samples in the same global batches"
OTHER_RUN = "neither replay nor coverage-equivalent: accepted changes make it another run ({})"
SHOWN = 4  # paths of an unsure replay that are listed
# Settings of the update, beside the facts and the schedules.
UPDATE_FIELDS = (
    *("clip_grad", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"),
    *("muon_momentum", "muon_nesterov", "muon_scale_mode", "muon_extra_scale_factor"),
    *("muon_coefficient_type", "muon_num_ns_steps", "muon_fp32_matmul_prec", "muon_tp_mode"),
    *("muon_scalar_optimizer", "adafactor_beta2_decay", "adafactor_beta1", "adafactor_eps"),
    *("adafactor_clip_threshold", "param_group", "freeze", "weight_ema_decay"),
    *("nan_policy", "check_for_nan_in_loss_and_grad"),
)
# Settings that may change how a number is computed, hence its last bits.
ARITHMETIC_FIELDS = (
    *(f.name for g in (PrecisionConfig, RecomputeConfig) for f in flag_fields(g)),
    *("native_ops", "loss_chunks", "compile", "deterministic_mode", "device"),
    *("optimizer_offload", "optimizer_cpu_offload", "optimizer_offload_fraction"),
    *("ddp_bucket_size", "overlap_grad_reduce", "data_parallel_sharding_strategy"),
    *("num_distributed_optimizer_instances", "gradient_accumulation", "moe_replicated_experts"),
)


@dataclass(frozen=True)
class ResumeRule:
    """How a difference at the paths that match `pattern` is treated.

    `action` is "refuse_always", "refuse" (unless the field is allowed), "log" or "ignore".
    """

    pattern: str
    action: str


@dataclass(frozen=True)
class Change:
    """A difference that was accepted.

    Attributes:
        path: of the state, such as "layout.tp" or "facts.seed".
        saved, current: both values.
    """

    path: str
    saved: Any
    current: Any

    def __str__(self) -> str:
        name = self.path.removeprefix("facts.").removeprefix("config.")
        return f"{name}: {_brief(self.saved)} in the checkpoint, {_brief(self.current)} now"


RULES: tuple[ResumeRule, ...] = (
    *(ResumeRule(f"facts.{name}", "refuse_always") for name in ARCHITECTURE_FIELDS),
    *(ResumeRule(f"facts.{name}.*", "refuse_always") for name in ARCHITECTURE_FIELDS),
    ResumeRule("facts*", "refuse"),
    ResumeRule("randomness.scheme", "refuse_always"),
    # Judged as facts, by configuration field.
    ResumeRule("randomness.seed", "ignore"),
    ResumeRule("loss*", "ignore"),
    ResumeRule("batch.ramp*", "ignore"),
    ResumeRule("cursor.corpus_sha256", "ignore"),
    ResumeRule("config_sha256", "ignore"),
    # Progress and what goes with it.
    ResumeRule("canary*", "ignore"),
    ResumeRule("counters*", "ignore"),
    ResumeRule("cursor.blend*", "ignore"),
    ResumeRule("fp8*", "ignore"),
    ResumeRule("scaler*", "ignore"),
    ResumeRule("schedule*", "ignore"),
    ResumeRule("batch.dp_size", "ignore"),  # layout.dp
    ResumeRule("*", "log"),
)


def allowed_fields(words: Sequence[str]) -> set[str]:
    """Return the fields that `--allow-resume-change` names, in either spelling."""
    return {word.removeprefix("--").replace("-", "_") for word in words}


def compare_state(
    saved_state: Mapping[str, Any],
    current_state: Mapping[str, Any],
    allow: Sequence[str] = (),
    *,
    weights_only: bool = False,
    names: Mapping[str, str] | None = None,
) -> list[Change]:
    """Compare the state of a checkpoint with the run's, before anything is changed.

    Args:
        saved_state: `Checkpoint.state`.
        current_state: the same object, as this run would save it.
        allow: configuration fields whose changes the user accepts, in either spelling
            (`seq_length`, `--seq-length`).
        weights_only: another run starts from these weights: only the architecture is
            judged, and a difference in it may be allowed too (a longer rotary base).
        names: path prefix -> what a person calls it, such as the file behind a fingerprint.

    Returns:
        The accepted differences, for the log.

    Raises:
        UserError: all refused differences at once, with flag, both values and the way out.
    """
    allowed = allowed_fields(allow)
    current_state = plain_json(current_state)
    if "origin" in saved_state and is_converted(saved_state):
        # It has no run to compare with, and knows its own facts only.
        known = saved_state["facts"]
        facts = {name: current_state["facts"].get(name, ABSENT) for name in known}
        saved_state, current_state = {"facts": known}, {"facts": facts}
    logged: list[Change] = []
    refused: list[str] = []
    for change in state_differences(saved_state, current_state):
        action = next(r.action for r in RULES if fnmatchcase(change.path, r.pattern))
        field = change.path.split(".")[1] if "." in change.path else change.path
        if weights_only and action.startswith("refuse"):
            action = "refuse" if field in ARCHITECTURE_FIELDS else "log"
        if action == "refuse_always":
            why = "another architecture" if field in ARCHITECTURE_FIELDS else "another generator"
            if change.path == "facts.num_experts" and change.saved is None:
                why += "; --moe-use-upcycling makes experts of a dense --pretrained-checkpoint"
            refused.append(f"{_named(change, names)} ({_flag(change.path)}: {why})")
        elif action == "refuse" and field not in allowed:
            refused.append(
                f"{_named(change, names)} ({_flag(change.path)}; "
                f"--allow-resume-change {field} accepts it)"
            )
        elif action != "ignore":
            logged.append(change)
    if refused:
        raise UserError("this run is not the one that was saved:\n  " + "\n  ".join(refused))
    # One line per changed thing: a fact tells more than the flag behind it.
    told = {change.path.split(".")[1] for change in logged if change.path.startswith("facts.")}
    return [c for c in logged if c.path.removeprefix("config.") not in told]


def resume_contract(changes: Collection[Change]) -> str:
    """Say what a resume with these accepted differences promises.

    "deterministic replay" is bitwise; "coverage-equivalent" takes the same samples in the
    same global batches. A change that was allowed makes it another run, and where other
    code or another machine computes, equal bits depend on it.
    """
    update = [f"config.{name}" for name in UPDATE_FIELDS]
    judged = [c.path for c in changes if c.path.startswith(("facts.", "schedule."))]
    other = sorted({path.split(".")[1] for path in judged})
    other += [c.path.removeprefix("config.") for c in changes if c.path in update]
    if other:
        return OTHER_RUN.format(", ".join(other))
    layout = [c for c in changes if c.path.startswith(("layout.", "batch."))]
    if layout:
        shown = [f"{c.path.split('.')[1]} {c.saved} -> {c.current}" for c in layout]
        return COVERAGE.format(", ".join(shown))
    computing = [f"config.{name}" for name in ARITHMETIC_FIELDS]
    parts = ("arithmetic.", "code.", "versions.")
    unsure = [c.path for c in changes if c.path.startswith(parts) or c.path in computing]
    if unsure:
        return f"{REPLAY} if it computes alike in spite of {', '.join(unsure[:SHOWN])}"
    return REPLAY


def schedule_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Change]:
    """Return how the schedules in force differ from the checkpoint's, progress left out."""
    before, now = ({k: v for k, v in s.items() if k != "num_steps"} for s in (saved, current))
    return state_differences(before, plain_json(now), "schedule")


def state_differences(saved: Any, current: Any, path: str = "") -> list[Change]:
    """Return every path at which two JSON values differ, whether it matters or not."""
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        found = []
        for key in sorted(saved.keys() | current.keys()):
            inner = f"{path}.{key}" if path else key
            found += state_differences(saved.get(key, ABSENT), current.get(key, ABSENT), inner)
        return found
    if _are_records(saved) and _are_records(current) and len(saved) == len(current):
        pairs = enumerate(zip(saved, current, strict=True))
        return [c for i, (a, b) in pairs for c in state_differences(a, b, f"{path}.{i}")]
    same = saved == current and type(saved) is type(current)
    return [] if same else [Change(path, saved, current)]


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(i, dict) for i in value)


def _named(change: Change, names: Mapping[str, str] | None) -> str:
    for prefix, name in (names or {}).items():
        if change.path == prefix or change.path.startswith(f"{prefix}."):
            return f"{name}: {change}"
    return str(change)


def _flag(path: str) -> str:
    """The spelling on the command line of what set a value of the state."""
    first, *inner = path.split(".")
    field = inner[0] if inner else first
    if inner[:1] == ["num_experts"] and len(inner) > 1:
        field = EXPERT_FIELDS.get(inner[1], field)
    option = build_options().get(field)
    return option.name if option is not None else field


def _brief(value: Any) -> str:
    text = value if value is ABSENT else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
