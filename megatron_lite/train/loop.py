"""The recipe of a run: step, log, evaluate, save, until it is over or told to stop.

Every decision here is the same on all ranks: it depends on the iteration and on the vote
that the step's closing reduction carried. The loop holds no numbers of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from megatron_lite.config.schema import Config
from megatron_lite.data.build import TrainableDataset
from megatron_lite.errors import RunStopped, UserError
from megatron_lite.mesh.launch import RunStatus
from megatron_lite.resilience.signals import StopOrder, has_news
from megatron_lite.telemetry.records import ValidRow
from megatron_lite.train.dump import dump_start
from megatron_lite.train.evaluate import Evaluation, evaluate
from megatron_lite.train.parts import Parts
from megatron_lite.train.report import report_step
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import StepReport, TrainStep


def train(parts: Parts, state: TrainState, status: RunStatus) -> int:
    """Train to the end.

    Args:
        parts: the built run.
        state: where to start; advanced in place.
        status: told which step is in progress.

    Returns:
        The exit code: 0 also when an exit flag ended the run.

    Raises:
        RunStopped: a signal arrived; everything is saved.
    """
    start = state.iteration
    if parts.dump is not None:
        dump_start(parts.dump, parts.optimizer, start)
    evaluated_at = None
    with collect_garbage(parts.config) as collect:
        while state.iteration < parts.plan.batch.train_iters:
            status.step, status.phase = state.iteration + 1, "training"
            check_data(parts, state.iteration)
            report = run_step(parts, state)
            collect(state.iteration)
            if is_multiple(state.iteration, parts.plan.batch.eval_interval):
                evaluate_valid(parts, state)
                evaluated_at = state.iteration
            order = parts.stop.decide(report.vote, state.iteration)
            if has_news(report.vote):
                status.phase = "saving"
                parts.saver.settle(parts)
            if parts.saver.schedule.is_due(state.iteration) or (order and order.save):
                save(parts, state, status)
            if order is not None:
                parts.saver.finish(parts)
                return leave(parts, order, state.iteration)
    if state.iteration > start:
        save(parts, state, status)
    status.phase = "evaluation"
    finish(parts, state, evaluated_at)
    status.phase = "saving"
    parts.saver.finish(parts)
    return 0


def run_step(parts: Parts, state: TrainState) -> StepReport:
    """One step and what there is to tell about it."""
    start = time.perf_counter()
    with parts.timers.measure("interval-time"):
        report = TrainStep(parts, state, vote=parts.stop.local_vote()).run()
    seconds = time.perf_counter() - start
    parts.saver.schedule.note_step(seconds)
    report_step(parts, report, seconds * 1e3)
    return report


def check_data(parts: Parts, iteration: int) -> None:
    """`--data-check-interval`: read one sampled block again, on each rank another one."""
    interval = parts.config.data_check_interval
    if is_multiple(iteration, interval):
        world = parts.groups.world
        parts.datasets.blocks.check(iteration // interval * world.size + world.rank)


def evaluate_valid(parts: Parts, state: TrainState) -> None:
    """Evaluate the validation part at its cursor and advance it."""
    batch, dataset = parts.plan.batch, parts.datasets.valid
    if dataset is None or batch.eval_iters == 0:
        return
    with parts.timers.measure("evaluate"):
        result = evaluate_part(parts, dataset, state.consumed_valid_samples, state.iteration)
    state.consumed_valid_samples += batch.eval_iters * batch.eval_global_batch_size
    row = ValidRow(state.iteration, "valid", result.lm_loss, result.valid_tokens)
    parts.telemetry.valid(row)


def evaluate_part(
    parts: Parts, dataset: TrainableDataset, consumed_samples: int, iteration: int
) -> Evaluation:
    """Evaluate the weights, or with `--eval-with-ema` their moving average."""
    optimizer, is_average = parts.optimizer, parts.config.eval_with_ema
    with optimizer.averaged_weights() if is_average else nullcontext():
        return evaluate(parts, dataset, consumed_samples, iteration)


def finish(parts: Parts, state: TrainState, evaluated_at: int | None) -> None:
    """Evaluate at the end: validation unless just done, then the test part."""
    if evaluated_at != state.iteration:
        evaluate_valid(parts, state)
    if parts.datasets.test is not None and parts.plan.batch.eval_iters > 0:
        result = evaluate_part(parts, parts.datasets.test, 0, state.iteration)
        row = ValidRow(state.iteration, "test", result.lm_loss, result.valid_tokens)
        parts.telemetry.valid(row)


def save(parts: Parts, state: TrainState, status: RunStatus) -> None:
    """Save this iteration unless it is saved already."""
    status.phase = "saving"
    with parts.timers.measure("save-checkpoint"):
        parts.saver.save(parts, state)


def leave(parts: Parts, order: StopOrder, iteration: int) -> int:
    """End the run early as all ranks have agreed."""
    parts.telemetry.event("exit", iteration, reason=order.reason, code=order.exit_code)
    if order.exit_code == RunStopped.exit_code:
        raise RunStopped(order.message)
    if order.exit_code != 0:
        raise StoppedUnsaved(order.message)
    parts.telemetry.say(order.message)
    return 0


class StoppedUnsaved(UserError):
    """A signal ended a run that had nowhere to save."""

    exit_code = 1


def is_multiple(iteration: int, interval: int | None) -> bool:
    """Whether something that happens every `interval` iterations is due; 0 or None: never."""
    return bool(interval) and iteration % int(interval or 1) == 0


@contextmanager
def collect_garbage(config: Config) -> Iterator[Callable[[int], None]]:
    """`--manual-gc`: cycles are collected between steps, at the same ones on all ranks."""
    if not config.manual_gc:
        yield lambda iteration: None
        return

    def collect(iteration: int) -> None:
        if is_multiple(iteration, config.manual_gc_interval):
            gc.collect()

    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
