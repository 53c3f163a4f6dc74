"""Fused physical parameters: what is stored as one tensor, and the logical views into it.

A module may store several logical parameters behind one another along dim 0 (q, k, v for
one GEMM; gate and up likewise). The plan says where each logical tensor begins; everything
outside the module works on the logical views. Local pieces are concatenated, never cut
pieces of a fused logical tensor: that is what keeps every layout's checkpoint the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.shards import Box, local_shape


@dataclass(frozen=True)
class View:
    """A logical parameter's local piece: `physical.narrow(0, start, rows)`."""

    spec: ParamSpec
    start: int
    rows: int


@dataclass(frozen=True)
class PhysicalParam:
    """One stored tensor of this rank: name, local shape, and its logical views in order."""

    name: str
    shape: tuple[int, ...]
    views: tuple[View, ...]

    @property
    def uses(self) -> tuple[str, ...]:
        """Use-sites; all views of one physical parameter share them."""
        return self.views[0].spec.uses

    @property
    def trained(self) -> bool:
        """Whether gradients change it; state is stored alone."""
        return self.views[0].spec.trained


_FUSED = (
    (re.compile(r"\.linear_(q|k|v)\.(weight|bias)$"), r".linear_qkv.\2"),
    # Not of experts: their stacks [experts, rows, columns] lie beside one another.
    (re.compile(r"(?<!\.experts)\.linear_(gate|up)\.(weight|bias)$"), r".linear_fc1.\2"),
)


def physical_name(logical: str) -> str:
    """Name of the stored tensor that holds a logical parameter."""
    for pattern, replacement in _FUSED:
        if pattern.search(logical):
            return pattern.sub(replacement, logical)
    return logical


def physical_params(specs: Sequence[ParamSpec]) -> tuple[PhysicalParam, ...]:
    """Group specs into stored tensors, in the order of their first logical member."""
    members: dict[str, list[ParamSpec]] = {}
    for spec in specs:
        members.setdefault(physical_name(spec.name), []).append(spec)
    stored = []
    for name, group in members.items():
        views, start = [], 0
        for spec in group:
            rows = local_shape(spec)[0]
            views.append(View(spec, start, rows))
            start += rows
        stored.append(PhysicalParam(name, (start, *local_shape(group[0])[1:]), tuple(views)))
    return tuple(stored)


def logical_piece(physical: Any, view: View, box: Box) -> Any:
    """Slice a stored tensor (weight, gradient, master, moment) to one logical piece.

    Args:
        physical: torch tensor or array of a `PhysicalParam`'s shape.
        view: which of its logical parameters.
        box: `local_box` of that parameter on this rank.

    Returns:
        A view of `box.shape`: the rank's real elements, vocabulary padding left out.
    """
    return physical[view.start : view.start + box.shape[0]]
