"""Loss normalisation (LOSS): the global token mean, whatever the batch is cut into.

Samples differ widely in their valid tokens: a mean of means differs in the first digit.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.data.writer import DatasetWriter
from megatron_lite.mesh.groups import local_group
from megatron_lite.train.denominators import start_denominators
from megatron_lite.verify.classes import MATCH64
from megatron_lite.verify.compare import compare_runs
from megatron_lite.verify.dumps import RunRecord
from megatron_lite.verify.session import Layout, run_layout
from tests.cases.layouts import FEW, LAYOUTS, PARALLEL, REFERENCE, data_ranks
from tests.cases.ranks import gathered, masked_steps, program
from tests.cases.tiny import SGD, flags
from tests.pool import RankPool, fork_ranks
from tests.train.program import LLAMA, RUN, rows, train_rank

EXACT = [*LLAMA, *RUN, "--fp64", "--hidden-dropout", "0", "--attention-dropout", "0"]
EXACT += ["--weight-decay", "0"]


def run_masked(
    pool: RankPool, layout: str, valid: Sequence[Sequence[int]], micro: int, *extra: str
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray[Any, Any]]]:
    size, words = LAYOUTS[layout].ranks, LAYOUTS[layout].flags
    argv = [*EXACT, *words, *extra]
    found = pool.run(size, masked_steps, argv=argv, valid=valid, micro=micro)
    for told, _ in found:
        assert [step["lm_loss"] for step in told] == [step["lm_loss"] for step in found[0][0]]
    steps = zip(*(told for told, _ in found), strict=True)
    told = [{**ranks[0], "moved": max(rank["moved"] for rank in ranks)} for ranks in steps]
    return told, gathered([pieces for _, pieces in found])


def assert_equal(found: Any, wanted: Any) -> None:
    (told, gradients), (expected, expected_gradients) = found, wanted
    for key in ("lm_loss", "grad_norm", "valid_tokens"):
        assert told[-1][key] == pytest.approx(expected[-1][key], rel=1e-10), key
    floor = 1e-6 * expected[-1]["grad_norm"]
    for name, values in expected_gradients.items():
        limit = 1e-10 * max(float(np.linalg.norm(values)), floor)
        assert np.linalg.norm(gradients[name] - values) <= limit, name


def test_c048_sums_and_counts_are_divided_once() -> None:
    """Loss sums 2 and 90 over 1 and 9 tokens: 9.2, never the mean of means 6.0."""
    counts = torch.tensor([1.0, 9.0], dtype=torch.float64)
    denominators = start_denominators({"lm": counts.sum()}, local_group("dp_cp"))
    losses = torch.tensor([2.0, 90.0], dtype=torch.float64) / denominators["lm"]
    assert float(losses.sum()) == pytest.approx(9.2, rel=1e-15)
    assert float((torch.tensor([2.0, 90.0]) / counts).mean()) == 6.0


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if data_ranks(name) == 1])
def test_c048_accumulation_equals_one_large_microbatch(rank_pool: RankPool, layout: str) -> None:
    wanted = run_masked(rank_pool, REFERENCE, [[1, 9]], 2)
    assert wanted[0][0]["valid_tokens"] == 10
    assert_equal(run_masked(rank_pool, layout, [[1, 9]], 1), wanted)


def test_c048_the_mean_of_means_is_off_by_default_and_named(tmp_path: Path) -> None:
    argv = [*EXACT, "--train-iters", "1", "--eval-iters", "0"]
    (default,) = fork_ranks(1, program, argv)
    (legacy,) = fork_ranks(1, program, [*argv, "--legacy-loss-normalization"])
    assert default.code == legacy.code == 0
    named = "  loss              mean of micro-batch means"
    assert named not in default.stdout
    assert "  loss              sum over valid tokens / valid tokens of the" in default.stdout
    assert legacy.stdout.count(named) == 1


@pytest.mark.parametrize("valid", [[1, 9], [16, 1, 2, 9], [1, 1, 1, 16]], ids=str)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if data_ranks(name) == 2])
def test_c049_data_ranks_with_unequal_counts_equal_one_process(
    rank_pool: RankPool, layout: str, valid: list[int]
) -> None:
    wanted = run_masked(rank_pool, REFERENCE, [valid], len(valid))
    assert_equal(run_masked(rank_pool, layout, [valid], 1), wanted)


# The third micro-batch; one of two data ranks; all but one token.
EMPTY = ([3, 16, 0, 7], [0, 7, 0, 16], [0, 0, 0, 1])


@pytest.mark.parametrize("valid", EMPTY, ids=str)
@pytest.mark.parametrize("layout", [REFERENCE, "dp2", "tp2-sp-dp2"])
def test_c050_a_part_without_valid_tokens_changes_nothing_else(
    rank_pool: RankPool, layout: str, valid: list[int]
) -> None:
    wanted = run_masked(rank_pool, REFERENCE, [valid], 4)
    assert np.isfinite(wanted[0][0]["lm_loss"])
    assert_equal(run_masked(rank_pool, layout, [valid], 1), wanted)


@pytest.mark.parametrize("layout", FEW)
def test_c050_a_step_without_valid_tokens_changes_no_weight_and_the_run_goes_on(
    rank_pool: RankPool, layout: str
) -> None:
    steps = [[3, 16, 0, 7], [0, 0, 0, 0], [3, 16, 0, 7]]
    plain = ("--optimizer", "sgd", "--sgd-momentum", "0")
    for extra, first in ((plain, 0), ((), 1)):
        told, _ = run_masked(rank_pool, layout, steps[first:], 1, *extra)
        empty = told[1 - first]
        assert (empty["lm_loss"], empty["grad_norm"], empty["valid_tokens"]) == (0.0, 0.0, 0)
        assert empty["moved"] == 0.0
        assert not empty["nan"] and not empty["skipped"]
        assert told[-1]["valid_tokens"] == 26 and told[-1]["moved"] > 0


@pytest.mark.parametrize("layout", [REFERENCE, *PARALLEL[-2:]])
def test_c050_a_whole_run_on_masked_data_reports_no_tokens_and_ends_well(
    rank_pool: RankPool, tmp_path: Path, layout: str
) -> None:
    with DatasetWriter(tmp_path / "ends", np.uint16) as writer:
        for _ in range(200):
            writer.add_document(np.full(40, 89))
        writer.finalize()
    argv = [word for word in EXACT if word != "--mock-data"]
    argv += ["--data-path", str(tmp_path / "ends"), "--data-cache-path", str(tmp_path / "cache")]
    argv += ["--eod-mask-loss", "--train-iters", "2", *LAYOUTS[layout].flags]
    argv += ["--metrics-jsonl", str(tmp_path / "metrics.jsonl")]
    size = LAYOUTS[layout].ranks
    assert rank_pool.run(size, train_rank, argv=argv) == [0] * size
    for row in [*rows(tmp_path / "metrics.jsonl"), *rows(tmp_path / "metrics.jsonl", "valid")]:
        assert (row["valid_tokens"], row["lm_loss"]) == (0, 0.0)
    assert "NaN" not in json.dumps(rows(tmp_path / "metrics.jsonl"))


STAGES = {
    "0": "no_shard",
    "1": "optim",
    "2": "optim_grads",
    "2-whole": "optim_grads --gradient-accumulation unsharded",
    "3": "optim_grads_params",
    "3-whole": "optim_grads_params --gradient-accumulation unsharded",
}
ACCUMULATED = f"{SGD} --num-layers 2 --clip-grad 0.05 --ddp-bucket-size 3000"


@pytest.fixture(scope="module")
def unaccumulated(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """One process that takes the whole batch of eight at once."""
    argv = [*flags(ACCUMULATED), "--micro-batch-size", "8"]
    return run_layout(rank_pool, tmp_path_factory.mktemp("c051") / "1", argv, Layout("1"))[0]


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_c051_every_stage_accumulates_to_the_same_numbers(
    rank_pool: RankPool, tmp_path: Path, unaccumulated: RunRecord, stage: str, micro: int
) -> None:
    words = ("--data-parallel-sharding-strategy", *STAGES[stage].split())
    layout = Layout("dp2", 2, (*words, "--micro-batch-size", str(micro)))
    record, _ = run_layout(rank_pool, tmp_path / "run", flags(ACCUMULATED), layout)
    differences = compare_runs(unaccumulated, record, MATCH64)
    assert not differences, str(differences[0])
