"""Faults that users of such kernels reported, where the families' own tests have no case.

The table of all of them is tests/data/kernel_bugs.json. Bounds are those of the families' tests;
where two layouts of one problem are compared, results are equal bits.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.kernels import attention_calls as calls
from tests.kernels import test_cross_entropy, test_norm, test_optimizer
from tests.kernels.attention_calls import Array, Case
from tests.kernels.elements import DTYPES, check, load, put, wide
from tests.sim import build


# ---- attention -------------------------------------------------------------------------------
def slice_of_concatenation(dout: Array, how: str) -> Array:
    """The values of [b, s, n, d] as a part of a larger tensor, whose rest is NaN."""
    b, s, n, d = dout.shape
    if how == "channels":
        whole = build.poisoned((b, s, n, 3 * d), dout.dtype)
        part = whole[..., d : 2 * d]
    elif how == "heads":
        whole = build.poisoned((b, s, 2 * n, d), dout.dtype)
        part = whole[:, :, n:]
    elif how == "tokens":
        whole = build.poisoned((b, 2 * s + 3, n, d), dout.dtype)
        part = whole[:, s + 3 :]
    else:  # rows so far apart that a 32-bit offset wraps around
        step = 2**26
        strides = tuple(2 * i for i in (s * step, step, d, 1))
        memory = build.sparse(b * s * step + n * d, dout.dtype)
        part = np.lib.stride_tricks.as_strided(memory, dout.shape, strides)
    part[...] = dout
    return part


@pytest.mark.parametrize("how", ["channels", "heads", "tokens", "distant"])
def test_gradient_of_a_concatenated_output_is_read_where_it_lies(how: str) -> None:
    kernels = calls.built()
    case = Case(heads=4, kv_heads=2, q_len=70, k_len=70, dim=32, value_dim=32, causal=True)
    given = calls.inputs(case)
    out, lse = calls.forward(kernels, case, given)
    made = []
    for dout in (given["dout"], slice_of_concatenation(given["dout"], how)):
        delta = calls.delta_of(kernels, case, out, dout)
        made.append(calls.backward(kernels, case, given | {"dout": dout}, lse, delta))
    for name in made[0]:
        assert made[0][name].tobytes() == made[1][name].tobytes(), name


def test_nan_behind_the_last_document_reaches_nothing() -> None:
    """Padding of a packed batch may hold anything, also in tiles that a document shares."""
    kernels = calls.built()
    case = Case(q_len=100, k_len=90, causal=True, q_starts=(0, 30, 70), k_starts=(0, 40, 75))
    results = []
    for filler in (1.0, np.nan):
        given = calls.inputs(case)
        for name, first in (("q", 70), ("dout", 70), ("k", 75), ("v", 75)):
            given[name][:, first:] = filler
        out, lse = calls.forward(kernels, case, given)
        delta = calls.delta_of(kernels, case, out, given["dout"])
        made = calls.backward(kernels, case, given, lse, delta)
        results.append({"out": out, "lse": lse, **made})
    assert not results[1]["out"][:, 70:].astype(np.float32).any()
    for name, value in results[0].items():
        assert value.tobytes() == results[1][name].tobytes(), name


def test_nan_of_another_document_reaches_nothing() -> None:
    kernels = calls.built()
    starts = (0, 30, 70)
    case = Case(q_len=70, k_len=70, causal=True, q_starts=starts, k_starts=starts)
    results = []
    for filler in (1.0, np.nan):
        given = calls.inputs(case)
        for tensor in given.values():
            tensor[:, 30:] = filler
        out, lse = calls.forward(kernels, case, given)
        delta = calls.delta_of(kernels, case, out, given["dout"])
        made = calls.backward(kernels, case, given, lse, delta)
        results.append([x[:, :30] for x in (out, *made.values())])
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes()
        assert np.isfinite(other.astype(np.float32)).all()


def test_a_single_query_of_many_heads_per_key_head() -> None:
    case = Case(heads=8, kv_heads=1, q_len=1, k_len=129, dim=64, value_dim=64, batch=3)
    calls.run(calls.built(), case)
    calls.run(calls.built(), replace(case, causal=True, layout="sbnd"))


# ---- norms -----------------------------------------------------------------------------------
@pytest.mark.parametrize("h", [48, 3584])
@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_hidden_sizes_that_leave_vectors_over(h: int, offset: int) -> None:
    kernels = load(*test_norm.SOURCES)
    for dtype in DTYPES:
        test_norm.Case(dtype, dtype == "fp16", 3, h, residual=True, offset=offset).run(kernels)


def test_part_of_a_fused_projection_is_normalised_where_it_lies() -> None:
    """Rows of a split: three times as wide, and beginning off any alignment."""
    kernels, h = load(*test_norm.SOURCES), 40
    for offset in (0, h, 2 * h + 1):
        test_norm.Case("bf16", False, 7, h, stride=3 * h, offset=offset).run(kernels)


def test_more_rows_than_65536() -> None:
    kernels, rows = load(*test_norm.SOURCES), 65_539
    test_norm.Case("bf16", True, rows, 8).run(kernels)


# ---- rotary ----------------------------------------------------------------------------------
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_packed_documents_rotate_by_their_own_positions(interleaved: bool) -> None:
    """Every token has its row of the tables: no grid by the longest document, no tail skipped."""
    kernels, n, d, dim = load("rotary/rotary.cu"), 3, 24, 16
    positions = np.r_[np.arange(5), np.arange(1), np.arange(9), np.arange(3)]
    s = positions.size
    x = put(np.random.default_rng(0).standard_normal((s, n * d)), "bf16")
    angles = positions[:, None] * 10000.0 ** (-np.arange(dim // 2) * 2 / dim)
    tables = [build.placed(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]

    def rotated(first: int, last: int) -> Array:
        rows = build.placed(x[first:last])
        out = build.poisoned(rows.shape, rows.dtype)
        part = [build.placed(t[first:last]) for t in tables]
        kernels.call("launch_rotary", 1, rows, n * d, n * d, d, *part, out, n * d, n * d, d,
                     last - first, 1, n, d, dim, interleaved, 0)  # fmt: skip
        return out

    whole = rotated(0, s)
    assert np.isfinite(wide(whole)).all()
    bounds = [0, 5, 6, 15, 18]
    alone = [rotated(a, b) for a, b in itertools.pairwise(bounds)]
    assert whole.tobytes() == b"".join(part.tobytes() for part in alone)
    np.testing.assert_array_equal(whole.reshape(s, n, d)[..., dim:], x.reshape(s, n, d)[..., dim:])


# ---- cross-entropy ---------------------------------------------------------------------------
def test_no_valid_token_gives_finite_zero_gradients() -> None:
    kernels = load(test_cross_entropy.SOURCE)
    for v in (50, 64):
        case = test_cross_entropy.Case(kernels, "bf16", 4, v, shards=2, smoothing=0.1, z=1e-3)
        case.scale[:] = 0.0
        case.run()
        assert np.isfinite(case.loss).all()
        assert not any(shard.view(np.uint16).any() for shard in case.logits)


# ---- optimizer -------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_many_ranges_and_empty_ones_anywhere(rule: str) -> None:
    """Hundreds of tensors, those without elements first, between and last, equal one range."""
    kernels, n = load(*test_optimizer.SOURCES), 600
    whole, cut = (test_optimizer.Range(kernels, n) for _ in range(2))
    names = ("weight", "grad", "first", "second", "copy")
    arrays = [getattr(cut, name) for name in names]
    bounds = sorted([0, 0, n, n, n, *np.random.default_rng(0).integers(0, n, 300).tolist()])
    for start, stop in itertools.pairwise(bounds):
        for name, array in zip(names, arrays, strict=True):
            setattr(cut, name, array[start:stop])
        cut.n = stop - start
        cut.adamw() if rule == "adamw" else cut.sgd(0.9)
    whole.adamw() if rule == "adamw" else whole.sgd(0.9)
    for name, array in zip(names, arrays, strict=True):
        np.testing.assert_array_equal(array, getattr(whole, name))


def test_norms_of_ranges_add_up_with_an_empty_one_last() -> None:
    kernels = load(*test_optimizer.SOURCES)
    parts = [test_optimizer.flat(np.full(n, 2.0)) for n in (7, 0, 300, 0)]
    out, _ = test_optimizer.squared_norm(kernels, parts[0], "fp32")
    for part in parts[1:]:
        test_optimizer.squared_norm(kernels, part, "fp32", out)
    check(out, np.array([4.0 * 307, 0.0]), "fp32", 0.0)
