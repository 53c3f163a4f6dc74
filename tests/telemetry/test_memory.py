"""The ledger is a closed form: state to the byte, activations by what is saved."""

from __future__ import annotations

import pytest

from megatron_lite.telemetry.memory import (
    StateSharding,
    estimate_activation_bytes,
    estimate_logits_bytes,
    estimate_memory,
    estimate_state_bytes,
)
from tests.telemetry.shapes import BF16, FP32, layout, tiny_model


def test_mixed_precision_adam_costs_2_4_4_8_bytes_per_parameter() -> None:
    assert estimate_state_bytes({"bfloat16": 1000}, BF16) == (2000, 4000, 4000, 8000)


def test_full_precision_has_no_separate_masters() -> None:
    assert estimate_state_bytes({"float32": 1000}, FP32) == (4000, 4000, 0, 8000)


def test_a_class_of_fp32_parameters_in_a_bf16_run_has_no_masters() -> None:
    state = estimate_state_bytes({"bfloat16": 1000, "float32": 10}, BF16)
    assert state == (2040, 4040, 4000, 8080)


def test_sgd_keeps_one_moment_and_plain_sgd_none() -> None:
    assert estimate_state_bytes({"float32": 10}, FP32, optimizer="sgd")[3] == 40
    assert estimate_state_bytes({"float32": 10}, FP32, optimizer="sgd_plain")[3] == 0


def test_shards_are_rounded_up() -> None:
    cut = StateSharding(parameters=1, gradients=1, optimizer=4)
    assert estimate_state_bytes({"bfloat16": 1001}, BF16, sharding=cut) == (
        2002,
        4004,
        251 * 4,
        251 * 8,
    )


def activations(recompute: str = "none", tp: int = 1, sp: bool = False, **more: int) -> int:
    return estimate_activation_bytes(
        tiny_model(),
        layout(tp, sequence_parallel=sp),
        FP32,
        micro_batch_size=2,
        layers=more.get("layers", 4),
        recompute=recompute,
        recomputed_layers=more.get("recomputed_layers"),
        microbatches_in_flight=more.get("in_flight", 1),
    )


def test_activations_without_recompute_by_hand() -> None:
    tokens = 32 * 2
    stream = 4 * 64  # both norms' inputs and outputs
    attention = 64 + 32 + 32 + 64  # q, k, v, context
    mlp = 3 * 128
    probabilities = 4 * 32
    layer = tokens * (stream + attention + mlp + probabilities)
    assert activations() == (4 * layer + 2 * tokens * 64) * 4


def test_selective_recompute_drops_exactly_the_probabilities() -> None:
    assert activations("none") - activations("selective") == 4 * (4 * 32 * 64) * 4


def test_full_recompute_keeps_inputs_and_one_layer_at_work() -> None:
    one_layer = (activations("none", layers=2) - activations("none", layers=1)) // 4
    one_input = 64 * 64
    assert activations("full") == (4 * one_input + one_layer + 2 * one_input) * 4
    assert activations("full", recomputed_layers=1) == (
        (one_input + 3 * one_layer + one_layer + 2 * one_input) * 4
    )


def test_sequence_parallel_cuts_the_residual_stream_tp_alone_does_not() -> None:
    stream = (4 * 4 + 2) * 64 * 64 * 4
    assert activations(tp=1) - stream == 2 * (activations(tp=2) - stream)
    assert 2 * activations(tp=2, sp=True) == activations(tp=1)


def test_microbatches_in_flight_multiply_what_is_saved() -> None:
    assert activations(in_flight=3) == 3 * activations()


def test_attention_dropout_keeps_the_probabilities_twice() -> None:
    def total(dropout: float) -> int:
        return estimate_activation_bytes(
            tiny_model(attention_dropout=dropout), layout(), FP32, micro_batch_size=1, layers=1
        )

    assert total(0.1) - total(0.0) == 4 * 32 * 32 * 4


def test_a_logits_chunk_is_cut_over_tp_with_its_padding() -> None:
    model = tiny_model(vocab_size=257)
    assert estimate_logits_bytes(model, layout(2), BF16, chunk_tokens=10) == 10 * 256 * (2 + 4)


@pytest.mark.parametrize(("has_head", "logits"), [(True, 16 * 256 * 8), (False, 0)])
def test_the_ledger_adds_up(has_head: bool, logits: int) -> None:
    ledger = estimate_memory(
        tiny_model(),
        layout(),
        FP32,
        {"float32": 100},
        micro_batch_size=2,
        layers=4,
        has_head=has_head,
        logits_chunk_tokens=16,
    )
    assert ledger.logits_bytes == logits
    assert ledger.state_bytes == 400 + 400 + 0 + 800
    assert ledger.total_bytes == 1600 + activations() + logits
    rows = ledger.rows()
    assert sum(size for _, size in rows[:-1]) == rows[-1][1] == ledger.total_bytes
