"""The recipe of a run: step, log, evaluate, save, until it is over or told to stop.

Every decision here is the same on all ranks: it depends on the iteration and on the vote
that the step's closing reduction carried. The loop holds no numbers of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron_lite.config.schema import Config
from megatron_lite.errors import RunStopped, UserError
from megatron_lite.mesh.collectives import all_reduce
from megatron_lite.mesh.launch import RunStatus
from megatron_lite.resilience.signals import StopOrder
from megatron_lite.telemetry.records import TrainRow, ValidRow
from megatron_lite.train.dump import dump_start
from megatron_lite.train.evaluate import evaluate
from megatron_lite.train.parts import Parts
from megatron_lite.train.restore import save_run
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
    saved_at = evaluated_at = None
    with collect_garbage(parts.config) as collect:
        while state.iteration < parts.plan.batch.train_iters:
            status.step, status.phase = state.iteration + 1, "training"
            report = run_step(parts, state)
            collect(state.iteration)
            if is_multiple(state.iteration, parts.plan.batch.eval_interval):
                evaluate_valid(parts, state)
                evaluated_at = state.iteration
            order = parts.stop.decide(report.vote, state.iteration)
            if is_multiple(state.iteration, parts.config.save_interval) or (order and order.save):
                saved_at = save_once(parts, state, saved_at, status)
            if order is not None:
                return leave(parts, order, state.iteration)
    if state.iteration > start:
        save_once(parts, state, saved_at, status)
    status.phase = "evaluation"
    finish(parts, state, evaluated_at)
    return 0


def run_step(parts: Parts, state: TrainState) -> StepReport:
    """One step and its row."""
    start = time.perf_counter()
    report = TrainStep(parts, state, vote=parts.stop.local_vote()).run()
    params_norm = None
    if parts.config.log_params_norm and parts.telemetry.prints_at(report.iteration):
        params_norm = measure_params_norm(parts)
    parts.telemetry.train(
        TrainRow(
            iteration=report.iteration,
            consumed_samples=report.consumed_samples,
            lm_loss=report.lm_loss,
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            weight_decay=report.weight_decay,
            global_batch_size=report.global_batch_size,
            valid_tokens=report.valid_tokens,
            loss_scale=1.0,
            skipped=report.skipped,
            nan=report.nan,
            elapsed_ms=(time.perf_counter() - start) * 1e3,
            num_zeros=report.num_zeros,
            params_norm=params_norm,
        )
    )
    if report.note:
        parts.telemetry.say(report.note)
        parts.telemetry.event("skip" if report.skipped else "nan", report.iteration)
    return report


def evaluate_valid(parts: Parts, state: TrainState) -> None:
    """Evaluate the validation part at its cursor and advance it."""
    batch, dataset = parts.plan.batch, parts.datasets.valid
    if dataset is None or batch.eval_iters == 0:
        return
    result = evaluate(parts, dataset, state.consumed_valid_samples, state.iteration)
    state.consumed_valid_samples += batch.eval_iters * batch.eval_global_batch_size
    row = ValidRow(state.iteration, "valid", result.lm_loss, result.valid_tokens)
    parts.telemetry.valid(row)


def finish(parts: Parts, state: TrainState, evaluated_at: int | None) -> None:
    """Evaluate at the end: validation unless just done, then the test part."""
    if evaluated_at != state.iteration:
        evaluate_valid(parts, state)
    if parts.datasets.test is not None and parts.plan.batch.eval_iters > 0:
        result = evaluate(parts, parts.datasets.test, 0, state.iteration)
        row = ValidRow(state.iteration, "test", result.lm_loss, result.valid_tokens)
        parts.telemetry.valid(row)


def save_once(parts: Parts, state: TrainState, saved_at: int | None, status: RunStatus) -> int:
    """Save unless this iteration is saved already."""
    if saved_at != state.iteration and parts.config.save is not None:
        status.phase = "saving"
        save_run(parts, state)
    return state.iteration


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


def measure_params_norm(parts: Parts) -> float:
    """Norm of the logical weights.

    Comm: one all-reduce of one element over the world, only where the log line wants it.
    """
    total = torch.zeros((), dtype=torch.float64, device=parts.device)
    for piece in parts.optimizer.weight_pieces():
        if piece.owned:
            total += piece.tensor.double().square().sum()
    all_reduce(total, parts.groups.world)
    return float(total) ** 0.5


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
