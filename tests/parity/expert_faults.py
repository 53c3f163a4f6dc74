"""Planted bugs of the expert axis; see `faults.py`. Where they must show: `test_experts.py`.

Each is entered on every rank before anything is built.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megatron_lite.expert import replicas
from megatron_lite.mesh import collectives
from megatron_lite.mesh.groups import Group


@contextmanager
def replica_gradients_not_summed() -> Iterator[None]:
    """An owner adds what its own rank's tokens give its hot experts, and no other's."""

    def planted(t: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
        is_weights = async_op
        return collectives.all_reduce(t, group, op, async_op) if is_weights else None

    others = SimpleNamespace(**{**vars(collectives), "all_reduce": planted})
    with patch.object(replicas, "collectives", others):
        yield
