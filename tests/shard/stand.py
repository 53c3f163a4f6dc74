"""The data side of one rank without a model: parameters by spec, buffers, sink, groups."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.config.plan import ModelShape, ParallelShape, PrecisionShape
from megatron_lite.mesh.grid import build_grids
from megatron_lite.mesh.groups import Groups, build_groups, local_groups
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.optim.groups import param_group
from megatron_lite.shard.buckets import MainGradients
from megatron_lite.shard.buffers import FlatBuffers, trained
from megatron_lite.shard.flat import FlatLayout, build_layout
from megatron_lite.shard.gather import ResidentWeights, build_weights
from megatron_lite.shard.ownership import build_ownership
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.physical import PhysicalParam, physical_params
from megatron_lite.spec.shards import Box

PRECISIONS = {
    "float64": PrecisionShape("float64", "float64", "float64"),
    "float32": PrecisionShape("float32", "float32", "float32"),
    "bfloat16": PrecisionShape("bfloat16", "float32", "float32"),
}


def model_shape(**changes: object) -> ModelShape:
    """A small Qwen-like model with everything that is reduced in its own way."""
    values: dict[str, object] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "kv_channels": 4,
        "ffn_hidden_size": 24,
        "vocab_size": 37,
        "vocab_multiple": 4,
        "seq_length": 8,
        "max_position_embeddings": 8,
        "position": "learned_absolute",
        "rotary": None,
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "norm_one_plus": False,
        "gated": True,
        "activation": "silu",
        "linear_bias": True,
        "qkv_bias": True,
        "qk_norm": True,
        "tied": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_std": 0.02,
    }
    return ModelShape(**{**values, **changes})  # type: ignore[arg-type]


def parallel_shape(
    tp: int = 1, dp: int = 1, cp: int = 1, sequence_parallel: bool = False
) -> ParallelShape:
    return ParallelShape(
        world_size=tp * cp * dp, tp=tp, cp=cp, ep=1, etp=tp, dp=dp, edp=cp * dp, pp=1, vpp=1,
        sequence_parallel=sequence_parallel, order="tp-cp-ep-dp-pp",
    )  # fmt: skip


def small_layout(
    physicals: tuple[PhysicalParam, ...],
    dtype: str = "float64",
    bucket_size: int = 500,
    **options: Any,
) -> FlatLayout:
    return build_layout(
        physicals,
        dtype_of=lambda _: dtype,
        group_of=param_group,
        bucket_size=bucket_size,
        **options,
    )


@dataclass
class Stand:
    """Everything one rank needs to accumulate, reduce and update."""

    physicals: tuple[PhysicalParam, ...]
    params: dict[str, nn.Parameter]
    buffers: FlatBuffers
    sink: MainGradients
    groups: Groups
    recorder: Recorder
    weights: ResidentWeights

    def contribute(self, value: Callable[[PhysicalParam], Tensor | float]) -> None:
        """One microbatch's backward: every use-site adds `value`, the last layer first."""
        for physical in reversed(self.physicals):
            param = self.params[physical.name]
            for _ in physical.uses:
                self.sink.main_grad(param).add_(value(physical))
                self.sink.written(param)


def build_buffers(
    specs: tuple[ParamSpec, ...],
    parallel: ParallelShape,
    rank: int = 0,
    groups: Groups | None = None,
    *,
    dtype: str = "float64",
    bucket_size: int = 500,
    frozen: tuple[str, ...] = (),
    stage: int = 0,
) -> tuple[FlatBuffers, dict[str, nn.Parameter]]:
    """Buffers of any rank of any layout; without shards needs no other rank."""
    stored = physical_params(specs)
    params = {
        p.name: nn.Parameter(
            torch.zeros(p.shape, dtype=getattr(torch, dtype)), requires_grad=p.name not in frozen
        )
        for p in stored
    }
    ownership = build_ownership(stage, groups or local_groups())
    layout = small_layout(
        trained(stored, params),
        dtype,
        bucket_size,
        shards=ownership.shards,
        unit_of=(lambda physical: physical.uses[0]) if stage == 3 else (lambda physical: None),
    )
    grids = build_grids(parallel)
    coordinates = {
        "dense": grids.dense.coordinate(rank),
        "expert": grids.expert.coordinate(rank),
    }
    precision = PRECISIONS[dtype]
    return FlatBuffers(layout, params, coordinates, parallel, precision, ownership), params


def build_rank_groups(
    parallel: ParallelShape,
    rank: int,
    kv_heads: int,
    recorder: Recorder | None = None,
    instances: int = 1,
) -> Groups:
    if parallel.world_size == 1:
        return local_groups(recorder)
    grids = build_grids(parallel)
    return build_groups(grids, rank, kv_heads, instances=instances, recorder=recorder)


def build_stand(
    parallel: ParallelShape | None = None,
    rank: int = 0,
    *,
    overlap: bool = True,
    sharded_accumulation: bool = False,
    instances: int = 1,
    reshard_after: str = "forward",
    model: ModelShape | None = None,
    **options: Any,
) -> Stand:
    """Buffers, sink and groups; `options` are those of `build_buffers`."""
    parallel, model = parallel or parallel_shape(), model or model_shape()
    specs, recorder = model_spec(model, parallel), Recorder()
    groups = build_rank_groups(parallel, rank, model.num_query_groups, recorder, instances)
    buffers, params = build_buffers(specs, parallel, rank, groups, **options)
    sink = MainGradients(
        buffers, groups, overlap=overlap, sharded_accumulation=sharded_accumulation
    )
    physicals = tuple(p for p in physical_params(specs) if p.name in buffers.params)
    uses = [*dict.fromkeys(use for physical in physicals for use in physical.uses)]
    weights = build_weights(
        buffers, [uses], [uses[::-1]], overlap=overlap, reshard_after=reshard_after
    )
    return Stand(physicals, params, buffers, sink, groups, recorder, weights)


def logical_value(spec: ParamSpec, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """The whole logical tensor: small values that differ by element and by name."""
    offset = sum(map(ord, spec.name)) % 89
    index = torch.arange(prod(spec.shape), dtype=torch.float64)
    return (((index * 7 + offset) % 101 - 50) / 64 * scale).to(dtype).view(spec.shape)


def region(whole: Tensor, box: Box) -> Tensor:
    """The part of a logical tensor that a box names."""
    ranges = zip(box.offset, box.shape, strict=True)
    return whole[tuple(slice(start, start + length) for start, length in ranges)]
