"""Initial values: a function of logical name, position and seed, so of no layout."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.ops.random import normal_values
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.shards import Box


def initial_value(spec: ParamSpec, box: Box, seed: int, dtype: torch.dtype) -> Tensor:
    """Initial values of one region of a logical parameter.

    Drawn in fp64, scaled, then rounded to `dtype` once; the same element gets the same
    bits whichever rank asks for it.

    Args:
        spec: the logical parameter.
        box: the region, `local_box` of a rank.
        seed: the run's seed.
        dtype: of the master weights.

    Returns:
        `box.shape`, `dtype`, on the CPU.
    """
    if spec.init.kind == "zeros":
        return torch.zeros(box.shape, dtype=dtype)
    if spec.init.kind == "ones":
        return torch.ones(box.shape, dtype=dtype)
    values = normal_values(spec.name, spec.shape, box.offset, box.shape, seed)
    return values.mul_(spec.init.std).to(dtype)
