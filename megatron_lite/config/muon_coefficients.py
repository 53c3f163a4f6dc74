"""Coefficients of the Newton-Schulz iterations, by the name `--muon-coefficient-type` gives.

An iteration is X <- a X + (b A + c A A) X with A = X X^T. `simple` are Keller Jordan's
coefficients (kellerjordan.github.io/posts/muon), `quintic` those of modded-nanogpt, whose
slope at 0 is steepest, `polar_express` those of arXiv 2505.16932, `aol` those of
flash-newton-schulz. Torch-free, so that a wrong number of steps is refused before a run.
"""

from __future__ import annotations

from collections.abc import Mapping

Step = tuple[float, float, float]

COEFFICIENTS: Mapping[str, tuple[Step, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}
SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")


def steps_fault(kind: str, steps: int) -> str:
    """Say what is wrong with a number of steps, or ''; `kind` is one of `COEFFICIENTS`."""
    length = len(COEFFICIENTS[kind])
    if steps < 1:
        return f"must be at least 1; nearest legal: {length if kind != 'simple' else 1}"
    if kind == "polar_express":
        return f"must be at least {length} with {kind}" if steps < length else ""
    if steps % length:
        low = steps // length * length
        near = f"{low} or {low + length}" if low else f"{length}"
        return f"must be a multiple of {length} with {kind}; nearest legal: {near}"
    return ""


def coefficient_steps(kind: str, steps: int) -> tuple[Step, ...]:
    """Coefficients of each of `steps` iterations.

    A set is repeated as a whole; of `polar_express`, which converges, its last step is.

    Raises:
        ValueError: the set does not fill that many steps: the rules have not been asked.
    """
    fault = steps_fault(kind, steps)
    if fault:
        raise ValueError(f"{steps} steps {fault}")
    rows = COEFFICIENTS[kind]
    if kind == "polar_express":
        return rows + rows[-1:] * (steps - len(rows))
    return rows * (steps // len(rows))
