"""Schedule generators by name: pure functions that return a `Schedule`.

Adding a schedule is one file and one line here; the verifier, the simulator and the
runner need nothing new. The placement of the stages belongs to the schedule, so the model
is cut after the table is made. Names are those of `--pipeline-schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

from megatron_lite.errors import UserError
from megatron_lite.pipeline.actions import Schedule
from megatron_lite.pipeline.passes import Order, assemble
from megatron_lite.pipeline.schedules.auto import auto
from megatron_lite.pipeline.schedules.building_block import v_half, v_min
from megatron_lite.pipeline.schedules.dualpipev import dualpipev
from megatron_lite.pipeline.schedules.forward import forward_only
from megatron_lite.pipeline.schedules.gpipe import gpipe
from megatron_lite.pipeline.schedules.interleaved import interleaved, interleaved_zb
from megatron_lite.pipeline.schedules.one_f_one_b import one_f_one_b, zb_h1, zb_h2
from megatron_lite.pipeline.schedules.options import DEFAULT, Options
from megatron_lite.pipeline.schedules.single import single
from megatron_lite.pipeline.schedules.zbv import zbv
from megatron_lite.pipeline.table_files import read_table
from megatron_lite.pipeline.verify import ScheduleError, check_schedule

__all__ = [
    "FIXED_CHUNKS",
    "PAIRED",
    "SCHEDULES",
    "Generator",
    "Options",
    "build_schedule",
    "forward_only",
]

OrderGenerator: TypeAlias = Callable[[int, int, int, Options], Order]


class Generator(Protocol):
    """Makes a complete table."""

    def __call__(
        self, num_ranks: int, chunks: int, num_microbatches: int, options: Options = DEFAULT
    ) -> Schedule:
        """Return the table; ValueError with what is legal for sizes it is not made for."""
        ...


def _assemble(name: str, order: Order, num_microbatches: int, options: Options) -> Schedule:
    return assemble(
        name,
        order,
        num_microbatches,
        options.costs,
        unshard=options.unshard,
    )


def _complete(name: str, order: OrderGenerator) -> Generator:
    """Make a generator of complete tables from one of computations only."""

    def generate(
        num_ranks: int, chunks: int, num_microbatches: int, options: Options = DEFAULT
    ) -> Schedule:
        computations = order(num_ranks, chunks, num_microbatches, options)
        return _assemble(name, computations, num_microbatches, options)

    return generate


_ORDERS: Mapping[str, OrderGenerator] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "interleaved-zb": interleaved_zb,
    "zbv": zbv,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipev": dualpipev,
}


def _auto(
    num_ranks: int, chunks: int, num_microbatches: int, options: Options = DEFAULT
) -> Schedule:
    chosen, order = auto(num_ranks, chunks, num_microbatches, options, _ORDERS)
    name = f"auto ({chosen})"
    return _assemble(name, order, num_microbatches, options)


# name -> (pipeline ranks, stages per rank, microbatches[, options]) -> table
SCHEDULES: Mapping[str, Generator] = {
    "single": _complete("single", single),
    **{name: _complete(name, order) for name, order in _ORDERS.items()},
    "auto": _auto,
}

# Stages per rank of the schedules that know only one number.
FIXED_CHUNKS: Mapping[str, int] = {
    "single": 1,
    "gpipe": 1,
    "1f1b": 1,
    "zb-h1": 1,
    "zb-h2": 1,
    "zbv": 2,
    "v-half": 2,
    "v-min": 2,
    "dualpipev": 2,
}


# Schedules with pairs of a forward and a backward, see `Options.paired`.
PAIRED = ("single", "1f1b", "interleaved", "dualpipev")


def build_schedule(
    name: str, num_ranks: int, chunks: int, num_microbatches: int, options: Options = DEFAULT
) -> Schedule:
    """Return the verified table of a schedule by name, or of `file:PATH`.

    Raises:
        UserError: unknown name, sizes that the schedule is not made for, or a file that is
            not a table of these sizes; one message.
    """
    if name.startswith("file:"):
        schedule = read_table(Path(name.removeprefix("file:")))
        found = (len(schedule.ranks), schedule.num_stages, schedule.num_microbatches)
        if found != (num_ranks, num_ranks * chunks, num_microbatches):
            raise UserError(
                f"{name}: a table of {found[0]} ranks, {found[1]} stages and {found[2]} "
                f"microbatches; {num_ranks} ranks, {num_ranks * chunks} stages and "
                f"{num_microbatches} microbatches are needed"
            )
        return schedule
    if name not in SCHEDULES:
        raise UserError(
            f"schedule {name} is unknown; legal: {', '.join(sorted(SCHEDULES))}, file:PATH"
        )
    if options.paired and name not in PAIRED:
        raise UserError(f"schedule {name} has no pairs; schedules with pairs: {', '.join(PAIRED)}")
    try:
        schedule = SCHEDULES[name](num_ranks, chunks, num_microbatches, options)
        check_schedule(schedule)
    except ScheduleError:
        raise  # a defect of a generator, not of the user's
    except ValueError as error:
        raise UserError(str(error)) from error
    return schedule
