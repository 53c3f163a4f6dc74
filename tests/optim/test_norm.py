"""The clip coefficient and the accuracy of the squared norm."""

import math

import pytest
import torch

from megatron_lite.optim.norm import SquaredNorm, clip_coefficient, global_norm
from megatron_lite.shard.pieces import Range

BUCKET = 0
both = pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])


@pytest.mark.parametrize(
    ("norm", "clip", "coefficient"),
    [
        (2.0, 1.0, 1.0 / (2.0 + 1e-6)),
        (0.5, 1.0, 1.0),
        (1.0, 1.0, 1.0 / (1.0 + 1e-6)),
        (1.0 - 1e-6, 1.0, 1.0),
        (5.0, 0.0, 1.0),
        (0.0, 1.0, 1.0),
    ],
)
def test_clip_coefficient_is_megatrons(norm: float, clip: float, coefficient: float) -> None:
    assert clip_coefficient(norm, clip) == pytest.approx(coefficient, rel=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_sum_stays_non_finite(bad: float) -> None:
    assert not math.isfinite(global_norm(bad))


@both
@pytest.mark.parametrize("length", [1, 1023, 1024, 1025, 100_003])
def test_blocks_lose_nothing_of_a_range(length: int, native: bool) -> None:
    gradients = {BUCKET: torch.full((length + 10,), 3.0)}
    squares, _ = SquaredNorm(gradients, [Range(BUCKET, 5, 5 + length)], native)()
    assert squares.item() == pytest.approx(9.0 * length, rel=1e-7)


@both
def test_fp32_norms_are_within_1e_7_of_fp64(native: bool) -> None:
    gradient = torch.randn(3_000_000, generator=torch.Generator().manual_seed(1))
    squares, _ = SquaredNorm({BUCKET: gradient}, [Range(BUCKET, 0, len(gradient))], native)()
    exact = gradient.double().square().sum().item()
    assert math.sqrt(squares.item()) == pytest.approx(math.sqrt(exact), rel=1e-7)


def test_a_rank_that_speaks_for_nothing_adds_zero() -> None:
    squares, nonfinite = SquaredNorm({BUCKET: torch.full((64,), math.nan)}, [])()
    assert (squares.item(), nonfinite.item()) == (0.0, 0.0)
