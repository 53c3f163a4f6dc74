"""The start-up summary says what is in force, once, with Megatron's lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_lite.config.attention_plan import LatentShape, WindowShape
from megatron_lite.config.sharding_plan import ShardingShape
from megatron_lite.telemetry.flops import MachinePeak
from megatron_lite.telemetry.memory import MemoryLedger
from megatron_lite.telemetry.state_memory import StateBytes
from megatron_lite.telemetry.summary import SummaryFacts, build_summary
from tests.telemetry.shapes import BF16, layout, tiny_model, tiny_plan

FACTS = SummaryFacts(
    parameters=123_456,
    rank_parameters=((0, 0, 70_000), (1, 0, 70_000)),
    ledgers=[MemoryLedger(StateBytes(2**20, 2**21, 0, 2**22), 2**19, 0)],
    data={"training data": "a_text_document, 100 documents"},
    warnings=("--sequence-parallel is off at TP=1",),
)
PLAN = tiny_plan(layout(tp=2, dp=2, sequence_parallel=True))


def test_the_whole_summary() -> None:
    assert build_summary(PLAN, FACTS).splitlines() == [
        "start-up summary",
        "  model             4 layers, hidden 64, 4 heads, 2 KV heads x 16, "
        "ffn 128 (silu, gated), sequence 32",
        "  model             RMSNorm, positions none, embedding and output untied, "
        "linear biases off, dropout hidden 0 / attention 0",
        "  parameters        123,456 in total",
        "  layout            TP 2 x CP 1 x DP 2 x PP 1 = 4 ranks, sequence parallel; "
        "order tp-cp-ep-dp-pp",
        "  data axis         no_shard: nothing sharded",
        "  batch             global 8 = 2 x 2 DP x 2 microbatches, 256 tokens per step",
        "  loss              sum over valid tokens / valid tokens of the global batch",
        "  precision         compute float32, no separate masters, main gradients float32",
        "  recomputation     none",
        "  training data     a_text_document, 100 documents",
        "  reproducibility   BITWISE on resume in this layout; "
        "MATCH32: any layout within fp32 rounding of one process",
        "  FLOPs             1,081,344 per token, forward and backward, attention full_square; "
        "MFU is null: --log-throughput measures its peak",
        "  memory per rank   MiB: parameters 1.0, main gradients 2.0, master weights 0.0, "
        "optimizer moments 4.0, activations (estimate) 0.5, logits chunk (estimate) 0.0, "
        "total 7.5",
        "  warning           --sequence-parallel is off at TP=1",
        " > padded vocab (size: 256) with 0 dummy tokens (new size: 256)",
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 70000",
        " > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 70000",
        "setting training iterations to 20",
    ]


def test_dropout_masters_and_the_peak_are_said() -> None:
    model = tiny_model(hidden_dropout=0.1, attention_dropout=0.1, tied=True, vocab_size=250)
    plan = tiny_plan(model=model, precision=BF16)
    facts = replace(FACTS, peak=MachinePeak(90e9, "measured dense bfloat16 matmul"))
    text = build_summary(plan, facts)
    assert "embedding and output tied" in text
    assert "dropout hidden 0.1 / attention 0.1" in text
    assert "compute bfloat16, masters float32, main gradients float32" in text
    assert "MFU against 90.0 GFLOP/s per rank (measured dense bfloat16 matmul)" in text
    assert " > padded vocab (size: 250) with 6 dummy tokens (new size: 256)" in text


def test_a_growing_batch_is_said() -> None:
    batch = replace(PLAN.batch, ramp=((0, 8), (160, 16)))
    text = build_summary(replace(PLAN, batch=batch), FACTS)
    assert "growing to 16 from sample 160 on" in text


@pytest.mark.parametrize(
    ("sharding", "said"),
    [
        (
            ShardingShape("optim", overlap_gather=True),
            "optim: optimizer state sharded over 4 ranks; gathers overlapped",
        ),
        (
            ShardingShape("optim_grads", instances=2, sharded_accumulation=True),
            "optim_grads: optimizer state and gradients sharded over 2 ranks, 2 copies; "
            "gradients reduced after every microbatch; gathers waited for",
        ),
        (
            ShardingShape("optim_grads_params", reshard_after="backward"),
            "optim_grads_params: optimizer state, gradients and parameters sharded over 4 ranks; "
            "gradients reduced after the last microbatch; gathered parameters dropped after "
            "each backward; gathers waited for",
        ),
    ],
)
def test_what_the_data_axis_shards_is_said(sharding: ShardingShape, said: str) -> None:
    plan = replace(tiny_plan(layout(dp=4)), sharding=sharding)
    assert f"  data axis         {said}" in build_summary(plan, FACTS).splitlines()


def test_what_comes_and_goes_is_in_the_ledger_with_its_largest_unit() -> None:
    state = StateBytes(2**20, 2**20, 0, 0, 2**21, 2**22, "embedding")
    text = build_summary(PLAN, replace(FACTS, ledgers=[MemoryLedger(state, 0, 0)]))
    assert "gradient buckets (largest embedding) 2.0" in text
    assert "gathered parameters (largest embedding) 4.0" in text
    assert "total 8.0" in text


def test_what_newer_families_add_is_told() -> None:
    variant = tiny_model(
        window=WindowShape(6, (0, 2)),
        sinks="learned",
        activation_limit=7.0,
        linear_offset=1.0,
        latent=LatentShape(0, 32, 16, 8, 12),
    )
    text = build_summary(tiny_plan(model=variant), FACTS)
    assert (
        "multi-latent attention, latents none of queries, 32 of keys and values, heads 16 + 8 "
        "rotary, values 12, window of 7 tokens in 2 of 4 layers, attention sinks learned, "
        "MLP clamped at 7, its linear half plus 1" in text
    )
