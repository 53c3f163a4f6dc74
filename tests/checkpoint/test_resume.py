"""What a resumed run may change, and what it is told when it changes more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint import compare_state, open_checkpoint
from megatron_lite.checkpoint.resume import RESUME_FIELDS, RULES
from megatron_lite.errors import UserError
from tests.checkpoint.tiny import save_tiny, tiny_tensors


def run_state() -> dict[str, Any]:
    """A state with one value for every kind of rule."""
    return {
        "iteration": 5,
        "consumed_samples": 40,
        "model": {"num_layers": 2, "hidden_size": 64, "seq_length": 128, "hidden_dropout": 0.1},
        "layout": {"tp": 2, "dp": 1},
        "batch": {"micro_batch_size": 2, "ramp": [[0, 8]], "train_iters": 10},
        "data": {"fingerprint": "aa"},
        "tokenizer": {"fingerprint": "bb"},
        "schedule": {"lr": 1e-3, "decay": "cosine"},
        "seed": 1234,
        "vocab_size": 4096,
        "versions": {"torch": "2.14.1"},
        "config": {"log_interval": 10},
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    """The state with one value changed."""
    state = run_state()
    *outer, last = path.split(".")
    inner = state
    for key in outer:
        inner = inner[key]
    inner[last] = value
    return state


def test_an_equal_run_has_nothing_to_say() -> None:
    assert compare_state(run_state(), run_state()) == []


def test_tuples_equal_the_lists_that_files_hold() -> None:
    assert compare_state(run_state(), changed("batch.ramp", ((0, 8),))) == []


def test_counters_are_not_compared() -> None:
    assert compare_state(run_state(), {**run_state(), "iteration": 0, "consumed_samples": 0}) == []


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("data.fingerprint", "cc", "dataset"),
        ("tokenizer.fingerprint", "cc", "tokenizer"),
        ("model.seq_length", 256, "sequence_length"),
        ("schedule.lr", 2e-3, "schedule"),
        ("seed", 1, "seed"),
        ("batch.ramp", [[0, 16]], "global_batch_size"),
    ],
)
def test_silent_changes_are_refused_unless_allowed(path: str, value: Any, field: str) -> None:
    with pytest.raises(UserError, match=f"{path}.*--allow-resume-change {field}") as caught:
        compare_state(run_state(), changed(path, value))
    assert caught.value.exit_code == 2
    others = [name for name in RESUME_FIELDS if name != field]
    with pytest.raises(UserError):
        compare_state(run_state(), changed(path, value), others)
    (line,) = compare_state(run_state(), changed(path, value), [field])
    assert line.startswith(path) and str(value) in line


@pytest.mark.parametrize("path", ["model.num_layers", "model.hidden_size", "vocab_size"])
def test_another_architecture_is_always_refused_with_both_values(path: str) -> None:
    saved = run_state()["vocab_size"] if path == "vocab_size" else run_state()["model"][path[6:]]
    with pytest.raises(UserError, match=f"{path}: {saved} -> 999.*another architecture"):
        compare_state(run_state(), changed(path, 999), RESUME_FIELDS)


@pytest.mark.parametrize(
    "path", ["layout.tp", "versions.torch", "config.log_interval", "model.hidden_dropout"]
)
def test_layout_versions_and_other_flags_are_logged(path: str) -> None:
    (line,) = compare_state(run_state(), changed(path, 7))
    assert line.startswith(f"{path}: ") and line.endswith(" -> 7")


def test_a_field_on_one_side_only_is_a_difference() -> None:
    current = run_state()
    del current["data"]["fingerprint"]
    with pytest.raises(UserError, match=r"data\.fingerprint: aa -> absent"):
        compare_state(run_state(), current)


def test_all_refused_differences_are_told_at_once() -> None:
    current = {**changed("seed", 1), "tokenizer": {"fingerprint": "x"}}
    with pytest.raises(UserError, match=r"(?s)seed.*tokenizer"):
        compare_state(run_state(), current)


def test_an_unknown_field_to_allow_is_told_with_the_legal_ones() -> None:
    with pytest.raises(UserError, match="legal fields are dataset"):
        compare_state(run_state(), run_state(), ["data"])


def test_the_last_rule_matches_everything() -> None:
    assert RULES[-1].pattern == "*"


Expected = dict[str, tuple[torch.dtype | str, tuple[int, ...]]]


def expected() -> Expected:
    """What a run that fits the tiny checkpoint expects."""
    return {name: (t.dtype, tuple(t.shape)) for name, t in tiny_tensors(1).items()}


def _rename(names: Expected) -> None:
    names["optim/steps"] = names.pop("optim/step")


def _change_dtype(names: Expected) -> None:
    names["optim/step"] = ("float32", ())


def _change_shape(names: Expected) -> None:
    names["optim/step"] = (torch.int64, (2,))


@pytest.mark.parametrize(
    ("change", "allow", "told"),
    [
        (_rename, {"missing", "unexpected"}, r"(?s)missing: optim/steps.*unexpected: optim/step "),
        (lambda n: n.pop("optim/step"), {"unexpected"}, "unexpected: optim/step"),
        (lambda n: n.update({"new": ("bool", (1,))}), {"missing"}, r"missing: new \[1\]"),
        (_change_dtype, {"dtype"}, "dtype: optim/step is int64, expected float32"),
        (_change_shape, {"shape"}, r"shape: optim/step is \[\], expected \[2\]"),
    ],
)
def test_names_dtypes_and_shapes_are_strict(
    tmp_path: Path, change: Callable[[Expected], None], allow: set[str], told: str
) -> None:
    save_tiny(tmp_path, 1)
    checkpoint = open_checkpoint(tmp_path)
    names = expected()
    checkpoint.check_names(names)
    change(names)
    with pytest.raises(UserError, match=told) as caught:
        checkpoint.check_names(names)
    assert caught.value.exit_code == 2
    assert any(checkpoint.check_names(names, allow).__dict__.values())
    for kind in allow:
        with pytest.raises(UserError):
            checkpoint.check_names(names, {"missing", "unexpected", "dtype", "shape"} - {kind})


def test_an_unknown_kind_to_allow_is_told_with_the_legal_ones(tmp_path: Path) -> None:
    save_tiny(tmp_path, 1)
    with pytest.raises(UserError, match="legal kinds are missing unexpected dtype shape"):
        open_checkpoint(tmp_path).check_names(expected(), {"all"})
