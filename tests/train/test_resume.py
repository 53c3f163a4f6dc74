"""A run in two parts is the run in one, bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint.reader import Checkpoint, open_checkpoint
from tests.pool import RankError, RankPool
from tests.train.program import LAYOUTS, LLAMA, RUN, rows, train_rank
from tests.train.test_state import printed

MEASURED = ("elapsed_ms", "tokens_per_s", "model_tflops_per_rank", "mfu")


def numbers(path: Path) -> list[dict[str, Any]]:
    """All rows of training and validation without what a clock measured."""
    found = rows(path) + rows(path, "valid")
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in found]


def assert_same_tensors(first: Checkpoint, second: Checkpoint) -> None:
    assert first.names == second.names
    for name in first.names:
        assert torch.equal(first.read(name), second.read(name)), name


def test_learning_rates_of_an_interrupted_cosine_are_the_known_ones(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    golden = "1.000000e-03 9.779754e-04 9.140576e-04 8.145034e-04 6.890576e-04 5.500000e-04 "
    golden += "4.109424e-04 2.854966e-04 1.859424e-04 1.220246e-04"
    argv = [*LLAMA, *RUN, "--lr", "1e-3", "--min-lr", "1e-4"]
    argv += ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    argv += ["--save-interval", "100", "--metrics-jsonl", str(tmp_path / "metrics.jsonl")]
    rank_pool.run(1, train_rank, argv=[*argv, "--exit-interval", "5"])
    rank_pool.run(1, train_rank, argv=argv)
    used = [f"{row['learning_rate']:.6e}" for row in rows(tmp_path / "metrics.jsonl")]
    assert " ".join(used) == golden


def test_weights_without_optimizer_state_make_the_masters(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    base = [*LLAMA, *RUN, "--bf16", "--save-interval", "100", "--weight-decay", "0"]
    rank_pool.run(1, train_rank, argv=[*base, "--save", str(tmp_path / "a"), "--train-iters", "2"])
    argv = [*base, "--save", str(tmp_path / "b"), "--load", str(tmp_path / "a"), "--finetune"]
    argv += ["--lr", "0", "--min-lr", "0", "--train-iters", "1"]
    rank_pool.run(1, train_rank, argv=argv)
    before, after = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    for name in before.names:
        if not name.startswith("optim/"):
            assert torch.equal(before.read(name), after.read(name)), name
            assert torch.equal(after.read(f"optim/master/{name}"), after.read(name).float()), name


def test_checkpoint_of_one_layout_continues_in_another(rank_pool: RankPool, tmp_path: Path) -> None:
    base = [*LLAMA, *RUN, "--fp64", "--save-interval", "100"]
    save = ["--save", str(tmp_path / "a"), "--exit-interval", "5"]
    rank_pool.run(2, train_rank, argv=[*base, *LAYOUTS["tp2-sp"][1], *save])
    losses = {}
    for layout, (size, flags) in LAYOUTS.items():
        metrics = tmp_path / f"{layout}.jsonl"
        argv = [*base, *flags, "--load", str(tmp_path / "a"), "--metrics-jsonl", str(metrics)]
        rank_pool.run(size, train_rank, argv=argv)
        losses[layout] = [row["lm_loss"] for row in rows(metrics)]
    assert all(len(found) == 5 for found in losses.values())
    for found in losses.values():
        assert found == pytest.approx(losses["1"], rel=1e-10)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--seed", "99"], "seed: 1234 in the checkpoint, 99 now"),
        (["--lr", "5e-3"], "max_lr: 0.01 in the checkpoint, 0.005 now"),
        (["--ffn-hidden-size", "64"], "ffn_hidden_size: 48 in the checkpoint, 64 now"),
        (["--eod-mask-loss"], "eod_mask_loss: False in the checkpoint, True now"),
        (["--global-batch-size", "8"], "global_batch_size"),
        (["--optimizer", "sgd"], "optimizer: 'adam' in the checkpoint, 'sgd' now"),
        (["--bf16"], "missing: optim/master/"),
    ],
)
def test_resume_that_would_be_another_run_is_refused(
    rank_pool: RankPool, tmp_path: Path, change: list[str], told: str
) -> None:
    base = [*LLAMA, *RUN, "--save-interval", "100"]
    save = ["--save", str(tmp_path / "a"), "--exit-interval", "1"]
    rank_pool.run(1, train_rank, argv=[*base, *save])
    with pytest.raises(RankError, match="UserError") as refused:
        rank_pool.run(1, train_rank, argv=[*base, *change, "--load", str(tmp_path / "a")])
    assert told in str(refused.value)


def test_named_change_is_accepted(rank_pool: RankPool, tmp_path: Path) -> None:
    base = [*LLAMA, *RUN, "--save-interval", "100"]
    save = ["--save", str(tmp_path / "a"), "--exit-interval", "1"]
    rank_pool.run(1, train_rank, argv=[*base, *save])
    argv = [*base, "--seed", "99", "--load", str(tmp_path / "a")]
    argv += ["--allow-resume-change", "seed", "--metrics-jsonl", str(tmp_path / "m")]
    rank_pool.run(1, train_rank, argv=argv)
    assert [row["iteration"] for row in rows(tmp_path / "m")] == list(range(2, 11))


def test_load_without_a_checkpoint(rank_pool: RankPool, tmp_path: Path) -> None:
    base = [*LLAMA, *RUN, "--train-iters", "1", "--load", str(tmp_path / "none")]
    with pytest.raises(RankError, match="--allow-missing-checkpoint"):
        rank_pool.run(1, train_rank, argv=base)
    assert rank_pool.run(1, train_rank, argv=[*base, "--allow-missing-checkpoint"]) == [0]
    same = ["--save", str(tmp_path / "none"), "--save-interval", "1"]
    assert rank_pool.run(1, train_rank, argv=[*base, *same]) == [0]


def test_finetune_starts_at_step_zero_with_the_weights(rank_pool: RankPool, tmp_path: Path) -> None:
    base = [*LLAMA, *RUN, "--save-interval", "100"]
    rank_pool.run(1, train_rank, argv=[*base, "--save", str(tmp_path / "a")])
    argv = [*base, "--load", str(tmp_path / "a"), "--finetune", "--train-iters", "3"]
    argv += ["--metrics-jsonl", str(tmp_path / "m"), "--seed", "5"]
    rank_pool.run(1, train_rank, argv=argv)
    found = rows(tmp_path / "m")
    assert [row["iteration"] for row in found] == [1, 2, 3]
    assert found[0]["learning_rate"] == pytest.approx(1e-2)
    assert found[0]["lm_loss"] < 4.0  # initial weights are at ln 90 = 4.5


def test_saving_among_another_runs_later_steps_is_refused_at_start(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    argv = [*LLAMA, *RUN, "--save", str(tmp_path), "--save-interval", "4"]
    rank_pool.run(1, train_rank, argv=[*argv, "--exit-interval", "4"])
    with pytest.raises(RankError, match="holds checkpoints of the steps 4") as refused:
        rank_pool.run(1, train_rank, argv=argv)
    assert "--overwrite-save" in str(refused.value)
    rank_pool.run(1, train_rank, argv=[*argv, "--overwrite-save", "--exit-interval", "4"])
    rank_pool.run(1, train_rank, argv=[*argv, "--load", str(tmp_path), "--log-progress"])
    assert open_checkpoint(tmp_path).step == 10
    assert (tmp_path / "progress.txt").read_text().count("Saved checkpoint") == 2


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("place", ["file", "below a file", "long name", "nowhere"])
def test_a_place_that_cannot_be_saved_to_is_refused_before_the_first_step(
    rank_pool: RankPool, tmp_path: Path, place: str, size: int
) -> None:
    (tmp_path / "file").write_text("in the way")
    save = {
        "file": tmp_path / "file",
        "below a file": tmp_path / "file" / "x",
        "long name": tmp_path / ("x" * 300),
        "nowhere": Path("/proc/none"),
    }[place]
    argv = [*LLAMA, *RUN, "--save", str(save), "--save-interval", "100"]
    argv += ["--metrics-jsonl", str(tmp_path / "m")]
    with pytest.raises(RankError, match="UserError"):
        rank_pool.run(size, train_rank, argv=argv)
    assert not (tmp_path / "m").exists() or rows(tmp_path / "m") == []


def test_changes_of_the_optimizer_are_told(rank_pool: RankPool, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "1"]
    base = [*LLAMA, *RUN, *save]
    rank_pool.run(1, train_rank, argv=[*base, "--exit-interval", "1"])
    argv = [*base, "--exit-interval", "2", "--adam-beta2", "0.5"]
    (told,) = rank_pool.run(1, printed, argv=argv)
    assert "changed since the checkpoint: adam_beta2: 0.999 in the checkpoint, 0.5 now" in told
