"""Attention: repeatable bits, dropout's decisions, merged parts, sinks, the model's face."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.microbatch import MicrobatchContext, WeightGradientStore
from megatron_lite.native.load import Native
from megatron_lite.ops import attention
from megatron_lite.ops.attention import Form, attend, causal_attention
from megatron_lite.ops.attention_sinks import add_sinks
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


class OneGradient:
    """The main gradient of one parameter."""

    def __init__(self, param: nn.Parameter) -> None:
        self.grad, self.count = torch.zeros_like(param.data), 0

    def main_grad(self, param: nn.Parameter) -> Tensor:
        return self.grad

    def written(self, param: nn.Parameter) -> None:
        self.count += 1


def explicit_face(case: Case, form: Form, tensors: list[Tensor]) -> list[Tensor]:
    """out [s, b, n * d_v], and the gradients of q, k, v and of the sinks, by autograd."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    q, k, v = leaves
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=2) for x in (k, v))
    seen = visible_of(replace(case, window=form.window))
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) * form.scale
    scores = scores.masked_fill(~seen, -torch.inf)
    if form.sinks is not None:
        leaves.append(form.sinks.detach().requires_grad_())
        column = leaves[3].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    probs = torch.softmax(scores, -1)[..., : case.k_len]
    out = torch.einsum("bnij,jbnd->ibnd", probs, v).flatten(2)
    return [out, *torch.autograd.grad(out, leaves, tensors[3])]


FORMS = {
    "plain": Form(0.25),
    "scaled": Form(0.9),
    "window": Form(0.25, window=7),
    "window_of_one": Form(0.25, window=0),
    "sinks": Form(0.25, -1, nn.Parameter(torch.tensor([0.5, -1.0, 3.0, 0.0]).double())),
    "sinks_window": Form(0.6, 11, nn.Parameter(torch.tensor([2.5, -1.0, 0.3, 9.0]).double())),
    "off_by_one": Form(0.25, -1, torch.zeros(4)),
}


@pytest.mark.parametrize("path", ["native", "torch", "explicit"])
@pytest.mark.parametrize("value_dim", [16, 24])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_equals_explicit_attention_on_every_path(
    native: Native, name: str, value_dim: int, path: str
) -> None:
    form = FORMS[name]
    case = Case(29, 29, heads=4, kv_heads=2, batch=2, value_dim=value_dim, layout="fused")
    tensors = inputs(case, torch.float64)
    tensors[3] = tensors[3].flatten(2)
    exact = explicit_face(case, form, tensors)
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    mb = context(29, 2, path == "native")
    if isinstance(form.sinks, nn.Parameter):
        sink = OneGradient(form.sinks)
        mb = replace(mb, wgrads=WeightGradientStore(sink))
    out = causal_attention(*leaves, 8, 0.0, 2, mb, fused=path != "explicit", form=form)
    got = [out, *torch.autograd.grad(out, leaves, tensors[3])]
    if isinstance(form.sinks, nn.Parameter):
        got.append(sink.grad)
        assert sink.count == 1 and form.sinks.grad is None
    for ours, theirs in zip(got, exact, strict=False):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


def test_a_frozen_sink_gets_no_gradient_and_passes_the_others_on(native: Native) -> None:
    case = Case(20, 20, heads=2, batch=1)
    sinks = nn.Parameter(torch.ones(2), requires_grad=False)
    sink = OneGradient(sinks)
    q, k, v, _, _ = inputs(case, torch.float64)
    out, lse = attend(q.requires_grad_(), k, v, case.options)
    mb = replace(context(20, 1, True), wgrads=WeightGradientStore(sink))
    add_sinks(out, lse, sinks, mb).sum().backward()
    assert sink.count == 0 and q.grad is not None and q.grad.norm() > 0


@pytest.mark.parametrize("probability", [0.0, 0.3])
@pytest.mark.parametrize("s", [29, 64])
@pytest.mark.parametrize("form", [None, *(FORMS[n] for n in ("sinks_window", "off_by_one"))])
def test_native_changes_only_rounding_in_the_model(
    native: Native, s: int, probability: float, form: Form | None
) -> None:
    case = Case(s, s, heads=4, kv_heads=2, batch=2, layout="fused")
    tensors = inputs(case, torch.float64)
    tensors[3] = tensors[3].flatten(2)

    def face(native: bool) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        mb = context(s, 2, native)
        out = causal_attention(*leaves, 8, probability, 2, mb, form=form)
        return [out, *torch.autograd.grad(out, leaves, tensors[3])]

    for got, exact in zip(face(True), face(False), strict=True):
        assert torch.allclose(got, exact, rtol=1e-11, atol=1e-12)


def test_cached_keys_are_attended_by_the_last_positions(native: Native) -> None:
    q, k, v, _, _ = inputs(Case(1, 50, heads=4, kv_heads=2, batch=2), torch.float64)
    for form in (None, FORMS["sinks_window"]):
        made = [
            causal_attention(q, k, v, 0, 0.3, 0, context(50, 2, native, False), form=form)
            for native in (True, False)
        ]
        assert torch.allclose(*made, rtol=1e-12, atol=1e-13)
