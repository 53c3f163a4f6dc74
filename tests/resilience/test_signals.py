"""Signals set a flag only; all ranks reach the same order; exit codes are as documented."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_lite.resilience.signals import (
    SIGNAL_VOTE,
    STOP_SIGNALS,
    StopDecision,
    StopSignals,
)


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def decision(
    signals: StopSignals | None = None, can_save: bool = True, **more: int
) -> StopDecision:
    return StopDecision(signals or StopSignals(), can_save=can_save, **more)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_is_noted_and_nothing_else_happens(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals() as signals:
        stop = decision(signals)
        assert stop.local_vote() == 0.0
        signal.raise_signal(number)
        assert signals.received == number
        assert stop.local_vote() == SIGNAL_VOTE
    assert signal.getsignal(number) == before


def test_the_first_signal_is_the_one_that_is_reported() -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
    assert signals.received == signal.SIGUSR1


def test_further_signals_can_be_asked_for() -> None:
    with StopSignals((*STOP_SIGNALS, signal.SIGINT)) as signals:
        signal.raise_signal(signal.SIGINT)
    assert signals.received == signal.SIGINT


def test_a_signal_saves_and_exits_75() -> None:
    order = decision().decide(SIGNAL_VOTE, 7)
    assert order is not None
    assert (order.reason, order.exit_code, order.save) == ("signal", 75, True)
    assert "at iteration 7, saved" in order.message


def test_a_signal_without_save_is_a_failure_that_says_so() -> None:
    order = decision(can_save=False).decide(SIGNAL_VOTE, 7)
    assert order is not None
    assert (order.exit_code, order.save) == (1, False)
    assert "--save is not given" in order.message


def test_the_rank_that_got_the_signal_names_it() -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGUSR2)
    order = decision(signals).decide(SIGNAL_VOTE, 7)
    assert order is not None
    assert "receiving SIGUSR2" in order.message


def test_exit_interval_is_a_function_of_the_iteration_and_exits_0() -> None:
    stop = decision(exit_interval=5)
    orders = {iteration: stop.decide(0.0, iteration) for iteration in range(1, 7)}
    assert [iteration for iteration, order in orders.items() if order] == [5]
    order = orders[5]
    assert order is not None
    assert (order.exit_code, order.message) == (0, "exiting program at iteration 5")


def test_exit_duration_counts_from_the_start_of_the_loop() -> None:
    clock = Clock()
    stop = StopDecision(StopSignals(), can_save=True, exit_duration_in_mins=2, clock=clock)
    clock.now = 119.9
    assert stop.local_vote() == 0.0
    clock.now = 120.0
    order = stop.decide(stop.local_vote(), 9)
    assert order is not None
    assert (order.reason, order.exit_code, order.save) == ("exit_duration", 0, True)
    assert order.message == "exiting program after 2 minutes at iteration 9"


@pytest.mark.parametrize("reduce", [sum, max])
def test_one_rank_that_votes_stops_all_by_sum_or_maximum(reduce: object) -> None:
    with StopSignals() as signalled:
        signal.raise_signal(signal.SIGTERM)
    clock = Clock()
    quiet = StopDecision(StopSignals(), can_save=True, clock=clock)
    late = StopDecision(StopSignals(), can_save=True, exit_duration_in_mins=1, clock=clock)
    clock.now = 60.0
    votes = [quiet.local_vote(), late.local_vote(), decision(signalled).local_vote()]
    assert callable(reduce)
    for rank in (quiet, late, decision(signalled)):
        order = rank.decide(reduce(votes), 3)
        assert order is not None
        assert (order.reason, order.exit_code) == ("signal", 75)
    order = quiet.decide(reduce(votes[:2]), 3)
    assert order is not None
    assert order.reason == "exit_duration"


def test_duration_votes_of_all_ranks_of_a_large_job_are_no_signal() -> None:
    stop = decision(exit_duration_in_mins=1)
    order = stop.decide(16384 * 1.0, 3)
    assert order is not None
    assert order.reason == "exit_duration"


LOOP = """
import os, sys, time
from megatron_lite.resilience.signals import StopDecision, StopSignals, shield_worker

with StopSignals() as signals:
    stop = StopDecision(signals, can_save=True)
    worker = os.fork()
    if worker == 0:
        if sys.argv[1] == "shield":
            shield_worker()
        print("ready", os.getpid(), flush=True)
        time.sleep(30)
        os._exit(0)
    iteration = 0
    order = None
    while order is None:
        iteration += 1
        time.sleep(0.05)
        order = stop.decide(stop.local_vote(), iteration)
    ended, status = os.waitpid(worker, os.WNOHANG)
    print("worker", "gone" if ended else "there", flush=True)
    if not ended:
        os.kill(worker, 9)
        os.waitpid(worker, 0)
    print(order.message, flush=True)
    sys.exit(order.exit_code)
"""


def run_loop(mode: str, number: signal.Signals, to_group: bool) -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, mode],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline().split()[1])
    if to_group:
        os.killpg(process.pid, number)
    else:
        os.kill(worker, number)
        time.sleep(0.2)
        os.kill(process.pid, number)
    out, _ = process.communicate(timeout=30)
    return process.returncode, out


def test_a_process_group_signal_leaves_shielded_workers_to_finish_the_step() -> None:
    code, out = run_loop("shield", signal.SIGTERM, to_group=True)
    assert code == 75
    assert "worker there" in out
    assert "exiting program after receiving SIGTERM at iteration" in out


def test_an_unshielded_worker_still_dies_of_the_signal() -> None:
    code, out = run_loop("plain", signal.SIGUSR1, to_group=False)
    assert code == 75
    assert "worker gone" in out
    assert "SIGUSR1" in out
