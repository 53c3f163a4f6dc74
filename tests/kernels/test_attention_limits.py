"""What surrounds the attention kernels' numbers: repeatability, addresses, refusals, counts.

Bits are the same in any order of blocks, warps, lanes and copies; offsets are 64-bit; what a
kernel cannot do is refused with nothing written; tensor-core and memory counts equal their
closed forms; sanitizers, race check and nvcc find nothing.
"""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels import attention_calls as calls
from tests.kernels.attention_calls import Array, Case
from tests.sim import build

GROUPED = Case(heads=4, kv_heads=2, q_len=100, k_len=100, causal=True, batch=2)


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    return calls.built()


# ---- repeatable, addresses, refusals -------------------------------------------------------
@pytest.mark.parametrize("name", ["grouped", "documents"])
def test_bits_depend_neither_on_order_nor_on_arrival(kernels: build.Kernels, name: str) -> None:
    case = calls.DOCUMENTS if name == "documents" else GROUPED
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
    near = calls.run(kernels, case)

    def far(values: Array, layout: str) -> Array:
        b, s = values.shape[:2]
        memory = build.sparse(b * s << 25, values.dtype)
        item = values.itemsize
        strides = (s * item << 25, item << 25, item << 24, item)
        view = np.lib.stride_tricks.as_strided(memory, values.shape, strides, writeable=True)
        view[...] = values
        return view

    monkeypatch.setattr(calls, "laid_out", far)
    made = calls.run(kernels, case)
    for name, value in near.items():
        assert value.tobytes() == made[name].tobytes(), name


@pytest.mark.parametrize(
    "change",
    [
        {"dim": 60}, {"dim": 264}, {"value_dim": 136, "dim": 136, "dtype": "fp16"}, {"heads": 3},
        {"kv_heads": 0}, {"scale": 0.0}, {"scale": float("nan")}, {"window": 1 << 30},
        {"dropout": 1.0}, {"dropout": -0.1}, {"softcap": -1.0},
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
        odd[-7] = odd[-7].copy()
        odd[-7][12] += 4  # q's row stride
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


# ---- sanitizers ----------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["asan", "ubsan", "tsan"])
def test_sanitizers_find_nothing(mode: str) -> None:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    code, output = build.run_python(mode, ["-m", "tests.kernels.attention_calls"])
    assert code == 0 and re.search(r"attention [0-9a-f]{64}", output), output[-4000:]
    assert "WARNING: ThreadSanitizer" not in output and "runtime error" not in output
