"""What goes into a checkpoint of a run, and when it is written.

Tensors are logical pieces: NAME for a weight in the compute dtype, optim/{kind}/NAME for
masters and optimizer state. Beside them lies a closed JSON object: counters, schedules and
the facts that must not change unnoticed.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from megatron_lite.checkpoint.catalog import published_steps
from megatron_lite.checkpoint.save import check_writable, save_checkpoint
from megatron_lite.checkpoint.tensors import StateEntry
from megatron_lite.errors import UserError
from megatron_lite.telemetry.lines import format_saved, format_saving
from megatron_lite.train.canary import take_canary
from megatron_lite.train.parts import Core, Parts
from megatron_lite.train.record import describe_state
from megatron_lite.train.restore import Restored, entry_name
from megatron_lite.train.state import TrainState


def save_run(parts: Parts, state: TrainState) -> None:
    """Write and publish a checkpoint of this moment; every rank calls it."""
    config, plan = parts.config, parts.plan
    assert config.save is not None
    say, iteration = parts.telemetry.say, state.iteration
    say(format_saving(iteration, config.save, "megatron_lite"))
    entries = [
        StateEntry(entry_name(p), p.tensor, p.spec.shape, p.box.offset, p.owned)
        for p in parts.optimizer.state_pieces()
        if p.kind == "param" or not config.no_save_optim
    ]
    result = save_checkpoint(
        config.save,
        iteration,
        entries,
        describe_state(parts, state, take_canary(parts, state)),
        parts.groups.world,
        overwrite=config.overwrite_save,
        keep_last=config.keep_last,
        retain_interval=config.save_retain_interval,
    )
    for note in result.notes:
        say(f"  {note}")
    if config.log_progress and parts.groups.world.rank == 0:
        note_progress(Path(config.save), state, parts.groups.world.size)
    say(format_saved(iteration, config.save, plan.parallel.tp, plan.parallel.pp))
    parts.telemetry.event(
        "save",
        iteration,
        directory=str(result.directory),
        bytes=result.bytes,
        elapsed_ms=result.seconds * 1e3,
    )


def note_progress(root: Path, state: TrainState, world_size: int) -> None:
    """Append a line to progress.txt (`--log-progress`)."""
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    job = os.environ.get("SLURM_JOB_ID", "")
    with open(root / "progress.txt", "a", encoding="utf-8") as file:
        file.write(
            f"{now}\tJob ID: {job}\t# GPUs: {world_size}\tSaved checkpoint\t"
            f"Iteration: {state.iteration}\tConsumed samples: {state.consumed_samples}\n"
        )


def check_save_directory(core: Core, restored: Restored) -> None:
    """Refuse before the first step where saving would fail, or meet another run's steps.

    Raises:
        UserError: the directory cannot be written, or a step that this run is going to
            reach is published already.

    Comm: one exchange of a few hundred bytes per rank.
    """
    config, start = core.config, restored.state.iteration
    if config.save is None:
        return
    check_writable(Path(config.save), core.groups.world)
    if config.overwrite_save:
        return
    replaceable = restored.passed_over if config.load == config.save else ()
    ahead = [
        step
        for step in published_steps(Path(config.save))
        if start < step <= core.plan.batch.train_iters and step not in replaceable
    ]
    if ahead:
        raise UserError(
            f"--save {config.save} holds checkpoints of the steps {', '.join(map(str, ahead[:5]))} "
            f"and this run starts at step {start}: continue that run with --load {config.save}, "
            "save to another directory, or replace them with --overwrite-save"
        )
