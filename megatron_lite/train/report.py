"""From a step's report to rows, timer tables and scalars.

Figures that cost a collective (timers of all ranks, the weights' norm) are gathered only
at the iterations whose log line wants them, which are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_lite.mesh.collectives import all_gather_json, all_reduce
from megatron_lite.pipeline.actions import Kind
from megatron_lite.telemetry.meters import measure_peak_rss_bytes
from megatron_lite.telemetry.records import TrainRow
from megatron_lite.train.parts import Parts
from megatron_lite.train.step import StepReport


def report_step(parts: Parts, report: StepReport, elapsed_ms: float) -> None:
    """Hand one iteration to telemetry."""
    params_norm = None
    if parts.config.log_params_norm and parts.telemetry.prints_at(report.iteration):
        params_norm = measure_params_norm(parts)
    # Names with a slash are figures; the others are losses, which the log line shows.
    losses = {name: value for name, value in report.figures.items() if "/" not in name}
    figures = {name: value for name, value in report.figures.items() if "/" in name}
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
            elapsed_ms=elapsed_ms,
            further_losses=losses,
            figures=figures,
            num_zeros=report.num_zeros,
            params_norm=params_norm,
        )
    )
    if report.note:
        parts.telemetry.say(report.note)
        parts.telemetry.event("skip" if report.skipped else "nan", report.iteration)
    report_timers(parts, report.iteration)


def report_timers(parts: Parts, iteration: int) -> None:
    """Print the timer table and write scalars where the flags ask for them.

    Comm: with --timing-log-level above 0 one gather of the timers over the world per log
        line.
    """
    config = parts.config
    if not parts.telemetry.prints_at(iteration):
        return
    scalars: dict[str, float] = {}
    if config.timing_log_level > 0:

        def gather(mine: Sequence[float]) -> list[list[float]]:
            if config.log_timers_to_tensorboard:
                for name, ms in zip(parts.timers.names, mine, strict=True):
                    scalars[f"{name}-time"] = ms * 1e-3
            return all_gather_json(list(mine), parts.groups.world)

        steps = parts.runner.counts[Kind.NORM]
        table = parts.timers.table(gather, steps - parts.tabled_steps, config.timing_log_option)
        parts.tabled_steps = steps
        parts.telemetry.say(table)
    if config.log_memory_to_tensorboard:
        scalars["peak-rss-bytes"] = float(measure_peak_rss_bytes())
        if parts.device.type == "cuda":
            scalars["mem-max-allocated-bytes"] = float(torch.cuda.max_memory_allocated())
    parts.telemetry.scalars(scalars, iteration)


def measure_params_norm(parts: Parts) -> float:
    """Norm of the logical weights, without state that no gradient ever changes.

    Comm: one all-reduce of one element over the world.
    """
    total = torch.zeros((), dtype=torch.float64, device=parts.device)
    for piece in parts.optimizer.weight_pieces():
        if piece.owned and piece.spec.trained:
            total += piece.tensor.double().square().sum()
    all_reduce(total, parts.groups.world)
    return float(total) ** 0.5
