"""The reductions of one bucket over the data ranks, from local sums to owned sums.

Whole buckets are all-reduced; cut buckets are reduce-scattered inside the shard group, and
their shards all-reduced over the copies where there are several instances. With instances
and nothing cut an all-reduce goes by the same levels (reduce-scatter inside, all-reduce
across, all-gather inside), so that only a shard crosses the borders between nodes.
"""

from __future__ import annotations

from torch import Tensor

from megatron_lite.mesh.collectives import (
    Work,
    all_gather_into,
    all_reduce,
    reduce_scatter_into,
)
from megatron_lite.shard.flat import Bucket
from megatron_lite.shard.ownership import DataGroups


class BucketReduction:
    """One bucket on the wire; begins when it is made.

    Attributes:
        own: receives the sum of what this rank owns (the whole bucket where nothing is cut).
    """

    def __init__(
        self,
        bucket: Bucket,
        whole: Tensor,
        own: Tensor,
        groups: DataGroups,
        *,
        is_cut: bool,
        across: bool = True,
    ) -> None:
        """Start the first level.

        Args:
            bucket: its layout.
            whole: [elements] local sums; if cut, undefined afterwards outside of `own`.
            own: [elements / shards] in or apart from `whole`; `whole` itself if not cut.
            groups: of the bucket's grid.
            is_cut: this rank keeps its shard only.
            across: reduce over the copies too; else the caller will, once for several.
        """
        self.own = own
        self._whole = whole
        self._groups = groups
        self._is_cut = is_cut
        self._has_levels = groups.replicate.size > 1 and groups.shard.size > 1
        self._to_cross = self._has_levels and across
        self._work: Work | None
        if self._is_cut:
            self._work = reduce_scatter_into(own, whole, groups.shard, async_op=True)
        elif self._has_levels:
            window = bucket.shard(groups.shard.rank)
            self.own = whole[window.start : window.stop]
            self._work = reduce_scatter_into(self.own, whole, groups.shard, async_op=True)
        else:
            self._work = all_reduce(whole, groups.whole, async_op=True)

    def cross(self) -> None:
        """Wait for the first level and start the second, where there is one to come."""
        if not self._to_cross:
            return
        if self._work is not None:
            self._work.wait()
        self._work = all_reduce(self.own, self._groups.replicate, async_op=True)
        self._to_cross = False

    def finish(self) -> None:
        """Wait for the last level."""
        self.cross()
        if self._work is not None:
            self._work.wait()
        self._work = None
        if self._has_levels and not self._is_cut:
            all_gather_into(self._whole, self.own, self._groups.shard)
