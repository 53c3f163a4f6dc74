"""The save interval that loses least, against the published table and by search."""

import math

import pytest

from megatron_lite.checkpoint.interval import (
    expected_mean_time,
    interval_steps,
    optimal_interval,
    wasted_share,
    young_interval,
)

HOUR, DAY = 3600.0, 86400.0
# mean time between failures -> pause -> (interval in seconds, share of time lost)
TABLE = {
    2.78 * HOUR: {1: (141, 0.014), 5: (316, 0.032), 30: (775, 0.077), 120: (1550, 0.155)},
    17.1 * HOUR: {1: (351, 0.006), 5: (785, 0.013), 30: (1922, 0.031), 120: (3844, 0.062)},
    30 * DAY: {1: (38 * 60, 0.001), 5: (85 * 60, 0.002), 30: (3.5 * HOUR, 0.005),
               120: (6.9 * HOUR, 0.010)},
}  # fmt: skip
CASES = [(mean, pause) for mean, row in TABLE.items() for pause in row]


@pytest.mark.parametrize(("mean", "pause"), CASES)
def test_the_table_of_intervals_and_waste(mean: float, pause: int) -> None:
    interval, waste = TABLE[mean][pause]
    assert young_interval(pause, mean) == pytest.approx(interval, rel=0.015)
    assert wasted_share(young_interval(pause, mean), pause, mean) == pytest.approx(waste, abs=6e-4)
    # Daly's terms change it by about five percent at most here.
    assert optimal_interval(pause, mean) == pytest.approx(interval, rel=0.06)


@pytest.mark.parametrize(("mean", "pause"), [*CASES, (1000.0, 100.0)])
def test_no_other_interval_loses_less_time(mean: float, pause: float) -> None:
    """Daly's exact cost of work in pieces with exponential failures and no restart time."""

    def cost(interval: float) -> float:
        return mean * math.expm1((interval + pause) / mean) / interval

    best = cost(optimal_interval(pause, mean))
    for factor in (0.7, 0.9, 1.1, 1.4):
        assert best < cost(factor * optimal_interval(pause, mean))


def test_a_pause_as_long_as_the_time_between_failures_has_an_answer() -> None:
    assert optimal_interval(2000.0, 1000.0) == 1000.0


def test_failures_grow_with_the_ranks_and_are_never_ruled_out() -> None:
    assert expected_mean_time(16384) == pytest.approx(3.05 * HOUR, rel=0.01)
    assert expected_mean_time(1) == 30 * DAY


def test_steps_are_at_least_one_and_not_shorter_than_a_save_in_the_background() -> None:
    assert interval_steps(1e-3, 10.0, 5.0) == 1
    assert interval_steps(1.0, 2.78 * HOUR, 1.0) == round(optimal_interval(1.0, 2.78 * HOUR))
    assert interval_steps(1.0, 2.78 * HOUR, 1.0, least_s=900.0) == 900
