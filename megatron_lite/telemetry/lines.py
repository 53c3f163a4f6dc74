"""The console lines that people's parsers look for, exactly as Megatron prints them.

Pure formatting: numbers in, one string out, no clock, no stream. A change here breaks
scripts outside this repository, so tests hold every line character by character.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

PPL_EXPONENT_LIMIT = 20.0
TIMER_NAME_WIDTH = 48


@dataclass(frozen=True)
class ConsoleFigures:
    """What one log line shows: the averages and counts since the previous line.

    `losses` are averages over the iterations that were not skipped, in printing order;
    a negative one is left out. None leaves an optional part out.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    elapsed_ms: float
    learning_rate: float
    global_batch_size: int
    loss_scale: float
    grad_norm: float | None
    skipped: int
    nan: int
    losses: Mapping[str, float] = field(default_factory=dict)
    skipped_samples: int = 0
    tflops_per_rank: float | None = None
    num_zeros: int | None = None
    params_norm: float | None = None


def format_train_line(figures: ConsoleFigures, now: datetime) -> str:
    """The log line of an interval."""
    stamp = now.strftime("%Y-%m-%d %H:%M:%S.%f")
    parts = [
        f" [{stamp}] iteration {figures.iteration:8d}/{figures.train_iters:8d}",
        f"consumed samples: {figures.consumed_samples:12d}",
    ]
    if figures.skipped_samples > 0:
        parts.append(f"skipped samples: {figures.skipped_samples:12d}")
    parts.append(f"elapsed time per iteration (ms): {figures.elapsed_ms:.1f}")
    if figures.tflops_per_rank is not None:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {figures.tflops_per_rank:.1f}")
    parts.append(f"learning rate: {figures.learning_rate:.6E}")
    parts.append(f"global batch size: {figures.global_batch_size:5d}")
    parts += [f"{name}: {loss:.6E}" for name, loss in figures.losses.items() if not loss < 0.0]
    parts.append(f"loss scale: {figures.loss_scale:.1f}")
    if figures.grad_norm is not None:
        parts.append(f"grad norm: {figures.grad_norm:.3f}")
    if figures.num_zeros is not None:
        parts.append(f"num zeros: {figures.num_zeros}")
    if figures.params_norm is not None:
        parts.append(f"params norm: {figures.params_norm:.3f}")
    parts.append(f"number of skipped iterations: {figures.skipped:3d}")
    parts.append(f"number of nan iterations: {figures.nan:3d} |")
    return " | ".join(parts)


def perplexity(loss: float) -> float:
    """exp(loss), the exponent limited to 20 so that an untrained model prints a number."""
    if math.isnan(loss):
        return loss
    return math.exp(min(PPL_EXPONENT_LIMIT, loss))


def format_valid_block(iteration: int, losses: Mapping[str, float], split: str = "valid") -> str:
    """The validation result between two rules of dashes."""
    where = "" if split == "valid" else f" on {split} set"
    line = f" validation loss at iteration {iteration}{where} | "
    for name, loss in losses.items():
        line += f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def format_timer_table(times_ms: Mapping[str, list[float]], option: str = "minmax") -> str:
    """Timers of all ranks as a table.

    Args:
        times_ms: per timer the milliseconds of each rank, -1 where it did not run.
        option: "minmax", "max" or "all" (`--timing-log-option`).

    Returns:
        The table, empty when no rank ran any timer.
    """
    header = {
        "minmax": "(min, max) time across ranks (ms):",
        "max": "max time across ranks (ms):",
        "all": "times across ranks (ms):",
    }[option]
    lines = []
    for name, times in times_ms.items():
        ran = [time for time in times if time >= 0.0]
        if not ran:
            continue
        label = f"{name} ".ljust(TIMER_NAME_WIDTH, ".")
        if option == "minmax":
            lines.append(f"    {label}: ({min(ran):.2f}, {max(ran):.2f})")
        elif option == "max":
            lines.append(f"    {label}: {max(ran):.2f}")
        else:
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {t:.2f}" for rank, t in enumerate(times) if t >= 0]
    return "\n".join([header, *lines]) if lines else ""


def format_saving(iteration: int, directory: str, ckpt_format: str) -> str:
    """The line before a checkpoint is written."""
    return f"saving checkpoint at iteration {iteration:7d} to {directory} in {ckpt_format} format"


def format_saved(iteration: int, directory: str, tp_size: int, pp_size: int) -> str:
    """The line after a checkpoint is published."""
    return (
        f"  successfully saved checkpoint from iteration {iteration:7d} to {directory} "
        f"[ t 1/{tp_size}, p 1/{pp_size} ]"
    )


def format_padded_vocab(vocab_size: int, padded_vocab_size: int) -> str:
    """The vocabulary and its padding rows."""
    dummies = padded_vocab_size - vocab_size
    return (
        f" > padded vocab (size: {vocab_size}) with {dummies} dummy tokens "
        f"(new size: {padded_vocab_size})"
    )


def format_rank_parameters(tp_rank: int, pp_rank: int, elements: int) -> str:
    """Parameters that one model-parallel rank holds."""
    return (
        " > number of parameters on (tensor, pipeline) model parallel rank "
        f"({tp_rank}, {pp_rank}): {elements}"
    )


def format_train_iters(train_iters: int) -> str:
    """How many iterations the run has."""
    return f"setting training iterations to {train_iters}"
