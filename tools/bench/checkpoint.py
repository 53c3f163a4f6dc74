"""Time saving and loading a state of one rank, ours against the usual ways, on one disk.

Every way runs in a process of its own; the ways take turns, round by round, so that a busy
machine disturbs all alike. A process saves three times: the second is timed, the memory is
watched at the third. Columns:

- pause: until training may go on; in brackets as multiple of one copy of the state into
  memory that is there already, timed in the same process.
- wall: until the files are on the device (and published).
- CPU-s/GB: of saving, of the process and its children.
- extra GB: most anonymous and shared memory above what the state takes, while saving.
- load CPU-s/GB: of the warm one; in brackets that of the plain read.
- load: into new memory; cold is after the files were dropped from the page cache; in
  brackets as multiple of a plain read of the same files into new memory, timed before it.

Medians over rounds, [least-most]. `--json F` keeps every round.

    python tools/bench/checkpoint.py --size 1G --rounds 3 --directory runs/bench
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, too

from megatron_lite.errors import UserError
from tools.bench.checkpoint_ways import WAYS, State, Way, build_way
from tools.bench.ranks import check_writable, parse_bytes

CHUNK = 4 * 2**20
SAMPLE_S = 0.05
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


# ---- one process -----------------------------------------------------------------------------
def make_state(num_bytes: int) -> State:
    """Weights, masters and two moments of layers, as mixed precision training has them."""
    import torch

    generator = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    rows, left, layer = 1024, num_bytes, 0
    while left > 0:
        shape = (rows, max(1, min(2048, left // (14 * rows))))
        weight = torch.randn(shape, generator=generator)
        name = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
        state[name] = weight.bfloat16()
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            state[f"optim/{kind}/{name}"] = weight.clone()
        left -= 14 * weight.numel()
        layer += 1
    return state


def family(process: int) -> list[int]:
    """A process and all that it has started."""
    found = [process]
    for parent in found:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(word) for word in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def cpu_seconds() -> float:
    """CPU time of this process and its children, those that have ended too."""
    ticks = 0
    for process in family(os.getpid()):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(int(field) for field in fields[11:15])
    return ticks * TICK_S


def memory_bytes() -> int:
    """Anonymous and shared memory of this process and its children, shared pages once."""
    total = 0
    for process in family(os.getpid()):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        found = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
        total += int(found.get("Pss_Anon", 0)) + int(found.get("Pss_Shmem", 0))
    return total * 1024


class Peak:
    """The most memory while a block runs."""

    def __enter__(self) -> Peak:
        self.most = memory_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.most = max(self.most, memory_bytes())

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.most = max(self.most, memory_bytes())


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call; what it returns is kept until the clock is read."""
    start = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    del kept
    return seconds


def copy_seconds(state: State) -> float:
    """One copy of the state into memory that is there already."""
    import torch

    copies = [torch.zeros_like(tensor) for tensor in state.values()]

    def copy() -> None:
        for target, tensor in zip(copies, state.values(), strict=True):
            target.copy_(tensor)

    copy()
    return timed(copy)


