"""Parameters that are not always whole on a rank: gathered before use, dropped after it.

The model says which use-sites a part of a pass needs ("layer.3", "head") and when it is
done with them; which buckets these are, and when they travel, is decided here. Stages 1 and
2 gather once per update, stage 3 before every use. All data ranks run the same passes, so
they gather the same buckets in the same order, ahead of need or not: equal bits either way.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

from megatron_lite.mesh.collectives import Work, all_gather_into
from megatron_lite.shard.buffers import FlatBuffers

Uses = tuple[str, ...]


class ResidentWeights:
    """Parameters that are always whole; the base of those that are not.

    Attributes:
        is_quiet: before each use there is nothing to do.
        has_backward: before and after a backward pass there is something to do.
    """

    is_quiet = True
    has_backward = False

    def before_forward(self, uses: Uses, pass_id: Hashable, *, backward_next: bool = False) -> None:
        """Return when the parameters of these use-sites are there; see `WeightSource`."""

    def after_forward(self, uses: Uses, pass_id: Hashable, *, again: bool) -> None:
        """The forward pass is through; `again`: its backward pass will need them."""

    def before_backward(self, uses: Uses, pass_id: Hashable) -> None:
        """Return when the parameters of these use-sites are there, for the gradients."""

    def after_backward(self, uses: Uses, pass_id: Hashable) -> None:
        """The backward pass through these use-sites is over."""

    def end_pass(self, pass_id: Hashable) -> None:
        """Nothing of a pass (stage, microbatch) is needed any more."""

    def updated(self) -> None:
        """The owned parameters have changed: make the others' known."""

    def settle(self) -> None:
        """Return when nothing is under way."""


# Use-sites whose buckets are gathered ahead of need. All at once would hold what gloo receives
# for all of them: the whole model once more.
SITES_AHEAD = 2


class UpdatedWeights(ResidentWeights):
    """Stages 1 and 2: whole parameters, of which each rank updates its own part.

    Buckets travel in forward order, in runs that one use-site waits for first. A run is landed
    when its use-site, or a later one, comes, and the runs behind it start then.
    """

    def __init__(
        self, buffers: FlatBuffers, forward: Sequence[Sequence[str]], *, overlap: bool
    ) -> None:
        """Prepare the gathers.

        Args:
            buffers: whose owned values are parts of the whole ones.
            forward: for each stage of this rank its use-sites in the order of a forward pass.
            overlap: gather during the next forward pass, in front of the use.
        """
        self.is_quiet = not overlap
        self._buffers = buffers
        self._overlap = overlap
        self._most = SITES_AHEAD if overlap else 1  # runs under way
        self._runs = _runs_of_uses(buffers, [use for walk in forward for use in walk])
        run_of = {index: number for number, run in enumerate(self._runs) for index in run}
        self._last_run = {
            use: max((run_of.get(index, -1) for index in found), default=-1)
            for use, found in buckets_of_uses(buffers).items()
        }
        self._landed = self._started = len(self._runs)  # so many runs, the first ones
        self._works: list[Work | None] = []  # of the runs under way, in order

    def before_forward(self, uses: Uses, pass_id: Hashable, *, backward_next: bool = False) -> None:
        """Return when the parameters of these use-sites are there, with others on their way.

        Comm: one all-gather per bucket that starts, over its shard group.
        """
        if self._landed < len(self._runs):
            self._land_through(max(self._last_run.get(use, -1) for use in uses))
            self._start_ahead()

    def updated(self) -> None:
        """Gather every cut bucket, the first of the forward pass first.

        Comm: one all-gather per bucket over its shard group, now or ahead of need.
        """
        self.settle()
        self._landed = self._started = 0
        if self._overlap:
            self._start_ahead()
        else:
            self.settle()

    def settle(self) -> None:
        """Gather what is left, and wait for it.

        Comm: as `updated`; so all data ranks call it.
        """
        self._land_through(len(self._runs) - 1)

    def _land_through(self, run: int) -> None:
        """Wait for a run and all before it."""
        while self._landed <= run:
            self._start_ahead()
            for work in self._works[: len(self._runs[self._landed])]:
                if work is not None:
                    work.wait()
            del self._works[: len(self._runs[self._landed])]
            self._landed += 1

    def _start_ahead(self) -> None:
        """Start as many runs as may be under way."""
        buffers = self._buffers
        while self._started < min(self._landed + self._most, len(self._runs)):
            for index in self._runs[self._started]:
                group = buffers.ownership.groups[buffers.layout.buckets[index].key.grid].shard
                self._works.append(
                    all_gather_into(
                        buffers.values[index], buffers.owned_values[index], group, async_op=True
                    )
                )
            self._started += 1


