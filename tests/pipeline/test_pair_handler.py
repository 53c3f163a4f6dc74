"""Both halves of a pair at the same time: proof that they are, failures, and stalls."""

import threading

import pytest

from megatron_lite.errors import UserError
from megatron_lite.mesh.lane import Lane
from megatron_lite.pipeline.actions import Action, Kind, parse_action
from megatron_lite.pipeline.pairs import pair_handler
from megatron_lite.pipeline.runner import ActionError, Handler, Runner
from megatron_lite.pipeline.schedules import SCHEDULES, Options

ROW = tuple(parse_action(word) for word in ["F0.0", "F0.1&B0.0", "F0.2&B0.1", "B0.2"])


def run(handlers: dict[Kind, Handler], lane: Lane | None) -> Runner:
    runner = Runner(rank=3)
    runner.run(ROW, {**handlers, Kind.PAIR: pair_handler(handlers, lane)}, step=6)
    return runner


def test_halves_run_at_the_same_time_and_the_forward_in_one_lasting_lane() -> None:
    lane, meeting = Lane(), threading.Barrier(2, timeout=30)
    seen: dict[str, threading.Thread] = {}

    def handle(action: Action) -> None:
        if str(action) not in ("F0.0", "B0.2"):
            meeting.wait()  # both halves have to come here
        seen[str(action)] = threading.current_thread()
        assert lane.is_here() == (str(action) in ("F0.1", "F0.2"))

    runner = run({Kind.F: handle, Kind.B: handle}, lane)
    lane.close()
    assert runner.counts == {Kind.F: 3, Kind.B: 3}
    assert seen["F0.1"] is seen["F0.2"] is not threading.current_thread()
    assert {seen[name] for name in ("F0.0", "B0.0", "B0.1", "B0.2")} == {threading.current_thread()}
    seen["F0.1"].join(timeout=30)
    assert not seen["F0.1"].is_alive()


def test_without_a_lane_the_forward_comes_first() -> None:
    seen: list[str] = []

    def handle(action: Action) -> None:
        seen.append(str(action))

    run({Kind.F: handle, Kind.B: handle}, None)
    assert seen == ["F0.0", "F0.1", "B0.0", "F0.2", "B0.1", "B0.2"]


@pytest.mark.parametrize("half", ["F0.2", "B0.1"])
@pytest.mark.parametrize("has_lane", [True, False])
def test_a_failure_names_rank_step_pair_and_half(half: str, has_lane: bool) -> None:
    def fail(action: Action) -> None:
        if str(action) == half:
            raise FloatingPointError("inf")

    told = rf"rank 3, step 7: F0\.2&B0\.1 \(action 2 of 4\) failed: {half}: inf"
    lane = Lane() if has_lane else None
    with pytest.raises(ActionError, match=told) as caught:
        run({Kind.F: fail, Kind.B: fail}, lane)
    cause = caught.value.__cause__
    assert cause is not None
    assert isinstance(cause.__cause__, FloatingPointError)
    if lane is not None:
        lane.close()


@pytest.mark.parametrize("half", ["F0.2", "B0.1"])
def test_messages_for_the_user_pass_from_both_halves(half: str) -> None:
    def refuse(action: Action) -> None:
        if str(action) == half:
            raise UserError("token id 300 is outside the vocabulary of 256")

    lane = Lane()
    with pytest.raises(UserError, match=r"^token id 300"):
        run({Kind.F: refuse, Kind.B: refuse}, lane)
    lane.close()


def test_a_failed_backward_does_not_wait_for_a_forward_that_hangs() -> None:
    lane, never = Lane(), threading.Event()

    def forward(action: Action) -> None:
        if str(action) == "F0.1":
            never.wait(60)  # for ranks that have gone

    def backward(action: Action) -> None:
        raise ConnectionError("a peer has gone")

    with pytest.raises(ActionError, match=r"B0\.0: a peer has gone"):
        run({Kind.F: forward, Kind.B: backward}, lane)
    assert not never.is_set()
    never.set()
    lane.close()


def test_a_rank_that_stalls_in_a_pair_says_so_and_for_whom_it_waits() -> None:
    lane, waits = Lane(), {"for": ""}
    runner = Runner(3, waiting=lambda: waits["for"])
    said = []

    def forward(action: Action) -> None:
        waits["for"] = "the input from pipeline rank 1"
        said.append(runner.where())
        waits["for"] = ""

    handlers: dict[Kind, Handler] = {Kind.F: forward, Kind.B: lambda action: None}
    table = SCHEDULES["single"](1, 1, 2, Options(paired=True)).ranks[0][1:2]
    runner.run(table, {Kind.PAIR: pair_handler(handlers, lane)}, step=6)
    lane.close()
    place = "step 7: F0.1&B0.0 (action 0 of 1)"
    assert said == [f"{place} waits for the input from pipeline rank 1"]


def test_the_lane_keeps_nothing_of_a_finished_errand() -> None:
    import gc
    import weakref

    class Kept:
        pass

    lane, kept = Lane(), Kept()
    gone = weakref.ref(kept)
    errand = lane.start(lambda kept=kept: None)  # type: ignore[misc]
    errand.wait()
    lane.start(lambda: None).wait()
    del errand, kept
    gc.collect()
    assert gone() is None
    lane.close()
