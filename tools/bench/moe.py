"""Time mixtures of experts: moving rows, and a whole layer, against transformers and torch.

Rows: gather to expert-major order and weighted combine against index_select and index_add, GB/s
by closed form and the share of a copy's, as tools/bench/kernels.py measures them. Layers: a
forward and a backward pass with weight gradients on one rank (threads as given) and on two
(one thread each); contestants take turns, step by step, after their results were compared.
Printed are tokens per second of all ranks (median, range), tokens per CPU-second, and the time
of the others over ours in the same round, median: above 1 we are faster. `--json F` keeps the
rows.

    python tools/bench/moe.py --dtype bf16 --rounds 9
    python tools/bench/moe.py --parts layer --ranks 2 --dtype fp32
    python tools/bench/moe.py --parts rows --widths 128 512 4096 --threads 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, too

from megatron_lite.errors import UserError
from tools.bench import kernels
from tools.bench import ranks as rank_starter

if TYPE_CHECKING:
    from megatron_lite.mesh.launch import WorldInfo
    from tools.bench.kernel_cases import Case
    from tools.bench.moe_peers import Size

PARTS = ("rows", "layer")
AGREEMENT = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}  # of norms, results and input gradients


# ---- rows ----------------------------------------------------------------------------------
def row_cases(size: Size, options: argparse.Namespace) -> Iterator[Case]:
    """Pack and unpack of one mixture; the backward pass of each is the other's forward."""
    import torch
    from torch import Tensor

    from megatron_lite.ops import moe
    from tools.bench.kernel_cases import Case, Contestant, Inputs

    draw = Inputs(getattr(torch, kernels.DTYPES[options.dtype]), torch.device(options.device))
    t, h, k = size.tokens, size.h, size.k
    scores = torch.rand(t, size.experts, device=draw.device)
    ids = scores.argsort(1)[:, :k].int().contiguous()
    _, _, row_of, source = moe.moe_route(ids, size.experts, 1, t * k)
    tokens, slots = (source // k).long(), source.long()
    x, packed = draw.leaf(t, h), draw.leaf(t * k, h)
    probs = torch.rand(t, k, device=draw.device).requires_grad_()

    def add_up(packed: Tensor, probs: Tensor) -> Tensor:
        weights = probs.flatten().index_select(0, slots).unsqueeze(1).to(packed.dtype)
        return packed.new_zeros(t, h).index_add(0, tokens, packed * weights)

    row, rows = h * draw.bytes, t * k
    packs = {
        "ours": Contestant(lambda x: moe.moe_gather(x, None, source, row_of)[0]),
        "index_select": Contestant(lambda x: x.index_select(0, tokens)),
    }
    label = f"pack {t} x {k} h {h}"
    yield Case("moe", label, "memory", 2.0 * rows * row, (3.0 * rows + t) * row, (x,), (x,), packs)
    unpacks = {
        "ours": Contestant(lambda p, w: moe.moe_combine(p, w, row_of, source)),
        "index_add": Contestant(add_up),
    }
    forward, inputs = float((rows + t) * row), (packed, probs)
    both, label = forward + (2 * rows + t) * row, f"unpack {t} x {k} h {h}"
    yield Case("moe", label, "memory", forward, both, inputs, inputs, unpacks)


def measure_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of all sizes."""
    import torch

    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    clock = kernels.Clock(options.device, options.window_ms, options.rounds)
    return [
        row
        for size in sizes(options)
        for h in options.widths or [size.h]
        for case in row_cases(replace(size, h=h), options)
        for row in kernels.measure_case(case, options, clock)
    ]


# ---- layers --------------------------------------------------------------------------------
def sizes(options: argparse.Namespace) -> Sequence[Size]:
    """The mixtures to time."""
    from tools.bench.moe_peers import SIZES

    return SIZES["quick" if options.quick else options.device]


def check_agreement(results: dict[str, tuple[Any, Any]], bound: float) -> None:
    """Refuse to time contestants that compute something else.

    Raises:
        RuntimeError: with the one that differs from ours.
    """
    want = results["ours"]
    for name, got in results.items():
        for mine, other in zip(want, got, strict=True):
            error = (mine.double() - other.double()).norm() / mine.double().norm()
            if not error <= bound:
                raise RuntimeError(f"{name} differs from ours by {error:.1e} of the norm")


def time_layers(
    steps: list[tuple[str, Callable[[], Any]]], rounds: int, ready: Callable[[], object]
) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of every step; every other round goes backwards.

    Args:
        ready: returns when all ranks may start, and when all have ended.
    """
    took: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in steps}
    for turn in range(rounds):
        for name, step in steps if turn % 2 == 0 else reversed(steps):
            ready()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            cpu = time.process_time() - cpu
            ready()
            took[name].append((time.perf_counter() - wall, cpu))
    return took


