"""The kernels of this folder, built once; skipped where kernels cannot be simulated."""

from collections.abc import Iterator

import pytest

from tests.sim import build

SOURCES = tuple(f"tests/sim/kernels/{name}.cu" for name in ("features", "tensor_core", "faults"))


@pytest.fixture(scope="session")
def kernels() -> build.Kernels:
    """Every test kernel, in the mode of this process."""
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    return build.load(SOURCES)


@pytest.fixture(params=["fwd", "rev", "rand:1"])
def ordered(request: pytest.FixtureRequest, kernels: build.Kernels) -> Iterator[build.Kernels]:
    """The kernels, with blocks, warps and lanes run in each order."""
    with kernels.options(order=request.param):
        yield kernels
