"""The console lines are Megatron's, character by character."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime

import pytest

from megatron_lite.telemetry import lines

NOW = datetime(2026, 3, 4, 5, 6, 7, 89)
FIGURES = lines.ConsoleFigures(
    iteration=10,
    train_iters=400,
    consumed_samples=80,
    elapsed_ms=123.456,
    learning_rate=0.001,
    global_batch_size=8,
    loss_scale=1.0,
    grad_norm=1.23456,
    skipped=0,
    nan=0,
    losses={"lm loss": 5.4321},
)


def test_the_log_line_is_exact() -> None:
    assert lines.format_train_line(FIGURES, NOW) == (
        " [2026-03-04 05:06:07.000089] iteration       10/     400 | consumed samples:"
        "           80 | elapsed time per iteration (ms): 123.5 | learning rate: 1.000000E-03 |"
        " global batch size:     8 | lm loss: 5.432100E+00 | loss scale: 1.0 | grad norm: 1.235 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_the_log_line_with_every_optional_part_is_exact() -> None:
    full = replace(
        FIGURES,
        skipped_samples=16,
        tflops_per_rank=0.25,
        losses={"lm loss": 5.0, "moe aux loss": 0.125},
        num_zeros=3,
        params_norm=12.5,
        skipped=2,
        nan=1,
    )
    assert lines.format_train_line(full, NOW) == (
        " [2026-03-04 05:06:07.000089] iteration       10/     400 | consumed samples:"
        "           80 | skipped samples:           16 | elapsed time per iteration (ms): 123.5 |"
        " throughput per GPU (TFLOP/s/GPU): 0.2 | learning rate: 1.000000E-03 |"
        " global batch size:     8 | lm loss: 5.000000E+00 | moe aux loss: 1.250000E-01 |"
        " loss scale: 1.0 | grad norm: 1.235 | num zeros: 3 | params norm: 12.500 |"
        " number of skipped iterations:   2 | number of nan iterations:   1 |"
    )


def test_a_negative_loss_average_is_left_out_and_nan_is_shown() -> None:
    line = lines.format_train_line(replace(FIGURES, losses={"lm loss": -1.0}), NOW)
    assert "lm loss" not in line
    line = lines.format_train_line(replace(FIGURES, losses={"lm loss": math.nan}), NOW)
    assert "| lm loss: NAN |" in line


def test_the_validation_block_is_exact() -> None:
    text = (
        " validation loss at iteration 100 | lm loss value: 2.000000E+00 |"
        " lm loss PPL: 7.389056E+00 | "
    )
    rule = "-" * (len(text) + 1)
    assert lines.format_valid_block(100, {"lm loss": 2.0}) == f"{rule}\n{text}\n{rule}"


def test_the_test_split_is_named() -> None:
    block = lines.format_valid_block(5, {"lm loss": 2.0}, "test")
    assert " validation loss at iteration 5 on test set | lm loss value" in block


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(0.0, 1.0), (25.0, math.exp(20.0)), (math.inf, math.exp(20.0))],
)
def test_perplexity_is_capped(loss: float, expected: float) -> None:
    assert lines.perplexity(loss) == expected


def test_perplexity_of_nan_is_nan() -> None:
    assert math.isnan(lines.perplexity(math.nan))


def test_the_timer_table_is_exact() -> None:
    times = {"forward-backward": [10.0, 12.345], "optimizer": [-1.0, 2.0], "save": [-1.0, -1.0]}
    assert lines.format_timer_table(times) == (
        "(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (10.00, 12.35)\n"
        "    optimizer ......................................: (2.00, 2.00)"
    )
    assert lines.format_timer_table(times, "max").splitlines()[1] == (
        "    forward-backward ...............................: 12.35"
    )
    assert lines.format_timer_table({"optimizer": [1.0, 2.0]}, "all") == (
        "times across ranks (ms):\n  optimizer:\n     rank  0: 1.00\n     rank  1: 2.00"
    )
    assert lines.format_timer_table({"save": [-1.0]}) == ""


def test_a_timer_name_is_padded_to_48_with_dots() -> None:
    row = lines.format_timer_table({"optimizer": [1.0]}).splitlines()[1]
    label = row.removeprefix("    ").split(":")[0]
    assert len(label) == 48
    assert label == "optimizer " + "." * 38


def test_checkpoint_and_start_lines_are_exact() -> None:
    assert lines.format_saving(100, "out", "torch_dist") == (
        "saving checkpoint at iteration     100 to out in torch_dist format"
    )
    assert lines.format_saved(100, "out", 2, 1) == (
        "  successfully saved checkpoint from iteration     100 to out [ t 1/2, p 1/1 ]"
    )
    assert lines.format_padded_vocab(50257, 50432) == (
        " > padded vocab (size: 50257) with 175 dummy tokens (new size: 50432)"
    )
    assert lines.format_rank_parameters(1, 0, 12345) == (
        " > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 12345"
    )
    assert lines.format_train_iters(400) == "setting training iterations to 400"
