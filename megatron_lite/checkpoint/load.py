"""Loading on many ranks: one choice for all, and all or nothing.

Rank 0 chooses the newest checkpoint that verifies and tells the others its place, step and
manifest hash. Each rank verifies what it reads. When a rank finds damage, all ranks give
that checkpoint up together and go to the next older one.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron_lite.checkpoint.catalog import Found, PassedOver, find_checkpoint, suspect_path
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.reader import Checkpoint
from megatron_lite.checkpoint.remote import Mirror, open_mirror
from megatron_lite.checkpoint.stores import is_url, local_path
from megatron_lite.checkpoint.together import every_rank, first_rank
from megatron_lite.checkpoint.verify import load_manifest
from megatron_lite.errors import DamagedError
from megatron_lite.mesh.groups import Group

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """What `load` returned on this rank, from which checkpoint, and what was passed over."""

    value: T
    checkpoint: Checkpoint
    passed_over: tuple[PassedOver, ...]


def load_newest(
    path: str | Path,
    group: Group,
    load: Callable[[Checkpoint], T],
    step: int | None = None,
    staging: str | None = None,
) -> Loaded[T]:
    """Load the newest checkpoint that verifies, the same one on all ranks.

    Args:
        path: SAVE root or one checkpoint directory, or the URL of one.
        group: the world.
        load: reads this rank's boxes into new tensors and returns them; it must not touch
            live state, because its result may be thrown away (all or nothing).
        step: only this step.
        staging: directory on this node for what comes from a URL (`--ckpt-staging-dir`);
            the system's temporary one when it is not given.

    Raises:
        NoCheckpoint: nothing is there. DamagedError: nothing there verifies, or the one
            step asked for does not. Any other error of `load`. Always on all ranks.

    Comm: two exchanges of a few hundred bytes per rank for each checkpoint tried.
    """
    place = local_path(path)
    excluded: list[PassedOver] = []
    mirrors: list[Mirror] = []
    if is_url(path):
        folder = None if staging is None else Path(staging)
        every_rank(lambda: mirrors.append(open_mirror(str(path), folder)), group, place)
    mirror = mirrors[0] if mirrors else None
    while True:
        told = first_rank(partial(_choose, path, step, excluded, mirror), group, place)
        results: list[Loaded[T]] = []
        try:
            every_rank(partial(_load_told, told, load, results, mirror), group, place)
        except DamagedError as error:
            excluded.append(PassedOver(told["step"], str(error)))
            if mirror is None and group.rank == 0:
                _mark_suspect(Path(told["directory"]), str(error))
            continue
        return results[0]


def _choose(
    place: str | Path, step: int | None, excluded: list[PassedOver], mirror: Mirror | None
) -> dict[str, Any]:
    """Rank 0's choice, as JSON for the others."""
    found = find_checkpoint(place, step, verify="structure", excluded=excluded, mirror=mirror)
    return {
        "directory": str(found.directory),
        "step": found.step,
        "sha256": found.manifest_sha256,
        "passed_over": [[item.step, item.reason] for item in found.passed_over],
    }


def _mark_suspect(directory: Path, reason: str) -> None:
    """Leave a mark for retention and the next load; a place that cannot be written has none."""
    path = suspect_path(directory)
    with suppress(OSError):
        if directory.parent.name == "attempts" and not path.exists():
            FileSystem().write_file(path, f"{reason}\n".encode())


def _load_told(
    told: dict[str, Any],
    load: Callable[[Checkpoint], T],
    results: list[Loaded[T]],
    mirror: Mirror | None,
) -> None:
    """Open what rank 0 has chosen, by its hash, and load from it."""
    directory = Path(told["directory"])
    if mirror is not None:  # rank 0's is a directory on its node only
        directory = mirror.manifest(directory.name)
    manifest, sha256 = load_manifest(directory, told["sha256"])
    passed_over = tuple(PassedOver(*item) for item in told["passed_over"])
    checkpoint = Checkpoint(Found(directory, told["step"], sha256, manifest, passed_over, mirror))
    results.append(Loaded(load(checkpoint), checkpoint, passed_over))
