"""The depth axis of a run: stages, their places, and the tables that run them.

Without a pipeline it is the smallest case: one stage, one rank, a table of F, B, REDUCE,
NORM, STEP. Everything here follows from the schedule, which owns the placement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch

from megatron_lite.config.plan import Plan
from megatron_lite.config.schema import Config
from megatron_lite.mesh.collectives import agree
from megatron_lite.mesh.groups import Groups
from megatron_lite.mesh.p2p import open_links
from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.channels import list_channels
from megatron_lite.pipeline.exchange import Exchange, MessageShape
from megatron_lite.pipeline.schedules import FIXED_CHUNKS, build_schedule
from megatron_lite.pipeline.schedules.forward import forward_only
from megatron_lite.spec.stages import StagePart, check_parts

SINGLE = "single"


def schedule_name(config: Config, plan: Plan) -> str:
    """Resolve `--pipeline-schedule`: interleaved with virtual stages, else 1f1b."""
    if plan.parallel.pp == 1:
        return SINGLE
    if config.pipeline_schedule is not None:
        return config.pipeline_schedule
    return "interleaved" if plan.parallel.vpp > 1 else "1f1b"


def cut_model(num_layers: int, num_stages: int) -> tuple[StagePart, ...]:
    """Cut a model into stages of equally many layers."""
    size = num_layers // num_stages
    parts = tuple(
        StagePart(
            stage,
            tuple(range(stage * size, (stage + 1) * size)),
            embedding=stage == 0,
            head=stage == num_stages - 1,
        )
        for stage in range(num_stages)
    )
    check_parts(parts, num_layers)
    return parts


@dataclass(eq=False)
class Pipeline:
    """Stages and tables of a run, seen from one rank.

    Attributes:
        name: of the schedule.
        chunks: stages per rank.
        parts: all stages of the model.
        placement: stage -> pipeline rank.
        groups: of this rank.
        exchange: this rank's messages; empty without a pipeline.
    """

    name: str
    chunks: int
    parts: tuple[StagePart, ...]
    placement: tuple[int, ...]
    groups: Groups
    exchange: Exchange
    _tables: dict[tuple[int, bool], Schedule] = field(default_factory=dict)

    @property
    def local_parts(self) -> tuple[StagePart, ...]:
        """The stages of this rank, ascending."""
        rank = self.groups.pp.rank
        return tuple(part for part in self.parts if self.placement[part.stage] == rank)

    @property
    def has_head(self) -> bool:
        """Whether losses arise on this rank."""
        return any(part.head for part in self.local_parts)

    def table(self, num_microbatches: int, *, training: bool = True) -> Schedule:
        """The verified table of a step, the same on all ranks.

        Comm: the first time for a number of microbatches, one gather of a digest over the
            world.
        """
        key = (num_microbatches, training)
        if key not in self._tables:
            if training:
                ranks = self.groups.pp.size
                schedule = build_schedule(self.name, ranks, self.chunks, num_microbatches)
            else:
                schedule = forward_only(self.placement, num_microbatches)
            if self.groups.pp.size > 1:
                agree(schedule.digest(), self.groups.world, "the table of the schedule")
            self._tables[key] = schedule
        return self._tables[key]

    def actions(self, num_microbatches: int, *, training: bool = True) -> tuple[Action, ...]:
        """This rank's actions of `table`."""
        return self.table(num_microbatches, training=training).ranks[self.groups.pp.rank]


@dataclass(frozen=True)
class Cut:
    """How a run cuts its model: what the flags alone decide.

    Attributes:
        name: of the schedule.
        chunks: stages per rank.
        placement: stage -> pipeline rank.
        parts: all stages.
    """

    name: str
    chunks: int
    placement: tuple[int, ...]
    parts: tuple[StagePart, ...]


def plan_cut(config: Config, plan: Plan) -> Cut:
    """Resolve the schedule of a run, and with it the stages and their places."""
    name, parallel = schedule_name(config, plan), plan.parallel
    chunks = FIXED_CHUNKS.get(name, parallel.vpp)
    microbatches = plan.batch.num_microbatches_at(0)
    placement = build_schedule(name, parallel.pp, chunks, microbatches).placement
    return Cut(name, chunks, placement, cut_model(plan.model.num_layers, len(placement)))


def build_pipeline(config: Config, plan: Plan, groups: Groups, device: torch.device) -> Pipeline:
    """Cut the model, place the stages, open the channels, and agree on the first table.

    Comm: see `open_links` and `Pipeline.table`.
    """
    cut, parallel, model = plan_cut(config, plan), plan.parallel, plan.model
    sequence = model.seq_length // (parallel.tp if parallel.sequence_parallel else 1)
    message = MessageShape(
        sequence,
        model.hidden_size,
        getattr(torch, plan.precision.compute),
        device,
    )
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    links = open_links(list_channels(cut.placement), groups.pp, timeout)
    pipeline = Pipeline(
        name=cut.name,
        chunks=cut.chunks,
        parts=cut.parts,
        placement=cut.placement,
        groups=groups,
        exchange=Exchange(links, cut.placement, message),
    )
    pipeline.table(plan.batch.num_microbatches_at(0))
    return pipeline
