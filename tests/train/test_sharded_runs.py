"""Whole runs with a sharded data axis where something odd happens, in every strategy.

Ranks that own nothing, one data rank, evaluations and canaries between steps, gradients that
are not finite, signals and kills, and tools that read what such a run has saved.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron_lite.checkpoint.reader import open_checkpoint
from megatron_lite.mesh.launch import RunStatus
from megatron_lite.shard.buckets import MainGradients
from megatron_lite.train.parts import Parts
from megatron_lite.train.passes import Passes
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from megatron_lite.train.weights_hash import hash_weights
from tests.cases.ranks import program
from tests.pool import RankPool, fork_ranks
from tests.tools.test_generate import generated
from tests.train.program import LLAMA, RUN, build_and, rows, train_rank
from tests.train.test_state import printed

STRATEGY, INSTANCES = "--data-parallel-sharding-strategy", "--num-distributed-optimizer-instances"
AHEAD, SMALL = "--overlap-param-gather", ("--ddp-bucket-size", "1000")
STRATEGIES: Mapping[str, tuple[str, ...]] = {
    "no_shard": (),
    "optim": (STRATEGY, "optim", AHEAD, *SMALL),
    "grads": (STRATEGY, "optim_grads", AHEAD, *SMALL),
    "grads-whole": (STRATEGY, "optim_grads", "--gradient-accumulation", "unsharded", *SMALL),
    "params": (STRATEGY, "optim_grads_params", AHEAD),
    "params-step": (STRATEGY, "optim_grads_params", AHEAD, "--reshard-after", "step"),
}
HYBRID: Mapping[str, tuple[str, ...]] = {
    name: (*flags, INSTANCES, "2") for name, flags in STRATEGIES.items()
}
QUIET = ["--hidden-dropout", "0", "--attention-dropout", "0"]
EXACT = [*LLAMA, *RUN, *QUIET, "--num-layers", "2", "--fp64", "--save-interval", "100"]
SHORT = [*EXACT, "--train-iters", "3", "--eval-iters", "0"]
DEADLINE_S = 120.0


def figures(path: Path, *names: str) -> list[list[float]]:
    """Figures of every iteration."""
    return [[row[name] for name in ("lm_loss", "grad_norm", *names)] for row in rows(path)]


def run(pool: RankPool, root: Path, ranks: int, argv: Sequence[str]) -> list[list[float]]:
    """Train and save in `root`; loss, gradient norm, zeros and weights' norm per step."""
    metrics = root.with_suffix(".jsonl")
    words = [*argv, "--save", str(root), "--metrics-jsonl", str(metrics)]
    words += ["--log-params-norm", "--log-num-zeros-in-grad"]
    assert pool.run(ranks, train_rank, argv=words) == [0] * ranks
    return figures(metrics, "num_zeros", "params_norm")


def assert_near(found: list[list[float]], wanted: list[list[float]]) -> None:
    assert len(found) == len(wanted) > 0
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-10)


def assert_near_weights(found: Path, wanted: Path) -> None:
    first, second = open_checkpoint(found), open_checkpoint(wanted)
    assert first.names == second.names
    for name in first.names:
        assert torch.allclose(first.read(name), second.read(name), rtol=1e-9, atol=1e-10), name


# So small that of eight ranks most own padding alone in every bucket.
NOTHING = [*SHORT, "--hidden-size", "8", "--ffn-hidden-size", "8", "--vocab-size", "12"]
NOTHING += ["--global-batch-size", "8", "--ddp-bucket-size", "1"]


TP2_SP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


@pytest.mark.parametrize("more", [(), TP2_SP], ids=["dp8", "tp2-sp-dp4"])
@pytest.mark.parametrize("way", ["optim", "grads", "grads-whole", "params"])
def test_ranks_that_own_nothing_change_no_figure(
    rank_pool: RankPool, tmp_path: Path, way: str, more: tuple[str, ...]
) -> None:
    wanted = run(rank_pool, tmp_path / "one", 1, NOTHING)
    flags = [word for word in STRATEGIES[way] if word not in SMALL]
    assert_near(run(rank_pool, tmp_path / "many", 8, [*NOTHING, *flags, *more]), wanted)
    assert_near_weights(tmp_path / "many", tmp_path / "one")


@pytest.mark.parametrize("way", STRATEGIES)
def test_one_data_rank_computes_what_an_unsharded_run_does(
    rank_pool: RankPool, tmp_path: Path, way: str
) -> None:
    wanted = run(rank_pool, tmp_path / "plain", 1, [*SHORT, *SMALL])
    found = run(rank_pool, tmp_path / "run", 1, [*SHORT, *STRATEGIES[way], *SMALL])
    if "params" in way:  # the norm sums by other buckets
        assert_near(found, wanted)
        assert_near_weights(tmp_path / "run", tmp_path / "plain")
        return
    assert found == wanted
    first, second = open_checkpoint(tmp_path / "plain"), open_checkpoint(tmp_path / "run")
    assert first.names == second.names
    for name in first.names:
        assert torch.equal(first.read(name), second.read(name)), name


