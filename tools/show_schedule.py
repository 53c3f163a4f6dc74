"""Draw, verify and simulate pipeline schedules.

Takes one or several names of --pipeline-schedule (or file:PATH, or all) and prints each
timeline and a table of bubbles and memory side by side. Times are those of a whole rank
(all its stages), so schedules with different numbers of stages compare. Exit code 0: done,
2: refused, with the reason.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, too

from megatron_lite.errors import UserError
from megatron_lite.pipeline.costs import Costs, equal_costs
from megatron_lite.pipeline.draw import Played, draw_svg, draw_text, format_number
from megatron_lite.pipeline.schedules import (
    FIXED_CHUNKS,
    PAIRED,
    SCHEDULES,
    Options,
    build_schedule,
)
from megatron_lite.pipeline.simulate import simulate
from megatron_lite.pipeline.table_files import read_table, write_table

MAX_ACTIONS = 10**6  # of a picture or table; larger ones are typing errors
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9}")
HEADER = (
    "schedule", "stages", "makespan", "idle %", "bubble/ideal", "bubble", "span bubble",
    "peak u", "deferred u", "messages",
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = ", ".join(name for name in SCHEDULES if name != "single")
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"{names}, file:PATH or all")
    parser.add_argument("--pipeline-size", type=int, metavar="P", help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, metavar="M", help="per step and data rank")
    parser.add_argument(
        "--virtual",
        type=int,
        metavar="V",
        help="stages per rank, where the schedule leaves a choice (2 for interleaved ones, else 1)",
    )
    parser.add_argument(
        "--group-size", type=int, metavar="G", help="microbatches per group of interleaved ones (P)"
    )
    parser.add_argument(
        "--costs",
        default="1,1,1",
        metavar="F,I,W",
        help="times of a microbatch on a whole rank (1,1,1); F,I,W/F,I,W/...: of every stage",
    )
    parser.add_argument(
        "--exchange",
        default="0,0,0",
        metavar="F,I,W",
        help="times of the all-to-alls of experts of a microbatch on a whole rank, not in --costs",
    )
    parser.add_argument(
        "--paired",
        action="store_true",
        help="a forward and a backward at the same time, where the schedule has such pairs",
    )
    parser.add_argument(
        "--comm", default="0", metavar="A[,B]", help="latency and transfer time of a message (0)"
    )
    parser.add_argument("--reduce", default="0", metavar="T", help="gradient reduction per stage")
    parser.add_argument(
        "--memory-limit", metavar="U", help="most microbatches alive per rank, for auto"
    )
    parser.add_argument("--svg", type=Path, metavar="F", help="write the picture")
    parser.add_argument("--export", type=Path, metavar="F", help="write the table (.json or .csv)")
    parser.add_argument("--json", action="store_true", help="figures as one JSON object on stdout")
    parser.add_argument("--no-timeline", action="store_true", help="the table of figures only")
    parser.add_argument("--width", type=int, help="columns of the timeline (the terminal's)")
    return parser


def parse_times(text: str, flag: str) -> list[Fraction]:
    """Read numbers separated by commas, exactly."""
    parts = [part.strip() for part in text.split(",")]
    if not all(_NUMBER.fullmatch(part) for part in parts):
        raise UserError(
            f"{flag} {text[:80]}: numbers like 1 or 0.75, not negative, separated by commas, are "
            "legal"
        )
    return [Fraction(part) for part in parts]


def build_costs(options: argparse.Namespace, num_stages: int, chunks: int) -> Costs:
    """Return the costs of the stages as the flags say."""
    comm = parse_times(options.comm, "--comm")
    reduce = parse_times(options.reduce, "--reduce")
    if len(comm) > 2 or len(reduce) != 1:
        raise UserError("--comm takes one or two numbers, --reduce one")
    stages = [parse_times(part, "--costs") for part in options.costs.split("/")]
    if any(len(stage) != 3 for stage in stages) or len(stages) not in (1, num_stages):
        raise UserError(
            f"--costs {options.costs[:80]}: F,I,W once, or for each of the {num_stages} stages"
        )
    exchange = parse_times(options.exchange, "--exchange")
    if len(exchange) != 3:
        raise UserError(f"--exchange {options.exchange[:80]}: three numbers F,I,W")
    f, i, w = (time / chunks for time in exchange)
    latency, transfer = comm[0], comm[1] if len(comm) > 1 else Fraction(0)
    if len(stages) == 1:
        equal = equal_costs(num_stages, chunks, *stages[0])
        forward, input_grad, weight_grad = equal.forward, equal.input_grad, equal.weight_grad
    else:
        forward, input_grad, weight_grad = (tuple(times) for times in zip(*stages, strict=True))
    return Costs(
        forward,
        input_grad,
        weight_grad,
        latency,
        transfer,
        reduce=reduce[0],
        exchanges=((f, i, w),) * num_stages if any(exchange) else (),
    )


def choose_chunks(name: str, options: argparse.Namespace, several: bool) -> int:
    """Stages per rank: the schedule's own number, else the flag's, else the usual one.

    Among several schedules the flag concerns those that leave a choice.
    """
    fixed = FIXED_CHUNKS.get(name)
    if fixed is not None and (options.virtual is None or several):
        return fixed
    if options.virtual is not None:
        return int(options.virtual)
    return 2 if name.startswith("interleaved") else 1


def play(name: str, options: argparse.Namespace, several: bool) -> Played:
    """Build, verify and simulate one schedule."""
    if name.startswith("file:"):
        schedule = read_table(Path(name.removeprefix("file:")))
        for flag, given, found in (
            ("--pipeline-size", options.pipeline_size, len(schedule.ranks)),
            ("--microbatches", options.microbatches, schedule.num_microbatches),
        ):
            if given not in (None, found):
                raise UserError(f"{name} is a table for {flag} {found}, not {given}")
        chunks = max(1, schedule.num_stages // len(schedule.ranks))
        costs = build_costs(options, schedule.num_stages, chunks)
    else:
        if options.pipeline_size is None or options.microbatches is None:
            raise UserError(f"{name} needs --pipeline-size and --microbatches")
        chunks = choose_chunks(name, options, several)
        size = options.pipeline_size * max(1, chunks) * options.microbatches
        if options.pipeline_size < 1 or options.microbatches < 1 or size > MAX_ACTIONS:
            raise UserError(
                f"--pipeline-size {options.pipeline_size} x {chunks} stages x --microbatches "
                f"{options.microbatches}: each at least 1, together at most {MAX_ACTIONS}"
            )
        if chunks < 1:
            raise UserError(f"--virtual {chunks}: at least 1")
        costs = build_costs(options, options.pipeline_size * chunks, chunks)
        limit = None
        if options.memory_limit is not None:
            limits = parse_times(options.memory_limit, "--memory-limit")
            limit = limits[0] if len(limits) == 1 else tuple(limits)
        wishes = Options(
            group_size=options.group_size,
            costs=costs,
            memory_limit=limit,
            paired=options.paired and (not several or name in PAIRED),
        )
        schedule = build_schedule(name, options.pipeline_size, chunks, options.microbatches, wishes)
    timeline, report = simulate(schedule, costs)
    return Played(schedule, timeline, report)


def format_table(played: Sequence[Played]) -> str:
    """The figures side by side; what each means is told by `simulate.Report`."""
    rows = [list(HEADER)]
    for item in played:
        report = item.report
        rows.append(
            [
                item.schedule.name,
                str(item.schedule.num_stages),
                format_number(report.makespan),
                format_number(100 * report.bubble_fraction, 1),
                format_number(report.bubble_over_ideal, 3),
                format_number(report.makespan_bubble),
                format_number(report.span_bubble),
                format_number(max(report.peak_activations)),
                format_number(max(report.peak_deferred)),
                str(report.num_messages),
            ]
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(HEADER))]
    lines = [
        "  ".join(
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(lines)


def describe(item: Played) -> dict[str, Any]:
    """The figures of a schedule as JSON-able numbers."""
    report, schedule = item.report, item.schedule
    return {
        "schedule": schedule.name,
        "ranks": len(schedule.ranks),
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "placement": list(schedule.placement),
        "digest": schedule.digest(),
        "verified": True,
        **{
            name: [float(x) for x in value] if isinstance(value, tuple) else float(value)
            for name, value in vars(report).items()
        },
    }


def run(options: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    names: list[str] = []
    for name in options.names:
        every = [name for name in SCHEDULES if name not in ("single", "auto")]
        names += every if name == "all" else [name]
    if options.export is not None and len(names) > 1:
        raise UserError("--export writes one table: name one schedule")
    played = [play(name, options, len(names) > 1) for name in names]
    if options.svg is not None:
        try:
            options.svg.write_text(draw_svg(played), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {options.svg}: {error.strerror}") from error
    if options.export is not None:
        write_table(played[0].schedule, options.export)
    if options.json:
        print(json.dumps({"schedules": [describe(item) for item in played]}))
        return
    width = options.width or shutil.get_terminal_size((160, 24)).columns
    if not options.no_timeline:
        print("F forward, I input gradient, W weight gradient, B both; small: later chunks")
        if any(item.schedule.has_pairs for item in played):
            print("a line with &: the backward halves of the pairs above them")
        for item in played:
            print(f"\n{item.schedule.name}\n{draw_text(item, max(width, 40))}")
        print()
    print(format_table(played))


def main(argv: Sequence[str]) -> int:
    """Run the tool."""
    options = build_parser().parse_args(argv)
    try:
        run(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
