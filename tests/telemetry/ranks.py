"""What a rank measures of the real stage (runs inside the rank pool)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.config.attention_plan import LatentShape, WindowShape
from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.config.plan import ModelShape, Plan, PrecisionShape, RotaryShape
from megatron_lite.mesh.grid import build_grids
from megatron_lite.mesh.groups import build_groups
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.model.gpt import GPTStage, StageOptions
from megatron_lite.telemetry.flops import count_rank_gemm_flops
from megatron_lite.telemetry.memory import ActivationShape, estimate_activation_bytes
from megatron_lite.telemetry.meters import LiveStorageMeter
from megatron_lite.verify.flop_counter import grouped_product
from tests.model.builders import (
    GPT2,
    LLAMA,
    PlainSink,
    build_context,
    build_plan_of,
    build_stage,
    sample_batch,
)

SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "ffn_hidden_size": 96,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "vocab_size": 126,
}
ROTARY = RotaryShape(10000.0, 16, False, 1.0, None)
SHAPES: dict[str, ModelShape] = {
    "llama": replace(LLAMA, **SIZES, rotary=ROTARY),
    "qwen3": replace(LLAMA, **SIZES, rotary=ROTARY, qk_norm=True),
    "gpt2": replace(GPT2, **SIZES),
    "gpt2_dropout": replace(GPT2, **SIZES, hidden_dropout=0.1, attention_dropout=0.1),
}
SHAPES["gptoss"] = replace(
    SHAPES["llama"],
    sinks="learned",
    window=WindowShape(5, (0, 2)),
    activation="quick_gelu",
    activation_limit=7.0,
    linear_offset=1.0,
    linear_bias=True,
    qkv_bias=True,
)
SHAPES["mixture"] = replace(
    SHAPES["llama"],
    experts=ExpertShape(
        num_experts=8,
        topk=3,
        ffn_hidden_size=48,
        layers=(1, 2),
        shared_ffn_hidden_size=32,
        pre_softmax=True,
        balancing=(("aux_loss", 0.01),),
        z_loss_coeff=0.001,
        dispatcher="alltoall",
    ),
)
SHAPES["mla"] = replace(
    SHAPES["llama"],
    num_query_groups=4,
    kv_channels=24,
    latent=LatentShape(20, 28, 16, 8, 16),
    qk_norm=True,
    rotary=RotaryShape(10000.0, 8, True, 1.0, None),
)
SHAPES["mla_plain"] = replace(
    SHAPES["mla"],
    kv_channels=16,
    latent=LatentShape(0, 28, 8, 8, 16),
    qk_norm=False,
)
SAMPLES = 2


def count_in_place(self_shape: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of `addmm_`, which accumulates weight gradients and the counter does not know."""
    return int(2 * a[0] * a[1] * b[1])


@dataclass(frozen=True)
class Case:
    """One stage to measure."""

    family: str
    dtype: str
    recompute: str
    sp: bool
    fused: bool
    method: str
    group: int
    native: bool = False

    @property
    def model(self) -> ModelShape:
        return SHAPES[self.family]

    @property
    def recomputed_layers(self) -> int | None:
        return self.group if self.method == "block" else None

    def plan(self, world_size: int) -> Plan:
        plan = build_plan_of(self.model, world_size, self.sp, self.recompute)
        return replace(plan, precision=PrecisionShape(self.dtype, "float32", "float32"))


def build_case(
    case: Case, rank: int, world_size: int
) -> tuple[GPTStage, PlainSink, tuple[Tensor, Tensor, MicrobatchContext]]:
    """The stage, its gradient sink and the arguments of its forward pass."""
    plan = case.plan(world_size)
    groups = build_groups(build_grids(plan.parallel), rank, case.model.num_query_groups)
    options = StageOptions(
        fused_attention=case.fused,
        recompute_method=case.method,
        recompute_layers=case.group,
    )
    stage, _ = build_stage(plan, groups, rank, options)
    sink = PlainSink(stage)
    tokens, labels, weights = sample_batch(case.model, SAMPLES)
    context = build_context(plan, sink, weights.float(), rank)
    return stage, sink, (tokens, labels, replace(context, native=case.native))


def measure_flops(rank: int, world_size: int, **settings: Any) -> dict[str, int]:
    """FLOPs executed by forward and backward of one microbatch, and the count."""
    case = Case(**settings)
    stage, _, inputs = build_case(case, rank, world_size)
    aten = torch.ops.aten
    mapping = {aten.addmm_: count_in_place, aten._grouped_mm: grouped_product}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        stage(*inputs).backward()
    counted = count_rank_gemm_flops(
        case.model,
        case.plan(world_size).parallel,
        samples=SAMPLES,
        layers=range(case.model.num_layers),
        head_rows=stage.vocab_range[1],
        recompute=case.recompute,
        recomputed_layers=case.recomputed_layers,
    )
    return {"executed": counter.get_total_flops(), "counted": counted.total}


def settled_bytes(meter: LiveStorageMeter) -> int:
    """Live bytes once gloo's thread has let go of the collectives that are done."""
    readings = [meter.live_bytes]
    for _ in range(25):
        time.sleep(0.02)
        readings.append(meter.live_bytes)
    return min(readings)


def measure_memory(rank: int, world_size: int, **settings: Any) -> dict[str, int]:
    """Bytes kept after the forward pass, their peak through the backward, the estimate.

    Not in one run with the flop counter, which keeps tensors alive in cycles.
    """
    case = Case(**settings)
    stage, sink, inputs = build_case(case, rank, world_size)
    with LiveStorageMeter() as meter:
        meter.track([*stage.parameters(), *sink.grads.values(), *inputs[:2]])
        before = meter.live_bytes
        loss = stage(*inputs)
        kept = settled_bytes(meter) - before
        loss.backward()
    plan = case.plan(world_size)
    shape = ActivationShape(
        *(case.model, plan.parallel, plan.precision, SAMPLES, case.fused, case.native)
    )
    estimate = estimate_activation_bytes(
        shape,
        range(case.model.num_layers),
        recompute=case.recompute,
        recompute_group=1 if case.method == "block" else case.group,
        recomputed_layers=case.recomputed_layers,
    )
    return {"kept": kept, "peak": meter.peak_bytes - before, "estimate": estimate}
