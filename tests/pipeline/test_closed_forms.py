"""Verifier and simulator over all schedules against what is known of them exactly.

The covering sample runs always; the whole range p <= 16, m <= 64, v <= 4 is marked slow.
Costs are integers per stage, so that equality means equality; a bubble of a whole rank's
costs F, I, W is that of v stages, hence the division by v.
"""

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.pipeline.actions import Action, Kind, Schedule
from megatron_lite.pipeline.costs import equal_costs
from megatron_lite.pipeline.schedules import FIXED_CHUNKS, SCHEDULES, Options
from megatron_lite.pipeline.simulate import Report, simulate
from megatron_lite.pipeline.verify import check_schedule

GOLDEN = Path(__file__).parents[1] / "data" / "schedule_golden.json"
COST_SETS = ((1, 1, 1), (10, 12, 8), (100, 133, 67), (10, 8, 10))
FIXED = [name for name in SCHEDULES if name not in ("single", "auto")]


@dataclass(frozen=True)
class Form:
    """A closed form, of a whole rank's costs.

    Attributes:
        holds: (p, m) for which it is exact.
        span, makespan: (p, F, I, W) -> bubble times v.
        peak: (p, r, v, m) -> activations of rank r, in stages.
        equal_only: exact only for F = I = W.
    """

    holds: Callable[[int, int], bool]
    span: Callable[[int, int, int, int], int]
    makespan: Callable[[int, int, int, int], int]
    peak: Callable[[int, int, int, int], int]
    equal_only: bool = False


def whole_backward(p: int, f: int, i: int, w: int) -> int:
    return (p - 1) * (f + i + w)


FORMS = {
    "gpipe": Form(lambda p, m: m >= 1, whole_backward, whole_backward, peak=lambda p, r, v, m: m),
    "1f1b": Form(
        lambda p, m: m >= 1, whole_backward, whole_backward, peak=lambda p, r, v, m: min(m, p - r)
    ),
    "interleaved": Form(
        lambda p, m: m % p == 0,
        whole_backward,
        whole_backward,
        peak=lambda p, r, v, m: min(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1),
    ),
    "zb-h1": Form(
        lambda p, m: m >= p,
        lambda p, f, i, w: (p - 1) * (f + i - w),
        lambda p, f, i, w: (p - 1) * max(f + i - w, f),
        peak=lambda p, r, v, m: p,
    ),
    "zb-h2": Form(
        lambda p, m: m >= 2 * p - 1,
        lambda p, f, i, w: (p - 1) * max(f + i - 2 * w, 0),
        lambda p, f, i, w: (p - 1) * max(f + i - 2 * w, f),
        peak=lambda p, r, v, m: 2 * p - 1,
    ),
    "interleaved-zb": Form(
        lambda p, m: m % p == 0,
        lambda p, f, i, w: (p - 1) * (f + i - w),
        lambda p, f, i, w: (p - 1) * max(f + i - w, f),
        peak=lambda p, r, v, m: v * p,
    ),
    "zbv": Form(
        lambda p, m: m >= 2 * p - 1,
        lambda p, f, i, w: 0,
        lambda p, f, i, w: (p - 1) * f,
        peak=lambda p, r, v, m: 2 * p,
        equal_only=True,
    ),
}


def check_point(name: str, p: int, v: int, m: int, costs: Sequence[int]) -> None:
    """Verify and simulate one table and compare it with the forms and bounds."""
    schedule = SCHEDULES[name](p, v, m)
    check_schedule(schedule)
    _, report = simulate(schedule, equal_costs(p * v, 1, *costs))
    where = f"{name} p={p} v={v} m={m} {costs}"
    f, i, w = costs
    assert report.ideal == m * v * (f + i + w), where
    peaks = [peak * v for peak in report.peak_activations]
    assert all(peak <= bound for peak, bound in zip(peaks, schedule.bounds, strict=True)), where
    form = FORMS.get(name)
    if form is None or not form.holds(p, m) or (form.equal_only and len(set(costs)) > 1):
        return
    assert report.span_bubble == form.span(p, f, i, w), where
    assert report.makespan_bubble == form.makespan(p, f, i, w), where
    assert peaks == [form.peak(p, r, v, m) for r in range(p)], where


def chunks_of(name: str) -> Sequence[int]:
    return (FIXED_CHUNKS[name],) if name in FIXED_CHUNKS else (1, 2, 3, 4)


