"""Pairs in tables: which schedules have them, what is refused, what they cost, files, pictures."""

import itertools
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_lite.errors import UserError
from megatron_lite.pipeline.actions import Action, Kind, Schedule, pair, parse_action
from megatron_lite.pipeline.costs import Costs
from megatron_lite.pipeline.schedules import (
    FIXED_CHUNKS,
    PAIRED,
    SCHEDULES,
    Options,
    build_schedule,
)
from megatron_lite.pipeline.simulate import peak_live, simulate
from megatron_lite.pipeline.table_files import read_table, write_table
from megatron_lite.pipeline.verify import ScheduleError, check_schedule
from megatron_lite.train.passes import backward_passes
from tests.pipeline.mutations import interpret, mutants, pair_mutants
from tests.pipeline.streams import runs_on_streams
from tools.show_schedule import main

PAIRS = Options(paired=True)
SIZE = ["--pipeline-size", "2", "--microbatches", "4"]
SEVERAL = [name for name in PAIRED if name != "single"]


def paired(name: str, ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    return SCHEDULES[name](ranks, FIXED_CHUNKS.get(name, chunks), microbatches, PAIRS)


def text(row: tuple[Action, ...]) -> str:
    return " ".join(map(str, row))


def pairs_of(schedule: Schedule) -> list[tuple[Action, ...]]:
    return [action.halves for row in schedule.ranks for action in row if action.halves]


def test_one_rank_has_one_extra_warm_up_forward() -> None:
    assert text(paired("single", 1, 3).ranks[0]) == (
        "F0.0 F0.1&B0.0 F0.2&B0.1 B0.2 REDUCE0 NORM STEP0"
    )
    assert paired("single", 1, 3).bounds == (2,)
    assert text(paired("single", 1, 1).ranks[0]) == "F0.0 B0.0 REDUCE0 NORM STEP0"


@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 8, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_table_with_pairs_is_valid_within_its_bound(ranks: int, microbatches: int) -> None:
    for name, chunks in itertools.product(SEVERAL, (1, 2, 3)):
        if chunks != FIXED_CHUNKS.get(name, chunks):
            continue
        schedule = paired(name, ranks, microbatches, chunks)
        check_schedule(schedule)
        assert runs_on_streams(schedule, lambda channel: channel)
        for forward, backward in pairs_of(schedule):
            assert forward.microbatch != backward.microbatch
        if name == "1f1b":
            assert tuple(peak_live(row)[0] for row in schedule.ranks) == schedule.bounds
        for row in schedule.ranks:
            assert sorted(set(backward_passes(row))) == [
                *schedule.stages_of(schedule.ranks.index(row))
            ]


def test_every_forward_after_the_warm_up_has_a_partner() -> None:
    for rank, row in enumerate(paired("1f1b", 4, 12).ranks):
        alone = [action for action in row if action.kind is Kind.F]
        assert len(alone) == 2 * (3 - rank) + 1
    plain = SCHEDULES["dualpipev"](4, 2, 12)
    both = paired("dualpipev", 4, 12)
    assert plain.placement == both.placement
    for plain_row, row in zip(plain.ranks, both.ranks, strict=True):
        # The plan is the same; only what was one after the other is now one action.
        computed = {Kind.F, Kind.I, Kind.W, Kind.B}
        singles = [single for action in row for single in action.singles]
        assert [a for a in singles if a.kind in computed] == [
            a for a in plain_row if a.kind in computed
        ]
    assert len(pairs_of(both)) == sum(
        2 * (12 - 8 + rank + 1) + (3 - rank) for rank in range(4)
    )  # phases 4 and 5


def test_other_schedules_have_no_pairs() -> None:
    with pytest.raises(UserError, match="schedule zbv has no pairs; schedules with pairs: single"):
        build_schedule("zbv", 2, 2, 4, PAIRS)


def test_no_backward_in_a_pair_is_the_last_of_its_stage() -> None:
    """Else it would complete buckets and start reductions beside the forward half."""
    for name, ranks, m in itertools.product(SEVERAL, (1, 2, 3, 4), (1, 2, 5, 8)):
        for _, backward in pairs_of(paired(name, ranks, m)):
            assert backward.microbatch is not None and backward.microbatch < m - 1


def with_row(schedule: Schedule, rank: int, row: str) -> Schedule:
    rows = list(schedule.ranks)
    rows[rank] = tuple(parse_action(word) for word in row.split())
    return replace(schedule, ranks=tuple(rows))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("F0.0 F0.1&B0.1 F0.2&B0.0 B0.2", "halves of one microbatch, the B needs the F"),
        ("F0.0 F0.2&B0.0 F0.1&B0.1 B0.2", "earlier microbatch"),
        ("F0.0 F0.1&B0.0 F0.2&B0.0 B0.2", "B0.0 occurs 2 times"),
        ("F0.0 F0.1&B0.0 B0.1 F0.1 F0.2 B0.2", "F0.1 occurs 2 times"),
        ("F0.0 F0.1 F0.2&B0.0 B0.1 B0.2", "3 activations alive at once, the declared bound is 2"),
        ("F0.0 F1.1&B0.0 F0.2&B0.1 B0.2", "F1.1 of a stage it does not hold"),
        ("F0.0 F0.1&B0.0 F0.3&B0.1 B0.2", "F0.3 of 3 microbatches"),
        ("F0.0 F0.1&B0.0 B0.1 B0.2", "F0.2 is missing"),
        ("F0.0 F0.1&I0.0 F0.2&I0.1 W0.0 W0.1", "I0.2 is missing (needs either B"),
    ],
)
def test_a_broken_pair_is_refused(row: str, told: str) -> None:
    schedule = with_row(paired("single", 1, 3), 0, f"{row} REDUCE0 NORM STEP0")
    with pytest.raises(ScheduleError, match=re.escape(told)):
        check_schedule(schedule)


