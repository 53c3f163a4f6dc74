"""Rank programs in which one stage of a pipeline dies, stops or falls asleep."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from megatron_lite.config.flags import parse_config
from megatron_lite.config.rules import check_config
from megatron_lite.mesh.launch import RunStatus, WorldInfo, run_program
from megatron_lite.pipeline.actions import Action
from megatron_lite.train.build import build_run
from megatron_lite.train.loop import train
from megatron_lite.train.passes import Passes

BAD_RANK, BAD_STEP, BAD_MICROBATCH = 2, 1, 1
TIMEOUT_MINUTES = 0.05  # a stalled collective or message fails after 3 s
STAYS_S = 14.0  # a stopped or sleeping process ends at last, or its test would not


def stalling_program(kind: str, argv: Sequence[str]) -> int:
    """Train; one rank fails in its way before a forward pass of the second step."""

    def run(info: WorldInfo, status: RunStatus) -> int:
        config = parse_config(list(argv), {})
        check_config(config, info.world_size)
        short = replace(config, distributed_timeout_minutes=TIMEOUT_MINUTES)  # type: ignore[arg-type]
        if info.rank == BAD_RANK:
            _spoil(kind)
        with build_run(short, info, status) as (parts, state):
            return train(parts, state, status)

    return run_program(run, os.environ)


def _spoil(kind: str) -> None:
    """In this process alone, which belongs to the test."""
    forward = Passes.forward

    def fail(self: Passes, action: Action) -> None:
        if self.options.step == BAD_STEP and action.microbatch == BAD_MICROBATCH:
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "stopped":
                _end_later()
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                time.sleep(STAYS_S)
        forward(self, action)

    Passes.forward = fail  # type: ignore[method-assign]


def _end_later() -> None:
    """A child that ends this process: it cannot do so itself while it is stopped."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(STAYS_S)
        os.kill(parent, signal.SIGKILL)
        os._exit(0)
