"""Time whole training steps against plain PyTorch and transformers, in one run.

A case is a family with endings: `-compile` (torch.compile, of whole peers or of our blocks),
`-autocast` (fp32 weights, bf16 products), `-off` (without native operations), `-2threads`,
`-dp2`, `-tp2`, `-tp2-sp`, `-pp2` (1F1B), `-pp2-zbv` (two ranks; a pipeline takes single samples
as microbatches). Every case lives in its own process or two ranks, with one thread each unless
it says otherwise; the cases take turns, step by step, so that a busy machine disturbs all
alike. Printed per case: tokens per CPU-second (median, range), the ratio to the first peer of
the same round, model FLOPs utilisation against a 2048^3 matrix product timed in the same
rounds, peak RSS, and seconds from process start to the end of the first step. `--json F` keeps
the rows.

    python tools/bench/step.py --dtype fp32 --rounds 5
    python tools/bench/step.py --cases plain-gpt ours-gpt ours-llama-dp2 ours-llama-tp2-sp
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

SOLO = ("plain-gpt", "ours-gpt", "plain-llama", "hf-llama", "ours-llama")
PAIRED = (
    *("ours-llama-dp2", "ours-llama-tp2", "ours-llama-tp2-sp", "dtensor-llama-tp2"),
    *("ours-llama-pp2", "ours-llama-pp2-zbv"),
)
ON_REQUEST = (
    *("plain-gpt-compile", "plain-gpt-autocast", "plain-llama-compile", "plain-llama-autocast"),
    *("ours-gpt-off", "ours-gpt-compile", "ours-llama-off", "ours-llama-compile"),
    *("plain-llama-2threads", "ours-llama-2threads"),
)
ZBV_LAYOUT = "Et|tt|tt|tL"  # 6 layers; both ends are on rank 0, so it has one fewer
BATCH = 4  # samples of 512 tokens per step
SIZE = {"layers": 6, "h": 384, "heads": 6, "s": 512, "v": 32000}
TOKENS = BATCH * SIZE["s"]


def model_flops_per_token() -> float:
    """6 x matmul weights (head included) + causal half of attention, as the peers count."""
    h, layers = SIZE["h"], SIZE["layers"]
    weights = layers * 12 * h * h + SIZE["v"] * h
    return 6.0 * weights + 6.0 * layers * h * SIZE["s"]


def our_flags(case: str, dtype: str, directory: str) -> list[str]:
    """Flags of `pretrain.py` for one of our cases."""
    flags = [
        "--device", "cpu", "--num-layers", str(SIZE["layers"]), "--hidden-size", str(SIZE["h"]),
        "--num-attention-heads", str(SIZE["heads"]), "--seq-length", str(SIZE["s"]),
        "--max-position-embeddings", str(SIZE["s"]), "--hidden-dropout", "0",
        "--attention-dropout", "0", "--tokenizer-type", "NullTokenizer", "--vocab-size",
        str(SIZE["v"]), "--mock-data", "--split", "100,0,0", "--data-cache-path", directory,
        "--global-batch-size", str(BATCH), "--micro-batch-size", str(BATCH), "--lr", "1e-3",
        "--train-iters", "100000", "--eval-iters", "0", "--log-interval", "1000000",
    ]  # fmt: skip
    if "llama" in case:
        flags += [
            "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu",
            "--disable-bias-linear", "--ffn-hidden-size", str(8 * SIZE["h"] // 3),
        ]  # fmt: skip
    if "off" in case:
        flags += ["--native-ops", "off"]
    if "compile" in case:
        flags += ["--compile"]
    if "tp2" in case:
        flags += ["--tensor-model-parallel-size", "2"]
    if case.endswith("-sp"):
        flags += ["--sequence-parallel"]
    if "pp2" in case:
        flags += ["--pipeline-model-parallel-size", "2"]
        flags[flags.index("--micro-batch-size") + 1] = "1"
    if case.endswith("-zbv"):
        flags += ["--pipeline-schedule", "zbv", "--pipeline-model-parallel-layout", ZBV_LAYOUT]
    if "dp2" in case:
        flags[flags.index("--micro-batch-size") + 1] = str(BATCH // 2)
    return [*flags, "--bf16"] if dtype == "bf16" else flags


@contextlib.contextmanager
def our_step(case: str, dtype: str, directory: str) -> Iterator[Callable[[], object]]:
    """One step of the real program."""
    from megatron_lite.config.flags import parse_config
    from megatron_lite.config.rules import check_config
    from megatron_lite.mesh.launch import RunStatus, detect_world
    from megatron_lite.train.build import build_run
    from megatron_lite.train.loop import run_step

    info = detect_world(os.environ)
    config = parse_config(our_flags(case, dtype, directory), os.environ)
    check_config(config, info.world_size)
    with build_run(config, info, RunStatus()) as (parts, state):
        yield lambda: run_step(parts, state)


@contextlib.contextmanager
def peer_step(case: str, dtype: str) -> Iterator[Callable[[], object]]:
    """One step of a peer: forward, loss, backward, clip, fused AdamW."""
    import torch

    from tools.bench.peers import Size, build_peer, loss_context, ranks_of_peer

    with ranks_of_peer(case):
        torch.manual_seed(0)
        autocast = case.endswith("autocast")
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}["fp32" if autocast else dtype]
        model = build_peer(case, Size(**SIZE), kind)
        # Fused AdamW takes no DTensor of gloo ranks; looping over them is what users get.
        fused = not case.startswith("dtensor")
        # Clipping takes no mixture: the replicated norms (0.1 % of the weights) stay out.
        clipped = [p for p in model.parameters() if fused or type(p.data).__name__ == "DTensor"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=fused)
        stream = torch.randint(0, SIZE["v"], (BATCH, SIZE["s"] + 1))

        def step() -> None:
            with loss_context(case):
                model(stream[:, :-1], stream[:, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(clipped, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        yield step


def calibrate(dtype: str) -> float:
    """FLOP per CPU-second of a 2048^3 matrix product."""
    import torch

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    a = torch.ones(2048, 2048, dtype=kind)
    start = time.process_time()
    for _ in range(2):
        torch.mm(a, a)
    return 2 * 2 * 2048.0**3 / (time.process_time() - start)


def serve(opened: AbstractContextManager[Callable[[], object]], dtype: str, started: float) -> None:
    """Child process: one step per line on stdin, one JSON row per step on stdout."""
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    with contextlib.redirect_stdout(io.StringIO()), opened as step:
        step()
        answer.write(json.dumps({"first_step_s": time.time() - started}) + "\n")
        for _ in sys.stdin:
            rate = calibrate(dtype)
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            row = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            answer.write(json.dumps({**row, "rate": rate, "rss_mib": rss}) + "\n")
        os._exit(0)  # ranks need not take leave of each other


def work(case: str, dtype: str, directory: str, started: float) -> None:
    """Child process of a case."""
    import torch

    torch.set_num_threads(2 if case.endswith("2threads") else 1)
    ours = case.startswith("ours")
    serve(our_step(case, dtype, directory) if ours else peer_step(case, dtype), dtype, started)


class Case:
    """The processes of one case, driven in lock step."""

    def __init__(
        self, name: str, dtype: str, directory: str, ranks: int, program: str = __file__
    ) -> None:
        self.name = name
        self.rows: list[dict[str, float]] = []
        root = Path(__file__).resolve().parents[2]
        self._processes = []
        for rank in range(ranks):
            environ = {**os.environ, "OMP_NUM_THREADS": "2" if name.endswith("2threads") else "1"}
            environ["PYTHONPATH"] = os.pathsep.join([str(root), environ.get("PYTHONPATH", "")])
            if ranks > 1:
                meeting = f"file://{directory}/meet-{name}-{dtype}"
                environ |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MLITE_RENDEZVOUS": meeting,
                }
            command = [sys.executable, program, "--worker", name, "--dtype", dtype,
                       "--directory", directory, "--started", str(time.time())]  # fmt: skip
            self._processes.append(
                subprocess.Popen(
                    command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
        self.first_step_s = max(row["first_step_s"] for row in self._read())

    def _read(self) -> list[dict[str, float]]:
        rows = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{self.name}: a process ended with code {process.wait()}")
            rows.append(json.loads(line))
        return rows

    def step(self) -> None:
        """One step on all ranks."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("step\n")
            process.stdin.flush()
        rows = self._read()
        self.rows.append(
            {
                "cpu_s": sum(row["cpu_s"] for row in rows),
                "wall_s": max(row["wall_s"] for row in rows),
                "rate": statistics.fmean(row["rate"] for row in rows),
                "rss_mib": max(row["rss_mib"] for row in rows),
            }
        )

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()


