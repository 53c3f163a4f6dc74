"""Compare two runs in the order in which an error would spread.

A run that fails (phase "run") is the first difference of all. Within a step come data (which
samples), init (weights before step 1), activation, loss, gradient, norm, update; the steps
one after the other; last, whether ranks that hold the same region hold the same bits (phase
"replica": a dump only shows one of them). Activations are in forward order, gradients in
backward order, so the first difference names the tensor next to the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_lite.verify.classes import Tolerances
from megatron_lite.verify.dumps import RunRecord

PHASES = ("run", "data", "init", "activation", "loss", "gradient", "norm", "update", "replica")
_Tensors = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Difference:
    """One figure that is not within its limit.

    Attributes:
        phase: entry of `PHASES`.
        name: tensor, sample or metric.
        step: one-based; 0 is before the first step.
        value: measured; infinite where one side lacks the tensor or a number is not finite.
        limit: what the equality class allows.
        scale: norm ratio candidate / reference for tensors (0.5 and 2 tell a lost or a
            doubled contribution), else None.
    """

    phase: str
    name: str
    step: int
    value: float
    limit: float
    scale: float | None = None

    def __str__(self) -> str:
        """One line for a person."""
        ratio = "" if self.scale is None else f", norm ratio {self.scale:.4g}"
        return (
            f"{self.phase} of {self.name} at step {self.step}: differs by {self.value:.3g}, "
            f"allowed {self.limit:.3g}{ratio}"
        )


def compare_runs(
    reference: RunRecord, candidate: RunRecord, limits: Tolerances, order: Sequence[str] = ()
) -> list[Difference]:
    """All differences beyond the limits, the one next to the cause first.

    Args:
        reference: the run that is right.
        candidate: the run in question.
        limits: its equality class.
        order: logical parameter names in forward order; names that are not in it come last.
    """
    places = {name: place for place, name in enumerate(order)}
    found = [
        *_compare_samples(reference, candidate),
        *_compare_tensors(reference, candidate, "act", "activation", limits.activation, limits),
        *_compare_losses(reference, candidate, limits.loss),
        *_compare_tensors(reference, candidate, "grad", "gradient", limits.gradient, limits),
        *_compare_metric(reference, candidate, "grad_norm", "norm", limits.grad_norm),
        *_compare_updates(reference, candidate, limits),
    ]

    def cause(difference: Difference) -> tuple[int, int, int]:
        place = places.get(difference.name, len(places))
        if difference.phase == "activation":
            place = _activation_place(difference.name)
        elif difference.phase == "gradient":
            place = -place if difference.name in places else 1
        return difference.step, PHASES.index(difference.phase), place

    return sorted(found, key=cause)


def _activation_place(name: str) -> int:
    """Forward order of dumped activations."""
    if name == "embedding":
        return -1
    number = name.rpartition(".")[2]
    return int(number) if number.isdigit() else 1_000_000


def _compare_samples(reference: RunRecord, candidate: RunRecord) -> Iterator[Difference]:
    keys = ("consumed_index", "dataset", "dataset_index", "valid_tokens")
    for step in range(1, reference.steps + 1):
        wanted, got = reference.samples(step), candidate.samples(step)
        if [[r[k] for k in keys] for r in wanted] != [[r[k] for k in keys] for r in got]:
            yield Difference("data", "the samples of the global batch", step, np.inf, 0.0)


def _compare_losses(
    reference: RunRecord, candidate: RunRecord, limit: float
) -> Iterator[Difference]:
    """The loss, and those of routers and of multi-token prediction, where there are any."""
    names = reference.train_rows[0] if reference.train_rows else {}
    further = [name for name in names if name.endswith("_loss") and name != "lm_loss"]
    for name in ("lm_loss", *further):
        yield from _compare_metric(reference, candidate, name, "loss", limit)


def _compare_metric(
    reference: RunRecord, candidate: RunRecord, key: str, phase: str, limit: float
) -> Iterator[Difference]:
    if reference.steps != candidate.steps:
        yield Difference(phase, "the number of steps", candidate.steps, np.inf, 0.0)
        return
    for wanted, got in zip(reference.train_rows, candidate.train_rows, strict=True):
        value = _relative(wanted[key], got.get(key))
        if not value <= limit:
            yield Difference(phase, key, wanted["iteration"], value, limit)


def _relative(wanted: float | None, got: float | None) -> float:
    if wanted is None or got is None:  # written for non-finite numbers: equals nothing
        return float("inf")
    if wanted == got:
        return 0.0
    return abs(got - wanted) / max(abs(wanted), 1e-300)


def _norm(values: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(values.astype(np.float64).ravel()))


def _tensor_differences(
    wanted: _Tensors, got: _Tensors, phase: str, step: int, limit: float, floor: float
) -> Iterator[Difference]:
    """Norm of the difference per tensor; `floor` is the absolute norm floor."""
    for name in [*wanted, *(name for name in got if name not in wanted)]:
        if name not in got or name not in wanted or wanted[name].shape != got[name].shape:
            yield Difference(phase, f"{name} (missing or of another shape)", step, np.inf, limit)
            continue
        size = _norm(wanted[name])
        value = _norm(got[name].astype(np.float64) - wanted[name]) / max(size, floor, 1e-300)
        if not value <= limit:
            ratio = _norm(got[name]) / size if size else None
            yield Difference(phase, name, step, value, limit, ratio)


def _global_norm(tensors: _Tensors) -> float:
    return float(np.sqrt(sum(_norm(values) ** 2 for values in tensors.values())))


def _compare_tensors(
    reference: RunRecord,
    candidate: RunRecord,
    kind: str,
    phase: str,
    limit: float,
    limits: Tolerances,
) -> Iterator[Difference]:
    wanted, got = reference.tensors(1, kind), candidate.tensors(1, kind)
    floor = limits.floor * _global_norm(wanted)
    yield from _tensor_differences(wanted, got, phase, 1, limit, floor)


def _compare_updates(
    reference: RunRecord, candidate: RunRecord, limits: Tolerances
) -> Iterator[Difference]:
    """The weights before step 1, after it, and after the last step."""
    last = reference.steps
    if candidate.steps != last:
        return
    start, start_got = reference.tensors(0, "weight"), candidate.tensors(0, "weight")
    yield from _tensor_differences(start, start_got, "init", 0, 0.0, 0.0)
    for step in sorted({1, last}):
        wanted, got = reference.tensors(step, "weight"), candidate.tensors(step, "weight")
        for name in wanted:
            if name in got and got[name].shape == wanted[name].shape and wanted[name].size:
                value = float(np.abs(got[name].astype(np.float64) - wanted[name]).max())
                if not value <= limits.weight:
                    yield Difference("update", name, step, value, limits.weight)
        change = {n: values.astype(np.float64) - start[n] for n, values in wanted.items()}
        moved = {
            n: values.astype(np.float64) - start_got[n]
            for n, values in got.items()
            if n in start_got and start_got[n].shape == values.shape
        }
        floor = limits.floor * _global_norm(change)
        yield from _tensor_differences(change, moved, "update", step, limits.update, floor)
