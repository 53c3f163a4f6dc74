"""Ranks for tests: a resident pool of gloo processes, and real rank processes.

`RankPool` forks its ranks from a fork server that imported torch once; a run costs tens of
milliseconds. Each run gets a fresh process group over a `file://` rendezvous, never a
port, so pools of several pytest-xdist workers do not meet. `run_ranks` starts the program
itself, one process per rank, for what only whole processes show: exit codes and messages.
"""

import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_RANKS = 8
# After the first error the other ranks may add theirs; a rank in a dead collective cannot.
GRACE_S = 1.0


class RankError(AssertionError):
    """A rank raised, died or ran out of time; the message holds the rank's traceback."""


class RankPool:
    """Up to eight resident ranks; `run` uses the first n of them."""

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._runs = 0

    def run(
        self,
        n: int,
        target: str | Callable[..., Any],
        *,
        timeout_s: float = 60.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `target` on n ranks at once and return their results in rank order.

        Args:
            n: number of ranks; with 1 there is no process group, as in a plain run.
            target: "module:function", or a function at the top level of a module. It gets
                `kwargs`, and `rank` and `world_size` where its signature names them.
            timeout_s: of the whole run; then the ranks are killed and replaced.

        Raises:
            RankError: with the traceback of the rank that failed first.
        """
        if not 1 <= n <= MAX_RANKS:
            raise ValueError(f"the pool has 1 to {MAX_RANKS} ranks, not {n}")
        if not isinstance(target, str):
            target = f"{target.__module__}:{target.__qualname__}"
        self._grow(n)
        self._runs += 1
        rendezvous = self._directory / f"run-{self._runs}"
        workers = self._workers[:n]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send_bytes(
                pickle.dumps((target, kwargs, rank, n, f"file://{rendezvous}", timeout_s))
            )
        results, failures = _collect(workers, time.monotonic() + timeout_s)
        if failures:
            # Ranks of a broken run may hang in a collective: none is used again.
            self._kill()
            shown = "\n".join(f"rank {rank} of {n}: {text}" for rank, text in failures)
            raise RankError(f"{target} failed\n{shown}")
        return [results[rank] for rank in range(n)]

    def close(self) -> None:
        """End the ranks and remove their files."""
        self._kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _grow(self, n: int) -> None:
        if any(not process.is_alive() for process, _ in self._workers):
            self._kill()
        context = _fork_server()
        while len(self._workers) < n:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, str(REPOSITORY)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _kill(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        for process, _ in self._workers:
            process.join()
        self._workers = []


def _fork_server() -> ForkServerContext:
    """Processes forked from one that has torch loaded; one server per pytest process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    return context


def _collect(
    workers: Sequence[tuple[BaseProcess, Connection]], deadline: float
) -> tuple[dict[int, Any], list[tuple[int, str]]]:
    """Receive every rank's answer until the deadline, or until soon after a failure."""
    results: dict[int, Any] = {}
    failures: list[tuple[int, str]] = []
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            if not failures:
                failures += [(rank, "no answer in time") for rank in waiting.values()]
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                process = workers[rank][0]
                process.join(5)
                succeeded, value = False, f"died with exit code {process.exitcode}"
            if succeeded:
                results[rank] = value
            else:
                failures.append((rank, value))
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return results, failures


def _serve(pipe: Connection, repository: str) -> None:
    """A rank's life: wait for a call, run it, answer; end with the pytest process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    sys.path.insert(0, repository)
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            # Not sys.exit: a gloo group left open may keep its threads.
            os._exit(0)
        # All ranks of the last run have answered, so nobody waits for this group any more.
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        target, kwargs, rank, world_size, rendezvous, timeout_s = pickle.loads(message)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            if world_size > 1:
                dist.init_process_group(
                    "gloo",
                    init_method=rendezvous,
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=timeout_s),
                )
            answer = True, _call(target, kwargs, rank, world_size)
            pipe.send_bytes(pickle.dumps(answer))
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))


def _call(target: str, kwargs: dict[str, Any], rank: int, world_size: int) -> Any:
    module_name, _, function_name = target.partition(":")
    function = getattr(importlib.import_module(module_name), function_name)
    given = {"rank": rank, "world_size": world_size}
    for name in inspect.signature(function).parameters:
        if name in given and name not in kwargs:
            kwargs[name] = given[name]
    return function(**kwargs)


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
    context = _fork_server()

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
