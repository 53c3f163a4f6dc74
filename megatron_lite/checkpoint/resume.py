"""What may differ between a checkpoint and the run that resumes from it.

`RULES` is the list: an architecture that differs is always refused, what would silently
change the data or the schedule is refused unless `--allow-resume-change FIELD` says so,
all the rest (layout, versions, other flags) is logged. The first rule that matches a path
decides.

Keys of `state` that the rules know (the training code builds the same object when it saves
and when it resumes; other keys are logged when they differ, counters are not compared):

    iteration, consumed_samples, consumed_valid_samples, skipped, ...    counters
    model          ModelShape as an object        batch       BatchPlan as an object
    layout         ParallelShape as an object     precision   PrecisionShape as an object
    data           {"fingerprint": ..., ...}      tokenizer   {"fingerprint": ..., ...}
    schedule       LR and WD schedule definition  optimizer   kind and hyperparameters
    seed, randomness (name of the scheme), vocab_size (true), config, config_hash, versions
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megatron_lite.checkpoint.strict_json import plain_json
from megatron_lite.errors import UserError

ABSENT = "absent"


@dataclass(frozen=True)
class ResumeRule:
    """How a difference at the paths that match `pattern` is treated.

    `action` is "refuse_always", "refuse" (unless `field` is allowed), "log" or "ignore".
    """

    pattern: str
    action: str
    field: str = ""


RULES: tuple[ResumeRule, ...] = (
    ResumeRule("model.seq_length", "refuse", "sequence_length"),
    ResumeRule("batch.seq_length", "refuse", "sequence_length"),
    ResumeRule("model.vocab_multiple", "log"),
    ResumeRule("model.hidden_dropout", "log"),
    ResumeRule("model.attention_dropout", "log"),
    ResumeRule("model.init_std", "log"),
    ResumeRule("model.*", "refuse_always"),
    ResumeRule("model", "refuse_always"),
    ResumeRule("vocab_size", "refuse_always"),
    ResumeRule("data.*", "refuse", "dataset"),
    ResumeRule("data", "refuse", "dataset"),
    ResumeRule("tokenizer*", "refuse", "tokenizer"),
    ResumeRule("schedule*", "refuse", "schedule"),
    ResumeRule("batch.ramp*", "refuse", "global_batch_size"),
    ResumeRule("batch.global_batch_size", "refuse", "global_batch_size"),
    ResumeRule("global_batch_size", "refuse", "global_batch_size"),
    ResumeRule("batch.*", "log"),
    ResumeRule("seed", "refuse", "seed"),
    ResumeRule("randomness*", "refuse", "randomness"),
    ResumeRule("iteration", "ignore"),
    ResumeRule("step", "ignore"),
    ResumeRule("epoch", "ignore"),
    ResumeRule("consumed_*", "ignore"),
    ResumeRule("cursor*", "ignore"),
    ResumeRule("progress*", "ignore"),
    ResumeRule("scaler*", "ignore"),
    ResumeRule("skipped*", "ignore"),
    ResumeRule("config_hash", "ignore"),  # the fields of config tell more
    ResumeRule("*", "log"),
)
RESUME_FIELDS = tuple(sorted({rule.field for rule in RULES if rule.field}))


def compare_state(
    saved_state: Mapping[str, Any], current_state: Mapping[str, Any], allow: Sequence[str] = ()
) -> list[str]:
    """Compare the state of a checkpoint with the run's, before anything is loaded.

    Args:
        saved_state: `Checkpoint.state`.
        current_state: the same object, as this run would save it.
        allow: names of `RESUME_FIELDS` whose changes the user accepts.

    Returns:
        One line per accepted difference, "PATH: SAVED -> CURRENT", for the log.

    Raises:
        UserError: all refused differences at once, with both values.
    """
    unknown = sorted(set(allow) - set(RESUME_FIELDS))
    if unknown:
        raise UserError(
            f"--allow-resume-change {' '.join(unknown)}: legal fields are {' '.join(RESUME_FIELDS)}"
        )
    logged: list[str] = []
    refused: list[str] = []
    for path, saved, current in _differences(saved_state, plain_json(current_state)):
        rule = next(rule for rule in RULES if fnmatchcase(path, rule.pattern))
        line = f"{path}: {_brief(saved)} -> {_brief(current)}"
        if rule.action == "refuse_always":
            refused.append(f"{line} (another architecture)")
        elif rule.action == "refuse" and rule.field not in allow:
            refused.append(f"{line} (--allow-resume-change {rule.field} accepts it)")
        elif rule.action != "ignore":
            logged.append(line)
    if refused:
        raise UserError(
            "the checkpoint was made by another run (checkpoint -> this run):\n  "
            + "\n  ".join(refused)
        )
    return logged


def _differences(saved: Any, current: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        found = []
        for key in sorted(saved.keys() | current.keys()):
            inner = f"{path}.{key}" if path else key
            found += _differences(saved.get(key, ABSENT), current.get(key, ABSENT), inner)
        return found
    return [] if saved == current and type(saved) is type(current) else [(path, saved, current)]


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."
