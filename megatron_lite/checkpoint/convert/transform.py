"""Changes of a bundle that keep the model the same function: dtype and storage conventions.

Formats other than ours know one rotary layout (half against half) and one way to store a
norm's weight. Which convention a checkpoint has is in its configuration, so a wrong one
cannot be chosen. Every change is a recipe: nothing is computed before its tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.convert.bundle import Bundle, state_names
from megatron_lite.checkpoint.direct import LogicalTensor
from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError

# Compute formats of a run, by the flag that chooses them; float32 is none of them.
PRECISION_FLAGS = {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
WEIGHT_DTYPES = ("float64", "float32", "bfloat16", "float16")
HALF = ("bfloat16", "float16")
ROTATED = re.compile(r".*\.self_attention\.(linear_[qk]\.(weight|bias)|[qk]_layernorm\..*)")
NORM_WEIGHT = re.compile(r".*layernorm\.weight")


def with_precision(config: Config, dtype: str) -> Config:
    """Return the configuration whose compute format is `dtype`."""
    flags: dict[str, Any] = {flag: name == dtype for name, flag in PRECISION_FLAGS.items()}
    return replace(config, **flags)


def map_tensors(
    bundle: Bundle,
    wanted: Callable[[str], bool],
    change: Callable[[Tensor], Tensor],
) -> dict[str, LogicalTensor]:
    """Return the tensors with `change` applied where `wanted(name)`; shapes stay."""

    def changed(tensor: LogicalTensor) -> LogicalTensor:
        return replace(tensor, load=lambda: change(tensor.load()))

    return {n: changed(t) if wanted(n) else t for n, t in bundle.tensors.items()}


def to_dtype(bundle: Bundle, dtype: str) -> Bundle:
    """Return the bundle with every weight in `dtype`; state stays as precise as it is.

    Raises:
        UserError: when a tensor is read whose values are beyond the range of `dtype`.
    """
    kept = state_names(bundle) if dtype in HALF else frozenset()
    tensors = {
        name: tensor if tensor.dtype == dtype or name in kept else _converted(tensor, dtype)
        for name, tensor in bundle.tensors.items()
    }
    return replace(bundle, tensors=tensors, config=with_precision(bundle.config, dtype))


def _converted(tensor: LogicalTensor, dtype: str) -> LogicalTensor:
    def load() -> Tensor:
        value = tensor.load()
        result = value.to(getattr(torch, dtype))
        if not bool((result.isfinite() | ~value.isfinite()).all()):
            largest = torch.finfo(result.dtype).max
            raise UserError(
                f"{tensor.name}: has values beyond {largest:.6g}, the largest of --dtype {dtype}"
            )
        return result

    return LogicalTensor(tensor.name, dtype, tensor.shape, load)


def half_split_rotary(bundle: Bundle) -> Bundle:
    """Return the bundle in the rotary layout that pairs the two halves of a head.

    Interleaved pairs are the channels (2i, 2i+1) of a head; they go to (i, i + d/2). The
    same permutation on queries and keys leaves every product of the two as it was.

    Raises:
        UserError: only a share of the channels is rotated.
    """
    rotary = bundle.model.rotary
    if rotary is None or not rotary.interleaved or bundle.model.latent is not None:
        return bundle  # latents' rotary channels are neighbours in every format
    channels = bundle.model.kv_channels
    if rotary.dim != channels:
        raise UserError(
            f"{bundle.source}: --rotary-percent rotates {rotary.dim} of {channels} channels; "
            "only fully rotated heads can leave the interleaved layout"
        )

    def permute(tensor: Tensor) -> Tensor:
        heads = tensor.reshape(-1, channels // 2, 2, *tensor.shape[1:])
        return heads.transpose(1, 2).reshape(tensor.shape)

    tensors = map_tensors(bundle, lambda name: ROTATED.fullmatch(name) is not None, permute)
    return replace(bundle, tensors=tensors, config=replace(bundle.config, rotary_interleaved=False))


def plain_norms(bundle: Bundle) -> Bundle:
    """Return the bundle with norm weights themselves instead of their difference from 1.

    Raises:
        UserError: the weights are in half precision, where adding 1 would round them.
    """
    if not bundle.model.norm_one_plus:
        return bundle
    half = [n for n, t in bundle.tensors.items() if t.dtype in HALF]
    if half:
        raise UserError(
            f"{bundle.source}: --layernorm-zero-centered-gamma stores norm weights minus 1, and "
            f"adding 1 in {bundle.tensors[half[0]].dtype} would round them: give --dtype float32"
        )
    tensors = map_tensors(bundle, lambda n: NORM_WEIGHT.fullmatch(n) is not None, lambda t: t + 1)
    config = replace(bundle.config, layernorm_zero_centered_gamma=False)
    return replace(bundle, tensors=tensors, config=config)
