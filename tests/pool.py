"""Ranks for tests: a resident pool of gloo processes, and real rank processes.

`RankPool` forks its ranks from a fork server that imported torch once; a run costs tens of
milliseconds. Each run gets a fresh process group over a `file://` rendezvous, never a
port, so pools of several pytest-xdist workers do not meet. `run_ranks` starts the program
itself, one process per rank, for what only whole processes show: exit codes and messages.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.verify.pool import MAX_RANKS, REPOSITORY, RankError, RankPool, fork_server

__all__ = [
    "MAX_RANKS",
    "REPOSITORY",
    "RankError",
    "RankExit",
    "RankPool",
    "fork_ranks",
    "run_ranks",
]


class RankExit(NamedTuple):
    """How one rank process ended."""

    code: int
    stdout: str
    stderr: str


def run_ranks(
    n: int,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    program: str | Path = "pretrain.py",
) -> list[RankExit]:
    """Start n processes of a program as ranks of one run, without a launcher.

    Args:
        argv: the program's arguments, the same for every rank.
        env: added to this process's environment, which otherwise names no rank.
        timeout: seconds until all have to have ended; then they are killed.
        program: a Python file, relative to the repository root.

    Raises:
        RankError: a rank did not end in time; the message holds what each printed.
    """

    def start(environ: dict[str, str], out: Path, err: Path) -> "subprocess.Popen[bytes]":
        with out.open("wb") as out_file, err.open("wb") as err_file:
            return subprocess.Popen(
                [sys.executable, str(REPOSITORY / program), *argv],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
            )

    def end(process: "subprocess.Popen[bytes]", timeout_s: float) -> int | None:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None

    base = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "MASTER_"))
    }
    paths = [str(REPOSITORY), base.get("PYTHONPATH", "")]
    base["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return _run_processes(n, start, end, {**base, **(env or {})}, timeout)


def fork_ranks(
    n: int,
    target: Callable[..., int],
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> list[RankExit]:
    """As `run_ranks` for a function that returns the exit code, without torch's import time.

    The ranks are processes of their own, forked with torch loaded; `target` is a function
    at the top level of a module and finds its rank in `os.environ`.
    """
    context = fork_server()

    def start(environ: dict[str, str], out: Path, err: Path) -> BaseProcess:
        process = context.Process(
            target=_become_program, args=(target, args, environ, str(out), str(err))
        )
        process.start()
        return process

    def end(process: BaseProcess, timeout_s: float) -> int | None:
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            return None
        return process.exitcode

    return _run_processes(n, start, end, dict(env or {}), timeout)


def _become_program(
    target: Callable[..., int], args: tuple[Any, ...], environ: dict[str, str], out: str, err: str
) -> None:
    """Write to files of its own, below Python too, and end with the function's code."""
    for descriptor, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.update(environ)
    code = target(*args)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit, which multiprocessing would report in its own words.
    os._exit(code)


def _run_processes(
    n: int,
    start: Callable[[dict[str, str], Path, Path], Any],
    end: Callable[[Any, float], int | None],
    environ: dict[str, str],
    timeout: float,
) -> list[RankExit]:
    """Start n ranks of one run, wait for all, and read what they printed."""
    directory = Path(tempfile.mkdtemp(prefix="ranks-"))
    outputs = [(directory / f"{rank}.out", directory / f"{rank}.err") for rank in range(n)]
    world = {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MLITE_RENDEZVOUS": f"file://{directory / 'rendezvous'}",
    }
    deadline = time.monotonic() + timeout
    processes: list[Any] = []
    codes: list[int | None] = []
    try:
        for rank in range(n):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(start({**world, **environ, **place}, *outputs[rank]))
    finally:
        codes += [end(process, max(0.0, deadline - time.monotonic())) for process in processes]
        texts = [
            [path.read_text(errors="replace") if path.exists() else "" for path in paths]
            for paths in outputs
        ]
        shutil.rmtree(directory, ignore_errors=True)
    late = [rank for rank, code in enumerate(codes) if code is None]
    if late:
        raise RankError(f"ranks {late} did not end within {timeout} s; printed: {texts}")
    return [
        RankExit(code, *printed)
        for code, printed in zip(codes, texts, strict=True)
        if code is not None
    ]