@pytest.mark.parametrize("way", STRATEGIES)
def test_evaluations_between_steps_change_nothing_and_see_the_weights_of_now(
    rank_pool: RankPool, tmp_path: Path, way: str
) -> None:
    def trained(name: str, ranks: int, *more: str) -> tuple[list[list[float]], list[float]]:
        path = tmp_path / name
        argv = [*EXACT, "--train-iters", "3", *more, "--metrics-jsonl", str(path)]
        rank_pool.run(ranks, train_rank, argv=argv)
        return figures(path), [row["lm_loss"] for row in rows(path, "valid")]

    often = ("--eval-iters", "1", "--eval-interval", "1")
    with_them, losses = trained("often", 2, *STRATEGIES[way], *often)
    without, none = trained("never", 2, *STRATEGIES[way], "--eval-iters", "0")
    assert with_them == without
    assert none == []
    wanted, alone = trained("alone", 1, *often)
    assert_near(with_them, wanted)
    assert losses == pytest.approx(alone, rel=1e-10)
    assert len(set(losses)) == len(losses) >= 3


@pytest.mark.parametrize("way", HYBRID)
def test_checks_and_figures_at_every_stage_of_hybrid_sharding_are_those_of_one_process(
    rank_pool: RankPool, tmp_path: Path, way: str
) -> None:
    def told(name: str, ranks: int, *more: str) -> tuple[str, list[list[float]]]:
        metrics, dump = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-dump"
        argv = [*SHORT, *more, "--check-weights-hash", "--metrics-jsonl", str(metrics)]
        argv += ["--log-params-norm", "--log-num-zeros-in-grad"]
        argv += ["--debug-dump", str(dump), "--debug-dump-weights"]
        text = "".join(rank_pool.run(ranks, printed, argv=argv))
        (line,) = [line for line in text.splitlines() if "logical hash of the weights" in line]
        assert sorted(path.name for path in dump.glob("*.safetensors")) == [
            f"step_{number:07d}.safetensors" for number in range(4)
        ]
        return line, figures(metrics, "num_zeros", "params_norm")

    line, wanted = told("one", 1)
    found = told("hybrid", 4, *HYBRID[way])
    assert found[0] == line
    assert_near(found[1], wanted)
    assert all(row[2] > 0 for row in wanted)  # words that no sample has


def resumed(pool: RankPool, root: Path, ranks: int, *more: str) -> str:
    """The line about the canary of a resume."""
    argv = [*SHORT, *more, "--verify-resume", "--load", str(root)]
    text = "".join(pool.run(ranks, printed, argv=argv))
    (line,) = [line for line in text.splitlines() if line.startswith("canary:")]
    return line


ORDER = tuple(STRATEGIES)