def layer_rows(
    size: Size, took: dict[str, list[tuple[float, float]]], world: int, dtype: str
) -> list[dict[str, Any]]:
    """Figures of each contestant; CPU time is this rank's, which stands for all."""
    rows = []
    ours = took["ours"]
    for name, samples in took.items():
        rates = sorted(world * size.tokens / wall for wall, _ in samples)
        cpu = statistics.median(size.tokens / used for _, used in samples)
        pairs = list(zip(samples, ours, strict=True))
        rows.append(
            {
                "case": str(size),
                "ranks": world,
                "dtype": dtype,
                "name": name,
                "tokens_per_s": (statistics.median(rates), rates[0], rates[-1]),
                "tokens_per_cpu_s": cpu,
                "ratio": statistics.median(his[0] / mine[0] for his, mine in pairs),
                "cpu_ratio": statistics.median(his[1] / mine[1] for his, mine in pairs),
            }
        )
    return rows


def measure_layers(options: argparse.Namespace, rank: int, world: int) -> list[dict[str, Any]]:
    """Every mixture on this rank, with all others.

    Comm: barriers, and what the layers do.
    """
    import torch

    from megatron_lite.mesh.collectives import barrier
    from megatron_lite.mesh.groups import world_group
    from megatron_lite.native.load import load_native
    from tools.bench.moe_peers import contestants

    load_native()
    if options.device == "cpu":
        torch.set_num_threads(options.threads if world == 1 else 1)
    everyone = world_group(rank, world)

    def ready() -> None:
        if options.device == "cuda":
            torch.cuda.synchronize()
        barrier(everyone)

    rows = []
    dtype = getattr(torch, kernels.DTYPES[options.dtype])
    for size in sizes(options):
        steps = contestants(size, rank, world, dtype, options.device)
        check_agreement({name: step() for name, step in steps}, AGREEMENT[options.dtype])
        took = time_layers(steps, options.rounds, ready)
        rows += layer_rows(size, took, world, options.dtype)
    return rows


def layer_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| layer | ranks | dtype | | tokens/s [range] | tokens/CPU-s | x ours | x ours, CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        middle, least, most = row["tokens_per_s"]
        figures = f"{middle:.0f} [{least:.0f}-{most:.0f}] | {row['tokens_per_cpu_s']:.0f}"
        ratios = f"{row['ratio']:.2f} | {row['cpu_ratio']:.2f}"
        head = f"{row['case']} | {row['ranks']} | {row['dtype']} | {row['name']}"
        lines.append(f"| {head} | {figures} | {ratios} |")
    return "\n".join(lines)


# ---- command line --------------------------------------------------------------------------
def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="CUDA where there is one")
    parser.add_argument("--dtype", choices=tuple(AGREEMENT), default="bf16")
    parser.add_argument("--threads", type=int, default=1, help="of one rank on the CPU (1)")
    parser.add_argument("--widths", nargs="+", type=int, help="h of the rows (that of the layers)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (7)")
    parser.add_argument("--window-ms", type=float, default=60, help="work per timing of rows (60)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, 2 rounds: does it run?")
    parser.add_argument("--json", metavar="FILE", help="keep the rows here")
    parser.add_argument("--rank-rows", help=argparse.SUPPRESS)  # where rank 0 leaves its rows
    return parser


def measure_ranks(options: argparse.Namespace, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The layers on two ranks, which this program starts.

    Raises:
        UserError: they did not end well; they have told why.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        rows = Path(directory) / "rows.json"
        flags = [*arguments, "--device", options.device, "--rank-rows", str(rows)]
        code = rank_starter.run(__file__, flags, 2, options.device, lambda info: None)
        if code:
            raise UserError(f"the ranks of the benchmark ended with code {code}")
        measured: list[dict[str, Any]] = json.loads(rows.read_text())
        return measured


def run_rank(options: argparse.Namespace, info: WorldInfo) -> None:
    """One of the ranks that `measure_ranks` started."""
    rows = measure_layers(options, info.rank, info.world_size)
    if info.rank == 0:
        Path(options.rank_rows).write_text(json.dumps(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = build_parser().parse_args(arguments)
    try:
        options.compile, options.isa = False, None  # what kernels.py offers and this does not
        kernels.check_options(options)
        if options.widths is not None and min(options.widths) < 1:
            raise UserError(f"--widths {min(options.widths)}: h is at least 1")
        if options.rank_rows is not None:
            return rank_starter.run(
                __file__, arguments, 2, options.device, lambda info: run_rank(options, info)
            )
        native = kernels.load_native()
        kernels.require_native(native, options.device, wanted_by_user=True)
        assert native.library is not None
        known = kernels.facts(options, native.library)
        print("; ".join(f"{key} {value}" for key, value in known.items() if value is not None))
        moved = measure_rows(options) if "rows" in options.parts else []
        if moved:
            print(f"\n{kernels.table(moved)}", flush=True)
        rows: list[dict[str, Any]] = []
        if "layer" in options.parts:
            for world in options.ranks:
                rows += (
                    measure_layers(options, 0, 1)
                    if world == 1
                    else measure_ranks(options, arguments)
                )
            print(f"\n{layer_table(rows)}")
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.json is not None:
        text = json.dumps({"facts": known, "rows": moved, "layers": rows}, indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
