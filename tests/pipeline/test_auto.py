"""The cost-aware schedule: valid, within its memory, never slower than a fixed one."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.errors import UserError
from megatron_lite.pipeline.costs import Costs, equal_costs
from megatron_lite.pipeline.schedules import FIXED_CHUNKS, SCHEDULES, Options, build_schedule
from megatron_lite.pipeline.simulate import simulate
from megatron_lite.pipeline.verify import check_schedule

FIXED = [name for name in SCHEDULES if name not in ("single", "auto")]


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, int, int, Costs, int | None]:
    """Ranks, chunks, microbatches, unequal integer costs, memory limit."""
    p, v, m = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 7))
    times = st.lists(st.integers(0, 9), min_size=p * v, max_size=p * v).map(tuple)
    costs = Costs(
        draw(times), draw(times), draw(times),
        latency=draw(st.integers(0, 5)), transfer=draw(st.integers(0, 3)),
    )  # fmt: skip
    return p, v, m, costs, draw(st.one_of(st.none(), st.integers(2, 8)))


@settings(max_examples=25)
@given(problems())
def test_auto_is_valid_and_never_slower_than_a_fixed_schedule(
    problem: tuple[int, int, int, Costs, int | None],
) -> None:
    p, v, m, costs, limit = problem
    schedule = SCHEDULES["auto"](p, v, m, Options(costs=costs, memory_limit=limit))
    check_schedule(schedule)
    best = simulate(schedule, costs)[1]
    if limit is not None:
        assert max(best.peak_activations) <= limit
    for name in FIXED:
        if FIXED_CHUNKS.get(name, v) != v:
            continue
        other = simulate(SCHEDULES[name](p, v, m), costs)[1]
        if limit is None or max(other.peak_activations) <= limit:
            assert best.makespan <= other.makespan, name


def test_auto_gains_over_every_fixed_schedule_where_messages_take_time() -> None:
    costs = equal_costs(4, 1, 2, 2, 2, latency=1)
    chosen = simulate(SCHEDULES["auto"](4, 1, 12, Options(costs=costs, memory_limit=5)), costs)[1]
    assert chosen.makespan < 90
    assert max(chosen.peak_activations) <= 5
    for name in ("1f1b", "zb-h1", "interleaved-zb"):
        assert simulate(SCHEDULES[name](4, 1, 12), costs)[1].makespan >= 90


@pytest.mark.parametrize(("limit", "most"), [(4, 4), (3, 3), (Fraction(5, 2), Fraction(5, 2))])
def test_less_memory_is_kept_to(limit: Fraction, most: Fraction) -> None:
    options = Options(costs=equal_costs(8, 2), memory_limit=limit)
    schedule = SCHEDULES["auto"](4, 2, 12, options)
    check_schedule(schedule)
    _, report = simulate(schedule, equal_costs(8, 2))
    assert max(report.peak_activations) <= most
    assert max(schedule.bounds) <= most * 2


def test_a_limit_per_rank_is_kept_per_rank() -> None:
    options = Options(memory_limit=(4, 2, 2, 1))
    report = simulate(SCHEDULES["auto"](4, 1, 8, options), equal_costs(4))[1]
    assert all(
        peak <= limit for peak, limit in zip(report.peak_activations, (4, 2, 2, 1), strict=True)
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (Options(memory_limit=Fraction(1, 2)), "no order keeps a memory limit"),
        (Options(memory_limit=(1, 2)), "2 memory limits for 4 ranks"),
        (Options(memory_limit=float("nan")), "positive number"),
        (Options(memory_limit=-1), "positive number"),
    ],
)
def test_impossible_limits_are_one_message(options: Options, told: str) -> None:
    with pytest.raises(UserError, match=told):
        build_schedule("auto", 4, 1, 8, options)


def test_without_a_limit_the_least_memory_wins_among_equals() -> None:
    report = simulate(SCHEDULES["auto"](8, 1, 24), equal_costs(8))[1]
    assert report.makespan == 79
    assert max(report.peak_activations) == 8