def drop_cached(paths: Sequence[Path]) -> None:
    """Let the kernel forget files that are on the device."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_raw(paths: Sequence[Path]) -> list[mmap.mmap]:
    """Read files into new memory, as plainly as it goes."""
    read = []
    for path in paths:
        size = path.stat().st_size
        read.append(mmap.mmap(-1, size))
        with path.open("rb", buffering=0) as file, memoryview(read[-1]) as view:
            done = 0
            while done < size:
                done += file.readinto(view[done : done + CHUNK]) or 0
    return read


def measure_save(way: Way, state: State) -> dict[str, float]:
    """Time of the second of three saves, memory of the third.

    Looking at the memory of a process walks all its pages: it costs CPU time, and a copy
    waits for it.
    """
    way.save(1)()
    cpu, start = cpu_seconds(), time.perf_counter()
    wait = way.save(2)
    pause = time.perf_counter() - start
    wait()
    wall = time.perf_counter() - start
    cpu = cpu_seconds() - cpu
    before = memory_bytes()
    if not before:
        raise UserError("/proc/self/smaps_rollup does not tell memory here")
    state_bytes = sum(tensor.nbytes for tensor in state.values())
    reused = max(0, before - state_bytes - BASE_BYTES[0])
    with Peak() as peak:
        way.save(3)()
    extra = float(max(0, peak.most - before) + reused)
    return {"pause_s": pause, "wall_s": wall, "cpu_s": cpu, "extra_bytes": extra}


BASE_BYTES = [0]  # of the interpreter and its libraries, before there is a state


def measure_load(way: Way) -> dict[str, float]:
    """Cold and warm, each behind a plain read in the same state of the cache."""
    paths, told = way.files(2), {}
    for kind in ("cold", "warm"):
        for name, work in (("raw", lambda: read_raw(paths)), ("load", lambda: way.load(2))):
            if kind == "cold":
                drop_cached(paths)
            cpu = cpu_seconds()
            told[f"{kind}_{name}_s"] = timed(work)
            told[f"{kind}_{name}_cpu_s"] = cpu_seconds() - cpu
    return told


def check_loaded(way: Way, state: State) -> None:
    """Refuse figures of a load that is not what was saved."""
    import torch

    loaded = way.load(2)
    if loaded.keys() != state.keys() or not all(
        torch.equal(loaded[name], tensor) for name, tensor in state.items()
    ):
        raise RuntimeError("what was loaded is not what was saved")


def work(options: argparse.Namespace) -> None:
    """The work of one process: one JSON line."""
    import torch

    torch.set_num_threads(options.threads)
    torch.zeros(1).clone()
    BASE_BYTES[0] = memory_bytes()
    state = make_state(options.size)
    root = Path(options.directory) / "save"
    root.mkdir()
    way = build_way(options.worker, state, root)
    told = {"bytes": float(sum(tensor.nbytes for tensor in state.values()))}
    told |= measure_save(way, state) | measure_load(way)
    told["copy_s"] = copy_seconds(state)
    check_loaded(way, state)
    print(json.dumps(told), flush=True)
    os._exit(0)  # children end with their pipes; nothing else is worth waiting for


# ---- all processes ---------------------------------------------------------------------------
def run_way(name: str, options: argparse.Namespace) -> dict[str, float]:
    """One process of one way."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as directory:
        command = [sys.executable, __file__, "--worker", name, "--directory", directory]
        command += ["--size", str(options.size), "--threads", str(options.threads)]
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.getenv("PYTHONPATH"))))
        environ = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": path}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise UserError(f"{name}: ended with {done.returncode}, see above")
        told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return told


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} [{least:.{digits}f}-{most:.{digits}f}]"


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One line per way."""
    print("| way | pause s (x copy) | wall s | CPU-s/GB | extra GB | cold load s (x raw) "
          "| warm load s (x raw) | load CPU-s/GB |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == name]

        def each(key: str, divisor: str = "", mine: list[dict[str, Any]] = mine) -> list[float]:
            return [row[key] / (row[divisor] if divisor else 1.0) for row in mine]

        print(
            f"| {name} | {spread(each('pause_s'))} (x {spread(each('pause_s', 'copy_s'))}) "
            f"| {spread(each('wall_s'))} | {spread([1e9 * v for v in each('cpu_s', 'bytes')])} "
            f"| {spread([v / 1e9 for v in each('extra_bytes')])} "
            f"| {spread(each('cold_load_s'))} (x {spread(each('cold_load_s', 'cold_raw_s'))}) "
            f"| {spread(each('warm_load_s'))} (x {spread(each('warm_load_s', 'warm_raw_s'))}) "
            f"| {spread([1e9 * v for v in each('warm_load_cpu_s', 'bytes')])} "
            f"({spread([1e9 * v for v in each('warm_raw_cpu_s', 'bytes')])}) |"
        )


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--size", default="1G", help="bytes of the state, K M G (1G)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (1)")
    parser.add_argument("--directory", default=".", help="on the disk to measure")
    parser.add_argument("--json", metavar="FILE", help="keep every round as a JSON line")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit code."""
    options = build_parser().parse_args(arguments)
    try:
        options.size = parse_bytes(options.size)
        if options.worker:
            work(options)
            return 0
        check_writable(options.json)
        os.makedirs(options.directory, exist_ok=True)
        needed = 4 * options.size  # three saves, and some room
        if shutil.disk_usage(options.directory).free < needed:
            raise UserError(f"--directory {options.directory}: {needed} bytes are needed there")
        rows: list[dict[str, Any]] = []
        for round_index in range(options.rounds):
            for name in options.ways:
                rows.append({"way": name, "round": round_index, **run_way(name, options)})
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return getattr(error, "exit_code", 2)
    print_table(rows)
    if options.json:
        Path(options.json).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
