"""Parameter groups by rule, as `--param-group PATTERN:lr_mult=X,wd_mult=Y` writes them.

Patterns are fnmatch's, over whole logical names; the first rule that matches a parameter
wins. What a rule does not set stays as the parameter has it: its weight decay by its kind.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

EXAMPLE = "'*.mlp.*:lr_mult=0.5,wd_mult=0'"
NEAR = 3  # names that a message about an unmatched pattern shows


@dataclass(frozen=True)
class GroupRule:
    """Multipliers for the parameters that a pattern matches; None: as without the rule."""

    pattern: str
    lr_mult: float | None = None
    wd_mult: float | None = None


def parse_group_rule(text: str) -> GroupRule:
    """Read one word of `--param-group`.

    Raises:
        ValueError: says what is wrong with it.
    """
    pattern, colon, settings = text.rpartition(":")
    if not colon or not pattern:
        raise ValueError(f"'{text}' is not PATTERN:lr_mult=X,wd_mult=Y, for example {EXAMPLE}")
    values: dict[str, float] = {}
    for setting in settings.split(","):
        key, _, word = setting.partition("=")
        if key not in ("lr_mult", "wd_mult"):
            raise ValueError(f"'{text}': '{setting}' is neither lr_mult=X nor wd_mult=X")
        if key in values:
            raise ValueError(f"'{text}': {key} is given twice")
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise ValueError(f"'{text}': {key} must be a number >= 0, not '{word}'")
        values[key] = value
    return GroupRule(pattern, values.get("lr_mult"), values.get("wd_mult"))


def match_patterns(patterns: Sequence[str], names: Sequence[str], flag: str) -> dict[str, int]:
    """Return which pattern each matched name falls to: the first one.

    Args:
        patterns: of one flag.
        names: logical parameters of the whole model.
        flag: its spelling, for messages.

    Raises:
        ValueError: a pattern matches no name, or only names that earlier ones took.
    """
    found: dict[str, int] = {}
    for index, pattern in enumerate(patterns):
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = ", ".join(near_names(pattern, names))
            raise ValueError(f"{flag} {pattern}: matches no parameter; names like it: {near}")
        fresh = [name for name in matched if name not in found]
        if not fresh:
            earlier = ", ".join(patterns[i] for i in sorted({found[name] for name in matched}))
            raise ValueError(
                f"{flag} {pattern}: never used, all its parameters fall to {earlier} before it"
            )
        found |= dict.fromkeys(fresh, index)
    return found


def near_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that look most like a pattern; a layer's stand for all layers."""
    plain = pattern.replace("*", "")
    kinds = {".".join("*" if w.isdigit() else w for w in name.split(".")): name for name in names}
    by_likeness = sorted(
        kinds,
        key=lambda kind: -difflib.SequenceMatcher(None, plain, kind.replace("*", "")).ratio(),
    )
    return by_likeness[:NEAR]
