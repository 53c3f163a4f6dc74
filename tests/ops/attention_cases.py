"""Cases of attention's operations, and explicit float64 attention with autograd's gradients.

Bounds are the largest error relative to the largest value (at least 1) of a result. bf16 and
fp16 round probabilities, gradients of scores and results once, so a few units of 2^-9 and 2^-12.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_lite.ops import attention
from megatron_lite.ops.attention import Options, attend

#               out     gradients  log-sum-exp
BOUNDS = {
    torch.float64: (1e-13, 1e-12, 1e-13),
    torch.float32: (2e-6, 5e-6, 2e-6),
    torch.bfloat16: (8e-3, 1.6e-2, 1e-5),
    torch.float16: (1.5e-3, 3e-3, 1e-5),
}


@dataclass(frozen=True)
class Case:
    """Sizes and options of one call. Layouts: sbnd, bnsd, fused (heads of a wider row)."""

    q_len: int = 33
    k_len: int = 33
    heads: int = 1
    kv_heads: int = 1
    dim: int = 16
    value_dim: int = 16
    batch: int = 1
    causal: bool = True
    offset: int = 0
    window: int = -1
    scale: float | None = None
    softcap: float = 0.0
    q_starts: tuple[int, ...] | None = None
    k_starts: tuple[int, ...] | None = None
    dropout: float = 0.0
    sequence: int = 256
    first: tuple[int, int, int] = (0, 0, 0)
    layout: str = "sbnd"

    @property
    def options(self) -> Options:
        starts = (
            None if s is None else torch.tensor(s, dtype=torch.int32)
            for s in (self.q_starts, self.k_starts)
        )
        scale = self.dim**-0.5 if self.scale is None else self.scale
        plain = Options(self.causal, self.offset, self.window, scale, self.softcap, *starts)
        if self.dropout == 0.0:
            return plain
        samples = torch.arange(self.batch, dtype=torch.int32) - 5
        decisions = (-(2**60) - 77, 0xDEADBEEF, self.sequence, *self.first)
        return replace(plain, dropout=self.dropout, decisions=decisions, samples=samples)


CASES = {
    "one_row": Case(1, 1),
    "one_query": Case(1, 77, heads=4, kv_heads=2, layout="fused"),
    "square": Case(130, 130, heads=2, dim=64, value_dim=64, batch=2),
    "not_causal": Case(65, 129, causal=False, layout="bnsd"),
    "grouped": Case(100, 100, heads=6, kv_heads=2, batch=2, layout="fused"),
    "more_keys": Case(40, 170, heads=2),
    "more_queries": Case(130, 40),
    "window": Case(150, 170, window=40),
    "window_of_one": Case(70, 70, window=0),
    "left_window": Case(70, 90, causal=False, window=16),
    "later_queries": Case(70, 70, offset=30),
    "earlier_queries": Case(70, 70, offset=-30),
    "far_offset": Case(20, 20, offset=1 << 40),
    "dim_1": Case(20, 20, dim=1, value_dim=1),
    "odd_dims": Case(50, 60, dim=19, value_dim=37, layout="fused"),
    "dim_40_24": Case(50, 60, dim=40, value_dim=24),
    "dim_32": Case(70, 70, dim=32, value_dim=32),
    "dim_96": Case(70, 70, dim=96, value_dim=96),
    "dim_192_128": Case(40, 70, dim=192, value_dim=128),
    "dim_256": Case(33, 40, dim=256, value_dim=256),
    "value_dim_larger": Case(33, 40, dim=16, value_dim=80),
    "softcap": Case(70, 90, heads=2, softcap=1.5, scale=1.0),
    "documents": Case(100, 110, q_starts=(0, 30, 30, 80), k_starts=(0, 25, 40, 105)),
    "documents_window": Case(100, 100, heads=2, q_starts=(5, 90), k_starts=(5, 90), window=20),
    "dropout": Case(70, 75, heads=4, kv_heads=2, batch=2, dropout=0.3, sequence=80),
    "dropout_odd": Case(66, 70, heads=2, dropout=0.5, sequence=4001, first=(31, 3901, 3003)),
    "dropout_cap_documents": Case(
        100, 100, q_starts=(0, 30, 90), k_starts=(0, 30, 90), dropout=0.2, softcap=3.0, window=30
    ),
    "rounds": Case(70, 2100, dim=8, value_dim=8),
}


def laid_out(values: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
    """[s, b, n, d] values in memory as the layout says; neighbours are NaN."""
    s, b, n, d = values.shape
    if layout == "sbnd":
        memory = torch.full((s, b, n, d), torch.nan, dtype=dtype)
    elif layout == "bnsd":
        memory = torch.full((b, n, s, d), torch.nan, dtype=dtype).permute(2, 0, 1, 3)
    else:
        memory = torch.full((s, b, n, d + 10), torch.nan, dtype=dtype)[..., 3 : 3 + d]
    return memory.copy_(values)


def inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q, k, v, dout in the layout of the case, and dlse."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (case.q_len, case.batch, case.heads, case.dim),
        (case.k_len, case.batch, case.kv_heads, case.dim),
        (case.k_len, case.batch, case.kv_heads, case.value_dim),
        (case.q_len, case.batch, case.heads, case.value_dim),
    )
    made = [
        laid_out(torch.randn(shape, generator=generator), case.layout, dtype) for shape in shapes
    ]
    dlse = torch.randn(case.batch, case.heads, case.q_len, generator=generator)
    return [*made, dlse.to(torch.float64 if dtype == torch.float64 else torch.float32)]


def visible_of(case: Case) -> Tensor:
    """[s_q, s_k] bool, pair by pair as the documentation says."""
    seen = torch.zeros(case.q_len, case.k_len, dtype=torch.bool)
    qs, ks = case.q_starts or (0, case.q_len), case.k_starts or (0, case.k_len)
    for q0, q1, k0, k1 in zip(qs, qs[1:], ks, ks[1:], strict=False):
        i, j = torch.arange(q1 - q0).unsqueeze(1), torch.arange(k1 - k0)
        diagonal = i + (k1 - k0) - (q1 - q0) + case.offset
        part = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        part &= (j <= diagonal) if case.causal else part
        part &= (j >= diagonal - case.window) if case.window >= 0 else part
        seen[q0:q1, k0:k1] = part
    return seen


def explicit(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out [s, b, n, d_v] and log-sum-exp [b, n, s]; differentiable."""
    group = case.heads // case.kv_heads
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) * case.options.scale
    if case.softcap > 0:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    visible = visible_of(case)
    rows = visible.any(1)
    scores = scores.masked_fill(~visible, -1e30)  # finite, so that gradients are no NaN
    lse = torch.logsumexp(scores, dim=-1)
    probs = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(~visible, 0.0)
    lse = lse.masked_fill(~rows, -torch.inf)
    if case.dropout > 0:
        probs = probs * attention._kept(q, k, case.options)
    return torch.einsum("bnij,jbnd->ibnd", probs, v), lse


