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


def check_rates(stride: int, stride_of_two_chunks: int) -> None:
    """99 of 100 of the whole set are refused, and of no schedule's less than 98.5."""
    all_mutants = all_survivors = 0
    for name in NAMES:
        chunks = FIXED_CHUNKS.get(name, 2)
        step = stride if chunks == 1 else stride_of_two_chunks
        total, survivors = count_survivors(name, 4, 16, step)
        assert survivors <= 0.015 * total, name
        print(f"{name}: {survivors} of {total} pass, all equivalent")
        all_mutants += total
        all_survivors += survivors
    assert all_mutants >= 4000
    assert all_survivors <= all_mutants // 100


def test_damaged_tables_are_refused_or_equivalent() -> None:
    check_rates(101, 601)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_tens_of_thousands_of_damages_are_refused_or_equivalent() -> None:
    """Every seventh of schedules of one stage per rank, every 29th of those of two."""
    check_rates(7, 29)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_every_damage_to_a_small_table_is_refused_or_equivalent(name: str) -> None:
    total, survivors = count_survivors(name, 2, 4, stride=1)
    assert total > 1000
    assert survivors < 0.02 * total  # of so few actions more pairs are neighbours that commute


def test_dropped_and_repeated_actions_never_pass() -> None:
    schedule = SCHEDULES["zbv"](3, 2, 5)
    for what, mutant in mutants(schedule, stride=3):
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


def test_every_schedule_of_four_stages_trains_the_same_numbers() -> None:
    """Losses, gradients that I writes and those that W writes, each in one order of sums."""
    results = []
    for name in NAMES:
        for num_ranks, chunks in ((4, 1), (2, 2), (1, 4)):
            if FIXED_CHUNKS.get(name, chunks) == chunks:
                results.append(interpret(SCHEDULES[name](num_ranks, chunks, 6))[:3])
    assert len(results) >= 16
    assert all(result == results[0] for result in results)
