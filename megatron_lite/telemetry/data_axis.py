"""What the closed forms of the data axis read: its buckets by size, and who uses them when.

`state_memory.py` (bytes of a rank) and `data_wire.py` (elements sent in a step) both start
from here, so the two cannot speak of different layouts. Sizes are those of the flat layout,
padding included: what is counted is what is allocated and sent. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_lite.config.sharding_plan import ShardingShape
from megatron_lite.shard.flat import FlatLayout

if TYPE_CHECKING:
    from megatron_lite.config.plan import Plan

# Use-sites that are held together (several where they are recomputed together), each with
# the indices of the buckets that it reads.
Site = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Extent:
    """One bucket of a rank: one message, and one gathered unit where parameters are sharded.

    Attributes:
        name: what it holds, for people.
        grid: "dense" or "expert": over which data group.
        dtype: of the parameters.
        elements: padded length of the whole bucket.
    """

    name: str
    grid: str
    dtype: str
    elements: int


@dataclass(frozen=True)
class DataLayout:
    """The buckets of a rank in the order of their reductions, and their use in one pass.

    Attributes:
        extents: the buckets.
        forward: sites in forward order, over all stages of the rank.
        backward: those whose backward pass reads parameters again, in its order.
        contributions: the bucket of every gradient contribution, in backward order.
    """

    extents: tuple[Extent, ...]
    forward: tuple[Site, ...] = ()
    backward: tuple[Site, ...] = ()
    contributions: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(extent.elements for extent in self.extents)


@dataclass(frozen=True)
class DataSharding:
    """What is sharded, and over how many ranks.

    Attributes:
        shape: the flags.
        ranks: grid -> ranks of a shard group.
        copies: grid -> groups of such ranks, which hold the same.
    """

    shape: ShardingShape = field(default_factory=ShardingShape)
    ranks: Mapping[str, int] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)

    def shard_ranks(self, extent: Extent) -> int:
        """Ranks that a bucket is divided over where it is."""
        return self.ranks.get(extent.grid, 1)

    def shard_copies(self, extent: Extent) -> int:
        """Ranks that hold the same shard."""
        return self.copies.get(extent.grid, 1)

    def is_cut(self, extent: Extent, stage: int) -> bool:
        """Whether what this stage adds to the one before is sharded: 1 optimizer state,
        2 gradients, 3 parameters."""
        return self.shape.stage >= stage and self.shard_ranks(extent) > 1

    def shard(self, extent: Extent) -> int:
        """Elements of one shard of a bucket.

        Raises:
            ValueError: the bucket was not padded for so many ranks.
        """
        ranks = self.shard_ranks(extent)
        if extent.elements % ranks:
            raise ValueError(
                f"{extent.name}: {extent.elements} elements do not divide into {ranks} shards"
            )
        return extent.elements // ranks

    def held(self, extent: Extent, stage: int) -> int:
        """Elements that a rank keeps of what the stage would shard."""
        return self.shard(extent) if self.is_cut(extent, stage) else extent.elements

    @property
    def shards(self) -> dict[str, int]:
        """Grid -> parts that buckets are padded for; also where only a reduction is in parts."""
        has_parts = self.shape.stage > 0 or self.shape.instances > 1
        return {grid: ranks if has_parts else 1 for grid, ranks in self.ranks.items()}


def data_sharding(plan: Plan) -> DataSharding:
    """The sharding of a run."""
    parallel, copies = plan.parallel, plan.sharding.instances
    whole = {"dense": parallel.dp * parallel.cp, "expert": parallel.edp}
    return DataSharding(
        plan.sharding,
        {grid: ranks // copies for grid, ranks in whole.items()},
        dict.fromkeys(whole, copies),
    )


def data_layout(
    layout: FlatLayout,
    forward: Sequence[Sequence[str]],
    backward: Sequence[Sequence[str]] = (),
) -> DataLayout:
    """Describe the buckets of a flat layout.

    Args:
        layout: of one rank.
        forward: its use-sites in forward order, as the specs name them ("embedding",
            "layer.0", ..., "final_norm", "head"), in groups that are held together.
        backward: those that the backward pass reads again, in its order.
    """
    order = [use for group in forward for use in group]
    readers: dict[str, dict[int, None]] = {use: {} for use in order}
    named: list[set[str]] = [set() for _ in layout.buckets]
    contributions: dict[str, list[int]] = {use: [] for use in order}
    for slot in layout.slots.values():  # reverse forward order within a use
        for use in slot.physical.uses:
            readers[use][slot.bucket] = None
            named[slot.bucket].add(use)
            contributions[use].append(slot.bucket)
    extents = []
    for bucket, uses in zip(layout.buckets, named, strict=True):
        ends = sorted(uses, key=order.index)
        name = ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"
        extents.append(Extent(name, bucket.key.grid, bucket.key.dtype, bucket.elements))

    def sites(groups: Sequence[Sequence[str]]) -> tuple[Site, ...]:
        return tuple(tuple(tuple(readers[use]) for use in group) for group in groups)

    reverse = [bucket for use in reversed(order) for bucket in contributions[use]]
    return DataLayout(tuple(extents), sites(forward), sites(backward), tuple(reverse))
