"""Fused attention kernels against float64, in simulation.

Error bounds, elementwise, with u = 2^-8 (bf16) or 2^-11 (fp16), half a step of the type; |.|
marks the same sum of absolute terms (reference() in attention_calls.py):

| result   | bound                                                  | from                       |
|----------|--------------------------------------------------------|----------------------------|
| out      | 1.05 u (|p| |v| + |out|)                               | p and out rounded once     |
| dv       | 1.05 u (|p|^T |dout| + |dv|)                           | p and dv rounded once      |
| dq, dk   | 1.05 u (|ds| |k or q| + |result|) + 2^-19 of ds' terms | ds, result; ds' difference |
| lse      | 4e-6 (1 + |lse|)                                       | fp32                       |
| delta    | 2^-20 rowsum |dout| |out|                              | fp32                       |

fp16 adds 2^-24 per term: p and ds below 2^-14 have fixed steps.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from tests.kernels import attention_calls as calls
from tests.kernels.attention_calls import Case
from tests.sim import build


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    return calls.built()


# ---- against float64 -----------------------------------------------------------------------
CASES = {
    "one_row": Case(q_len=1, k_len=1),
    "one_query": Case(heads=4, kv_heads=2, q_len=1, k_len=77, causal=True, layout="fused"),
    "tail_of_tiles": Case(q_len=129, k_len=65, layout="sbnd"),
    "causal_gqa": Case(heads=4, kv_heads=2, q_len=100, k_len=100, causal=True, batch=2),
    "mqa_three": Case(heads=3, kv_heads=1, q_len=40, k_len=70, causal=True, layout="fused"),
    "more_queries": Case(q_len=130, k_len=70, causal=True),
    "fp16": Case(heads=2, q_len=66, k_len=131, causal=True, dtype="fp16", layout="sbnd"),
    "fp16_scale": Case(q_len=33, k_len=47, dtype="fp16", scale=1.0, dim=48, value_dim=56),
    "window": Case(q_len=150, k_len=170, causal=True, window=40),
    "window_one": Case(q_len=70, k_len=70, causal=True, window=0),
    "window_and_diagonal_far_below": Case(q_len=70, k_len=70, window=2**30 - 1, offset=-(2**30)),
    "window_and_diagonal_far_above": Case(q_len=70, k_len=70, window=2**30 - 1, offset=2**40),
    "left_window_only": Case(q_len=70, k_len=90, window=16),
    "later_queries": Case(q_len=70, k_len=70, causal=True, offset=30),
    "earlier_queries": Case(q_len=70, k_len=70, causal=True, offset=-30),
    "far_offset": Case(q_len=20, k_len=20, causal=True, offset=1 << 40),
    "dim_32": Case(q_len=70, k_len=70, dim=32, value_dim=32, causal=True),
    "dim_8": Case(q_len=40, k_len=40, dim=8, value_dim=8),
    "dim_96": Case(q_len=70, k_len=70, dim=96, value_dim=96, causal=True),
    "dim_128": Case(q_len=70, k_len=70, dim=128, value_dim=128, causal=True),
    "value_dim_larger": Case(q_len=33, k_len=40, dim=64, value_dim=128),
    "dim_192_128": Case(q_len=40, k_len=70, dim=192, value_dim=128, causal=True, layout="fused"),
    "softcap": Case(heads=2, kv_heads=1, q_len=70, k_len=90, causal=True, softcap=1.5),
    "softcap_fp16": Case(q_len=40, k_len=70, softcap=30.0, dtype="fp16", scale=1.0),
    "dropout": Case(
        batch=2,
        heads=4,
        kv_heads=2,
        q_len=70,
        k_len=75,
        causal=True,
        dropout=0.3,
        sequence=80,
        layout="sbnd",
    ),
    "dropout_of_a_part": Case(
        heads=2,
        q_len=66,
        k_len=70,
        dropout=0.5,
        sequence=40001,
        first=(31, 39001, 30003),
        softcap=3.0,
        dtype="fp16",
    ),
    "dropout_in_documents": Case(
        q_len=100,
        k_len=100,
        dropout=0.1,
        window=30,
        causal=True,
        q_starts=(0, 30, 90),
        k_starts=(0, 30, 90),
    ),
    "dim_256": Case(q_len=33, k_len=40, dim=256, value_dim=256, causal=True),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients_match_float64(kernels: build.Kernels, name: str) -> None:
    case = CASES[name]
    made = calls.run(kernels, case)
    if case.layout == "fused":
        for tensor in ("out", "dq", "dk", "dv"):
            # The neighbours in the wider rows are not ours to write.
            memory = made[tensor].base
            while memory.base is not None and isinstance(memory.base, np.ndarray):
                memory = memory.base
            d = made[tensor].shape[3]
            bits = memory.view(np.int16).reshape(*memory.shape)
            assert bits.shape[-1] == d + 24
            assert (bits[..., :8] == -1).all() and (bits[..., 8 + d :] == -1).all()


def test_dropout_repeats_the_project_s_decisions() -> None:
    # Random123's known answer: counter and key of ones.
    ones = [np.array([0xFFFFFFFF], np.uint64)] * 4
    words = [int(w[0]) for w in calls.philox(ones, (0xFFFFFFFF, 0xFFFFFFFF))]
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_dropout_of_a_part_is_that_of_the_whole(kernels: build.Kernels) -> None:
    # A key of zeros makes probabilities equal, a value of ones counts what is kept.
    whole = Case(heads=4, q_len=80, k_len=80, dropout=0.4, sequence=80)
    part = replace(whole, heads=2, q_len=30, first=(2, 50, 0))
    given = calls.inputs(whole)
    given["k"][...], given["v"][...] = 0, 1
    cut = {name: build.placed(given[name][:, 50:, 2:]) for name in ("q", "dout")}
    out, _ = calls.forward(kernels, whole, given)
    of_part, _ = calls.forward(kernels, part, given | cut)
    assert of_part.tobytes() == np.ascontiguousarray(out[:, 50:, 2:]).tobytes()
    assert abs(out.astype(np.float64).mean() - 1) < 0.02


@settings(max_examples=8, deadline=None)
@drawn(
    q_len=st.integers(1, 140), k_len=st.integers(1, 140), group=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 8), st.integers(1, 8)), causal=st.booleans(),
    window=st.integers(-1, 80), offset=st.integers(-40, 40),
    dtype=st.sampled_from(["bf16", "fp16"]), layout=st.sampled_from(["bsnd", "sbnd", "fused"]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_drawn_problems_match_float64(
    kernels: build.Kernels, q_len: int, k_len: int, group: int, dims: tuple[int, int],
    causal: bool, window: int, offset: int, dtype: str, layout: str, seed: int,
) -> None:  # fmt: skip
    case = Case(
        heads=group, q_len=q_len, k_len=k_len, dim=8 * dims[0], value_dim=8 * dims[1],
        causal=causal, window=window, offset=offset, dtype=dtype, layout=layout,
    )  # fmt: skip
    calls.run(kernels, case, seed)


def test_reference_gradients_are_derivatives() -> None:
    case = Case(heads=2, kv_heads=1, q_len=9, k_len=11, dim=8, value_dim=8, causal=True)
    rng = np.random.default_rng(3)
    given = {name: a.astype(np.float64) for name, a in calls.inputs(case).items()}
    gradients = calls.reference(case, given)
    for name in "qkv":
        step = rng.standard_normal(given[name].shape) * 1e-5
        ends = [calls.reference(case, given | {name: given[name] + s * step}) for s in (1, -1)]
        change = ((ends[0]["out"] - ends[1]["out"]) * given["dout"]).sum() / 2
        np.testing.assert_allclose(change, (gradients[f"d{name}"] * step).sum(), rtol=1e-7)


# ---- rows that see nothing, empty sizes ----------------------------------------------------
def test_rows_without_keys_give_zero_and_no_gradient(kernels: build.Kernels) -> None:
    case = Case(heads=2, q_len=150, k_len=20, causal=True)  # the first 130 rows see nothing
    made = calls.run(kernels, case)
    assert not made["out"][:, :130].astype(np.float32).any()
    assert (made["lse"][..., :130] == -np.inf).all()
    assert not made["dq"][:, :130].astype(np.float32).any()
    given = calls.inputs(case)
    given["dout"][:, :130] = 100.0
    changed = calls.backward(kernels, case, given, made["lse"], made["delta"])
    np.testing.assert_array_equal(changed["dv"], made["dv"])
    np.testing.assert_array_equal(changed["dk"], made["dk"])


def test_given_log_sum_exp_of_minus_infinity_gives_no_gradient(kernels: build.Kernels) -> None:
    case = Case(q_len=70, k_len=70)
    lse = np.full((1, 1, 70), -np.inf, np.float32)
    zeros = np.zeros_like(lse)
    for gradient in calls.backward(kernels, case, calls.inputs(case), lse, zeros).values():
        assert (gradient.astype(np.float32) == 0).all()


@pytest.mark.parametrize("sizes", [(0, 5, 1), (5, 0, 1), (0, 0, 1), (5, 5, 0)], ids=str)
def test_empty_sizes(kernels: build.Kernels, sizes: tuple[int, int, int]) -> None:
    q_len, k_len, batch = sizes
    made = calls.run(kernels, Case(q_len=q_len, k_len=k_len, batch=batch, causal=True))
    if k_len == 0:
        assert (made["lse"] == -np.inf).all() and not made["out"].astype(np.float32).any()


# ---- documents -----------------------------------------------------------------------------
def test_documents_match_float64_and_rows_behind_them_are_zero(kernels: build.Kernels) -> None:
    made = calls.run(kernels, calls.DOCUMENTS)
    for name in ("out", "dq"):
        assert not made[name][:, 215:].astype(np.float32).any()
    for name in ("dk", "dv"):
        assert not made[name][:, 210:].astype(np.float32).any()
    assert (made["lse"][..., 215:] == -np.inf).all()


def test_a_document_gives_the_same_bits_as_alone(kernels: build.Kernels) -> None:
    starts = (0, 50, 120)
    packed = Case(q_len=120, k_len=120, causal=True, q_starts=starts, k_starts=starts, window=30)
    given = calls.inputs(packed)
    out, lse = calls.forward(kernels, packed, given)
    for first, last in ((0, 50), (50, 120)):
        alone = Case(q_len=last - first, k_len=last - first, causal=True, window=30)
        part = {name: build.placed(a[:, first:last]) for name, a in given.items()}
        alone_out, alone_lse = calls.forward(kernels, alone, part)
        assert alone_out.tobytes() == out[:, first:last].tobytes()
        assert alone_lse.tobytes() == lse[..., first:last].tobytes()


def test_one_long_document_needs_no_stated_length(kernels: build.Kernels) -> None:
    calls.run(kernels, Case(q_len=300, k_len=300, q_starts=(0, 2, 299), k_starts=(0, 2, 299)))


# ---- parts of a softmax (ring attention), gradient of the log-sum-exp -----------------------
def test_parts_merge_to_the_whole(kernels: build.Kernels) -> None:
    whole = Case(heads=2, kv_heads=1, q_len=80, k_len=120, causal=True)
    given = calls.inputs(whole)
    want = calls.reference(whole, given)
    parts = []
    for first, last in ((0, 50), (50, 120)):
        # The part's own diagonal lies elsewhere: k_len - q_len + offset stays what it was.
        offset = (120 - 80) - first - (last - first - 80)
        case = replace(whole, k_len=last - first, offset=offset)
        keys = {name: build.placed(given[name][:, first:last]) for name in "kv"}
        parts.append((case, given | keys, slice(first, last)))
    made = [calls.forward(kernels, case, part) for case, part, _ in parts]
    lses = np.stack([lse for _, lse in made]).astype(np.float64)
    lse = np.logaddexp(*lses)
    weights = np.exp(lses - lse).transpose(0, 1, 3, 2)[..., None]
    out = sum(w * o.astype(np.float64) for w, (o, _) in zip(weights, made, strict=True))
    bound = 3 * calls.ROUNDING["bf16"] * (want["out_abs"] + abs(want["out"]))
    assert np.all(abs(out - want["out"]) <= bound)
    merged = lse.astype(np.float32)
    dout = given["dout"].astype(np.float64)
    delta = (want["out"] * dout).sum(-1).transpose(0, 2, 1).astype(np.float32)
    dq = np.zeros(want["dq"].shape)
    for case, part, rows in parts:
        gradients = calls.backward(kernels, case, part, build.placed(merged), build.placed(delta))
        calls.check(case, gradients, calls.reference(case, part, merged, delta))
        dq += gradients["dq"].astype(np.float64)
        for name in ("dk", "dv"):
            u = 1.5 * calls.ROUNDING["bf16"]
            bound = u * (want[f"{name}_abs"] + abs(want[name]))[:, rows]
            assert np.all(abs(gradients[name].astype(np.float64) - want[name][:, rows]) <= bound)
    bound = 3 * calls.ROUNDING["bf16"] * (want["dq_abs"] + abs(want["dq"]))
    assert np.all(abs(dq - want["dq"]) <= bound)


def test_gradient_of_the_log_sum_exp(kernels: build.Kernels) -> None:
    case = Case(q_len=40, k_len=50, causal=True)
    given = calls.inputs(case)
    out, lse = calls.forward(kernels, case, given)
    dlse = np.random.default_rng(5).standard_normal(lse.shape).astype(np.float32)
    without = calls.delta_of(kernels, case, out, given["dout"])
    delta = calls.delta_of(kernels, case, out, given["dout"], build.placed(dlse))
    np.testing.assert_array_equal(delta, without - dlse)
    gradients = calls.backward(kernels, case, given, lse, delta)
    want = calls.reference(case, given, lse, delta)
    calls.check(case, gradients, want)
    # d lse / d q by differences: the reference with this delta has it too.
    exact = {name: a.astype(np.float64) for name, a in given.items()}
    base = calls.reference(case, exact, delta=without.astype(np.float64))
    step = np.random.default_rng(6).standard_normal(exact["q"].shape) * 1e-5
    ends = [calls.reference(case, exact | {"q": exact["q"] + s * step})["lse"] for s in (1, -1)]
    change = ((ends[0] - ends[1]) * dlse).sum() / 2
    both = calls.reference(case, exact, delta=(without - dlse).astype(np.float64))
    np.testing.assert_allclose(((both["dq"] - base["dq"]) * step).sum(), change, rtol=1e-5)
