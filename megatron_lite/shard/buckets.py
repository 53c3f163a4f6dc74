"""Main gradients under replicated data parallelism.

Accumulation is in place in flat buffers; a bucket is all-reduced over the data group as
soon as every contribution of the step is in it and all earlier buckets are under way.
Readiness is counted, not guessed: a parameter is complete after (use-sites x microbatches)
reports by whoever writes its gradient, so a bucket can leave neither early nor out of
order. Invariant: all ranks reduce the same ranges in the same order, overlapped or not,
hence with equal bits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor, nn

from megatron_lite.mesh.collectives import Work, all_reduce
from megatron_lite.mesh.groups import Group, Groups
from megatron_lite.shard.buffers import FlatBuffers
from megatron_lite.shard.flat import Bucket
from megatron_lite.shard.partial import PartialReduction, partial_axes


@dataclass
class _Account:
    """What one parameter has received in this step."""

    name: str
    gradient: Tensor
    bucket: int
    uses: int
    expected: int = 0
    received: int = 0


class MainGradients:
    """The gradient sink of one rank (`microbatch.GradientSink`).

    A step is `start_step`, any number of `main_grad` and `written`, `finish`. Between
    `finish` and the next `start_step` the buffers hold the global gradients, equal on all
    ranks that hold the same region.
    """

    def __init__(self, buffers: FlatBuffers, groups: Groups, *, overlap: bool) -> None:
        """Prepare the accounts and the reductions.

        Args:
            buffers: parameters and main gradients.
            groups: of this rank; dense parameters reduce over dp_cp, experts over edp.
            overlap: reduce complete buckets during the backward pass; else all in `finish`.
        """
        layout = buffers.layout
        self.buffers = buffers
        self.overlap = overlap
        self.partial_reductions = tuple(
            PartialReduction(axis, buffers.pieces, buffers.gradients, getattr(groups, axis))
            for axis in partial_axes(buffers.pieces)
        )
        self._data_groups: dict[str, Group] = {"dense": groups.dp_cp, "expert": groups.edp}
        self._accounts: dict[nn.Parameter, _Account] = {
            buffers.params[name]: _Account(name, buffers.gradient_of(name), slot.bucket, slot.uses)
            for name, slot in layout.slots.items()
        }
        self._incomplete = [0] * len(layout.buckets)  # parameters still awaited, per bucket
        self._launched: list[Work | None] = []  # one per bucket under way, in bucket order
        self._open = False
        self._reported: set[str] = set()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The ranges reduced over the data groups, in order."""
        return self.buffers.layout.buckets

    def start_step(self, num_microbatches: int) -> None:
        """Zero the main gradients and expect `num_microbatches` x use-sites contributions."""
        if self._open:
            raise RuntimeError("start_step: the step before has not been finished")
        for buffer in self.buffers.gradients.values():
            buffer.zero_()
        self._incomplete = [0] * len(self.buckets)
        for account in self._accounts.values():
            account.expected = account.uses * num_microbatches
            account.received = 0
            self._incomplete[account.bucket] += account.expected > 0
        self._launched = []
        self._open = True

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Buffer to add a contribution to, in the parameter's shape.

        Raises:
            RuntimeError: the parameter has all its contributions (its bucket may be on the
                wire), or no step is open.
        """
        account = self._accounts[param]
        if not self._open or account.received >= account.expected:
            raise RuntimeError(self._surplus(account))
        return account.gradient

    def written(self, param: nn.Parameter) -> None:
        """Count one complete contribution; reduce what has become ready.

        Comm: all-reduces of complete buckets over their data group, not waited for.
        """
        account = self._accounts[param]
        if not self._open or account.received >= account.expected:
            raise RuntimeError(self._surplus(account))
        account.received += 1
        if account.received == account.expected:
            self._incomplete[account.bucket] -= 1
            if self.overlap:
                self._launch(only_complete=True)

    def finish(self) -> tuple[str, ...]:
        """Complete all reductions: the buffers then hold global gradients.

        A parameter without any contribution has gradient zero here, and its bucket is
        reduced all the same: other ranks may have contributed.

        Returns:
            Names of such parameters, each only the first time in the run.

        Raises:
            RuntimeError: a parameter received some but not all of its contributions.

        Comm: the remaining buckets (data groups), then one all-reduce per axis with
            partial gradients.
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
        for work in self._launched:
            if work is not None:
                work.wait()  # the partial sums below and the norm read the result
        for reduction in self.partial_reductions:
            reduction.run()
        self._open = False
        self._reported.update(absent)
        return tuple(absent)

    def _launch(self, only_complete: bool) -> None:
        """Start reducing the next buckets, in order, up to the first incomplete one."""
        for index in itertools.count(len(self._launched)):
            if index == len(self.buckets) or (only_complete and self._incomplete[index]):
                return
            bucket = self.buckets[index]
            gradients = self.buffers.gradients[bucket.key][bucket.start : bucket.stop]
            group = self._data_groups[bucket.key.grid]
            self._launched.append(all_reduce(gradients, group, async_op=True))

    def _surplus(self, account: _Account) -> str:
        if not self._open:
            return f"{account.name}: a gradient contribution outside of a step"
        return (
            f"{account.name}: more than the {account.expected} gradient contributions that "
            f"its {account.uses} use-sites make in this step"
        )
