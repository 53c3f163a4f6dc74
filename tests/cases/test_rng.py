"""Random streams (RNG): no worker, no recomputation and no layout draws from another's."""

from pathlib import Path

import pytest

from tests.cases.layouts import LAYOUTS, REFERENCE
from tests.cases.ranks import residual_hashes
from tests.pool import RankPool
from tests.train.program import LLAMA, RUN, rows, train_rank

# Dropout 0.1 on hidden states and on attention probabilities.
ARGV = [*LLAMA, *RUN]
RECOMPUTE = {
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "full-block": (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    ),
}


@pytest.mark.parametrize("layout", ["tp2", "tp4"])
def test_c039_loader_workers_change_no_bit_of_the_replicated_stream(
    rank_pool: RankPool, layout: str
) -> None:
    found = {}
    for workers in ("0", "2", "4"):
        argv = [*ARGV, *LAYOUTS[layout].flags, "--num-workers", workers]
        ranks = rank_pool.run(LAYOUTS[layout].ranks, residual_hashes, argv=argv)
        assert all(rank == ranks[0] for rank in ranks)
        found[workers] = ranks[0]
    hashes, _ = found["0"]
    assert len(set(hashes)) == 2 * 4  # layers x micro-batches, all different
    assert found["2"] == found["4"] == found["0"]


@pytest.mark.parametrize("layout", [REFERENCE, "tp2", "tp2-sp-dp2"])
def test_c040_recomputation_changes_no_bit(
    rank_pool: RankPool, tmp_path: Path, layout: str
) -> None:
    def run(name: str, words: str) -> list[tuple[float, float]]:
        metrics = tmp_path / f"{name}.jsonl"
        argv = [*ARGV, "--train-iters", "2", *LAYOUTS[layout].flags, *words.split()]
        argv += ["--eval-iters", "0", "--metrics-jsonl", str(metrics)]
        rank_pool.run(LAYOUTS[layout].ranks, train_rank, argv=argv)
        return [(row["lm_loss"], row["grad_norm"]) for row in rows(metrics)]

    wanted = run("none", "")
    assert len(set(wanted)) == 2
    for name, words in RECOMPUTE.items():
        assert run(name, words) == wanted, name
