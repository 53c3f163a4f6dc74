"""Calls of every native operation with what they must give: the cases of the GPU tests.

A family is a function of dtype and size that draws problems on the CPU; `expected` evaluates
the operation's reference in float64 (or, where bits are defined, in the dtype itself). "small"
problems have odd shapes and run in simulation too; "large" ones fill a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_lite.ops import (
    activation,
    attention,
    cross_entropy,
    dropout,
    fp8,
    moe,
    norm,
    optimizer,
    rotary,
    softmax,
)
from tests.ops import attention_cases

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Largest error relative to the largest value (at least 1) of a result, by the result's dtype.
BOUNDS = {FP64: 1e-12, FP32: 4e-6, BF16: 8e-3, FP16: 1e-3}
LARGE_SUMS = 20.0  # times FP32's bound: sums over thousands of rows
ATTENTION = 2.0  # times the bound: probabilities and gradients of scores are rounded, too


@dataclass(frozen=True)
class Problem:
    """One call.

    Attributes:
        operation: of torch.ops.megatron_lite.
        reference: plain torch, the same arguments.
        arguments: on the CPU.
        written: numbers of the arguments that are results.
        views: numbers of the arguments that may be views of any row stride.
        slack: times BOUNDS.
        exact: bits are defined: the reference runs in the dtype itself.
    """

    operation: Any
    reference: Callable[..., Any]
    arguments: tuple[Any, ...]
    written: tuple[int, ...] = ()
    views: tuple[int, ...] = ()
    slack: float = 1.0
    exact: bool = False


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0, spread: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread + 0.1).to(dtype)


# ---- families ------------------------------------------------------------------------------
def norms(dtype: torch.dtype, size: str) -> list[Problem]:
    shapes = [(3, 7), (5, 64), (2, 3, 129), (1, 1032), (0, 16)]
    shapes = shapes if size == "small" else [(2049, 4096), (517, 12345)]
    found = []
    for shape in shapes:
        h = shape[-1]
        x, grad, beside = (drawn(*shape, dtype=dtype, seed=s) for s in range(3))
        x, beside = (x * 8).round() / 8, (beside * 8).round() / 8  # their sum is exact
        weight, bias = (drawn(h, dtype=dtype, seed=s) for s in (3, 4))
        for layer in (False, True):
            for residual in (None, beside):
                call = (x, residual, weight, bias if layer else None, 1e-3, h % 2 == 1)
                _, summed, mean, inverse = norm._forward_reference(*call)
                saved = x if residual is None else summed
                back = (grad, saved, residual, weight, mean if layer else None, inverse, h % 2 == 1)
                slack = 1.0 if size == "small" else LARGE_SUMS
                found += [
                    Problem(norm.norm_forward, norm._forward_reference, call, (), (0, 1)),
                    Problem(
                        norm.norm_backward, norm._backward_reference, back, (), (0, 1, 2), slack
                    ),
                ]
    return found


def activations(dtype: torch.dtype, size: str) -> list[Problem]:
    shapes = [(3, 7), (5, 64), (2, 3, 129), (3, 0)] if size == "small" else [(1027, 8192)]
    found = []
    gates = ((False, math.inf, 0.0), (True, math.inf, 0.0), (True, 1.5, 0.0), (True, 1.5, 1.0))
    for kind in ("gelu", "gelu_tanh", "silu", "squared_relu", "quick_gelu"):
        for *rows, f in shapes:
            for gated, limit, offset in gates:
                x = drawn(*rows, 2 * f if gated else f, dtype=dtype, seed=1)
                grad = drawn(*rows, f, dtype=dtype, seed=2)
                key = (kind, gated, limit, offset)
                forward, backward = activation.activation_forward, activation.activation_backward
                found += [
                    Problem(forward, activation._forward_reference, (x, *key), (), (0,)),
                    Problem(backward, activation._backward_reference, (grad, x, *key), (), (0, 1)),
                ]
    return found


def rotaries(dtype: torch.dtype, size: str) -> list[Problem]:
    shapes = [(5, 2, 3, 16, 16), (3, 1, 2, 10, 6), (4, 2, 1, 64, 32)]
    shapes = shapes if size == "small" else [(2050, 2, 32, 128, 128)]
    found = []
    for s, b, n, d, turned in shapes:
        angles = drawn(s, turned // 2, dtype=FP32, seed=1)
        table = (angles.cos(), angles.sin())
        q, k = drawn(s, b, n, d, dtype=dtype, seed=2), drawn(s, b, 1, d, dtype=dtype, seed=3)
        for interleaved in (False, True):
            for back in (False, True):
                key = (*table, interleaved, back)
                found += [
                    Problem(rotary.rotary, rotary._reference, (q, *key), (), (0,)),
                    Problem(rotary.rotary_pair, rotary._pair_reference, (q, k, *key), (), (0, 1)),
                ]
    return found


def dropouts(dtype: torch.dtype, size: str) -> list[Problem]:
    shapes = [(5, 2, 16), (3, 1, 7), (9, 3, 132)] if size == "small" else [(2051, 3, 4096)]
    found = []
    for s, b, h in shapes:
        x, residual, grad = (drawn(s, b, h, dtype=dtype, seed=i) for i in range(3))
        bias = drawn(h, dtype=dtype, seed=3)
        places = (torch.arange(s) * 3 + 2, torch.arange(b) + (1 << 33) - 1)
        for p in (0.0, 0.25):
            key = (*places, p, 0xDEADBEEF, -(2**62) - 11)
            forward = (x, bias if h % 2 else None, residual, *key)
            slack = 1.0 if size == "small" else LARGE_SUMS
            found += [
                Problem(dropout.dropout_forward, dropout._forward_reference, forward, (), (0, 2)),
                Problem(
                    dropout.dropout_backward,
                    dropout._backward_reference,
                    (grad, *key, True),
                    (),
                    (0,),
                    slack,
                ),
            ]
    return found


def cross_entropies(dtype: torch.dtype, size: str) -> list[Problem]:
    sizes = [(5, 19, 17), (4, 264, 260), (1, 1, 1)] if size == "small" else [(1025, 50304, 50257)]
    found = []
    for t, stored, columns in sizes:
        logits = drawn(t, stored, dtype=dtype, seed=1, spread=3.0)
        target = torch.arange(t) * 7 % (columns + 2) - 1  # some are held elsewhere
        scale = drawn(t, dtype=FP32, seed=2).masked_fill_(torch.arange(t) % 3 == 2, 0.0)
        call = (logits, target, columns, True)
        found.append(
            Problem(
                cross_entropy.cross_entropy_statistics,
                cross_entropy.statistics_reference,
                call,
                (),
                (0,),
                LARGE_SUMS * 20,  # q sums as many terms as there are columns
            )
        )
        peak, sums = cross_entropy.statistics_reference(*call)
        for smoothing, z_loss in ((0.0, 0.0), (0.1, 1e-2)):
            whole = (logits, target, scale, columns, smoothing, z_loss)
            some = sums if smoothing else sums[:2].clone()
            part = (logits, target, peak, some, scale, columns, columns, smoothing, z_loss)
            found += [
                Problem(
                    cross_entropy.cross_entropy_, cross_entropy.whole_reference, whole, (0,), (0,)
                ),
                Problem(
                    cross_entropy.cross_entropy_gradient_,
                    cross_entropy.gradient_reference,
                    part,
                    (0,),
                    (0,),
                ),
            ]
    return found


def softmaxes(dtype: torch.dtype, size: str) -> list[Problem]:
    # batch, heads, queries, keys
    shapes = [(2, 3, 5, 7), (1, 1, 9, 64), (1, 2, 3, 1100), (1, 1, 4, 1)]
    shapes = shapes if size == "small" else [(1, 16, 1024, 1024), (1, 2, 300, 20000)]
    found = []
    for b, n, s_q, s_k in shapes:
        x, grad = (drawn(b, n, s_q, s_k, dtype=dtype, seed=s, spread=3.0) for s in range(2))
        visible = (torch.arange(b * s_q * s_k) % 5 != 1).view(b, 1, s_q, s_k)
        visible[0, :, 0] = False  # sees nothing
        for seen, causal in ((None, False), (None, True), (visible, False), (visible, True)):
            call = (x, seen, 0.7, causal)
            out = softmax._forward_reference(*call)
            found.append(
                Problem(softmax.masked_softmax, softmax._forward_reference, call, (), (0,))
            )
        found.append(
            Problem(
                softmax.masked_softmax_backward,
                softmax._backward_reference,
                (grad, out, 0.7),
                (),
                (0, 1),
            )
        )
    return found


def attentions(dtype: torch.dtype, size: str) -> list[Problem]:
    """bf16 and fp16, head dims that are multiples of 8: what the CUDA kernels take."""
    case = attention_cases.Case
    cases = {
        name: c
        for name, c in attention_cases.CASES.items()
        if c.dim % 8 == c.value_dim % 8 == 0 and c.value_dim <= c.dim
    }
    # In simulation fp16, the soft cap and dropout are compiled for head dim 64 only.
    cases = {
        name: replace(c, dim=64, value_dim=64) if c.dim < 64 else c for name, c in cases.items()
    }
    if size == "small":
        cases = {n: c for n, c in cases.items() if dtype == BF16 or c.dim == 64}
        cases.pop("rounds", None)
    else:
        wide = case(2055, 2055, 8, 2, 128, 128, batch=2)
        cases = {"causal": wide, "window": replace(wide, window=300), "long": case(1, 9000, 4, 4)}
    found = []
    for c in cases.values():
        q, k, v, dout, dlse = attention_cases.inputs(c, dtype)
        options = c.options.arguments()
        out, lse = attention._forward_reference(q, k, v, *options)
        forward = (q, k, v, *options)
        backward = (dout, q, k, v, out, lse, dlse, *options)
        operations = (attention.attention_forward, attention.attention_backward)
        found += [
            Problem(operations[0], attention._forward_reference, forward, slack=ATTENTION),
            Problem(operations[1], attention._backward_reference, backward, slack=ATTENTION),
        ]
    return found


def experts(dtype: torch.dtype, size: str) -> list[Problem]:
    # tokens, experts, k, align, h
    sizes = [(7, 3, 2, 1, 8), (40, 64, 8, 16, 7), (9, 2, 5, 4, 136), (0, 4, 2, 8, 16)]
    sizes = sizes if size == "small" else [(4099, 64, 8, 128, 2048)]
    found = []
    for tokens, count, k, align, h in sizes:
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(-1, count, (tokens, k), generator=generator, dtype=torch.int32)
        route = (ids, count, align, moe.route_capacity(tokens * k, count, align))
        counts, _, row_of, source = moe._route_reference(*route)
        x, grad = drawn(tokens, h, dtype=dtype), drawn(tokens, h, dtype=dtype, seed=1)
        packed = drawn(len(source), h, dtype=dtype, seed=2)
        probs = torch.rand(tokens, k, generator=generator)
        found += [
            Problem(moe.moe_route, moe._route_reference, route, exact=True),
            Problem(moe.moe_splits, moe._splits_reference, (counts, 1), exact=True),
            Problem(
                moe.moe_scatter_probs,
                moe._scatter_reference,
                (torch.rand(len(source), generator=generator), row_of),
                exact=True,
            ),
        ]
        for weights in (None, probs):
            calls = {
                (moe.moe_gather, moe._gather_reference): (x, weights, source, row_of),
                (moe.moe_combine, moe._combine_reference): (packed, weights, row_of, source),
                (moe.moe_combine_backward, moe._combine_backward_reference): (
                    *(grad, packed, weights, row_of, source),
                ),
            }
            found += [
                Problem(operation, reference, call, (), (0,), LARGE_SUMS)
                for (operation, reference), call in calls.items()
            ]
    return found


def optimizers(dtype: torch.dtype, size: str) -> list[Problem]:
    """Weights and state are fp32; `dtype` is that of the copy."""
    found = []
    for n in (1, 15, 5000) if size == "small" else (9_000_011,):
        weight, grad, first = (drawn(n, dtype=FP32, seed=s) for s in range(3))
        second = drawn(n, dtype=FP32, seed=3).square()
        copy = None if dtype == FP32 else torch.zeros(n, dtype=dtype)
        clip = torch.tensor([0.25])
        rates = (3, 0.01, 0.9, 0.95, 1e-8, 0.1)
        adamw = (weight, grad, first, second, copy, clip, None, *rates)
        sgd = (weight, grad, first, copy, clip, None, 0.1, 0.9, 0.1, n % 2 == 1)
        written = (0, 2, 3) if copy is None else (0, 2, 3, 4)
        found += [
            Problem(optimizer.adamw_update, optimizer._adamw_reference, adamw, written),
            Problem(optimizer.sgd_update, optimizer._sgd_reference, sgd, written[:-1]),
            Problem(optimizer.squared_norm, optimizer._norm_reference, (drawn(n, dtype=dtype),)),
        ]
    return found


def fp8s(dtype: torch.dtype, size: str) -> list[Problem]:
    sizes = [(5, 7), (130, 144), (1, 300)] if size == "small" else [(1030, 2064), (257, 4100)]
    found = []
    for rows, cols in sizes:
        x = drawn(rows, cols, dtype=dtype, spread=30.0)
        scale = torch.tensor([2.5])
        amax = drawn(9, dtype=FP32).abs()
        history = drawn(4, 9, dtype=FP32, seed=1).abs()
        delayed = (history, amax, amax.reciprocal(), False, False, 1, 0.0, True)
        found += [
            Problem(fp8.fp8_amax, fp8._amax_reference, (x,), (), (0,), exact=True),
            Problem(fp8.fp8_scales, fp8._scales_reference, (amax, True, 0.1, False), exact=True),
            Problem(fp8.fp8_delayed_update, fp8._delayed_reference, delayed, (0, 1, 2), exact=True),
        ]
        for scaling in fp8.Scaling:
            tensor = scaling == fp8.Scaling.TENSOR
            for e5m2, stochastic in ((False, False), (True, True)):
                key = (0.0, False, stochastic, -(2**61) - 3, 5, 77, 123, cols)
                outputs = (True, True, tensor)
                call = (x, scale if tensor else None, int(scaling), e5m2, *outputs, *key)
                quantized = fp8._quantize_reference(*call)
                scales = scale if tensor else quantized[2]
                found += [
                    Problem(fp8.fp8_quantize, fp8._quantize_reference, call, (), (0,), exact=True),
                    Problem(
                        fp8.fp8_dequantize,
                        fp8._dequantize_reference,
                        (quantized[0], scales, int(scaling), dtype),
                        exact=True,
                    ),
                ]
    return found


FAMILIES: dict[str, Callable[[torch.dtype, str], list[Problem]]] = {
    "norm": norms,
    "activation": activations,
    "rotary": rotaries,
    "dropout": dropouts,
    "cross_entropy": cross_entropies,
    "softmax": softmaxes,
    "attention": attentions,
    "moe": experts,
    "optimizer": optimizers,
    "fp8": fp8s,
}
KINDS = [
    (family, dtype)
    for family in FAMILIES
    for dtype in (BF16, FP16, FP32)
    if not (family == "attention" and dtype == FP32)
]
