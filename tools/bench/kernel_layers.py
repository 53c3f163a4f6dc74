"""Cases of `kernels.py`: the memory-bound operations between products, layer by layer.

Each generator yields its operation's sizes; what contestants and work are, see
`kernel_cases.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.ops import activation, dropout, norm, rotary, softmax
from tools.bench.kernel_cases import Case, Contestant, Inputs, Scale, found


def _torch_rms(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, 1e-5)


def _torch_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, 1e-5)


def norms(draw: Inputs, scale: Scale) -> Iterator[Case]:
    """RMSNorm and LayerNorm."""
    t, h = scale.t, scale.h
    x, weight, bias = draw.leaf(t, h), draw.leaf(h), draw.leaf(h)
    moved = t * h * draw.bytes
    rms = {
        "ours": Contestant(lambda x, w: norm.norm_forward(x, None, w, None, 1e-5, False)[0]),
        "torch": Contestant(_torch_rms, compiles=True),
    }
    if draw.device.type == "cuda":
        if liger := found("liger_kernel.ops.rms_norm"):
            rms["liger"] = Contestant(liger.LigerRMSNormFunction.apply, (1e-5,))
        if te := found("transformer_engine.pytorch"):
            module = te.RMSNorm(h, eps=1e-5, params_dtype=draw.dtype, device="cuda")
            rms["te"] = Contestant(lambda x, _: module(x))
    label = f"RMSNorm [{t}, {h}]"
    yield Case("norm", label, "memory", 2 * moved, 5 * moved, (x, weight), (x, weight), rms)
    layer = {
        "ours": Contestant(lambda x, w, b: norm.norm_forward(x, None, w, b, 1e-5, False)[0]),
        "torch": Contestant(_torch_layer, compiles=True),
    }
    label, inputs = f"LayerNorm [{t}, {h}]", (x, weight, bias)
    yield Case("norm", label, "memory", 2 * moved, 5 * moved, inputs, inputs, layer)


def activations(draw: Inputs, scale: Scale) -> Iterator[Case]:
    """SwiGLU, GPT-OSS's gate and GELU."""
    t, f = scale.t, 8 * scale.h // 3 // 8 * 8
    x, plain = draw.leaf(t, 2 * f), draw.leaf(t, f)
    moved = t * f * draw.bytes

    def swiglu(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def gpt_oss(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(1.702 * gate))

    gated = {
        "ours": Contestant(lambda x: activation.activation_forward(x, "silu", True, math.inf)),
        "torch": Contestant(swiglu, compiles=True),
    }
    liger = found("liger_kernel.ops.swiglu") if draw.device.type == "cuda" else None
    if liger:
        gated["liger"] = Contestant(
            lambda x: liger.LigerSiLUMulFunction.apply(*(y.contiguous() for y in x.chunk(2, -1)))
        )
    yield Case(
        "activation", f"SwiGLU [{t}, 2*{f}]", "memory", 3 * moved, 8 * moved, (x,), (x,), gated
    )
    gate = ("quick_gelu", True, 7.0, 1.0)
    clamped = {
        "ours": Contestant(lambda x: activation.activation_forward(x, *gate)),
        "torch": Contestant(gpt_oss, compiles=True),
    }
    label = f"GPT-OSS gate [{t}, 2*{f}]"
    yield Case("activation", label, "memory", 3 * moved, 8 * moved, (x,), (x,), clamped)
    tanh = {
        "ours": Contestant(lambda x: activation.activation_forward(x, "gelu", False, math.inf)),
        "torch": Contestant(functional.gelu, compiles=True),
    }
    label = f"GELU [{t}, {f}]"
    yield Case("activation", label, "memory", 2 * moved, 5 * moved, (plain,), (plain,), tanh)


def _torch_rotary(q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    cosine, sine = (torch.cat([x, x], -1)[:, None, None].to(q.dtype) for x in (cosine, sine))

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cosine + torch.cat([-second, first], dim=-1) * sine

    return turned(q), turned(k)


def rotaries(draw: Inputs, scale: Scale) -> Iterator[Case]:
    """Rotary embedding of queries and keys."""
    b, n, s, d = scale.attention[0]
    q, k = draw.leaf(s, b, n, d), draw.leaf(s, b, n, d)
    angles = draw.constant(s, d // 2, dtype=torch.float32)
    moved = 4 * q.numel() * draw.bytes
    contestants = {
        "ours": Contestant(lambda q, k, c, s: rotary.rotary_pair(q, k, c, s, False, False)),
        "torch": Contestant(_torch_rotary, compiles=True),
    }
    inputs = (q, k, angles.cos(), angles.sin())
    label = f"rotary 2 x [{s}, {b}, {n}, {d}]"
    yield Case("rotary", label, "memory", moved, 2 * moved, inputs, (q, k), contestants)


def dropouts(draw: Inputs, scale: Scale) -> Iterator[Case]:
    """Bias, dropout and residual in one."""
    t, h = scale.t, scale.h
    x, bias, residual = draw.leaf(t, 1, h), draw.leaf(h), draw.leaf(t, 1, h)
    places = (torch.arange(t, device=draw.device), torch.arange(1, device=draw.device))
    moved = t * h * draw.bytes
    contestants = {
        "ours": Contestant(dropout.dropout_forward, (*places, 0.1, 7, 1)),
        "torch": Contestant(lambda x, b, r: functional.dropout(x + b, 0.1) + r, compiles=True),
    }
    inputs, label = (x, bias, residual), f"bias + dropout + residual [{t}, {h}]"
    yield Case("dropout", label, "memory", 3 * moved, 5 * moved, inputs, inputs, contestants)


def softmaxes(draw: Inputs, scale: Scale) -> Iterator[Case]:
    """Causal softmax of scores; what is hidden is not read."""
    _, n, s, _ = scale.attention[0]
    b = 1
    x = draw.leaf(b, n, s, s)
    hidden = torch.ones(s, s, dtype=torch.bool, device=draw.device).triu(1)
    moved = x.numel() * draw.bytes

    def plain(x: Tensor) -> Tensor:
        return torch.softmax((x * 0.125).masked_fill(hidden, -math.inf), dim=-1)

    contestants = {
        "ours": Contestant(softmax.masked_softmax, (None, 0.125, True)),
        "torch": Contestant(plain, compiles=True),
    }
    label = f"causal softmax [{b}, {n}, {s}, {s}]"
    yield Case("softmax", label, "memory", 1.5 * moved, 4.5 * moved, (x,), (x,), contestants)


CASES: dict[str, Callable[[Inputs, Scale], Iterator[Case]]] = {
    "norm": norms,
    "activation": activations,
    "rotary": rotaries,
    "dropout": dropouts,
    "softmax": softmaxes,
}
