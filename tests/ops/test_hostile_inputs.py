"""Inputs that once gave wrong numbers without a word: now one error that names the argument.

What each operation refuses otherwise is tested beside the operation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.errors import UserError
from megatron_lite.native import load
from megatron_lite.native.load import Native
from megatron_lite.ops.attention import Options, attend, attention_forward
from megatron_lite.ops.cross_entropy import cross_entropy, cross_entropy_, cross_entropy_gradient_
from megatron_lite.ops.dropout import dropout_forward
from megatron_lite.ops.fp8 import fp8_delayed_update, fp8_quantize
from megatron_lite.ops.matrix import _accumulate as accumulate
from megatron_lite.ops.moe import moe_combine_backward
from megatron_lite.ops.norm import norm_backward, norm_forward
from megatron_lite.ops.optimizer import adamw_update, sgd_update

WRITERS = ("cross_entropy_", "accumulate_product", "adamw_update", "sgd_update")


def refuses(text: str) -> pytest.RaisesExc[RuntimeError]:
    return pytest.raises(RuntimeError, match=text)


def indices(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def adamw(n: int = 8, **changed: Any) -> Tensor:
    arguments: dict[str, Any] = {
        **{name: torch.zeros(n) for name in ("weight", "grad", "exp_avg", "exp_avg_sq")},
        **{"copy": None, "clip": None, "skip": None, "step": 1, "lr": 0.1},
        **{"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0},
    } | changed
    adamw_update(*arguments.values())
    return arguments["weight"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8], ids=str)
@pytest.mark.parametrize("which", ["inverse", "mean"])
def test_norm_statistics_of_another_dtype_are_refused(
    native: Native, which: str, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(4, 8), torch.ones(8)
    statistics = {"inverse": torch.ones(4), "mean": torch.ones(4)}
    statistics[which] = torch.ones(4, dtype=dtype)
    with refuses(f"{which}: dtype must be float32"):
        norm_backward(x, x, None, weight, statistics["mean"], statistics["inverse"], False)


def test_norm_of_one_row_without_batch_is_differentiable(native: Native) -> None:
    """Also by the reference, which serves machines without the library."""
    for device in ("cpu", "meta"):
        x = torch.randn(8, device=device, requires_grad=True)
        weight = torch.ones(8, device=device, requires_grad=True)
        norm_forward(x, None, weight, None, 1e-5, False)[0].sum().backward()
        assert x.grad is not None and weight.grad is not None
        assert x.grad.shape == weight.grad.shape == (8,)


def test_a_product_is_not_summed_into_overlapping_rows_or_operands(native: Native) -> None:
    a, b = torch.randn(2, 3).bfloat16(), torch.randn(2, 4).bfloat16()
    with refuses("main: rows must not overlap"):
        accumulate(torch.zeros(1, 4).expand(3, 4), a, b)
    with refuses("main: rows must not overlap"):
        accumulate(torch.zeros(9).as_strided((3, 4), (2, 1)), a, b)
    main = torch.zeros(8, 8)
    with refuses("main: is written to, must not share memory with a"):
        accumulate(main, main, torch.ones(8, 8))
    with refuses("must not share memory with b"):
        accumulate(main, torch.ones(8, 8).bfloat16(), main.view(torch.bfloat16)[:, 8:])


def test_expert_rows_that_no_assignment_names_are_refused(native: Native) -> None:
    """Their gradients were whatever the memory held."""
    rows, probs = torch.randn(2, 4), torch.ones(2, 1)
    for row_of, source, text in (
        ((-1, -1), (0, 1), "source: row 0 is assignment 0, whose row_of is -1"),
        ((0, 0), (0, 1), "source: row 1 is assignment 1, whose row_of is 0"),
        ((0, 1), (0, -1), "row_of: places 2 assignments, source has 1"),
    ):
        with refuses(text):
            moe_combine_backward(rows, rows, probs, indices(*row_of).view(2, 1), indices(*source))


def test_optimizer_ranges_that_share_memory_are_refused(native: Native) -> None:
    shared = torch.ones(12)
    with refuses("weight: is written to, must not share memory with exp_avg"):
        adamw(weight=shared[:8], exp_avg=shared[4:])
    with refuses("exp_avg: is written to, must not share memory with exp_avg_sq"):
        adamw(exp_avg=shared[:8], exp_avg_sq=shared[:8])
    with refuses("weight: is written to, must not share memory with copy"):
        adamw(weight=shared[:8], copy=shared.view(torch.bfloat16)[8:16])
    with refuses("weight: is written to, must not share memory with grad"):
        sgd_update(shared[:8], shared[1:9], None, None, None, None, 0.1, 0.0, 0.0, False)
    assert adamw(weight=shared[:4], exp_avg=shared[4:8], exp_avg_sq=shared[8:], grad=torch.ones(4),
                 n=4).isfinite().all()  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("beta1", 1.0, r"beta1: must be in \[0, 1\), not 1"),
        ("beta2", float("nan"), r"beta2: must be in \[0, 1\), not nan"),
        ("eps", -1.0, "eps: must be finite and not below 0, is -1"),
        ("lr", float("nan"), "lr: must be finite, not nan"),
        ("weight_decay", float("inf"), "weight_decay: must be finite, not inf"),
    ],
)
def test_optimizer_numbers_out_of_range_are_named(
    native: Native, name: str, value: float, text: str
) -> None:
    with refuses(text):
        adamw(8, **{name: value})


def test_delayed_scales_that_share_memory_are_refused(native: Native) -> None:
    history, scale = torch.ones(2, 3), torch.ones(3)
    with refuses("scale: is written to, must not share memory with scale_inv"):
        fp8_delayed_update(history, scale, scale, False, False, 0, 0.0, False)
    with refuses("scale_inv: is written to, must not share memory with history"):
        fp8_delayed_update(history, scale, history[1], False, False, 0, 0.0, False)
    with refuses("epsilon: must be finite in float32"):
        fp8_quantize(history, None, 1, False, True, False, False, 1e300, False, False, *[0] * 5)


def test_attention_offset_that_would_overflow_is_refused(native: Native) -> None:
    q, k = torch.randn(3, 1, 2, 8), torch.randn(5, 1, 2, 8)
    with refuses("offset: must be between -2"):
        attend(q, k, k, Options(True, 2**63 - 1, -1, 0.3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_huge_scores_never_pass_for_rows_that_see_nothing(level: str, dtype: torch.dtype) -> None:
    """Scores of 1e29 round to probabilities of 0 or inf; the row is NaN or right, never 0."""
    q, k = torch.full((3, 1, 1, 8), -1.0), torch.ones(3, 1, 1, 8)
    v = torch.full((3, 1, 1, 8), 2.0)
    for scale in (0.3, 1e5, 1.3e12, 1.7e20, 1.1e28):
        options = Options(True, 0, -1, scale).arguments()
        out, _ = attention_forward(q.to(dtype), k.to(dtype), v.to(dtype), *options)
        assert (out.isnan() | (out == 2)).all(), scale


def test_loss_factors_out_of_range_are_named(native: Native) -> None:
    logits, target, scale = torch.randn(3, 5), torch.arange(3), torch.ones(3)
    for smoothing in (-0.1, 1.1, float("nan")):
        with refuses(r"label_smoothing: must be in \[0, 1\]"):
            cross_entropy_(logits, target, scale, 5, smoothing, 0.0)
        with refuses(r"label_smoothing: must be in \[0, 1\]"):
            cross_entropy_gradient_(
                *(logits, target, scale, torch.ones(3, 3), scale, 5, 5, smoothing, 0.0)
            )
    with refuses("z_loss: must be finite and not below 0, is inf"):
        cross_entropy_(logits, target, scale, 5, 0.0, float("inf"))
    with refuses("classes: must be at least 1, is 0"):
        cross_entropy_(logits, target, scale, 0, 0.1, 0.0)


def test_loss_of_wrong_shapes_names_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"logits: must be \[..., v\] with v >= 1, not \[3, 0\]"):
        cross_entropy(torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"logits: must be \[..., v\]"):
        cross_entropy(torch.tensor(1.0), torch.tensor(0))
    with pytest.raises(ValueError, match=r"target: must have shape \[2, 3\], not \[3, 2\]"):
        cross_entropy(torch.zeros(2, 3, 5), torch.zeros(3, 2, dtype=torch.int64))


def test_wrong_shapes_are_told_with_the_right_ones(native: Native) -> None:
    with refuses(r"weight: wrong shape \[7\], must be \[8\]"):
        norm_forward(torch.zeros(4, 8), None, torch.zeros(7), None, 1e-5, False)


def test_negative_positions_are_refused(native: Native) -> None:
    x, positions, samples = torch.zeros(3, 2, 8), torch.tensor([0, -1, 2]), torch.arange(2)
    with refuses("positions: must not be negative, holds -1"):
        dropout_forward(x, None, None, positions, samples, 0.5, 1, 1)


# ---- what autograd is told of operations that write to their arguments -----------------------
def write(name: str, first: Tensor) -> None:
    """Call an operation that writes to `first`, [3, 4]."""
    if name == "cross_entropy_":
        cross_entropy_(first, torch.arange(3), torch.ones(3), 4, 0.0, 0.0)
    elif name == "accumulate_product":
        accumulate(first, torch.ones(2, 3), torch.ones(2, 4))
    elif name == "adamw_update":
        adamw(12, **{"weight": first} | {s: torch.ones(3, 4) for s in ("exp_avg", "exp_avg_sq")})
    else:
        sgd_update(first, torch.ones(3, 4), None, None, None, None, 0.1, 0.0, 0.0, False)


@pytest.mark.parametrize("name", WRITERS)
def test_values_kept_for_a_gradient_are_not_changed_unseen(native: Native, name: str) -> None:
    leaf = torch.randn(3, 4, requires_grad=True)
    kept = leaf.exp()
    with torch.no_grad():
        write(name, kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_a_loss_leaves_its_logits_usable_by_what_made_them(native: Native) -> None:
    leaf = torch.randn(3, 4, requires_grad=True)
    cross_entropy(leaf.exp(), torch.arange(3), 0.1).sum().backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("name", WRITERS)
def test_an_argument_that_requires_a_gradient_is_not_written_to(native: Native, name: str) -> None:
    for first in (
        torch.zeros(3, 4, requires_grad=True),
        torch.zeros(3, 4, requires_grad=True) + 1,
    ):
        before = first.detach().clone()
        with refuses(f"{name} writes to it without recording gradients"):
            write(name, first)
        assert torch.equal(first, before)
    with torch.no_grad():
        write(name, torch.zeros(3, 4, requires_grad=True))
    with torch.inference_mode():
        write(name, torch.zeros(3, 4))


def test_a_misspelt_instruction_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*load.LEVELS, ""):
        monkeypatch.setenv("MLITE_CPU_ISA", name)
        load._check_level()
    monkeypatch.setenv("MLITE_CPU_ISA", "avx-512")
    with pytest.raises(UserError, match="MLITE_CPU_ISA=avx-512: legal are base, avx2, avx512"):
        load._check_level()
