"""Time collectives: operation x group size x message size, on gloo (CPU) or NCCL (CUDA).

Starts its own ranks, or runs under torchrun. Printed per case: median and least time over
rounds (of the slowest rank), message bytes per time, and bytes that a rank sends per time;
then per operation and group size the line alpha + beta * wire bytes fitted to the medians,
or with `--fit least` to the least times (a busy machine).
`--out F` keeps both in a file that `megatron_lite.mesh.cost.load_costs` reads (its schema is
there).

    python tools/bench/collectives.py --ranks 2 4 --sizes 4K 64K 1M 16M --out costs.json
    torchrun --nproc-per-node 8 tools/bench/collectives.py --ranks 2 4 8
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, too

from megatron_lite.errors import UserError
from megatron_lite.mesh.cost import (
    OPERATIONS,
    CollectiveCosts,
    Measurement,
    fit_all,
    save_costs,
)
from megatron_lite.mesh.world import WorldInfo
from tools.bench import ranks as rank_starter

if TYPE_CHECKING:
    import torch

    from megatron_lite.mesh.groups import Group

SIZES = ("4K", "32K", "256K", "2M", "16M")
WARM_UP = 3
# Shorter calls are repeated within a round: clocks and barriers cost microseconds.
ROUND_S = 2e-3
MOST_CALLS = 100


# ---- measuring -------------------------------------------------------------------------------
def build_call(
    op: str, message_bytes: int, group: Group, dtype: str, device: str
) -> tuple[Callable[[], object], int]:
    """One operation on zeros (sums of them stay zeros), and the message's bytes as rounded up.

    Comm: per call the operation, on `message_bytes` as `wire_bytes` defines them.
    """
    import torch

    from megatron_lite.mesh import collectives

    kind = getattr(torch, dtype)
    item, n = kind.itemsize, group.size
    part = max(1, math.ceil(message_bytes / item / n))
    whole_t = torch.zeros(n * part, dtype=kind, device=device)
    other_t = torch.zeros_like(whole_t)
    part_t = torch.zeros(part, dtype=kind, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: collectives.all_reduce(whole_t, group),
        "all_gather": lambda: collectives.all_gather_into(whole_t, part_t, group),
        "reduce_scatter": lambda: collectives.reduce_scatter_into(part_t, whole_t, group),
        "broadcast": lambda: collectives.broadcast(whole_t, group),
        "all_to_all": lambda: collectives.all_to_all_single(other_t, whole_t, None, None, group),
        "send_recv": lambda: shift(other_t, whole_t, group),
    }
    return calls[op], n * part * item


def shift(received: torch.Tensor, sent: torch.Tensor, group: Group) -> None:
    """Send to the next rank of the ring and receive from the one before.

    Comm: one send and one receive of sent.numel() elements.
    """
    import torch.distributed as dist

    after = group.ranks[(group.rank + 1) % group.size]
    before = group.ranks[(group.rank - 1) % group.size]
    pair = [
        dist.P2POp(dist.isend, sent, after, group.process_group),
        dist.P2POp(dist.irecv, received, before, group.process_group),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


def measure_us(call: Callable[[], object], group: Group, rounds: int, device: str) -> list[float]:
    """Microseconds per call in each round, of the slowest rank; equal on all ranks.

    Comm: beside the calls a barrier per round and two all-reduces.
    """
    import torch

    from megatron_lite.mesh.collectives import all_reduce, barrier

    def settle() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def timed(count: int) -> float:
        settle()
        barrier(group)
        settle()
        start = time.perf_counter()
        for _ in range(count):
            call()
        settle()
        return (time.perf_counter() - start) / count

    timed(WARM_UP)
    once = torch.tensor([timed(WARM_UP)], dtype=torch.float64, device=device)
    all_reduce(once, group, "max")  # all ranks repeat alike
    count = min(MOST_CALLS, max(1, math.ceil(ROUND_S / float(once.item()))))
    seconds = [timed(count) for _ in range(rounds)]
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    all_reduce(slowest, group, "max")
    return [1e6 * value for value in slowest.tolist()]


def measure_group(
    options: argparse.Namespace, group: Group, nodes: int, show: Callable[[Measurement], None]
) -> list[Measurement]:
    """All operations and message sizes on one group; every member calls it."""
    rows = []
    for op in options.ops:
        for size in options.sizes:
            call, message_bytes = build_call(op, size, group, options.dtype, options.device)
            times = measure_us(call, group, options.rounds, options.device)
            row = Measurement(
                op, group.size, nodes, message_bytes, statistics.median(times), min(times)
            )
            show(row)
            rows.append(row)
    return rows


def measure(options: argparse.Namespace, info: WorldInfo) -> None:
    """The work of one rank; rank 0 is in every group and tells."""
    import torch

    from megatron_lite.mesh.collectives import barrier
    from megatron_lite.mesh.groups import world_group

    if info.rank == 0:
        print("| operation | ranks | nodes | bytes | median us | least us | algorithm GB/s "
              "| bus GB/s |\n|---|---|---|---|---|---|---|---|", flush=True)  # fmt: skip
    world = world_group(info.rank, info.world_size)
    rows: list[Measurement] = []
    for size in options.ranks:
        members = [index * options.stride for index in range(size)]
        nodes = len({member // info.local_world_size for member in members})
        group = rank_starter.new_group("bench", members, info.rank)
        if group is not None:
            show = show_row if info.rank == 0 else lambda row: None
            rows += measure_group(options, group, nodes, show)
        barrier(world)  # those outside the group wait, and disturb nobody
    if info.rank != 0:
        return
    costs = CollectiveCosts(
        backend="nccl" if options.device == "cuda" else "gloo",
        device=rank_starter.device_name(options.device),
        dtype=options.dtype,
        torch=torch.__version__,
        measured=datetime.datetime.now(datetime.UTC).date().isoformat(),
        fitted=f"{options.fit}_us",
        rows=tuple(rows),
        fits=fit_all(rows, f"{options.fit}_us"),
    )
    show_fits(costs)
    if options.out is not None:
        save_costs(costs, Path(options.out))


def show_row(row: Measurement) -> None:
    """Print one line of the table."""
    print(
        f"| {row.op} | {row.ranks} | {row.nodes} | {row.message_bytes} | {row.median_us:.1f} "
        f"| {row.least_us:.1f} | {row.algorithm_gb_per_s:.3f} | {row.bus_gb_per_s:.3f} |",
        flush=True,
    )


def show_fits(costs: CollectiveCosts) -> None:
    """Print the fitted lines."""
    print("\n| operation | ranks | nodes | alpha us | 1 / beta GB/s | largest error |\n"
          "|---|---|---|---|---|---|")  # fmt: skip
    for (op, ranks, nodes), fit in costs.fits.items():
        rate = f"{1e-3 / fit.beta_us_per_byte:.3f}" if fit.beta_us_per_byte > 0 else "-"
        print(f"| {op} | {ranks} | {nodes} | {fit.alpha_us:.1f} | {rate} | {fit.error:.0%} |")


# ---- command line ----------------------------------------------------------------------------
def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="group sizes (2)")
    parser.add_argument("--stride", type=int, default=1, help="ranks between members (1)")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="message bytes, K M G")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds per case (20)")
    parser.add_argument("--fit", choices=("median", "least"), default="median", help="which times")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="CUDA where there is one")
    parser.add_argument("--out", metavar="FILE", help="keep rows and fits in this JSON file")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Refuse what cannot be measured; sizes become bytes, the device is chosen.

    Raises:
        UserError: names the flag and what is legal.
    """
    options.sizes = sorted({rank_starter.parse_bytes(text) for text in options.sizes})
    options.ranks = sorted(set(options.ranks))
    if options.ranks[0] < 2:
        raise UserError(f"--ranks {options.ranks[0]}: a group has at least 2")
    if options.stride < 1 or options.rounds < 1:
        raise UserError("--stride and --rounds are at least 1")
    item = {"float32": 4, "bfloat16": 2}[options.dtype]
    for ranks in options.ranks:
        if len({math.ceil(size / item / ranks) for size in options.sizes}) < 2:
            raise UserError(f"--sizes: {ranks} ranks need two different ones, for a line")
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
    needed = (max(options.ranks) - 1) * options.stride + 1
    return rank_starter.run(
        __file__, given, needed, options.device, lambda info: measure(options, info)
    )


if __name__ == "__main__":
    sys.exit(main())