def summarize(cases: list[Case], dtype: str, first: Case) -> list[dict[str, Any]]:
    """One row per case; ratios are medians over rounds."""
    table = []
    for case in cases:
        rates = [TOKENS / row["cpu_s"] for row in case.rows]
        ratios = [b["cpu_s"] / a["cpu_s"] for a, b in zip(case.rows, first.rows, strict=True)]
        shares = [
            model_flops_per_token() * TOKENS / row["cpu_s"] / row["rate"] for row in case.rows
        ]
        table.append(
            {
                "case": case.name,
                "dtype": dtype,
                "tokens_per_cpu_s": statistics.median(rates),
                "least": min(rates),
                "most": max(rates),
                "ratio": statistics.median(ratios),
                "mfu": statistics.median(shares),
                "wall_ms": statistics.median(row["wall_s"] for row in case.rows) * 1e3,
                "rss_mib_per_rank": max(row["rss_mib"] for row in case.rows),
                "first_step_s": case.first_step_s,
            }
        )
    return table


def print_table(table: list[dict[str, Any]], first: str) -> None:
    """Print rows as a Markdown table."""
    print(f"| case | tokens per CPU-second [range] | x {first} | MFU | wall ms | RSS MiB per rank "
          "| first step s |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for row in table:
        print(
            f"| {row['case']} {row['dtype']} | {row['tokens_per_cpu_s']:.0f} "
            f"[{row['least']:.0f}-{row['most']:.0f}] | {row['ratio']:.2f} | {row['mfu']:.1%} "
            f"| {row['wall_ms']:.0f} | {row['rss_mib_per_rank']:.0f} | {row['first_step_s']:.1f} |"
        )


def main() -> int:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", nargs="+", choices=SOLO + PAIRED + ON_REQUEST,
                        default=list(SOLO + PAIRED))  # fmt: skip
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps per case")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.dtype, args.directory, args.started)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        cases: list[Case] = []
        try:
            for name in args.cases:
                cases.append(Case(name, args.dtype, directory, 2 if name in PAIRED else 1))
            for _ in range(args.rounds):
                for case in cases:
                    case.step()
        finally:
            for case in cases:
                case.close()
    table = summarize(cases, args.dtype, cases[0])
    print_table(table, cases[0].name)
    if args.json:
        Path(args.json).write_text("".join(json.dumps(row) + "\n" for row in table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
