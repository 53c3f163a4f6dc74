"""What may differ between a checkpoint and the run that resumes from it.

`RULES` is the list; the first rule whose pattern matches a path of the state decides. An
architecture that differs is always refused; another fact that would silently make it
another run (dataset, tokenizer, sequence length, seed, batch, ...) is refused unless
`--allow-resume-change FIELD` names it; layout, versions and all other flags are logged.

`state` is what the training code saves: `facts` (what decides the numbers, keyed by the
configuration field that sets it), `config`, `layout`, `versions`; `counters` and
`schedule` are progress, whose owners compare them while loading.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megatron_lite.checkpoint.strict_json import plain_json
from megatron_lite.config.architecture import ARCHITECTURE_FIELDS
from megatron_lite.errors import UserError

ABSENT = "absent"


@dataclass(frozen=True)
class ResumeRule:
    """How a difference at the paths that match `pattern` is treated.

    `action` is "refuse_always", "refuse" (unless the field is allowed), "log" or "ignore".
    """

    pattern: str
    action: str


RULES: tuple[ResumeRule, ...] = (
    *(ResumeRule(f"facts.{name}", "refuse_always") for name in ARCHITECTURE_FIELDS),
    *(ResumeRule(f"facts.{name}.*", "refuse_always") for name in ARCHITECTURE_FIELDS),
    ResumeRule("facts*", "refuse"),
    ResumeRule("counters*", "ignore"),
    ResumeRule("schedule*", "ignore"),
    ResumeRule("*", "log"),
)


def compare_state(
    saved_state: Mapping[str, Any], current_state: Mapping[str, Any], allow: Sequence[str] = ()
) -> list[str]:
    """Compare the state of a checkpoint with the run's, before anything is changed.

    Args:
        saved_state: `Checkpoint.state`.
        current_state: the same object, as this run would save it.
        allow: configuration fields whose changes the user accepts, in either spelling
            (`seq_length`, `--seq-length`).

    Returns:
        One line per accepted difference, "PATH: SAVED -> CURRENT", for the log.

    Raises:
        UserError: all refused differences at once, with both values.
    """
    allowed = {word.removeprefix("--").replace("-", "_") for word in allow}
    logged: list[str] = []
    refused: list[str] = []
    for path, saved, current in _differences(saved_state, plain_json(current_state)):
        rule = next(rule for rule in RULES if fnmatchcase(path, rule.pattern))
        field = path.split(".")[1] if "." in path else path
        line = f"{path.removeprefix('facts.')}: {_brief(saved)} -> {_brief(current)}"
        if rule.action == "refuse_always":
            refused.append(f"{line} (another architecture)")
        elif rule.action == "refuse" and field not in allowed:
            refused.append(f"{line} (--allow-resume-change {field} accepts it)")
        elif rule.action != "ignore":
            logged.append(line)
    if refused:
        raise UserError(
            "this run is not the one that was saved (checkpoint -> this run):\n  "
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
