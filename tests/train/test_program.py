"""The whole program as processes: exit codes, signals, messages, evaluation only."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.checkpoint.reader import logical_hash, open_checkpoint
from megatron_lite.data.meta import DatasetMeta
from megatron_lite.data.writer import DatasetWriter
from megatron_lite.mesh.launch import RunStatus
from megatron_lite.resilience.signals import StopDecision, StopSignals
from megatron_lite.train.loop import train
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.weights_hash import hash_weights
from tests.pool import REPOSITORY, RankPool, run_ranks
from tests.train.program import LAYOUTS, LLAMA, RUN, build_and, rows, train_rank


def test_plain_python_trains_and_prints_the_log_line(tmp_path: Path) -> None:
    (result,) = run_ranks(1, [*LLAMA, *RUN, "--train-iters", "2", "--save", str(tmp_path)])
    assert result.code == 2  # --save needs an interval
    argv = [*LLAMA, *RUN, "--train-iters", "2", "--save", str(tmp_path), "--save-interval", "2"]
    (result,) = run_ranks(1, argv)
    assert result.code == 0, result.stderr
    assert " iteration        2/       2 | consumed samples:            8 |" in result.stdout
    assert "saving checkpoint at iteration       2" in result.stdout
    assert json.loads((tmp_path / "exit_status.json").read_text())["code"] == 0


def test_the_other_name_is_the_same_program() -> None:
    argv = [*LLAMA, *RUN, "--train-iters", "1", "--eval-iters", "0"]
    (result,) = run_ranks(1, argv, program="pretrain_gpt.py")
    assert result.code == 0, result.stderr
    assert "validation loss" not in result.stdout


def test_a_wrong_flag_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    blocked = tmp_path / "torch.py"
    blocked.write_text("raise AssertionError('torch was imported')\n")
    argv = [*LLAMA, *RUN, "--num-attention-heads", "5"]
    (result,) = run_ranks(1, argv, env={"PYTHONPATH": str(tmp_path)})
    assert result.code == 2
    assert "--num-attention-heads 5" in result.stderr
    assert "Traceback" not in result.stderr


def test_print_config_needs_no_torch_and_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "WORLD_SIZE": "4", "RANK": "0"}
    command = [sys.executable, str(REPOSITORY / "pretrain.py"), *LLAMA, *RUN, "--print-config"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "\nhidden_size: 32\n" in done.stdout


def test_missing_checkpoint_is_one_message_on_two_ranks(tmp_path: Path) -> None:
    results = run_ranks(2, [*LLAMA, *RUN, "--load", str(tmp_path / "nothing")])
    assert [result.code for result in results] == [2, 2]
    messages = "".join(result.stderr for result in results)
    assert messages.count("--allow-missing-checkpoint") == 1
    assert "Traceback" not in messages


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_saves_and_asks_to_be_started_again(tmp_path: Path, number: int) -> None:
    save, metrics = tmp_path / "save", tmp_path / "metrics.jsonl"
    argv = [*LLAMA, *RUN, "--train-iters", "100000", "--save", str(save), "--load", str(save)]
    argv += ["--save-interval", "100000", "--metrics-jsonl", str(metrics)]
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "pretrain.py"), *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (metrics.exists() and rows(metrics)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    reached = rows(metrics)[-1]["iteration"]
    status = json.loads((save / "exit_status.json").read_text())
    assert (status["code"], status["step"]) == (75, reached)
    (again,) = run_ranks(1, [*argv, "--exit-interval", "1"])
    assert again.code == 0, again.stderr
    assert rows(metrics)[-1]["iteration"] == reached + 1


def test_one_rank_out_of_time_ends_all_with_code_zero(rank_pool: RankPool, tmp_path: Path) -> None:
    argv = [*LLAMA, *RUN, "--exit-duration-in-mins", "1", "--save", str(tmp_path)]
    argv += ["--save-interval", "100"]
    assert rank_pool.run(2, train_on_a_fast_clock, argv=argv) == [0, 0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


def train_on_a_fast_clock(argv: Sequence[str], rank: int, world_size: int) -> int:
    """Train where a minute passes for rank 1 while it takes two steps."""
    readings = itertools.count(0, 40 if rank == 1 else 0)

    def use(parts: Parts, state: TrainState, status: RunStatus) -> int:
        parts.stop = StopDecision(
            StopSignals(), can_save=True, exit_duration_in_mins=1, clock=lambda: next(readings)
        )
        return train(parts, state, status)

    code: int = build_and(use, argv, rank, world_size)
    return code


def test_no_iterations_only_evaluates(rank_pool: RankPool, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    argv = [*LLAMA, *RUN, "--train-iters", "0", "--metrics-jsonl", str(metrics)]
    assert rank_pool.run(1, train_rank, argv=argv) == [0]
    assert rows(metrics) == []
    assert [row["split"] for row in rows(metrics, "valid")] == ["valid"]


@pytest.mark.parametrize("flags", [["--eval-iters", "0"], ["--split", "100,0,0"]])
def test_without_validation_nothing_is_evaluated(
    rank_pool: RankPool, tmp_path: Path, flags: list[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    argv = [*LLAMA, *RUN, "--train-iters", "1", *flags, "--metrics-jsonl", str(metrics)]
    assert rank_pool.run(1, train_rank, argv=argv) == [0]
    assert rows(metrics, "valid") == []


def test_validation_loss_does_not_depend_on_the_layout(rank_pool: RankPool, tmp_path: Path) -> None:
    found = {}
    for layout, (size, flags) in LAYOUTS.items():
        metrics = tmp_path / f"{layout}.jsonl"
        argv = [*LLAMA, *RUN, *flags, "--train-iters", "0", "--fp64", "--eval-iters", "2"]
        rank_pool.run(size, train_rank, argv=[*argv, "--metrics-jsonl", str(metrics)])
        (row,) = rows(metrics, "valid")
        assert row["valid_tokens"] == 2 * 4 * 16
        found[layout] = row["lm_loss"]
    assert all(loss == pytest.approx(found["1"], rel=1e-12) for loss in found.values())


def test_global_batches_hold_the_same_samples_in_every_cut(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    cuts = {"a": (1, "4", "0"), "b": (2, "1", "2"), "c": (2, "2", "0"), "d": (1, "1", "4")}
    losses, samples = {}, {}
    for name, (size, micro, workers) in cuts.items():
        argv = [*LLAMA, *RUN, "--train-iters", "3", "--fp64", "--micro-batch-size", micro]
        argv += ["--num-workers", workers, "--debug-dump", str(tmp_path / name)]
        argv += ["--metrics-jsonl", str(tmp_path / f"{name}.jsonl")]
        rank_pool.run(size, train_rank, argv=argv)
        losses[name] = [row["lm_loss"] for row in rows(tmp_path / f"{name}.jsonl")]
        dumped = sorted((tmp_path / name).glob("*.json"))
        samples[name] = [
            [row["consumed_index"] for row in json.loads(path.read_text())["samples"]]
            for path in dumped
        ]
    assert samples["a"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    for name in cuts:
        assert samples[name] == samples["a"]
        assert losses[name] == pytest.approx(losses["a"], rel=1e-10)


def test_batch_ramp_follows_consumed_samples_also_after_a_resume(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    argv = [*LLAMA, *RUN, "--global-batch-size", "16", "--rampup-batch-size", "4", "4", "32"]
    argv += ["--train-iters", "8", "--save", str(tmp_path / "s"), "--load", str(tmp_path / "s")]
    argv += ["--save-interval", "100", "--metrics-jsonl", str(tmp_path / "m")]
    rank_pool.run(2, train_rank, argv=[*argv, "--exit-interval", "4"])
    rank_pool.run(2, train_rank, argv=argv)
    found = rows(tmp_path / "m")
    assert [row["global_batch_size"] for row in found] == [4, 4, 4, 8, 8, 12, 16, 16]
    assert found[3]["consumed_samples"] == 20
    assert found[-1]["consumed_samples"] == 72


def test_weights_hash_is_one_for_all_layouts_and_the_checkpoint(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    found = set()
    for layout, (size, flags) in LAYOUTS.items():
        argv = [*LLAMA, *RUN, *flags, "--lr", "0", "--min-lr", "0", "--train-iters", "1"]
        argv += ["--save", str(tmp_path / layout), "--save-interval", "1"]
        found |= set(rank_pool.run(size, hash_rank, argv=[*argv, "--check-weights-hash"]))
        checkpoint = open_checkpoint(tmp_path / layout)
        weights = [name for name in checkpoint.names if not name.startswith("optim/")]
        found.add(logical_hash(checkpoint, weights))
    assert len(found) == 1


def hash_rank(argv: Sequence[str], rank: int, world_size: int) -> str:
    def use(parts: Parts, state: TrainState, status: RunStatus) -> str:
        train(parts, state, status)
        return hash_weights(parts)

    found: str = build_and(use, argv, rank, world_size)
    return found


@pytest.mark.parametrize("tp_size", [1, 2])
def test_token_outside_the_vocabulary_is_told_alike_in_every_layout(
    tmp_path: Path, tp_size: int
) -> None:
    with DatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        for document in range(40):
            tokens = np.arange(50) % 90
            tokens[7] = 300 if document == 3 else 7
            writer.add_document(tokens)
        writer.finalize()
    argv = [word for word in [*LLAMA, *RUN] if word not in ("--mock-data", "--data-cache-path")]
    argv = [*argv[:-1], "--data-path", str(tmp_path / "corpus"), "--split", "100,0,0"]
    argv += ["--tensor-model-parallel-size", str(tp_size), "--train-iters", "31"]
    results = run_ranks(tp_size, argv)
    assert {result.code for result in results} == {3}
    told = "".join(result.stderr for result in results)
    assert "token id 300 is outside the model's vocabulary of 90" in told
    assert str(tmp_path / "corpus") in told
    assert "sample " in told
    assert told.count("token id 300") == 1
    assert "Traceback" not in told


def test_dataset_of_a_larger_vocabulary_is_refused_at_start(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document(np.arange(80))
        writer.finalize(DatasetMeta("NullTokenizer", None, 1000, 999, 79, 1, 80))
    argv = [word for word in [*LLAMA, *RUN] if word not in ("--mock-data", "--data-cache-path")]
    argv = [*argv[:-1], "--data-path", str(tmp_path / "corpus"), "--split", "100,0,0"]
    (result,) = run_ranks(1, argv)
    assert result.code == 2
    assert "vocabulary of 1000" in result.stderr
    assert "iteration        1/" not in result.stdout


@pytest.mark.parametrize(("more", "code"), [((), 0), (("--lr", "1e30", "--min-lr", "1e30"), 1)])
def test_ranks_end_with_their_own_code_and_no_abort(more: tuple[str, ...], code: int) -> None:
    """Process groups that live until the interpreter ends would abort it."""
    ends = run_ranks(2, [*LLAMA, *RUN, "--train-iters", "3", *more])
    assert [end.code for end in ends] == [code, code], ends
    assert not any("terminate called" in end.stderr for end in ends)
