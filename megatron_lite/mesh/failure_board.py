"""Where ranks leave word of a failure, so that one speaks and the others fall silent.

Two boards of one kind: a directory, for the ranks of a node from the first line of the
program on, and the rendezvous store, for all ranks once they have met. Invariant: a claim
is granted once per run, and word of a failure is left only after its message is out.
Neither needs the process group to be alive.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from megatron_lite.mesh.world import RENDEZVOUS_VARIABLE

# What tells runs on one node apart; ranks of one node also share the launcher's process.
_RUN_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)


@dataclass(frozen=True)
class Failure:
    """Why a run ends: exit code, what the user was told, and where it happened."""

    code: int
    reason: str
    rank: int
    step: int | None = None

    def to_json(self) -> str:
        """The object of `exit_status.json`."""
        return json.dumps(asdict(self))


# Between the place of a rank and what it waits for, when all say where they are.
WAITS = "waits for"
# A roll call costs two requests per rank.
MOST_ASKED = 512


class FailureBoard(Protocol):
    """What the guard needs of a board; every call may raise OSError or RuntimeError."""

    def claim(self) -> bool:
        """Whether the caller may speak: true for the first caller only."""
        ...

    def post(self, failure: Failure) -> None:
        """Leave word, after the message is out."""
        ...

    def posted(self) -> Failure | None:
        """The failure that was left, if any."""
        ...

    def call(self) -> None:
        """Ask every rank where it is."""
        ...

    def called(self) -> bool:
        """Whether somebody asks where the ranks are."""
        ...

    def answer(self, rank: int, where: str) -> None:
        """Say where this rank is."""
        ...

    def answers(self) -> dict[int, str]:
        """What the ranks have said so far."""
        ...

    def leave(self) -> None:
        """Say that this rank has seen the failure and leaves."""
        ...

    def all_left(self) -> bool:
        """Whether nobody needs the board any more."""
        ...


# A rank may start this much later than one that has failed and spoken already.
_LATE_START_S = 5.0


class DirectoryBoard:
    """A directory on the node. Older entries, from before this process, are of another run.

    The last of the `readers` to leave removes it, so that the same ranks started again find
    an empty board.
    """

    def __init__(self, directory: Path, started: float, readers: int) -> None:
        self._directory = directory
        self._oldest = started - _LATE_START_S
        self._readers = readers

    def claim(self) -> bool:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / "speaker"
        for _ in range(2):
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                return True
            except FileExistsError:
                if self._is_current(path):
                    return False
                path.unlink(missing_ok=True)
        return False

    def post(self, failure: Failure) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self._directory / "failure.json", failure.to_json())

    def posted(self) -> Failure | None:
        path = self._directory / "failure.json"
        if not self._is_current(path):
            return None
        return Failure(**json.loads(path.read_text()))

    def call(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._directory / "roll-call").touch(mode=0o600)

    def called(self) -> bool:
        return self._is_current(self._directory / "roll-call")

    def answer(self, rank: int, where: str) -> None:
        write_atomically(self._directory / f"rank-{rank}", where)

    def answers(self) -> dict[int, str]:
        found = [path for path in self._directory.glob("rank-*") if self._is_current(path)]
        return {int(path.name.removeprefix("rank-")): path.read_text() for path in found}

    def leave(self) -> None:
        (self._directory / f"left-{os.getpid()}").touch(mode=0o600)
        left = sum(self._is_current(path) for path in self._directory.glob("left-*"))
        if left >= self._readers:
            shutil.rmtree(self._directory, ignore_errors=True)

    def all_left(self) -> bool:
        return True

    def _is_current(self, path: Path) -> bool:
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        # In a shared temporary directory somebody else's file says nothing about this run.
        return status.st_mtime >= self._oldest and status.st_uid == os.getuid()


class KeyValueStore(Protocol):
    """The part of torch.distributed.Store that a board needs."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class StoreBoard:
    """The rendezvous store, seen by all ranks. It dies with rank 0 where that hosts it."""

    def __init__(self, store: KeyValueStore, world_size: int) -> None:
        self._store = store
        self._world_size = world_size

    def claim(self) -> bool:
        return self._store.add("claims", 1) == 1

    def post(self, failure: Failure) -> None:
        self._store.set("failure", failure.to_json())

    def posted(self) -> Failure | None:
        # `get` alone would wait for the key.
        if not self._store.check(["failure"]):
            return None
        return Failure(**json.loads(self._store.get("failure")))

    def call(self) -> None:
        self._store.set("roll-call", "1")

    def called(self) -> bool:
        return self._store.check(["roll-call"])

    def answer(self, rank: int, where: str) -> None:
        self._store.set(f"rank-{rank}", where)

    def answers(self) -> dict[int, str]:
        keys = {rank: f"rank-{rank}" for rank in range(min(self._world_size, MOST_ASKED))}
        return {
            rank: self._store.get(key).decode()
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def leave(self) -> None:
        self._store.add("left", 1)

    def all_left(self) -> bool:
        return self._store.add("left", 0) >= self._world_size


def node_board(environ: Mapping[str, str], local_world_size: int) -> DirectoryBoard:
    """The board of the ranks that one launcher started on this node."""
    rendezvous = environ.get(RENDEZVOUS_VARIABLE, "")
    if rendezvous.startswith("file://"):
        return DirectoryBoard(
            Path(rendezvous.removeprefix("file://") + ".status"),
            process_start_time(),
            local_world_size,
        )
    parts = [rendezvous, str(os.getppid()), *(environ.get(name, "") for name in _RUN_VARIABLES)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    root = Path(tempfile.gettempdir()) / f"megatron_lite-{os.getuid()}"
    return DirectoryBoard(root / key, process_start_time(), local_world_size)


def process_start_time() -> float:
    """When this process started, in seconds since the epoch; now, where nobody can tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)
    except (OSError, AttributeError, IndexError, ValueError):
        return time.time()


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file so that a reader sees the old or the new text, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)
