"""What pipeline schedules cost in CPU time, against 1F1B, torch and one process.

Two tables. Split: I + W of a stage of plain layers against its B, at several hidden sizes, in
one process, taking turns. Schedules: whole steps on two ranks of one thread, cases taking turns,
step by step: ours by name (`ours-zbv`, `-off`: without native operations),
torch.distributed.pipelining's by the same name (`torch-zbv`), and both in one process
(`ours-single`, `plain-single`). CPU seconds are those of both ranks with all their threads;
waiting costs none. Ratios of rates are those of the fastest rounds, in brackets the median over
rounds: where neighbours share the caches, the fastest round is the least disturbed one.

    python tools/bench/pipeline.py split
    python tools/bench/pipeline.py schedules --rounds 12
    python tools/bench/pipeline.py schedules --seq-length 1024 --rounds 6
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, too

from megatron_lite.verify.pool import RankPool

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron_lite.pipeline.exchange import Place
    from megatron_lite.train.parts import Parts
    from megatron_lite.train.state import TrainState

SCHEDULES: Mapping[str, int] = {  # name -> stages per rank
    "1f1b": 1, "gpipe": 1, "zb-h1": 1, "zb-h2": 1, "auto": 1, "interleaved": 2,
    "interleaved-zb": 2, "zbv": 2, "v-half": 2, "v-min": 2, "dualpipev": 2,
}  # fmt: skip
V_SHAPED = ("zbv", "v-half", "v-min", "dualpipev")
TORCH = ("gpipe", "1f1b", "interleaved", "interleaved-zb", "zbv", "dualpipev")
ALONE = ("ours-single", "ours-single-off", "plain-single")
OURS = tuple(f"ours-{name}" for name in SCHEDULES)
CASES = (*OURS, *(f"{case}-off" for case in OURS), *(f"torch-{name}" for name in TORCH), *ALONE)
DEFAULT_CASES = (*OURS, *(f"torch-{name}" for name in TORCH), "ours-single", "plain-single")
SIZE = {"layers": 8, "h": 256, "heads": 4, "s": 256, "v": 4096}
BATCH, MICRO = 8, 1  # samples per step and per microbatch


def flags_of(case: str, directory: str, size: Mapping[str, int]) -> list[str]:
    """Flags of `pretrain.py` for one of our cases."""
    flags = [
        "--device", "cpu", "--num-layers", str(size["layers"]), "--hidden-size", str(size["h"]),
        "--num-attention-heads", str(size["heads"]), "--seq-length", str(size["s"]),
        "--max-position-embeddings", str(size["s"]), "--hidden-dropout", "0",
        "--attention-dropout", "0", "--tokenizer-type", "NullTokenizer", "--vocab-size",
        str(size["v"]), "--untie-embeddings-and-output-weights", "--mock-data", "--split",
        "100,0,0", "--data-cache-path", directory, "--global-batch-size", str(BATCH),
        "--micro-batch-size", str(MICRO), "--lr", "1e-3", "--train-iters", "100000",
        "--eval-iters", "0", "--log-interval", "1000000",
    ]  # fmt: skip
    if case.endswith("-off"):
        flags += ["--native-ops", "off"]
    name = case.removeprefix("ours-").removesuffix("-off")
    if name == "single":
        return flags
    flags += ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", name]
    if SCHEDULES[name] == 2 and name not in V_SHAPED:
        flags += ["--num-virtual-stages-per-pipeline-rank", "2"]
    return flags


@contextmanager
def our_parts(
    case: str, directory: str, size: Mapping[str, int]
) -> Iterator[tuple[Parts, TrainState]]:
    """The real program's run, built."""
    import torch.distributed as dist

    from megatron_lite.config.flags import parse_config
    from megatron_lite.config.rules import check_config
    from megatron_lite.mesh.launch import RunStatus, WorldInfo
    from megatron_lite.train.build import build_run

    joined = dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    info = WorldInfo(rank, ranks, rank, ranks, launcher="pool")
    config = parse_config(flags_of(case, directory, size), os.environ)
    check_config(config, info.world_size)
    with redirect_stdout(StringIO()), build_run(config, info, RunStatus()) as (parts, state):
        yield parts, state


