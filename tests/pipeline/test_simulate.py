"""The simulator's figures on tables small enough to work out by hand."""

from fractions import Fraction

import pytest

from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.costs import Costs, equal_costs
from megatron_lite.pipeline.passes import (
    drop_padding,
)
from megatron_lite.pipeline.schedules import SCHEDULES, Options
from megatron_lite.pipeline.simulate import live_counts, simulate


def test_figures_of_two_ranks_by_hand() -> None:
    """1F1B, p=2, m=2, F=1, I=W=1: rank 0 works 0-2 and 4-6, 7-9; rank 1 from 1 to 7."""
    timeline, report = simulate(SCHEDULES["1f1b"](2, 1, 2), equal_costs(2))
    assert report.makespan == 9
    assert report.ideal == 6
    assert report.makespan_bubble == 3
    assert report.bubble_fraction == Fraction(1, 3)
    assert report.bubble_over_ideal == Fraction(1, 2)
    assert report.span_bubble == 3
    assert report.peak_activations == (2, 1)
    assert report.num_messages == 4
    spans = {
        str(slot.action): (slot.start, slot.end)
        for slot in timeline.slots
        if slot.action.microbatch is not None
    }
    assert spans == {
        "F0.0": (0, 1), "F0.1": (1, 2), "F1.0": (1, 2), "B1.0": (2, 4), "B0.0": (4, 6),
        "F1.1": (4, 5), "B1.1": (5, 7), "B0.1": (7, 9),
    }  # fmt: skip


def test_messages_take_latency_and_occupy_their_channel() -> None:
    costs = Costs((1, 1), (1, 1), (1, 1), latency=10, transfer=3)
    timeline, _ = simulate(SCHEDULES["gpipe"](2, 1, 2), costs)
    forward = [(m.start, m.end) for m in timeline.messages if m.action.kind is Kind.SEND_F]
    # Sent at 1 and 2; the second waits until the first has left the channel at 4.
    assert forward == [(1, 14), (4, 17)]
    starts = {str(slot.action): slot.start for slot in timeline.slots}
    assert (starts["F1.0"], starts["F1.1"]) == (14, 17)


def test_hops_inside_a_rank_are_free() -> None:
    costs = equal_costs(2, 1, latency=100, transfer=100)
    timeline, report = simulate(SCHEDULES["interleaved"](1, 2, 3), costs)
    assert report.makespan_bubble == 0
    assert timeline.messages == []


def test_unequal_stages_make_the_slowest_rank_the_measure() -> None:
    costs = Costs((1, 3), (1, 3), (1, 3))
    _, report = simulate(SCHEDULES["gpipe"](2, 1, 4), costs)
    assert report.ideal == 4 * (3 + 9) / 2
    # Rank 1 starts after one F and is then never idle; rank 0 ends with its last B.
    assert report.makespan == 1 + 4 * 9 + 2
    assert report.makespan_bubble == report.makespan - report.ideal


def test_reductions_run_beside_the_computation_and_end_the_step() -> None:
    costs = Costs((1, 1), (1, 1), (1, 1), reduce=5, norm=2, step=7)
    _, report = simulate(SCHEDULES["gpipe"](2, 1, 3), costs)
    _, bare = simulate(SCHEDULES["gpipe"](2, 1, 3), equal_costs(2))
    # The last stage reduces while stage 0 still computes: only rank 0's reduction shows.
    assert report.makespan == bare.makespan + 5
    assert report.step_time == report.makespan + 2 + 7
    assert report.span_bubble == bare.span_bubble


def test_gathering_of_parameters_delays_the_first_forward() -> None:
    costs = Costs((1,), (1,), (1,), unshard=4)
    _, report = simulate(SCHEDULES["1f1b"](1, 1, 2, Options(unshard=True)), costs)
    assert report.makespan == 4 + 6


def test_memory_counts_from_forward_to_weight_gradient() -> None:
    row = [
        Action(Kind(kind), 0, mb)
        for kind, mb in [("F", 0), ("F", 1), ("I", 0), ("I", 1), ("W", 0), ("B", 2), ("W", 1)]
        if kind != "B"
    ]
    assert [counts[:2] for counts in live_counts(row)] == [
        (1, 0), (2, 0), (2, 1), (2, 2), (2, 2), (1, 1),
    ]  # fmt: skip


def test_deferred_weight_gradients_are_counted_apart() -> None:
    _, report = simulate(SCHEDULES["zb-h1"](4, 1, 8), equal_costs(4))
    assert report.peak_activations == (4, 4, 4, 4)
    assert report.peak_deferred == (1, 2, 3, 4)


def test_floats_and_fractions_agree() -> None:
    schedule = SCHEDULES["zbv"](4, 2, 9)
    exact = simulate(schedule, equal_costs(8, 2, 1, Fraction(6, 5), Fraction(4, 5)))[1]
    rough = simulate(schedule, equal_costs(8, 2, 1.0, 1.2, 0.8))[1]
    assert float(exact.makespan) == pytest.approx(float(rough.makespan))
    assert isinstance(exact.makespan, (int, Fraction))


def test_whole_numbers_keep_the_ratios() -> None:
    costs = Costs((Fraction(1, 3), 1), (Fraction(1, 2), 1), (1, 1), latency=Fraction(1, 4))
    whole = costs.in_whole_numbers()
    assert (whole.forward, whole.input_grad, whole.latency) == ((4, 12), (6, 12), 3)
    floats = Costs((0.5,), (1,), (1,))
    assert floats.in_whole_numbers() is floats


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf")])
def test_impossible_costs_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        Costs((1,), (bad,), (1,))
    with pytest.raises(ValueError, match="finite and not negative"):
        Costs((1,), (1,), (1,), latency=bad)


def test_costs_of_other_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="costs of 3 stages for 2"):
        simulate(SCHEDULES["1f1b"](2, 1, 2), equal_costs(3))


def test_dropping_microbatches_leaves_the_order() -> None:
    rows = [[Action(Kind.F, 0, mb) for mb in (0, 1, 2)] + [Action(Kind.B, 0, mb) for mb in (0, 2)]]
    assert [str(a) for a in drop_padding(rows, 2)[0]] == ["F0.0", "F0.1", "B0.0"]
