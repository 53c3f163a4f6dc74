"""Which checkpoint to load: the newest published one that verifies.

Pointers in published/ are the only restart roots. iter_XXXXXXX directories and the
tracker file are views: a path may come in through one, the truth is looked up behind it.
For each newer checkpoint that is passed over the reason is kept, to be told to the user.
A URL is looked into through a local mirror (`remote.py`), with the same checks.
"""

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_lite.checkpoint.commit import TRACKER_FILE, VIEW_POINTER_FILE
from megatron_lite.checkpoint.files import read_file, storage_error
from megatron_lite.checkpoint.manifest import (
    ATTEMPT_PATTERN,
    MANIFEST_FILE,
    MAX_POINTER_BYTES,
    POINTER_PATTERN,
    Manifest,
    Pointer,
    attempt_directory,
    parse_pointer,
    pointer_path,
)
from megatron_lite.checkpoint.ranges import already_here
from megatron_lite.checkpoint.remote import ITERATION_PATTERN, Mirror, open_mirror, split_url
from megatron_lite.checkpoint.stores import is_url, local_path
from megatron_lite.checkpoint.verify import check_data, check_structure, load_manifest
from megatron_lite.errors import DamagedError, UserError

VERIFY_LEVELS = ("structure", "full")


class NoCheckpoint(UserError):
    """The directory holds no checkpoint at all (an empty or missing directory)."""


@dataclass(frozen=True)
class PassedOver:
    """A published step that was not chosen, and why."""

    step: int
    reason: str


@dataclass(frozen=True)
class Found:
    """A checkpoint that verified, and the newer ones that did not."""

    directory: Path
    step: int
    manifest_sha256: str
    manifest: Manifest
    passed_over: tuple[PassedOver, ...] = ()
    mirror: Mirror | None = None  # of a checkpoint in an object store

    @property
    def place(self) -> str:
        """Where the checkpoint is, in the user's words: its directory or its URL."""
        return (
            str(self.directory) if self.mirror is None else self.mirror.words(str(self.directory))
        )


