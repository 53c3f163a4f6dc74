"""How much a collective and matrix products slow each other: the price of hiding one.

Two ranks or more run square GEMMs and one kind of collective, alone and at once, in turns.
Printed per message size, least times over rounds of the slowest rank: the GEMM rate alone and
while the collective never pauses (compute slowdown), the collective alone and while GEMMs
never pause (collective slowdown), and with as much time of both the share of it hidden:
(GEMMs + collective - together) / the shorter of the two; 100% is free, below 0 is worse than
one after the other. `--out F` keeps the rows, one JSON object per line. Other load on the
machine shows in all of them, in the last one most.

    python tools/bench/overlap.py --ranks 2 --op all_reduce --sizes 1M 16M --gemm 512
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, too

from megatron_lite.errors import UserError
from megatron_lite.mesh.cost import OPERATIONS
from megatron_lite.mesh.world import WorldInfo
from tools.bench import ranks as rank_starter
from tools.bench.collectives import build_call

if TYPE_CHECKING:
    from megatron_lite.mesh.groups import Group

WARM_UP = 3
LONGER = 3  # so many times the work of what is looked at, so that it never pauses meanwhile
Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One message size; times in microseconds."""

    op: str
    ranks: int
    message_bytes: int
    dtype: str
    device: str
    gemm: int
    gemm_us: float
    gemm_busy_us: float
    collective_us: float
    collective_busy_us: float
    hidden: float

    @property
    def compute_slowdown(self) -> float:
        """GEMM time under a collective, relative to alone."""
        return self.gemm_busy_us / self.gemm_us

    @property
    def collective_slowdown(self) -> float:
        """Collective time under GEMMs, relative to alone."""
        return self.collective_busy_us / self.collective_us

    def gflops(self, us: float) -> float:
        """Rate of the GEMM that takes `us`."""
        return 2e-3 * self.gemm**3 / us


# ---- running both ----------------------------------------------------------------------------
def together_on_cpu(gemm: Call, gemms: int, collective: Call, collectives: int) -> list[float]:
    """Seconds until the GEMMs, the collectives and both are done; 0 of either is allowed.

    The collectives run on a thread of their own: their end is seen when it happens.
    """

    def communicate() -> float:
        for _ in range(collectives):
            collective()
        return time.perf_counter()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(time.perf_counter).result()  # the thread exists before the clock starts
        start = time.perf_counter()
        future = pool.submit(communicate) if collectives else None
        for _ in range(gemms):
            gemm()
        computed = time.perf_counter()
        communicated = future.result() if future is not None else start
    return [computed - start, communicated - start, max(computed, communicated) - start]


def together_on_cuda(gemm: Call, gemms: int, collective: Call, collectives: int) -> list[float]:
    """As `together_on_cpu`: the two on streams of their own, timed by events.

    Two threads launch them, so that neither's launches hold up the other's.
    """
    import torch

    device = torch.cuda.current_device()
    torch.cuda.synchronize()
    start, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(3))

    def launch(call: Call, count: int, end: torch.cuda.Event) -> None:
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream()
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            for _ in range(count):
                call()
            end.record()

    start.record()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launch, collective, collectives, ends[1])
        launch(gemm, gemms, ends[0])
        future.result()
    torch.cuda.synchronize()
    seconds = [start.elapsed_time(end) / 1e3 for end in ends]
    return [*seconds, max(seconds)]


