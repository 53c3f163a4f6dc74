"""Main gradients of a step: accumulation, readiness, reduction over the data axis.

Accumulation is in place in flat buckets; a bucket is reduced as soon as every contribution
is in it and all earlier ones of the launch order are under way. Readiness is counted, not
guessed: a parameter is complete after (use-sites x microbatches) reports by whoever writes
its gradient, so a bucket can leave neither early nor out of order. With sharded
accumulation a bucket is complete, and leaves, once per microbatch. Invariant: all ranks
reduce the same ranges in the same order, overlapped or not, hence with equal bits.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from megatron_lite.mesh.collectives import all_reduce
from megatron_lite.mesh.groups import Groups
from megatron_lite.shard.buffers import FlatBuffers, is_released, release, restore
from megatron_lite.shard.flat import Bucket
from megatron_lite.shard.partial import PartialReduction, partial_axes
from megatron_lite.shard.reduce import BucketReduction

# Reduce-scatters under way at once: one on the wire, one behind it. Each holds memory: on gloo
# what it receives, as long as its bucket, and a transient bucket's gradient besides. Counted
# and not polled, so that memory and the order of collectives do not depend on time.
MOST_UNDER_WAY = 2


@dataclass
class _Account:
    """What one parameter has received in this step."""

    name: str
    gradient: Tensor
    bucket: int
    uses: int
    expected: int = 0
    received: int = 0


@dataclass
class _Rounds:
    """How far a bucket is: it is reduced once per round.

    A round is a whole step, or a microbatch with sharded accumulation.
    """

    accounts: list[_Account] = field(default_factory=list)
    microbatches: int = 1  # of a round
    awaited: int = 0  # parameters still to complete the round that is open
    complete: int = 0  # rounds whose contributions are all in
    launched: int = 0
    flight: BucketReduction | None = None
    spare: Tensor | None = None  # receives a round's sum that is then added

    def open_next(self) -> None:
        """Count what the next round waits for; contributions may have run ahead."""
        target = (self.complete + 1) * self.microbatches
        self.awaited = sum(a.received < a.uses * target for a in self.accounts)


class MainGradients:
    """The gradient sink of one rank (`microbatch.GradientSink`).

    A step is `start_step`, any number of `main_grad` and `written`, `finish`. Between
    `finish` and the next `start_step` the owned gradients are the global ones, equal on all
    ranks that own the same region.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        groups: Groups,
        *,
        overlap: bool,
        sharded_accumulation: bool = False,
        homes: Sequence[int] | None = None,
    ) -> None:
        """Prepare the accounts and the reductions.

        Args:
            buffers: parameters and main gradients.
            groups: of this rank, for gradients that are partial over an axis.
            overlap: reduce complete buckets during the backward pass; else all in `finish`,
                or with sharded accumulation at once and waited for.
            sharded_accumulation: reduce after every microbatch and add up the owned part.
            homes: bucket -> the stage whose backward pass completes it; default 0.
        """
        layout = buffers.layout
        self.buffers = buffers
        self.overlap = overlap
        self.sharded_accumulation = sharded_accumulation
        self.partial_reductions = tuple(
            PartialReduction(
                axis,
                buffers.pieces,
                buffers.windows,
                buffers.owned_gradients,
                getattr(groups, axis),
            )
            for axis in partial_axes(buffers.pieces)
        )
        self._accounts: dict[nn.Parameter, _Account] = {
            buffers.params[name]: _Account(name, buffers.gradient_of(name), slot.bucket, slot.uses)
            for name, slot in layout.slots.items()
        }
        self._homes = homes if homes is not None else [0] * len(layout.buckets)
        self._rounds = [_Rounds() for _ in layout.buckets]
        for account in self._accounts.values():
            self._rounds[account.bucket].accounts.append(account)
        self._order: Sequence[int] = ()
        self._next = 0  # in the order
        self._flying: deque[int] = deque()  # buckets being scattered, oldest first
        self._open = False
        self._reported: set[str] = set()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The ranges reduced over the data groups, in order."""
        return self.buffers.layout.buckets

    def start_step(self, num_microbatches: int, passes: Sequence[int] = ()) -> None:
        """Clear the main gradients and expect `num_microbatches` x use-sites contributions.

        Args:
            num_microbatches: of this data rank.
            passes: with sharded accumulation the stages of this rank in the order in which
                their backward passes end, each once per microbatch; equal on all data
                ranks. Default: one stage.
        """
        if self._open:
            raise RuntimeError("start_step: the step before has not been finished")
        for index, bucket in enumerate(self._rounds):
            is_transient = self.buffers.is_transient(index)
            memory = self.buffers.owned_gradients if is_transient else self.buffers.gradients
            memory[index].zero_()
            for account in bucket.accounts:
                account.expected = account.uses * num_microbatches
                account.received = 0
            bucket.microbatches = 1 if self._has_rounds(index) else num_microbatches
            bucket.complete = bucket.launched = 0
            bucket.open_next()
        self._order = self._launch_order(num_microbatches, passes or [0] * num_microbatches)
        self._next = 0
        self._open = True

    def _has_rounds(self, index: int) -> bool:
        """Whether the bucket is reduced after every microbatch."""
        return self.sharded_accumulation and self.buffers.is_transient(index)

    def _launch_order(self, num_microbatches: int, passes: Sequence[int]) -> list[int]:
        """Buckets in the order of their reductions, each once per round.

        Where some buckets have rounds, one without is complete with its last microbatch.
        """
        indices = range(len(self.buckets))
        if not any(self._has_rounds(index) for index in indices):
            return [*indices]
        found: list[int] = []
        left = dict.fromkeys(indices, num_microbatches)
        for stage in passes:
            for index in indices:
                if self._homes[index] == stage:
                    left[index] -= 1
                    if self._has_rounds(index) or left[index] == 0:
                        found.append(index)
        if any(left.values()):
            raise ValueError("start_step: the passes do not end every bucket once per microbatch")
        return found

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Buffer to add a contribution to, in the parameter's shape.

        Raises:
            RuntimeError: the parameter has all its contributions (its bucket may be on the
                wire), or no step is open.
        """
        account = self._accounts[param]
        if not self._open or account.received >= account.expected:
            raise RuntimeError(self._surplus(account))
        self._make_writable(account.bucket)
        return account.gradient

    def written(self, param: nn.Parameter) -> None:
        """Count one complete contribution; reduce what has become ready.

        Comm: reductions of complete buckets over their data groups, not waited for.
        """
        account = self._accounts[param]
        if not self._open or account.received >= account.expected:
            raise RuntimeError(self._surplus(account))
        account.received += 1
        bucket = self._rounds[account.bucket]
        if account.received == account.uses * bucket.microbatches * (bucket.complete + 1):
            bucket.awaited -= 1
            while bucket.awaited == 0:  # beyond the last round nothing is ever complete
                bucket.complete += 1
                bucket.open_next()
            if self.overlap or self.sharded_accumulation:
                self._launch(only_complete=True)

    def finish(self) -> tuple[str, ...]:
        """Complete all reductions: the owned gradients are then the global ones.

        A parameter without any contribution has gradient zero here, and its bucket is
        reduced all the same: other ranks may have contributed.

        Returns:
            Names of such parameters, each only the first time in the run.

        Raises:
            RuntimeError: a parameter received some but not all of its contributions.

        Comm: the remaining buckets (data groups), what is left of their levels, then one
            all-reduce per axis with partial gradients.
        """
        if not self._open:
            raise RuntimeError("finish: no step was started")
        absent = []
        for account in self._accounts.values():
            if 0 < account.received < account.expected:
                raise RuntimeError(
                    f"{account.name}: {account.received} of {account.expected} gradient "
                    f"contributions arrived"
                )
            if account.received < account.expected and account.name not in self._reported:
                absent.append(account.name)
        self._launch(only_complete=False)
        # The partial sums below and the norm read the results.
        for bucket in self._rounds:
            if bucket.flight is not None:
                bucket.flight.cross()
        for index in range(len(self._rounds)):
            self._land(index)
        self._flying.clear()
        self._cross_once()
        for reduction in self.partial_reductions:
            reduction.run()
        self._open = False
        self._reported.update(absent)
        return tuple(absent)

    def _launch(self, only_complete: bool) -> None:
        """Start reducing the next buckets, in order, up to the first incomplete one."""
        for position in itertools.count(self._next):
            self._next = position
            if position == len(self._order):
                return
            index = self._order[position]
            bucket = self._rounds[index]
            if only_complete and bucket.complete <= bucket.launched:
                return
            is_scattered = self.buckets[index].shards > 1
            if is_scattered:
                self._keep_flying(MOST_UNDER_WAY - 1)
            self._make_writable(index)
            bucket.flight = self._reduce(index, bucket)
            bucket.launched += 1
            if is_scattered:
                self._flying.append(index)
                if not self.overlap:
                    self._keep_flying(0)

    def _keep_flying(self, most: int) -> None:
        """Land the oldest buckets, and send the others on to their copies."""
        while len(self._flying) > most:
            self._land(self._flying.popleft())
        for index in self._flying:
            flight = self._rounds[index].flight
            assert flight is not None
            flight.cross()

    def _reduce(self, index: int, bucket: _Rounds) -> BucketReduction:
        buffers, layout = self.buffers, self.buckets[index]
        whole, own = buffers.gradients[index], buffers.owned_gradients[index]
        if bucket.launched > 0:  # the sum of earlier rounds stays where it is
            own = bucket.spare = own.new_empty(own.shape)
        return BucketReduction(
            layout,
            whole,
            own,
            buffers.ownership.groups[layout.key.grid],
            is_cut=buffers.ownership.is_cut(layout),
            across=not self._has_rounds(index),
        )

    def _land(self, index: int) -> None:
        """Wait for a bucket's reduction and put the result where it belongs."""
        bucket = self._rounds[index]
        if bucket.flight is None:
            return
        bucket.flight.cross()
        bucket.flight.finish()
        bucket.flight = None
        if bucket.spare is not None:
            self.buffers.owned_gradients[index].add_(bucket.spare)
            bucket.spare = None
        if self.buffers.is_transient(index):
            release(self.buffers.gradients[index])

    def _make_writable(self, index: int) -> None:
        """Give a transient bucket memory, once it is not on the wire."""
        if not self.buffers.is_transient(index):
            return
        whole = self.buffers.gradients[index]
        if self._rounds[index].flight is not None:
            self._land(index)
            self._flying.remove(index)
        if is_released(whole):
            restore(whole)
            whole.zero_()

    def _cross_once(self) -> None:
        """Reduce the sums of all rounds over the copies."""
        works = []
        for index, layout in enumerate(self.buckets):
            groups = self.buffers.ownership.groups[layout.key.grid]
            if self._has_rounds(index):
                owned = self.buffers.owned_gradients[index]
                works.append(all_reduce(owned, groups.replicate, async_op=True))
        for work in works:
            if work is not None:
                work.wait()

    def _surplus(self, account: _Account) -> str:
        if not self._open:
            return f"{account.name}: a gradient contribution outside of a step"
        return (
            f"{account.name}: more than the {account.expected} gradient contributions that "
            f"its {account.uses} use-sites make in this step"
        )
