"""What `kernels.py` measures: each operation with its work and its peers.

A case is one operation at one size. Its contestants do the same work on the same inputs:
`ours` is the native operation, `torch` what one writes in plain PyTorch, further ones are
libraries where they can be imported. Work is in closed form, bytes or FLOPs as docs/kernels.md
counts them: what an ideal kernel moves or computes, not what a contestant does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


@dataclass(frozen=True)
class Contestant:
    """One implementation.

    Attributes:
        function: of the case's inputs.
        extra: its own last arguments.
        compiles: `--compile` also measures torch.compile of it.
    """

    function: Function
    extra: tuple[Any, ...] = ()
    compiles: bool = False


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        operation: name for `--ops`.
        label: what and how large.
        bound: "memory" or "compute".
        forward: bytes or FLOPs of one call.
        both: of forward and backward; None: there is only one pass.
        inputs: first arguments of every contestant.
        leaves: those of `inputs` that get a gradient.
        contestants: by name, `ours` and `torch` among them.
        target: least ratio of `torch`'s time to ours that the project promises (CPU, bf16).
        both_only: the forward pass computes the gradient, too.
    """

    operation: str
    label: str
    bound: str
    forward: float
    both: float | None
    inputs: tuple[Any, ...]
    leaves: tuple[Tensor, ...]
    contestants: dict[str, Contestant] = field(default_factory=dict)
    target: float | None = None
    both_only: bool = False


@dataclass(frozen=True)
class Scale:
    """Sizes of a run.

    Attributes:
        t: tokens.
        h: hidden channels.
        v: vocabulary.
        n: parameters of the optimizer.
        attention: (b, n, s, d) of its cases.
    """

    t: int
    h: int
    v: int
    n: int
    attention: tuple[tuple[int, int, int, int], ...]


_CPU_ATTENTION = ((4, 6, 512, 64), (1, 6, 2048, 64), (1, 2, 8192, 64))
_CUDA_ATTENTION = ((4, 32, 4096, 128), (1, 16, 16384, 128), (8, 16, 2048, 64))
SCALES = {
    "quick": Scale(64, 64, 512, 10_000, ((1, 2, 64, 64),)),
    "cpu": Scale(2048, 384, 32000, 4_000_000, _CPU_ATTENTION),
    "cuda": Scale(16384, 4096, 50304, 200_000_000, _CUDA_ATTENTION),
}


def found(module: str) -> Any | None:
    """An optional library, None where it is missing or does not load."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):
        return None


class Inputs:
    """Draws tensors of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.bytes = torch.empty(0, dtype=dtype).element_size()

    def leaf(self, *shape: int) -> Tensor:
        """Standard normal, with gradient."""
        return self.constant(*shape).requires_grad_()

    def constant(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal, without gradient."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)
