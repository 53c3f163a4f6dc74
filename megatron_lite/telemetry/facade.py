"""`Telemetry`: the one object the training loop talks to about what happened.

Every rank has one, so that decisions such as "this iteration ends a log interval" are the
same everywhere; only the speaker (the last rank) has sinks. Rows hold Python numbers; no
call here reads a tensor or communicates.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from megatron_lite.telemetry.external import (
    TensorboardSink,
    WandbSink,
    missing_packages,
    wanted_packages,
)
from megatron_lite.telemetry.flops import (
    MachinePeak,
    model_flops_per_iteration,
    model_flops_per_token,
    model_flops_utilization,
    model_tflops_per_rank,
)
from megatron_lite.telemetry.options import read_options
from megatron_lite.telemetry.progress import ProgressLine
from megatron_lite.telemetry.records import Rates, TrainRow, ValidRow, collect_versions
from megatron_lite.telemetry.sinks import ConsoleSink, JsonlSink, Sink

if TYPE_CHECKING:
    from megatron_lite.config.plan import Plan


class Telemetry:
    """Reporting of one run on one rank.

    Args:
        config: a `Config` (its reporting flags are read).
        plan: shapes, batch plan and layout.
        is_speaker: whether this rank prints and writes; true on exactly one rank.
        start_iteration: iterations already done (a resumed run); the next one is printed.
        peak: what MFU is measured against; None leaves MFU null.
        stream: console, stdout by default.
        progress_stream: live line, stderr by default; drawn only on a terminal.

    Raises:
        UserError: a package that a flag needs is missing, or a file cannot be opened.
    """

    def __init__(
        self,
        config: object,
        plan: Plan,
        is_speaker: bool,
        *,
        start_iteration: int = 0,
        peak: MachinePeak | None = None,
        stream: TextIO | None = None,
        progress_stream: TextIO | None = None,
    ) -> None:
        self.options = read_options(config)
        missing = missing_packages(self.options)
        self.warnings = tuple(missing.values())
        self._recorders = [name for name in wanted_packages(self.options) if name not in missing]
        self._plan = plan
        self._start_iteration = start_iteration
        self.peak = peak
        self._sinks: list[Sink] = []
        self._console: ConsoleSink | None = None
        self._scalar_sinks: list[TensorboardSink | WandbSink] = []
        if is_speaker:
            self._open_sinks(stream or sys.stdout, progress_stream or sys.stderr)

    def _open_sinks(self, stream: TextIO, progress_stream: TextIO) -> None:
        train_iters = self._plan.batch.train_iters
        self._console = ConsoleSink(
            stream,
            self.prints_at,
            train_iters=train_iters,
            world_size=self._plan.parallel.world_size,
            model_flops=self.model_flops,
            log_throughput=self.options.log_throughput,
            progress=ProgressLine(progress_stream, train_iters),
        )
        if self.options.metrics_jsonl is not None:
            self._sinks.append(JsonlSink(self.options.metrics_jsonl))
        self._sinks.append(self._console)
        if "tensorboard" in self._recorders:
            self._scalar_sinks.append(TensorboardSink(self.options))
        if "wandb" in self._recorders:
            self._scalar_sinks.append(WandbSink(self.options))
        self._sinks += self._scalar_sinks

    def prints_at(self, iteration: int) -> bool:
        """Whether the log line is printed after this iteration; the same on every rank."""
        first = iteration == self._start_iteration + 1
        return first or iteration % self.options.log_interval == 0

    def model_flops(self, global_batch_size: int) -> int:
        """Model FLOPs of one iteration by the convention in force."""
        convention = self.options.flops_convention
        return model_flops_per_iteration(self._plan.model, global_batch_size, convention)

    def rates(self, row: TrainRow) -> Rates:
        """Derive throughput from an iteration's wall time."""
        tokens = row.global_batch_size * self._plan.batch.seq_length
        flops = self.model_flops(row.global_batch_size)
        world_size = self._plan.parallel.world_size
        return Rates(
            tokens_per_s=tokens / (row.elapsed_ms * 1e-3) if row.elapsed_ms > 0.0 else None,
            model_tflops_per_rank=model_tflops_per_rank(flops, row.elapsed_ms, world_size),
            mfu=model_flops_utilization(flops, row.elapsed_ms, world_size, self.peak),
        )

    def header(self, parameters: int, parameters_per_rank: int, **details: object) -> None:
        """Report what is constant over the run; call once, before any row.

        Args:
            parameters: logical elements of the whole model.
            parameters_per_rank: elements this rank holds.
            details: further keys, JSON values (seed, data fingerprint, resumed step ...).
        """
        if not self._sinks:
            return
        convention = self.options.flops_convention
        record: dict[str, object] = {
            "layout": dataclasses.asdict(self._plan.parallel),
            "parameters": parameters,
            "parameters_per_rank": parameters_per_rank,
            "model": dataclasses.asdict(self._plan.model),
            "batch": dataclasses.asdict(self._plan.batch),
            "precision": dataclasses.asdict(self._plan.precision),
            "recompute": self._plan.recompute,
            "versions": collect_versions(),
            "flops_convention": convention,
            "model_flops_per_token": model_flops_per_token(self._plan.model, convention),
            "peak_flops_per_rank": self.peak.flops_per_s if self.peak else None,
            "peak_convention": self.peak.description if self.peak else None,
            "start_iteration": self._start_iteration,
            **details,
        }
        for sink in self._sinks:
            sink.header(record)

    def train(self, row: TrainRow) -> None:
        """Report one iteration."""
        if not self._sinks:
            return
        rates = self.rates(row)
        for sink in self._sinks:
            sink.train(row, rates)

    def valid(self, row: ValidRow) -> None:
        """Report one evaluation."""
        for sink in self._sinks:
            sink.valid(row)

    def event(self, name: str, iteration: int, **details: object) -> None:
        """Report a save, load, skip, exit or the like with JSON-able details."""
        for sink in self._sinks:
            sink.event(name, iteration, details)

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Hand timers or memory figures to TensorBoard and wandb, when they are open."""
        for sink in self._scalar_sinks:
            sink.scalars(values, iteration)

    def say(self, text: str) -> None:
        """Print text on the speaker, clear of the live line; nothing elsewhere."""
        if self._console is not None:
            self._console.say(text)

    def close(self) -> None:
        """Close all sinks; further rows are dropped."""
        sinks, self._sinks, self._console, self._scalar_sinks = self._sinks, [], None, []
        for sink in sinks:
            sink.close()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
