"""Offsets beyond 2^31 elements on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_lite.ops.activation import activation_forward
from megatron_lite.ops.norm import norm_backward, norm_forward

pytestmark = pytest.mark.gpu
H = 4096
ROWS = 2**31 // H + 3
NEEDED_BYTES = 4 * ROWS * H * 2 + 2**30


@pytest.fixture
def rows(place: str) -> int:
    """As many as pass 2^31 elements; a handful where the test only proves itself."""
    if place != "cuda":
        return 40
    free = torch.cuda.mem_get_info()[0]
    if free < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES >> 30} GiB of device memory, {free >> 30} are free")
    return ROWS


def test_norm_beyond_two_to_the_31_elements(device: torch.device, rows: int) -> None:
    x = torch.zeros(rows, H, dtype=torch.bfloat16, device=device)
    tail = torch.linspace(-2, 3, 5 * H, device=device).view(5, H).to(x.dtype)
    x[-5:] = tail
    weight = torch.linspace(0.5, 1.5, H, device=device).to(x.dtype)
    out, _, _, inverse = norm_forward(x, None, weight, None, 1e-5, False)
    wanted, _, _, _ = norm_forward(tail, None, weight, None, 1e-5, False)
    assert torch.equal(out[-5:], wanted)
    assert not out[:-5].any()
    del out
    grad_x, grad_weight, _ = norm_backward(x, x, None, weight, None, inverse, False)
    few = norm_backward(tail, tail, None, weight, None, inverse[-5:].contiguous(), False)
    assert torch.equal(grad_x[-5:], few[0])
    torch.testing.assert_close(grad_weight, few[1], rtol=1e-5, atol=1e-5)


def test_activation_beyond_two_to_the_31_elements(device: torch.device, rows: int) -> None:
    x = torch.zeros(rows, H, dtype=torch.bfloat16, device=device)
    x[-1] = torch.linspace(-4, 4, H, device=device).to(x.dtype)
    out = activation_forward(x, "silu", False, math.inf)
    assert torch.equal(out[-1], activation_forward(x[-1:], "silu", False, math.inf)[0])
    assert not out[:-1].any()
