"""Small stages for tests: the families that the project trains, and a gradient sink."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_lite.config.attention_plan import LatentShape, WindowShape, YarnShape
from megatron_lite.config.batch_plan import BatchPlan
from megatron_lite.config.pipeline_plan import single_stage
from megatron_lite.config.plan import ModelShape, ParallelShape, Plan, PrecisionShape, RotaryShape
from megatron_lite.mesh.groups import Groups, local_groups
from megatron_lite.microbatch import MicrobatchContext, WeightGradientStore
from megatron_lite.model.gpt import GPTStage, StageOptions
from megatron_lite.model.init import initial_value
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.physical import logical_piece
from megatron_lite.spec.shards import local_box

ROTARY = RotaryShape(10000.0, 8, False, 1.0, None)
LLAMA = ModelShape(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=48,
    vocab_size=101,
    vocab_multiple=1,
    seq_length=12,
    max_position_embeddings=16,
    position="rope",
    rotary=ROTARY,
    normalization="RMSNorm",
    norm_epsilon=1e-5,
    norm_one_plus=False,
    gated=True,
    activation="silu",
    linear_bias=False,
    qkv_bias=False,
    qk_norm=False,
    tied=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_std=0.2,
)
GPT2 = replace(
    LLAMA,
    num_query_groups=4,
    position="learned_absolute",
    rotary=None,
    normalization="LayerNorm",
    gated=False,
    activation="gelu",
    linear_bias=True,
    tied=True,
)
FAMILIES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "qwen2": replace(LLAMA, qkv_bias=True, tied=True),
    "qwen3": replace(LLAMA, qk_norm=True),
    "mqa_interleaved": replace(
        LLAMA, num_query_groups=1, rotary=RotaryShape(500.0, 4, True, 2.0, None), linear_bias=True
    ),
    "llama3_scaled": replace(LLAMA, rotary=RotaryShape(500000.0, 8, False, 1.0, 8.0)),
    "gptoss": replace(
        LLAMA,
        linear_bias=True,
        qkv_bias=True,
        sinks="learned",
        window=WindowShape(3, (0,)),
        activation="quick_gelu",
        activation_limit=0.3,
        linear_offset=1.0,
    ),
    "mla": replace(
        LLAMA,
        num_query_groups=4,
        kv_channels=10,
        latent=LatentShape(12, 14, 6, 4, 8),
        qk_norm=True,
        position="yarn",
        rotary=RotaryShape(100.0, 4, True, 1.0, None, YarnShape(4.0, 8, 2.0, 1.0, 1.0, 0.7, True)),
    ),
    "mla_without_q_latent": replace(
        LLAMA,
        num_query_groups=4,
        kv_channels=16,
        latent=LatentShape(0, 14, 8, 8, 16),
        rotary=RotaryShape(100.0, 8, True, 1.0, None),
        sinks="learned",
        linear_bias=True,
        qkv_bias=False,
    ),
    "off_by_one": replace(LLAMA, sinks="zero", window=WindowShape(2, (0, 1))),
    "one_plus_squared_relu": replace(
        LLAMA, norm_one_plus=True, gated=False, activation="squared_relu"
    ),
}


class PlainSink:
    """Main gradients as plain tensors."""

    def __init__(self, stage: GPTStage) -> None:
        self.grads = {id(p): torch.zeros_like(p, requires_grad=False) for p in stage.parameters()}
        self.counts: dict[int, int] = {id(p): 0 for p in stage.parameters()}

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Buffer of a parameter."""
        return self.grads[id(param)]

    def written(self, param: nn.Parameter) -> None:
        """Count contributions."""
        self.counts[id(param)] += 1


def build_plan_of(
    model: ModelShape, tp: int = 1, sequence_parallel: bool = False, recompute: str = "none"
) -> Plan:
    """A plan of `tp` ranks in fp64."""
    parallel = ParallelShape(tp, tp, 1, 1, tp, 1, 1, 1, 1, sequence_parallel, "tp-cp-ep-dp-pp")
    batch = BatchPlan(2, 1, model.seq_length, ((0, 2),), 1, 0, 0, 2)
    precision = PrecisionShape(*["float64"] * 3)
    return Plan(model, parallel, batch, precision, recompute, single_stage(model.num_layers))


def build_stage(
    plan: Plan, groups: Groups | None = None, tp_rank: int = 0, options: StageOptions | None = None
) -> tuple[GPTStage, tuple[ParamSpec, ...]]:
    """A stage with its initial values."""
    specs = model_spec(plan.model, plan.parallel)
    coordinate = {"tp": tp_rank, "cp": 0, "dp": 0, "pp": 0, "etp": tp_rank, "ep": 0, "edp": 0}
    stage = GPTStage(plan, specs, groups or local_groups(), coordinate, "cpu", options)
    stage.allocate()
    for spec, piece in logical_pieces(stage, coordinate, lambda p: p.data):
        piece.copy_(initial_value(spec, local_box(spec, coordinate, plan.parallel), 7, piece.dtype))
    return stage, specs


def logical_pieces(stage: GPTStage, coordinate, of) -> Iterator[tuple[ParamSpec, Tensor]]:  # type: ignore[no-untyped-def]
    """(spec, local logical piece) of `of(param)` for every parameter."""
    for name, physical in stage.physical.items():
        for view in physical.views:
            box = local_box(view.spec, coordinate, stage.plan.parallel)
            yield view.spec, logical_piece(of(stage.param(name)), view, box)


def build_context(
    plan: Plan, sink: PlainSink | None, weights: Tensor, tp_rank: int = 0, deferred: bool = False
) -> MicrobatchContext:
    """Training context of one microbatch of weights.shape[1] samples."""
    s = weights.shape[0]
    full = torch.arange(s)
    local = full
    if plan.parallel.sequence_parallel and plan.parallel.tp > 1:
        local = full.chunk(plan.parallel.tp)[tp_rank]
    return MicrobatchContext(
        step=3,
        microbatch=0,
        stage=0,
        training=sink is not None,
        seed=1234,
        sample_ids=torch.arange(weights.shape[1]) + 5,
        positions=local,
        full_positions=full,
        loss_weights=weights,
        denominators={"lm": weights.sum(), "moe": torch.ones((), dtype=torch.float64)},
        wgrads=WeightGradientStore(sink, deferred) if sink is not None else None,
    )


def sample_batch(model: ModelShape, b: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and loss weights [s, b], some labels masked out."""
    generator = torch.Generator().manual_seed(11)
    stream = torch.randint(0, model.vocab_size, (model.seq_length + 1, b), generator=generator)
    weights = (torch.rand(model.seq_length, b, generator=generator) > 0.25).double()
    return stream[:-1], stream[1:], weights
