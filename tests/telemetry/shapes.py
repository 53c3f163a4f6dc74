"""Small plans for the telemetry tests, built without the command line."""

from __future__ import annotations

from typing import Any

from megatron_lite.config.batch_plan import BatchPlan
from megatron_lite.config.pipeline_plan import single_stage
from megatron_lite.config.plan import ModelShape, ParallelShape, Plan, PrecisionShape


def tiny_model(**changes: Any) -> ModelShape:
    """4 layers, h 64, 4 heads, 2 KV heads, gated FFN 128, vocabulary 256, sequence 32."""
    values: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 128,
        "vocab_size": 256,
        "vocab_multiple": 128,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "position": "none",
        "rotary": None,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "norm_one_plus": False,
        "gated": True,
        "activation": "silu",
        "linear_bias": False,
        "qkv_bias": False,
        "qk_norm": False,
        "tied": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_std": 0.02,
    }
    return ModelShape(**{**values, **changes})


def layout(tp: int = 1, dp: int = 1, sequence_parallel: bool = False) -> ParallelShape:
    """TP x DP ranks."""
    return ParallelShape(
        world_size=tp * dp,
        tp=tp,
        cp=1,
        ep=1,
        etp=tp,
        dp=dp,
        edp=dp,
        pp=1,
        vpp=1,
        sequence_parallel=sequence_parallel,
        order="tp-cp-ep-dp-pp",
    )


FP32 = PrecisionShape(compute="float32", master="float32", main_grad="float32")
BF16 = PrecisionShape(compute="bfloat16", master="float32", main_grad="float32")


def tiny_plan(
    parallel: ParallelShape | None = None,
    model: ModelShape | None = None,
    precision: PrecisionShape = FP32,
    train_iters: int = 20,
) -> Plan:
    """A plan of 8 samples per step in microbatches of 2."""
    shape = parallel or layout()
    batch = BatchPlan(
        micro_batch_size=2,
        dp_size=shape.dp,
        seq_length=32,
        ramp=((0, 8),),
        train_iters=train_iters,
        eval_iters=1,
        eval_interval=10,
        eval_global_batch_size=8,
    )
    model = model or tiny_model()
    return Plan(
        model=model,
        parallel=shape,
        batch=batch,
        precision=precision,
        recompute="none",
        pipeline=single_stage(model.num_layers),
    )
