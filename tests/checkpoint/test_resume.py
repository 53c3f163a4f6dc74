"""What a resumed run may change, and what it is told when it changes more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint import compare_state, open_checkpoint
from megatron_lite.checkpoint.resume import RULES
from megatron_lite.config.architecture import ARCHITECTURE_FIELDS
from megatron_lite.errors import UserError
from tests.checkpoint.tiny import save_tiny, tiny_tensors


def run_state() -> dict[str, Any]:
    """A state with a value for every kind of rule, in the form that training saves."""
    return {
        "facts": {
            "num_layers": 2,
            "vocab_size": 4096,
            "rotary_base": {"base": 10000.0, "dim": 16},
            "seq_length": 128,
            "hidden_dropout": 0.1,
            "seed": 1234,
            "global_batch_size": [[0, 8]],
            "tokenizer_type": {"model_sha256": "bb"},
            "data_path": {"train": {"sha256": "aa"}},
        },
        "counters": {"iteration": 5, "consumed_samples": 40},
        "schedule": {"max_lr": 1e-3, "num_steps": 40},
        "layout": {"tp": 2, "dp": 1},
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
    assert compare_state(run_state(), changed("facts.global_batch_size", ((0, 8),))) == []


def test_counters_and_schedules_are_left_to_their_owners() -> None:
    assert compare_state(run_state(), changed("counters.iteration", 0)) == []
    assert compare_state(run_state(), changed("schedule.max_lr", 2e-3)) == []


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("data_path.train.sha256", "cc", "data_path"),
        ("tokenizer_type.model_sha256", "cc", "tokenizer_type"),
        ("seq_length", 256, "seq_length"),
        ("hidden_dropout", 0.0, "hidden_dropout"),
        ("seed", 1, "seed"),
        ("global_batch_size", [[0, 16]], "global_batch_size"),
        ("something_new", 1, "something_new"),
    ],
)
def test_silent_changes_are_refused_unless_allowed(path: str, value: Any, field: str) -> None:
    current = changed(f"facts.{path}", value)
    with pytest.raises(UserError, match=f"{path}.*--allow-resume-change {field} ") as caught:
        compare_state(run_state(), current)
    assert caught.value.exit_code == 2
    with pytest.raises(UserError):
        compare_state(run_state(), current, [n for n in run_state()["facts"] if n != field])
    for word in (field, "--" + field.replace("_", "-")):
        (line,) = compare_state(run_state(), current, [word])
        assert str(line).startswith(path) and str(line).endswith(f"checkpoint, {value!r} now")


@pytest.mark.parametrize("path", ["num_layers", "vocab_size", "rotary_base.base"])
def test_another_architecture_is_always_refused_with_both_values(path: str) -> None:
    told = rf"{path}: [0-9.]+ in the checkpoint, 999 now \(--[a-z-]+: another architecture\)"
    with pytest.raises(UserError, match=told):
        compare_state(run_state(), changed(f"facts.{path}", 999), [*ARCHITECTURE_FIELDS, "facts"])


def test_experts_from_a_dense_checkpoint_are_refused_with_the_way_there() -> None:
    saved, current = (changed("facts.num_experts", value) for value in (None, {"topk": 2}))
    with pytest.raises(UserError, match="another architecture; --moe-use-upcycling"):
        compare_state(saved, current)
    with pytest.raises(UserError, match=r"another architecture\)"):
        compare_state(current, saved)


def test_a_changed_router_is_told_by_its_own_flag() -> None:
    saved, current = (changed("facts.num_experts", {"topk": k}) for k in (2, 4))
    with pytest.raises(UserError, match=r"2 in the checkpoint, 4 now \(--moe-router-topk: "):
        compare_state(saved, current)


@pytest.mark.parametrize("path", ["layout.tp", "versions.torch", "config.log_interval"])
def test_layout_versions_and_other_flags_are_logged(path: str) -> None:
    (line,) = compare_state(run_state(), changed(path, 7))
    assert str(line).startswith(f"{path.removeprefix('config.')}: ")
    assert str(line).endswith(" in the checkpoint, 7 now")


def test_a_fact_on_one_side_only_is_a_difference() -> None:
    current = run_state()
    del current["facts"]["seed"]
    with pytest.raises(UserError, match="seed: 1234 in the checkpoint, absent now"):
        compare_state(run_state(), current)


def test_all_refused_differences_are_told_at_once() -> None:
    current = changed("facts.seed", 1)
    current["facts"]["num_layers"] = 3
    with pytest.raises(UserError, match=r"(?s)num_layers.*seed"):
        compare_state(run_state(), current)


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


def test_thousands_of_differences_are_a_short_message(tmp_path: Path) -> None:
    save_tiny(tmp_path, 1)
    names = {f"layer.{i}": ("float32", (1,)) for i in range(1000)}
    with pytest.raises(UserError, match="missing: 992 more") as caught:
        open_checkpoint(tmp_path).check_names(names)
    told = str(caught.value)
    assert "unexpected:" in told and len(told.splitlines()) < 40
