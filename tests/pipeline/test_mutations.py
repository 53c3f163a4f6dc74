"""Damaged tables: at least 99 of 100 are refused, and the others train the same numbers."""

import pytest

from megatron_lite.pipeline.actions import Kind
from megatron_lite.pipeline.schedules import FIXED_CHUNKS, SCHEDULES
from megatron_lite.pipeline.verify import ScheduleError, check_schedule
from tests.pipeline.mutations import interpret, mutants

NAMES = [name for name in SCHEDULES if name != "single"]


def count_survivors(name: str, num_ranks: int, microbatches: int, stride: int) -> tuple[int, int]:
    """Return how many mutants there are and how many pass, each of which is proven equal."""
    schedule = SCHEDULES[name](num_ranks, FIXED_CHUNKS.get(name, 2), microbatches)
    check_schedule(schedule)
    trained = interpret(schedule)
    total = survivors = 0
    for what, mutant in mutants(schedule, stride):
        total += 1
        try:
            check_schedule(mutant)
        except ScheduleError:
            continue
        survivors += 1
        assert interpret(mutant) == trained, what
    return total, survivors


@pytest.mark.parametrize("name", NAMES)
def test_damaged_tables_are_refused_or_equivalent(name: str) -> None:
    total, survivors = count_survivors(name, 4, 8, stride=151)
    assert total > 500
    assert survivors <= total // 100


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_every_damage_to_a_small_table_is_refused_or_equivalent(name: str) -> None:
    total, survivors = count_survivors(name, 2, 4, stride=1)
    assert total > 1000
    assert survivors < 0.02 * total  # of so few actions more pairs are neighbours that commute


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_every_damage_is_refused_or_equivalent(name: str) -> None:
    total, survivors = count_survivors(name, 4, 8, stride=3)
    assert total > 20_000
    assert survivors <= total // 100


def test_dropped_and_repeated_actions_never_pass() -> None:
    schedule = SCHEDULES["zbv"](3, 2, 5)
    for what, mutant in mutants(schedule, stride=10**9):
        if what.split()[0] in ("drop", "repeat", "give"):
            with pytest.raises(ScheduleError):
                check_schedule(mutant)


def test_the_interpreter_notices_a_permuted_accumulation() -> None:
    schedule = SCHEDULES["zb-h1"](2, 1, 3)
    row = list(schedule.ranks[1])
    first, second = (k for k, action in enumerate(row[:-4]) if action.kind is Kind.W)
    row[first], row[second] = row[second], row[first]
    rows = (schedule.ranks[0], tuple(row))
    damaged = type(schedule)("damaged", 3, schedule.placement, rows)
    with pytest.raises((AssertionError, KeyError)):
        assert interpret(damaged) == interpret(schedule)
