"""The rows of `--metrics-jsonl`: header, train, valid, event.

Other people's scripts read them, so keys are stable, floats carry 17 significant digits
(a float64 survives the round trip) and a non-finite number is null, never NaN, which is
not JSON. Rows hold Python numbers that the step already has: nothing here reads a tensor.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_lite import __version__
from megatron_lite.telemetry.lines import perplexity

VERSIONED_PACKAGES = ("torch", "numpy", "safetensors", "sentencepiece")


@dataclass(frozen=True)
class TrainRow:
    """One iteration as the step knows it.

    Attributes:
        consumed_samples: after this iteration.
        lm_loss: mean over the valid tokens of this iteration's global batch.
        grad_norm: before clipping; None where it is not computed.
        learning_rate: the rate used in this iteration.
        skipped: the update was left out on every rank.
        nan: the loss or a gradient was not finite.
        elapsed_ms: wall time of the iteration.
        further_losses: key of the row -> value, in printing order.
        figures: key of the row -> value, for rows and scalars and not for the log line: what
            the routers of a mixture of experts did.
        skipped_samples: samples passed over so far by request, not trained on.
    """

    iteration: int
    consumed_samples: int
    lm_loss: float
    grad_norm: float | None
    learning_rate: float
    weight_decay: float
    global_batch_size: int
    valid_tokens: int
    loss_scale: float
    skipped: bool
    nan: bool
    elapsed_ms: float
    further_losses: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    skipped_samples: int = 0
    num_zeros: int | None = None
    params_norm: float | None = None


@dataclass(frozen=True)
class Rates:
    """What the facade derives from a train row and the plan.

    Attributes:
        tokens_per_s: tokens of the global batch, valid or not, per second of all ranks.
        model_tflops_per_rank: model FLOPs by the header's convention.
        mfu: fraction of the header's peak; None without a calibration.
    """

    tokens_per_s: float | None
    model_tflops_per_rank: float | None
    mfu: float | None


@dataclass(frozen=True)
class ValidRow:
    """One evaluation: the token mean over the evaluated samples of a split."""

    iteration: int
    split: str
    lm_loss: float
    valid_tokens: int
    further_losses: Mapping[str, float] = field(default_factory=dict)


def train_record(row: TrainRow, rates: Rates) -> dict[str, object]:
    """The "train" row; optional statistics only when they were computed."""
    record: dict[str, object] = {
        "kind": "train",
        "iteration": row.iteration,
        "consumed_samples": row.consumed_samples,
        "lm_loss": row.lm_loss,
        "grad_norm": row.grad_norm,
        "learning_rate": row.learning_rate,
        "weight_decay": row.weight_decay,
        "global_batch_size": row.global_batch_size,
        "valid_tokens": row.valid_tokens,
        "loss_scale": row.loss_scale,
        "skipped": row.skipped,
        "nan": row.nan,
        "elapsed_ms": row.elapsed_ms,
        "tokens_per_s": rates.tokens_per_s,
        "model_tflops_per_rank": rates.model_tflops_per_rank,
        "mfu": rates.mfu,
    }
    if row.num_zeros is not None:
        record["num_zeros"] = row.num_zeros
    if row.params_norm is not None:
        record["params_norm"] = row.params_norm
    return _extend(_extend(record, row.further_losses), row.figures)


def valid_record(row: ValidRow) -> dict[str, object]:
    """The "valid" row."""
    record: dict[str, object] = {
        "kind": "valid",
        "iteration": row.iteration,
        "split": row.split,
        "lm_loss": row.lm_loss,
        "ppl": perplexity(row.lm_loss),
        "valid_tokens": row.valid_tokens,
    }
    return _extend(record, row.further_losses)


def event_record(name: str, iteration: int, details: Mapping[str, object]) -> dict[str, object]:
    """The "event" row; details are further keys of the row."""
    return _extend({"kind": "event", "event": name, "iteration": iteration}, details)


def _extend(record: dict[str, object], further: Mapping[str, object]) -> dict[str, object]:
    taken = record.keys() & further.keys()
    if taken:
        raise ValueError(f"keys of the row used twice: {', '.join(sorted(taken))}")
    return {**record, **further}


def collect_versions() -> dict[str, str]:
    """Versions of this program, Python and the packages that decide the numbers."""
    versions = {"megatron_lite": __version__, "python": platform.python_version()}
    for package in VERSIONED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def encode_json(value: object) -> str:
    """Encode a row: 17 significant digits, non-finite floats as null, one line.

    Raises:
        TypeError: for anything but None, bool, int, float, str, mappings and sequences
            (a tensor or numpy integer is a defect of the caller).
    """
    if value is None or isinstance(value, (bool, str)):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _encode_float(value)
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(key))}: {encode_json(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(encode_json(item) for item in value) + "]"
    raise TypeError(f"cannot write {type(value).__name__} into a metrics row")


def _encode_float(value: float) -> str:
    if not math.isfinite(value):
        return "null"
    text = format(value, ".17g")
    # A whole number keeps its point, so that readers get a float back.
    return text if any(mark in text for mark in ".e") else text + ".0"
