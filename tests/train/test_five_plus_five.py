"""A run in two parts is the run in one, bit by bit, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_lite.config.options import build_options
from megatron_lite.verify.covering import Row, covering_rows
from megatron_lite.verify.tiny_data import write_tiny_dataset
from tests.cases.layouts import LAYOUTS, batch_for
from tests.pool import RankPool
from tests.train.program import LLAMA, OWN_DATA, rows, train_rank

MEASURED = ("elapsed_ms", "tokens_per_s", "model_tflops_per_rank", "mfu")
PRECISION = {"fp32": (), "bf16": ("--bf16",)}
# Ten steps of four: the documents have 40 samples and more, or so few that an epoch ends
# before, at and after the cut.
DATA = {"one epoch": 60, "epoch ends": 9}
EVALUATION = {"none": ("--eval-iters", "0"), "after": ("--eval-iters", "1", "--eval-interval", "5")}
WRITER = {"sync": (), "async": ("--async-save",)}
HAS_ASYNC = build_options()["async_save"].status == "implemented"
FACTORS = {
    "layout": tuple(LAYOUTS),
    "precision": tuple(PRECISION),
    "workers": ("0", "2"),
    "data": tuple(DATA),
    "evaluation": tuple(EVALUATION),
    "writer": tuple(WRITER) if HAS_ASYNC else ("sync",),
}
ROWS = covering_rows(FACTORS, lambda row: True)


def numbers(path: Path) -> list[dict[str, Any]]:
    """All rows of training and validation without what a clock measured."""
    found = rows(path) + rows(path, "valid")
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in found]


def assert_same_tensors(first: Checkpoint, second: Checkpoint) -> None:
    assert first.names == second.names
    for name in first.names:
        assert torch.equal(first.read(name), second.read(name)), name


def flags_of(row: Row, prefix: Path) -> list[str]:
    samples = DATA[str(row["data"])]
    write_tiny_dataset(prefix, 90, 16, samples)
    return [
        *LLAMA,
        *OWN_DATA,
        *("--train-data-path", str(prefix), "--valid-data-path", str(prefix)),
        *LAYOUTS[str(row["layout"])].flags,
        *("--global-batch-size", str(batch_for(str(row["layout"]), 4))),
        *PRECISION[str(row["precision"])],
        *("--num-workers", str(row["workers"])),
        *EVALUATION[str(row["evaluation"])],
        *WRITER[str(row["writer"])],
        *("--save-interval", "100"),
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_five_plus_five_steps_equal_ten_bitwise(
    rank_pool: RankPool, tmp_path: Path, row: Row
) -> None:
    common, size = flags_of(row, tmp_path / "documents"), LAYOUTS[str(row["layout"])].ranks

    def run(save: str, metrics: str, *more: str) -> None:
        place = str(tmp_path / save)
        argv = [*common, "--save", place, "--load", place, *more]
        argv += ["--metrics-jsonl", str(tmp_path / metrics)]
        assert rank_pool.run(size, train_rank, argv=argv) == [0] * size

    run("whole", "whole.jsonl")
    run("parts", "first.jsonl", "--exit-interval", "5")
    run("parts", "second.jsonl")
    second = numbers(tmp_path / "second.jsonl")
    expected = [found for found in numbers(tmp_path / "whole.jsonl") if found["iteration"] > 5]
    evaluations = [10] if row["evaluation"] == "after" else []
    assert [found["iteration"] for found in second] == [6, 7, 8, 9, 10, *evaluations]
    assert second == expected
    whole, parts = open_checkpoint(tmp_path / "whole"), open_checkpoint(tmp_path / "parts")
    assert whole.step == parts.step == 10
    assert_same_tensors(whole, parts)
    for part in ("counters", "schedule", "cursor", "facts"):
        assert whole.state[part] == parts.state[part], part
    masters = [name for name in parts.names if "/master/" in name]
    assert bool(masters) == (row["precision"] == "bf16")
    assert all(parts.dtype(name) == torch.float32 for name in masters)
    epochs = parts.state["facts"]["data_path"]["train"][0]["epochs"]
    assert (epochs > 1) == (row["data"] == "epoch ends")


def test_rows_hold_every_pair_and_the_asynchronous_writer_where_there_is_one() -> None:
    found = {(row["layout"], row["precision"]) for row in ROWS}
    assert found == {(layout, precision) for layout in LAYOUTS for precision in PRECISION}
    assert {row["writer"] for row in ROWS} == {"sync"} | ({"async"} if HAS_ASYNC else set())
