"""Writers, finalizers and ranks whose disk fails, waits or kills at a chosen operation.

    python -m tests.checkpoint.faulty PARENT_PID {writer|finalizer} FAULTS_AS_JSON

The program knows nothing of this: a test's ranks are built with a `Saver` whose children
run this module (`with_faults`). Torch-free, as the children are.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_lite.checkpoint import finalizer, writer
from megatron_lite.checkpoint.files import FileSystem


@dataclass(frozen=True)
class Fault:
    """What happens before a file operation.

    Attributes:
        operation: "create", "write", "link", ...
        place: pattern of a part of the path.
        nth: only at the so manieth such operation of a process; 0: at each.
        errno: it fails so.
        kill_all: folder with a file per process to kill, this one last.
        signal: its process gets this.
        wait_for: (file, text): it waits until the file holds the text.
    """

    operation: str
    place: str
    nth: int = 0
    errno: int = 0
    kill_all: str = ""
    signal: int = 0
    wait_for: tuple[str, str] | None = None


class FaultyFileSystem(FileSystem):
    """File operations with faults; its process can be killed by the others' faults."""

    def __init__(self, faults: Sequence[Fault]):
        super().__init__(self.look)
        self._faults = faults
        self._seen = [0] * len(faults)
        for fault in faults:
            if fault.kill_all:
                (Path(fault.kill_all) / str(os.getpid())).touch()

    def look(self, operation: str, path: Path) -> None:
        """Called before each operation."""
        for index, fault in enumerate(self._faults):
            if operation != fault.operation or not re.search(fault.place, str(path)):
                continue
            self._seen[index] += 1
            if fault.nth and self._seen[index] != fault.nth:
                continue
            if fault.wait_for is not None:
                wait_for_text(Path(fault.wait_for[0]), fault.wait_for[1])
            if fault.signal:
                os.kill(os.getpid(), fault.signal)
            if fault.kill_all:
                kill_all(Path(fault.kill_all))
            if fault.errno:
                raise OSError(fault.errno, os.strerror(fault.errno), str(path))


def wait_for_text(path: Path, text: str, seconds: float = 60.0) -> None:
    """Return when a file holds a text."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and text in path.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} does not hold {text}")
        time.sleep(0.01)


def kill_all(folder: Path) -> None:
    """End every process of the run as a dead node does, this one last."""
    pids = [int(child.name) for child in folder.iterdir()]
    for pid in [*(pid for pid in pids if pid != os.getpid()), os.getpid()]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def encode(faults: Sequence[Fault]) -> str:
    """Faults as a word of a command line."""
    return json.dumps([asdict(fault) for fault in faults])


def decode(text: str) -> list[Fault]:
    """The opposite of `encode`."""
    return [Fault(**fields) for fields in json.loads(text)]


if __name__ == "__main__":
    _, parent, role, faults_word = sys.argv
    files = FaultyFileSystem(decode(faults_word))
    if role == "writer":
        writer.main([parent], files)
    else:
        finalizer.main([parent], files)
