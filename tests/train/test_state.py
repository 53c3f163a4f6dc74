"""Counters, the opening reduction, timers in a run."""

import contextlib
import io
from collections.abc import Sequence

import pytest
import torch

from megatron_lite.errors import DamagedError
from megatron_lite.mesh.groups import local_group
from megatron_lite.train.denominators import Denominators, start_denominators
from megatron_lite.train.state import TrainState
from tests.pool import RankPool
from tests.train.program import LLAMA, RUN, train_rank


def test_counters_round_trip() -> None:
    state = TrainState(iteration=3, consumed_samples=12, updates=2, skipped_iterations=1)
    assert TrainState.from_dict(state.to_dict()) == state


@pytest.mark.parametrize(
    "change", [{"iteration": -1}, {"iteration": 1.0}, {"iteration": True}, {"other": 1}]
)
def test_strange_counters_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(DamagedError):
        TrainState.from_dict({**TrainState().to_dict(), **change})


def test_missing_counter_is_refused() -> None:
    stored = TrainState().to_dict()
    del stored["updates"]
    with pytest.raises(DamagedError, match="updates"):
        TrainState.from_dict(stored)


def test_denominator_of_an_empty_batch_is_one() -> None:
    zero, nine = torch.zeros((), dtype=torch.float64), torch.full((), 9.0, dtype=torch.float64)
    found = start_denominators({"lm": zero, "z": nine}, local_group("dp_cp"))
    assert float(found["lm"]) == 1.0
    assert float(found["z"]) == 9.0
    assert found.sums.tolist() == [0.0, 9.0]
    assert list(found) == ["lm", "z"]


def test_the_reduction_is_waited_for_at_the_first_use() -> None:
    class Work:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

        def is_completed(self) -> bool:
            return False

    work = Work()
    found = Denominators(("lm",), torch.full((1,), 4.0), work)
    assert work.waits == 0
    assert float(found["lm"]) + float(found["lm"]) == 8.0
    assert work.waits == 1


def test_layers_and_timers_are_printed_by_the_last_rank(rank_pool: RankPool) -> None:
    argv = [*LLAMA, *RUN, "--train-iters", "1", "--eval-iters", "0", "--timing-log-level", "2"]
    first, last = rank_pool.run(2, printed, argv=argv)
    assert first == ""
    assert " > layers total 4" in last
    table = last.split("(min, max) time across ranks (ms):")[1]
    assert "    forward-compute ................................: (" in table
    assert "    optimizer ......................................: (" in table


def printed(argv: Sequence[str], rank: int, world_size: int) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        train_rank(argv, rank, world_size)
    return stream.getvalue()
