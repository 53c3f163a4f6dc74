"""Where masters and moments lie: beside the parameters, in host memory, or in a file.

A home gives tensors and is told when they are about to be read and when they were written,
so that of a file only what is worked on is resident. State in a file is a shared mapping of
a private file without a name: gone with the process however it ends, its space reserved
before the first step. Other state of the same run is never affected: whole buckets are
offloaded or not.
"""

from __future__ import annotations

import bisect
import errno
import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_lite.config.schema import Config
from megatron_lite.config.state_plan import offload_fraction, offload_kind, offloaded_buckets
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.shard.buffers import FlatBuffers

CPU = torch.device("cpu")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class StateHome:
    """State beside the parameters; the base of the other homes.

    Attributes:
        device: of the parameters.
        buckets: whose state lies elsewhere, always on the CPU.
        chunk_elements: of that state that are updated at once; None: as many as is good.
    """

    chunk_elements: int | None = None

    def __init__(self, device: torch.device, buckets: Iterable[int] = ()) -> None:
        """Choose the buckets.

        Args:
            device: of the parameters.
            buckets: whose state lies elsewhere.
        """
        self.device = device
        self.buckets = frozenset(buckets)

    @property
    def is_staged(self) -> bool:
        """Whether gradients and parameters pass through buffers of the host."""
        return bool(self.buckets)

    def zeros(self, bucket: int, elements: int, dtype: str) -> Tensor:
        """Zeros for the state of a bucket.

        Raises:
            UserError: there is no room for them.
        """
        if bucket in self.buckets:
            return self.elsewhere(elements, getattr(torch, dtype))
        try:
            return torch.zeros(elements, dtype=getattr(torch, dtype), device=self.device)
        except RuntimeError as error:
            raise _no_memory(elements, dtype, self.device, error) from error

    def elsewhere(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Zeros that do not lie beside the parameters."""
        try:
            return torch.zeros(elements, dtype=dtype)
        except RuntimeError as error:
            raise _no_memory(elements, str(dtype).removeprefix("torch."), CPU, error) from error

    def scratch(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Room for a value of a tensor's shape that does not cost more memory than it does.

        None where new memory is as good.
        """
        return None

    def expect(self, tensors: Iterable[Tensor]) -> None:
        """These parts of the state are read next."""

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """These parts of the state are not needed soon."""

    def leave_all(self) -> None:
        """No state is needed soon."""


class MappedHome(StateHome):
    """State in a file of this rank."""

    def __init__(self, device: torch.device, buckets: Iterable[int], directory: str) -> None:
        """Open the file.

        Args:
            device, buckets: as for every home.
            directory: of the file.

        Raises:
            UserError: nothing can be written there.
        """
        super().__init__(device, buckets)
        self.directory = directory
        self._file = _PrivateFile(directory)
        self._starts: list[int] = []  # addresses, ascending
        self._maps: list[mmap.mmap] = []

    @property
    def is_staged(self) -> bool:
        """The CPU works on the mapped file itself."""
        return bool(self.buckets) and self.device.type != "cpu"

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return self._file.num_bytes

    def elsewhere(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Zeros in the file.

        Raises:
            DamagedError: there is no space for them.
        """
        if elements == 0:
            return torch.zeros(0, dtype=dtype)
        mapped = self._file.extend(elements * dtype.itemsize)
        tensor = torch.frombuffer(mapped, dtype=dtype, count=elements)
        at = bisect.bisect(self._starts, tensor.data_ptr())
        self._starts.insert(at, tensor.data_ptr())
        self._maps.insert(at, mapped)
        return tensor

    def scratch(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """A file of its own, for a tensor of the file."""
        if tensor.numel() == 0 or self._find(tensor) is None:
            return None
        file = _PrivateFile(self.directory)
        mapped = file.extend(tensor.numel() * dtype.itemsize)
        file.close()
        return torch.frombuffer(mapped, dtype=dtype, count=tensor.numel()).view(tensor.shape)

    def expect(self, tensors: Iterable[Tensor]) -> None:
        """Read ahead."""
        self._advise(tensors, mmap.MADV_WILLNEED)

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Let the pages go: the system writes them back and uses them as it likes."""
        self._advise(tensors, mmap.MADV_DONTNEED)

    def leave_all(self) -> None:
        """Let all pages go."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def _advise(self, tensors: Iterable[Tensor], advice: int) -> None:
        for tensor in tensors:
            found = self._find(tensor)
            if found is not None:
                mapped, start = found
                first = start // mmap.PAGESIZE * mmap.PAGESIZE
                mapped.madvise(advice, first, start + tensor.nbytes - first)

    def _find(self, tensor: Tensor) -> tuple[mmap.mmap, int] | None:
        """The mapping that a tensor lies in, and where; None outside of the file."""
        address = tensor.data_ptr()
        at = bisect.bisect(self._starts, address) - 1
        if at < 0 or tensor.device.type != "cpu":
            return None
        start = address - self._starts[at]
        return (self._maps[at], start) if start < len(self._maps[at]) else None


class _PrivateFile:
    """A file without a name that grows by mapped ranges."""

    def __init__(self, directory: str) -> None:
        self.num_bytes = 0
        self._directory = directory
        try:
            # Unlinked at once: whatever ends this process, nothing stays behind.
            self._descriptor, path = tempfile.mkstemp(prefix="optimizer-state-", dir=directory)
            os.unlink(path)
        except OSError as error:
            raise UserError(
                f"--offload-dir {directory}: cannot be written to ({error.strerror}): "
                "give an existing directory on a local disk"
            ) from error

    def extend(self, num_bytes: int) -> mmap.mmap:
        """Reserve and map further bytes, which are 0."""
        start, length = self.num_bytes, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            # Not a sparse file: a full disk would later end the run with a bus error.
            os.posix_fallocate(self._descriptor, start, length)
            mapped = mmap.mmap(self._descriptor, length, mmap.MAP_SHARED, offset=start)
            mapped.madvise(mmap.MADV_SEQUENTIAL)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            raise DamagedError(self._no_space(length, error)) from error
        self.num_bytes += length
        return mapped

    def close(self) -> None:
        """Give up the descriptor; what is mapped stays."""
        os.close(self._descriptor)

    def _no_space(self, wanted: int, error: OSError) -> str:
        found = os.statvfs(self._directory)
        return (
            f"--offload-dir {self._directory}: no space for the optimizer state "
            f"({error.strerror}): this rank has {self.num_bytes:,} bytes and needs at least "
            f"{wanted:,} more, {found.f_bavail * found.f_frsize:,} are free; give another "
            "directory, more ranks that shard, or a smaller --optimizer-offload-fraction"
        )


def _no_memory(
    elements: int, dtype: str, device: torch.device, error: RuntimeError
) -> RuntimeError | UserError:
    """What to raise where an allocation failed."""
    words = str(error)
    if not isinstance(error, torch.OutOfMemoryError) and "t allocate memory" not in words:
        return error
    num_bytes = elements * getattr(torch, dtype).itemsize
    return UserError(
        f"no memory on {device.type} for {num_bytes:,} bytes of optimizer state ({elements:,} "
        f"elements, {dtype}): shard it (--use-distributed-optimizer over more ranks) or "
        "offload it (--optimizer-offload disk --offload-dir DIR)"
    )


def build_home(config: Config, buffers: FlatBuffers) -> StateHome:
    """The home that the flags describe.

    Raises:
        UserError: nothing can be written into `--offload-dir`.
    """
    kind = offload_kind(config)
    sizes: Sequence[int] = [window.elements for _, window in sorted(buffers.windows.items())]
    chosen = offloaded_buckets(sizes, offload_fraction(config))
    if kind == "disk":
        assert config.offload_dir is not None
        return MappedHome(buffers.device, chosen, config.offload_dir)
    return StateHome(buffers.device, chosen)
