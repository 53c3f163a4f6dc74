"""Adafactor's second moment (Shazeer and Stern, arXiv 1804.04235): rows and columns.

Of a matrix only the means of g^2 + eps over its rows and over its columns are kept,
averaged over updates with decay 1 - t^-c; v = R C^T / mean(R) stands for them. A rank sums
the boxes that it owns, the sums are completed over the shard group, and over tp where the
matrix is cut there. Invariant: statistics are those of the logical matrix, each element
counted once, and equal on all ranks of a shard group.
"""

from __future__ import annotations

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
    return len(spec.shape) == 2


def statistic_spec(spec: ParamSpec, kind: str) -> ParamSpec:
    """The logical vector that a statistic of a matrix is: cut like the dim that it keeps."""
    dim = 0 if kind == ROW else 1
    return replace(
        spec,
        shape=(spec.shape[dim],),
        cuts=tuple(replace(cut, dim=0) for cut in spec.cuts if cut.dim == dim),
        padded=spec.padded if dim == 0 else None,
        matrix=None,
    )


def _cut_dim(spec: ParamSpec) -> int | None:
    return None if spec.tensor_cut is None else spec.tensor_cut.dim


@dataclass(frozen=True)
class OwnedBox:
    """A part of a factored parameter that this rank owns: 2-D views and their place."""

    index: int  # into the parameters of FactoredMoments
    box: Box  # of the logical matrix
    gradient: Tensor


class FactoredMoments:
    """Row and column statistics of the matrices that one rank holds pieces of.

    Attributes:
        specs: the matrices.
        boxes: what this tensor rank holds of each.
        rows, columns: the statistics of those boxes' rows and columns, views of one tensor.
    """

    def __init__(
        self,
        held: Sequence[tuple[ParamSpec, Box]],
        *,
        shard: Group,
        tensor: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate zero statistics.

        Args:
            held: every factored parameter and this tensor rank's box of it, in one order on
                all ranks of the shard and the tensor group; empty boxes included.
            shard: over which the elements of a box are spread.
            tensor: over which boxes are cut.
            dtype: of the statistics.
            device: of the weights.
        """
        self.specs = [spec for spec, _ in held]
        self.boxes = [box for _, box in held]
        self._shard, self._tensor = shard, tensor
        lengths = [length for box in self.boxes for length in box.shape]
        self._flat = torch.zeros(sum(lengths), dtype=dtype, device=device)
        views = self._flat.split(lengths)
        self.rows, self.columns = list(views[0::2]), list(views[1::2])

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
        views = sums.split([length for box in self.boxes for length in box.shape])
        for part in owned:
            squares = part.gradient.to(sums.dtype).square().add_(eps)
            rows, columns = self._place(part)
            views[2 * part.index][rows] += squares.sum(1)
            views[2 * part.index + 1][columns] += squares.sum(0)
        if len(sums):
            all_reduce(sums, self._shard)
        self._sum_over_cut(views)
        for index, spec in enumerate(self.specs):
            views[2 * index].div_(spec.shape[1])
            views[2 * index + 1].div_(spec.shape[0])
        self._flat.lerp_(sums, 1.0 - decay)

    def root(self, part: OwnedBox) -> Tensor:
        """Root of the second moment in an owned box, a new tensor of its shape."""
        rows, columns = self._place(part)
        row, column = self.rows[part.index], self.columns[part.index]
        # The mean over the whole matrix, from the statistic that is whole here.
        mean = row.mean() if _cut_dim(self.specs[part.index]) == 1 else column.mean()
        return torch.outer((row[rows] / mean).sqrt_(), column[columns].sqrt())

    def statistics(self) -> Iterator[tuple[str, ParamSpec, Tensor]]:
        """(kind, logical vector, this rank's part) of every statistic."""
        for spec, row, column in zip(self.specs, self.rows, self.columns, strict=True):
            yield ROW, statistic_spec(spec, ROW), row
            yield COLUMN, statistic_spec(spec, COLUMN), column

    def _place(self, part: OwnedBox) -> tuple[slice, slice]:
        """Rows and columns of an owned box inside this rank's box."""
        held = self.boxes[part.index]
        starts = [a - b for a, b in zip(part.box.offset, held.offset, strict=True)]
        row, column = (
            slice(start, start + length)
            for start, length in zip(starts, part.box.shape, strict=True)
        )
        return row, column

    def _sum_over_cut(self, views: Sequence[Tensor]) -> None:
        """Complete the statistics along the dim that tp cuts, each piece counted once."""
        crossing = [
            (views[2 * index + 1 - int(_cut_dim(spec) == 1)], spec)
            for index, spec in enumerate(self.specs)
            if spec.tensor_parts > 1
        ]
        if not crossing or self._tensor.size == 1:
            return
        packed = torch.cat(
            [view.div(self._tensor.size // spec.tensor_parts) for view, spec in crossing]
        )
        all_reduce(packed, self._tensor)
        pieces = packed.split([len(view) for view, _ in crossing])
        torch._foreach_copy_([view for view, _ in crossing], list(pieces))
