"""How a run saves: in the foreground or behind the training, and what happens if it fails.

A save begins with one exchange in which rank 0 names the attempt. In the foreground every
rank then writes its share; with `--async-save` it copies its share to shared memory and
its writer process writes while training goes on. Either way the finalizer process
publishes. That a save has ended is news: the rank that knows raises the vote of the step's
closing reduction, so that all ranks meet to settle it, without a collective per step.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.attempt import SaveRequest, discard, mark_failed, write_rank
from megatron_lite.checkpoint.background import FINALIZER, WRITER, Finalizer, Writer
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.finalizer import Job, failure_error
from megatron_lite.checkpoint.retention import WriterLock
from megatron_lite.checkpoint.save import begin_save
from megatron_lite.checkpoint.snapshot import SnapshotBuffer
from megatron_lite.checkpoint.stores import is_url, make_staging
from megatron_lite.checkpoint.tensors import WHOLE, Share, StateEntry, take_snapshot
from megatron_lite.checkpoint.together import every_rank, first_rank
from megatron_lite.checkpoint.writer import describe_job
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.mesh.collectives import all_gather_json
from megatron_lite.telemetry.lines import format_saved, format_saving
from megatron_lite.train.canary import take_canary
from megatron_lite.train.parts import Core, Parts
from megatron_lite.train.record import describe_state
from megatron_lite.train.restore import entry_name
from megatron_lite.train.save_directory import Joined, note_progress
from megatron_lite.train.save_schedule import SaveSchedule
from megatron_lite.train.state import TrainState


def state_entries(core: Core) -> list[StateEntry]:
    """What this rank holds of the state that is saved."""
    config = core.config
    return [
        StateEntry(
            entry_name(piece),
            piece.tensor,
            piece.spec.shape,
            piece.box.offset,
            config.ckpt_fully_parallel_save or piece.owned,
            Share(piece.replica.index, piece.replica.count, piece.replica.axes)
            if config.ckpt_fully_parallel_save
            else WHOLE,
        )
        for piece in core.optimizer.state_pieces()
        if piece.kind == "param" or not config.no_save_optim
    ]


@dataclass(frozen=True)
class Children:
    """What the child processes run; tests have writers and finalizers of their own."""

    writer: Sequence[str] = WRITER
    finalizer: Sequence[str] = FINALIZER


CHILDREN = Children()


@dataclass
class _Flight:
    """A save that has begun and has not been settled."""

    request: SaveRequest
    lock: WriterLock | None  # on rank 0
    consumed_samples: int
    begun: float
    waited_s: float
    pause_s: float = 0.0


class Saver:
    """Saves of one run on this rank; every public call but `has_news` is made by all ranks.

    Args:
        core: what is saved.
        joined: this run's place in `--save`.
        start: iterations done before this process.
        files: file operations of this process; tests put a fault in.
        children: what writer and finalizer run.
    """

    def __init__(
        self,
        core: Core,
        joined: Joined,
        start: int,
        files: FileSystem | None = None,
        children: Children = CHILDREN,
    ):
        config, self._world = core.config, core.groups.world
        self._config = config
        self._root, self._store = Path(config.save or ""), None
        if config.save is not None and is_url(config.save):
            self._store = config.save
            self._root = make_staging(config.ckpt_staging_dir, "save")
        self._epoch = joined.epoch
        self._files = files or FileSystem()
        self.schedule = SaveSchedule(config, start, self._world.size)
        self._flight: _Flight | None = None
        self._local_failure: dict[str, str] | None = None
        self._failure: UserError | None = None  # of the last save
        self._failed_in_a_row = 0
        self._last_step: int | None = None
        self._finalizer = Finalizer(children.finalizer)
        self._buffer: SnapshotBuffer | None = None
        self._writer: Writer | None = None
        if config.save is not None and config.async_save:
            buffers: list[SnapshotBuffer] = []
            every_rank(
                lambda: buffers.append(SnapshotBuffer(state_entries(core))),
                self._world,
                self._root,
            )
            self._buffer = buffers[0]
            memory = (self._buffer.descriptor, self._buffer.num_bytes)
            self._writer = Writer(memory, children.writer)

    def has_news(self) -> bool:
        """Whether this rank knows that the save in the background has ended or failed."""
        if self._flight is None:
            return False
        reply = self._writer.poll() if self._writer is not None else None
        if self._local_failure is not None or (reply is not None and reply["failure"]):
            return True
        return self._world.rank == 0 and self._finalizer.poll() is not None

    def save(self, parts: Parts, state: TrainState) -> None:
        """Save this moment, unless it is saved already.

        Raises:
            UserError: this or an earlier save failed, and the policy is to stop.

        Comm: an exchange of a few hundred bytes per rank; in the foreground three, with a
            save in flight two more.
        """
        if self._config.save is None or self._last_step == state.iteration:
            return
        begun = time.monotonic()
        self._land(parts)
        waited_s = time.monotonic() - begun
        self._last_step = state.iteration
        self.schedule.begin()
        parts.telemetry.say(format_saving(state.iteration, self._config.save, "megatron_lite"))
        try:
            self._begin(parts, state, begun, waited_s)
        except UserError as error:
            self._abandon()
            self.schedule.take(state.iteration, None)
            self._note_failure(parts, state.iteration, error)
            return
        assert self._flight is not None
        self._flight.pause_s = time.monotonic() - begun
        if self._writer is None:
            self.settle(parts)

    def _begin(self, parts: Parts, state: TrainState, begun: float, waited_s: float) -> None:
        """Name the attempt; write this rank's share, or let it be written."""
        entries = state_entries(parts)
        described = describe_state(parts, state, take_canary(parts, state))
        if self._writer is not None:
            self._writer.poll(None)  # it may still read the snapshot of a save that failed
            self._writer.start()
        request, lock = begin_save(
            self._root,
            state.iteration,
            self._epoch,
            described,
            self._config.overwrite_save,
            self._world,
            self._files,
            self._store,
        )
        self._flight = _Flight(request, lock, state.consumed_samples, begun, waited_s)
        for note in request.notes:
            parts.telemetry.say(f"  {note}")
        if self._writer is not None:
            self._hand_over(request, entries)
        else:
            every_rank(
                lambda: write_rank(request, take_snapshot(entries), self._files),
                self._world,
                self._root,
            )
        if self._world.rank == 0:
            keep = (self._config.keep_last, self._config.save_retain_interval)
            self._finalizer.submit(Job(request, *keep))

    def _hand_over(self, request: SaveRequest, entries: Sequence[StateEntry]) -> None:
        """Copy the state and ask the writer to write it; a failure is this rank's news."""
        assert self._writer is not None and self._buffer is not None
        try:
            self._buffer.fill(entries)
            self._writer.submit(describe_job(request, self._buffer.pieces, self._buffer.begins))
        except Exception as error:
            # Not raised: the other ranks do not wait for word here.
            told = mark_failed(request.directory, request.rank, error, self._files)
            self._local_failure = told

    def settle(self, parts: Parts) -> None:
        """Learn together how the save in flight has ended, tell it, and follow the policy.

        Raises:
            UserError: it failed, and the policy is to stop.

        Comm: two exchanges of a few hundred bytes per rank; in the foreground one.
        """
        flight = self._flight
        if flight is None:
            return
        if self._writer is not None:
            self._share_failures()
        told = first_rank(lambda: self._outcome(flight), self._world, self._root)
        self._flight, self._local_failure = None, None
        if flight.lock is not None:
            flight.lock.let_go()
        step = flight.request.plan.step
        self.schedule.take(step, told["proposal"])
        if told["failure"] is not None:
            self._note_failure(parts, step, failure_error(told["failure"]))
        else:
            self._note_success(parts, flight, told)

    def _share_failures(self) -> None:
        """Tell rank 0 of writers that failed without a trace in the attempt."""
        assert self._writer is not None
        reply = self._writer.poll()
        mine = self._local_failure or (reply["failure"] if reply is not None else None)
        for rank, failure in enumerate(all_gather_json(mine, self._world)):
            if failure is not None:
                if self._world.rank == 0:
                    prefix = f"rank {rank}: " if self._world.size > 1 else ""
                    self._finalizer.abort(
                        {"kind": failure["kind"], "message": prefix + failure["message"]}
                    )
                return

    def _outcome(self, flight: _Flight) -> dict[str, Any]:
        """On rank 0: how the finalizer has ended the attempt."""
        reply = self._finalizer.poll(None)
        assert reply is not None
        elapsed_s = time.monotonic() - flight.begun
        pause_s = flight.pause_s if self._writer is not None else elapsed_s
        proposal = None
        if reply["failure"] is None:
            proposal = self.schedule.propose(pause_s, elapsed_s)
        return {**reply, "elapsed_s": elapsed_s, "pause_s": pause_s, "proposal": proposal}

    def _note_success(self, parts: Parts, flight: _Flight, told: dict[str, Any]) -> None:
        assert self._config.save is not None
        self._failure, self._failed_in_a_row = None, 0
        step, layout = flight.request.plan.step, parts.plan.parallel
        for note in told["notes"]:
            parts.telemetry.say(f"  {note}")
        if self._config.log_progress and self._world.rank == 0 and self._store is None:
            note_progress(self._root, step, flight.consumed_samples, self._world.size)
        parts.telemetry.say(format_saved(step, self._config.save, layout.tp, layout.pp))
        if told["proposal"] is not None:
            parts.telemetry.say(f"  {told['proposal']['text']}")
        parts.telemetry.event(
            "save",
            step,
            directory=str(flight.request.directory)
            if self._store is None
            else f"{self._store}/attempts/{flight.request.plan.attempt}",
            bytes=told["bytes"],
            pause_ms=told["pause_s"] * 1e3,
            elapsed_ms=told["elapsed_s"] * 1e3,
            waited_ms=flight.waited_s * 1e3,
        )

    def _note_failure(self, parts: Parts, step: int, error: UserError) -> None:
        """Tell a failed save and count it; raise where the policy says stop."""
        self._failed_in_a_row += 1
        count, config = self._failed_in_a_row, self._config
        text = f"the checkpoint of step {step} was not saved: {error}"
        self._failure = type(error)(text)
        parts.telemetry.event("save_failed", step, reason=str(error), in_a_row=count)
        if config.save_failure_policy == "stop":
            raise self._failure from error
        if count > config.max_failed_saves:
            raise DamagedError(
                f"{text}; {count} saves have failed one after the other, "
                f"--max-failed-saves {config.max_failed_saves}"
            ) from error
        parts.telemetry.say(
            f"warning: {text}; training goes on (--save-failure-policy continue, failure {count} "
            f"of at most {config.max_failed_saves} in a row)"
        )

    def finish(self, parts: Parts) -> None:
        """Wait for the save in flight, at the end of a run.

        Raises:
            DamagedError: the last save failed, so the run cannot have ended well.
        """
        self._land(parts)
        if self._failure is not None:
            raise DamagedError(f"{self._failure}; nothing newer is saved") from self._failure

    def _land(self, parts: Parts) -> None:
        """Settle the save in flight, waiting for this rank's writer first.

        Ranks then meet when all have written, and not long before, when a collective's
        deadline would count the time.
        """
        if self._flight is not None:
            if self._writer is not None:
                self._writer.poll(None)
            self.settle(parts)

    def _abandon(self) -> None:
        """Remove what a failed save in the foreground has left."""
        if self._flight is not None and self._flight.lock is not None:
            discard(self._flight.request, self._flight.lock, self._files)
        self._flight = None

    def close(self) -> None:
        """Let the child processes end; one that is not idle finishes its work alone."""
        is_idle = self._flight is None
        if self._writer is not None:
            self._writer.close(5.0 if is_idle else 0.0)
        self._finalizer.close(5.0 if is_idle else 0.0)
        if self._buffer is not None:
            self._buffer.close()
        if self._store is not None and is_idle:  # else its children may still need it
            shutil.rmtree(self._root, ignore_errors=True)
