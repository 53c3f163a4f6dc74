"""What is measured rather than computed: live tensor bytes, peak RSS, matmul rate.

torch has no memory statistics for the CPU, so `LiveStorageMeter` counts the storages that
tensor operations create while it is active and forgets each when it is freed. It costs
Python time per operation: for start-up checks and tests, never in a measured step.
"""

from __future__ import annotations

import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.telemetry.flops import MachinePeak

CALIBRATION_SIZE = 1024
CALIBRATION_SECONDS = 0.3


class LiveStorageMeter(TorchDispatchMode):
    """Count the bytes of tensor storages alive, once per storage however many views.

    Storages that existed before are not known until `track` names them or an operation
    returns a view of them. What an operation allocates and frees inside itself is
    not seen. Storages of "meta" tensors count as if they were there.

    Attributes:
        live_bytes: now.
        peak_bytes: greatest `live_bytes` since the start or `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        # StorageImpl address -> bytes. The entry goes when the storage is freed, before
        # its address can be used again.
        self._sizes: dict[int, int] = {}

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Count storages that are there already, such as parameters."""
        for tensor in tensors:
            self._see(tensor)

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        self.peak_bytes = self.live_bytes

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            # torch keeps a storage's Python object as long as the storage itself.
            weakref.finalize(storage, self._forget, key).atexit = False
        if known != size:
            self._sizes[key] = size
            self.live_bytes += size - (known or 0)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._see(leaf)
        return result


def measure_peak_rss_bytes() -> int:
    """Return the greatest resident size of this process so far.

    Linux's VmHWM is preferred: getrusage's figure is inherited over exec and would show a
    launcher's size.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure_matmul_peak(
    dtype: torch.dtype,
    device: torch.device,
    *,
    size: int = CALIBRATION_SIZE,
    seconds: float = CALIBRATION_SECONDS,
) -> MachinePeak:
    """Time square matrix products and return the best rate as this rank's peak.

    The best of many, because other load only ever makes a product slower. Ranks that share
    a machine should calibrate at the same time: then each sees its share of the cores.

    Args:
        dtype: the compute dtype of the run.
        device: where the run computes.
        size: side of the square matrices.
        seconds: how long to repeat, at least three products.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    a = torch.rand(size, size, device=device, generator=generator).to(dtype)
    b = torch.rand(size, size, device=device, generator=generator).to(dtype)
    out = torch.empty_like(a)
    flops = 2 * size**3
    best_s = float("inf")
    repeats = 0
    begin = time.perf_counter()
    while repeats < 3 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start)
        repeats += 1
    name = str(dtype).removeprefix("torch.")
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else device.type
    description = (
        f"measured dense {name} matmul {size} x {size} x {size}, best of {repeats}, {where}"
    )
    return MachinePeak(flops_per_s=flops / best_s, description=description)
