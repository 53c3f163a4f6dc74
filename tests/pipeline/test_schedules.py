"""The one-stage table, the verifier and the runner."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_lite.errors import UserError
from megatron_lite.pipeline.actions import Action, Kind, Schedule, parse_action
from megatron_lite.pipeline.runner import ActionError, Runner
from megatron_lite.pipeline.schedules import SCHEDULES
from megatron_lite.pipeline.verify import ScheduleError, check_schedule


def actions(text: str) -> tuple[Action, ...]:
    return tuple(parse_action(word) for word in text.split())


def table(*ranks: str, placement: Sequence[int], microbatches: int) -> Schedule:
    return Schedule("test", microbatches, tuple(placement), tuple(actions(row) for row in ranks))


TWO_CHUNKS = ("zbv", "v-half", "v-min", "dualpipev")

TWO_RANKS = (
    "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 B0.0 RECV_B0.1 B0.1 REDUCE0 NORM STEP0",
    "RECV_F1.0 F1.0 RECV_F1.1 I1.0 SEND_B1.0 F1.1 I1.1 SEND_B1.1 W1.0 W1.1 REDUCE1 NORM STEP1",
)
V_SHAPE = (
    "F0.0 SEND_F0.0 RECV_F3.0 F3.0 B3.0 SEND_B3.0 RECV_B0.0 B0.0 REDUCE0 REDUCE3 NORM STEP0 STEP3",
    "RECV_F1.0 F1.0 LOCAL_F1.0 F2.0 SEND_F2.0 RECV_B2.0 B2.0 LOCAL_B2.0 B1.0 SEND_B1.0 "
    "REDUCE1 REDUCE2 NORM STEP1 STEP2",
)


def test_one_stage_table_reads_as_expected() -> None:
    text = " ".join(map(str, SCHEDULES["single"](1, 1, 2).ranks[0]))
    assert text == "F0.0 B0.0 F0.1 B0.1 REDUCE0 NORM STEP0"


def test_text_form_round_trips() -> None:
    for row in (*TWO_RANKS, *V_SHAPE):
        assert " ".join(map(str, actions(row))) == row


@pytest.mark.parametrize("text", ["F", "F0", "NORM1", "REDUCE0.1", "X0.0", "STEP", ""])
def test_malformed_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_action(text)


@pytest.mark.parametrize("microbatches", [1, 2, 7])
def test_registered_schedules_are_valid(microbatches: int) -> None:
    for name, build in SCHEDULES.items():
        check_schedule(build(1, 2 if name in TWO_CHUNKS else 1, microbatches))


def test_tables_of_several_stages_are_valid() -> None:
    check_schedule(table(*TWO_RANKS, placement=(0, 1), microbatches=2))
    check_schedule(table(*V_SHAPE, placement=(0, 1, 1, 0), microbatches=1))


@pytest.mark.parametrize("shape", [(2, 1, 4), (1, 2, 4), (1, 1, 0)])
def test_single_refuses_more_than_one_stage(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        SCHEDULES["single"](*shape)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("B0.0 F0.0 F0.1 B0.1 REDUCE0 NORM STEP0", "out of order"),
        ("F0.0 F0.1 B0.1 B0.0 REDUCE0 NORM STEP0", "earlier microbatch"),
        ("F0.0 B0.0 F0.1 REDUCE0 B0.1 NORM STEP0", "after REDUCE0"),
        ("F0.0 B0.0 F0.1 B0.1 NORM REDUCE0 STEP0", "out of order"),
        ("F0.0 B0.0 F0.1 B0.1 REDUCE0 STEP0 NORM", "out of order"),
        ("F0.0 B0.0 F0.1 B0.1 REDUCE0 STEP0", "NORM is missing"),
        ("F0.0 B0.0 F0.1 B0.1 NORM STEP0", "REDUCE0 or STEP0 is missing"),
        ("F0.0 B0.0 F0.1 I0.1 REDUCE0 NORM STEP0", "either B, or I and W"),
        ("F0.0 B0.0 B0.1 REDUCE0 NORM STEP0", "F is missing"),
        ("F0.0 F0.0 B0.0 F0.1 B0.1 REDUCE0 NORM STEP0", "occurs 2 times"),
        ("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 REDUCE0 NORM STEP0", "of 2 microbatches"),
        ("F1.0 F0.0 B0.0 F0.1 B0.1 REDUCE0 NORM STEP0", "does not hold"),
    ],
)
def test_wrong_table_is_refused_with_the_reason(row: str, told: str) -> None:
    with pytest.raises(ScheduleError, match=told):
        check_schedule(table(row, placement=(0,), microbatches=2))


@pytest.mark.parametrize("rank", [0, 1])
def test_every_dropped_action_is_noticed(rank: int) -> None:
    good = table(*TWO_RANKS, placement=(0, 1), microbatches=2)
    for index in range(len(good.ranks[rank])):
        rows = list(good.ranks)
        rows[rank] = rows[rank][:index] + rows[rank][index + 1 :]
        if str(good.ranks[rank][index]).startswith("SEND_B0"):
            continue
        with pytest.raises(ScheduleError):
            check_schedule(replace(good, ranks=tuple(rows)))


def test_ranks_that_wait_for_each_other_are_reported_stuck() -> None:
    rows = list(TWO_RANKS)
    rows[1] = rows[1].replace("RECV_F1.1 I1.0 SEND_B1.0 F1.1", "I1.0 SEND_B1.0 RECV_F1.1 F1.1")
    with pytest.raises(ScheduleError, match=r"rank 0 is stuck at SEND_F0.1"):
        check_schedule(table(*rows, placement=(0, 1), microbatches=2))


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