def measure_size(options: argparse.Namespace, group: Group, size: int) -> Row:
    """All figures of one message size; equal on all ranks.

    Comm: the collectives, a barrier per timing, and all-reduces of the times.
    """
    import torch

    from megatron_lite.mesh.collectives import all_reduce, barrier

    kind = getattr(torch, options.dtype)
    a = torch.ones(options.gemm, options.gemm, dtype=kind, device=options.device)
    product = torch.empty_like(a)
    collective, message_bytes = build_call(options.op, size, group, options.dtype, options.device)
    both = together_on_cuda if options.device == "cuda" else together_on_cpu

    def timed(gemms: int, collectives: int) -> list[float]:
        barrier(group)
        seconds = both(lambda: torch.mm(a, a, out=product), gemms, collective, collectives)
        slowest = torch.tensor(seconds, dtype=torch.float64, device=options.device)
        all_reduce(slowest, group, "max")
        values: list[float] = slowest.tolist()
        return values

    timed(WARM_UP, WARM_UP)
    gemm_s, collective_s = timed(WARM_UP, 0)[0] / WARM_UP, timed(0, WARM_UP)[1] / WARM_UP
    window_s = max(options.window_ms / 1e3, gemm_s, collective_s)
    gemms, calls = math.ceil(window_s / gemm_s), math.ceil(window_s / collective_s)
    samples: list[tuple[float, ...]] = []
    for _ in range(options.rounds):
        samples.append(
            (
                timed(gemms, 0)[0],
                timed(gemms, LONGER * calls)[0],
                timed(0, calls)[1],
                timed(LONGER * gemms, calls)[1],
                timed(gemms, calls)[2],
            )
        )
    compute, compute_busy, communicate, communicate_busy, at_once = (
        min(column) for column in zip(*samples, strict=True)
    )
    return Row(
        op=options.op,
        ranks=group.size,
        message_bytes=message_bytes,
        dtype=options.dtype,
        device=options.device,
        gemm=options.gemm,
        gemm_us=1e6 * compute / gemms,
        gemm_busy_us=1e6 * compute_busy / gemms,
        collective_us=1e6 * communicate / calls,
        collective_busy_us=1e6 * communicate_busy / calls,
        hidden=(compute + communicate - at_once) / min(compute, communicate),
    )


def measure(options: argparse.Namespace, info: WorldInfo) -> None:
    """The work of one rank."""
    from megatron_lite.mesh.groups import world_group

    if info.rank == 0:
        name = rank_starter.device_name(options.device)
        print(f"{name}; GEMM {options.gemm}^3 {options.dtype}\n", flush=True)
        print("| operation | ranks | bytes | GEMM alone GFLOP/s | under it | compute slowdown "
              "| collective alone us | under GEMMs | collective slowdown | hidden |\n"
              "|---|---|---|---|---|---|---|---|---|---|", flush=True)  # fmt: skip
    group = world_group(info.rank, info.world_size)
    rows = []
    for size in options.sizes:
        row = measure_size(options, group, size)
        rows.append(row)
        if info.rank == 0:
            show_row(row)
    if info.rank == 0 and options.out is not None:
        Path(options.out).write_text("".join(f"{json.dumps(as_entry(row))}\n" for row in rows))


def as_entry(row: Row) -> dict[str, object]:
    """A row with its ratios, as `--out` keeps it."""
    return {
        **asdict(row),
        "compute_slowdown": row.compute_slowdown,
        "collective_slowdown": row.collective_slowdown,
    }


def show_row(row: Row) -> None:
    """Print one line of the table."""
    print(
        f"| {row.op} | {row.ranks} | {row.message_bytes} | {row.gflops(row.gemm_us):.1f} "
        f"| {row.gflops(row.gemm_busy_us):.1f} | {row.compute_slowdown:.2f} "
        f"| {row.collective_us:.0f} | {row.collective_busy_us:.0f} "
        f"| {row.collective_slowdown:.2f} | {row.hidden:.0%} |",
        flush=True,
    )


# ---- command line ----------------------------------------------------------------------------
def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=OPERATIONS, default="all_reduce")
    parser.add_argument(
        "--ranks", type=int, default=2, help="ranks to start; torchrun's if started by it"
    )
    parser.add_argument("--sizes", nargs="+", default=["1M", "16M"], help="message bytes, K M G")
    parser.add_argument("--gemm", type=int, default=512, help="rows, columns and depth (512)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds per size (7)")
    parser.add_argument("--window-ms", type=float, default=50, help="work per timing (50)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="CUDA where there is one")
    parser.add_argument("--out", metavar="FILE", help="keep the rows here, JSON lines")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Refuse what cannot be measured; sizes become bytes, the device is chosen.

    Raises:
        UserError: names the flag and what is legal.
    """
    options.sizes = sorted({rank_starter.parse_bytes(text) for text in options.sizes})
    if options.ranks < 2:
        raise UserError(f"--ranks {options.ranks}: a group has at least 2")
    if options.gemm < 1 or options.rounds < 1:
        raise UserError("--gemm and --rounds are at least 1")
    if not 0 < options.window_ms <= 10_000:
        raise UserError(f"--window-ms {options.window_ms:g}: above 0, at most 10000")
    rank_starter.check_writable(options.out)
    options.device = options.device or rank_starter.default_device()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(given)
    try:
        check_options(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return rank_starter.run(
        __file__, given, options.ranks, options.device, lambda info: measure(options, info)
    )


if __name__ == "__main__":
    sys.exit(main())
