"""Newton-Schulz against the singular value decomposition, and its closed properties."""

import math

import pytest
import torch
from torch import Tensor

from megatron_lite.config.muon_coefficients import COEFFICIENTS, coefficient_steps, steps_fault
from megatron_lite.optim.newton_schulz import (
    EPS,
    iteration_dtype,
    orthogonalize,
    orthogonalize_all,
    scale_factor,
)

QUINTIC = coefficient_steps("quintic", 5)
SHAPES = [(5, 5), (3, 11), (11, 3), (1, 7), (7, 1), (1, 1), (33, 64)]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def by_svd(matrix: Tensor, kind: str, count: int) -> Tensor:
    """The same polynomial on the singular values: no product of matrices is iterated."""
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    values = values / max(float(values.square().sum().sqrt()), EPS)
    for a, b, c in coefficient_steps(kind, count):
        values = a * values + b * values**3 + c * values**5
    return u * values @ vh


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "count"), [("simple", 5), ("quintic", 5), ("polar_express", 9), ("aol", 4)]
)
def test_the_iteration_is_its_polynomial_on_the_singular_values(
    shape: tuple[int, int], kind: str, count: int
) -> None:
    matrix = draw(*shape)
    found = orthogonalize(matrix, coefficient_steps(kind, count))
    torch.testing.assert_close(found, by_svd(matrix, kind, count), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_convergent_iteration_gives_the_polar_factor(shape: tuple[int, int]) -> None:
    matrix = draw(*shape)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalize(matrix, coefficient_steps("polar_express", 30))
    torch.testing.assert_close(found, u @ vh, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_singular_values_end_near_one(kind: str) -> None:
    matrix = draw(48, 96)
    steps = coefficient_steps(kind, 8 if kind in ("polar_express", "aol") else 5)
    values = torch.linalg.svdvals(orthogonalize(matrix, steps))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_it_commutes_with_transposition_and_ignores_scale() -> None:
    matrix = draw(6, 9)
    found = orthogonalize(matrix, QUINTIC)
    assert torch.equal(orthogonalize(matrix.mT, QUINTIC), found.mT)
    assert found.is_contiguous() and orthogonalize(matrix.mT, QUINTIC).is_contiguous()
    torch.testing.assert_close(orthogonalize(matrix * 3e4, QUINTIC), found, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(orthogonalize(-matrix, QUINTIC), -found, rtol=0, atol=0)


def test_it_commutes_with_rotations() -> None:
    matrix = draw(6, 9)
    left, _ = torch.linalg.qr(draw(6, 6))
    right, _ = torch.linalg.qr(draw(9, 9))
    turned = orthogonalize(left @ matrix @ right, QUINTIC)
    expected = left @ orthogonalize(matrix, QUINTIC) @ right
    torch.testing.assert_close(turned, expected, rtol=1e-12, atol=1e-12)


def test_a_zero_matrix_stays_zero_and_the_input_is_left_alone() -> None:
    assert not orthogonalize(torch.zeros(4, 3), QUINTIC).any()
    matrix = draw(4, 6)
    before = matrix.clone()
    orthogonalize(matrix, QUINTIC)
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_batch_of_mixed_shapes_is_its_matrices(dtype: torch.dtype) -> None:
    matrices = [draw(4, 6, dtype=dtype) * n for n in (1, 2)]
    matrices += [draw(6, 4, dtype=dtype), draw(3, 3, dtype=dtype), draw(4, 6, dtype=dtype) - 1]
    found = orthogonalize_all(matrices, QUINTIC)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    for matrix, one in zip(matrices, found, strict=True):
        assert one.dtype == dtype and one.shape == matrix.shape
        alone = orthogonalize(matrix, QUINTIC)
        torch.testing.assert_close(one, alone, rtol=tolerance, atol=tolerance)
    assert orthogonalize_all([], QUINTIC) == []


def test_single_precision_is_near_double() -> None:
    matrix = draw(33, 64)
    found = orthogonalize(matrix.float(), QUINTIC)
    difference = (found.double() - orthogonalize(matrix, QUINTIC)).norm() / found.norm()
    assert float(difference) < 1e-4


def test_double_stays_double_and_only_cuda_narrows() -> None:
    double, single = torch.empty(1, dtype=torch.float64), torch.empty(1)
    assert iteration_dtype(double, "low") == torch.float64
    assert iteration_dtype(single, "medium") == torch.float32

    class OnCuda:
        device, dtype = torch.device("cuda"), torch.float32

    on_cuda: Tensor = OnCuda()  # type: ignore[assignment]
    assert iteration_dtype(on_cuda, "medium") == torch.bfloat16
    assert iteration_dtype(on_cuda, "high") == torch.float32


@pytest.mark.parametrize(
    ("mode", "wide", "tall"),
    [
        ("spectral", 4.0, 4.0),
        ("unit_rms_norm", 0.5, 2.0),
        ("shape_scaling", 1.0, 2.0),
    ],
)
def test_scale_factors_follow_the_logical_shape(mode: str, wide: float, tall: float) -> None:
    assert scale_factor(4, 16, mode) == wide
    assert scale_factor(16, 4, mode) == tall
    with pytest.raises(ValueError, match="other"):
        scale_factor(1, 1, "other")


def test_the_spectral_scale_gives_an_update_of_rms_one() -> None:
    found = orthogonalize(draw(40, 40), coefficient_steps("polar_express", 30))
    rms = float((found * scale_factor(40, 40, "spectral")).square().mean().sqrt())
    assert rms == pytest.approx(1.0, rel=1e-5)


def test_numbers_of_steps_must_fill_the_set() -> None:
    assert coefficient_steps("quintic", 10) == COEFFICIENTS["quintic"] * 2
    assert coefficient_steps("polar_express", 10)[8:] == COEFFICIENTS["polar_express"][-1:] * 2
    assert coefficient_steps("simple", 3) == COEFFICIENTS["simple"] * 3
    assert "5 or 10" in steps_fault("quintic", 6)
    assert "at least 8" in steps_fault("polar_express", 7)
    assert "at least 1" in steps_fault("simple", 0)
    with pytest.raises(ValueError, match="multiple of 4"):
        coefficient_steps("aol", 5)


def test_it_takes_the_flops_that_it_states() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    m, n = 8, 12
    with FlopCounterMode(display=False) as counter:
        orthogonalize(draw(n, m), QUINTIC)
    assert counter.get_total_flops() == 5 * (4 * m * m * n + 2 * m**3)
    assert math.isclose(5 * (4 * 64 * 8 + 2 * 512) / 8**3, 30)
