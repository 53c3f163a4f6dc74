"""Ways to save and load a state: ours, torch.save, safetensors, torch.distributed.checkpoint.

Each way is what its documentation tells users to do on one rank. Files are on the device
when a save counts as done: torch.save and safetensors do not sync by themselves, so their
files are synced here. A way that works in the background is given its buffers by a first
save, as in a run that saves again and again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

State = Mapping[str, Tensor]
WAYS = ("ours", "ours-async", "torch.save", "safetensors", "dcp", "dcp-async")


class Way(Protocol):
    """One way to save and load."""

    def save(self, step: int) -> Callable[[], None]:
        """Save up to where training may go on; the rest of it is the waiting returned."""

    def files(self, step: int) -> list[Path]:
        """The files that hold the bytes of a step."""

    def load(self, step: int) -> State:
        """Read a step into new memory."""


def done() -> None:
    """Nothing is left to wait for."""


def build_way(name: str, state: State, root: Path) -> Way:
    """Make a way by its name."""
    ways: dict[str, Callable[[], Way]] = {
        "ours": lambda: Ours(state, root, background=False),
        "ours-async": lambda: Ours(state, root, background=True),
        "torch.save": lambda: TorchSave(state, root),
        "safetensors": lambda: Safetensors(state, root),
        "dcp": lambda: Distributed(state, root, background=False),
        "dcp-async": lambda: Distributed(state, root, background=True),
    }
    return ways[name]()


class Ours:
    """A transaction, written by the caller or by the writer process from a snapshot."""

    def __init__(self, state: State, root: Path, *, background: bool):
        from megatron_lite.checkpoint.background import Finalizer, Writer
        from megatron_lite.checkpoint.fence import take_membership
        from megatron_lite.checkpoint.files import FileSystem
        from megatron_lite.checkpoint.snapshot import SnapshotBuffer
        from megatron_lite.checkpoint.tensors import StateEntry
        from megatron_lite.mesh.groups import local_group

        self._root, self._files, self._world = root, FileSystem(), local_group("world")
        self._entries = [
            StateEntry(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), True)
            for name, tensor in state.items()
        ]
        self._membership = take_membership(root, self._files)
        self._finalizer = Finalizer()
        self._buffer = SnapshotBuffer(self._entries) if background else None
        self._writer: Writer | None = None
        if self._buffer is not None:
            self._writer = Writer((self._buffer.descriptor, self._buffer.num_bytes))

    def save(self, step: int) -> Callable[[], None]:
        from megatron_lite.checkpoint.attempt import write_rank
        from megatron_lite.checkpoint.finalizer import Job
        from megatron_lite.checkpoint.save import begin_save
        from megatron_lite.checkpoint.tensors import take_snapshot
        from megatron_lite.checkpoint.writer import describe_job

        if self._writer is not None:
            self._writer.start()
        epoch = self._membership.epoch
        request, lock = begin_save(self._root, step, epoch, {}, False, self._world, self._files)
        if self._writer is not None and self._buffer is not None:
            self._buffer.fill(self._entries)
            job = describe_job(request, self._buffer.pieces, self._buffer.begins)
            self._writer.submit(job)
        else:
            write_rank(request, take_snapshot(self._entries), self._files)
        self._finalizer.submit(Job(request, None, None))

        def wait() -> None:
            for child in (self._writer, self._finalizer):
                reply = None if child is None else child.poll(None)
                if reply is not None and reply["failure"]:
                    raise RuntimeError(reply["failure"]["message"])
            if lock is not None:
                lock.let_go()

        if self._writer is not None:
            return wait
        wait()
        return done

    def files(self, step: int) -> list[Path]:
        return sorted(self._root.glob(f"attempts/{step}-*/*.safetensors"))

    def load(self, step: int) -> State:
        from megatron_lite.checkpoint.catalog import find_checkpoint
        from megatron_lite.checkpoint.reader import Checkpoint

        checkpoint = Checkpoint(find_checkpoint(self._root, step, verify="structure"))
        names = checkpoint.names
        tensors = checkpoint.read_many([(name, None, None) for name in names])
        return dict(zip(names, tensors, strict=True))


def sync(path: Path) -> None:
    """Return when a file and its name are on the device."""
    for place, flags in ((path, os.O_RDONLY), (path.parent, os.O_RDONLY | os.O_DIRECTORY)):
        descriptor = os.open(place, flags)
        os.fsync(descriptor)
        os.close(descriptor)


class TorchSave:
    """torch.save and torch.load."""

    def __init__(self, state: State, root: Path):
        self._state, self._root = dict(state), root

    def save(self, step: int) -> Callable[[], None]:
        (path,) = self.files(step)
        torch.save(self._state, path)
        sync(path)
        return done

    def files(self, step: int) -> list[Path]:
        return [self._root / f"{step}.pt"]

    def load(self, step: int) -> State:
        (path,) = self.files(step)
        loaded: State = torch.load(path)
        return loaded


class Safetensors:
    """safetensors.torch.save_file and load_file."""

    def __init__(self, state: State, root: Path):
        self._state, self._root = dict(state), root

    def save(self, step: int) -> Callable[[], None]:
        from safetensors.torch import save_file

        (path,) = self.files(step)
        save_file(self._state, path)
        sync(path)
        return done

    def files(self, step: int) -> list[Path]:
        return [self._root / f"{step}.safetensors"]

    def load(self, step: int) -> State:
        from safetensors.torch import load_file

        # Its tensors look into the file: the copy is what makes them read.
        (path,) = self.files(step)
        return {name: tensor.clone() for name, tensor in load_file(path).items()}


class Distributed:
    """torch.distributed.checkpoint on one rank with gloo; in the background by its thread."""

    def __init__(self, state: State, root: Path, *, background: bool):
        import torch.distributed as dist

        self._state, self._root, self._background = dict(state), root, background
        meet = (root / "meet").absolute()
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
        self._stager = None
        if background and torch.cuda.is_available():  # its buffers for reuse are pinned ones
            from torch.distributed.checkpoint.staging import BlockingAsyncStager

            self._stager = BlockingAsyncStager(cache_staged_state_dict=True)

    def save(self, step: int) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        place = str(self._root / str(step))
        if not self._background:
            dcp.save(self._state, checkpoint_id=place)
            return done
        pending = dcp.async_save(self._state, checkpoint_id=place, async_stager=self._stager)

        future: Any = getattr(pending, "upload_completion", pending)

        def wait() -> None:
            future.result()

        return wait

    def files(self, step: int) -> list[Path]:
        return sorted((self._root / str(step)).glob("*.distcp"))

    def load(self, step: int) -> State:
        import torch.distributed.checkpoint as dcp

        loaded = {name: torch.empty_like(tensor) for name, tensor in self._state.items()}
        dcp.load(loaded, checkpoint_id=str(self._root / str(step)))
        return loaded
