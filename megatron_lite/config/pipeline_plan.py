"""The depth axis as derived values: schedule, stages per rank, placement and cut.

The schedule owns the placement of the stages, so it comes first, then the cut of the
model into them. Everything follows from the config alone; the rules refuse a config for
which one of these functions raises, with its message.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError
from megatron_lite.pipeline.actions import Action, Kind, Schedule
from megatron_lite.pipeline.partition import (
    LAYOUT,
    Split,
    StagePart,
    list_stages,
    parse_layout,
    split_layers,
    whole_model,
)
from megatron_lite.pipeline.passes import Order, assemble
from megatron_lite.pipeline.schedules import FIXED_CHUNKS, SCHEDULES, Options, build_schedule
from megatron_lite.pipeline.table_files import read_table
from megatron_lite.pipeline.verify import check_schedule

SINGLE, AUTO, FILE = "single", "auto", "file:"
INTERLEAVED = ("interleaved", "interleaved-zb")
SCHEDULE_NAMES = tuple(name for name in SCHEDULES if name != SINGLE)


@dataclass(frozen=True)
class PipelineShape:
    """How the model is cut in depth, and by which schedule it runs.

    Attributes:
        schedule: name, "single" without a pipeline.
        chunks: stages per pipeline rank.
        placement: stage -> pipeline rank.
        parts: all stages, in the order of the model.
        group_size: microbatches that follow one another on a virtual stage; None: PP.
        paired: a forward and a backward run at the same time, in pairs of the table.
    """

    schedule: str
    chunks: int
    placement: tuple[int, ...]
    parts: tuple[StagePart, ...]
    group_size: int | None = None
    paired: bool = False

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return max(self.placement) + 1

    def table(self, num_microbatches: int) -> Schedule:
        """Return the verified table of a training step; the same on all ranks.

        Raises:
            UserError: the schedule is not made for so many microbatches.
        """
        options = Options(group_size=self.group_size, paired=self.paired)
        schedule = build_schedule(
            self.schedule, self.num_ranks, self.chunks, num_microbatches, options
        )
        if schedule.placement != self.placement:
            raise UserError(
                f"--pipeline-schedule {self.schedule}: with {num_microbatches} microbatches it "
                "places the stages elsewhere than at the start of the run"
            )
        return schedule


def plain_table(placement: tuple[int, ...], num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, for any placement and number of microbatches.

    For passes outside a step, such as the replay of a canary, whose number of microbatches
    is not the run's; the bits are those of every schedule.
    """
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    microbatches = range(num_microbatches)
    for stage, rank in enumerate(placement):
        rows[rank] += [Action(Kind.F, stage, microbatch) for microbatch in microbatches]
    for stage, rank in reversed(list(enumerate(placement))):
        rows[rank] += [Action(Kind.B, stage, microbatch) for microbatch in microbatches]
    table = assemble("plain", Order(placement, rows), num_microbatches)
    check_schedule(table)
    return table


def single_stage(num_layers: int, num_mtp: int = 0, *, paired: bool = False) -> PipelineShape:
    """A model that is not cut."""
    return PipelineShape(SINGLE, 1, (0,), whole_model(num_layers, num_mtp), paired=paired)


def asked_chunks(config: Config) -> int | None:
    """Stages per pipeline rank as the flags of virtual stages or the layout ask for."""
    ranks = config.pipeline_model_parallel_size
    if config.num_virtual_stages_per_pipeline_rank is not None:
        return config.num_virtual_stages_per_pipeline_rank
    per_virtual = config.num_layers_per_virtual_pipeline_stage
    if per_virtual is not None:
        return max(1, (config.num_layers or 0) // ranks // per_virtual)
    if config.pipeline_model_parallel_layout is not None:
        return max(1, len(list_stages(config.pipeline_model_parallel_layout)) // ranks)
    return None


def schedule_name(config: Config) -> str:
    """Resolve `--pipeline-schedule`: interleaved with virtual stages, else 1f1b."""
    if config.pipeline_model_parallel_size == 1:
        return SINGLE
    if config.pipeline_schedule is not None:
        return config.pipeline_schedule
    return "interleaved" if (asked_chunks(config) or 1) > 1 else "1f1b"


def read_schedule_file(name: str) -> Schedule:
    """Read the table of `file:PATH`.

    Raises:
        UserError: it cannot be read or is not a table that can run.
    """
    return read_table(Path(name.removeprefix(FILE)))


def stages_per_rank(config: Config) -> int:
    """Resolve the stages per pipeline rank; the schedule may know only one number."""
    name = schedule_name(config)
    if name.startswith(FILE):
        table = read_schedule_file(name)
        return table.num_stages // len(table.ranks)
    return asked_chunks(config) or FIXED_CHUNKS.get(name, 1)


def place_stages(
    name: str, num_ranks: int, chunks: int, num_microbatches: int, options: Options
) -> tuple[int, ...]:
    """Stage -> pipeline rank, as the schedule has it."""
    if name.startswith(FILE):
        return read_schedule_file(name).placement
    # Only the cost-aware schedule chooses by the number of microbatches.
    probe = num_microbatches if name == AUTO else 1
    return SCHEDULES[name](num_ranks, chunks, probe, options).placement


def cut_model(config: Config, placement: tuple[int, ...]) -> tuple[StagePart, ...]:
    """Deal the layers out to the stages, as the flags ask for.

    Raises:
        UserError: they cannot be dealt out so.
    """
    layers, ranks = config.num_layers or 0, max(placement) + 1
    depths = config.mtp_num_layers or 0
    if config.pipeline_model_parallel_layout is not None:
        chunks = len(placement) // ranks
        text = config.pipeline_model_parallel_layout
        parts = parse_layout(text, layers, ranks, chunks, depths)
        if any(part.mtp and not part.head for part in parts):
            raise UserError(
                f"{LAYOUT} {text}: MTP depths (m) on a stage before the loss (L) are not yet "
                "supported; put them on the last stage, as in ...|tmL"
            )
        return parts
    split = Split(
        first=config.decoder_first_pipeline_num_layers,
        last=config.decoder_last_pipeline_num_layers,
        with_embedding=config.account_for_embedding_in_pipeline_split,
        with_loss=config.account_for_loss_in_pipeline_split,
        with_mtp=config.account_for_mtp_in_pipeline_split,
    )
    return split_layers(layers, placement, split, depths)


def plan_pipeline(config: Config, num_microbatches: int) -> PipelineShape:
    """Derive the depth axis of a run whose first step has so many microbatches."""
    name = schedule_name(config)
    paired = config.overlap_moe_expert_parallel_comm
    if name == SINGLE:
        depths = config.mtp_num_layers or 0
        return single_stage(config.num_layers or 0, depths, paired=paired)
    ranks, chunks = config.pipeline_model_parallel_size, stages_per_rank(config)
    group_size = config.microbatch_group_size_per_vp_stage
    placement = place_stages(name, ranks, chunks, num_microbatches, Options(group_size=group_size))
    parts = cut_model(config, placement)
    return PipelineShape(name, chunks, placement, parts, group_size, paired)
