"""A checkpoint goes from one layout into another: loaded, saved at once, trained one step."""

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.reader import logical_hash, open_checkpoint
from megatron_lite.config.flags import parse_config
from megatron_lite.config.rules import check_config
from megatron_lite.mesh.launch import RunStatus, WorldInfo, run_program
from megatron_lite.train.build import build_run
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from megatron_lite.verify.session import Layout
from tests.cases.layouts import LAYOUTS
from tests.pool import RankPool, fork_ranks
from tests.train.program import LLAMA, RUN, build_and, save_now, train_rank

# Biases, norms on queries and keys, two KV heads over up to four ranks, a padded vocabulary:
# everything that is replicated, shared or padded. bf16 has masters beside the weights.
MODEL = [*LLAMA, "--num-layers", "4", "--qk-layernorm", "--add-qkv-bias", "--vocab-size", "91"]
# Twelve samples: one batch for two, three and four data ranks.
ARGV = [*MODEL, *RUN, "--eval-iters", "0", "--save-interval", "100", "--global-batch-size", "12"]
PRECISION = {"bf16": ("--bf16",), "fp64": ("--fp64",), "fp32": ()}


def place_of(layout: str | Layout) -> Layout:
    """A layout, or the one of this name in the table of dense models."""
    return LAYOUTS[layout] if isinstance(layout, str) else layout


def train_and_save(pool: RankPool, root: Path, layout: str | Layout, steps: int, *more: str) -> str:
    """Train so many steps in a layout and save; return the logical hash."""
    place = place_of(layout)
    argv = [*ARGV, *place.flags, "--save", str(root), *more]
    argv += ["--exit-interval", str(steps)]
    size = place.ranks
    assert pool.run(size, train_rank, argv=argv) == [0] * size
    return hash_of(root)


def hash_of(root: Path) -> str:
    """Hash of all tensors and counters of the newest checkpoint."""
    checkpoint = open_checkpoint(root)
    return f"{logical_hash(checkpoint)} {sorted(checkpoint.state['counters'].items())}"


def hop(argv: Sequence[str], rank: int, world_size: int) -> tuple[float, float]:
    """Load, save at once, then train one step; return its loss and gradient norm."""
    with redirect_stdout(io.StringIO()):
        found: tuple[float, float] = build_and(_save_and_step, argv, rank, world_size)
    return found


def hop_in_pool(
    pool: RankPool, source: Path, target: Path, layout: str | Layout, *more: str
) -> tuple[float, float]:
    """`hop` on ranks of the pool; every rank must report the same."""
    there = place_of(layout)
    argv = [*ARGV, *there.flags, *more, "--load", str(source), "--save", str(target)]
    figures = pool.run(there.ranks, hop, argv=argv)
    assert len(set(figures)) == 1
    first: tuple[float, float] = figures[0]
    return first


def hop_in_new_processes(
    source: Path, target: Path, layout: str | Layout, *more: str
) -> tuple[float, float]:
    """`hop` in rank processes of its own."""
    place = place_of(layout)
    argv = [*ARGV, *place.flags, *more, "--load", str(source), "--save", str(target)]
    exits = fork_ranks(place.ranks, hop_program, argv)
    assert {found.code for found in exits} == {0}, exits
    figures = {found.stdout.splitlines()[-1] for found in exits}
    assert len(figures) == 1
    loss, norm = figures.pop().split()
    return float(loss), float(norm)


def hop_program(argv: Sequence[str]) -> int:
    """`hop` as a program; its rank is in the environment."""

    def run(info: WorldInfo, status: RunStatus) -> int:
        config = parse_config(list(argv), {})
        check_config(config, info.world_size)
        with build_run(config, info, status) as (parts, state):
            print(*_save_and_step(parts, state, status))
        return 0

    return run_program(run, os.environ)


def _save_and_step(parts: Parts, state: TrainState, status: RunStatus) -> Any:
    save_now(parts, state)
    report = TrainStep(parts, state).run()
    return report.lm_loss, report.grad_norm
