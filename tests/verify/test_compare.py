"""Comparison: phases in the order of cause, no pass for NaN, floors for true zeros."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_lite.verify.classes import BITWISE, MATCH64
from megatron_lite.verify.compare import compare_runs
from megatron_lite.verify.dumps import RunRecord

Arrays = Mapping[str, Any]
ORDER = ["first", "second"]


def write_run(directory: Path, **changes: Any) -> RunRecord:
    """One step of a run of two parameters; `changes` replace entries by name."""
    tensors: dict[str, Any] = {
        "act/embedding": np.ones((2, 1, 3)),
        "act/layers.0": np.ones((2, 1, 3)),
        "act/layers.10": np.ones((2, 1, 3)),
        "grad/first": np.ones(3),
        "grad/second": np.ones(3),
        "weight/first": np.ones(3),
        "weight/second": np.ones(3),
    }
    start = {"weight/first": np.zeros(3), "weight/second": np.zeros(3)}
    row = {"kind": "train", "iteration": 1, "lm_loss": 2.0, "grad_norm": 1.0}
    samples = [{"consumed_index": 0, "dataset": 0, "dataset_index": 5, "valid_tokens": 3}]
    for key, value in changes.items():
        place = next(
            (d for d in (row, samples[0]) if key in d), start if key[0] == "0" else tensors
        )
        place[key.removeprefix("0")] = value
    (directory / "dump").mkdir(parents=True)
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (directory / "dump" / "step_0000001.json").write_text(json.dumps({"samples": samples}))
    save_file(start, directory / "dump" / "step_0000000.safetensors")
    kept = {name: np.asarray(values) for name, values in tensors.items() if values is not None}
    save_file(kept, directory / "dump" / "step_0000001.safetensors")
    return RunRecord(directory)


@pytest.fixture
def reference(tmp_path: Path) -> RunRecord:
    return write_run(tmp_path / "reference")


def test_equal_runs_have_no_difference(reference: RunRecord, tmp_path: Path) -> None:
    assert compare_runs(reference, write_run(tmp_path / "same"), BITWISE, ORDER) == []


@pytest.mark.parametrize(
    ("changes", "phase", "name"),
    [
        ({"dataset_index": 6}, "data", "the samples of the global batch"),
        ({"0weight/first": np.full(3, 0.5)}, "init", "first"),
        ({"act/layers.10": np.zeros((2, 1, 3))}, "activation", "layers.10"),
        ({"act/layers.0": np.full((2, 1, 3), np.nan)}, "activation", "layers.0"),
        ({"lm_loss": None}, "loss", "lm_loss"),
        ({"grad/second": np.full(3, 2.0)}, "gradient", "second"),
        ({"grad_norm": 1.5}, "norm", "grad_norm"),
        ({"weight/first": np.full(3, 1.1)}, "update", "first"),
    ],
)
def test_each_phase_is_seen(
    reference: RunRecord, tmp_path: Path, changes: Arrays, phase: str, name: str
) -> None:
    found = compare_runs(reference, write_run(tmp_path / "other", **changes), MATCH64, ORDER)
    assert (found[0].phase, found[0].name) == (phase, name)


def test_the_first_difference_is_next_to_the_cause(reference: RunRecord, tmp_path: Path) -> None:
    everything = {
        "grad/first": np.zeros(3),
        "grad/second": np.zeros(3),
        "weight/first": np.zeros(3),
        "grad_norm": 9.0,
    }
    found = compare_runs(reference, write_run(tmp_path / "other", **everything), MATCH64, ORDER)
    # Backward order: the gradient of the last parameter comes first.
    assert [d.name for d in found[:3]] == ["second", "first", "grad_norm"]
    forward = {"act/layers.10": np.zeros((2, 1, 3)), "act/layers.0": np.zeros((2, 1, 3))}
    found = compare_runs(reference, write_run(tmp_path / "forward", **forward), MATCH64, ORDER)
    assert [d.name for d in found] == ["layers.0", "layers.10"]


def test_nan_equals_nothing_not_even_nan(tmp_path: Path) -> None:
    bad = {"grad/first": np.full(3, np.nan)}
    a, b = write_run(tmp_path / "a", **bad), write_run(tmp_path / "b", **bad)
    assert [d.phase for d in compare_runs(a, b, MATCH64, ORDER)] == ["gradient"]


def test_a_missing_tensor_and_another_shape_differ(reference: RunRecord, tmp_path: Path) -> None:
    less = write_run(tmp_path / "less", **{"grad/first": None, "grad/second": np.ones(4)})
    names = [d.name for d in compare_runs(reference, less, MATCH64, ORDER)]
    assert sum("missing or of another shape" in name for name in names) == 2


def test_a_gradient_that_is_zero_in_truth_is_measured_against_the_global_norm(
    tmp_path: Path,
) -> None:
    a = write_run(tmp_path / "a", **{"grad/first": np.full(3, 1e-18)})
    b = write_run(tmp_path / "b", **{"grad/first": np.full(3, -1e-18)})
    assert compare_runs(a, b, MATCH64, ORDER) == []


def test_norm_ratio_tells_a_doubled_contribution(reference: RunRecord, tmp_path: Path) -> None:
    twice = write_run(tmp_path / "twice", **{"grad/second": np.full(3, 2.0)})
    (found,) = compare_runs(reference, twice, MATCH64, ORDER)
    assert found.scale == pytest.approx(2.0)
    assert "norm ratio 2" in str(found)
