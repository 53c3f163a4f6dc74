"""The save directory before the first step: usable, shared, ours alone, and not another run's.

A run joins its directory before it loads: from then on no earlier run can publish there,
so what is loaded is the newest that there will be.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from megatron_lite.checkpoint.catalog import published_steps
from megatron_lite.checkpoint.fence import Membership, take_membership
from megatron_lite.checkpoint.files import FILE_MODE, FileSystem
from megatron_lite.checkpoint.remote_save import (
    check_place,
    remote_steps,
    take_remote_membership,
)
from megatron_lite.checkpoint.retention import abandoned_attempts
from megatron_lite.checkpoint.save import check_writable
from megatron_lite.checkpoint.shared import check_shared
from megatron_lite.checkpoint.stores import is_url
from megatron_lite.checkpoint.together import every_rank, first_rank
from megatron_lite.errors import UserError
from megatron_lite.train.parts import Core
from megatron_lite.train.restore import Restored


@dataclass(frozen=True)
class Joined:
    """A run's place in its save directory; epoch 0 without one. `notes` are for the log."""

    epoch: int = 0
    notes: tuple[str, ...] = ()


@contextmanager
def join_save_directory(core: Core) -> Iterator[Joined]:
    """Become the one run that saves to `--save`, for as long as the block lasts.

    Raises:
        UserError: the directory cannot be written, is not shared by the nodes, or another
            run is alive in it.

    Comm: four exchanges of a few hundred bytes per rank; none without `--save`.
    """
    if core.config.save is None:
        yield Joined()
        return
    root, world = Path(core.config.save), core.groups.world
    if is_url(core.config.save):
        yield Joined(join_store(core.config.save, core))
        return
    check_writable(root, world)
    check_shared(root, world)
    memberships: list[Membership] = []

    def take() -> tuple[int, list[str]]:
        memberships.append(take_membership(root, FileSystem()))
        return memberships[0].epoch, [
            f"note: {root}: attempt {name} to save step {step} is incomplete and is not used"
            for step, name in abandoned_attempts(root)
        ]

    epoch, notes = first_rank(take, world, root)
    try:
        yield Joined(epoch, tuple(notes))
    finally:
        for membership in memberships:
            membership.leave()


def join_store(url: str, core: Core) -> int:
    """Become the run that saves to an object store; return its epoch.

    Comm: three exchanges of a few hundred bytes per rank.
    """
    world, unsafe = core.groups.world, core.config.ckpt_allow_unsafe_publish
    first_rank(lambda: check_place(url, unsafe, exclusive=True), world, Path(url))
    every_rank(lambda: check_place(url, unsafe, exclusive=False), world, Path(url))
    epoch: int = first_rank(lambda: take_remote_membership(url).epoch, world, Path(url))
    return epoch


def check_save_directory(core: Core, restored: Restored) -> None:
    """Refuse to start among another run's steps.

    Raises:
        UserError: a step that this run is going to reach is published already.
    """
    config, start = core.config, restored.state.iteration
    if config.save is None or config.overwrite_save:
        return
    place, world = config.save, core.groups.world
    published = (
        first_rank(lambda: remote_steps(place), world, Path(place))
        if is_url(place)
        else published_steps(Path(place))
    )
    replaceable = restored.passed_over if config.load == config.save else ()
    ahead = [
        step
        for step in published
        if start < step <= core.plan.batch.train_iters and step not in replaceable
    ]
    if ahead:
        raise UserError(
            f"--save {config.save} holds checkpoints of the steps {', '.join(map(str, ahead[:5]))} "
            f"and this run starts at step {start}: continue that run with --load {config.save}, "
            "save to another directory, or replace them with --overwrite-save"
        )


def note_progress(root: Path, iteration: int, consumed_samples: int, world_size: int) -> None:
    """Append a line to progress.txt (`--log-progress`)."""
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    job = os.environ.get("SLURM_JOB_ID", "")
    path = root / "progress.txt"
    with open(path, "a", encoding="utf-8", opener=lambda p, f: os.open(p, f, FILE_MODE)) as file:
        file.write(
            f"{now}\tJob ID: {job}\t# GPUs: {world_size}\tSaved checkpoint\t"
            f"Iteration: {iteration}\tConsumed samples: {consumed_samples}\n"
        )
