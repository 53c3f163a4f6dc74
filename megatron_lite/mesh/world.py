"""Who am I: rank, size and meeting point, read from the launcher's environment.

Understood are torchrun (and whatever sets RANK and WORLD_SIZE: PyTorchJob, Ray), Open MPI,
MPICH and its kin, and Slurm; anything else is one process. Pure functions of the
environment, no torch: errors of the command line are told within a fraction of a second.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.errors import UserError

RENDEZVOUS_VARIABLE = "MLITE_RENDEZVOUS"
_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class WorldInfo:
    """What a process knows of its world before it talks to anybody.

    `rendezvous` is the address where the ranks meet ("tcp://host:port", "file:///path");
    empty for one process, and where nothing names a place: a configuration can be checked
    for a world that nobody started. `launcher` names the environment all this is from.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    rendezvous: str = ""
    launcher: str = "python"


def detect_world(environ: Mapping[str, str]) -> WorldInfo:
    """Read rank, size and meeting point from the launcher's environment variables.

    An inner launcher wins over an outer one: torchrun and mpirun are started inside Slurm
    allocations, whose variables then describe the allocation and not the run.

    Raises:
        UserError: a variable is missing, is no number, or contradicts another one.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        world = _from_torchrun(environ)
    elif "OMPI_COMM_WORLD_SIZE" in environ:
        world = _from_open_mpi(environ)
    elif "PMI_SIZE" in environ:
        world = _from_mpich(environ)
    elif _is_slurm_task(environ):
        world = _from_slurm(environ)
    else:
        return WorldInfo()
    for name, rank, size in (
        ("rank", world.rank, world.world_size),
        ("local rank", world.local_rank, world.local_world_size),
    ):
        if not 0 <= rank < size:
            legal = f"outside 0..{size - 1}" if size > 0 else f"given for {size} ranks"
            source = "" if world.launcher == "environment" else f" of {world.launcher}"
            raise UserError(f"{name} {rank} is {legal} in the environment{source}")
    return world


def _from_torchrun(environ: Mapping[str, str]) -> WorldInfo:
    """RANK and WORLD_SIZE, as torchrun, PyTorchJob and Ray set them."""
    size = _number(environ, "WORLD_SIZE", 1)
    if "WORLD_SIZE" not in environ and environ.get("RANK", "0") != "0":
        raise UserError(f"RANK={environ['RANK']} is set but WORLD_SIZE is not")
    local_rank = _number(environ, "LOCAL_RANK", 0)
    return WorldInfo(
        rank=_number(environ, "RANK", 0),
        world_size=size,
        local_rank=local_rank,
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", local_rank + 1),
        rendezvous=_meeting_point(environ, size, host=None, key=""),
        launcher="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment",
    )


def _from_open_mpi(environ: Mapping[str, str]) -> WorldInfo:
    size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    local_size = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    host = "127.0.0.1" if local_size == size else _first_slurm_host(environ)
    key = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return WorldInfo(
        rank=_number(environ, "OMPI_COMM_WORLD_RANK"),
        world_size=size,
        local_rank=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        local_world_size=local_size,
        rendezvous=_meeting_point(environ, size, host, key),
        launcher="Open MPI",
    )


def _from_mpich(environ: Mapping[str, str]) -> WorldInfo:
    """PMI_RANK and PMI_SIZE: MPICH, Intel MPI, MVAPICH, and `srun --mpi=pmi2`."""
    size = _number(environ, "PMI_SIZE")
    local_rank_name = "MPI_LOCALRANKID" if "MPI_LOCALRANKID" in environ else "SLURM_LOCALID"
    local_rank = _number(environ, local_rank_name, 0)
    local_size = _number(environ, "MPI_LOCALNRANKS", _slurm_tasks_here(environ) or size)
    host = "127.0.0.1" if local_size == size else _first_slurm_host(environ)
    return WorldInfo(
        rank=_number(environ, "PMI_RANK"),
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        rendezvous=_meeting_point(environ, size, host, environ.get("SLURM_JOB_ID", "")),
        launcher="MPICH",
    )


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, and not the shell of a batch script.

    The batch shell also has SLURM_PROCID=0 and the allocation's SLURM_NTASKS; taken for a
    task, a plain `python pretrain.py` in it would wait for ranks that nobody started.
    """
    if "SLURM_PROCID" not in environ:
        return False
    in_step = any(
        name in environ for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEPID")
    )
    return in_step or environ.get("ENVIRONMENT") != "BATCH"


def _from_slurm(environ: Mapping[str, str]) -> WorldInfo:
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    size = _number(environ, next((name for name in names if name in environ), names[0]), 1)
    local_rank = _number(environ, "SLURM_LOCALID", 0)
    job = environ.get("SLURM_JOB_ID", "") + "." + environ.get("SLURM_STEP_ID", "")
    return WorldInfo(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=size,
        local_rank=local_rank,
        local_world_size=_slurm_tasks_here(environ) or max(local_rank + 1, 1),
        rendezvous=_meeting_point(environ, size, _first_slurm_host(environ), job),
        launcher="Slurm",
    )


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """Tasks on this node from a list such as "4(x2),3"; 0 when Slurm does not say."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    per_node: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        per_node += [int(count)] * int(repeats or 1)
    node = _number(environ, "SLURM_NODEID", 0)
    return per_node[node] if 0 <= node < len(per_node) else 0


def _first_slurm_host(environ: Mapping[str, str]) -> str | None:
    """First host of a compressed list: "gpu[07-09,12],x" is gpu07, ..."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    hosts = hosts or environ.get("SLURM_NODELIST", "")
    # A bracket's first number stands for the whole bracket; then commas part hosts only.
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", hosts).split(",")[0]
    return first or None


def _meeting_point(environ: Mapping[str, str], size: int, host: str | None, key: str) -> str:
    """Where the ranks meet; explicit variables win over what the launcher implies."""
    if size == 1:
        return ""
    if environ.get(RENDEZVOUS_VARIABLE):
        return environ[RENDEZVOUS_VARIABLE]
    host = environ.get("MASTER_ADDR") or host
    if host is None:
        return ""
    port = _DEFAULT_PORT
    if key:
        # From the job's id, so that two jobs on one node do not meet; below the range from
        # which systems hand out ports of their own.
        port = 20000 + int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) % 12000
    return f"tcp://{host}:{_number(environ, 'MASTER_PORT', port)}"


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise UserError(f"the launcher set no {name}")
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text!r} in the environment is not a number") from None
