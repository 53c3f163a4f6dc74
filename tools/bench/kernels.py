"""Time every native operation beside plain torch and libraries, in the same rounds.

Printed per operation, size and pass: the median time of a call, its rate by the closed forms of
docs/kernels.md (GB/s or GFLOP/s), the share of the ceiling that was measured in the same
rounds (memory-bound: a copy that moves as many bytes; compute-bound: a square matrix product),
and how many times as long each peer takes (median over rounds; above 1 we are faster). CPU
figures are CPU time of one thread (`--threads`), CUDA figures are of events. `--json F` keeps
the rows.

    python tools/bench/kernels.py --device cpu --dtype bf16 --compile
    python tools/bench/kernels.py --ops attention norm --rounds 9 --json rows.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, too

from megatron_lite.errors import UserError
from megatron_lite.native.load import load_native, require_native
from tools.bench import ranks as rank_starter

if TYPE_CHECKING:
    import torch

    from tools.bench.kernel_cases import Case, Contestant

OPERATIONS = (
    *("cross_entropy", "attention", "norm", "activation", "rotary", "dropout", "softmax"),
    *("matrix", "moe", "optimizer", "fp8"),
)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# What keeps torch (ATen, oneDNN, MKL) from using more than our level does.
ISA = {
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
}
GEMM = {"quick": 256, "cpu": 1024, "cuda": 8192}
Call = Callable[[], object]


# ---- timing --------------------------------------------------------------------------------
def seconds_on_cpu(call: Call, count: int) -> float:
    """CPU time of `count` calls, of all threads of this process."""
    start = time.process_time()
    for _ in range(count):
        call()
    return time.process_time() - start


def seconds_on_cuda(call: Call, count: int) -> float:
    """Time of `count` calls on the current stream."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


class Clock:
    """Times calls in alternating rounds."""

    def __init__(self, device: str, window_ms: float, rounds: int) -> None:
        self._seconds = seconds_on_cuda if device == "cuda" else seconds_on_cpu
        self._window_s, self._rounds = window_ms / 1e3, rounds

    def rounds_of(self, calls: dict[str, Call]) -> tuple[dict[str, list[float]], dict[str, str]]:
        """Seconds per call in every round, by name; and why others failed."""
        counts, failed = {}, {}
        for name, call in calls.items():
            try:
                call()  # warms up: compiles, allocates
                took = max(self._seconds(call, 1), 1e-6)
            except Exception as error:  # a peer's limits are not ours
                if name == "ours":
                    raise
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                continue
            counts[name] = max(1, min(10_000, int(self._window_s / took)))
        samples: dict[str, list[float]] = {name: [] for name in counts}
        for _ in range(self._rounds):
            for name, count in counts.items():
                samples[name].append(self._seconds(calls[name], count) / count)
        return samples, failed


# ---- calls ---------------------------------------------------------------------------------
def forward_call(case: Case, contestant: Contestant) -> Call:
    """The forward pass alone, nothing kept for a backward pass."""
    import torch

    arguments = (*case.inputs, *contestant.extra)

    def call() -> object:
        with torch.no_grad():
            return contestant.function(*arguments)

    return call


def both_call(case: Case, contestant: Contestant) -> Call:
    """Forward and backward pass; gradients are returned, not accumulated."""
    import torch

    arguments = (*case.inputs, *contestant.extra)
    seeds: list[torch.Tensor] = []

    def call() -> object:
        out = contestant.function(*arguments)
        results = [out] if isinstance(out, torch.Tensor) else list(out)
        if not seeds:
            seeds.extend(torch.ones_like(x) for x in results)
        return torch.autograd.grad(results, case.leaves, seeds, allow_unused=True)

    return call


