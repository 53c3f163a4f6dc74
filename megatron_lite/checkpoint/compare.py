"""How two checkpoints differ, tensor by tensor, whatever layouts saved them.

Tensors are compared bit by bit; where bits differ, values are too, in fp64. One tensor of
each checkpoint is in memory at a time, the arithmetic runs over small parts of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.checkpoint.reader import Checkpoint
from megatron_lite.checkpoint.strict_json import encode_json
from megatron_lite.checkpoint.tensors import DTYPE_NAMES, tensor_bytes

GROUPS = ("weights", "masters", "moments")
PART_ELEMENTS = 4 * 2**20


def group_of(name: str) -> str:
    """Return the part of a checkpoint that a tensor belongs to."""
    if not name.startswith("optim/"):
        return "weights"
    return "masters" if name.startswith("optim/master/") else "moments"


def names_of(checkpoint: Checkpoint, groups: Collection[str]) -> list[str]:
    """Return the names of the tensors of some groups."""
    return [name for name in checkpoint.names if group_of(name) in groups]


def hash_groups(checkpoint: Checkpoint) -> tuple[dict[str, str], str]:
    """Return the logical hash of each group that is there, and of everything, in one pass.

    Each is what `reader.logical_hash` gives for those names.
    """
    whole = hashlib.sha256()
    groups = {group: hashlib.sha256() for group in GROUPS if names_of(checkpoint, [group])}
    for name in checkpoint.names:
        tensor = checkpoint.read(name)
        head = encode_json([name, DTYPE_NAMES[tensor.dtype], list(tensor.shape)])
        for digest in (whole, groups[group_of(name)]):
            digest.update(head)
            digest.update(tensor_bytes(tensor))
    return {group: digest.hexdigest() for group, digest in groups.items()}, whole.hexdigest()


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that differs.

    Attributes:
        kind: "only_here", "only_there", "shape", "dtype" (values are compared all the
            same) or "values".
        here, there: dtype and shape, empty where it is not.
        differing: elements with other bits, of `elements`.
        max_abs: largest difference of two values; infinite where one is no number.
        max_relative: largest difference relative to the larger of the two values.
    """

    name: str
    kind: str
    here: str = ""
    there: str = ""
    differing: int = 0
    elements: int = 0
    max_abs: float = 0.0
    max_relative: float = 0.0


def compare_tensors(
    here: Checkpoint, there: Checkpoint, groups: Collection[str] = GROUPS
) -> Iterator[TensorDifference]:
    """Yield the tensors that differ, in name order; equal bits yield nothing.

    Raises:
        DamagedError: a tensor of either does not verify.
    """
    ours, theirs = (set(names_of(checkpoint, groups)) for checkpoint in (here, there))
    for name in sorted(ours | theirs):
        if name not in theirs:
            yield TensorDifference(name, "only_here", here=_form(here, name))
        elif name not in ours:
            yield TensorDifference(name, "only_there", there=_form(there, name))
        elif here.shape(name) != there.shape(name):
            forms = (_form(here, name), _form(there, name))
            yield TensorDifference(name, "shape", *forms)
        else:
            difference = _compare_values(name, here, there)
            if difference is not None:
                yield difference


def _form(checkpoint: Checkpoint, name: str) -> str:
    return f"{DTYPE_NAMES[checkpoint.dtype(name)]} {list(checkpoint.shape(name))}"


def _compare_values(name: str, here: Checkpoint, there: Checkpoint) -> TensorDifference | None:
    a, b = (checkpoint.read(name).reshape(-1) for checkpoint in (here, there))
    alike = a.dtype == b.dtype
    if alike and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    differing, max_abs, max_relative = 0, 0.0, 0.0
    for start in range(0, a.numel(), PART_ELEMENTS):
        part_a, part_b = (t[start : start + PART_ELEMENTS] for t in (a, b))
        differing += _count_other_bits(part_a, part_b)
        absolute, relative = _largest_difference(part_a.double(), part_b.double())
        max_abs, max_relative = max(max_abs, absolute), max(max_relative, relative)
    return TensorDifference(
        name,
        "values" if alike else "dtype",
        _form(here, name),
        _form(there, name),
        differing,
        a.numel(),
        max_abs,
        max_relative,
    )


def _count_other_bits(a: Tensor, b: Tensor) -> int:
    """Elements whose bytes differ; of two dtypes, those whose values do."""
    if a.dtype != b.dtype:
        return int((a.double() != b.double()).sum())
    size = a.element_size()
    bytes_a, bytes_b = (t.view(torch.uint8).view(-1, size) for t in (a, b))
    return int((bytes_a != bytes_b).any(dim=1).sum())


def _largest_difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Largest absolute and relative difference of fp64 values."""
    if a.numel() == 0:
        return 0.0, 0.0
    distance = (a - b).abs()
    # The same infinity, or no number on both sides, is no difference of values.
    distance[(a == b) | (a.isnan() & b.isnan())] = 0.0
    distance.nan_to_num_(nan=math.inf, posinf=math.inf)
    scale = torch.maximum(a.abs(), b.abs())
    relative = torch.where(distance == 0, 0.0, distance / scale).nan_to_num_(nan=math.inf)
    return float(distance.max()), float(relative.max())
