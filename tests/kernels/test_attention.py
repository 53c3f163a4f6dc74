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

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from tests.kernels import attention_calls as calls
from tests.kernels.attention_calls import Array, Case
from tests.sim import build


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    return build.load(calls.SOURCES, defines=calls.DEFINES)


def check(case: Case, got: dict[str, Array], want: dict[str, Array]) -> None:
    """Every element within the bounds of the module's table; NaN and unwritten never are."""
    u = calls.ROUNDING[case.dtype]
    terms = max(case.k_len, case.q_len * case.heads // case.kv_heads)
    tiny = 2.0**-24 * terms * 4 if case.dtype == "fp16" else 0.0
    for name, value in got.items():
        if name == "lse":
            seen = want["lse"] > -np.inf
            np.testing.assert_array_equal(value[~seen], -np.inf)
            bound = 4e-6 * (1 + abs(want["lse"][seen]))
            assert np.all(abs(value[seen] - want["lse"][seen]) <= bound), name
            continue
        bound = 1.05 * u * (want[f"{name}_abs"] + abs(want[name])) + tiny
        excess = abs(value.astype(np.float64) - want[name]) - bound
        assert np.all(excess <= 0), f"{name} beyond its bound by {np.nanmax(excess)}"


def run(kernels: build.Kernels, case: Case, seed: int = 0) -> dict[str, Array]:
    """Forward, delta and backward, checked; what they gave."""
    given = calls.inputs(case, seed)
    out, lse = calls.forward(kernels, case, given)
    check(case, {"out": out, "lse": lse}, calls.reference(case, given))
    delta = calls.delta_of(kernels, case, out, given["dout"])
    rows = out.astype(np.float64) * given["dout"].astype(np.float64)
    error = abs(delta - rows.sum(-1).transpose(0, 2, 1))
    assert np.all(error <= 2.0**-20 * abs(rows).sum(-1).transpose(0, 2, 1))
    gradients = calls.backward(kernels, case, given, lse, delta)
    check(case, gradients, calls.reference(case, given, lse, delta))
    return {"out": out, "lse": lse, "delta": delta, **gradients}


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
    "dim_256": Case(q_len=33, k_len=40, dim=256, value_dim=256, causal=True),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients_match_float64(kernels: build.Kernels, name: str) -> None:
    case = CASES[name]
    made = run(kernels, case)
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
    run(kernels, case, seed)


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
    made = run(kernels, case)
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
    made = run(kernels, Case(q_len=q_len, k_len=k_len, batch=batch, causal=True))
    if k_len == 0:
        assert (made["lse"] == -np.inf).all() and not made["out"].astype(np.float32).any()


# ---- documents -----------------------------------------------------------------------------
DOCUMENTS = Case(
    heads=2, kv_heads=1, q_len=240, k_len=230, causal=True, layout="fused",
    q_starts=(0, 1, 1, 129, 129, 200, 215), k_starts=(0, 1, 30, 100, 130, 130, 210),
)  # fmt: skip


def test_documents_match_float64_and_rows_behind_them_are_zero(kernels: build.Kernels) -> None:
    made = run(kernels, DOCUMENTS)
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
    run(kernels, Case(q_len=300, k_len=300, q_starts=(0, 2, 299), k_starts=(0, 2, 299)))


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
        check(case, gradients, calls.reference(case, part, merged, delta))
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
    check(case, gradients, want)
    # d lse / d q by differences: the reference with this delta has it too.
    exact = {name: a.astype(np.float64) for name, a in given.items()}
    base = calls.reference(case, exact, delta=without.astype(np.float64))
    step = np.random.default_rng(6).standard_normal(exact["q"].shape) * 1e-5
    ends = [calls.reference(case, exact | {"q": exact["q"] + s * step})["lse"] for s in (1, -1)]
    change = ((ends[0] - ends[1]) * dlse).sum() / 2
    both = calls.reference(case, exact, delta=(without - dlse).astype(np.float64))
    np.testing.assert_allclose(((both["dq"] - base["dq"]) * step).sum(), change, rtol=1e-5)


# ---- repeatable, addresses, refusals -------------------------------------------------------
@pytest.mark.parametrize("name", ["causal_gqa", "documents"])
def test_bits_depend_neither_on_order_nor_on_arrival(kernels: build.Kernels, name: str) -> None:
    case = DOCUMENTS if name == "documents" else CASES[name]
    bits = set()
    for order in ("fwd", "rev", "rand:1"):
        for arrival in ("late", "early") if order == "fwd" else ("late",):
            with kernels.options(order=order, cp_async=arrival):
                given = calls.inputs(case)
                out, lse = calls.forward(kernels, case, given)
                delta = calls.delta_of(kernels, case, out, given["dout"])
                made = calls.backward(kernels, case, given, lse, delta)
            bits.add(b"".join(a.tobytes() for a in (out, lse, delta, *made.values())))
    assert len(bits) == 1


def test_offsets_beyond_2_31_elements(
    kernels: build.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(batch=2, heads=2, q_len=70, k_len=70, dim=32, value_dim=32, causal=True)
    near = run(kernels, case)

    def far(values: Array, layout: str) -> Array:
        b, s = values.shape[:2]
        memory = build.sparse(b * s << 25, values.dtype)
        item = values.itemsize
        strides = (s * item << 25, item << 25, item << 24, item)
        view = np.lib.stride_tricks.as_strided(memory, values.shape, strides, writeable=True)
        view[...] = values
        return view

    monkeypatch.setattr(calls, "laid_out", far)
    made = run(kernels, case)
    for name, value in near.items():
        assert value.tobytes() == made[name].tobytes(), name


@pytest.mark.parametrize(
    "change",
    [
        {"dim": 60}, {"dim": 264}, {"value_dim": 136, "dim": 136, "dtype": "fp16"}, {"heads": 3},
        {"kv_heads": 0}, {"scale": 0.0}, {"scale": float("nan")}, {"window": 1 << 30},
        {"batch": 2, "q_starts": (0, 64), "k_starts": (0, 64)},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_done_is_refused(kernels: build.Kernels, change: dict[str, Any]) -> None:
    case = replace(Case(heads=4, kv_heads=2), **change)
    given = calls.inputs(replace(case, kv_heads=max(1, case.kv_heads)))
    for arguments, out, launcher in every_call(case, given):
        with pytest.raises(build.SimError, match="returned 1"):
            kernels.call(launcher, *arguments)
        assert (out.view(np.int16) == -1).all()


def every_call(case: Case, given: dict[str, Array]) -> list[tuple[tuple[Any, ...], Array, str]]:
    arguments, out, lse = calls.forward_arguments(case, given)
    found = [(arguments, out, "launch_attention_forward")]
    for which, first in (("query", "dq"), ("key", "dk")):
        arguments, made = calls.backward_arguments(case, given, lse, lse, which)
        found.append((arguments, made[first], f"launch_attention_backward_{which}"))
    return found


@pytest.mark.parametrize("argument", range(5))
def test_misaligned_rows_are_refused(kernels: build.Kernels, argument: int) -> None:
    case = Case()
    for arguments, _, launcher in every_call(case, calls.inputs(case)):
        if arguments[argument].dtype == np.float32:
            continue  # lse: any alignment of its type
        moved = list(arguments)
        moved[argument] = build.poisoned(64 * 64 + 8, calls.DTYPES["bf16"])[1:]
        with pytest.raises(build.SimError, match="returned 1"):
            kernels.call(launcher, *moved)
        odd = list(arguments)
        odd[-3] = odd[-3].copy()
        odd[-3][12] += 4  # q's row stride
        with pytest.raises(build.SimError, match="returned 1"):
            kernels.call(launcher, *odd)


# ---- counts --------------------------------------------------------------------------------
def tiles_seen(case: Case, rows: int, columns: int) -> int:
    """Pairs of a tile of queries and one of keys with anything visible, in scores."""
    seen = calls.visible(case, case.q_len, case.k_len)
    tiles = seen.reshape(case.q_len // rows, rows, case.k_len // columns, columns)
    return int(tiles.any(axis=(1, 3)).sum())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_counts_equal_the_closed_forms(kernels: build.Kernels, dim: int, causal: bool) -> None:
    case = Case(heads=2, kv_heads=1, q_len=128, k_len=256, dim=dim, value_dim=dim, causal=causal)
    keys = 64 if dim == 64 else 32  # of a tile that passes by
    given = calls.inputs(case)
    arguments, out, lse = calls.forward_arguments(case, given)
    counts = {"forward": kernels.count("launch_attention_forward", *arguments)}
    delta = calls.delta_of(kernels, case, out, given["dout"])
    for which in ("query", "key"):
        arguments, _ = calls.backward_arguments(case, given, lse, delta, which)
        counts[which] = kernels.count(f"launch_attention_backward_{which}", *arguments)
    shapes = {"forward": (128, keys, 2), "query": (64, keys, 3), "key": (keys, 64, 4)}
    for name, (rows, columns, products) in shapes.items():
        seen = tiles_seen(case, rows, columns) * case.heads
        assert counts[name]["mma"] == products * seen * rows * columns * dim // 2048
        assert counts[name]["ldmatrix_replays"] == counts[name]["shared_replays"] == 0
        owned, passing = (columns, rows) if name == "key" else (rows, columns)
        blocks = 256 // owned if name == "key" else 128 // owned * case.heads
        kept = 1 if name == "forward" else 2  # tensors of the owned rows; two pass by
        least = 2 * dim * (kept * blocks * owned + 2 * seen * passing)
        assert least <= counts[name]["global_load_bytes"] <= 1.05 * least
        assert counts[name]["global_store_sectors"] * 32 == counts[name]["global_store_bytes"]
    assert counts["forward"]["global_store_bytes"] == 2 * 128 * (2 * dim + 4)
    assert counts["query"]["global_store_bytes"] == 2 * 128 * 2 * dim
    assert counts["key"]["global_store_bytes"] == 256 * 2 * 2 * dim


# ---- sanitizers, nvcc ----------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["asan", "ubsan", "tsan"])
def test_sanitizers_find_nothing(mode: str) -> None:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    code, output = build.run_python(mode, ["-m", "tests.kernels.attention_calls"])
    assert code == 0 and re.search(r"attention [0-9a-f]{64}", output), output[-4000:]
    assert "WARNING: ThreadSanitizer" not in output and "runtime error" not in output


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("source", calls.SOURCES)
def test_nvcc_uses_registers_and_spills_none(source: str, arch: str, tmp_path: Path) -> None:
    reason = build.why_not_nvcc()
    if reason is not None:
        pytest.skip(reason)
    wrapper = tmp_path / "one_type.cu"
    wrapper.write_text(f'#define MLITE_ATTENTION_ONLY_BF16\n#include "{source[5:]}"\n')
    kernels = build.compile_for_gpu(wrapper, arch)
    assert kernels
    for name, resources in kernels.items():
        assert resources["spill_bytes"] == resources["stack_bytes"] == 0, name
        assert resources["registers"] <= (64 if "delta" in name else 255), name
