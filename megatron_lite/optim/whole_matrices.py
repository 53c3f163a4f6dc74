"""Logical matrices made whole out of the shards of a bucket, and cut again.

A rank owns a range of a bucket that cuts through matrices anywhere. One all-gather over the
shard group gives every rank the bucket, one over tp the other tensor ranks' pieces of the
matrices that touch its own range: it works on those alone. The tensor ranks of a shard own
the same range of equally laid out buckets, so they ask for the same matrices. Of a stack of
experts each matrix is one by itself, whole over etp; nothing goes over ep. Invariant: pieces
that several tensor ranks hold (KV heads fewer than TP) enter a matrix once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_lite.mesh.collectives import Work, all_gather_into
from megatron_lite.mesh.groups import Group
from megatron_lite.spec.params import Cut, ParamSpec
from megatron_lite.spec.shards import Box


@dataclass(frozen=True)
class MatrixView:
    """This rank's piece of a matrix: `bucket[start : start + box.elements]`.

    Attributes:
        name: of the parameter.
        box: in the logical matrix.
        start: in the bucket.
        cut: of the matrix over the tensor group, None where all its ranks hold all of it.
        index: in the logical stack, 0 where there is none.
    """

    name: str
    box: Box
    start: int
    cut: Cut | None = None
    index: int = 0

    @property
    def stop(self) -> int:
        """One past its last element in the bucket."""
        return self.start + self.box.elements


def matrix_views(spec: ParamSpec, box: Box, start: int) -> Iterator[MatrixView]:
    """The matrices of what a rank holds of a parameter.

    Args:
        spec: a matrix [rows, columns] or a stack of them [n, rows, columns].
        box: what the rank holds.
        start: of that in the bucket.
    """
    cut = spec.tensor_cut if spec.tensor_parts > 1 else None
    if not spec.is_stack:
        yield MatrixView(spec.name, box, start, cut)
        return
    matrix = Box(box.offset[1:], box.shape[1:])
    inner = None if cut is None else replace(cut, dim=cut.dim - 1)
    for number in range(box.shape[0]):
        place = start + number * matrix.elements
        yield MatrixView(spec.name, matrix, place, inner, box.offset[0] + number)


class BucketMatrices:
    """The matrices of one bucket that touch this rank's range."""

    def __init__(
        self, views: Sequence[MatrixView], elements: int, shard: Group, tensor: Group
    ) -> None:
        """Choose the matrices.

        Args:
            views: of the bucket, ascending.
            elements: of the bucket; the shard group's ranks own equal ranges of it.
            shard: the shard group.
            tensor: the group that matrices are cut over.
        """
        self.elements, self.shard, self.tensor = elements, shard, tensor
        share = elements // shard.size
        self.first, self.last = shard.rank * share, (shard.rank + 1) * share
        self.views = [v for v in views if v.start < self.last and v.stop > self.first]
        self._cut = [view for view in self.views if view.cut is not None]
        self._full: Tensor | None = None
        self._work: Work | None = None

    def start_gather(self, own: Tensor) -> None:
        """Begin to gather the bucket.

        Args:
            own: [elements / shard], this rank's range; elements outside of matrices may be
                anything.

        Comm: one all-gather of `elements` over the shard group, not waited for.
        """
        self._full, self._work = own, None
        if self.shard.size > 1:
            self._full = own.new_empty(self.elements)
            self._work = all_gather_into(self._full, own, self.shard, async_op=True)

    def whole(self) -> list[Tensor]:
        """Wait for the bucket and return the logical matrices of `views`, in order.

        Comm: one all-gather over the tensor group of what `views` hold of cut matrices,
            times its size; none where no matrix is cut.
        """
        assert self._full is not None, "start_gather comes first"
        if self._work is not None:
            self._work.wait()
        full, self._full, self._work = self._full, None, None
        pieces = {view: full[view.start : view.stop].view(view.box.shape) for view in self.views}
        if self._cut:
            sent = torch.cat([pieces[view].reshape(-1) for view in self._cut])
            received = sent.new_empty(self.tensor.size * len(sent))
            all_gather_into(received, sent, self.tensor)
            rows = received.view(self.tensor.size, len(sent))
            cursor = 0
            for view in self._cut:
                pieces[view] = self._joined(view, rows[:, cursor : cursor + view.box.elements])
                cursor += view.box.elements
        return list(pieces.values())

    def take(self, matrices: Sequence[Tensor], own: Tensor) -> None:
        """Write this rank's part of whole matrices into its range; the rest is left.

        Args:
            matrices: as `whole` returns them.
            own: [elements / shard], written.
        """
        for view, matrix in zip(self.views, matrices, strict=True):
            if view.cut is not None:
                dim = view.cut.dim
                matrix = matrix.narrow(dim, view.box.offset[dim], view.box.shape[dim])
            first, last = max(view.start, self.first), min(view.stop, self.last)
            flat = matrix.reshape(-1)[first - view.start : last - view.start]
            own[first - self.first : last - self.first] = flat

    def _joined(self, view: MatrixView, rows: Tensor) -> Tensor:
        """[tensor ranks, elements of a piece] -> the logical matrix."""
        assert view.cut is not None
        step = self.tensor.size // view.cut.parts  # ranks that hold one piece
        pieces = [row.view(view.box.shape) for row in rows[::step]]
        return torch.cat(pieces, dim=view.cut.dim)