def covering_sample(name: str) -> Iterator[tuple[int, int, int, Sequence[int]]]:
    """(p, v, m, costs): every p of the list with every kind of m; v and costs in turn."""
    turn = 0
    for p in (1, 2, 3, 4, 6, 8, 11, 16):
        for m in sorted({1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p, 4 * p, 64}):
            if 1 <= m <= 64 and p * m <= 512:
                chunks = chunks_of(name)
                yield p, chunks[turn % len(chunks)], m, COST_SETS[turn % 3 * (turn % 2)]
                turn += 1
    yield 16, chunks_of(name)[-1], 64, COST_SETS[0]


@pytest.mark.parametrize("name", FIXED)
def test_sample_of_tables_is_valid_and_equals_the_closed_forms(name: str) -> None:
    for p, v, m, costs in covering_sample(name):
        check_point(name, p, v, m, costs)


@pytest.mark.parametrize("costs", COST_SETS)
@pytest.mark.parametrize("name", FORMS)
def test_closed_forms_hold_for_unequal_costs(name: str, costs: Sequence[int]) -> None:
    for p in (2, 4, 8):
        check_point(name, p, chunks_of(name)[-1], 2 * p, costs)


@settings(max_examples=60)
@given(
    name=st.sampled_from([name for name in FORMS if name != "zbv"]),
    p=st.integers(1, 6),
    groups=st.integers(2, 4),
    times=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
)
def test_closed_forms_hold_for_any_costs_with_w_at_most_f(
    name: str, p: int, groups: int, times: tuple[int, int, int]
) -> None:
    """A W longer than an F delays the I behind it; undivided schedules have no such limit."""
    f, i, w = times
    if w > f and name not in ("gpipe", "1f1b", "interleaved"):
        f, w = w, f
    check_point(name, p, chunks_of(name)[-1], groups * p, (f, i, w))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("name", FIXED)
def test_every_table_is_valid_and_equals_the_closed_forms(name: str, p: int) -> None:
    gc.disable()  # tables have no cycles; visiting their actions takes a third of the time
    try:
        for v in chunks_of(name):
            for m in range(1, 65):
                check_point(name, p, v, m, COST_SETS[0])
    finally:
        gc.enable()


def simulate_whole(name: str, p: int, v: int, m: int, costs: Sequence[Any]) -> Report:
    return simulate(SCHEDULES[name](p, v, m), equal_costs(p * v, v, *costs))[1]


@pytest.mark.parametrize(
    ("name", "makespan", "span", "uneven"),
    [
        ("gpipe", 93, 21, 21),
        ("1f1b", 93, 21, 21),
        ("interleaved", 82.5, 10.5, 10.5),
        ("zb-h1", 79, 7, 9.8),
        ("zb-h2", 79, 0, 7),
        ("interleaved-zb", 75.5, 3.5, 4.9),
        ("zbv", 75.5, 0, 4.2),
        ("v-half", 80.5, 8.5, 11.5),
        ("v-min", 85.5, 13.5, 28.8),
        ("dualpipev", 75.5, 3.5, 5.1),
    ],
)
def test_eight_ranks_and_24_microbatches(
    name: str, makespan: float, span: float, uneven: float
) -> None:
    """Equal costs: makespan, span bubble; F, I, W = 1, 1.2, 0.8: makespan bubble."""
    v = FIXED_CHUNKS.get(name, 2)
    equal = simulate_whole(name, 8, v, 24, (1, 1, 1))
    assert (equal.makespan, equal.span_bubble) == (Fraction(makespan), Fraction(span))
    costs = (Fraction(1), Fraction(6, 5), Fraction(4, 5))
    assert simulate_whole(name, 8, v, 24, costs).makespan_bubble == Fraction(str(uneven))


@pytest.mark.parametrize(
    ("p", "m", "costs", "bubble"),
    [
        (4, 12, (1, 1, 1), 3),
        (8, 24, (1, 1, 1), 7),
        (8, 24, (Fraction(1), Fraction(6, 5), Fraction(4, 5)), Fraction(43, 5)),
    ],
)
def test_dualpipev_whose_pairs_end_together_has_the_bubble_of_zb_h1(
    p: int, m: int, costs: Sequence[Any], bubble: Any
) -> None:
    """As an overlapped pair hands on both outputs at its end; ours sends after each half."""
    schedule = SCHEDULES["dualpipev"](p, 2, m)
    assert pairs_makespan(schedule, [Fraction(cost) / 2 for cost in costs]) == bubble + m * sum(
        costs
    )


