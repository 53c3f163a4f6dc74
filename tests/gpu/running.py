"""Run a problem of `problems.py` on a device, and compare what came out with its reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.gpu.problems import BOUNDS, Problem


def placed(x: Any, device: torch.device) -> Any:
    """A copy on the device with the same strides, whatever lies between its elements."""
    if not isinstance(x, Tensor):
        return x
    if x.numel() == 0:
        return x.to(device, copy=True)
    held = x.untyped_storage().nbytes() // x.element_size()
    flat = x.as_strided((held,), (1,), 0).to(device, copy=True)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


def widened(x: Any) -> Any:
    """In float64 where it is floating."""
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def outputs(problem: Problem, call: Any, arguments: list[Any]) -> list[Tensor]:
    """What a call returned, then the arguments it wrote."""
    out = call(*arguments)
    results = [] if out is None else [out] if isinstance(out, Tensor) else list(out)
    return results + [arguments[number] for number in problem.written]


def run(problem: Problem, device: torch.device) -> list[Tensor]:
    """Results of the operation on the device."""
    return outputs(problem, problem.operation, [placed(x, device) for x in problem.arguments])


def expected(problem: Problem, device: torch.device) -> list[Tensor]:
    """Results of the reference, on the device so that large problems take no time."""
    arguments = [placed(x, device) for x in problem.arguments]
    if not problem.exact:
        arguments = [widened(x) for x in arguments]
    return outputs(problem, problem.reference, arguments)


def bits(x: Tensor) -> Tensor:
    """Bytes of a tensor: NaN equals NaN."""
    return x.new_empty(x.numel()).copy_(x.flatten()).view(torch.uint8)


def assert_same_bits(got: list[Tensor], wanted: list[Tensor], name: str) -> None:
    assert len(got) == len(wanted), name
    for number, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{name}, result {number}"
        assert torch.equal(bits(a), bits(b)), f"{name}, result {number}: bits differ"


def assert_near(problem: Problem, got: list[Tensor], wanted: list[Tensor]) -> None:
    """Within the bound of each result's dtype; -inf only where it belongs."""
    name = str(problem.operation)
    if problem.exact:
        assert_same_bits(got, wanted, name)
        return
    assert len(got) == len(wanted), name
    for number, (a, b) in enumerate(zip(got, wanted, strict=True)):
        where = f"{name}, result {number} {tuple(b.shape)} {a.dtype}"
        assert a.shape == b.shape, where
        if not a.numel():
            continue
        limit = problem.slack * BOUNDS[a.dtype]
        finite = b.isfinite()
        assert torch.equal(a.double()[~finite], b.double()[~finite]), where
        exact, value = b.double()[finite], a.double()[finite]
        scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
        error = (value - exact).abs().max().item() / scale if exact.numel() else 0.0
        assert error <= limit, f"{where}: {error:.2e} > {limit:.2e}"


def check(problem: Problem, device: torch.device) -> None:
    """Run and compare."""
    assert_near(problem, run(problem, device), expected(problem, device))


def spread_out(x: Tensor) -> Tensor:
    """The same values as a misaligned view of rows that lie further apart, NaN between."""
    wide = x.new_empty(*x.shape[:-1], x.shape[-1] + 5)
    wide.fill_(torch.nan)
    view = wide[..., 1 : 1 + x.shape[-1]]
    return view.copy_(x)
