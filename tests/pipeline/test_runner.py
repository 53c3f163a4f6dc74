"""The runner: order, counts, and what is said when a handler fails."""

import pytest

from megatron_lite.errors import UserError
from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.runner import ActionError, Runner
from megatron_lite.pipeline.schedules import SCHEDULES


def test_runner_executes_the_table_in_order_and_counts() -> None:
    seen: list[str] = []
    runner = Runner(rank=0)
    schedule = SCHEDULES["single"](1, 1, 3)
    runner.run(schedule.ranks[0], {kind: lambda a: seen.append(str(a)) for kind in Kind})
    assert seen == [str(action) for action in schedule.ranks[0]]
    assert runner.counts[Kind.F] == runner.counts[Kind.B] == 3
    assert runner.counts[Kind.STEP] == 1
    assert runner.current is None


def test_runner_names_rank_step_and_action_of_a_failure() -> None:
    def fail(action: Action) -> None:
        if action.microbatch == 1:
            raise FloatingPointError("inf")

    handlers = {kind: fail for kind in Kind}
    with pytest.raises(ActionError, match=r"rank 5, step 8: F0\.1 \(action 2 of 7\) failed: inf"):
        Runner(rank=5).run(SCHEDULES["single"](1, 1, 2).ranks[0], handlers, step=7)


def test_runner_leaves_messages_for_the_user_alone() -> None:
    def refuse(action: Action) -> None:
        raise UserError("token id 300 is outside the vocabulary of 256")

    with pytest.raises(UserError, match=r"^token id 300"):
        Runner(rank=0).run(SCHEDULES["single"](1, 1, 1).ranks[0], {kind: refuse for kind in Kind})


def test_a_rank_says_where_it_is_and_for_whom_it_waits() -> None:
    exchange = {"waits": ""}
    runner = Runner(3, waiting=lambda: exchange["waits"])
    said = []

    def stall(action: Action) -> None:
        said.append(runner.where())
        exchange["waits"] = "the input from pipeline rank 1"
        said.append(runner.where())
        exchange["waits"] = ""

    assert runner.where() == ""
    runner.run([Action(Kind.F, 2, 5)], {Kind.F: stall}, step=6)
    assert said == [
        "step 7: F2.5 (action 0 of 1)",
        "step 7: F2.5 (action 0 of 1) waits for the input from pipeline rank 1",
    ]
    assert runner.where() == ""
