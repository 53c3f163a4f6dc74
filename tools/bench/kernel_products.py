"""Cases of `kernels.py`: products, experts, optimizer and fp8.

Each generator yields its operation's sizes; what contestants and work are, see
`kernel_cases.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_lite.mesh.groups import local_group
from megatron_lite.microbatch import MicrobatchContext, WeightGradientStore
from megatron_lite.ops import attention, fp8, matrix, moe, optimizer
from megatron_lite.tensor.cross_entropy import head_cross_entropy
from tools.bench.kernel_cases import Case, Contestant, Function, Inputs, Scale, found


class _Sink:
    """One main gradient, added to for ever."""

    def __init__(self, param: nn.Parameter) -> None:
        self.main = torch.zeros(param.shape, dtype=torch.float32, device=param.device)

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """The gradient."""
        return self.main

    def written(self, param: nn.Parameter) -> None:
        """Nobody waits."""


def heads(draw: Inputs, scale: Scale) -> Iterator[Case]:
    """Output projection with cross-entropy, forward and backward."""
    t, h, v = scale.t, scale.h, scale.v
    hidden, weight = draw.leaf(t, h), nn.Parameter(draw.constant(v, h) * 0.02)
    labels = torch.randint(0, v, (t,), device=draw.device)
    positions = torch.arange(t, device=draw.device)
    mb = MicrobatchContext(
        step=0,
        microbatch=0,
        stage=0,
        training=True,
        seed=0,
        sample_ids=positions[:1],
        positions=positions,
        full_positions=positions,
        loss_weights=torch.ones(t, 1, device=draw.device),
        denominators={"lm": torch.tensor(float(t), device=draw.device)},
        wgrads=WeightGradientStore(_Sink(weight)),
        native=True,
    )
    alone = local_group("tp")

    def ours(hidden: Tensor, weight: nn.Parameter) -> Tensor:
        x, y = hidden.unsqueeze(1), labels.unsqueeze(1)
        return head_cross_entropy(x, weight, y, (0, v), 8, alone, False, mb)

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)

    contestants = {"ours": Contestant(ours), "torch": Contestant(plain, compiles=True)}
    if draw.device.type == "cuda" and (liger := found("liger_kernel.transformers")):
        fused = liger.LigerFusedLinearCrossEntropyLoss()
        contestants["liger"] = Contestant(lambda x, w: fused(w, x, labels))
    flops, label = 6.0 * t * v * h, f"head + cross-entropy t {t} h {h} v {v}"
    inputs = (hidden, weight)
    yield Case(
        *("cross_entropy", label, "compute", flops, flops, inputs, inputs, contestants),
        target=1.35,
        both_only=True,
    )


def attentions(draw: Inputs, scale: Scale) -> Iterator[Case]:
    """Causal attention in [s, b, n, d]."""
    for b, n, s, d in scale.attention:
        q, k, v = (draw.leaf(s, b, n, d) for _ in range(3))
        options = attention.Options(True, 0, -1, d**-0.5)

        def ours(q: Tensor, k: Tensor, v: Tensor, options: Any = options) -> Tensor:
            return attention.attend(q, k, v, options)[0]

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.permute(2, 0, 1, 3)

        contestants = {"ours": Contestant(ours), "torch": Contestant(sdpa, compiles=True)}
        half = draw.dtype in (torch.bfloat16, torch.float16)
        if draw.device.type == "cuda" and half:
            if flash := found("flash_attn"):
                contestants["flash-attn"] = Contestant(_flash(flash))
            if te := found("transformer_engine.pytorch"):
                module = te.DotProductAttention(n, d, qkv_format="sbhd", attn_mask_type="causal")
                contestants["te"] = Contestant(module)
        pairs = b * n * s * (s + 1) / 2
        forward, backward = 4.0 * d * pairs, 10.0 * d * pairs
        inputs, label = (q, k, v), f"causal attention b {b} n {n} s {s} d {d}"
        yield Case(
            *("attention", label, "compute", forward, forward + backward, inputs, inputs),
            contestants,
            target=1.5 if s <= 512 else 1.2,
        )


def _flash(library: Any) -> Function:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return library.flash_attn_func(*(x.transpose(0, 1) for x in (q, k, v)), causal=True)

    return run


def products(draw: Inputs, scale: Scale) -> Iterator[Case]:
    """Weight gradient of a linear, added to the fp32 main gradient."""
    if draw.dtype == torch.float32 or draw.device.type == "cuda":
        return  # torch's own product serves there
    t, m, n = scale.t, 4 * scale.h, scale.h
    main = draw.constant(m, n, dtype=torch.float32)
    inputs = (main, draw.constant(t, m), draw.constant(t, n))
    contestants = {
        "ours": Contestant(matrix.accumulate_product, (True,)),
        "torch": Contestant(lambda main, a, b: main.add_(a.t() @ b), compiles=True),
    }
    label, flops = f"main += a^T b [{m}, {n}] t {t}", 2.0 * t * m * n
    yield Case("matrix", label, "compute", flops, None, inputs, (), contestants)


# ---- experts, optimizer, fp8 ---------------------------------------------------------------
def experts(draw: Inputs, scale: Scale) -> Iterator[Case]:
    """Gather to expert-major order and weighted combine."""
    t, h, count, k = scale.t, scale.h, 8, 2
    ids = torch.randint(0, count, (t, k), dtype=torch.int32, device=draw.device)
    rows = t * k
    _, _, row_of, source = moe.moe_route(ids, count, 1, rows)
    x, packed = draw.leaf(t, h), draw.leaf(rows, h)
    probs = torch.rand(t, k, device=draw.device).requires_grad_()
    tokens = (source // k).long()
    gathers = {
        "ours": Contestant(lambda x: moe.moe_gather(x, None, source, row_of)[0]),
        "torch": Contestant(lambda x: x[tokens], compiles=True),
    }
    moved = h * draw.bytes
    forward, label = 2.0 * rows * moved, f"MoE gather {t} x {k} h {h}"
    both = forward + (rows + t) * moved
    yield Case("moe", label, "memory", forward, both, (x,), (x,), gathers)

    def plain(packed: Tensor, probs: Tensor) -> Tensor:
        return (packed[row_of.long()] * probs.unsqueeze(-1).to(packed.dtype)).sum(1)

    combines = {
        "ours": Contestant(lambda p, w: moe.moe_combine(p, w, row_of, source)),
        "torch": Contestant(plain, compiles=True),
    }
    forward, inputs = float((rows + t) * moved), (packed, probs)
    both, label = forward + (2 * rows + t) * moved, f"MoE combine {t} x {k} h {h}"
    yield Case("moe", label, "memory", forward, both, inputs, inputs, combines)


def optimizers(draw: Inputs, scale: Scale) -> Iterator[Case]:
    """AdamW with fp32 state, and the squared norm of gradients in `dtype`."""
    n = scale.n
    weight, grad, first = (draw.constant(n, dtype=torch.float32) for _ in range(3))
    inputs = (weight, grad, first, first.square())
    param = nn.Parameter(weight.clone())
    param.grad = grad.clone()
    peer = torch.optim.AdamW([param], lr=1e-3, weight_decay=0.1, fused=True)
    rates = (None, None, None, 3, 1e-3, 0.9, 0.999, 1e-8, 0.1)
    contestants = {
        "ours": Contestant(optimizer.adamw_update, rates),
        "torch": Contestant(lambda *_: peer.step()),
    }
    label = f"AdamW {n} parameters"
    yield Case("optimizer", label, "memory", 28.0 * n, None, inputs, (), contestants)
    gradients = draw.constant(n)
    norms = {
        "ours": Contestant(optimizer.squared_norm),
        "torch": Contestant(lambda x: torch.linalg.vector_norm(x, dtype=torch.float32)),
    }
    label, moved = f"squared norm of {n}", float(n * draw.bytes)
    yield Case("optimizer", label, "memory", moved, None, (gradients,), (), norms)


def fp8s(draw: Inputs, scale: Scale) -> Iterator[Case]:
    """Quantization, rowwise and transposed codes from one read; the peer is the reference."""
    t, h = scale.t, scale.h
    x = draw.constant(t, h)

    def quantized(x: Tensor, scaling: fp8.Scaling, native: bool) -> object:
        return fp8.quantize(x, scaling, transposed=True, native=native)

    for scaling in (fp8.Scaling.ROWS, fp8.Scaling.SQUARE, fp8.Scaling.MX):
        contestants = {
            "ours": Contestant(quantized, (scaling, True)),
            "torch": Contestant(quantized, (scaling, False)),
        }
        label, moved = f"fp8 {scaling.name.lower()} [{t}, {h}]", float(t * h * (draw.bytes + 2))
        yield Case("fp8", label, "memory", moved, None, (x,), (), contestants)


CASES: dict[str, Callable[[Inputs, Scale], Iterator[Case]]] = {
    "cross_entropy": heads,
    "attention": attentions,
    "matrix": products,
    "moe": experts,
    "optimizer": optimizers,
    "fp8": fp8s,
}
