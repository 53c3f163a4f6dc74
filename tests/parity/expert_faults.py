"""Planted bugs of the expert axis, and rounding that is none; see `faults.py`.

Each is entered on every rank before anything is built. Where they must show, or must not:
`test_experts.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_lite.expert import replicas, router
from megatron_lite.mesh import collectives
from megatron_lite.mesh.groups import Group
from megatron_lite.verify.classes import MATCH32


@contextmanager
def scores_off_by_rounding() -> Iterator[None]:
    """No bug: what is compared is off by as much as an activation may be."""
    original = router.largest

    def planted(scores: Tensor, k: int, further: int = 0) -> Tensor:
        extent = scores.amax(-1, keepdim=True) - scores.amin(-1, keepdim=True)
        signs = torch.randint(2, scores.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
        return original(scores + signs * extent * MATCH32.activation * 0.99, k, further)

    with patch.object(router, "largest", planted):
        yield


@contextmanager
def replica_gradients_not_summed() -> Iterator[None]:
    """An owner adds what its own rank's tokens give its hot experts, and no other's."""

    def planted(t: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
        is_weights = async_op
        return collectives.all_reduce(t, group, op, async_op) if is_weights else None

    others = SimpleNamespace(**{**vars(collectives), "all_reduce": planted})
    with patch.object(replicas, "collectives", others):
        yield
