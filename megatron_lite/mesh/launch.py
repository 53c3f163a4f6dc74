"""How ranks start and end: the environment, the default process group, the guard.

`world.py` says who a process is, `guard.py` how a run ends; here they meet torch. torch is
imported only when a process group is made. Invariant: gloo on the CPU and NCCL on CUDA,
whatever a flag says, because the other pairs do not exist or do not work.
"""

import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_lite.errors import UserError
from megatron_lite.mesh.admission import check_admission, run_token
from megatron_lite.mesh.failure_board import StoreBoard
from megatron_lite.mesh.guard import RunStatus, run_guarded
from megatron_lite.mesh.world import RENDEZVOUS_VARIABLE, WorldInfo, detect_world

__all__ = [
    "RunStatus",
    "WorldInfo",
    "detect_world",
    "finish_distributed",
    "init_distributed",
    "run_guarded",
    "run_program",
]


LOOPBACK = ("127.0.0.1", "localhost")


def run_program(main: Callable[[WorldInfo, RunStatus], int], environ: Mapping[str, str]) -> int:
    """Find this process's place among the ranks, run `main` guarded, return the exit code.

    An environment that contradicts itself is told by each process: no rank knows which
    one it is.
    """
    status = RunStatus()
    try:
        info = detect_world(environ)
    except UserError as error:
        return run_guarded(partial(_refuse, error), WorldInfo(), status=status, environ=environ)
    return run_guarded(partial(main, info, status), info, status=status, environ=environ)


def _refuse(error: UserError) -> int:
    raise error


def init_distributed(
    info: WorldInfo, device: str, *, timeout_minutes: float = 10, status: RunStatus | None = None
) -> None:
    """Make the default process group; nothing to do for one process.

    Args:
        info: this rank's place, from `detect_world`.
        device: "cpu" (gloo) or "cuda" (NCCL, and this process's device is set).
        timeout_minutes: of the meeting and of every collective.
        status: the run's status; from now on the ranks tell each other of failures
            through it. A group that exists already (the ranks of a test pool) is kept.

    Comm: rendezvous at `info.rendezvous`.

    Raises:
        UserError: no such device, no place to meet, the ranks did not meet in time, or one
            of them does not have the run's token.
    """
    import torch
    import torch.distributed as dist

    if device == "cuda":
        count = torch.cuda.device_count()
        if info.local_rank >= count:
            raise UserError(
                f"rank {info.rank} is number {info.local_rank} on its node, which has {count} "
                f"CUDA devices: start at most {count} ranks per node, or use --device cpu"
            )
        torch.cuda.set_device(info.local_rank)
    if info.world_size == 1 or dist.is_initialized():
        return
    if not info.rendezvous:
        raise UserError(
            f"{info.world_size} ranks, but no place to meet: start them with torchrun, srun or "
            "mpirun (where that spans nodes, set MASTER_ADDR and MASTER_PORT to rank 0's host "
            f"and a free port, or {RENDEZVOUS_VARIABLE}=file:///path on a shared disk); for one "
            "process unset WORLD_SIZE"
        )
    timeout = timedelta(minutes=timeout_minutes)
    token = run_token(os.environ)
    if info.local_world_size == info.world_size and Path("/sys/class/net/lo").exists():
        # Nobody outside this node has to reach the ranks.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = _meet(info, timeout)
        store.set_timeout(timeout)
        if status is not None:
            status.attach(StoreBoard(dist.PrefixStore("failure", store), info.world_size))
        check_admission(dist.PrefixStore("admission", store), token, info.rank, info.world_size)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.PrefixStore("default", store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
        )
    except (dist.DistError, TimeoutError, OSError) as error:
        raise UserError(
            f"rank {info.rank} of {info.world_size} did not meet the others at "
            f"{info.rendezvous} within {timeout_minutes:g} minutes: {error}"
        ) from error


def _meet(info: WorldInfo, timeout: timedelta) -> Any:
    """The store where the ranks meet.

    torch's own listens on all interfaces whatever address it is given. Where the address is
    this node's loopback, nobody else has business there: rank 0 then listens on it alone.
    """
    import torch.distributed as dist

    url = urlsplit(info.rendezvous)
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if info.rank == 0 and url.scheme == "tcp" and url.hostname in LOOPBACK and not is_agents:
        assert url.port is not None
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", url.port))
        return dist.TCPStore(
            "127.0.0.1",
            url.port,
            info.world_size,
            is_master=True,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
    store, _, _ = next(
        dist.rendezvous(info.rendezvous, info.rank, info.world_size, timeout=timeout)
    )
    return store


def finish_distributed() -> None:
    """Take the process group down at the regular end of a run.

    Comm: one barrier, so that no rank closes a connection that another still reads.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
