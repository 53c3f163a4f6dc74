"""What lies in a SAVE directory: every published step, and what was never published.

For people: nothing is chosen or changed here. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.catalog import Found, open_published, published_steps
from megatron_lite.checkpoint.files import storage_error
from megatron_lite.checkpoint.manifest import attempt_directory, pointer_path
from megatron_lite.checkpoint.remote import Mirror, open_mirror
from megatron_lite.checkpoint.retention import abandoned_attempts
from megatron_lite.checkpoint.stores import is_url, local_path
from megatron_lite.errors import DamagedError, UserError

LAYOUT_AXES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")


@dataclass(frozen=True)
class ListedStep:
    """A published step.

    Attributes:
        published: when, ISO 8601 in UTC; None in a store, which is not asked.
        found: the checkpoint, None where it is damaged.
        fault: why it is damaged.
    """

    step: int
    published: str | None
    found: Found | None
    fault: str | None


@dataclass(frozen=True)
class ListedAttempt:
    """A directory that no pointer names: being written, abandoned, or replaced."""

    step: int
    name: str
    files: int
    bytes: int
    changed: str


def list_directory(path: str | Path, verify: str) -> tuple[list[ListedStep], list[ListedAttempt]]:
    """List a SAVE root, or the URL of one; newest step first.

    Args:
        verify: "structure" looks at every file; "full" reads and hashes all.

    Raises:
        UserError: there is no such directory, or nothing was ever saved in it.
    """
    mirror = open_mirror(str(path)) if is_url(path) else None
    root = local_path(path) if mirror is None else mirror.root
    try:
        if mirror is not None:
            mirror.pointers()
        steps = [_listed(root, step, verify, mirror) for step in published_steps(root)]
        attempts = [] if mirror is not None else _attempts(root)
    except OSError as error:
        raise storage_error(error, root) from error
    if not steps and not attempts:
        raise UserError(f"{path}: holds no checkpoint, published or not")
    return steps, attempts


def _listed(root: Path, step: int, verify: str, mirror: Mirror | None) -> ListedStep:
    published = None if mirror is not None else _time(pointer_path(root, step).lstat().st_mtime)
    try:
        found = open_published(root, step, verify, mirror)
    except DamagedError as error:
        fault = str(error) if mirror is None else mirror.words(str(error))
        return ListedStep(step, published, None, fault)
    return ListedStep(step, published, found, None)


def _attempts(root: Path) -> list[ListedAttempt]:
    if not (root / "attempts").is_dir():
        return []
    listed = []
    for step, name in abandoned_attempts(root):
        directory = attempt_directory(root, name)
        files = [child.lstat() for child in directory.iterdir()]
        changed = max((status.st_mtime for status in files), default=directory.stat().st_mtime)
        size = sum(status.st_size for status in files)
        listed.append(ListedAttempt(step, name, len(files), size, _time(changed)))
    return listed


def describe_layout(state: Mapping[str, Any]) -> str:
    """Return the axes that are cut, such as "tp 2, dp 4"; empty for a conversion."""
    layout = state.get("layout")
    layout = layout if isinstance(layout, Mapping) else {}
    cut = [f"{axis} {layout[axis]}" for axis in LAYOUT_AXES if layout.get(axis, 1) != 1]
    return ", ".join(cut) or ("1 rank" if layout else "")


def describe_origin(state: Mapping[str, Any]) -> str:
    """Return in few words what a checkpoint's state is."""
    origin, counters = state.get("origin"), state.get("counters")
    if isinstance(origin, Mapping) and origin.get("kind") == "converted":
        return f"converted from {origin.get('source')}"
    samples = counters.get("consumed_samples") if isinstance(counters, Mapping) else None
    return "a run" if samples is None else f"a run, {samples} samples consumed"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
