"""Planted bugs of matrix optimizers over stacks of experts; see `faults.py`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from megatron_lite.optim import matrix_updates
from megatron_lite.optim.whole_matrices import MatrixView
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.shards import Box

Views = Callable[[ParamSpec, Box, int], Iterator[MatrixView]]


@contextmanager
def _viewed(
    planted: Callable[[Views, ParamSpec, Box, int], Iterator[MatrixView]],
) -> Iterator[None]:
    original = matrix_updates.matrix_views

    def views(spec: ParamSpec, box: Box, start: int) -> Iterator[MatrixView]:
        if spec.is_stack:
            return planted(original, spec, box, start)
        return original(spec, box, start)

    with patch.object(matrix_updates, "matrix_views", views):
        yield


@contextmanager
def experts_orthogonalised_together() -> Iterator[None]:
    """The experts of a rank are taken for one tall matrix."""

    def planted(original: Views, spec: ParamSpec, box: Box, start: int) -> Iterator[MatrixView]:
        experts, rows, columns = box.shape
        yield MatrixView(spec.name, Box((0, 0), (experts * rows, columns)), start)

    with _viewed(planted):
        yield


@contextmanager
def slices_of_an_expert_orthogonalised_apart() -> Iterator[None]:
    """Every tensor rank of an expert takes its slice for the matrix."""

    def planted(original: Views, spec: ParamSpec, box: Box, start: int) -> Iterator[MatrixView]:
        for view in original(spec, box, start):
            yield replace(view, cut=None)

    with _viewed(planted):
        yield
