"""What a pipeline rank keeps alive during a step (runs inside the rank pool)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_lite.mesh.launch import RunStatus
from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.runner import Handler, Runner
from megatron_lite.telemetry.memory import ActivationShape, estimate_stage_bytes
from megatron_lite.telemetry.meters import LiveStorageMeter
from megatron_lite.telemetry.pipeline_memory import walk_alive
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from tests.train.program import build_and


@dataclass
class MeteredRunner(Runner):
    """Reads the meter after every forward pass and every I."""

    meter: LiveStorageMeter = field(default_factory=LiveStorageMeter)
    readings: dict[int, int] = field(default_factory=dict)

    def run(
        self, actions: Sequence[Action], handlers: Mapping[Kind, Handler], step: int = 0
    ) -> None:
        with self.meter:
            start = self.meter.live_bytes
            for number, action in enumerate(actions):
                handlers[action.kind](action)
                if action.kind is Kind.F:
                    self.readings[number] = self.meter.live_bytes - start


def measure_forwards(argv: Sequence[str], rank: int, world_size: int) -> list[tuple[int, int]]:
    """(measured, estimated) bytes after every forward pass of a step."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> list[tuple[int, int]]:
        del status
        runner = MeteredRunner(rank)
        metered = replace(parts, runner=runner)
        TrainStep(metered, state).run()  # the meter gets to know what is there
        TrainStep(metered, state).run()
        plan = parts.plan
        microbatch = ActivationShape(
            plan.model, plan.parallel, plan.precision, plan.batch.micro_batch_size
        )
        stages: dict[int, Any] = {
            part.stage: estimate_stage_bytes(
                microbatch, part.layers, embedding=part.embedding, head=part.head
            )
            for part in plan.pipeline.parts
        }
        actions = parts.pipeline.actions(plan.batch.num_microbatches_at(0))
        alive = walk_alive(actions, stages, microbatch.stream_bytes)
        return [(size, alive[number].total_bytes) for number, size in runner.readings.items()]

    found: list[tuple[int, int]] = build_and(use, argv, rank, world_size)
    return found