def test_an_input_gradient_may_be_half_of_a_pair() -> None:
    row = "F0.0 F0.1&I0.0 W0.0 F0.2&I0.1 W0.1 I0.2 W0.2 REDUCE0 NORM STEP0"
    check_schedule(with_row(paired("single", 1, 3), 0, row))


def test_outputs_of_both_halves_leave_before_the_next_computation() -> None:
    schedule = paired("1f1b", 2, 4)
    row = text(schedule.ranks[1])
    late = row.replace("SEND_B1.0 ", "").replace("SEND_B1.1", "SEND_B1.0 SEND_B1.1")
    with pytest.raises(ScheduleError, match="SEND_B does not directly follow"):
        check_schedule(with_row(schedule, 1, late))


@pytest.mark.parametrize("word", ["F0.1&F0.0", "B0.0&F0.1", "F0.1&W0.0", "F0.1&", "PAIR", "F0&B0"])
def test_other_pairs_are_no_actions(word: str) -> None:
    with pytest.raises(ValueError, match=r"right is F and B|not an action|with microbatch"):
        parse_action(word)


@pytest.mark.parametrize("name", SEVERAL)
def test_damaged_pairs_are_refused_or_train_the_same_numbers(name: str) -> None:
    schedule = paired(name, 2, 5)
    trained = interpret(schedule)
    total = survivors = 0
    damaged = itertools.chain(pair_mutants(schedule), mutants(schedule, stride=3))
    for what, mutant in damaged:
        total += 1
        try:
            check_schedule(mutant)
        except ScheduleError:
            continue
        survivors += 1
        assert interpret(mutant) == trained, what
    print(f"{name}: {survivors} of {total} pass, all equivalent")
    assert total > 400
    assert survivors <= 0.03 * total  # of so few actions more are neighbours that commute


def test_pairs_train_what_the_same_schedule_trains_without_them() -> None:
    for name, m in itertools.product(SEVERAL, (3, 8)):
        plain = SCHEDULES[name](2, FIXED_CHUNKS.get(name, 2), m)
        assert interpret(paired(name, 2, m))[:3] == interpret(plain)[:3]


