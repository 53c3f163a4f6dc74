"""Time whole steps of two gloo ranks that divide a Llama over the data axis, against peers.

Ours at the four strategies (`ours-no_shard` ... `ours-optim_grads_params`) by the flags of
`pretrain.py`; the same-size plain PyTorch model under torch DDP, ZeroRedundancyOptimizer,
`fully_shard` per block, and DeepSpeed's stages where it is installed; and each family in one
process with two threads. Ranks have one thread. 125 M parameters leave no room for all cases
at once, so each round starts every case anew, in turns (every other round backwards): one
step to warm up, then `--steps` measured ones. Peak memory is the peak resident size (VmHWM)
of a rank over the measured steps, interpreter and libraries included; what they take alone is
printed, too. `--json F` keeps the rows.

    python tools/bench/sharding.py --size 30M --rounds 5
    python tools/bench/sharding.py --size 125M --rounds 3 --steps 2
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, too

from tools.bench import step as whole_step

Step = Callable[[], object]
SIZES: Mapping[str, dict[str, int]] = {
    "30M": {"layers": 10, "h": 384, "heads": 6, "s": 512, "v": 32000},
    "30M-16": {"layers": 10, "h": 384, "heads": 6, "s": 512, "v": 32000},  # 8,192 tokens per step
    "125M": {"layers": 14, "h": 768, "heads": 12, "s": 256, "v": 32000},
    "125M-16": {"layers": 14, "h": 768, "heads": 12, "s": 256, "v": 32000},  # 4,096 tokens
    "tiny": {"layers": 2, "h": 64, "heads": 2, "s": 32, "v": 256},  # tries the program
}
BATCHES = {"30M": 4, "30M-16": 16, "125M": 4, "125M-16": 16, "tiny": 4}  # samples of all ranks
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ALONE = ("ours-2threads", "plain-2threads")
TORCH = ("torch-ddp", "torch-zero1", "torch-fsdp2")
DEEPSPEED = ("deepspeed-1", "deepspeed-2", "deepspeed-3")
CASES = (*ALONE, *(f"ours-{name}" for name in STRATEGIES), *TORCH, *DEEPSPEED)
FIRST = "torch-ddp"  # ratios are to this one


def our_flags(case: str, size: Mapping[str, int], batch: int, directory: str) -> list[str]:
    """Flags of `pretrain.py` for one of our cases."""
    flags = [
        "--device", "cpu", "--num-layers", str(size["layers"]), "--hidden-size", str(size["h"]),
        "--num-attention-heads", str(size["heads"]), "--seq-length", str(size["s"]),
        "--max-position-embeddings", str(size["s"]), "--hidden-dropout", "0",
        "--attention-dropout", "0", "--position-embedding-type", "rope", "--normalization",
        "RMSNorm", "--swiglu", "--disable-bias-linear", "--ffn-hidden-size",
        str(8 * size["h"] // 3), "--tokenizer-type", "NullTokenizer", "--vocab-size",
        str(size["v"]), "--mock-data", "--split", "100,0,0", "--data-cache-path", directory,
        "--global-batch-size", str(batch), "--lr", "1e-3", "--train-iters", "100000",
        "--eval-iters", "0", "--log-interval", "1000000",
    ]  # fmt: skip
    if case in ALONE:
        return [*flags, "--micro-batch-size", str(batch)]
    strategy = case.removeprefix("ours-")
    return [
        *flags, "--micro-batch-size", str(batch // 2),
        "--data-parallel-sharding-strategy", strategy, "--overlap-grad-reduce",
        *(["--overlap-param-gather"] if strategy != "no_shard" else []),
    ]  # fmt: skip


@contextmanager
def our_step(flags: Sequence[str]) -> Iterator[Step]:
    """One step of the real program."""
    from megatron_lite.config.flags import parse_config
    from megatron_lite.config.rules import check_config
    from megatron_lite.mesh.launch import RunStatus, detect_world
    from megatron_lite.train.build import build_run
    from megatron_lite.train.loop import run_step

    info = detect_world(os.environ)
    config = parse_config(flags, os.environ)
    check_config(config, info.world_size)
    with build_run(config, info, RunStatus()) as (parts, state):
        yield lambda: run_step(parts, state)


@contextmanager
def measured_peak(opened: AbstractContextManager[Step]) -> Iterator[Step]:
    """A step whose peak of memory begins behind the first one, which allocates what stays."""
    from tools.bench.sharding_peers import forget_peak

    with opened as step:
        steps = 0

        def run() -> object:
            nonlocal steps
            if steps == 1:
                forget_peak()
            steps += 1
            return step()

        yield run


def work(case: str, name: str, directory: str, started: float) -> None:
    """Child process of a case, of the size of a name."""
    import torch

    from tools.bench.peers import Size
    from tools.bench.sharding_peers import peer_step

    torch.set_num_threads(2 if case in ALONE else 1)
    size, batch = SIZES[name], BATCHES[name]
    opened: AbstractContextManager[Step]
    if case.startswith("ours"):
        opened = our_step(our_flags(case, size, batch, directory))
    else:
        opened = peer_step(case, Size(**size), batch)
    whole_step.serve(measured_peak(opened), "fp32", started)


def run_case(name: str, size: str, steps: int) -> list[dict[str, float]]:
    """Start a case, measure its steps, end it."""
    with tempfile.TemporaryDirectory() as directory:
        ranks = 1 if name in ALONE else 2
        case = whole_step.Case(f"{size}:{name}", "fp32", directory, ranks, __file__)
        try:
            for _ in range(steps):
                case.step()
        finally:
            case.close()
    return case.rows


def baseline_mib() -> float:
    """Resident size of a process that has only imported what every case imports."""
    code = (
        "import torch, torch.distributed, tools.bench.sharding_peers as p; print(p.resident_mib())"
    )
    root = str(Path(__file__).resolve().parents[2])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.getenv("PYTHONPATH", "")])}
    return float(subprocess.check_output([sys.executable, "-c", code], env=environ, text=True))


def available(cases: Sequence[str]) -> list[str]:
    """The cases that can run here; a line for the others."""
    if importlib.util.find_spec("deepspeed") or not set(cases) & set(DEEPSPEED):
        return list(cases)
    print("DeepSpeed is not installed: its cases are left out", file=sys.stderr)
    return [case for case in cases if case not in DEEPSPEED]


def told(number: int, case: str, rows: Sequence[Mapping[str, float]], tokens: int) -> str:
    """One line on a case as soon as it is measured: a long run that is stopped loses nothing."""
    wall = statistics.median(tokens / row["wall_s"] for row in rows)
    cpu = statistics.median(tokens / row["cpu_s"] for row in rows)
    most = max(row["rss_mib"] for row in rows)
    return f"round {number + 1} {case}: {wall:.0f} tokens/s, {cpu:.0f} per CPU-s, {most:.0f} MiB"


def summarize(rounds: Mapping[str, list[list[dict[str, float]]]], tokens: int) -> list[Any]:
    """One row per case; ratios are those of the medians of the same round."""
    table = []
    for name, of_case in rounds.items():
        rows = [row for of_round in of_case for row in of_round]
        alone = "ours-2threads" if name.startswith("ours") else "plain-2threads"
        table.append(
            {
                "case": name,
                "tokens_per_s": spread([tokens / row["wall_s"] for row in rows]),
                "tokens_per_cpu_s": spread([tokens / row["cpu_s"] for row in rows]),
                "cpu_ratio": ratio(of_case, rounds.get(FIRST), "cpu_s"),
                "wall_ratio": ratio(of_case, rounds.get(FIRST), "wall_s"),
                "wall_ratio_alone": ratio(of_case, rounds.get(alone), "wall_s"),
                "rss_mib": max(row["rss_mib"] for row in rows),
            }
        )
    return table


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return statistics.median(values), min(values), max(values)


def ratio(
    own: Sequence[Sequence[Mapping[str, float]]],
    other: Sequence[Sequence[Mapping[str, float]]] | None,
    what: str,
) -> tuple[float, float, float] | None:
    """How many times as fast as the other case, over rounds."""
    if other is None:
        return None
    return spread(
        [
            statistics.median(row[what] for row in theirs)
            / statistics.median(row[what] for row in mine)
            for mine, theirs in zip(own, other, strict=True)
        ]
    )


def print_table(table: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a Markdown table."""
    print(f"| case | tokens/s [range] | tokens per CPU-second [range] | x {FIRST}, CPU "
          f"| x {FIRST}, wall | x own one process of 2 threads, wall | peak RSS MiB per rank |\n"
          "|---|---|---|---|---|---|---|")  # fmt: skip
    for row in table:
        cells = [
            *(f"{m:.0f} [{a:.0f}-{b:.0f}]" for m, a, b in (row["tokens_per_s"],)),
            *(f"{m:.0f} [{a:.0f}-{b:.0f}]" for m, a, b in (row["tokens_per_cpu_s"],)),
            *(
                "" if value is None else f"{value[0]:.2f} [{value[1]:.2f}-{value[2]:.2f}]"
                for value in (row["cpu_ratio"], row["wall_ratio"], row["wall_ratio_alone"])
            ),
            f"{row['rss_mib']:.0f}",
        ]
        print(f"| {row['case']} | {' | '.join(cells)} |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="30M")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5, help="starts of every case (5)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a round (3)")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        size, case = options.worker.split(":")
        work(case, size, options.directory, options.started)
        return 0
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps are at least 1")
    cases = available(options.cases)
    tokens = BATCHES[options.size] * SIZES[options.size]["s"]
    rounds: dict[str, list[list[dict[str, float]]]] = {case: [] for case in cases}
    for number in range(options.rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            rows = run_case(case, options.size, options.steps)
            rounds[case].append(rows)
            print(told(number, case, rows, tokens), file=sys.stderr, flush=True)
    table = summarize(rounds, tokens)
    print(f"{options.size}: imports alone take {baseline_mib():.0f} MiB\n")
    print_table(table)
    if options.json:
        Path(options.json).write_text("".join(json.dumps(row) + "\n" for row in table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
