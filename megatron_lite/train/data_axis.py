"""The data axis of a run: buckets, who reduces them, and who brings sharded parameters.

Here the strategy of the plan becomes tensors and groups; what is reduced or gathered together
is decided in shard/units.py, what a rank owns in shard/ownership.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.config.plan import Plan
from megatron_lite.config.schema import Config
from megatron_lite.mesh.groups import Groups
from megatron_lite.model.gpt import GPTStage
from megatron_lite.optim.frozen import FrozenParameters, freeze_parameters
from megatron_lite.optim.recipe import Recipe
from megatron_lite.optim.segments import RankPlace
from megatron_lite.shard.buckets import MainGradients
from megatron_lite.shard.buffers import FlatBuffers, trained
from megatron_lite.shard.flat import FlatLayout, build_layout, default_bucket_size
from megatron_lite.shard.gather import ResidentWeights, build_weights
from megatron_lite.shard.host_memory import return_large_blocks
from megatron_lite.shard.ownership import build_ownership
from megatron_lite.shard.units import unit_rule
from megatron_lite.train.pipeline import Pipeline


@dataclass(frozen=True, eq=False)
class DataAxis:
    """What of a run is cut or reduced over data ranks."""

    buffers: FlatBuffers
    gathered: ResidentWeights
    gradients: MainGradients
    frozen: FrozenParameters
    place: RankPlace


def build_data_axis(
    config: Config,
    plan: Plan,
    stage: GPTStage,
    coordinates: Mapping[str, Mapping[str, int]],
    groups: Groups,
    pipeline: Pipeline,
    recipe: Recipe,
) -> DataAxis:
    """Move the stage's trained parameters into buckets."""
    params = {name: stage.param(name) for name in stage.physical}
    physicals = list(stage.physical.values())
    place = RankPlace(coordinates, plan.parallel, {"dense": groups.tp, "expert": groups.etp})
    frozen = freeze_parameters(physicals, params, recipe.frozen, place)
    sharding, parts = plan.sharding, pipeline.local_parts
    homes = {use: part.stage for part in parts for use in part.uses}
    ownership = build_ownership(sharding.stage, groups)
    train_here = trained(physicals, params)
    layout = build_layout(
        train_here,
        dtype_of=lambda physical: plan.precision.compute,
        group_of=recipe.grouping,
        bucket_size=config.ddp_bucket_size or default_bucket_size(plan.parallel.dp, train_here),
        shards=ownership.shards,
        unit_of=unit_rule(sharding, parts),
    )
    buffers = FlatBuffers(layout, params, coordinates, plan.parallel, plan.precision, ownership)
    if sharding.stage == 3 and buffers.device.type == "cpu":
        return_large_blocks()
    gathered = build_weights(
        buffers,
        [part.uses for part in parts],
        [part.backward_uses for part in parts],
        overlap=sharding.overlap_gather,
        reshard_after=sharding.reshard_after,
    )
    gradients = MainGradients(
        buffers,
        groups,
        overlap=sharding.overlap_reduce,
        sharded_accumulation=sharding.sharded_accumulation,
        homes=_bucket_homes(layout, homes),
    )
    return DataAxis(buffers, gathered, gradients, frozen, place)


def _bucket_homes(layout: FlatLayout, homes: Mapping[str, int]) -> list[int]:
    """Bucket -> the stage whose backward pass completes it: the first in the model."""
    return [
        min(homes[use] for name in bucket.names for use in layout.slots[name].physical.uses)
        for bucket in layout.buckets
    ]
