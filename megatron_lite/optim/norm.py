"""The global gradient norm and the clip coefficient.

Each logical element counts once: the ranges come from the spec's ownership
(`shard.pieces.norm_ranges`), so neither replicas nor padding rows are in the sum. Squares
are summed in the gradients' dtype inside blocks and in fp64 over blocks: an fp32 norm is
then within 1e-7 of an fp64 one, at the speed of one pass over memory. The native operation
forms and sums them in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_lite.ops.optimizer import squared_norm
from megatron_lite.shard.pieces import Range

_BLOCK = 1024  # elements; so few that their fp32 sum loses nothing that counts


class SquaredNorm:
    """This rank's share of the squared global norm."""

    def __init__(
        self,
        gradients: Mapping[int, Tensor],
        ranges: Sequence[Range],
        native: bool = False,
    ) -> None:
        """Prepare the sum.

        Args:
            gradients: bucket -> the owned gradients.
            ranges: what of them counts here.
            native: sum by the native operation.
        """
        self._native = native
        self._ranges = [gradients[bucket][start:stop] for bucket, start, stop in ranges]
        self._blocks: list[Tensor] = []
        for bucket, start, stop in ranges:
            whole = start + (stop - start) // _BLOCK * _BLOCK
            if whole > start:
                self._blocks.append(gradients[bucket][start:whole].view(-1, _BLOCK))
            if stop > whole:
                self._blocks.append(gradients[bucket][whole:stop].view(1, -1))
        self._device = next(iter(gradients.values())).device if gradients else None

    @torch.no_grad()
    def __call__(self) -> tuple[Tensor, Tensor]:
        """Sum the squares.

        Returns:
            Sum of squares, 0-dim fp64, and a count, 0-dim fp64: of non-finite elements
            (native) or of blocks that hold one; both partial over the world, on the
            gradients' device.
        """
        if not self._blocks:
            zero = torch.zeros((), dtype=torch.float64, device=self._device)
            return zero, zero.clone()
        if self._native:
            squares, bad = torch.stack([squared_norm(part) for part in self._ranges]).sum(0)
            return squares, bad
        squares = torch.cat([_block_squares(blocks) for blocks in self._blocks])
        return squares.sum(), (~squares.isfinite()).sum().to(torch.float64)


def _block_squares(blocks: Tensor) -> Tensor:
    """[blocks, elements] -> [blocks] fp64, the sum of squares of each block."""
    if blocks.device.type == "cpu" and blocks.shape[1] == _BLOCK:
        # On the CPU a norm that widens its input is 17 times slower than one that does not.
        narrow = blocks if blocks.dtype == torch.float64 else blocks.float()
        squares = torch.linalg.vector_norm(narrow, dim=1).double().square()
        if bool(squares.sum().isfinite()):
            return squares
        # Perhaps only an fp32 square overflowed: fp64 tells.
    return torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float64).square()


def clip_coefficient(norm: float, clip: float) -> float:
    """Factor that limits the gradient norm to `clip`: clip / (norm + 1e-6) if below 1.

    Args:
        norm: global gradient norm.
        clip: largest norm; 0 means no clipping.
    """
    if clip <= 0.0:
        return 1.0
    coefficient = clip / (norm + 1e-6)
    return coefficient if coefficient < 1.0 else 1.0


def global_norm(sum_of_squares: float) -> float:
    """The norm from the world's sum of squares; not finite where a gradient is not."""
    return math.sqrt(sum_of_squares) if math.isfinite(sum_of_squares) else sum_of_squares