def pairs_makespan(schedule: Schedule, costs: Sequence[Fraction]) -> Fraction:
    """Play a table in which F directly followed by B is one block."""
    f, i, w = costs
    cost = {Kind.F: f, Kind.I: i, Kind.W: w, Kind.B: i + w}
    p, last = len(schedule.ranks), schedule.num_stages - 1
    blocks = [_blocks(row, is_last=rank == p - 1) for rank, row in enumerate(schedule.ranks)]
    free, position = [Fraction(0)] * p, [0] * p
    ends: dict[tuple[bool, int, int], Fraction] = {}
    while any(at < len(row) for at, row in zip(position, blocks, strict=True)):
        for rank, row in enumerate(blocks):
            while position[rank] < len(row):
                needs = []
                for action in row[position[rank]]:
                    forward = action.kind is Kind.F
                    source = (action.stage or 0) + (-1 if forward else 1)
                    if action.kind is not Kind.W and 0 <= source <= last:
                        needs.append((forward, source, action.microbatch or 0))
                if any(need not in ends for need in needs):
                    break
                start = max([free[rank], *(ends[need] for need in needs)])
                free[rank] = start + sum(cost[action.kind] for action in row[position[rank]])
                for action in row[position[rank]]:
                    if action.kind is not Kind.W:
                        key = (action.kind is Kind.F, action.stage or 0, action.microbatch or 0)
                        ends[key] = free[rank]
                position[rank] += 1
    return max(free)


def _blocks(row: Sequence[Action], is_last: bool) -> list[list[Action]]:
    work = [action for action in row if action.kind.value in "FIWB"]
    blocks: list[list[Action]] = []
    first_kept_apart = not is_last
    for action in work:
        if action.kind is Kind.B and blocks and [a.kind for a in blocks[-1]] == [Kind.F]:
            if first_kept_apart:
                blocks[-1].append(action)
                continue
            first_kept_apart = True  # the turn's first pair is run apart
        blocks.append([action])
    return blocks


@pytest.mark.parametrize("row", json.loads(GOLDEN.read_text())["rows"], ids=lambda row: (
    f"{row['schedule']}-p{row['ranks']}-m{row['microbatches']}-{'-'.join(row['costs'])}"
))  # fmt: skip
def test_schedules_without_a_closed_form_equal_the_golden_table(row: dict[str, Any]) -> None:
    costs = [Fraction(cost) for cost in row["costs"]]
    report = simulate_whole(row["schedule"], row["ranks"], 2, row["microbatches"], costs)
    found = (report.makespan_bubble, report.span_bubble, max(report.peak_activations))
    wanted = tuple(Fraction(row[key]) for key in ("makespan_bubble", "span_bubble", "peak"))
    assert found == wanted


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("v-half", lambda p: (p + 2) // 2),
        ("v-min", lambda p: (p + 4) // 3),
        ("dualpipev", lambda p: Fraction(2 * p + 1, 2)),
    ],
)
def test_memory_of_v_schedules_stays_within_the_papers_bounds(
    name: str, bound: Callable[[int], Any]
) -> None:
    for p in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16):
        report = simulate_whole(name, p, 2, 3 * p, (1, 1, 1))
        assert max(report.peak_activations) <= bound(p)


@pytest.mark.parametrize("name", [*FIXED, "auto"])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_every_number_of_microbatches_runs(name: str, p: int) -> None:
    for m in sorted({1, p - 1, p, p + 1, 2 * p, 4 * p}):
        v = FIXED_CHUNKS.get(name, 2)
        check_schedule(SCHEDULES[name](p, v, m))


@pytest.mark.parametrize("group", [4, 5, 6, 8, 100])
@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
def test_groups_of_any_size_from_the_number_of_ranks_on_run(name: str, group: int) -> None:
    for m in (1, 3, 4, 7, 8, 13, 16):
        check_schedule(SCHEDULES[name](4, 2, m, Options(group_size=group)))
    with pytest.raises(ValueError, match=r"groups of 3 microbatches .* 4, the number of ranks"):
        SCHEDULES[name](4, 2, 8, Options(group_size=3))


@pytest.mark.parametrize("name", FIXED_CHUNKS)
def test_a_wrong_number_of_chunks_is_refused_with_the_legal_one(name: str) -> None:
    if name == "single":
        return
    with pytest.raises(ValueError, match=f"{name}: 5 stages per rank; {FIXED_CHUNKS[name]} is"):
        SCHEDULES[name](2, 5, 4)
    with pytest.raises(ValueError, match="0 microbatches"):
        SCHEDULES[name](2, FIXED_CHUNKS[name], 0)
