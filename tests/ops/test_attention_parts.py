"""Attention: repeatable bits, dropout's decisions, merged parts, sinks, the model's face."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.native.load import Native
from megatron_lite.ops import attention
from megatron_lite.ops.attention import attend, causal_attention
from tests.ops.attention_cases import CASES, Case, explicit, inputs, results, visible_of


# ---- repeatable ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["rounds", "grouped", "documents"])
def test_threads_do_not_change_bits(native: Native, name: str) -> None:
    case = replace(CASES[name], q_len=max(CASES[name].q_len, 100))
    options, before = case.options, torch.get_num_threads()
    given_tensors, made = inputs(case, torch.bfloat16), []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            made.append(results(case, given_tensors, lambda q, k, v: attend(q, k, v, options)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_a_document_gives_the_same_bits_as_alone(native: Native) -> None:
    starts = (0, 50, 190)
    packed = Case(190, 190, q_starts=starts, k_starts=starts, window=30)
    q, k, v, _, _ = inputs(packed, torch.bfloat16)
    out, lse = attend(q, k, v, packed.options)
    for first, last in ((0, 50), (50, 190)):
        alone = Case(last - first, last - first, window=30).options
        part, part_lse = attend(q[first:last], k[first:last], v[first:last], alone)
        assert torch.equal(part, out[first:last])
        assert torch.equal(part_lse, lse[..., first:last])


# ---- dropout's decisions -----------------------------------------------------------------------
@pytest.mark.parametrize("sequence", [80, 81, 4098])
def test_dropped_probabilities_are_the_project_s(level: str, sequence: int) -> None:
    case = Case(70, 75, heads=2, batch=2, dim=8, value_dim=75, causal=False, dropout=0.4)
    case = replace(case, sequence=sequence, first=(3, 5, 2))
    q, k, v, _, _ = inputs(case, torch.float32)
    k.zero_()
    v.copy_(torch.eye(75).view(75, 1, 1, 75).expand_as(v))
    out, _ = attend(q, k, v, case.options)  # a row shows which of its keys are kept
    kept = attention._kept(q, k, case.options)
    assert torch.equal(out.permute(1, 2, 0, 3) != 0, kept != 0)
    assert abs((kept != 0).double().mean() - 0.6) < 0.02


# ---- parts of a softmax ---------------------------------------------------------------------
def test_parts_merge_to_the_whole(native: Native) -> None:
    whole = Case(80, 120, heads=2, kv_heads=1)
    q, k, v, dout, _ = inputs(whole, torch.float64)
    out, lse, dq, dk, dv = results(
        whole, [q, k, v, dout, torch.zeros(1, 2, 80)], lambda *x: explicit(whole, *x)
    )
    parts = []
    for first, last in ((0, 50), (50, 120)):
        # The part's own diagonal lies elsewhere: k_len - q_len + offset stays what it was.
        offset = (120 - 80) - first - (last - first - 80)
        options = replace(whole.options, offset=offset).arguments()
        rows = slice(first, last)
        parts.append((attention.attention_forward(q, k[rows], v[rows], *options), rows, options))
    lses = torch.stack([made[1] for made, _, _ in parts])
    merged = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - merged).permute(0, 3, 1, 2).unsqueeze(-1)
    total = sum(w * made[0] for w, (made, _, _) in zip(weights, parts, strict=True))
    assert torch.allclose(merged, lse, rtol=1e-13) and torch.allclose(total, out, atol=1e-13)
    sum_dq = torch.zeros_like(dq)
    for _, rows, options in parts:
        a, b, c = attention.attention_backward(
            dout, q, k[rows], v[rows], total, merged, None, *options
        )
        sum_dq += a
        assert torch.allclose(b, dk[rows], atol=1e-12) and torch.allclose(c, dv[rows], atol=1e-12)
    assert torch.allclose(sum_dq, dq, atol=1e-12)


def test_sinks_join_the_denominator(native: Native) -> None:
    case = Case(20, 30, heads=2)
    q, k, v, dout, dlse = inputs(case, torch.float64)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)

    def explicit_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("ibnd,jbnd->bnij", q, k) * case.options.scale
        scores = scores.masked_fill(~visible_of(case), -torch.inf)
        column = sinks.view(1, 2, 1, 1).expand(1, 2, 20, 1)
        joined = torch.cat((scores, column), dim=-1)
        probs = torch.softmax(joined, -1)[..., :-1]
        return torch.einsum("bnij,jbnd->ibnd", probs, v), torch.logsumexp(joined, -1)

    def native_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return attention.with_sinks(*attend(q, k, v, case.options), sinks)

    tensors = [q, k, v, sinks, dout, dlse]
    got, exact = results(case, tensors, native_sinks), results(case, tensors, explicit_sinks)
    for a, b in zip(got, exact, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-12)


# ---- the model's face --------------------------------------------------------------------------
def context(s: int, b: int, native: bool, training: bool = True) -> MicrobatchContext:
    positions = torch.arange(s)
    return MicrobatchContext(
        step=3,
        microbatch=0,
        stage=0,
        training=training,
        seed=2**64 - 99,
        sample_ids=torch.arange(b) + 2**32 - 1,
        positions=positions,
        full_positions=positions,
        loss_weights=None,
        denominators={},
        wgrads=None,
        native=native,
    )


@pytest.mark.parametrize("probability", [0.0, 0.3])
@pytest.mark.parametrize("s", [29, 64])
def test_native_changes_only_rounding_in_the_model(
    native: Native, s: int, probability: float
) -> None:
    case = Case(s, s, heads=4, kv_heads=2, batch=2, layout="fused")
    tensors = inputs(case, torch.float64)
    tensors[3] = tensors[3].flatten(2)

    def face(native: bool) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = causal_attention(*leaves, 8, probability, 2, context(s, 2, native))
        return [out, *torch.autograd.grad(out, leaves, tensors[3])]

    for got, exact in zip(face(True), face(False), strict=True):
        assert torch.allclose(got, exact, rtol=1e-11, atol=1e-12)


def test_cached_keys_are_attended_by_the_last_positions(native: Native) -> None:
    q, k, v, _, _ = inputs(Case(1, 50, heads=4, kv_heads=2, batch=2), torch.float64)
    made = [
        causal_attention(q, k, v, 0, 0.3, 0, context(50, 2, native, training=False))
        for native in (True, False)
    ]
    assert torch.allclose(*made, rtol=1e-12, atol=1e-13)
