"""What a rank does in the cases of mixtures of experts; runs inside a rank process."""

from collections.abc import Sequence
from typing import Any

from megatron_lite.mesh.launch import RunStatus
from megatron_lite.train.evaluate import evaluate
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from megatron_lite.train.summary import frozen_routers
from tests.train.program import build_and


def biases_by_step(
    argv: Sequence[str], steps: int, evaluates: bool, rank: int, world_size: int
) -> list[dict[str, Any]]:
    """Per step the figures of the log, and the bias of every MoE layer that this rank holds.

    Args:
        evaluates: after each step, before the bias is read.
    """

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        told = []
        for _ in range(steps):
            report = TrainStep(parts, state).run()
            if evaluates:
                assert parts.datasets.train is not None
                evaluate(parts, parts.datasets.train, state.consumed_samples, state.iteration)
            bias = {}
            for part in parts.stage.expert_parts:
                held = part.state("expert_bias")
                assert held is not None
                bias[part.layer] = held.tolist()
            told.append({"figures": dict(report.figures), "bias": bias})
        return told

    found: list[dict[str, Any]] = build_and(use, argv, rank, world_size)
    return found


def notes_of_frozen_routers(argv: Sequence[str], rank: int, world_size: int) -> list[str]:
    """What the start tells of them."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        return frozen_routers(parts)

    found: list[str] = build_and(use, argv, rank, world_size)
    return found
