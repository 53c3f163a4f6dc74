"""`--verify-resume`: a loaded run proves on known samples that it is the saved one."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_lite.checkpoint.reader import open_checkpoint
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.train.canary import LIMITS, agree
from tests.pool import RankError, RankPool
from tests.train.program import LAYOUTS, LLAMA, RUN, rows, train_rank
from tests.train.test_state import printed

ARGV = [*LLAMA, *RUN, "--micro-batch-size", "2", "--eval-iters", "0", "--save-interval", "100"]
FLAG = ("--verify-resume",)


def save(pool: RankPool, root: Path, layout: str, *more: str) -> None:
    size, flags = LAYOUTS[layout]
    argv = [*ARGV, *flags, "--save", str(root), "--exit-interval", "2", *more]
    pool.run(size, train_rank, argv=argv)


def told(pool: RankPool, root: Path, layout: str, *more: str) -> str:
    """The line about the canary that a resume prints."""
    size, flags = LAYOUTS[layout]
    argv = [*ARGV, *flags, "--load", str(root), "--train-iters", "10", "--exit-interval", "3"]
    text = "".join(pool.run(size, printed, argv=[*argv, *more]))
    lines = [line for line in text.splitlines() if line.startswith("canary:")]
    assert len(lines) == 1, text
    return lines[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_layout_replays_the_canary_with_equal_bits(
    rank_pool: RankPool, tmp_path: Path, layout: str
) -> None:
    save(rank_pool, tmp_path, layout, *FLAG)
    canary = open_checkpoint(tmp_path).state["canary"]
    assert canary["samples"] == [6, 7]  # the last ones of two steps of four
    line = told(rank_pool, tmp_path, layout, *FLAG)
    assert str(canary["loss"]) in line and str(canary["grad_norm"]) in line
    assert line.endswith("equal bits")


@pytest.mark.parametrize("precision", [(), ("--fp64",), ("--bf16",)], ids=["fp32", "64", "bf16"])
@pytest.mark.parametrize("layout", ["tp2-sp", "dp2"])
def test_another_layout_replays_the_canary_within_its_precision(
    rank_pool: RankPool, tmp_path: Path, layout: str, precision: tuple[str, ...]
) -> None:
    save(rank_pool, tmp_path, "1", *FLAG, *precision)
    assert "within" in told(rank_pool, tmp_path, layout, *FLAG, *precision)


EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "16", "--moe-aux-loss-coeff", "0.01"),
    *("--mtp-num-layers", "1"),
)


@pytest.mark.parametrize(("layout", "words"), [("1", "equal bits"), ("tp2-sp", "within")])
def test_the_canary_counts_the_losses_of_routers_and_of_further_depths(
    rank_pool: RankPool, tmp_path: Path, layout: str, words: str
) -> None:
    save(rank_pool, tmp_path, "1", *FLAG, *EXPERTS)
    assert words in told(rank_pool, tmp_path, layout, *FLAG, *EXPERTS)


def test_without_canary_one_line_says_so_and_without_the_flag_none_is_made(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    save(rank_pool, tmp_path, "1")
    assert open_checkpoint(tmp_path).state["canary"] is None
    assert "the checkpoint holds none" in told(rank_pool, tmp_path, "1", *FLAG)


def test_other_data_is_told_and_not_compared(rank_pool: RankPool, tmp_path: Path) -> None:
    save(rank_pool, tmp_path, "1", *FLAG)
    line = told(rank_pool, tmp_path, "1", *FLAG, "--seed", "5", "--allow-resume-change", "seed")
    assert line == "canary: not replayed, this run's data differs from the checkpoint's"


def train_with_a_changed_weight(argv: Sequence[str], rank: int, world_size: int) -> int:
    """A run that loads one wrong number on its last rank."""
    original = Optimizer.after_load

    def spoiled(self: Optimizer, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if rank == world_size - 1:
            pieces = {p.spec.name: p for p in self.state_pieces() if p.kind == "param"}
            with torch.no_grad():
                pieces["decoder.layers.1.mlp.linear_fc2.weight"].tensor.view(-1)[0] += 0.25

    quiet = contextlib.redirect_stdout(io.StringIO())
    with patch.object(Optimizer, "after_load", spoiled), quiet:
        return train_rank(argv, rank, world_size)


@pytest.mark.parametrize(("saved", "loaded"), [("1", "1"), ("tp2", "tp2"), ("1", "tp2-sp")])
def test_a_wrong_weight_ends_the_run_and_both_values_are_named(
    rank_pool: RankPool, tmp_path: Path, saved: str, loaded: str
) -> None:
    save(rank_pool, tmp_path / "save", saved, *FLAG)
    canary = open_checkpoint(tmp_path / "save").state["canary"]
    size, flags = LAYOUTS[loaded]
    argv = [*ARGV, *flags, *FLAG, "--load", str(tmp_path / "save")]
    argv += ["--metrics-jsonl", str(tmp_path / "m")]
    with pytest.raises(RankError, match="DamagedError: --verify-resume: the loss") as ended:
        rank_pool.run(size, train_with_a_changed_weight, argv=argv)
    assert f"was {canary['loss']} when" in str(ended.value)
    assert rows(tmp_path / "m") == []  # not one step


def test_the_canary_changes_no_bit_of_the_run(rank_pool: RankPool, tmp_path: Path) -> None:
    def run(name: str, *more: str) -> list[tuple[float, float]]:
        argv = [*ARGV, *LAYOUTS["dp2"][1], "--save", str(tmp_path / name), *more]
        argv += ["--save-interval", "2", "--train-iters", "4"]
        rank_pool.run(2, train_rank, argv=[*argv, "--metrics-jsonl", str(tmp_path / f"{name}.m")])
        return [(row["lm_loss"], row["grad_norm"]) for row in rows(tmp_path / f"{name}.m")]

    assert run("with", *FLAG) == run("without")


def test_figures_that_are_not_finite_equal_only_themselves() -> None:
    assert agree(None, None, 0.0)
    assert not agree(None, 1.0, 1.0) and not agree(1.0, None, 1.0)
    assert agree(1.0, 1.0, 0.0) and not agree(1.0, 1.0 + 2**-52, 0.0)
    assert not agree(1.0, float("nan"), 1.0)


def test_limits_grow_with_the_rounding_of_the_dtype() -> None:
    order = ("float64", "float32", "float16", "bfloat16")
    assert [LIMITS[dtype] for dtype in order] == sorted(LIMITS.values())
