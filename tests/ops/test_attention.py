"""Attention's operations against explicit float64 attention and its autograd.

Cases and error bounds: attention_cases.py.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.native.load import Native
from megatron_lite.ops import attention
from megatron_lite.ops.attention import Options, attend
from tests.ops.attention_cases import (
    BOUNDS,
    CASES,
    Case,
    assert_near,
    check,
    explicit,
    inputs,
    results,
)


# ---- against float64 -----------------------------------------------------------------------
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_native_attention_matches_float64(native: Native, name: str, dtype: torch.dtype) -> None:
    check(CASES[name], dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    "name", ["square", "grouped", "odd_dims", "window", "softcap", "dropout", "dropout_odd"]
)
def test_every_level_matches_float64(level: str, name: str, dtype: torch.dtype) -> None:
    check(CASES[name], dtype)


@pytest.mark.parametrize("name", CASES)
def test_reference_matches_float64_autograd(name: str) -> None:
    case = CASES[name]
    given_tensors = inputs(case, torch.float64)
    arguments = case.options.arguments()
    out, lse = attention._forward_reference(*given_tensors[:3], *arguments)
    exact = results(case, given_tensors, lambda q, k, v: explicit(case, q, k, v))
    *tensors, dout, dlse = given_tensors
    gradients = attention._backward_reference(dout, *tensors, out, lse, dlse, *arguments)
    for a, b in zip((out, lse, *gradients), exact, strict=True):
        assert_near(a, b, 1e-12, name)


@settings(max_examples=12, deadline=None)
@given(
    q_len=st.integers(0, 140), k_len=st.integers(0, 140), group=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 70), st.integers(1, 70)), causal=st.booleans(),
    window=st.integers(-1, 80), offset=st.integers(-40, 40), dtype=st.sampled_from(list(BOUNDS)),
    layout=st.sampled_from(["sbnd", "bnsd", "fused"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_drawn_problems_match_float64(
    native: Native, q_len: int, k_len: int, group: int, dims: tuple[int, int], causal: bool,
    window: int, offset: int, dtype: torch.dtype, layout: str, seed: int,
) -> None:  # fmt: skip
    case = Case(
        q_len, k_len, heads=2 * group, kv_heads=2, dim=dims[0], value_dim=dims[1], causal=causal,
        window=window, offset=offset, layout=layout,
    )  # fmt: skip
    check(case, dtype, seed)


# ---- rules ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["grouped", "documents", "dropout", "softcap"])
def test_operations_obey_torch_s_rules(native: Native, name: str) -> None:
    case = replace(CASES[name], batch=1)
    q, k, v, dout, dlse = inputs(case, torch.float32)
    arguments = case.options.arguments()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(attention.attention_forward, (*leaves, *arguments))
    with torch.no_grad():
        out, lse = attention.attention_forward(q, k, v, *arguments)
        torch.library.opcheck(
            attention.attention_backward,
            (dout, q.detach(), k.detach(), v.detach(), out, lse, dlse, *arguments),
        )


@pytest.mark.parametrize(
    "case",
    [
        Case(5, 9, heads=4, kv_heads=2, dim=3, value_dim=5),
        Case(7, 6, window=2, softcap=1.0, dim=4, value_dim=2, offset=2),
        Case(9, 9, q_starts=(0, 4, 9), k_starts=(0, 4, 9), dropout=0.3, dim=2, value_dim=3),
    ],
    ids=["grouped", "window_cap", "documents_dropout"],
)
def test_gradcheck_in_float64(native: Native, case: Case) -> None:
    leaves = [x.requires_grad_() for x in inputs(case, torch.float64)[:3]]
    options = case.options
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, options), leaves)


def test_wrong_arguments_are_refused_with_their_value(native: Native) -> None:
    q, k, v, _, _ = inputs(Case(heads=3, kv_heads=1), torch.float32)
    plain = Options(True, 0, -1, 1.0)
    starts = torch.tensor([0, 40], dtype=torch.int32)
    for options, message in (
        (replace(plain, scale=0.0), "scale"),
        (replace(plain, dropout=0.5), "decisions"),
        (replace(plain, q_starts=starts), "both or neither"),
        (replace(plain, q_starts=starts, k_starts=starts), "document 0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            attend(q, k, v, options)
    with pytest.raises(RuntimeError, match="3 query heads are not a multiple of 2"):
        attend(q, k.expand(-1, -1, 2, -1), v.expand(-1, -1, 2, -1), plain)


# ---- rows that see nothing, empty sizes -------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_without_keys_give_zero_and_no_gradient(native: Native, dtype: torch.dtype) -> None:
    case = Case(150, 20, heads=2)  # the first 130 rows see nothing
    out, lse, dq, _, _ = check(case, dtype)
    assert not out[:130].any() and (lse[..., :130] == -torch.inf).all() and not dq[:130].any()
    q, k, v, dout, _ = inputs(case, dtype)
    options = case.options.arguments()
    first = attention.attention_backward(dout, q, k, v, out, lse, None, *options)
    dout[:130] = 100.0
    changed = attention.attention_backward(dout, q, k, v, out, lse, None, *options)
    assert all(torch.equal(a, b) for a, b in zip(first[1:], changed[1:], strict=True))


@pytest.mark.parametrize("sizes", [(0, 5, 1), (5, 0, 1), (0, 0, 1), (5, 5, 0)], ids=str)
def test_empty_sizes(native: Native, sizes: tuple[int, int, int]) -> None:
    q_len, k_len, batch = sizes
    out, lse, dq, _, _ = check(Case(q_len, k_len, batch=batch), torch.bfloat16)
    if k_len == 0:
        assert not out.any() and (lse == -torch.inf).all() and not dq.any()


def test_hidden_keys_may_hold_anything(native: Native) -> None:
    q, k, v, _, _ = inputs(Case(70, 70), torch.bfloat16)
    options = Case().options
    whole, _ = attend(q, k, v, options)
    k[50:], v[50:] = 1e30, 3e38
    part, _ = attend(q, k, v, options)
    assert torch.equal(part[:50], whole[:50])


def test_not_a_number_stays_one(native: Native) -> None:
    q, k, v, _, _ = inputs(Case(70, 70), torch.float32)
    q[40] = torch.nan
    out, lse = attend(q, k, v, Case().options)
    assert torch.isnan(out[40]).all() and torch.isnan(lse[..., 40]).all()
    assert torch.isfinite(out[41:]).all() and torch.isfinite(out[:40]).all()


def test_the_level_is_what_was_asked_for(level: str, native: Native) -> None:
    # A limit that did nothing would leave the tests above without meaning.
    library = ctypes.CDLL(str(native.library))
    strongest = library.ml_limit_isa(-1)
    names = ["base", "avx2", "avx512", "bf16", "amx"]
    assert library.ml_limit_isa(names.index(level)) == names.index(level) <= strongest
