"""The rotary operation: native equals fp64 reference, its gradient, rules, odd inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lite.config.attention_plan import YarnShape
from megatron_lite.config.plan import RotaryShape
from megatron_lite.native.load import Native
from megatron_lite.ops.rotary import (
    _reference,
    apply_rotary,
    apply_rotary_pair,
    inverse_frequencies,
    rotary,
    rotary_pair,
    rotary_table,
)

# Largest error against fp64 on the same rounded inputs, relative to |first| + |second|, per dtype.
BOUNDS = {
    torch.float64: 1e-15,
    torch.float32: 2e-7,
    torch.bfloat16: 4e-3,
    torch.float16: 5e-4,
}
# s, b, n, d, rotated channels
SHAPES = [
    (4, 2, 3, 64, 64), (3, 1, 2, 10, 6), (1, 1, 1, 2, 2), (0, 2, 3, 8, 8), (2, 2, 0, 8, 4),
    (5, 2, 4, 96, 0), (3, 2, 1, 1200, 1100), (2, 3, 5, 7, 4),
]  # fmt: skip


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def tables(s: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    positions = torch.arange(100, 100 + s, dtype=torch.float64)
    frequencies = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) * 2 / max(dim, 1))
    angles = torch.outer(positions, frequencies)
    return angles.cos().to(wide), angles.sin().to(wide)


def check(x: Tensor, dim: int, interleaved: bool) -> None:
    cosine, sine = tables(x.size(0), dim, x.dtype)
    for backward in (False, True):
        got = rotary(x, cosine, sine, interleaved, backward)
        exact = _reference(x.double(), cosine.double(), sine.double(), interleaved, backward)
        assert got.shape == x.shape and got.dtype == x.dtype and got.is_contiguous()
        scale = 2 * x.double().abs().amax(-1, keepdim=True) if x.numel() else 1.0
        assert ((got.double() - exact).abs() <= BOUNDS[x.dtype] * scale).all()
        assert torch.equal(got[..., dim:], x[..., dim:])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_native_rotation_matches_float64(
    native: Native, interleaved: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    *sizes, dim = shape
    check(drawn(*sizes, dtype=dtype), dim, interleaved)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_every_level_agrees_with_the_reference(level: str, dtype: torch.dtype) -> None:
    for interleaved in (False, True):
        check(drawn(3, 2, 4, 70, dtype=dtype, seed=1), 54, interleaved)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_heads_of_a_fused_projection_are_rotated_where_they_lie(
    native: Native, interleaved: bool
) -> None:
    s, b, n, g, d = 5, 2, 4, 2, 16
    storage = drawn(s * b * (n + 2 * g) * d + 1, dtype=torch.bfloat16)
    qkv = storage[1:].view(s, b, -1)
    q, k, _ = (t.unflatten(-1, (-1, d)) for t in qkv.split((n * d, g * d, g * d), dim=-1))
    cosine, sine = tables(s, d, torch.bfloat16)
    before = storage.clone()
    got = rotary_pair(q, k, cosine, sine, interleaved, False)
    for x, out in zip((q, k), got, strict=True):
        assert torch.equal(out, rotary(x.contiguous(), cosine, sine, interleaved, False))
    assert torch.equal(storage, before)
    other = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(rotary(other, cosine, sine, interleaved, False), got[0])
    last_strided = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(rotary(last_strided, cosine, sine, interleaved, False), got[0])


def test_results_do_not_depend_on_threads(native: Native) -> None:
    x = drawn(301, 2, 4, 32, dtype=torch.float32)
    cosine, sine = tables(301, 32, x.dtype)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(rotary(x, cosine, sine, True, False))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_autograd_and_fake_rules(native: Native, interleaved: bool) -> None:
    q = drawn(3, 2, 2, 6, dtype=torch.float64).requires_grad_()
    k = drawn(3, 2, 1, 6, dtype=torch.float64, seed=1).requires_grad_()
    table = tables(3, 4, torch.float64)
    torch.library.opcheck(rotary, (q, *table, interleaved, False))
    torch.library.opcheck(rotary_pair, (q, k, *table, interleaved, True))
    assert torch.autograd.gradcheck(lambda q: rotary(q, *table, interleaved, False), q)
    assert torch.autograd.gradcheck(
        lambda q, k: rotary_pair(q, k, *table, interleaved, False), (q, k)
    )
    for native_run in (False, True):
        assert torch.autograd.gradcheck(
            lambda q, k, run=native_run: apply_rotary_pair(q, k, table, interleaved, run), (q, k)
        )
        assert torch.autograd.gradcheck(
            lambda q, run=native_run: apply_rotary(q, table, interleaved, run), q
        )


def test_bad_input_is_refused_with_its_name(native: Native) -> None:
    x = torch.zeros(3, 2, 2, 8)
    cosine, sine = tables(3, 8, x.dtype)
    with pytest.raises(RuntimeError, match=r"x: must have shape \[s, b, n, d\], not 3 dims"):
        rotary(x[0], cosine, sine, False, False)
    with pytest.raises(RuntimeError, match="cosine: dtype must be float32"):
        rotary(x, cosine.double(), sine, False, False)
    with pytest.raises(RuntimeError, match="sine: width differs"):
        rotary(x, cosine, sine[:, :2].contiguous(), False, False)
    with pytest.raises(RuntimeError, match="cosine: rotates more channels"):
        rotary(x[..., :6], cosine, sine, False, False)
    with pytest.raises(RuntimeError, match="cosine: must have shape"):
        rotary(x[:2], cosine, sine, False, False)
    with pytest.raises(RuntimeError, match="sine: must be contiguous"):
        rotary(x, cosine, sine.t().contiguous().t(), False, False)
    with pytest.raises(RuntimeError, match="x: dtype must be"):
        rotary(x.int(), cosine, sine, False, False)
    with pytest.raises(RuntimeError, match="k: dtype differs"):
        rotary_pair(x, x.half(), cosine, sine, False, False)


# ---- YaRN -------------------------------------------------------------------------------------
SCALINGS = {
    "gpt-oss": {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "deepseek-v3": {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_slow": 1},
    "deepseek-v2": {"factor": 40, "mscale": 0.707, "mscale_all_dim": 1.3},
    "one pair": {"factor": 4.0, "beta_fast": 1.00001, "beta_slow": 1.0, "truncate": False},
    "all slowed": {"factor": 2.5, "original_max_position_embeddings": 4},
}


@pytest.mark.parametrize("base", [10000, 150000])
@pytest.mark.parametrize("name", SCALINGS)
def test_yarn_equals_transformers_own_in_float64(
    name: str, base: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the [convert] extra")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"original_max_position_embeddings": 4096, **SCALINGS[name]}
    shape = YarnShape(
        factor=scaling["factor"],
        original_positions=scaling["original_max_position_embeddings"],
        beta_fast=scaling.get("beta_fast", 32.0),
        beta_slow=scaling.get("beta_slow", 1.0),
        mscale=scaling.get("mscale", 1.0),
        mscale_all_dim=scaling.get("mscale_all_dim", 0.0),
        whole_channels=scaling.get("truncate", True),
    )
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "yarn", "rope_theta": float(base), **scaling},
    )
    for wide in ("float", "float32"):  # in which it computes
        monkeypatch.setattr(torch, wide, torch.float64)
    wanted, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    monkeypatch.undo()
    assert wanted.dtype == torch.float64
    rotary_shape = RotaryShape(float(base), 64, False, 1.0, None, shape)
    torch.testing.assert_close(
        inverse_frequencies(rotary_shape, torch.float64), wanted, rtol=1e-12, atol=0
    )
    assert shape.magnitude == pytest.approx(magnitude, rel=1e-14)
    positions = torch.tensor([0, 1, 77, 4096])
    cosine, sine = rotary_table(rotary_shape, positions, torch.float64)
    angles = torch.outer(positions.double(), wanted)
    torch.testing.assert_close(cosine, angles.cos() * magnitude, rtol=0, atol=1e-9)
    torch.testing.assert_close(sine, angles.sin() * magnitude, rtol=0, atol=1e-9)


def test_yarn_by_a_factor_of_one_is_plain_rotary() -> None:
    plain = RotaryShape(10000.0, 64, False, 1.0, None)
    yarn = YarnShape(1.0, 4096, 32.0, 1.0, 1.0, 0.0, True)
    scaled = RotaryShape(10000.0, 64, False, 1.0, None, yarn)
    made = [inverse_frequencies(shape, torch.float64) for shape in (plain, scaled)]
    torch.testing.assert_close(*made, rtol=1e-15, atol=0)
    assert yarn.magnitude == yarn.score_factor == 1.0
