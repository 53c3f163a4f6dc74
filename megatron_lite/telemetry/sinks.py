"""Where rows go: the console and the `--metrics-jsonl` file.

Exactly one rank has sinks. A sink gets every row and decides what to show: the console
averages over `--log-interval`, the file keeps each iteration. External services are in
`external.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Protocol, TextIO

from megatron_lite.errors import DamagedError, UserError
from megatron_lite.telemetry.flops import model_tflops_per_rank
from megatron_lite.telemetry.lines import ConsoleFigures, format_train_line, format_valid_block
from megatron_lite.telemetry.progress import ProgressLine
from megatron_lite.telemetry.records import (
    Rates,
    TrainRow,
    ValidRow,
    encode_json,
    event_record,
    train_record,
    valid_record,
)


class Sink(Protocol):
    """One destination of rows."""

    def header(self, record: Mapping[str, object]) -> None:
        """Take what is constant over the run."""

    def train(self, row: TrainRow, rates: Rates) -> None:
        """Take one iteration."""

    def valid(self, row: ValidRow) -> None:
        """Take one evaluation."""

    def event(self, name: str, iteration: int, details: Mapping[str, object]) -> None:
        """Take a save, load, skip, exit or the like."""

    def close(self) -> None:
        """Write out what is pending; called once."""


class JsonlSink:
    """The `--metrics-jsonl` file: appended, one flushed line per row.

    A resumed run goes on in the same file; its header starts a new part. A line that a
    killed run left half-written is closed first, so that the next row stays readable.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            torn = _ends_inside_line(path)
            self._file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115 (kept open)
        except OSError as error:
            raise UserError(f"--metrics-jsonl {path}: {error.strerror or error}") from error
        if torn:
            self._write("\n")

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise DamagedError(f"--metrics-jsonl {self._path}: {error.strerror}") from error

    def header(self, record: Mapping[str, object]) -> None:
        """Write the "header" row."""
        self._write(encode_json({"kind": "header", **record}) + "\n")

    def train(self, row: TrainRow, rates: Rates) -> None:
        """Write the "train" row."""
        self._write(encode_json(train_record(row, rates)) + "\n")

    def valid(self, row: ValidRow) -> None:
        """Write the "valid" row."""
        self._write(encode_json(valid_record(row)) + "\n")

    def event(self, name: str, iteration: int, details: Mapping[str, object]) -> None:
        """Write the "event" row."""
        self._write(encode_json(event_record(name, iteration, details)) + "\n")

    def close(self) -> None:
        """Close the file."""
        # Every row was flushed; what a full disk left behind has been told already.
        with contextlib.suppress(OSError):
            self._file.close()


def _ends_inside_line(path: str) -> bool:
    if not os.path.exists(path) or os.path.getsize(path) == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


@dataclass
class IntervalSums:
    """What the console adds up between two log lines."""

    iterations: int = 0
    advanced: int = 0  # iterations that were not skipped
    skipped: int = 0
    nan: int = 0
    elapsed_ms: float = 0.0
    model_flops: int = 0
    losses: dict[str, float] = field(default_factory=dict)

    def add(self, row: TrainRow, model_flops: int) -> None:
        """Add one iteration; the losses of a skipped one do not count."""
        self.iterations += 1
        self.elapsed_ms += row.elapsed_ms
        self.model_flops += model_flops
        self.skipped += row.skipped
        self.nan += row.nan
        if row.skipped:
            return
        self.advanced += 1
        for name, loss in {"lm loss": row.lm_loss, **row.further_losses}.items():
            self.losses[name] = self.losses.get(name, 0.0) + loss


def discard_output(stream: TextIO) -> None:
    """Let everything further that is written to a stream vanish, also what it still holds."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class ConsoleSink:
    """Megatron's log line every interval, validation blocks, and the live line.

    Args:
        stream: usually stdout.
        prints_at: whether an iteration ends an interval; the same on every rank.
        train_iters, world_size: for the line.
        model_flops: global batch size -> model FLOPs of one iteration.
        log_throughput: `--log-throughput`.
        progress: the live line, wiped before printing.
        now: wall clock of the time stamp.
    """

    def __init__(
        self,
        stream: TextIO,
        prints_at: Callable[[int], bool],
        *,
        train_iters: int,
        world_size: int,
        model_flops: Callable[[int], int],
        log_throughput: bool,
        progress: ProgressLine | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._stream = stream
        self._prints_at = prints_at
        self._train_iters = train_iters
        self._world_size = world_size
        self._model_flops = model_flops
        self._log_throughput = log_throughput
        self._progress = progress
        self._now = now
        self._sums = IntervalSums()

    def say(self, text: str) -> None:
        """Print lines of text at once, never into the live line."""
        if self._progress is not None:
            self._progress.clear()
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except BrokenPipeError:
            # The reader left (`| head`, a dead `tee`): no reason to lose the run's work.
            discard_output(self._stream)
            with contextlib.suppress(OSError):
                print("note: nobody reads the output any more; the run goes on", file=sys.stderr)

    def header(self, record: Mapping[str, object]) -> None:
        """Nothing: the start-up summary says it in words."""

    def train(self, row: TrainRow, rates: Rates) -> None:
        """Add an iteration; print the line when an interval ends."""
        self._sums.add(row, self._model_flops(row.global_batch_size))
        if self._prints_at(row.iteration):
            self.say(format_train_line(self._figures(row), self._now()))
            self._sums = IntervalSums()
        if self._progress is not None:
            self._progress.update(row.iteration, row.lm_loss, row.elapsed_ms, rates.tokens_per_s)

    def _figures(self, row: TrainRow) -> ConsoleFigures:
        sums = self._sums
        tflops = None
        if self._log_throughput:
            tflops = model_tflops_per_rank(sums.model_flops, sums.elapsed_ms, self._world_size)
        return ConsoleFigures(
            iteration=row.iteration,
            train_iters=self._train_iters,
            consumed_samples=row.consumed_samples,
            skipped_samples=row.skipped_samples,
            elapsed_ms=sums.elapsed_ms / sums.iterations,
            tflops_per_rank=tflops,
            learning_rate=row.learning_rate,
            global_batch_size=row.global_batch_size,
            losses={name: total / sums.advanced for name, total in sums.losses.items()},
            loss_scale=row.loss_scale,
            grad_norm=row.grad_norm,
            num_zeros=row.num_zeros,
            params_norm=row.params_norm,
            skipped=sums.skipped,
            nan=sums.nan,
        )

    def valid(self, row: ValidRow) -> None:
        """Print the block with dashes."""
        losses = {"lm loss": row.lm_loss, **row.further_losses}
        self.say(format_valid_block(row.iteration, losses, row.split))

    def event(self, name: str, iteration: int, details: Mapping[str, object]) -> None:
        """Nothing: whoever causes an event says it in its own words."""

    def close(self) -> None:
        """Leave the live line."""
        if self._progress is not None:
            self._progress.close()