def test_the_digest_covers_pairs_and_their_halves() -> None:
    schedule = paired("single", 1, 4)
    digests = {schedule.digest(), SCHEDULES["single"](1, 1, 4).digest()}
    for _, mutant in pair_mutants(schedule):
        digests.add(mutant.digest())
    assert len(digests) == 2 + len(list(pair_mutants(schedule)))


@pytest.mark.parametrize("ending", ["json", "csv"])
@pytest.mark.parametrize("name", SEVERAL)
def test_files_keep_pairs(tmp_path: Path, name: str, ending: str) -> None:
    schedule = paired(name, 2, 5)
    path = tmp_path / f"t.{ending}"
    write_table(schedule, path)
    found = read_table(path)
    assert found.ranks == schedule.ranks
    assert found.has_pairs
    if ending == "json":
        assert found.digest() == schedule.digest()


def test_a_file_of_computations_with_pairs_is_completed(tmp_path: Path) -> None:
    schedule = paired("dualpipev", 2, 6)
    computed = [
        [
            str(action)
            for action in row
            if action.singles[0].kind in (Kind.F, Kind.I, Kind.W, Kind.B)
        ]
        for row in schedule.ranks
    ]
    path = tmp_path / "t.csv"
    path.write_text("".join(",".join(row) + "\n" for row in computed))
    assert read_table(path).ranks == schedule.ranks


F, B = Action(Kind.F, 0, 1), Action(Kind.B, 0, 0)


def test_alone_computation_and_exchange_follow_one_another() -> None:
    costs = Costs((3,), (4,), (2,), exchanges=((5, 6, 7),))
    times = {kind: costs.time_of(Action(kind, 0, 0)) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)}
    assert times == {Kind.F: 8, Kind.I: 10, Kind.W: 9, Kind.B: 19}
    assert costs.work([0]) == 27
    assert Costs((3,), (4,), (2,)).time_of(F) == 3


@pytest.mark.parametrize(
    ("costs", "time"),
    [
        (((3, 2), (4, 3)), 7),  # computation is the bottleneck
        (((3, 9), (4, 3)), 12),  # a half's own chain: 3 + 9, as long as both exchanges
        (((1, 9), (2, 8)), 17),  # exchange
        (((1, 9), (2, 1)), 10),  # the forward's own chain
        (((1, 1), (9, 2)), 11),  # the backward's
        (((3, 0), (4, 0)), 7),  # nothing to hide
    ],
)
def test_a_pair_takes_its_slowest_resource_or_half(
    costs: tuple[tuple[int, int], tuple[int, int]], time: int
) -> None:
    (f, xf), (b, xb) = costs
    found = Costs((f,), (b,), (0,), exchanges=((xf, xb, 0),)).time_of(pair(F, B))
    assert found == time == max(f + b, xf + xb, f + xf, b + xb)


def play_layers(halves: list[list[tuple[int, Fraction]]]) -> Fraction:
    """Two chains of (resource, time) on two resources that serve one chain at a time.

    A resource that is free takes the chain that has more left to do.
    """
    free, ready = [Fraction(0), Fraction(0)], [Fraction(0), Fraction(0)]
    left = [list(half) for half in halves]
    while any(left):
        waiting = [k for k in (0, 1) if left[k]]
        start = {k: max(ready[k], free[left[k][0][0]]) for k in waiting}
        k = min(waiting, key=lambda k: (start[k], -sum(time for _, time in left[k])))
        resource, time = left[k].pop(0)
        ready[k] = free[resource] = start[k] + time
    return max(ready)


