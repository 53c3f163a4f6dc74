"""The depth axis of a run: stages, their places, and the tables that run them.

Without a pipeline it is the smallest case: one stage, one rank, a table of F, B, REDUCE,
NORM, STEP. Everything here follows from the schedule, which owns the placement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch

from megatron_lite.config.pipeline_plan import PipelineShape
from megatron_lite.config.plan import Plan
from megatron_lite.config.schema import Config
from megatron_lite.mesh.collectives import agree
from megatron_lite.mesh.groups import Groups
from megatron_lite.mesh.p2p import open_links
from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.channels import list_channels
from megatron_lite.pipeline.exchange import Exchange, MessageShape
from megatron_lite.pipeline.partition import StagePart
from megatron_lite.pipeline.schedules.forward import forward_only


@dataclass(eq=False)
class Pipeline:
    """Stages and tables of a run, seen from one rank.

    Attributes:
        shape: schedule, placement and all stages of the model.
        groups: of this rank.
        exchange: this rank's messages; empty without a pipeline.
    """

    shape: PipelineShape
    groups: Groups
    exchange: Exchange
    _tables: dict[tuple[int, bool], Schedule] = field(default_factory=dict)

    @property
    def placement(self) -> tuple[int, ...]:
        """Stage -> pipeline rank."""
        return self.shape.placement

    @property
    def local_parts(self) -> tuple[StagePart, ...]:
        """The stages of this rank, ascending."""
        rank = self.groups.pp.rank
        return tuple(part for part in self.shape.parts if self.placement[part.stage] == rank)

    @property
    def warning(self) -> str:
        """What a user should be told about how the tables run; "" where nothing."""
        if not self.shape.paired or self.groups.expert_block.lane is not None:
            return ""
        return (
            "--overlap-moe-expert-parallel-comm: on CUDA the halves of a pair still run one after "
            "the other; nothing is hidden, the table keeps its extra warm-up"
        )

    def table(self, num_microbatches: int, *, training: bool = True) -> Schedule:
        """The verified table of a step, the same on all ranks.

        Comm: the first time for a number of microbatches, one gather of a digest over the
            world.
        """
        key = (num_microbatches, training)
        if key not in self._tables:
            if training:
                schedule = self.shape.table(num_microbatches)
            else:
                schedule = forward_only(self.placement, num_microbatches)
            if self.groups.pp.size > 1:
                agree(schedule.digest(), self.groups.world, "the table of the schedule")
            self._tables[key] = schedule
        return self._tables[key]

    def actions(self, num_microbatches: int, *, training: bool = True) -> tuple[Action, ...]:
        """This rank's actions of `table`."""
        return self.table(num_microbatches, training=training).ranks[self.groups.pp.rank]


def build_pipeline(config: Config, plan: Plan, groups: Groups, device: torch.device) -> Pipeline:
    """Open the channels between the planned stages, and agree on the first table.

    Comm: see `open_links` and `Pipeline.table`.
    """
    shape, parallel, model = plan.pipeline, plan.parallel, plan.model
    sequence = model.seq_length // (parallel.tp if parallel.sequence_parallel else 1)
    message = MessageShape(
        sequence,
        model.hidden_size,
        getattr(torch, plan.precision.compute),
        device,
    )
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    links = open_links(list_channels(shape.placement), groups.pp, timeout)
    pipeline = Pipeline(shape, groups, Exchange(links, shape.placement, message))
    pipeline.table(plan.batch.num_microbatches_at(0))
    return pipeline