@contextmanager
def our_step(case: str, directory: str, size: Mapping[str, int]) -> Iterator[Callable[[], object]]:
    """One step of the real program."""
    from megatron_lite.train.loop import run_step

    with our_parts(case, directory, size) as (parts, state):
        yield lambda: run_step(parts, state)


def open_case(
    case: str, directory: str, size: Mapping[str, int], rank: int
) -> AbstractContextManager[Callable[[], object]]:
    """The step of a case."""
    from tools.bench.peers import Size
    from tools.bench.pipeline_peers import plain_step, torch_step

    if case.startswith("ours"):
        return our_step(case, directory, size)
    if case == "plain-single":
        return plain_step(Size(**size), BATCH, MICRO)
    return torch_step(case.removeprefix("torch-"), Size(**size), BATCH, MICRO, rank)


def time_steps(
    cases: Sequence[str],
    rounds: int,
    size: Mapping[str, int],
    directory: str,
    rank: int,
    world_size: int,
) -> list[list[float]]:
    """CPU seconds of one rank of the pool, by case and round; the cases take turns."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    seconds: list[list[float]] = [[] for _ in cases]
    with ExitStack() as stack:
        steps = [stack.enter_context(open_case(case, directory, size, rank)) for case in cases]
        for turn in range(rounds + 1):
            for step, kept in zip(steps, seconds, strict=True):
                if world_size > 1:
                    dist.barrier()
                start = time.process_time()
                step()
                if turn > 0:
                    kept.append(time.process_time() - start)
        stack.pop_all()  # the ranks end with the pool, and need not take leave of each other
    return seconds


def compare_schedules(options: argparse.Namespace) -> None:
    """Run the cases in turns, those of two ranks and those of one, and print their table."""
    seconds: dict[str, list[float]] = {}
    pool = RankPool()
    with tempfile.TemporaryDirectory() as directory:
        try:
            for ranks in (2, 1):
                cases = [case for case in options.cases if (case in ALONE) == (ranks == 1)]
                if not cases:
                    continue
                found = pool.run(
                    ranks,
                    "tools.bench.pipeline:time_steps",
                    timeout_s=3600,
                    cases=cases,
                    rounds=options.rounds,
                    size=SIZE | {"s": options.seq_length},
                    directory=directory,
                )
                for k, case in enumerate(cases):
                    of_ranks = [rank[k] for rank in found]
                    seconds[case] = [sum(row) for row in zip(*of_ranks, strict=True)]
        finally:
            pool.close()
    print_schedules(seconds, BATCH * options.seq_length)


def print_schedules(seconds: Mapping[str, list[float]], tokens: int) -> None:
    """Print tokens per CPU-second of every case, against 1F1B, torch's same and one process."""
    print("| case | tokens per CPU-second [range] | x 1f1b | x torch's same | x one process |\n"
          "|---|---|---|---|---|")  # fmt: skip
    for name, own in seconds.items():
        rates = [tokens / value for value in own]
        print(
            f"| {name} | {statistics.median(rates):.0f} [{min(rates):.0f}-{max(rates):.0f}] "
            + "".join(f"| {against(own, seconds.get(other))} " for other in rivals_of(name))
            + "|"
        )


def rivals_of(case: str) -> tuple[str, str, str]:
    """The cases that a case is held against; "" where there is none."""
    family, name = case.split("-", 1)
    ending = "-off" if name.endswith("-off") else ""
    alone = f"ours-single{ending}" if family == "ours" else "plain-single"
    pair = f"torch-{name.removesuffix('-off')}" if family == "ours" else ""
    if case in ALONE:
        return "", "plain-single" if family == "ours" else "", ""
    return f"{family}-1f1b{ending}", pair, alone


def against(own: list[float], other: list[float] | None) -> str:
    """Ratio of the rates: of the fastest rounds, and the median of all rounds."""
    if other is None or own is other:
        return ""
    ratios = [b / a for a, b in zip(own, other, strict=True)]
    return f"{min(other) / min(own):.3f} ({statistics.median(ratios):.3f})"