class GatheredWeights(ResidentWeights):
    """Stage 3: a bucket is whole only while somebody holds it.

    A pass holds the buckets of a use-site from before its forward to after it, or to after
    its backward, or until the next update (`reshard_after`); weight gradients need none.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        forward: Sequence[Sequence[str]],
        backward: Sequence[Sequence[str]],
        *,
        overlap: bool,
        reshard_after: str,
    ) -> None:
        """Prepare the gathers.

        Args:
            buffers: whose whole values exist while they are gathered.
            forward: for each stage of this rank its use-sites in the order of a forward pass.
            backward: those that a backward pass needs, in its order.
            overlap: gather the next use-site of the stage while one is used.
            reshard_after: "forward", "backward" or "step".
        """
        self.is_quiet, self.has_backward = False, True
        self._buffers = buffers
        self._overlap = overlap
        self._reshard_after = reshard_after
        self._buckets = buckets_of_uses(buffers)
        self._forward = {here: after for walk in forward for here, after in pairwise(walk)}
        self._backward = {here: after for walk in backward for here, after in pairwise(walk)}
        # A walk that ends in what its backward pass does not read: the head.
        ends = zip(forward, backward, strict=True)
        turns = {there[-1]: back[0] for there, back in ends if back and there[-1] not in back}
        self._turn = {**self._forward, **turns}
        self._holders: dict[int, set[Hashable]] = {i: set() for i in buffers.gathered_buckets}
        self._ahead: set[int] = set()  # gathered for the next use-site, nobody holds them
        self._works: dict[int, Work | None] = {}

    def before_forward(self, uses: Uses, pass_id: Hashable, *, backward_next: bool = False) -> None:
        """Hold these use-sites, and look ahead.

        Comm: one all-gather per bucket that is not there, over its shard group.
        """
        self._hold(uses, pass_id)
        self._look_ahead(self._turn if backward_next else self._forward, uses[-1])

    def after_forward(self, uses: Uses, pass_id: Hashable, *, again: bool) -> None:
        """Let go, unless the backward pass needs them and they are to stay for it."""
        if not again or self._reshard_after == "forward":
            self._let_go(uses, pass_id)

    def before_backward(self, uses: Uses, pass_id: Hashable) -> None:
        """Hold these use-sites again, and look ahead; see `before_forward`."""
        self._hold(uses, pass_id)
        self._look_ahead(self._backward, uses[0])

    def after_backward(self, uses: Uses, pass_id: Hashable) -> None:
        """Let go."""
        self._let_go(uses, pass_id)

    def end_pass(self, pass_id: Hashable) -> None:
        """Let go of everything the pass still holds, and of what was gathered in vain."""
        for index, holders in self._holders.items():
            if pass_id in holders:
                holders.discard(pass_id)
                self._drop_unheld(index)
        for index in sorted(self._ahead):
            self._ahead.discard(index)
            self._drop_unheld(index)

    def updated(self) -> None:
        """Drop everything: the owned parameters have changed."""
        self.settle()
        for index, holders in self._holders.items():
            holders.clear()
            if index not in self._buffers.released:
                self._buffers.release_values(index)
        self._ahead.clear()

    def settle(self) -> None:
        """Wait for all gathers."""
        for index in tuple(self._works):
            self._wait(index)

    def _hold(self, uses: Uses, pass_id: Hashable) -> None:
        wanted = self._gathered(uses)
        for index in wanted:
            self._holders[index].add(pass_id)
            self._ahead.discard(index)
            self._gather(index)
        for index in wanted:
            self._wait(index)

    def _look_ahead(self, walk: Mapping[str, str], use: str) -> None:
        if not self._overlap or use not in walk:
            return
        for index in self._gathered((walk[use],)):
            if index in self._buffers.released:
                self._ahead.add(index)
                self._gather(index)

    def _gathered(self, uses: Uses) -> list[int]:
        found = dict.fromkeys(index for use in uses for index in self._buckets.get(use, ()))
        return [index for index in found if index in self._holders]

    def _gather(self, index: int) -> None:
        """Start gathering a bucket unless it is there or on its way."""
        buffers = self._buffers
        if index not in buffers.released:
            return
        buffers.restore_values(index)
        group = buffers.ownership.groups[buffers.layout.buckets[index].key.grid].shard
        self._works[index] = all_gather_into(
            buffers.values[index], buffers.owned_values[index], group, async_op=True
        )

    def _wait(self, index: int) -> None:
        work = self._works.pop(index, None)
        if work is not None:
            work.wait()

    def _let_go(self, uses: Uses, pass_id: Hashable) -> None:
        if self._reshard_after == "step":
            return
        for index in self._gathered(uses):
            self._holders[index].discard(pass_id)
            self._drop_unheld(index)

    def _drop_unheld(self, index: int) -> None:
        if self._reshard_after == "step" or self._holders[index] or index in self._ahead:
            return
        if index not in self._buffers.released:
            self._wait(index)
            self._buffers.release_values(index)


def buckets_of_uses(buffers: FlatBuffers) -> Mapping[str, tuple[int, ...]]:
    """Use-site -> buckets with a parameter that it uses."""
    found: dict[str, dict[int, None]] = {}
    for slot in buffers.layout.slots.values():
        for use in slot.physical.uses:
            found.setdefault(use, {})[slot.bucket] = None
    return {use: tuple(buckets) for use, buckets in found.items()}


def _runs_of_uses(buffers: FlatBuffers, order: Sequence[str]) -> list[list[int]]:
    """The cut buckets in forward order, those together that one use-site needs first."""
    layout = buffers.layout
    runs: dict[str, list[int]] = {}
    for index in reversed(range(len(layout.buckets))):
        bucket = layout.buckets[index]
        if buffers.ownership.is_cut(bucket):
            uses = [use for name in bucket.names for use in layout.slots[name].physical.uses]
            runs.setdefault(min(uses, key=order.index), []).append(index)
    return [runs[use] for use in sorted(runs, key=order.index)]


def build_weights(
    buffers: FlatBuffers,
    forward: Sequence[Sequence[str]],
    backward: Sequence[Sequence[str]],
    *,
    overlap: bool,
    reshard_after: str,
) -> ResidentWeights:
    """What the stage of the buffers' ownership needs; see the classes."""
    if buffers.gathered_buckets:
        return GatheredWeights(
            buffers, forward, backward, overlap=overlap, reshard_after=reshard_after
        )
    if buffers.ownership.stage > 0:
        return UpdatedWeights(buffers, forward, overlap=overlap)
    return ResidentWeights()
