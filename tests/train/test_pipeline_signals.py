"""A signal in the middle of a pipeline's step: the step ends, all ranks save, all ranks leave."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_lite.train.passes import Passes
from tests.cases.ranks import program
from tests.pool import fork_ranks, run_ranks
from tests.train.program import LAYOUTS, LLAMA, RUN

DEADLINE_S = 90.0


def signalled_program(argv: Sequence[str], rank: int, step: int) -> int:
    """The main program; one rank gets SIGTERM before its first backward pass of a step."""
    original = Passes._backward

    def backward(self: Passes, place: tuple[int, int]) -> None:
        if self.options.step == step and place[1] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, place)

    if int(os.environ["RANK"]) != rank:
        return program(argv)
    with patch.object(Passes, "_backward", backward):
        return program(argv)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", ["pp2", "zbv"])
def test_a_signal_to_one_rank_lets_the_step_end_and_all_ranks_save(
    tmp_path: Path, layout: str, rank: int
) -> None:
    ranks, words = LAYOUTS[layout]
    argv = [*LLAMA, *RUN, *words, "--save", str(tmp_path), "--save-interval", "100"]
    exits = fork_ranks(ranks, signalled_program, argv, rank, 2, timeout=DEADLINE_S)
    assert [found.code for found in exits] == [75, 75], exits
    # It came in step 3, whose vote was cast; that of step 4 stops all ranks.
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    status = json.loads((tmp_path / "exit_status.json").read_text())
    assert (status["code"], status["step"]) == (75, 4)
    assert "Traceback" not in "".join(found.stderr for found in exits)


def test_a_pipeline_stopped_by_a_signal_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its losses are those of a run that nobody stopped."""
    ranks, words = LAYOUTS["zbv"]
    argv = [*LLAMA, *RUN, *words, "--train-iters", "5"]

    def losses(path: Path) -> dict[int, float]:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return {row["iteration"]: row["lm_loss"] for row in rows if row["kind"] == "train"}

    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    saved = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    told = [*argv, *saved, "--save-interval", "100", "--metrics-jsonl", str(stopped)]
    exits = fork_ranks(ranks, signalled_program, told, 1, 2, timeout=DEADLINE_S)
    assert [found.code for found in exits] == [75, 75], exits
    for again in (told, [*argv, "--metrics-jsonl", str(whole)]):
        exits = run_ranks(ranks, again)
        assert [found.code for found in exits] == [0, 0], exits
    assert len(losses(whole)) == 5
    assert losses(stopped) == losses(whole)
