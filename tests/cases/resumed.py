"""A run at once and the same run continued at its middle by new processes."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cases.layouts import LAYOUTS, batch_for
from tests.cases.ranks import program
from tests.pool import fork_ranks
from tests.train.program import LLAMA, RUN, rows

# Dropout 0.1, a cosine from 1e-3 to 1e-4 over ten iterations.
ARGV = [*LLAMA, *RUN, "--lr", "1e-3", "--min-lr", "1e-4", "--eval-iters", "0"]
ARGV += ["--save-interval", "5", "--num-workers", "2"]
# What a clock measured, and when.
MEASURED = re.compile(r"\[.*?\] |elapsed time per iteration \(ms\): [0-9.]+ \| ")


@dataclass(frozen=True)
class Part:
    """What a run of new processes left behind.

    Attributes:
        save: its checkpoints.
        lines: printed iteration lines without the clock's figures.
        rows: of the metrics file.
        samples: per iteration, (consumed index, row of the data set) of the global batch.
        printed: everything on stdout.
    """

    save: Path
    lines: list[str]
    rows: list[dict[str, Any]]
    samples: list[list[tuple[int, int]]]
    printed: str


def run_part(directory: Path, layout: str, *more: str) -> Part:
    """Run the program once in processes of its own."""
    save, dump, metrics = (directory / name for name in ("save", "dump", "metrics.jsonl"))
    argv = [*ARGV, *LAYOUTS[layout].flags, "--save", str(save), "--metrics-jsonl", str(metrics)]
    argv += ["--global-batch-size", str(batch_for(layout, 4))]
    argv += ["--debug-dump", str(dump), *more]
    exits = fork_ranks(LAYOUTS[layout].ranks, program, argv, timeout=100.0)
    assert {found.code for found in exits} == {0}, exits
    printed = "".join(found.stdout for found in exits)
    samples = [
        [(row["consumed_index"], row["dataset_index"]) for row in json.loads(text)["samples"]]
        for text in (path.read_text() for path in sorted(dump.glob("*.json")))
    ]
    lines = [line for line in printed.splitlines() if "| consumed samples:" in line]
    return Part(save, [MEASURED.sub("", line) for line in lines], rows(metrics), samples, printed)