@pytest.mark.parametrize("layers", [4, 16])
@pytest.mark.parametrize(
    "costs", [(10, 5, 20, 5), (10, 10, 10, 10), (10, 20, 20, 20), (3, 1, 9, 9)]
)
def test_layers_of_a_pair_reach_its_time_but_for_one(
    layers: int, costs: tuple[int, int, int, int]
) -> None:
    """Every layer: attention, dispatch, experts, combine, and backwards the other way."""
    f, xf, b, xb = (Fraction(cost, 2 * layers) for cost in costs)
    forward = [(0, f), (1, xf)] * 2 * layers
    backward = [(1, xb), (0, b)] * 2 * layers
    found = play_layers([forward, backward])
    form = max(costs[0] + costs[2], costs[1] + costs[3], sum(costs[:2]), sum(costs[2:]))
    assert form <= found <= form + 2 * (f + xf + b + xb)


@pytest.mark.parametrize("costs", [(1, 1, 1, 0, 0), (10, 12, 8, 5, 6), (10, 12, 8, 40, 20)])
def test_1f1b_with_pairs_has_a_closed_form(costs: tuple[int, ...]) -> None:
    """All but the warm-up of the last rank and the ramps are pairs; times are a stage's."""
    f, i, w, xf, xi = costs
    alone, together = (f + xf) + (i + w + xi), max(f + i + w, xf + xi, f + xf, i + w + xi)
    for name, v in (("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3)):
        for p, m in itertools.product((1, 2, 3, 5), (1, 2, 4)):
            stages = p * v
            times = Costs(
                (f,) * stages, (i,) * stages, (w,) * stages, exchanges=((xf, xi, 0),) * stages
            )
            timeline, report = simulate(paired(name, p, m * p, v), times)
            pairs = max(0, m * p * v - (v - 1) * p - 1)
            assert report.makespan == pairs * together + v * p * alone
            slots = [slot for slot in timeline.slots if slot.rank == p - 1 and slot.action.halves]
            assert len(slots) == pairs


def test_hiding_pays_and_costs_nothing_without_exchanges() -> None:
    for name, v in (("1f1b", 1), ("interleaved", 2), ("dualpipev", 2)):
        stages = 4 * v
        one = (Fraction(1, v),) * stages
        exchange = (Fraction(1, v), Fraction(1, v), 0)
        for times, gain in (
            (Costs(one, one, one), 0),
            (Costs(one, one, one, exchanges=(exchange,) * stages), 1),
        ):
            plain = simulate(SCHEDULES[name](4, v, 16), times)[1].makespan
            hidden = simulate(paired(name, 4, 16), times)[1].makespan
            assert hidden < 0.8 * plain if gain else hidden <= 1.05 * plain


def test_exchanges_are_of_the_same_stages() -> None:
    with pytest.raises(ValueError, match="exchanges of 2 stages for 1 stages"):
        Costs((1,), (1,), (1,), exchanges=((1, 1, 1),) * 2)
    with pytest.raises(ValueError, match="not negative"):
        Costs((1,), (1,), (1,), exchanges=((1, -1, 1),))
    scaled = Costs((1,), (1,), (1,), exchanges=((Fraction(1, 2), 1, 0),)).in_whole_numbers()
    assert scaled.exchanges == ((1, 2, 0),)


def test_the_tool_draws_both_halves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.svg"
    argv = [
        "1f1b",
        "--pipeline-size",
        "2",
        "--microbatches",
        "4",
        "--paired",
        "--exchange",
        "1,1,0",
    ]
    assert main([*argv, "--width", "100", "--svg", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("     &") and "B" in line for line in lines)
    tips = [
        title.text or ""
        for title in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}title")
    ]
    assert sum(tip.startswith("F") for tip in tips) == 8
    assert sum(tip.startswith("B") for tip in tips) == 8
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["schedules"][0]
    assert found["makespan"] == 3 * 3 + 2 * 5  # (m - 1) pairs, p (F + B)
    assert found["peak_activations"] == [4, 2]


def test_the_tool_refuses_pairs_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zbv", *SIZE, "--paired"]) == 2
    assert "has no pairs" in capsys.readouterr().err
    assert main(["1f1b", *SIZE, "--exchange", "1,1"]) == 2
    assert "three numbers" in capsys.readouterr().err
