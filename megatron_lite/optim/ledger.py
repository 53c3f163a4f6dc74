"""How much state a recipe keeps, by arithmetic on the layout: for the memory ledger.

Torch-free but for its imports; a layout can be that of any rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_lite.optim.adafactor import Adafactor
from megatron_lite.optim.factored import COLUMN, ROW, is_factored, statistic_shape
from megatron_lite.optim.groups import ParamGroup, is_frozen
from megatron_lite.optim.recipe import Recipe
from megatron_lite.shard.flat import FlatLayout
from megatron_lite.spec.physical import PhysicalParam
from megatron_lite.spec.shards import local_shape


def trained_by(recipe: Recipe, physicals: Sequence[PhysicalParam]) -> tuple[PhysicalParam, ...]:
    """The stored parameters that the recipe trains."""
    return tuple(p for p in physicals if not is_frozen(p, recipe.frozen))


def frozen_elements(recipe: Recipe, physicals: Sequence[PhysicalParam], *, trained: bool) -> int:
    """Elements of the stored parameters that it does not train: whole on every data rank.

    Args:
        recipe: of the run.
        physicals: of a rank.
        trained: of parameters that are frozen, in the compute dtype; else of state that no
            gradient ever changes, in the masters'.
    """
    frozen = [p for p in physicals if is_frozen(p, recipe.frozen) and p.trained == trained]
    return sum(math.prod(p.shape) for p in frozen)


def state_per_element(recipe: Recipe, layout: FlatLayout) -> float:
    """State elements per element of the buckets, padding included; statistics left aside.

    A kind that all groups have is as long as the buckets, any other as long as the segments
    of its groups.
    """
    groups = [
        (segment.stop - segment.start, recipe.kinds(segment.group))
        for segment in layout.segments
        if isinstance(segment.group, ParamGroup)
    ]
    total = max(sum(bucket.elements for bucket in layout.buckets), 1)
    held = float(recipe.average_decay is not None)
    for kind in dict.fromkeys(kind for _, kinds in groups for kind in kinds):
        having = [elements for elements, kinds in groups if kind in kinds]
        held += 1.0 if len(having) == len(groups) else sum(having) / total
    return held


def statistics_elements(recipe: Recipe, layout: FlatLayout) -> int:
    """Row and column statistics of one rank, on every rank of a shard group alike.

    Rows that pad a vocabulary count, although the ranks that hold them keep none of them.
    """
    if not isinstance(recipe.rule, Adafactor):
        return 0
    specs = [view.spec for slot in layout.slots.values() for view in slot.physical.views]
    shapes = [local_shape(spec) for spec in specs if is_factored(spec)]
    return sum(math.prod(statistic_shape(s, kind)) for s in shapes for kind in (ROW, COLUMN))
