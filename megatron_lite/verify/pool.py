"""Resident ranks: gloo processes forked from a server that has torch and the package loaded.

A run on the pool costs what its work costs: nothing is imported and no port is opened, for
each run meets over a `file://` rendezvous of its own. Invariant: after an error no rank of
the pool is used again, since ranks of a broken run may hang in a collective.
"""

import contextlib
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_RANKS = 8
# After the first error the other ranks may add theirs; a rank in a dead collective cannot.
GRACE_S = 1.0
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.utils.flop_counter",
    "megatron_lite.train.build",
    "megatron_lite.train.loop",
    "megatron_lite.verify.session",
)


class RankError(RuntimeError):
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
        context = fork_server()
        while len(self._workers) < n:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, sys.path), daemon=True)
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


def fork_server() -> ForkServerContext:
    """Processes forked from one that has torch loaded; one server per process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with _importable():
        # The server imports by its own path, not by this process's.
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Let a child process find the package that this process runs."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


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


def _serve(pipe: Connection, search_path: Sequence[str]) -> None:
    """A rank's life: wait for a call, run it, answer; end with its owner."""
    import torch
    import torch.distributed as dist

    # Ctrl-C reaches the whole process group; the owner decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    sys.path[:] = search_path
    # What was loaded before the fork is never garbage: collections only visit a run's objects.
    gc.freeze()
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
