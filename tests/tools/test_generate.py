"""Sampling from a checkpoint: the text does not depend on the layout of the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lite.errors import UserError
from megatron_lite.mesh.launch import RunStatus, WorldInfo
from tests.pool import RankPool
from tests.train.program import LLAMA, RUN, train_rank
from tools.generate import build_parser, cut_ranks, run

STEPS = ["--train-iters", "2", "--save-interval", "2", "--num-layers", "4", "--eval-iters", "0"]
TIED = [word for word in LLAMA if word != "--untie-embeddings-and-output-weights"]
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
LAYOUTS = {
    "tp2": (2, [TP, "2"]),
    "pp2": (2, [PP, "2"]),
    "pp4": (4, [PP, "4"]),
    "pp2-tp2": (4, [PP, "2", TP, "2"]),
}


def generate_rank(words: list[str], out: str, rank: int, world_size: int) -> int:
    """One rank of the tool; what it prints goes to a file per rank."""
    import contextlib

    info = WorldInfo(rank, world_size, rank, world_size, "", "test")
    with Path(f"{out}-{rank}").open("w") as file, contextlib.redirect_stdout(file):
        return run(build_parser().parse_args(words), info, RunStatus())


@pytest.fixture(scope="module", params=["tied", "untied"])
def checkpoint(
    request: pytest.FixtureRequest, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Saved by a pipeline whose flags the tool must not take over."""
    root: Path = tmp_path_factory.mktemp("run")
    model = TIED if request.param == "tied" else LLAMA
    argv = [*model, *RUN, *STEPS, "--save", str(root), PP, "2", "--pipeline-schedule", "zbv"]
    assert rank_pool.run(2, train_rank, argv=argv) == [0, 0]
    return root


def generated(rank_pool: RankPool, root: Path, ranks: int, words: list[str], *more: str) -> str:
    out = root.parent / f"{root.name}-text"
    argv = ["--load", str(root), "--prompt", "5 17 3", "--prompt", "8", "--device", "cpu"]
    argv += ["--max-new-tokens", "9", *words, *more]
    assert rank_pool.run(ranks, generate_rank, words=argv, out=str(out)) == [0] * ranks
    assert all(not Path(f"{out}-{rank}").read_text() for rank in range(1, ranks))
    return Path(f"{out}-0").read_text()


@pytest.mark.parametrize("choice", [["--greedy"], ["--seed", "7"]], ids=["greedy", "drawn"])
def test_every_layout_generates_the_text_of_one_process(
    rank_pool: RankPool, checkpoint: Path, choice: list[str]
) -> None:
    alone = generated(rank_pool, checkpoint, 1, [], *choice)
    assert len(alone.split()) == 3 + 9 + 1 + 9
    for name, (ranks, words) in LAYOUTS.items():
        assert generated(rank_pool, checkpoint, ranks, words, *choice) == alone, name


@pytest.mark.parametrize(
    ("ranks", "words", "sizes"),
    [(1, [], (1, 1)), (4, [], (4, 1)), (4, [PP, "2"], (2, 2)), (4, [PP, "2", TP, "2"], (2, 2))],
)
def test_tensor_ranks_are_what_the_pipeline_leaves(
    ranks: int, words: list[str], sizes: tuple[int, int]
) -> None:
    args = build_parser().parse_args(["--load", "x", "--prompt", "a", *words])
    assert cut_ranks(args, ranks) == sizes


@pytest.mark.parametrize("words", [[PP, "3"], [TP, "2"], [PP, "0"], [PP, "2", TP, "4"]])
def test_a_layout_that_is_not_all_ranks_is_refused(words: list[str]) -> None:
    args = build_parser().parse_args(["--load", "x", "--prompt", "a", *words])
    with pytest.raises(UserError, match=r"--pipeline-model-parallel-size"):
        cut_ranks(args, 4)
