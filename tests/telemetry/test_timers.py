"""Timers sum, reset, gather once and refuse misuse."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from megatron_lite.telemetry.timers import STEP_TIMERS, Timers


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_times_add_up_until_they_are_read() -> None:
    clock = Clock()
    timers = Timers({"step": 0, "rare": 0}, 0, clock)
    for seconds in (1.0, 2.0):
        with timers.measure("step"):
            clock.now += seconds
        clock.now += 10.0
    assert timers.read_ms(iterations=2) == [1500.0, -1.0]
    assert timers.read_ms() == [-1.0, -1.0]


def test_timers_above_the_log_level_read_no_clock() -> None:
    def forbidden() -> float:
        raise AssertionError("clock read")

    timers = Timers({"step": 0, "fine": 2}, 1, forbidden)
    with timers.measure("fine"):
        pass
    assert timers.names == ("step",)


def test_the_device_is_synchronized_before_each_reading() -> None:
    calls: list[str] = []
    timers = Timers({"step": 0}, 0, synchronize=lambda: calls.append("sync"))
    with timers.measure("step"):
        assert calls == ["sync"]
    assert calls == ["sync", "sync"]


def test_a_table_is_one_gather_of_one_vector() -> None:
    clock = Clock()
    timers = Timers({"step": 0, "save": 0}, 0, clock)
    with timers.measure("step"):
        clock.now += 0.5
    gathered: list[Sequence[float]] = []

    def gather(values: Sequence[float]) -> Sequence[Sequence[float]]:
        gathered.append(values)
        return [values, [700.0, -1.0]]

    assert timers.table(gather).splitlines()[1].endswith(": (500.00, 700.00)")
    assert gathered == [[500.0, -1.0]]


def test_without_a_measured_timer_nothing_is_gathered() -> None:
    def gather(values: Sequence[float]) -> Sequence[Sequence[float]]:
        raise AssertionError("gathered")

    assert Timers({"fine": 2}, 0).table(gather) == ""


def test_two_threads_time_the_same_part_at_once() -> None:
    timers = Timers({"exchange": 0}, 0)
    inside = threading.Barrier(2)

    def wait() -> None:
        with timers.measure("exchange"):
            inside.wait(timeout=30)

    other = threading.Thread(target=wait)
    other.start()
    wait()
    other.join()
    (milliseconds,) = timers.read_ms()
    assert milliseconds > 0


def test_misuse_is_told() -> None:
    timers = Timers(STEP_TIMERS, 2)
    with pytest.raises(KeyError, match="not in the table"):
        timers.start("unheard-of")
    with pytest.raises(RuntimeError, match="not running"):
        timers.stop("optimizer")
    timers.start("optimizer")
    with pytest.raises(RuntimeError, match="already running"):
        timers.start("optimizer")
