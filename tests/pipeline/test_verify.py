"""The verifier: every rule has a table that breaks it, and the tables that must pass do."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_lite.pipeline.actions import Action, Schedule, parse_action
from megatron_lite.pipeline.channels import list_channels
from megatron_lite.pipeline.costs import equal_costs
from megatron_lite.pipeline.schedules import FIXED_CHUNKS, SCHEDULES, Options, forward_only
from megatron_lite.pipeline.simulate import simulate
from megatron_lite.pipeline.verify import ScheduleError, check_schedule
from tests.pipeline.streams import lower_late, runs_on_streams


def actions(text: str) -> tuple[Action, ...]:
    return tuple(parse_action(word) for word in text.split())


def table(*ranks: str, placement: Sequence[int], microbatches: int) -> Schedule:
    return Schedule("test", microbatches, tuple(placement), tuple(actions(row) for row in ranks))


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
        check_schedule(build(1, FIXED_CHUNKS.get(name, 2), microbatches))


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
        ("F0.0 B0.0 B0.1 REDUCE0 NORM STEP0", "F0.1 is missing"),
        ("F0.0 F0.0 B0.0 F0.1 B0.1 REDUCE0 NORM STEP0", "occurs 2 times"),
        ("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 REDUCE0 NORM STEP0", "of 2 microbatches"),
        ("F1.0 F0.0 B0.0 F0.1 B0.1 REDUCE0 NORM STEP0", "does not hold"),
    ],
)
def test_wrong_table_is_refused_with_the_reason(row: str, told: str) -> None:
    with pytest.raises(ScheduleError, match=told):
        check_schedule(table(row, placement=(0,), microbatches=2))


def test_ranks_that_wait_for_each_other_are_reported_stuck() -> None:
    rows = list(TWO_RANKS)
    rows[1] = rows[1].replace("RECV_F1.1 I1.0 SEND_B1.0 F1.1", "I1.0 SEND_B1.0 RECV_F1.1 F1.1")
    with pytest.raises(ScheduleError, match=r"rank 0 is stuck at SEND_F0.1"):
        check_schedule(table(*rows, placement=(0, 1), microbatches=2))


@pytest.mark.parametrize(
    ("rank", "old", "new", "told"),
    [
        (0, "SEND_F0.0 F0.1", "F0.1 SEND_F0.0", "SEND_F does not directly follow"),
        (1, "I1.0 SEND_B1.0 F1.1", "I1.0 F1.1 SEND_B1.0", "SEND_B does not directly follow"),
        (1, "RECV_F1.0 F1.0 RECV_F1.1", "RECV_F1.1 F1.0 RECV_F1.0", "out of order"),
        (1, "W1.0 W1.1", "W1.1 W1.0", "earlier microbatch"),
        (0, "RECV_B0.0 B0.0 RECV_B0.1 B0.1", "RECV_B0.1 RECV_B0.0 B0.0 B0.1", "message 0 is sent"),
        (0, "SEND_F0.1 ", "SEND_F0.1 LOCAL_F0.1 ", "only 11 belong there"),
        (0, "NORM STEP0", "NORM STEP0 RECV_B0.1", "RECV_B0.1 occurs 2 times"),
        (0, "REDUCE0 NORM STEP0", "NORM REDUCE0 STEP0", "out of order"),
        (0, "F0.0 SEND", "UNSHARD0 F0.0 SEND", "without RESHARD0"),
        (0, "B0.1 REDUCE0", "B0.1 RESHARD0 REDUCE0", "without UNSHARD0"),
        (0, "REDUCE0", "UNSHARD0 RESHARD0 REDUCE0", "F0.0 without UNSHARD0"),
    ],
)
def test_wrong_table_of_two_ranks_is_refused(rank: int, old: str, new: str, told: str) -> None:
    rows = list(TWO_RANKS)
    assert old in rows[rank]
    rows[rank] = rows[rank].replace(old, new)
    with pytest.raises(ScheduleError, match=told):
        check_schedule(table(*rows, placement=(0, 1), microbatches=2))


def test_more_activations_than_declared_are_refused() -> None:
    good = table(*TWO_RANKS, placement=(0, 1), microbatches=2)
    check_schedule(replace(good, bounds=(2, 2)))
    with pytest.raises(ScheduleError, match="rank 1: 2 activations alive at once"):
        check_schedule(replace(good, bounds=(2, 1)))


def test_two_ranks_that_both_send_first_are_refused() -> None:
    """The two-node trace: [0SEND_F1, 2RECV_F0, 2F0] against [1SEND_F0, 1RECV_F1, 1F1]."""
    naive = lower_late(SCHEDULES["interleaved"](2, 2, 2))
    text = [" ".join(map(str, row)) for row in naive.ranks]
    assert "SEND_F0.1 RECV_F2.0 F2.0" in text[0]
    assert "SEND_F1.0 RECV_F1.1 F1.1" in text[1]
    with pytest.raises(ScheduleError, match=r"rank 0 is stuck at SEND_F0\.1.*rank 1 is stuck at"):
        check_schedule(naive)
    assert not runs_on_streams(naive, lambda channel: "one for all")


def test_receiving_first_on_odd_ranks_does_not_save_the_trace() -> None:
    naive = lower_late(SCHEDULES["interleaved"](2, 2, 4), odd_receive_first=True)
    with pytest.raises(ScheduleError, match="is stuck at"):
        check_schedule(naive)
    assert not runs_on_streams(naive, lambda channel: frozenset(channel[:2]))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "single"])
@pytest.mark.parametrize(("num_ranks", "microbatches"), [(2, 3), (4, 9)])
def test_tables_run_under_stream_order_with_any_communicators(
    name: str, num_ranks: int, microbatches: int
) -> None:
    schedule = SCHEDULES[name](num_ranks, FIXED_CHUNKS.get(name, 2), microbatches)
    assert runs_on_streams(schedule, lambda channel: "one for all")
    assert runs_on_streams(schedule, lambda channel: frozenset(channel[:2]))
    assert runs_on_streams(schedule, lambda channel: channel)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_evaluation_table_is_forward_only_and_valid(name: str) -> None:
    training = SCHEDULES[name](4, FIXED_CHUNKS.get(name, 2), 8)
    evaluation = forward_only(training.placement, 8)
    check_schedule(evaluation)
    check_schedule(forward_only(training.placement, 8, unshard=True))
    kinds = {str(action)[0] for row in evaluation.ranks for action in row}
    assert kinds <= {"F", "S", "R", "L"}
    bubble = simulate(evaluation, equal_costs(evaluation.num_stages))[1].makespan_bubble
    assert bubble <= 2 * (4 - 1)
    with pytest.raises(ScheduleError):
        check_schedule(replace(evaluation, forward_only=False))


def test_sharded_parameters_are_gathered_around_the_step() -> None:
    schedule = SCHEDULES["zbv"](2, 2, 4, Options(unshard=True))
    check_schedule(schedule)
    row = [str(action) for action in schedule.ranks[0]]
    assert row[0] == "UNSHARD0"
    assert row.index("UNSHARD3") == row.index("F3.0") - 1
    assert row.index("RESHARD3") == row.index("REDUCE3") + 1


def test_equal_tables_have_equal_digests_and_others_not() -> None:
    one, same = SCHEDULES["1f1b"](4, 1, 8), SCHEDULES["1f1b"](4, 1, 8)
    assert one.digest() == same.digest()
    assert one.digest() != SCHEDULES["zb-h1"](4, 1, 8).digest()
    assert one.digest() != replace(one, bounds=(9, 9, 9, 9)).digest()


def test_channels_are_listed_in_one_order_and_per_direction() -> None:
    ring = list_channels(SCHEDULES["interleaved"](2, 2, 2).placement)
    assert [tuple(channel) for channel in ring] == [
        (0, 1, "B"), (0, 1, "F"), (1, 0, "B"), (1, 0, "F"),
    ]  # fmt: skip
    assert [tuple(channel) for channel in list_channels((0, 1, 1, 0))] == [
        (0, 1, "B"), (0, 1, "F"), (1, 0, "B"), (1, 0, "F"),
    ]  # fmt: skip
    assert [tuple(channel) for channel in list_channels((0, 1))] == [(0, 1, "F"), (1, 0, "B")]
