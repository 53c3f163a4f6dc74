"""What the closed forms of the data axis read: its buckets by size, and who uses them when.

`state_memory.py` (bytes of a rank) and `data_wire.py` (elements sent in a step) both start
from here, so the two cannot speak of different layouts. Sizes are those of the flat layout,
padding included: what is counted is what is allocated and sent. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_lite.shard.flat import FlatLayout

NO_SHARD, OPTIM, OPTIM_GRADS, FULL = "no_shard", "optim", "optim_grads", "optim_grads_params"
STRATEGIES = (NO_SHARD, OPTIM, OPTIM_GRADS, FULL)  # what is divided grows along the list
RESHARD_AFTER = ("forward", "backward", "step")


@dataclass(frozen=True)
class Extent:
    """One bucket of a rank: one message, and one gathered unit where parameters are divided.

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
    """The buckets of a rank in the order of their reductions, and their use in a forward pass.

    Attributes:
        extents: the buckets.
        sites: per use-site in forward order, the indices of the buckets it reads.
    """

    extents: tuple[Extent, ...]
    sites: tuple[tuple[int, ...], ...]

    @property
    def elements(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(extent.elements for extent in self.extents)


@dataclass(frozen=True)
class DataSharding:
    """What is divided, over how many ranks, and when it is put together again.

    Attributes:
        strategy: one of STRATEGIES.
        ranks: grid -> ranks that share the state.
        copies: grid -> groups of such ranks (hybrid sharding).
        sharded_accumulation: gradients are reduce-scattered per microbatch, not per step.
        reshard_after: when gathered parameters are dropped, one of RESHARD_AFTER.
        overlap_reduce: a bucket is on the wire while the next one fills.
        prefetch: the next unit is gathered while one computes.
    """

    strategy: str = NO_SHARD
    ranks: Mapping[str, int] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    sharded_accumulation: bool = False
    reshard_after: str = "forward"
    overlap_reduce: bool = True
    prefetch: bool = True

    def divides(self, strategy: str) -> bool:
        """Whether what `strategy` adds to the ones before it is divided here."""
        return STRATEGIES.index(self.strategy) >= STRATEGIES.index(strategy)

    def shard_ranks(self, extent: Extent) -> int:
        """Ranks over which a bucket is divided where it is."""
        return self.ranks.get(extent.grid, 1)

    def shard_copies(self, extent: Extent) -> int:
        """Ranks that hold the same shard."""
        return self.copies.get(extent.grid, 1)

    def owned(self, extent: Extent) -> int:
        """Elements of a rank's shard of a bucket.

        Raises:
            ValueError: the bucket was not padded for so many ranks.
        """
        ranks = self.shard_ranks(extent)
        if extent.elements % ranks:
            raise ValueError(
                f"{extent.name}: {extent.elements} elements do not divide into {ranks} shards"
            )
        return extent.elements // ranks


def data_layout(layout: FlatLayout, sites: Sequence[str]) -> DataLayout:
    """Describe the buckets of a flat layout.

    Args:
        layout: of one rank.
        sites: its use-sites in forward order, as the specs name them ("embedding",
            "layer.0", ..., "final_norm", "head").
    """
    readers: dict[str, set[int]] = {site: set() for site in sites}
    named: list[list[str]] = [[] for _ in layout.buckets]
    for slot in layout.slots.values():
        for use in slot.physical.uses:
            readers[use].add(slot.bucket)
            if use not in named[slot.bucket]:
                named[slot.bucket].append(use)
    extents = []
    for bucket, uses in zip(layout.buckets, named, strict=True):
        ordered = sorted(uses, key=list(sites).index)
        name = ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"
        extents.append(Extent(name, bucket.key.grid, bucket.key.dtype, bucket.elements))
    return DataLayout(tuple(extents), tuple(tuple(sorted(readers[site])) for site in sites))
