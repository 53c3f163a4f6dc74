"""Random streams (RNG): no worker, no recomputation and no layout draws from another's."""

from pathlib import Path

import pytest

from tests.cases.hops import hash_of
from tests.cases.layouts import EXPERT_LAYOUTS, LAYOUTS, REFERENCE, axis_sizes
from tests.cases.ranks import noise_hashes, residual_hashes
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
    layers = int(ARGV[ARGV.index("--num-layers") + 1])
    assert len(set(hashes)) == layers * 4  # layers x micro-batches, all different
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


NOISE = ["--num-experts", "4", "--moe-ffn-hidden-size", "24", "--moe-input-jitter-eps", "0.01"]
STREAMS = {"tp2-sp-dp2": (LAYOUTS["tp2-sp-dp2"], []), "tp2-ep2": (EXPERT_LAYOUTS["tp2-ep2"], NOISE)}


@pytest.mark.parametrize("name", STREAMS)
def test_c038_masks_and_noise_after_a_load_are_those_of_the_uninterrupted_run(
    rank_pool: RankPool, tmp_path: Path, name: str
) -> None:
    """There is no random state of a rank that could be lost or mixed up.

    A mask or a router's noise is a function of seed, step, layer, sample and position. So a
    checkpoint holds no streams, and a run that was stopped draws what it would have drawn;
    ranks that hold other tokens, as those of an expert group do, draw other numbers.
    """
    layout, noise = STREAMS[name]
    size, flags = layout.ranks, layout.flags
    argv = [*ARGV, *flags, *noise]
    whole = rank_pool.run(size, residual_hashes, argv=argv, after=5)
    saving = ["--save", str(tmp_path), "--save-interval", "100", "--exit-interval", "5"]
    rank_pool.run(size, train_rank, argv=[*argv, *saving])
    resumed = rank_pool.run(size, residual_hashes, argv=[*argv, "--load", str(tmp_path)])
    assert resumed == whole  # rank by rank, layer by layer, with dropout 0.1
    streams = {tuple(hashes) for hashes, _ in whole}
    assert len(streams) >= axis_sizes(layout)["dp"]  # each data rank has masks of its own


def test_c038_noise_differs_between_expert_ranks_and_is_the_same_after_a_load(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    layout = EXPERT_LAYOUTS["tp2-ep2"]
    argv = [*ARGV, *layout.flags, *NOISE]
    whole = rank_pool.run(layout.ranks, noise_hashes, argv=argv, after=5)
    saving = ["--save", str(tmp_path), "--save-interval", "100", "--exit-interval", "5"]
    rank_pool.run(layout.ranks, train_rank, argv=[*argv, *saving])
    resumed = rank_pool.run(layout.ranks, noise_hashes, argv=[*argv, "--load", str(tmp_path)])
    assert resumed == whole  # rank by rank
    assert all(len(set(hashes)) >= 4 * 2 for hashes in whole)  # every layer and microbatch
    # Ranks of an expert group route other tokens: no noise of one is another's.
    drawn = [set(hashes) for hashes in whole]
    assert len(set.union(*drawn)) == sum(map(len, drawn))


def test_c038_five_and_five_steps_of_a_mixture_end_in_the_bits_of_ten(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    layout = EXPERT_LAYOUTS["tp2-ep2"]
    argv = [*ARGV, *layout.flags, *NOISE, "--eval-iters", "0", "--save-interval", "5"]

    def run(name: str, *more: str) -> list[tuple[float, float]]:
        place = ["--save", str(tmp_path / name), "--metrics-jsonl", str(tmp_path / f"{name}.jsonl")]
        rank_pool.run(layout.ranks, train_rank, argv=[*argv, *place, *more])
        return [(row["lm_loss"], row["grad_norm"]) for row in rows(tmp_path / f"{name}.jsonl")]

    whole = run("whole")
    rest = run("rest", "--load", str(tmp_path / "whole"), "--ckpt-step", "5")
    assert len(whole) == 10 and rest == whole[5:]
    assert hash_of(tmp_path / "rest") == hash_of(tmp_path / "whole")
    quiet = [*argv, "--moe-input-jitter-eps", "0", "--train-iters", "1"]
    metrics = tmp_path / "quiet.jsonl"
    rank_pool.run(layout.ranks, train_rank, argv=[*quiet, "--metrics-jsonl", str(metrics)])
    assert rows(metrics)[0]["lm_loss"] != whole[0][0]  # the noise is there
