"""The ledger is a closed form: activations by what is saved, and everything together."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.telemetry.memory import (
    ActivationShape,
    estimate_activation_bytes,
    estimate_logits_bytes,
    estimate_memory,
)
from megatron_lite.telemetry.state_memory import StateBytes
from tests.telemetry.shapes import BF16, FP32, layout, tiny_model


def activations(recompute: str = "none", tp: int = 1, sp: bool = False, **more: Any) -> int:
    layers = more.pop("layers", 4)
    model = tiny_model(**more.pop("model", {}))
    shape = ActivationShape(model, layout(tp, sequence_parallel=sp), FP32, 2)
    return estimate_activation_bytes(shape, range(layers), recompute=recompute, **more)


TOKENS = 32 * 2
STREAM_BYTES = TOKENS * 64 * 4
# Final norm: input, head gradient, root mean square; token ids and their mask.
END_BYTES = 2 * STREAM_BYTES + TOKENS * 4 + 9 * TOKENS


def test_activations_without_recompute_by_hand() -> None:
    stream = 4 * 64 + 2  # both norms' inputs, outputs and root mean squares
    attention = 64 + 32 + 32 + 64 + 4  # q, k, v, context, log-sum-exp
    mlp = 3 * 128
    layer = TOKENS * (stream + attention + mlp) * 4
    assert activations() == 4 * layer + END_BYTES


def test_attention_dropout_keeps_softmax_dropped_copy_and_masks() -> None:
    dropped = activations(model={"attention_dropout": 0.1}, layers=1)
    pairs = 4 * TOKENS * 32
    log_sum_exp = 4 * TOKENS * 4
    causal_mask = 32 * 32
    assert dropped - activations(layers=1) == pairs * (4 + 4 + 1) + causal_mask - log_sum_exp


def test_hidden_dropout_keeps_one_byte_per_element_and_place() -> None:
    dropped = activations(model={"hidden_dropout": 0.1})
    assert dropped - activations() == (4 * 2 + 1) * TOKENS * 64  # and behind the embedding


def test_selective_recompute_brings_back_the_probabilities_of_one_layer() -> None:
    model = {"attention_dropout": 0.1}
    per_layer = 4 * TOKENS * 32 * 9 + 32 * 32
    saved = activations("none", model=model) - activations("selective", model=model)
    assert saved == 3 * per_layer


def test_full_recompute_keeps_inputs_and_one_region_at_work() -> None:
    one_layer = activations("none", layers=2) - activations("none", layers=1)
    ends = END_BYTES
    assert activations("full") == 4 * STREAM_BYTES + one_layer + ends
    assert activations("full", recompute_group=2) == 2 * STREAM_BYTES + 2 * one_layer + ends
    assert activations("full", recomputed_layers=1) == STREAM_BYTES + 4 * one_layer + ends


def test_sequence_parallel_cuts_everything_tp_alone_leaves_the_residual_stream() -> None:
    stream = 4 * TOKENS * (4 * 64 + 2) * 4 + END_BYTES
    assert activations(tp=1) - stream == 2 * (activations(tp=2) - stream)
    ids = 9 * TOKENS  # of the whole sequence on every rank
    assert 2 * (activations(tp=2, sp=True) - ids) == activations(tp=1) - ids


def test_microbatches_in_flight_multiply_what_is_kept() -> None:
    assert activations(microbatches_in_flight=3) == 3 * activations()


def test_a_logits_chunk_is_cut_over_tp_with_its_padding() -> None:
    model = tiny_model(vocab_size=257)
    assert estimate_logits_bytes(model, layout(2), BF16, chunk_tokens=10) == 10 * 256 * (2 + 4)


@pytest.mark.parametrize(("has_head", "logits"), [(True, 16 * 256 * 4), (False, 0)])
def test_the_ledger_adds_up(has_head: bool, logits: int) -> None:
    ledger = estimate_memory(
        tiny_model(),
        layout(),
        FP32,
        StateBytes(400, 400, 0, 800, 30, 7, "embedding"),
        micro_batch_size=2,
        layers=range(4),
        has_head=has_head,
        logits_chunk_tokens=16,
    )
    assert ledger.logits_bytes == logits
    assert ledger.total_bytes == 1600 + 37 + activations() + logits
    rows = ledger.rows()
    assert sum(size for _, size in rows[:-1]) == rows[-1][1] == ledger.total_bytes