def ceiling_call(case: Case, work: float, gemm: int, dtype: torch.dtype, device: str) -> Call:
    """What bounds a case: a copy that moves `work` bytes, or a square matrix product."""
    import torch

    if case.bound == "compute":
        a = torch.randn(gemm, gemm, device=device).to(dtype)
        return lambda: torch.mm(a, a)
    source = torch.ones(max(int(work) // 2, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def compiled(contestant: Contestant) -> Contestant:
    """The same under torch.compile."""
    import torch

    torch._dynamo.reset()
    return replace(contestant, function=torch.compile(contestant.function, dynamic=False))


def measure_case(case: Case, options: argparse.Namespace, clock: Clock) -> list[dict[str, Any]]:
    """Rows of a case: its forward pass, and forward and backward."""
    import torch

    contestants = dict(case.contestants)
    if options.compile:
        compiles = {name: c for name, c in contestants.items() if c.compiles}
        contestants |= {f"{name}-compile": compiled(c) for name, c in compiles.items()}
    first = "call" if case.both is None else "forward"
    passes = [] if case.both_only else [(first, case.forward, forward_call)]
    if case.both is not None:
        passes.append(("forward+backward", case.both, both_call))
    rows = []
    for name, work, build in passes:
        calls = {key: build(case, contestant) for key, contestant in contestants.items()}
        gemm = options.gemm
        dtype = getattr(torch, DTYPES[options.dtype])
        calls["ceiling"] = ceiling_call(case, work, gemm, dtype, options.device)
        samples, failed = clock.rounds_of(calls)
        ceiling_work = work if case.bound == "memory" else 2.0 * gemm**3
        rows.append(row_of(case, name, work, ceiling_work, samples, failed, options.dtype))
    return rows


def row_of(
    case: Case,
    name: str,
    work: float,
    ceiling_work: float,
    samples: dict[str, list[float]],
    failed: dict[str, str],
    dtype: str,
) -> dict[str, Any]:
    """Figures of one pass; ratios and shares are medians over rounds.

    `work` and `ceiling_work` are bytes or FLOPs of a call of the operation and of the ceiling.
    """
    ours = samples["ours"]
    peers = [peer for peer in samples if peer not in ("ours", "ceiling")]
    shares = [
        work / mine / (ceiling_work / limit)
        for mine, limit in zip(ours, samples["ceiling"], strict=True)
    ]
    return {
        "operation": case.operation,
        "case": case.label,
        "pass": name,
        "dtype": dtype,
        "bound": case.bound,
        "ms": 1e3 * statistics.median(ours),
        "least_ms": 1e3 * min(ours),
        "rate": work / statistics.median(ours) / 1e9,
        "ceiling_rate": ceiling_work / statistics.median(samples["ceiling"]) / 1e9,
        "share": statistics.median(shares),
        "peer_ms": {peer: 1e3 * statistics.median(samples[peer]) for peer in peers},
        "ratios": {
            peer: statistics.median(b / a for a, b in zip(ours, samples[peer], strict=True))
            for peer in peers
        },
        "failed": failed,
        "target": case.target if name == "forward+backward" else None,
    }


# ---- printing ------------------------------------------------------------------------------
def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    peers = sorted(
        {peer for row in rows for peer in row["ratios"]}, key=lambda p: (p != "torch", p)
    )
    head = ["operation", "pass", "dtype", "ms", "least", "rate", "of ceiling"]
    lines = [" | ".join(["", *head, *(f"x {peer}" for peer in peers), ""]).strip()]
    lines.append("|" + "---|" * (len(head) + len(peers)))
    for row in rows:
        rate, unit = row["rate"], "GB/s" if row["bound"] == "memory" else "GFLOP/s"
        if row["bound"] == "compute" and rate >= 1e4:
            rate, unit = rate / 1e3, "TFLOP/s"
        figures = [
            *(row["case"], row["pass"], row["dtype"]),
            *(f"{row['ms']:.3f}", f"{row['least_ms']:.3f}"),
            *(f"{rate:.1f} {unit}", f"{row['share']:.0%}"),
        ]
        ratios = [f"{row['ratios'][p]:.2f}" if p in row["ratios"] else "" for p in peers]
        lines.append(f"| {' | '.join([*figures, *ratios])} |")
    return "\n".join(lines)


def acceptance(rows: Sequence[dict[str, Any]]) -> str:
    """What the project promises of CPU kernels in bf16, beside what was measured."""
    lines = ["| promise | least | measured | |", "|---|---|---|---|"]
    for row in rows:
        for peer, ratio in row["ratios"].items():
            if not peer.startswith("torch"):
                continue
            least = row["target"] if row["target"] and peer == "torch" else 1.0
            said = "met" if ratio >= least else "MISSED"
            name = f"{row['case']}, {row['pass']}, x {peer}"
            lines.append(f"| {name} | {least:.2f} | {ratio:.2f} | {said} |")
    return "\n".join(lines)


def facts(options: argparse.Namespace, library: Path) -> dict[str, Any]:
    """Machine and versions, without which a figure is none."""
    import torch

    name = rank_starter.device_name(options.device)
    return {
        "device": name,
        "torch": torch.__version__,
        "threads": options.threads if options.device == "cpu" else None,
        "library": library.name,
        "isa": os.environ.get("MLITE_CPU_ISA", "all"),
        "rounds": options.rounds,
        "window_ms": options.window_ms,
        "date": time.strftime("%Y-%m-%d"),
    }


# ---- command line --------------------------------------------------------------------------
def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="CUDA where there is one")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (1)")
    parser.add_argument("--isa", choices=tuple(ISA), help="limit us and torch to this level")
    parser.add_argument("--compile", action="store_true", help="also torch.compile of the peers")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (7)")
    parser.add_argument("--window-ms", type=float, default=60, help="work per timing (60)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, 2 rounds: does it run?")
    parser.add_argument("--json", metavar="FILE", help="keep the rows here")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Refuse what cannot be measured; the device is chosen.

    Raises:
        UserError: names the flag and what is legal.
    """
    import torch

    if options.threads < 1 or options.rounds < 1:
        raise UserError("--threads and --rounds are at least 1")
    if not 0 < options.window_ms <= 10_000:
        raise UserError(f"--window-ms {options.window_ms:g}: above 0, at most 10000")
    if options.json is not None and not os.access(Path(options.json).absolute().parent, os.W_OK):
        raise UserError(f"--json {options.json}: no file can be written there")
    options.device = options.device or rank_starter.default_device()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device")
    if options.quick:
        options.rounds, options.window_ms = 2, 1.0
    options.gemm = GEMM["quick" if options.quick else options.device]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all cases; progress goes to stderr."""
    import torch

    from tools.bench import kernel_layers, kernel_products
    from tools.bench.kernel_cases import SCALES, Inputs

    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    clock = Clock(options.device, options.window_ms, options.rounds)
    draw = Inputs(getattr(torch, DTYPES[options.dtype]), torch.device(options.device))
    scale = SCALES["quick" if options.quick else options.device]
    generators = kernel_layers.CASES | kernel_products.CASES
    rows: list[dict[str, Any]] = []
    for operation in options.ops:
        try:
            for case in generators[operation](draw, scale):
                for row in measure_case(case, options, clock):
                    rows.append(row)
                    print(f"  {row['case']}, {row['pass']}: {row['ms']:.3f} ms", file=sys.stderr)
        except torch.cuda.OutOfMemoryError:
            print(f"{operation}: does not fit into this device", file=sys.stderr)
        except KeyboardInterrupt:
            print(f"{operation}: interrupted, the rest was not measured", file=sys.stderr)
            break
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit code."""
    options = build_parser().parse_args(arguments)
    if options.isa is not None:  # read when first needed
        names = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
        os.environ |= dict(zip(names, ISA[options.isa], strict=True))
        os.environ["MLITE_CPU_ISA"] = options.isa
    try:
        check_options(options)
        native = load_native()
        require_native(native, options.device, wanted_by_user=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    assert native.library is not None
    known = facts(options, native.library)
    print("; ".join(f"{key} {value}" for key, value in known.items() if value is not None))
    rows = measure(options)
    print(f"\n{table(rows)}")
    for row in rows:
        for peer, why in row["failed"].items():
            print(f"{row['case']}, {row['pass']}: {peer} did not run: {why}")
    if options.device == "cpu" and options.dtype == "bf16" and not options.quick:
        print(f"\n{acceptance(rows)}")
    if options.json is not None:
        text = json.dumps({"facts": known, "rows": rows}, indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
