"""Which part of every bucket a rank owns: the optimizer's share of the data axis.

Without sharding every data rank owns whole buckets, as its replicas do. With it the ranks
of a shard group own one equal part each, and only as many copies exist as there are
instances (hybrid sharding). Everything about odd sizes is here and in the layout's padding:
what owns, reduces, updates or saves asks for a window, and never computes an offset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.config.plan import ParallelShape
from megatron_lite.mesh.groups import Group, Groups
from megatron_lite.shard.flat import Bucket, Window

# Axes whose ranks see different samples, by grid.
_DATA_AXES = {"dense": ("cp", "dp"), "expert": ("edp",)}


@dataclass(frozen=True)
class DataGroups:
    """The data ranks of one grid: all, those that shard, and those that hold copies."""

    whole: Group
    shard: Group
    replicate: Group


@dataclass(frozen=True)
class Ownership:
    """What a rank owns.

    Attributes:
        stage: 0 nothing is sharded, 1 optimizer state, 2 gradients too, 3 parameters too.
        groups: by grid.
    """

    stage: int
    groups: Mapping[str, DataGroups]

    @property
    def shards(self) -> dict[str, int]:
        """Grid -> parts of its buckets; also where only a reduction goes by parts."""
        return {
            grid: groups.shard.size if self.stage > 0 or groups.replicate.size > 1 else 1
            for grid, groups in self.groups.items()
        }

    def is_cut(self, bucket: Bucket) -> bool:
        """Whether this rank owns a part of the bucket only."""
        return self.stage > 0 and bucket.shards > 1

    def window(self, bucket: Bucket) -> Window:
        """What this rank owns of a bucket."""
        if not self.is_cut(bucket):
            return Window(0, bucket.elements)
        return bucket.shard(self.groups[bucket.key.grid].shard.rank)

    def windows(self, buckets: Sequence[Bucket]) -> dict[int, Window]:
        """The windows of all buckets by index."""
        return {index: self.window(bucket) for index, bucket in enumerate(buckets)}

    def copies(self, bucket: Bucket) -> tuple[int, int]:
        """(index, count) of this rank among the data ranks with the same window."""
        groups = self.groups[bucket.key.grid]
        same = groups.replicate if self.is_cut(bucket) else groups.whole
        return same.rank, same.size

    def as_owner(
        self, bucket: Bucket, coordinate: Mapping[str, int], parallel: ParallelShape
    ) -> tuple[Mapping[str, int], ParallelShape]:
        """Coordinate and axes as they are for windows: data ranks are only the copies."""
        if not self.is_cut(bucket):
            return coordinate, parallel
        first, *others = reversed(_DATA_AXES[bucket.key.grid])
        index, count = self.copies(bucket)
        place = {**coordinate, **dict.fromkeys(others, 0), first: index}
        sizes: dict[str, Any] = {**dict.fromkeys(others, 1), first: count}
        return place, dataclasses.replace(parallel, **sizes)


def build_ownership(stage: int, groups: Groups) -> Ownership:
    """What a rank owns at a stage of ZeRO."""
    return Ownership(
        stage,
        {
            "dense": DataGroups(groups.dp_cp, groups.dp_shard, groups.dp_replicate),
            "expert": DataGroups(groups.edp, groups.edp_shard, groups.edp_replicate),
        },
    )