def results(case: Case, given_tensors: list[Tensor], attend_with: Any) -> list[Tensor]:
    """out, lse, dq, dk, dv; rows that see nothing pass no gradient of lse."""
    *tensors, dout, dlse = given_tensors
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = attend_with(*leaves)
    finite = torch.isfinite(lse)
    loss = (out * dout).sum() + (torch.where(finite, lse, 0.0) * dlse).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def assert_near(got: Tensor, exact: Tensor, bound: float, name: str) -> None:
    assert got.shape == exact.shape, name
    if exact.numel() == 0:
        return
    empty = exact == -torch.inf
    assert torch.equal(got == -torch.inf, empty), name
    error = (got.double() - exact).masked_fill(empty, 0.0).abs().max().item()
    largest = exact.masked_fill(empty, 0.0).abs().max().item()
    assert error <= bound * max(1.0, largest), f"{name}: {error} of {largest}"


def check(case: Case, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    given_tensors = inputs(case, dtype, seed)
    options = case.options
    got = results(case, given_tensors, lambda q, k, v: attend(q, k, v, options))
    exact = results(
        case, [x.double() for x in given_tensors], lambda q, k, v: explicit(case, q, k, v)
    )
    forward, gradient, lse = BOUNDS[dtype]
    for name, bound, a, b in zip(
        ("out", "lse", "dq", "dk", "dv"),
        (forward, lse, gradient, gradient, gradient),
        got,
        exact,
        strict=True,
    ):
        assert_near(a, b, bound, name)
    return got