# ---- split -----------------------------------------------------------------------------------
@dataclass(eq=False)
class Ends:
    """An exchange without neighbours: inputs and output gradients are always there."""

    source: Tensor
    gradient: Tensor
    results: dict[Place, Tensor] = field(default_factory=dict)

    def take_input(self, place: Place) -> Tensor:
        """A fresh leaf."""
        return self.source.detach()

    def take_output_gradient(self, place: Place) -> Tensor:
        """The same every time."""
        return self.gradient

    def put_output(self, place: Place, output: Tensor) -> None:
        """Nobody wants it."""

    def put_input_gradient(self, place: Place, gradient: Tensor) -> None:
        """Nobody wants it."""


@dataclass(eq=False)
class Buffers:
    """A sink that only adds up."""

    grads: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """The parameter's buffer."""
        if param not in self.grads:
            self.grads[param] = param.detach().float().zero_()
        return self.grads[param]

    def written(self, param: nn.Parameter) -> None:
        """Nothing waits for it."""


def measure_split(hidden: int, rounds: int, directory: str) -> tuple[list[float], list[float]]:
    """CPU seconds of B, and of I and W, of all layers as one middle stage."""
    import torch

    from megatron_lite.pipeline.actions import Action, Kind
    from megatron_lite.pipeline.partition import StagePart
    from megatron_lite.train.microbatches import to_device
    from megatron_lite.train.passes import Passes, PassOptions

    torch.set_num_threads(1)
    with our_parts("ours-single", directory, SIZE | {"h": hidden}) as (parts, _):
        microbatches = to_device(next(parts.train_loader), parts)
        stage, place = parts.stage, (1, 0)
        stage.stage_parts[1] = StagePart(1, tuple(range(SIZE["layers"])))
        source = torch.randn(SIZE["s"], MICRO, hidden)
        ends = Ends(source, torch.randn_like(source))
        options = PassOptions(
            0, True, 1, parts.positions, parts.full_positions, parts.native, sink=Buffers()
        )
        passes = Passes(stage, ends, microbatches, {}, options)  # type: ignore[arg-type]

        handlers = {
            Kind.B: passes.backward,
            Kind.I: passes.input_gradient,
            Kind.W: passes.weight_gradient,
        }

        def seconds(*kinds: Kind) -> float:
            passes.forward(Action(Kind.F, *place))
            start = time.process_time()
            for kind in kinds:
                handlers[kind](Action(kind, *place))
            return time.process_time() - start

        whole, split = [], []
        for turn in range(rounds + 2):
            pair = seconds(Kind.B), seconds(Kind.I, Kind.W)
            if turn >= 2:
                whole.append(pair[0])
                split.append(pair[1])
    return whole, split


def compare_split(options: argparse.Namespace) -> None:
    """Print the cost of the split at every hidden size."""
    print("| hidden | B ms [range] | I + W ms | (I + W) / B, median | of rounds |\n"
          "|---|---|---|---|---|")  # fmt: skip
    for hidden in options.hidden:
        with tempfile.TemporaryDirectory() as directory:
            whole, split = measure_split(hidden, options.rounds, directory)
        low, high = statistics.quantiles([a / b for a, b in zip(split, whole, strict=True)], n=4)[
            ::2
        ]
        print(
            f"| {hidden} | {1e3 * statistics.median(whole):.2f} "
            f"[{1e3 * min(whole):.2f}-{1e3 * max(whole):.2f}] "
            f"| {1e3 * statistics.median(split):.2f} "
            f"| {statistics.median(split) / statistics.median(whole):.3f} "
            f"| quartiles {low:.3f}-{high:.3f} |"
        )


# ---- command line ----------------------------------------------------------------------------
def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("split", "schedules"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(DEFAULT_CASES))
    parser.add_argument("--rounds", type=int, help="measured (split: 60, schedules: 12)")
    parser.add_argument(
        "--seq-length", type=int, default=SIZE["s"], help="tokens of a microbatch, schedules only"
    )
    parser.add_argument("--hidden", nargs="+", type=int, default=[256, 1024], help="split only")
    return parser


def main() -> int:
    """Run a comparison."""
    parser = build_parser()
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 2:
        parser.error("--rounds is at least 2")
    options.rounds = options.rounds or {"split": 60, "schedules": 12}[options.what]
    (compare_split if options.what == "split" else compare_schedules)(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
