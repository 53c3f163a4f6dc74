"""The equality classes: what "the same numbers" means, in one table.

Logical gradients are compared at step 1 before clipping, by the norm of the difference
relative to the tensor's norm, with a floor for tensors whose true gradient is zero (a key
bias without rotary). Loss curves alone prove nothing: a halved norm gradient moves a loss
by 1e-9.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerances:
    """Relative limits unless stated otherwise.

    Attributes:
        name: of the class.
        activation: norm of the difference of a dumped activation at step 1.
        loss: of every step.
        gradient: norm of the difference per logical tensor at step 1.
        grad_norm: of every step.
        weight: max abs difference after the last step.
        update: norm of the difference of (last - first) weights per tensor.
        floor: share of the global norm below which a tensor counts as that large.
    """

    name: str
    activation: float
    loss: float
    gradient: float
    grad_norm: float
    weight: float
    update: float
    floor: float = 1e-6


MATCH64 = Tolerances(
    "MATCH64", activation=1e-10, loss=1e-10, gradient=1e-10, grad_norm=1e-10, weight=1e-10,
    update=1e-9,
)  # fmt: skip
# A gradient that is 0 in truth is rounding noise: in fp32 of 1e-11 of the global norm.
MATCH32 = Tolerances(
    "MATCH32", activation=1e-5, loss=2e-6, gradient=1e-5, grad_norm=2e-5, weight=2e-6, update=1e-3,
    floor=1e-5,
)  # fmt: skip
# Adam divides by the root of a tiny second moment: rounding decides small updates.
MATCH32_ADAM = Tolerances(
    "MATCH32 after Adam", activation=1e-5, loss=1e-4, gradient=1e-5, grad_norm=1e-3, weight=4e-4,
    update=float("inf"), floor=1e-5,
)  # fmt: skip
BITWISE = Tolerances(
    "BITWISE", activation=0.0, loss=0.0, gradient=0.0, grad_norm=0.0, weight=0.0, update=0.0,
)  # fmt: skip
