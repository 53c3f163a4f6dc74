"""A rank's state, fixed in shared memory while training goes on.

One anonymous memory file per rank (memfd: not in /dev/shm, gone with its last user), its
pages present from the start and used again for every save, so that a snapshot costs one
copy of the state and no page faults. The writer process maps the same pages.
"""

import errno
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lite.checkpoint.attempt import SnapshotPiece
from megatron_lite.checkpoint.tensors import (
    StateEntry,
    snapshot_piece,
    tensor_over,
    written_entries,
)
from megatron_lite.errors import UserError

ALIGNMENT = 64


class SnapshotBuffer:
    """Shared memory that holds one snapshot.

    Args:
        entries: what every snapshot will hold; same names, shapes and dtypes each time.

    Raises:
        UserError: there is not enough memory.

    Attributes:
        descriptor: of the memory file, for the writer to inherit.
        num_bytes: its size.
        pieces: what is in it, `begins` where; fixed with the entries' shapes.
    """

    def __init__(self, entries: Sequence[StateEntry]):
        cut = written_entries(entries)
        self.begins: list[int] = []
        position = 0
        for entry in cut:
            self.begins.append(position)
            position += -(-entry.tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = max(position, mmap.PAGESIZE)
        self.descriptor = -1
        try:
            if self.num_bytes > available_bytes():
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            self.descriptor = os.memfd_create("checkpoint-snapshot", os.MFD_CLOEXEC)
            os.truncate(self.descriptor, self.num_bytes)
            # Populated: without it the first copy would wait for every page.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._mapped = mmap.mmap(self.descriptor, self.num_bytes, flags)
        except OSError as error:
            self.close()
            raise UserError(
                f"--async-save: no {self.num_bytes} bytes of memory for this rank's snapshot "
                f"({error.strerror}); more memory, more ranks, or saving without --async-save"
            ) from error
        view = memoryview(self._mapped)
        self.pieces: tuple[SnapshotPiece, ...] = tuple(map(snapshot_piece, cut))
        self._copies = [
            tensor_over(
                view[begin : begin + entry.tensor.nbytes],
                piece.item.dtype,
                tuple(entry.tensor.shape),
            )
            for begin, entry, piece in zip(self.begins, cut, self.pieces, strict=True)
        ]
        _pin(self._mapped, [entry.tensor for entry in cut])

    def fill(self, entries: Sequence[StateEntry]) -> None:
        """Copy the present state; nothing may change the buffer until it has been written.

        CUDA tensors are copied on the current stream, so behind the step that made them.
        """
        cut = written_entries(entries)
        if len(cut) != len(self._copies):
            raise ValueError(f"{len(cut)} pieces, the snapshot was made for {len(self._copies)}")
        on_device = False
        for entry, piece, copy in zip(cut, self.pieces, self._copies, strict=True):
            if (entry.name, entry.tensor.dtype, entry.tensor.shape) != (
                piece.name,
                copy.dtype,
                copy.shape,
            ):
                raise ValueError(f"{entry.name}: not what the snapshot was made for")
            copy.copy_(entry.tensor.detach(), non_blocking=True)
            on_device |= entry.tensor.is_cuda
        if on_device:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Give the memory back once the writer has, too."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def available_bytes() -> float:
    """Memory of this node that can be had without swapping; unbounded where nobody says."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return float(line.split()[1]) * 1024
    except OSError:
        pass
    return float("inf")


def _pin(mapped: mmap.mmap, tensors: Sequence[Tensor]) -> None:
    """Page-lock the buffer where tensors lie on a device: copies run at full speed."""
    if any(tensor.is_cuda for tensor in tensors):
        start = torch.frombuffer(mapped, dtype=torch.uint8)
        # Best effort: unpinned memory is correct too.
        torch.cuda.cudart().cudaHostRegister(start.data_ptr(), start.numel(), 0)
