"""The CPU kernels beyond 2^31 elements, in sparse memory; fake tensors of such sizes.

Operations that take any stride get rows 2^31 + 8 elements apart and must give the bits of dense
rows. Flat and dense ones run their last rows only (cpu_ranges.cpp), also under the sanitizer of
undefined behaviour: an index of 32 bits overflows. Results are equal bits throughout.
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_lite.native.load import Native
from megatron_lite.ops import attention, matrix
from megatron_lite.ops.activation import activation_backward, activation_forward
from megatron_lite.ops.attention import Options
from megatron_lite.ops.cross_entropy import cross_entropy_, cross_entropy_statistics
from megatron_lite.ops.dropout import dropout_backward, dropout_forward
from megatron_lite.ops.fp8 import Scaling, fp8_amax, quantize
from megatron_lite.ops.moe import moe_gather
from megatron_lite.ops.norm import norm_backward, norm_forward
from megatron_lite.ops.optimizer import adamw_update, squared_norm
from megatron_lite.ops.rotary import rotary
from megatron_lite.ops.softmax import masked_softmax, masked_softmax_backward
from tests.kernels import fp8_oracle as oracle
from tests.kernels.fp8_oracle import BFLOAT16, E4M3
from tests.sim import build

FAR = 2**31 + 8  # elements between two rows
RANGES = (
    "tests/ops/cpu_ranges.cpp", "csrc/optimizer/cpu/update.cpp",
    "csrc/optimizer/cpu/squared_norm.cpp", "csrc/moe/cpu/rows.cpp", "csrc/fp8/cpu/quantize.cpp",
    "csrc/fp8/cpu/scaling.cpp",
)  # fmt: skip


def far_apart(dense: Tensor) -> Tensor:
    """A copy of [rows, ...] whose rows lie FAR elements apart."""
    rows, width = dense.shape[0], dense[0].numel()
    kind = {1: np.uint8, 2: np.uint16, 4: np.float32}[dense.element_size()]
    memory = torch.from_numpy(build.sparse((rows - 1) * FAR + width, kind)).view(dense.dtype)
    inner = dense[0].contiguous().stride()
    return memory.as_strided(dense.shape, (FAR, *inner)).copy_(dense)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(got: Any, want: Any) -> None:
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    assert all(torch.equal(a, b) for a, b in pairs)


# ---- rows at any stride ------------------------------------------------------------------------
def test_norm_of_distant_rows(native: Native) -> None:
    x, residual, grad, grad_sum = (drawn(2, 77, seed=i) for i in range(4))
    weight = drawn(77, seed=5)
    want = norm_forward(x, residual, weight, None, 1e-5, False)
    got = norm_forward(far_apart(x), far_apart(residual), weight, None, 1e-5, False)
    assert_same(got, want)
    inverse = want[3]
    assert_same(
        norm_backward(*map(far_apart, (grad, x, grad_sum)), weight, None, inverse, False),
        norm_backward(grad, x, grad_sum, weight, None, inverse, False),
    )


def test_activation_of_distant_rows(native: Native) -> None:
    x, grad = drawn(2, 154), drawn(2, 77, seed=1)
    call = ("silu", True, 1.5)
    assert_same(activation_forward(far_apart(x), *call), activation_forward(x, *call))
    got = activation_backward(far_apart(grad), far_apart(x), *call)
    assert_same(got, activation_backward(grad, x, *call))


def test_softmax_of_distant_rows(native: Native) -> None:
    x, grad = drawn(2, 2, 77), drawn(2, 2, 77, seed=1)
    visible = drawn(2, 2, 77, seed=2) > -0.5
    # One stride serves all rows: the two queries are as far apart as the samples' rows.
    lone, lone_grad = (t[:, :1].transpose(0, 1) for t in (x, grad))
    spread = [far_apart(t[0]).unsqueeze(0) for t in (lone, lone_grad)]
    want = masked_softmax(lone, visible[:1], 0.3, False)
    assert_same(masked_softmax(spread[0], visible[:1], 0.3, False), want)
    got = masked_softmax_backward(spread[1], want, 0.3)
    assert_same(got, masked_softmax_backward(lone_grad, want, 0.3))


def test_cross_entropy_of_distant_rows(native: Native) -> None:
    logits, target, scale = drawn(2, 133), torch.tensor([5, 130]), torch.ones(2)
    far = far_apart(logits)
    want = cross_entropy_statistics(logits, target, 131, True)
    assert_same(cross_entropy_statistics(far, target, 131, True), want)
    loss = cross_entropy_(logits, target, scale, 131, 0.1, 1e-3)
    assert_same(cross_entropy_(far, target, scale, 131, 0.1, 1e-3), loss)
    assert_same(far, logits)


def test_rotary_and_dropout_of_distant_tokens(native: Native) -> None:
    x = drawn(2, 3, 2, 14)
    angles = drawn(2, 5, dtype=torch.float32)
    for backward in (False, True):
        call = (angles.cos(), angles.sin(), False, backward)
        assert_same(rotary(far_apart(x), *call), rotary(x, *call))
    x, bias = drawn(2, 1, 77), drawn(77, seed=1)
    key = (torch.arange(2), torch.tensor([3]), 0.3, 7, 11)
    far = far_apart(x)
    assert_same(dropout_forward(far, bias, far, *key), dropout_forward(x, bias, x, *key))
    assert_same(dropout_backward(far, *key, True), dropout_backward(x, *key, True))


def test_attention_of_distant_rows(native: Native) -> None:
    q, dout = drawn(2, 1, 4, 24), drawn(2, 1, 4, 16, seed=3)
    k, v = drawn(2, 1, 2, 24, seed=1), drawn(2, 1, 2, 16, seed=2)
    options = Options(True, 0, -1, 0.2).arguments()
    out, lse = attention.attention_forward(q, k, v, *options)
    far = [far_apart(x) for x in (q, k, v)]
    assert_same(attention.attention_forward(*far, *options), (out, lse))
    want = attention.attention_backward(dout, q, k, v, out, lse, None, *options)
    got = attention.attention_backward(far_apart(dout), *far, far_apart(out), lse, None, *options)
    assert_same(got, want)


def test_products_of_distant_rows(native: Native) -> None:
    a, b = drawn(2, 3), drawn(2, 5, seed=1)
    main = drawn(3, 5, seed=2, dtype=torch.float32)
    far = far_apart(main)
    matrix._accumulate(far, far_apart(a), far_apart(b))
    matrix._accumulate(main, a, b)
    assert_same(far, main)


def test_gather_and_quantization_of_distant_rows(native: Native) -> None:
    x = drawn(2, 160)
    row_of, source = torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([1, 0, -1])
    source = source.to(torch.int32)
    got, _ = moe_gather(far_apart(x), None, source, row_of)
    assert torch.equal(got, torch.stack([x[1], x[0], torch.zeros_like(x[0])]))
    far = far_apart(x)
    assert torch.equal(fp8_amax(far), x.abs().max().float().view(1))
    got_codes, want = (quantize(t, Scaling.ROWS, transposed=True) for t in (far, x))
    for name in ("codes", "codes_t", "scale_inv", "scale_inv_t"):
        mine, theirs = getattr(got_codes, name), getattr(want, name)
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


# ---- flat and dense --------------------------------------------------------------------------
@cache
def kernels() -> build.Kernels:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    return build.load(RANGES, defines=("ML_ISA=base",))


def test_updates_beyond_2_to_the_31() -> None:
    n, last = 2**31 + 1028, 4100
    rng = np.random.default_rng(0)
    for launcher, state in (("cpu_adamw", 3), ("cpu_sgd", 2)):
        dense = [rng.random(last).astype(np.float32) for _ in range(1 + state)]
        dense.append(np.zeros(last, np.uint16))
        whole = [build.sparse(n, x.dtype) for x in dense]
        for large, small in zip(whole, dense, strict=True):
            large[-last:] = small
        kernels().call(launcher, *whole, n - last, n)
        before = [x.copy() for x in dense]
        kernels().call(launcher, *dense, 0, last)
        for large, small in zip(whole, dense, strict=True):
            np.testing.assert_array_equal(large[-last:], small)
        assert not any(np.array_equal(a, b) for a, b in zip(before[::2], dense[::2], strict=True))


def test_squared_norm_beyond_2_to_the_31() -> None:
    n, part = 2**31 + 1028, 65536
    x = build.sparse(n, np.uint16).view(BFLOAT16)
    x[-2:] = 3.0, np.inf
    parts = -(-n // part)
    squares, bad = build.sparse(parts, np.float64), build.sparse(parts, np.float64)
    kernels().call("cpu_squared_norm", x, n, squares, bad, parts - 1, parts)
    assert squares[-1] == np.inf and bad[-1] == 1
    x[-1] = 2.0
    kernels().call("cpu_squared_norm", x, n, squares, bad, parts - 1, parts)
    assert squares[-1] == 13.0 and bad[-1] == 0 and not squares[:-1].any()


def test_moe_rows_beyond_2_to_the_31() -> None:
    tokens, h = 70_000, 32_768  # 2^31 elements are passed at row 65,536
    rng = np.random.default_rng(1)
    x, packed, out, d_packed = (build.sparse((tokens, h), BFLOAT16) for _ in range(4))
    x[-4:] = rng.standard_normal((4, h)).astype(BFLOAT16)
    row_of = np.arange(tokens, dtype=np.int32)
    row_of[-4:] = row_of[-4:][::-1].copy()
    probs, d_probs = np.full(tokens, 2, np.float32), np.zeros(tokens, np.float32)
    span = (tokens - 4, tokens)
    kernels().call("cpu_gather", x, 2 * h, row_of, packed, 1, *span)
    np.testing.assert_array_equal(packed[-4:], x[-4:][::-1])
    kernels().call("cpu_combine", packed, row_of, probs, out, h, 1, *span)
    np.testing.assert_array_equal(out[-4:], 2 * x[-4:])
    kernels().call("cpu_combine_backward", packed, row_of, probs, x, d_packed, d_probs, h, 1, *span)
    np.testing.assert_array_equal(d_packed[-4:], 2 * x[-4:][::-1])
    np.testing.assert_allclose(d_probs[-4:], (x[-4:].astype(np.float64) ** 2).sum(1), rtol=1e-5)


def test_fp8_matrices_beyond_2_to_the_31() -> None:
    rows, cols = 70_000, 40_000
    x = build.sparse((rows, cols), BFLOAT16)
    codes, codes_t = build.sparse((rows, cols), np.uint8), build.sparse((cols, rows), np.uint8)
    height, width = rows % 128, cols % 128
    last = np.random.default_rng(2).standard_normal((height, width)).astype(BFLOAT16)
    x[-height:, -width:] = last
    scale_inv = build.sparse((-(-rows // 128), -(-cols // 128)), np.float32)
    tiles = scale_inv.size
    kernels().call("cpu_quantize", x, rows, cols, codes, codes_t, scale_inv, tiles - 1, tiles)
    want = oracle.quantize(last, "square", E4M3)
    np.testing.assert_array_equal(codes[-height:, -width:], want.codes)
    np.testing.assert_array_equal(codes_t[-width:, -height:], want.codes.T)
    assert scale_inv[-1, -1] == want.scale_inv[0, 0]
    out, scale = build.sparse((rows, cols), np.float32), np.array([0.5], np.float32)
    kernels().call("cpu_dequantize", codes, scale, out, rows, cols, rows - 1, rows)
    np.testing.assert_array_equal(
        out[-1, -width:], oracle.decode(want.codes[-1], E4M3).astype(np.float32) * scale
    )


@pytest.mark.timeout(300)  # room for building on a busy machine
def test_no_index_overflows() -> None:
    """The flat and dense ones again, under the sanitizer of undefined behaviour."""
    if os.environ.get("MLITE_SIM_MODE"):
        pytest.skip("this is the process under the sanitizer")
    kernels()
    chosen = ["-k", "beyond_2_to_the_31 and not fake", __file__]
    code, output = build.run_python(
        "ubsan", ["-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    )
    assert code == 0 and "4 passed" in output, output[-4000:]


# ---- fake tensors ----------------------------------------------------------------------------
def test_fake_tensors_beyond_2_to_the_31() -> None:
    """Dry runs of sizes that no memory holds."""
    t, h = 2**20, 2**14
    with FakeTensorMode():
        x, weight = torch.empty(t, h, dtype=torch.bfloat16), torch.empty(h, dtype=torch.bfloat16)
        out, _, _, inverse = norm_forward(x, None, weight, None, 1e-5, False)
        assert out.shape == norm_backward(x, x, None, weight, None, inverse, False)[0].shape
        assert activation_forward(x, "silu", True, math.inf).shape == (t, h // 2)
        assert masked_softmax(x, None, 1.0, True).shape == x.shape
        target, scale = torch.empty(t, dtype=torch.int64), torch.empty(t)
        assert cross_entropy_(x, target, scale, h, 0.0, 0.0).shape == (t,)
        heads = x.view(t, 1, 128, 128)
        table = torch.empty(t, 64)
        assert rotary(heads, table, table, False, False).shape == heads.shape
        attended, lse = attention.attention_forward(
            heads, heads, heads, *Options(True, 0, -1, 1.0).arguments()
        )
        assert attended.shape == heads.shape and lse.shape == (1, 128, t)
        row_of, source = (torch.empty(n, dtype=torch.int32) for n in (4 * t, 5 * t))
        packed, _ = moe_gather(x, None, source, row_of.view(t, 4))
        assert packed.shape == (5 * t, h)
        scale_inv_t = quantize(x, Scaling.MX, transposed=True).scale_inv_t
        assert scale_inv_t is not None and scale_inv_t.shape == (h, t // 32)
        flat = torch.empty(t * h)
        assert squared_norm(flat).shape == (2,)
        adamw_update(flat, flat, flat, flat, x, None, None, 1, 0.1, 0.9, 0.95, 1e-8, 0.0)
