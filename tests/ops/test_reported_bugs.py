"""Faults that users of such operations reported, where the operations' own tests have no case.

The table of all of them is tests/data/kernel_bugs.json. Two layouts of one problem give equal
bits; other bounds stand beside their test.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from megatron_lite.config.plan import RotaryShape
from megatron_lite.native.load import Native
from megatron_lite.ops import attention
from megatron_lite.ops.attention import Options, attend
from megatron_lite.ops.cross_entropy import cross_entropy, cross_entropy_
from megatron_lite.ops.fp8 import Scaling, dequantize, fp8_amax, quantize
from megatron_lite.ops.moe import (
    moe_combine,
    moe_combine_backward,
    moe_gather,
    moe_route,
    route_capacity,
)
from megatron_lite.ops.norm import accumulation_dtype, norm_backward, norm_forward
from megatron_lite.ops.optimizer import adamw_update, sgd_update, squared_norm
from megatron_lite.ops.rotary import rotary, rotary_table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK_SCALES = [*itertools.product((Scaling.ROWS, Scaling.SQUARE), (False, True))]
BLOCK_SCALES.append((Scaling.MX, False))  # powers of two anyway


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- attention -------------------------------------------------------------------------------
@pytest.mark.parametrize("dim", [0, 2, 3], ids=["tokens", "heads", "channels"])
def test_gradient_of_a_concatenated_output_is_read_where_it_lies(native: Native, dim: int) -> None:
    """Autograd hands each operand of a concatenation a view of the whole gradient."""
    options = Options(True, 0, -1, 0.3)
    parts = [[drawn(21, 2, 4, 24, seed=3 * i + j) for j in range(3)] for i in range(2)]
    leaves = [[x.clone().requires_grad_() for x in part] for part in parts]
    outs = [attend(*part, options)[0] for part in leaves]
    grad = drawn(*torch.cat(outs, dim).shape, seed=9)
    torch.cat(outs, dim).backward(grad)
    for part, leaf, view in zip(parts, leaves, grad.chunk(2, dim), strict=True):
        out, lse = attend(*part, options)
        want = attention.attention_backward(
            view.clone(), *part, out, lse, None, *options.arguments()
        )
        assert_same(tuple(x.grad for x in leaf), want)


def test_expanded_output_gradients_are_read_as_they_lie(native: Native) -> None:
    """The gradient of a sum has strides of 0."""
    q, k, v = (drawn(21, 1, 2, 16, seed=i) for i in range(3))
    options = Options(True, 0, -1, 0.3)
    out, lse = attend(q, k, v, options)
    grad = torch.ones(1, dtype=q.dtype).expand(out.shape)
    arguments = (q, k, v, out, lse, None, *options.arguments())
    assert_same(
        attention.attention_backward(grad, *arguments),
        attention.attention_backward(grad.contiguous(), *arguments),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nan_behind_the_last_document_reaches_nothing(native: Native, dtype: torch.dtype) -> None:
    starts = [torch.tensor(s, dtype=torch.int32) for s in ((0, 30, 70), (0, 40, 75))]
    options = Options(True, 0, -1, 0.3, 0.0, *starts)
    results = []
    for filler in (1.0, math.nan):
        q, dout = (drawn(100, 1, 2, 16, seed=i, dtype=dtype) for i in (0, 1))
        k, v = (drawn(90, 1, 2, 16, seed=i, dtype=dtype) for i in (2, 3))
        q[70:], dout[70:], k[75:], v[75:] = (filler,) * 4
        out, lse = attend(q, k, v, options)
        gradients = attention.attention_backward(
            dout, q, k, v, out, lse, None, *options.arguments()
        )
        results.append((out, lse, *gradients))
    assert_same(*results)
    assert not results[1][0][70:].any()


def test_documents_longer_than_a_stated_length_do_not_exist(native: Native) -> None:
    """No longest length is passed; documents that exceed the tensors are refused."""
    q = drawn(300, 1, 1, 16)
    for starts, legal in (((0, 2, 299), True), ((0, 2, 301), False), ((0, 200, 100), False)):
        documents = torch.tensor(starts, dtype=torch.int32)
        options = Options(True, 0, -1, 0.3, 0.0, documents, documents)
        if legal:
            alone, _ = attend(*[q[2:299]] * 3, Options(True, 0, -1, 0.3))
            assert torch.equal(attend(q, q, q, options)[0][2:299], alone)
        else:
            with pytest.raises(RuntimeError, match="must not fall nor exceed"):
                attend(q, q, q, options)


# ---- norms -----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("h", [48, 3584])
@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_hidden_sizes_that_leave_vectors_over(
    native: Native, h: int, offset: int, dtype: torch.dtype
) -> None:
    """Rows, weights and gradients off any alignment equal aligned ones."""
    x, grad, weight = (drawn(n, h, seed=n, dtype=dtype) for n in (3, 4, 1))
    x, grad, weight = x[:3], grad[:3], weight[0]
    moved = [torch.empty(t.numel() + offset, dtype=dtype)[offset:] for t in (x, grad, weight)]
    moved = [m.view(t.shape).copy_(t) for m, t in zip(moved, (x, grad, weight), strict=True)]
    want = norm_forward(x, None, weight, weight, 1e-5, False)
    assert_same(norm_forward(moved[0], None, moved[2], moved[2], 1e-5, False), want)
    statistics = want[2:]
    assert_same(
        norm_backward(moved[1], moved[0], None, moved[2], *statistics, False),
        norm_backward(grad, x, None, weight, *statistics, False),
    )


def test_parts_of_a_split_and_gradients_of_any_stride(native: Native) -> None:
    fused = drawn(5, 2, 3 * 40)
    weight = drawn(40, seed=1)
    for x in fused.split(40, dim=-1):
        out, _, _, inverse = norm_forward(x, None, weight, None, 1e-5, False)
        dense = x.contiguous()
        assert torch.equal(out, norm_forward(dense, None, weight, None, 1e-5, False)[0])
        grad = drawn(5, 2, 40, seed=2)
        want = norm_backward(grad, dense, None, weight, None, inverse, False)
        last_strided = grad.transpose(1, 2).contiguous().transpose(1, 2)
        every_other = torch.stack([grad, grad], -1).flatten(-2)[..., ::2]
        assert last_strided.stride(-1) != 1 and every_other.stride(-1) == 2
        for view in (last_strided, every_other):
            assert_same(norm_backward(view, x, None, weight, None, inverse, False), want)
        # The gradient of a sum: strides of 0.
        ones = torch.ones(1, dtype=grad.dtype).expand(grad.shape)
        want = norm_backward(ones.contiguous(), dense, None, weight, None, inverse, False)
        assert_same(norm_backward(ones, x, None, weight, None, inverse, False), want)


def test_expanded_weights_are_refused_not_read_beyond(native: Native) -> None:
    x, weight = drawn(3, 8), drawn(1).expand(8)
    with pytest.raises(RuntimeError, match="weight: must be contiguous"):
        norm_forward(x, None, weight, None, 1e-5, False)
    with pytest.raises(RuntimeError, match="bias: must be contiguous"):
        norm_forward(x, None, weight.contiguous(), weight, 1e-5, False)


def test_more_rows_than_65536(native: Native) -> None:
    rows, h = 65_539, 4
    x, weight = drawn(rows, h, dtype=torch.float32), drawn(h, seed=1, dtype=torch.float32)
    out, _, _, inverse = norm_forward(x, None, weight, None, 1e-5, False)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(out.double(), exact * weight, rtol=1e-6, atol=1e-6)
    _, grad_weight, _ = norm_backward(x, x, None, weight, None, inverse, False)
    torch.testing.assert_close(grad_weight.double(), (x * exact).sum(0), rtol=1e-6, atol=0)


# ---- rotary ----------------------------------------------------------------------------------
def test_angles_are_fp32_beyond_256_positions(native: Native) -> None:
    """bf16 cannot tell position 257 from 256; a bf16 model's tables can, to fp32's rounding."""
    shape = RotaryShape(10000.0, 64, False, 1.0, None)
    positions = torch.cat([torch.arange(250, 520), torch.tensor([4095, 8191, 131_071])])
    dtype = accumulation_dtype(torch.bfloat16)
    tables = rotary_table(shape, positions, dtype)
    exact = rotary_table(shape, positions, torch.float64)
    for got, want in zip(tables, exact, strict=True):
        assert got.dtype == torch.float32
        bound = 1e-6 + 4 * 2.0**-24 * positions.unsqueeze(1)  # the angle's own rounding
        assert ((got.double() - want).abs() <= bound).all()
    x = drawn(1, 1, 1, 64).expand(len(positions), 1, 1, 64)
    out = rotary(x, *tables, False, False)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(out))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_packed_documents_rotate_by_their_own_positions(native: Native, interleaved: bool) -> None:
    """Every token has its row of the tables, those behind the last document too."""
    shape = RotaryShape(10000.0, 16, interleaved, 1.0, None)
    lengths = [5, 1, 9, 3]
    positions = torch.cat([torch.arange(n) for n in lengths])
    x = drawn(len(positions), 1, 3, 24)
    for backward in (False, True):
        whole = rotary(
            x, *rotary_table(shape, positions, torch.float32), interleaved, backward
        ).split(lengths)
        for part, out, n in zip(x.split(lengths), whole, lengths, strict=True):
            own = rotary_table(shape, torch.arange(n), torch.float32)
            assert torch.equal(out, rotary(part, *own, interleaved, backward))
            assert torch.equal(out[..., 16:], part[..., 16:])


# ---- cross-entropy ---------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_valid_token_gives_finite_losses_and_zero_gradients(
    native: Native, dtype: torch.dtype
) -> None:
    target = torch.full((3,), -100)
    logits = drawn(3, 50, dtype=dtype).requires_grad_()
    loss = cross_entropy(logits, target, 0.1, 1e-3)
    loss.sum().backward()
    assert logits.grad is not None and not loss.any() and not logits.grad.any()
    grad = logits.detach().clone()
    assert torch.isfinite(cross_entropy_(grad, target, torch.zeros(3), 50, 0.1, 1e-3)).all()
    assert not grad.any()


# ---- optimizer -------------------------------------------------------------------------------
def test_many_ranges_and_empty_ones_anywhere(native: Native) -> None:
    n = 5000
    tensors = [drawn(n, seed=i, dtype=torch.float32).abs() for i in range(4)]
    generator = torch.Generator().manual_seed(0)
    drawn_bounds = torch.randint(0, n, (400,), generator=generator).tolist()
    bounds = sorted([0, 0, *drawn_bounds, n, n, n])
    rates = (0.01, 0.9, 0.95, 1e-8, 0.1)
    results = []
    for edges in ([0, n], bounds):
        kept = [x.clone() for x in tensors]
        copy = torch.empty(n, dtype=torch.bfloat16)
        for first, last in itertools.pairwise(edges):
            cut = [x[first:last] for x in (*kept, copy)]
            adamw_update(*cut, None, None, 2, *rates)
            sgd_update(*cut[:3], cut[4], None, None, 0.1, 0.9, 0.1, False)
        results.append((*kept, copy))
    assert_same(*results)
    grad = tensors[1]
    total = sum(squared_norm(grad[a:b]) for a, b in itertools.pairwise(bounds))
    torch.testing.assert_close(total, squared_norm(grad), rtol=1e-13, atol=0)
    assert squared_norm(grad[:0]).tolist() == [0.0, 0.0]


# ---- MoE -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("experts", "ids"),
    [
        (4, [[2, -1]] * 33),  # all to one expert, the others and their offsets empty
        (2, [[1, 0, 1, 1, 0]] * 3),  # more choices than experts, some twice
        (5, [[-1, -1]] * 7),  # nothing is routed
    ],
    ids=["one_expert", "k_above_experts", "all_dropped"],
)
def test_odd_routings_move_forth_and_back(
    native: Native, experts: int, ids: list[list[int]]
) -> None:
    choices = torch.tensor(ids, dtype=torch.int32)
    tokens, k = choices.shape
    rows = route_capacity(tokens * k, experts, 8)
    counts, offsets, row_of, source = moe_route(choices, experts, 8, rows)
    held = choices >= 0
    assert counts.tolist() == [int((choices == e).sum()) for e in range(experts)]
    assert torch.equal(offsets[1:] - offsets[:-1], (counts + 7) // 8 * 8)
    x, probs = drawn(tokens, 24, dtype=torch.float32), torch.rand(tokens, k)
    packed, packed_probs = moe_gather(x, probs, source, row_of)
    assert not packed[source < 0].any() and not packed_probs[source < 0].any()
    out = moe_combine(packed, probs, row_of, source)
    torch.testing.assert_close(out, x * (probs * held).sum(1, keepdim=True))
    grad = drawn(tokens, 24, seed=1, dtype=torch.float32)
    d_packed, d_probs = moe_combine_backward(grad, packed, probs, row_of, source)
    assert not d_packed[source < 0].any()
    want = ((grad * x).sum(1, keepdim=True) * held).expand(tokens, k)
    torch.testing.assert_close(d_probs, want, rtol=1e-5, atol=1e-5)


# ---- FP8 -------------------------------------------------------------------------------------
@pytest.mark.parametrize("run_native", [True, False], ids=["native", "reference"])
@pytest.mark.parametrize(("scaling", "power_of_two"), BLOCK_SCALES, ids=str)
def test_hard_blocks_come_back_finite_and_nan_as_nan(
    native: Native, scaling: Scaling, power_of_two: bool, run_native: bool
) -> None:
    """Zeros, subnormal and huge amax: finite values back, never 0 / 0; NaN and only it is NaN."""
    blocks = [torch.zeros(128), torch.linspace(-1e-40, 1e-40, 128)]
    blocks += [3e38 * torch.linspace(-1, 1, 128), torch.full((128,), 2.0**-127)]
    for block in blocks:
        x = block.repeat(128, 1)
        got = quantize(x, scaling, power_of_two=power_of_two, native=run_native)
        assert got.codes is not None and got.scale_inv is not None
        back = dequantize(got.codes, got.scale_inv, scaling, torch.float32, run_native)
        assert torch.isfinite(back).all()
        step = got.scale_inv.float().max() * 2.0**-9  # of codes below the normal ones
        error = (back.double() - x.double()).abs()
        assert (error <= 2.0**-4 * x.double().abs() + step.double() / 2 + 2.0**-149).all()
    x = torch.ones(128, 128)
    x[3, 5] = math.nan
    got = quantize(x, scaling, power_of_two=power_of_two, native=run_native)
    assert got.codes is not None
    assert got.codes.float().isnan()[3, 5]


def test_amax_of_ranks_is_the_amax_of_the_whole(native: Native) -> None:
    """What a group reduces by maximum before a delayed scale; NaN of one rank reaches all."""
    x = drawn(8, 64)
    shards = torch.stack([fp8_amax(part) for part in x.chunk(4)])
    assert torch.equal(shards.amax(0), fp8_amax(x))
    x[7, 63] = math.nan
    shards = torch.stack([fp8_amax(part) for part in x.chunk(4)])
    assert shards.amax(0).isnan().all() and fp8_amax(x).isnan().all()