def published_steps(root: Path) -> list[int]:
    """Return the published steps, newest first, whether they verify or not."""
    try:
        names = [child.name for child in (root / "published").iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = (POINTER_PATTERN.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def read_pointer(root: Path, step: int) -> Pointer:
    """Read published/STEP.json."""
    path = pointer_path(root, step)
    pointer = parse_pointer(read_file(path, MAX_POINTER_BYTES), str(path))
    if pointer.step != step or not pointer.attempt.startswith(f"{step}-"):
        raise DamagedError(f"{path}: says step {pointer.step}, attempt {pointer.attempt}")
    return pointer


def suspect_path(directory: Path) -> Path:
    """Return the mark of an attempt that a load has found damaged; beside it, as its lock is.

    It convicts nobody: the next load looks for itself. But retention, which reads no
    tensors, neither counts such a checkpoint as a good one nor deletes it.
    """
    return directory.with_name(f"{directory.name}.suspect")


def open_published(root: Path, step: int, verify: str, mirror: Mirror | None = None) -> Found:
    """Verify one published step.

    Args:
        verify: "structure" looks at every file without reading tensors; "full" hashes all.
        mirror: `root` is the directory of this mirror.
    """
    pointer = read_pointer(root, step)
    directory = attempt_directory(root, pointer.attempt)
    if mirror is not None:
        mirror.checkpoint(pointer.attempt)
    manifest, sha256 = _verified(directory, pointer.manifest_sha256, verify, mirror)
    if (manifest.attempt, manifest.step) != (pointer.attempt, step):
        raise DamagedError(f"{directory}: belongs to attempt {manifest.attempt}")
    return Found(directory, step, sha256, manifest, mirror=mirror)


def find_checkpoint(
    path: str | Path,
    step: int | None = None,
    *,
    verify: str = "full",
    excluded: Collection[PassedOver] = (),
    mirror: Mirror | None = None,
) -> Found:
    """Return the newest published checkpoint that verifies, or the one asked for.

    Args:
        path: a SAVE root, or one checkpoint directory (attempt, iter_XXXXXXX view, or a
            copy of one made elsewhere), or a URL of one of them.
        step: only this step (no fallback to another one); None for the newest.
        verify: "full" hashes every byte; "structure" reads no tensors, for callers whose
            reads verify the pieces they use anyway (`load_newest`).
        excluded: steps found damaged before; passed over with the reason given.
        mirror: of a URL; one is made when it is not given.

    Raises:
        NoCheckpoint: nothing was ever published here, or not this step.
        DamagedError: there are checkpoints, but none verifies; every reason is listed.
    """
    if verify not in VERIFY_LEVELS:
        raise ValueError(f"verify is {verify!r}, not one of {VERIFY_LEVELS}")
    if is_url(path):
        return _find_in_store(str(path), step, verify, excluded, mirror)
    place = local_path(path)
    try:
        single = _single_directory(place)
        if single is not None:
            found = _open_single(single, place, step, verify)
            for item in excluded:
                if item.step == found.step:
                    raise DamagedError(item.reason)
            return found
        return _choose(place, step, verify, excluded, None)
    except OSError as error:
        raise storage_error(error, place) from error


def _find_in_store(
    url: str,
    step: int | None,
    verify: str,
    excluded: Collection[PassedOver],
    mirror: Mirror | None,
) -> Found:
    mirror = mirror or open_mirror(url)
    inner = split_url(url)[1]
    named = ITERATION_PATTERN.fullmatch(inner) or re.match(r"attempts/([0-9]+)-", inner)
    if named is not None:
        if step is not None and step != int(named[1]):
            raise NoCheckpoint(f"{url}: holds step {int(named[1])}, not step {step}")
        step = int(named[1])
    try:
        mirror.pointers()
        found = _choose(mirror.root, step, verify, excluded, mirror)
    except UserError as error:
        raise type(error)(mirror.words(str(error))) from error
    except OSError as error:
        raise storage_error(error, mirror.root) from error
    if inner.startswith("attempts/") and found.directory.name != inner.partition("/")[2]:
        raise DamagedError(f"{url}: was never published, or has been replaced or retired")
    told = tuple(PassedOver(item.step, mirror.words(item.reason)) for item in found.passed_over)
    return replace(found, passed_over=told)


def _choose(
    root: Path,
    step: int | None,
    verify: str,
    excluded: Collection[PassedOver],
    mirror: Mirror | None,
) -> Found:
    steps = published_steps(root)
    if not steps:
        raise NoCheckpoint(_why_nothing(root))
    if step is not None:
        if step not in steps:
            listed = ", ".join(map(str, steps[:20]))
            raise NoCheckpoint(f"{root}: no checkpoint of step {step}; published are {listed}")
        steps = [step]
    reasons = {item.step: item.reason for item in excluded}
    passed_over: list[PassedOver] = []
    for candidate in steps:
        if candidate in reasons:
            passed_over.append(PassedOver(candidate, reasons[candidate]))
            continue
        try:
            found = open_published(root, candidate, verify, mirror)
        except DamagedError as error:
            passed_over.append(PassedOver(candidate, str(error)))
            continue
        passed_over += _unpublished(root, candidate, steps)
        return replace(found, passed_over=tuple(passed_over))
    told = "".join(f"\n  step {item.step}: {item.reason}" for item in passed_over)
    raise DamagedError(f"{root}: no published checkpoint verifies:{told}")


def _single_directory(place: Path) -> Path | None:
    """Return the attempt directory that `place` stands for, None if it is a SAVE root."""
    view = place / VIEW_POINTER_FILE
    if view.is_file() and not (place / MANIFEST_FILE).exists():
        text = read_file(view, MAX_POINTER_BYTES).decode("utf-8", "replace").strip()
        folder, _, attempt = text.partition("/")
        if folder != "attempts" or not ATTEMPT_PATTERN.fullmatch(attempt):
            raise DamagedError(f"{view}: does not name an attempt")
        return attempt_directory(Path(os.path.realpath(place)).parent, attempt)
    if (
        ATTEMPT_PATTERN.fullmatch(Path(os.path.realpath(place)).name)
        or (place / MANIFEST_FILE).exists()
    ):
        return Path(os.path.realpath(place))
    return None


def _open_single(directory: Path, place: Path, step: int | None, verify: str) -> Found:
    published = directory.parent.parent
    if directory.parent.name == "attempts" and (published / "published").is_dir():
        match = re.match(r"\d+", directory.name)
        named = int(match[0]) if match else -1
        pointer = read_pointer(published, named) if named in published_steps(published) else None
        if pointer is None or pointer.attempt != directory.name:
            raise DamagedError(f"{place}: was never published, or has been replaced or retired")
        found = open_published(published, named, verify)
    else:  # a copy of a checkpoint directory: the manifest vouches for itself
        manifest, sha256 = _verified(directory, None, verify, None)
        found = Found(directory, manifest.step, sha256, manifest)
    if step is not None and step != found.step:
        raise NoCheckpoint(f"{place}: holds step {found.step}, not step {step}")
    return found


def _verified(
    directory: Path, manifest_sha256: str | None, verify: str, mirror: Mirror | None
) -> tuple[Manifest, str]:
    if directory.is_symlink() or not directory.is_dir():
        raise DamagedError(f"{directory}: checkpoint directory is missing")
    manifest, sha256 = load_manifest(directory, manifest_sha256)
    check_structure(directory, manifest)
    if verify == "full":
        check_data(directory, manifest, already_here if mirror is None else mirror.fetch)
    return manifest, sha256


def _unpublished(root: Path, step: int, published: Collection[int]) -> list[PassedOver]:
    """Newer attempts that were finalized but have no pointer: told, because one may be lost."""
    told = []
    for manifest in sorted((root / "attempts").glob(f"*/{MANIFEST_FILE}")):
        match = ATTEMPT_PATTERN.fullmatch(manifest.parent.name)
        if match and int(match[1]) > step and int(match[1]) not in published:
            reason = f"{manifest.parent}: was finalized but not published, or its pointer is gone"
            told.append(PassedOver(int(match[1]), reason))
    return told


def _why_nothing(root: Path) -> str:
    if not root.exists():
        return f"{root}: does not exist"
    if (root / TRACKER_FILE).exists():
        return (
            f"{root}: holds no checkpoint of megatron_lite; {TRACKER_FILE} looks like Megatron-LM, "
            "convert it with tools/convert_checkpoint.py"
        )
    return f"{root}: holds no published checkpoint"
