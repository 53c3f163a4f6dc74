"""Data order on resume (DATARES): global batch k has the same samples, whoever reads it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cases.conftest import Resumed
from tests.cases.layouts import LAYOUTS
from tests.pool import RankPool
from tests.train.program import LLAMA, RUN, rows, train_rank

EIGHT = [*LLAMA, *RUN, "--global-batch-size", "8", "--fp64", "--eval-iters", "0"]


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp-dp2"])
def test_c042_a_resumed_run_reads_on_at_its_cursor(resumed: Resumed, layout: str) -> None:
    whole, rest = resumed(layout)
    assert [[index for index, _ in step] for step in whole.samples] == [
        list(range(4 * k, 4 * k + 4)) for k in range(10)
    ]
    assert rest.samples == whole.samples[5:]
    assert len({row for step in whole.samples for _, row in step}) == 40


def run(
    pool: RankPool, directory: Path, cut: tuple[str, int, int], *more: str
) -> tuple[list[list[Sequence[int]]], list[float]]:
    """Samples and losses per iteration; the cut is layout, micro-batch size, workers."""
    layout, micro, workers = cut
    size = LAYOUTS[layout].ranks if layout in LAYOUTS else int(layout.removeprefix("dp"))
    words = LAYOUTS[layout].flags if layout in LAYOUTS else ()
    argv = [*EIGHT, *words, "--micro-batch-size", str(micro), "--num-workers", str(workers)]
    argv += ["--debug-dump", str(directory / "dump"), *more]
    argv += ["--metrics-jsonl", str(directory / "metrics.jsonl")]
    pool.run(size, train_rank, argv=argv)
    samples = [
        [(row["consumed_index"], row["dataset_index"]) for row in json.loads(text)["samples"]]
        for text in (path.read_text() for path in sorted((directory / "dump").glob("*.json")))
    ]
    return samples, [row["lm_loss"] for row in rows(directory / "metrics.jsonl")]


def test_c044_global_batches_and_losses_do_not_depend_on_ranks_sizes_and_workers(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    samples, losses = run(rank_pool, tmp_path / "one", ("1", 8, 0))
    assert [[index for index, _ in step] for step in samples] == [
        list(range(8 * k, 8 * k + 8)) for k in range(10)
    ]
    assert len({row for step in samples for _, row in step}) == 80
    for name, cut in {"a": ("dp2", 1, 2), "b": ("tp2-sp-dp2", 2, 0)}.items():
        found, their_losses = run(rank_pool, tmp_path / name, cut)
        assert found == samples, cut
        assert their_losses == pytest.approx(losses, rel=1e-10)
    save = ["--save", str(tmp_path / "save"), "--save-interval", "5"]
    first, head = run(rank_pool, tmp_path / "four", ("dp4", 2, 2), *save, "--exit-interval", "5")
    assert first == samples[:5]
    for name, cut in {"c": ("dp2", 4, 0), "d": ("1", 2, 2)}.items():
        load = ["--load", str(tmp_path / "save")]
        later, tail = run(rank_pool, tmp_path / name, cut, *load)
        assert first + later == samples, cut
        assert head + tail == pytest.approx(losses, rel=1e-10)
