"""Counters that the families' own tests leave out: delta, amax, scales; bank conflicts of all.

Closed forms are of accessors: what a warp reads again from the caches counts each time. Each is
within 1.05 of the tensors' bytes.
"""

from __future__ import annotations

import ctypes
import importlib

import numpy as np
import pytest

from tests.kernels import attention_calls, fp8_calls
from tests.kernels.elements import load
from tests.sim import build

ROW_FAMILIES = (
    "norm", "dropout", "cross_entropy", "optimizer", "activation", "rotary", "softmax",
)  # fmt: skip


def counted(kernels: build.Kernels) -> dict[str, int]:
    """All counters as they stand."""
    names = kernels.library.ml_sim_counter_names().decode().split()
    values = (ctypes.c_uint64 * len(names))()
    kernels.library.ml_sim_counters(values)
    return dict(zip(names, map(int, values), strict=True))


@pytest.mark.parametrize("family", ROW_FAMILIES)
def test_no_bank_conflicts(family: str) -> None:
    module = importlib.import_module(f"tests.kernels.test_{family}")
    kernels = load(*(getattr(module, "SOURCES", None) or (module.SOURCE,)))
    kernels.library.ml_sim_reset_counters()
    with kernels.options(count=1):
        module.small(kernels)
    counts = counted(kernels)
    assert counts["launches"] > 1 and counts["global_store_sectors"] > 0
    assert counts["shared_replays"] == counts["ldmatrix_replays"] == 0


@pytest.mark.parametrize("with_dlse", [False, True])
def test_attention_delta_reads_each_element_once(with_dlse: bool) -> None:
    kernels = attention_calls.built()
    case = attention_calls.Case(batch=2, heads=4, q_len=48, dim=128, value_dim=128, layout="sbnd")
    out = attention_calls.inputs(case)["dout"]
    rows = 2 * 4 * 48
    delta = build.poisoned((2, 4, 48), np.float32)
    dlse = build.placed(np.zeros((2, 4, 48), np.float32)) if with_dlse else None
    sizes = attention_calls.problem(case, {"out": out, "dout": out})
    counts = kernels.count("launch_attention_delta", out, out, dlse, delta, sizes, 1)
    assert counts["global_load_bytes"] == rows * (4 * 128 + 4 * with_dlse)
    assert counts["global_store_bytes"] == 4 * rows
    assert counts["global_load_sectors"] == rows * 4 * 128 // 32 + rows * with_dlse


@pytest.mark.parametrize("dtype", fp8_calls.DTYPES, ids=fp8_calls.NAMES)
def test_fp8_amax_reads_each_element_once(dtype: np.dtype) -> None:  # type: ignore[type-arg]
    kernels, rows, cols, partials = load("fp8/scaling.cu"), 256, 1024, 16
    x = build.placed(np.ones((rows, cols), dtype))
    partial, amax = build.poisoned(partials, np.uint32), build.poisoned(1, np.float32)
    counts = kernels.count("launch_fp8_amax", x, fp8_calls.code_of(dtype), partial, partials, amax,
                           rows, cols, cols)  # fmt: skip
    assert counts["global_load_bytes"] == x.nbytes + 4 * partials <= 1.05 * x.nbytes
    assert counts["global_store_bytes"] == 4 * partials + 4
    assert counts["global_load_sectors"] == x.nbytes // 32 + partials * 4 // 32
    assert counts["shared_replays"] == 0


def test_fp8_scales_and_histories_move_each_value_once() -> None:
    kernels, n, length = load("fp8/scaling.cu"), 256, 5
    amax = build.placed(np.ones(n, np.float32))
    scale, inverse = build.poisoned(n, np.float32), build.poisoned(n, np.float32)
    counts = kernels.count("launch_fp8_scales", amax, scale, inverse, n, 0, 0.0, 0)
    assert (counts["global_load_bytes"], counts["global_store_bytes"]) == (4 * n, 8 * n)
    history = build.placed(np.ones((length, n), np.float32))
    counts = kernels.count(
        "launch_fp8_delayed_update", history, scale, inverse, length, n, 0, 1.0, 0, 0.0, 0
    )
    assert counts["global_load_bytes"] == 4 * n * (length + 1)
    assert counts["global_store_bytes"] == 4 * n * (length + 2)


@pytest.mark.parametrize("dim", [192, 256])
def test_wide_attention_multiplies_what_is_visible(dim: int) -> None:
    """Above d 128 the gradients of keys and values are two launches: the scores twice."""
    value_dim = 128 if dim == 192 else dim
    kernels, case = (
        attention_calls.built(),
        attention_calls.Case(q_len=128, k_len=128, dim=dim, value_dim=value_dim, causal=True),
    )
    given = attention_calls.inputs(case)
    arguments, out, lse = attention_calls.forward_arguments(case, given)
    counts = {"forward": kernels.count("launch_attention_forward", *arguments)}
    delta = attention_calls.delta_of(kernels, case, out, given["dout"])
    for which in ("query", "key"):
        arguments, _ = attention_calls.backward_arguments(case, given, lse, delta, which)
        counts[which] = kernels.count(f"launch_attention_backward_{which}", *arguments)
    # Whole tiles on and below the diagonal, at most 64 x 64: three quarters of the square.
    pairs = 128 * 128 * 3 // 4
    sums = {"forward": dim + value_dim, "query": 2 * dim + value_dim}
    sums["key"] = 3 * dim + 2 * value_dim
    for name, sum_of_dims in sums.items():
        assert counts[name]["mma"] <= 1.05 * pairs * sum_of_dims / 2048
        assert counts[name]["ldmatrix_replays"] == counts[name]["shared_replays"] == 0
