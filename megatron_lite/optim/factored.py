"""Adafactor's second moment (Shazeer and Stern, arXiv 1804.04235): rows and columns.

Of a matrix only the means of g^2 + eps over its rows and over its columns are kept,
averaged over updates with decay 1 - t^-c; v = R C^T / mean(R) stands for them. A rank sums
the boxes that it owns, the sums are completed over the shard group, and over tp where the
matrix is cut there. Of a stack of experts every matrix has its own; they stay where the
experts are. Invariant: statistics are those of the logical matrix, each element counted once,
and equal on all ranks of a shard group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_lite.mesh.collectives import all_reduce
from megatron_lite.mesh.groups import Group
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.shards import Box

ROW, COLUMN = "exp_avg_sq_row", "exp_avg_sq_column"


def is_factored(spec: ParamSpec) -> bool:
    """Whether a parameter has rows and columns: embeddings have them too."""
    return spec.matrix is not None


def statistic_spec(spec: ParamSpec, kind: str) -> ParamSpec:
    """The logical vectors that a statistic of matrices is: cut like the dims that it keeps."""
    dims = len(spec.shape)
    summed = dims - 1 if kind == ROW else dims - 2
    kept = [dim for dim in range(dims) if dim != summed]
    return replace(
        spec,
        shape=tuple(spec.shape[dim] for dim in kept),
        cuts=tuple(replace(cut, dim=kept.index(cut.dim)) for cut in spec.cuts if cut.dim in kept),
        padded=spec.padded if 0 in kept else None,
        matrix=None,
    )


def statistic_shape(shape: Sequence[int], kind: str) -> tuple[int, ...]:
    """Shape of a statistic of [..., rows, columns]."""
    return (*shape[:-2], shape[-2] if kind == ROW else shape[-1])


def _cuts_columns(spec: ParamSpec) -> bool:
    """Whether the tensor group cuts the rows across, and so has parts of their sums."""
    return spec.tensor_cut is not None and spec.tensor_cut.dim == len(spec.shape) - 1


@dataclass(frozen=True, eq=False)
class Spread:
    """Over which ranks the elements of parameters are spread, and how state is kept.

    Attributes:
        shard: over which what a tensor rank holds is spread.
        tensor: over which matrices are cut.
        dtype: of masters and state.
        device: of the weights.
    """

    shard: Group
    tensor: Group
    dtype: torch.dtype
    device: torch.device

    def zeros(self, elements: int) -> Tensor:
        """State."""
        return torch.zeros(elements, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class OwnedBox:
    """A part of a factored parameter that this rank owns: a view and its place."""

    index: int  # into the parameters of FactoredMoments
    box: Box  # of the logical matrix or stack
    gradient: Tensor


class FactoredMoments:
    """Row and column statistics of the matrices that one rank holds pieces of.

    Attributes:
        specs: the matrices, or stacks of them.
        boxes: what this tensor rank holds of each.
        rows, columns: [rows] and [columns] of those boxes, with the stack's dim in front
            where there is one; views of one tensor.
    """

    def __init__(self, held: Sequence[tuple[ParamSpec, Box]], spread: Spread) -> None:
        """Allocate zero statistics.

        Args:
            held: every factored parameter and this tensor rank's box of it, in one order on
                all ranks of the shard and the tensor group; empty boxes included.
            spread: over which ranks.
        """
        self.specs = [spec for spec, _ in held]
        self.boxes = [box for _, box in held]
        self._spread = spread
        self._flat = spread.zeros(
            sum(math.prod(statistic_shape(b.shape, k)) for b in self.boxes for k in (ROW, COLUMN))
        )
        self.rows, self.columns = self._views(self._flat)

    def accumulate(self, owned: Sequence[OwnedBox], eps: float, decay: float) -> None:
        """Bring the statistics up to date with the gradients.

        Args:
            owned: disjoint boxes; over the shard group they cover `boxes`.
            eps: added to every square.
            decay: of the old statistics; 0 in the first update.

        Comm: one all-reduce of all statistics over the shard group, one over tp of those
            that cross its cut.
        """
        sums = torch.zeros_like(self._flat)
        all_rows, all_columns = self._views(sums)
        for part in owned:
            squares = part.gradient.to(sums.dtype).square().add_(eps)
            rows, columns = self._place(part)
            all_rows[part.index][rows] += squares.sum(-1)
            all_columns[part.index][columns] += squares.sum(-2)
        if len(sums):
            all_reduce(sums, self._spread.shard)
        self._sum_over_cut(all_rows, all_columns)
        for index, spec in enumerate(self.specs):
            all_rows[index].div_(spec.shape[-1])
            all_columns[index].div_(spec.shape[-2])
        self._flat.lerp_(sums, 1.0 - decay)

    def root(self, part: OwnedBox) -> Tensor:
        """Root of the second moment in an owned box, a new tensor of its shape."""
        rows, columns = self._place(part)
        row, column = self.rows[part.index], self.columns[part.index]
        # The mean over a whole matrix, from the statistic that is whole here.
        whole = row if _cuts_columns(self.specs[part.index]) else column
        mean = whole.mean(-1, keepdim=True)
        row = (row / mean)[rows].sqrt_()
        return row.unsqueeze(-1) * column[columns].sqrt().unsqueeze(-2)

    def statistics(self) -> Iterator[tuple[str, ParamSpec, Tensor]]:
        """(kind, logical vectors, this rank's part) of every statistic."""
        for spec, row, column in zip(self.specs, self.rows, self.columns, strict=True):
            yield ROW, statistic_spec(spec, ROW), row
            yield COLUMN, statistic_spec(spec, COLUMN), column

    def _views(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Statistics of rows and of columns by parameter, inside a tensor of all."""
        shapes = [statistic_shape(box.shape, kind) for box in self.boxes for kind in (ROW, COLUMN)]
        parts = flat.split([math.prod(shape) for shape in shapes])
        views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return views[0::2], views[1::2]

    def _place(self, part: OwnedBox) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where an owned box lies in the statistics of its rows and of its columns."""
        held = self.boxes[part.index]
        starts = [a - b for a, b in zip(part.box.offset, held.offset, strict=True)]
        pairs = zip(starts, part.box.shape, strict=True)
        *stack, row, column = (slice(start, start + length) for start, length in pairs)
        return (*stack, row), (*stack, column)

    def _sum_over_cut(self, rows: Sequence[Tensor], columns: Sequence[Tensor]) -> None:
        """Complete the statistics along the dim that is cut, each piece counted once."""
        tensor = self._spread.tensor
        crossing = [
            (rows[index] if _cuts_columns(spec) else columns[index], spec)
            for index, spec in enumerate(self.specs)
            if spec.tensor_parts > 1
        ]
        if not crossing or tensor.size == 1:
            return
        packed = torch.cat(
            [view.reshape(-1).div(tensor.size // spec.tensor_parts) for view, spec in crossing]
        )
        all_reduce(packed, tensor)
        pieces = packed.split([view.numel() for view, _ in crossing])
        for (view, _), piece in zip(crossing, pieces, strict=True):
            view.copy_(piece.view(view.shape))
