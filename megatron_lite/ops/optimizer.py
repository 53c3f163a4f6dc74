"""Optimizer steps on flat ranges, and their squared norm.

`adamw_update` and `sgd_update` change weight and state in place in one pass that also scales
the gradient by `clip` and rounds the new weight into `copy`; nothing is written where `skip`
is not 0. Both are tensors of one element, so that a device decides without the host. Weights
and state are fp32, or fp64 with fp64 gradients (CPU); gradients may be bf16 or fp16 on the
CPU. `squared_norm` gives the sum of squares and the number of non-finite elements, [2] fp64.
Bound by memory: 28 bytes per element (AdamW), 20 (SGD with momentum), 2 more with a copy;
the norm reads once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_lite.ops.registration import define_operation


def _scaled(grad: Tensor, weight: Tensor, clip: Tensor | None) -> Tensor:
    grad = grad.to(weight.dtype)
    return grad if clip is None else grad * clip


def _adamw_reference(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None,
    clip: Tensor | None,
    skip: Tensor | None,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    if skip is not None and int(skip) != 0:
        return
    grad = _scaled(grad, weight, clip)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
    weight.mul_(1 - lr * weight_decay).addcdiv_(exp_avg, root, value=-lr / (1 - beta1**step))
    if copy is not None:
        copy.copy_(weight)


def _sgd_reference(
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor | None,
    copy: Tensor | None,
    clip: Tensor | None,
    skip: Tensor | None,
    lr: float,
    mu: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    if skip is not None and int(skip) != 0:
        return
    grad = _scaled(grad, weight, clip)
    if not decoupled:
        grad = grad.add(weight, alpha=weight_decay)
    if momentum is not None:
        grad = momentum.mul_(mu).add_(grad)
    if decoupled:
        weight.mul_(1 - lr * weight_decay)
    weight.add_(grad, alpha=-lr)
    if copy is not None:
        copy.copy_(weight)


def _norm_reference(x: Tensor) -> Tensor:
    wide = x.double()
    return torch.stack([wide.square().sum(), (~wide.isfinite()).sum().double()])


def _nothing(*_: object) -> None:
    return None


adamw_update = define_operation(
    "adamw_update(Tensor(a!) weight, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq,"
    " Tensor(d!)? copy, Tensor? clip, Tensor? skip, int step, float lr, float beta1, float beta2,"
    " float eps, float weight_decay) -> ()",
    _adamw_reference,
    fake=_nothing,
)
sgd_update = define_operation(
    "sgd_update(Tensor(a!) weight, Tensor grad, Tensor(b!)? momentum, Tensor(c!)? copy,"
    " Tensor? clip, Tensor? skip, float lr, float mu, float weight_decay, bool decoupled) -> ()",
    _sgd_reference,
    fake=_nothing,
)
squared_norm = define_operation("squared_norm(Tensor x) -> Tensor", _norm_reference)
