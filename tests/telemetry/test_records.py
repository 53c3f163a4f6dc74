"""Rows of --metrics-jsonl: keys, digits, null, round trip."""

from __future__ import annotations

import json
import math
from decimal import Decimal

import numpy as np
import pytest

from megatron_lite.telemetry.records import (
    Rates,
    TrainRow,
    ValidRow,
    collect_versions,
    encode_json,
    event_record,
    train_record,
    valid_record,
)

ROW = TrainRow(
    iteration=3,
    consumed_samples=24,
    lm_loss=5.1,
    grad_norm=1 / 3,
    learning_rate=1e-3,
    weight_decay=0.1,
    global_batch_size=8,
    valid_tokens=250,
    loss_scale=1.0,
    skipped=False,
    nan=False,
    elapsed_ms=12.5,
)
RATES = Rates(tokens_per_s=20480.0, model_tflops_per_rank=0.02, mfu=None)


def test_the_train_row_has_exactly_the_documented_keys_in_order() -> None:
    assert list(train_record(ROW, RATES)) == [
        "kind",
        "iteration",
        "consumed_samples",
        "lm_loss",
        "grad_norm",
        "learning_rate",
        "weight_decay",
        "global_batch_size",
        "valid_tokens",
        "loss_scale",
        "skipped",
        "nan",
        "elapsed_ms",
        "tokens_per_s",
        "model_tflops_per_rank",
        "mfu",
    ]


def test_further_loss_terms_are_keys_of_their_own_and_cannot_hide_one() -> None:
    row = TrainRow(**{**vars(ROW), "further_losses": {"moe_aux_loss": 0.5}})
    assert train_record(row, RATES)["moe_aux_loss"] == 0.5
    clash = TrainRow(**{**vars(ROW), "further_losses": {"lm_loss": 0.5}})
    with pytest.raises(ValueError, match="lm_loss"):
        train_record(clash, RATES)


def test_figures_stand_in_the_row_beside_the_losses() -> None:
    figures = {"moe/entropy": 1.5}
    row = TrainRow(**{**vars(ROW), "further_losses": {"moe_z_loss": 0.5}, "figures": figures})
    record = train_record(row, RATES)
    assert (record["moe_z_loss"], record["moe/entropy"]) == (0.5, 1.5)


def test_the_valid_and_event_rows() -> None:
    assert valid_record(ValidRow(10, "valid", 2.0, 99)) == {
        "kind": "valid",
        "iteration": 10,
        "split": "valid",
        "lm_loss": 2.0,
        "ppl": math.exp(2.0),
        "valid_tokens": 99,
    }
    assert event_record("save", 5, {"directory": "out"}) == {
        "kind": "event",
        "event": "save",
        "iteration": 5,
        "directory": "out",
    }
    with pytest.raises(ValueError, match="iteration"):
        event_record("save", 5, {"iteration": 6})


@pytest.mark.parametrize(
    "value", [0.1, 1 / 3, 1e-310, 5e300, -2.5, 0.0, 2.0, 1e22, math.pi, 2**53 + 0.0]
)
def test_a_float_survives_the_round_trip_as_a_float(value: float) -> None:
    text = encode_json(value)
    back = json.loads(text)
    assert isinstance(back, float)
    assert back == value


@pytest.mark.parametrize("value", [0.1, 1 / 3, 5.4321, 1e-7])
def test_floats_have_17_significant_digits(value: float) -> None:
    assert encode_json(value) == format(value, ".17g")
    assert len(Decimal(encode_json(value)).as_tuple().digits) == 17


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_number_is_null(value: float) -> None:
    assert encode_json({"lm_loss": value, "list": [value]}) == '{"lm_loss": null, "list": [null]}'


def test_nested_values_and_text_stay_on_one_line() -> None:
    value = {"a": [1, True, None, "line\nbreak \u00e9"], "b": {"c": (1.5,)}}
    text = encode_json(value)
    assert "\n" not in text
    assert json.loads(text) == {"a": [1, True, None, "line\nbreak \u00e9"], "b": {"c": [1.5]}}


def test_a_float64_scalar_is_written_and_an_array_is_a_defect() -> None:
    assert encode_json(np.float64(0.5)) == "0.5"
    with pytest.raises(TypeError, match="ndarray"):
        encode_json({"grad_norm": np.zeros(1)})


def test_versions_name_what_decides_the_numbers() -> None:
    versions = collect_versions()
    assert {"megatron_lite", "python", "torch", "numpy"} <= versions.keys()
