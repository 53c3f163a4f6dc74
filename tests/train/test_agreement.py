"""Ranks that were started differently are told before anything is reduced."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.pool import RankError, RankPool
from tests.train.program import LLAMA, RUN, train_rank


def train_as_told(common: Sequence[str], own: Sequence[Sequence[str]], rank: int) -> int:
    """One rank of a run whose ranks have flags of their own."""
    return train_rank([*common, *own[rank]], rank, len(own))


@pytest.mark.parametrize(
    ("own", "told"),
    [
        (["--seed", "7"], "seed: 1234 on rank 0, 7 on rank 1"),
        (["--train-iters", "1"], "train_iters: 2 on rank 0, 1 on rank 1"),
        (["--lr", "1"], r"lr: 0\.01 on rank 0, 1\.0 on rank 1"),
        (["--hidden-size", "64"], "hidden_size: 32 on rank 0, 64 on rank 1"),
        (["--tensor-model-parallel-size", "2"], "tensor_model_parallel_size: 1 on rank 0, 2"),
    ],
)
def test_other_flags_on_one_rank_are_named(rank_pool: RankPool, own: list[str], told: str) -> None:
    common = [*LLAMA, *RUN, "--train-iters", "2"]
    with pytest.raises(RankError, match=rf"flags of rank 1 differ(.|\n)*{told}"):
        rank_pool.run(2, train_as_told, timeout_s=30, common=common, own=[[], own])


def test_other_data_under_the_same_flags_is_named(rank_pool: RankPool, tmp_path: Path) -> None:
    from tests.data_pipeline.corpora import write_dataset

    paths = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        documents = [[(i + rank) % 80 for i in range(40)]] * 20
        paths.append(write_dataset(tmp_path / str(rank) / "x", documents))
    common = [*LLAMA, *(word for word in RUN if word != "--mock-data")]
    with pytest.raises(RankError, match="the data of rank 1 differ"):
        own = [["--data-path", path] for path in paths]
        rank_pool.run(2, train_as_told, timeout_s=30, common=common, own=own)


def test_paths_of_a_node_may_differ(rank_pool: RankPool, tmp_path: Path) -> None:
    common = [*LLAMA, *RUN, "--train-iters", "1", "--eval-iters", "0"]
    own = [["--data-cache-path", str(tmp_path / name)] for name in ("a", "b")]
    assert rank_pool.run(2, train_as_told, common=common, own=own) == [0, 0]
