"""Shared by the parity tests: one reference run per model, precision and batch."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_lite.verify.certify import Certifier
from megatron_lite.verify.classes import MATCH32, MATCH64, Tolerances
from tests.parity.models import parity_case
from tests.pool import RankPool

Certifiers = Callable[..., Certifier]


@pytest.fixture(scope="session")
def certifier_of(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Certifiers:
    """`certifier_of(model, precision, extra, batch=...)`: its reference runs once per session."""
    made: dict[tuple[object, ...], Certifier] = {}
    root: Path = tmp_path_factory.mktemp("parity")

    def find(
        model: str,
        precision: str = "fp64",
        extra: str = "",
        steps: int = 5,
        limits: Tolerances | None = None,
        **sizes: int,
    ) -> Certifier:
        key = (model, precision, extra, steps, limits, *sizes.items())
        if key not in made:
            case = parity_case(
                model, root / "data", precision=precision, extra=extra, steps=steps, **sizes
            )
            limits = limits or (MATCH64 if precision == "fp64" else MATCH32)
            made[key] = Certifier(rank_pool, root / str(len(made)), case, limits)
        return made[key]

    return find