@pytest.mark.parametrize("way", STRATEGIES)
def test_a_canary_is_replayed_in_the_same_strategy_bitwise_and_in_another_nearly(
    rank_pool: RankPool, tmp_path: Path, way: str
) -> None:
    saved = [*SHORT, *STRATEGIES[way], "--verify-resume", "--save", str(tmp_path)]
    rank_pool.run(2, train_rank, argv=[*saved, "--exit-interval", "2"])
    assert resumed(rank_pool, tmp_path, 2, *STRATEGIES[way]).endswith("equal bits")
    other = ORDER[(ORDER.index(way) + 2) % len(ORDER)]
    assert "within" in resumed(rank_pool, tmp_path, 2, *STRATEGIES[other])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("--use-distributed-optimizer",), ()),
        ((), ("--use-torch-fsdp2",)),
        (("--use-megatron-fsdp",), ("--use-megatron-fsdp", INSTANCES, "2")),
        (STRATEGIES["grads"], (*STRATEGIES["grads"], "--gradient-accumulation", "unsharded")),
    ],
    ids=["distributed-optimizer", "fsdp2", "instances", "accumulation"],
)
def test_another_way_of_sharding_is_not_held_to_equal_bits(
    rank_pool: RankPool, tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    saved = [*SHORT, *before, "--verify-resume", "--save", str(tmp_path)]
    rank_pool.run(4, train_rank, argv=[*saved, "--exit-interval", "2"])
    assert "within" in resumed(rank_pool, tmp_path, 4, *after)


def poisoned_steps(argv: Sequence[str], rank: int, world_size: int) -> list[Any]:
    """Four steps; in the second one rank has a gradient that is not finite."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> list[Any]:
        written = MainGradients.written

        def poison(self: MainGradients, param: nn.Parameter) -> None:
            if state.iteration == 1 and rank == world_size - 1:
                self._accounts[param].gradient.view(-1)[0] = float("nan")
            written(self, param)

        found = []
        with patch.object(MainGradients, "written", poison):
            for _ in range(4):
                report = TrainStep(parts, state).run()
                found.append((report.skipped, report.lm_loss, hash_weights(parts)))
        return found

    result: list[Any] = build_and(use, argv, rank, world_size)
    return result


@pytest.mark.parametrize("way", STRATEGIES)
def test_a_nan_of_one_rank_skips_the_step_on_all_and_the_run_goes_on(
    rank_pool: RankPool, way: str
) -> None:
    argv = [*EXACT, "--eval-iters", "0", "--nan-policy", "skip", *STRATEGIES[way]]
    ranks = rank_pool.run(2, poisoned_steps, argv=argv)
    assert ranks[0] == ranks[1]
    assert [skipped for skipped, _, _ in ranks[0]] == [False, True, False, False]
    hashes = [digest for _, _, digest in ranks[0]]
    assert hashes[1] == hashes[0]
    assert len(set(hashes)) == 3
    assert all(loss == loss for _, loss, _ in ranks[0])


def ended_program(argv: Sequence[str], rank: int, step: int, number: int) -> int:
    """The main program; one rank gets a signal before its first backward pass of a step."""
    original = Passes._backward

    def backward(self: Passes, place: tuple[int, int]) -> None:
        if self.options.step == step and place[1] == 0:
            os.kill(os.getpid(), number)
        original(self, place)

    if int(os.environ["RANK"]) != rank:
        return program(argv)
    with patch.object(Passes, "_backward", backward):
        return program(argv)


WAYS = ("optim", "grads", "params")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_was_ended_goes_on_in_another_strategy(
    rank_pool: RankPool, tmp_path: Path, way: str, number: int
) -> None:
    other = WAYS[(WAYS.index(way) + 1) % len(WAYS)]
    common = [*EXACT, "--train-iters", "5", "--eval-iters", "0"]
    wanted = run(rank_pool, tmp_path / "whole", 1, common)
    metrics = tmp_path / "ended.jsonl"
    place = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    ended = [*common, *place, "--metrics-jsonl", str(metrics), "--save-interval", "2"]
    first = [*ended, *STRATEGIES[way]]
    exits = fork_ranks(2, ended_program, first, 1, 2, number, timeout=DEADLINE_S)
    codes = [found.code for found in exits]
    if number == signal.SIGTERM:
        assert codes == [75, 75], exits
    else:
        assert codes[1] == -signal.SIGKILL and codes[0] != 0, exits
    saved = open_checkpoint(tmp_path / "save").step
    assert saved == (4 if number == signal.SIGTERM else 2)
    exits = fork_ranks(2, program, [*ended, *STRATEGIES[other]], timeout=DEADLINE_S)
    assert [found.code for found in exits] == [0, 0], exits
    by_step = {row["iteration"]: [row["lm_loss"], row["grad_norm"]] for row in rows(metrics)}
    assert_near([by_step[step] for step in sorted(by_step)], [row[:2] for row in wanted])
    assert open_checkpoint(tmp_path / "save").step == 5
    assert_near_weights(tmp_path / "save", tmp_path / "whole")


@pytest.mark.parametrize("way", [*WAYS, "params-hybrid"])
def test_text_is_generated_from_the_checkpoint_of_every_strategy(
    rank_pool: RankPool, tmp_path: Path, way: str
) -> None:
    flags = HYBRID["params"] if way == "params-hybrid" else STRATEGIES[way]
    rank_pool.run(4, train_rank, argv=[*SHORT, *flags, "--save", str(tmp_path / "cut")])
    rank_pool.run(1, train_rank, argv=[*SHORT, "--save", str(tmp_path / "one")])
    texts = [generated(rank_pool, tmp_path / name, 1, [], "--greedy") for name in ("cut", "one")]
    assert texts[0] == texts[1]
    two = generated(
        rank_pool, tmp_path / "cut", 2, ["--pipeline-model-parallel-size", "2"], "--greedy"
    )
    assert two == texts[0]


IMPOSSIBLE = {
    "copies do not divide": ((*STRATEGIES["params"], INSTANCES, "3"), "must divide the 2"),
    "nothing is gathered": ((AHEAD,), "nothing is gathered without sharding"),
    "two ways": (("--use-torch-fsdp2", "--use-distributed-optimizer"), "different sharding"),
    "no copies": ((INSTANCES, "0"), f"{INSTANCES} 0"),
    "no buckets": (("--ddp-bucket-size", "0"), "--ddp-bucket-size 0"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_is_one_message_before_anything_runs(name: str) -> None:
    flags, told = IMPOSSIBLE[name]
    exits = fork_ranks(2, program, [*SHORT, *flags])
    assert [found.code for found in exits] == [2, 2]
    text = "".join(found.stderr for found in exits)
    assert text.count(told) == 1, text
    assert "Traceback" not in text
