"""Model FLOPs are exact, conventional and independent of layout, padding and recompute."""

from __future__ import annotations

import pytest

from megatron_lite.config.attention_plan import WindowShape
from megatron_lite.telemetry.flops import (
    MachinePeak,
    count_rank_gemm_flops,
    model_flops_per_iteration,
    model_flops_utilization,
    model_tflops_per_rank,
)
from tests.telemetry.shapes import layout, tiny_model

MHA_4H_GELU = {"num_query_groups": 4, "gated": False, "activation": "gelu", "ffn_hidden_size": 256}


@pytest.mark.parametrize(
    ("changes", "convention", "expected"),
    [
        ({}, "full_square", 276_824_064),
        (MHA_4H_GELU, "full_square", 352_321_536),
        ({}, "causal_half", 264_241_152),
    ],
)
def test_model_flops_per_iteration_are_exact(
    changes: dict[str, object], convention: str, expected: int
) -> None:
    assert model_flops_per_iteration(tiny_model(**changes), 8, convention) == expected


def test_depths_of_multi_token_prediction_are_model_work() -> None:
    layer, join, head, attention = 36_864, 2 * 64 * 64, 64 * 256, 12 * 32 * 64
    further = model_flops_per_iteration(tiny_model(mtp_depths=2), 8)
    assert further - 276_824_064 == 8 * 32 * 2 * (6 * (layer + join + head) + attention)


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(ValueError, match="full_square, causal_half"):
        model_flops_per_iteration(tiny_model(), 8, "megatron")


def test_vocabulary_padding_is_not_model_work() -> None:
    padded = tiny_model(vocab_size=250)
    assert padded.padded_vocab_size(1) == 256
    difference = model_flops_per_iteration(tiny_model(), 8) - model_flops_per_iteration(padded, 8)
    assert difference == 6 * 6 * 64 * 8 * 32


def test_free_head_size_counts_by_query_channels_not_hidden_size() -> None:
    wide = tiny_model(kv_channels=32)
    extra_weights = 4 * 64 * (2 * 4 * 16 + 2 * 2 * 16)
    extra_pairs = 4 * 2 * 32 * 4 * 16
    expected = 6 * (extra_weights + extra_pairs) * 8 * 32
    assert model_flops_per_iteration(wide, 8) - model_flops_per_iteration(tiny_model(), 8) == (
        expected
    )


def test_a_window_counts_the_keys_that_its_layers_see() -> None:
    full, windowed = tiny_model(), tiny_model(window=WindowShape(7, (0, 2)))
    per_layer = 6 * 4 * 16 * 2  # FLOPs of a key seen by a token
    for convention, pairs in (("full_square", 32 * 8), ("causal_half", 32 * 8 - 8 * 8 // 2)):
        whole = 32 * 32 if convention == "full_square" else 32 * 32 // 2
        difference = model_flops_per_iteration(full, 1, convention) - model_flops_per_iteration(
            windowed, 1, convention
        )
        assert difference == 2 * per_layer * (whole - pairs)
    wide = tiny_model(window=WindowShape(500, (0, 1, 2, 3)))
    assert model_flops_per_iteration(wide, 1) == model_flops_per_iteration(full, 1)


def test_rates_divide_by_ranks_and_an_empty_interval_has_none() -> None:
    assert model_tflops_per_rank(4 * 10**12, 1000.0, 2) == 2.0
    assert model_tflops_per_rank(4 * 10**12, 0.0, 2) is None
    peak = MachinePeak(8e12, "data sheet, dense")
    assert model_flops_utilization(4 * 10**12, 1000.0, 2, peak) == 0.25
    assert model_flops_utilization(4 * 10**12, 1000.0, 2, None) is None


def test_one_unpadded_rank_without_recompute_executes_the_model_flops() -> None:
    counted = count_rank_gemm_flops(
        tiny_model(), layout(), samples=8, layers=range(4), head_rows=256
    )
    assert counted.total == 276_824_064
    assert counted.recompute == 0


def test_ranks_execute_equal_shares_when_nothing_is_replicated() -> None:
    counted = count_rank_gemm_flops(
        tiny_model(), layout(2), samples=8, layers=range(4), head_rows=128
    )
    assert 2 * counted.total == 276_824_064


def test_replicated_kv_heads_are_counted_on_every_rank() -> None:
    counted = count_rank_gemm_flops(
        tiny_model(), layout(4), samples=8, layers=range(4), head_rows=0
    )
    whole = count_rank_gemm_flops(tiny_model(), layout(1), samples=8, layers=range(4), head_rows=0)
    replicated_kv = 6 * 8 * 32 * 4 * (2 * 64 * 16) * 2  # two of four ranks' k and v are extra
    assert 4 * counted.layer_linears - whole.layer_linears == replicated_kv


def test_block_recompute_counts_only_its_layers() -> None:
    def recompute_flops(count: int | None) -> int:
        return count_rank_gemm_flops(
            tiny_model(),
            layout(),
            samples=2,
            layers=range(4),
            head_rows=256,
            recompute="full",
            recomputed_layers=count,
        ).recompute

    assert recompute_flops(1) * 4 == recompute_flops(None)
