"""Whole runs with state elsewhere or narrow: the same numbers, the same checkpoints."""

import tempfile
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.reader import open_checkpoint
from tests.pool import RankError, RankPool
from tests.train.program import LLAMA, RUN, rows, train_rank
from tests.train.test_resume import assert_same_tensors, numbers
from tests.train.test_state import printed

BASE = [*LLAMA, *RUN, "--bf16", "--save-interval", "100", "--eval-iters", "0", "--num-layers", "1"]
STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
BUCKETS = ["--ddp-bucket-size", "2000"]
DISK = ["--optimizer-offload", "disk", "--offload-dir", tempfile.gettempdir()]
AWARE = "--use-precision-aware-optimizer"
NARROW = [AWARE, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
HOMES = {
    "cpu": ["--optimizer-cpu-offload"],
    "disk": DISK,
    "half": [*DISK, "--optimizer-offload-fraction", "0.5"],
}


def sharded(stage: str) -> list[str]:
    return ["--data-parallel-sharding-strategy", stage, *BUCKETS]


@pytest.mark.parametrize(
    ("stage", "optimizer", "home"),
    [
        *((stage, "adam", "disk") for stage in STAGES),
        ("optim", "sgd", "cpu"),
        ("optim_grads", "sgd", "half"),
    ],
)
def test_runs_with_offloaded_state_are_the_same_bits(
    rank_pool: RankPool, tmp_path: Path, stage: str, optimizer: str, home: str
) -> None:
    base = [*BASE, *sharded(stage), "--optimizer", optimizer, "--train-iters", "2"]
    for name, flags in (("none", []), ("away", HOMES[home])):
        save = ["--save", str(tmp_path / name), "--metrics-jsonl", str(tmp_path / f"{name}.m")]
        rank_pool.run(2, train_rank, argv=[*base, *flags, *save])
    assert numbers(tmp_path / "away.m") == numbers(tmp_path / "none.m")
    saved = [open_checkpoint(tmp_path / made) for made in ("none", "away")]
    assert_same_tensors(*saved)


def test_a_run_goes_on_with_its_state_elsewhere_and_in_other_shards(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    for home in ([], DISK):
        root, load = tmp_path / ("disk" if home else "none"), []
        for stop, stage in enumerate(("optim", "optim_grads_params", "no_shard"), 1):
            # From file to memory and back where the run is offloaded at all.
            here = home if stage != "optim_grads_params" else []
            argv = [*BASE, *NARROW, *sharded(stage), *here, "--exit-interval", str(stop), *load]
            rank_pool.run(2, train_rank, argv=[*argv, "--save", str(root / stage)])
            load = ["--load", str(root / stage)]
    saved = [open_checkpoint(tmp_path / name / "no_shard") for name in ("none", "disk")]
    assert_same_tensors(*saved)


def test_moments_of_another_dtype_are_told_and_converted_only_on_request(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    save = ["--save", str(tmp_path / "a"), "--exit-interval", "2"]
    rank_pool.run(1, train_rank, argv=[*BASE, *save])
    saved = open_checkpoint(tmp_path / "a")
    name = next(name for name in saved.names if name.startswith("optim/exp_avg_sq/"))
    assert saved.dtype(name) == torch.float32
    argv = [*BASE, *NARROW, "--load", str(tmp_path / "a"), "--train-iters", "2"]
    argv += ["--save", str(tmp_path / "b"), "--override-opt_param-scheduler"]
    with pytest.raises(RankError, match="UserError") as refused:
        rank_pool.run(1, train_rank, argv=argv)
    assert "optim/exp_avg" in str(refused.value)
    assert "is float32, expected bfloat16" in str(refused.value)
    argv = [*argv, "--ckpt-allow", "dtype", "--train-iters", "3"]
    rank_pool.run(1, train_rank, argv=argv)
    converted = open_checkpoint(tmp_path / "b")
    assert converted.dtype(name) == torch.bfloat16
    assert converted.dtype(name.replace("exp_avg_sq", "master")) == torch.float32


@pytest.mark.parametrize(
    "flags",
    [NARROW, ["--grad-reduce-in-bf16"], [AWARE, "--main-grads-dtype", "bf16"]],
    ids=["moments", "reduce", "main-grads"],
)
def test_narrow_state_stays_close_to_wide(
    rank_pool: RankPool, tmp_path: Path, flags: list[str]
) -> None:
    base = [*BASE, *sharded("optim_grads"), "--train-iters", "3"]
    losses = []
    for name, more in (("wide", []), ("narrow", flags)):
        metrics = tmp_path / name
        rank_pool.run(2, train_rank, argv=[*base, *more, "--metrics-jsonl", str(metrics)])
        losses.append([row["lm_loss"] for row in rows(metrics)])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def summary(pool: RankPool, *flags: str) -> dict[str, float]:
    """MiB by purpose, of a model with 4.3 million parameters on two ranks."""
    wide = ["--vocab-size", "130000", "--train-iters", "0", *sharded("optim"), *flags]
    said = "".join(pool.run(2, printed, argv=[*BASE, *wide]))
    line = next(line for line in said.splitlines() if "memory per rank" in line)
    words = [part.strip().rpartition(" ") for part in line.partition("MiB:")[2].split(", ")]
    return {name: float(size) for name, _, size in words}


def test_the_summary_counts_narrow_and_offloaded_state(rank_pool: RankPool) -> None:
    plain = summary(rank_pool)
    narrow = summary(rank_pool, *NARROW, "--main-grads-dtype", "bf16")
    for name in ("optimizer moments", "main gradients"):
        assert narrow[name] == pytest.approx(plain[name] / 2, abs=0.06)
    disk = summary(rank_pool, *DISK)
    state = plain["master weights"] + plain["optimizer moments"]
    assert disk["offloaded"] == pytest.approx(state, abs=0.11)
    assert disk["total"] == pytest.approx(plain["total"] - state, abs=0.2)
