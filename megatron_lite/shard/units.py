"""Which parameters may share a bucket, by strategy; arithmetic without torch.

Parameters that are always whole travel in buckets of a size; gathered ones in one per
use-site, so that a use needs nothing else; and gradients that leave after every microbatch
never share one over two stages of a rank, whose backward passes end at different times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from megatron_lite.config.sharding_plan import ShardingShape
from megatron_lite.pipeline.partition import StagePart
from megatron_lite.spec.physical import PhysicalParam


def unit_rule(
    sharding: ShardingShape, parts: Sequence[StagePart]
) -> Callable[[PhysicalParam], Hashable]:
    """`unit_of` of `flat.build_layout`.

    Args:
        sharding: of the run.
        parts: the stages of one rank.
    """
    homes = {use: part.stage for part in parts for use in part.uses}

    def unit_of(physical: PhysicalParam) -> Hashable:
        if sharding.stage == 3:
            return physical.uses[0]
        return homes[physical.uses[0]] if sharding.sharded_accumulation else None

    return unit_of
