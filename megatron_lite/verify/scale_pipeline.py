"""Scale the depth axis of a user's flags: schedule, cut, groups and tables.

Kept is what decides which code runs: the schedule, the stages per rank, which stages have
more layers than others or none, and groups that are longer than the pipeline. A table of a
file is kept as it is, with its number of microbatches, where its ranks fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_lite.config.pipeline_plan import (
    FILE,
    plan_pipeline,
    read_schedule_file,
    stages_per_rank,
)
from megatron_lite.config.schema import Config
from megatron_lite.pipeline.schedules import FIXED_CHUNKS
from megatron_lite.verify.axes import Axis, pipeline_axis

LAYOUT = "--pipeline-model-parallel-layout"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


@dataclass(frozen=True)
class ScaledPipeline:
    """The depth axis of the scaled case.

    Attributes:
        layers: per stage.
        even: all stages have as many.
        schedule: name or file:PATH; None: by the stages per rank.
        chunks: stages per rank.
        group_size: None: the number of ranks.
        microbatches: of a table that is kept, else None.
    """

    ranks: int
    layers: tuple[int, ...]
    even: bool
    schedule: str | None
    chunks: int
    group_size: int | None
    microbatches: int | None

    def axis(self, dp: int = 1, micro: int | None = None) -> Axis:
        """The axis; a table's, which has its number of microbatches, is one with dp."""
        virtual = 1 if self.schedule in FIXED_CHUNKS or self.microbatches else self.chunks
        axis = pipeline_axis(self.ranks, self.schedule, virtual)
        flags = list(axis.flags)
        if not self.even:
            flags += [LAYOUT, self.layout()]
        if self.group_size is not None:
            flags += [GROUP, str(self.group_size)]
        if micro is None:
            return Axis("pp", ranks=self.ranks, flags=tuple(flags))
        flags += ["--micro-batch-size", str(micro)]
        return Axis("pp x dp", ranks=self.ranks * dp, data_ranks=dp, flags=tuple(flags))

    def layout(self) -> str:
        """The cut in Megatron's letters."""
        stages = ["t" * count for count in self.layers]
        return "|".join(("E" + stages[0], *stages[1:-1], stages[-1] + "L"))

    def notes(self, config: Config) -> list[str]:
        """What of a pipeline's flags is kept, and what is not."""
        if self.ranks == 1:
            return []
        cut = "of equally many layers" if self.even else f"cut as {self.layout()}"
        notes = [f"stages per pipeline rank: {self.chunks}, {cut}"]
        if self.group_size is not None:
            notes.append(
                f"microbatch group: {config.microbatch_group_size_per_vp_stage} -> "
                f"{self.group_size}"
            )
        if is_table(config) and not self.microbatches:
            notes.append(f"schedule: {config.pipeline_schedule} -> 1f1b or interleaved")
        return notes


def is_table(config: Config) -> bool:
    """Whether the schedule is a file."""
    return (config.pipeline_schedule or "").startswith(FILE)


def scale_pipeline(config: Config, pp: int, num_microbatches: int) -> ScaledPipeline:
    """The user's depth axis on `pp` ranks.

    Args:
        pp: ranks of the scaled case.
        num_microbatches: per step of the user's run, which `auto` schedules depend on.
    """
    user_pp, schedule = config.pipeline_model_parallel_size, config.pipeline_schedule
    chunks, microbatches = stages_per_rank(config), None
    if is_table(config):
        table = read_schedule_file(schedule or "")
        if pp == user_pp:
            path = Path((schedule or "").removeprefix(FILE)).resolve()
            schedule, microbatches = f"{FILE}{path}", table.num_microbatches
        else:
            schedule = None
    parts = plan_pipeline(config, num_microbatches).parts
    # A stage that recomputes only part of its layers needs two of them.
    unit = 2 if config.recompute_method == "block" else 1
    layers = scale_cut([len(part.layers) for part in parts], pp * chunks, unit)
    return ScaledPipeline(
        ranks=pp,
        layers=layers,
        even=len(set(layers)) == 1,
        schedule=schedule,
        chunks=chunks,
        group_size=scale_group(config.microbatch_group_size_per_vp_stage, user_pp, pp),
        microbatches=microbatches,
    )


def scale_cut(counts: list[int], stages: int, unit: int = 1) -> tuple[int, ...]:
    """Few layers in the same pattern: equal stages stay equal, longer ones longer, empty ones
    empty; of more stages than wanted both ends and some between are taken.
    """
    sizes = sorted({count for count in counts if count > 0})
    small = {0: 0, **{size: unit * (place + 1) for place, size in enumerate(sizes)}}
    steps = max(stages - 1, 1)
    taken = [counts[round(k * (len(counts) - 1) / steps)] for k in range(stages)]
    if not any(taken):  # the stages that were left out hold all the layers
        taken[0] = sizes[0]
    return tuple(small[count] for count in taken)


def scale_group(group_size: int | None, user_pp: int, pp: int) -> int | None:
    """A group longer than the pipeline stays longer; None where it is the default."""
    if group_size is None or group_size == user_pp:
        return None
    return max(pp + 1, round(group_size * pp / user_pp))
