"""Planted bugs of the sharded data axis; see `faults.py`.

Reductions and gathers that forget a bucket or come too early, shards that are another
rank's, sums that are overwritten, copies and tied ends that are cut differently. Where real
memory would be freed, it is filled with what a reuse leaves there: a test must not crash.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_lite.mesh.collectives import Work
from megatron_lite.optim import optimizer
from megatron_lite.shard import buckets
from megatron_lite.shard.buckets import MainGradients
from megatron_lite.shard.buffers import FlatBuffers, is_released
from megatron_lite.shard.gather import GatheredWeights, UpdatedWeights
from megatron_lite.shard.partial import PartialReduction
from megatron_lite.shard.pieces import Range
from megatron_lite.shard.reduce import BucketReduction


class _NoReduction:
    """What a bucket's reduction is when nobody starts it: the rank keeps its own sums."""

    def cross(self) -> None:
        pass

    def finish(self) -> None:
        pass


def _neighbours(buffers: FlatBuffers) -> dict[int, Tensor]:
    """Bucket -> parameters in the window of the next rank of the shard group."""
    found = dict(buffers.owned_values)
    for index, bucket in enumerate(buffers.layout.buckets):
        if not buffers.ownership.is_cut(bucket):
            continue
        group = buffers.ownership.groups[bucket.key.grid].shard
        window = bucket.shard((group.rank + 1) % group.size)
        found[index] = buffers.values[index][window.start : window.stop]
    return found


@contextmanager
def second_bucket_not_reduced() -> Iterator[None]:
    original = MainGradients._reduce

    def planted(self: MainGradients, index: int, bucket: Any) -> Any:
        if index != 1 or not self.buffers.ownership.is_cut(self.buckets[index]):
            return original(self, index, bucket)
        window = self.buffers.windows[index]
        mine = self.buffers.gradients[index][window.start : window.stop]
        if self.buffers.is_transient(index):
            self.buffers.owned_gradients[index].copy_(mine)
        return _NoReduction()

    with patch.object(MainGradients, "_reduce", planted):
        yield


@contextmanager
def shard_of_the_next_rank_updated() -> Iterator[None]:
    original = optimizer.collect_groups

    def planted(buffers: FlatBuffers, segments: Any, weights: Any, *others: Any) -> Any:
        return original(buffers, segments, _neighbours(buffers), *others)

    with patch.object(optimizer, "collect_groups", planted):
        yield


@contextmanager
def master_of_another_ranks_range() -> Iterator[None]:
    """Masters are rounded into the part of the parameters that the next rank owns."""
    original = optimizer.collect_groups

    def planted(buffers: FlatBuffers, *others: Any) -> Any:
        with patch.object(buffers, "owned_values", _neighbours(buffers)):
            return original(buffers, *others)

    with patch.object(optimizer, "collect_groups", planted):
        yield


@contextmanager
def gather_misses_the_last_bucket() -> Iterator[None]:
    """The bucket that is gathered last stays as it was before the first update."""
    original = UpdatedWeights.updated
    calls = [0]

    def planted(self: UpdatedWeights) -> None:
        self.settle()
        kept = self._buffers.values[0].clone()
        original(self)
        calls[0] += 1
        if calls[0] > 1:
            self.settle()
            window = self._buffers.windows[0]
            kept[window.start : window.stop] = self._buffers.owned_values[0]
            self._buffers.values[0].copy_(kept)

    with patch.object(UpdatedWeights, "updated", planted):
        yield


@contextmanager
def parameters_not_gathered_after_the_update() -> Iterator[None]:
    original = UpdatedWeights.updated
    calls = [0]

    def planted(self: UpdatedWeights) -> None:
        calls[0] += 1
        if calls[0] == 1:  # initial values
            original(self)

    with patch.object(UpdatedWeights, "updated", planted):
        yield


@contextmanager
def gathered_parameters_kept_over_the_update() -> Iterator[None]:
    def planted(self: GatheredWeights) -> None:
        self.settle()

    with patch.object(GatheredWeights, "updated", planted):
        yield


@contextmanager
def bucket_in_use_overwritten_by_the_prefetch() -> Iterator[None]:
    """The next bucket's memory is that of the one still in use, which was given back."""
    original = GatheredWeights.before_backward

    def planted(self: GatheredWeights, uses: Any, pass_id: Any) -> None:
        original(self, uses, pass_id)
        if self._ahead and "layer.1" in uses:
            for index in self._gathered(uses):
                self._buffers.values[index].zero_()

    with patch.object(GatheredWeights, "before_backward", planted):
        yield


@contextmanager
def transient_gradient_not_zeroed() -> Iterator[None]:
    """A bucket's memory comes back with the gradients of the time before."""
    release, make_writable = buckets.release, MainGradients._make_writable
    left: dict[int, Tensor] = {}

    def planted_release(tensor: Tensor) -> None:
        left[id(tensor)] = tensor.clone()
        release(tensor)

    def planted(self: MainGradients, index: int) -> None:
        whole = self.buffers.gradients[index]
        is_new = is_released(whole) or self._rounds[index].flight is not None
        make_writable(self, index)
        if self.buffers.is_transient(index) and is_new and id(whole) in left:
            whole.copy_(left[id(whole)])

    with (
        patch.object(buckets, "release", planted_release),
        patch.object(MainGradients, "_make_writable", planted),
    ):
        yield


@contextmanager
def accumulated_shard_overwritten() -> Iterator[None]:
    original = MainGradients._land

    def planted(self: MainGradients, index: int) -> None:
        bucket = self._rounds[index]
        if bucket.flight is not None and bucket.spare is not None:
            self.buffers.owned_gradients[index].zero_()
        original(self, index)

    with patch.object(MainGradients, "_land", planted):
        yield


@contextmanager
def padding_counted_in_the_norm() -> Iterator[None]:
    """The norm runs over whole shards, whose padding holds what an earlier use left."""
    finish, ranges = MainGradients.finish, optimizer.norm_ranges

    def planted_finish(self: MainGradients) -> Any:
        absent = finish(self)
        for index, gradients in self.buffers.owned_gradients.items():
            if not self.buffers.ownership.is_cut(self.buckets[index]):
                continue
            padding = torch.ones(len(gradients), dtype=torch.bool)
            for piece in self.buffers.owned_pieces:
                if piece.bucket == index:
                    padding[piece.start : piece.stop] = False
            gradients[padding] = 0.1
        return absent

    def planted_ranges(pieces: Any, windows: Mapping[int, Any], copies: Any) -> Sequence[Range]:
        if any(count > 1 for _, count in copies.values()):  # whole buckets
            return ranges(pieces, windows, copies)
        return [Range(index, 0, window.elements) for index, window in windows.items()]

    with (
        patch.object(MainGradients, "finish", planted_finish),
        patch.object(optimizer, "norm_ranges", planted_ranges),
    ):
        yield


@contextmanager
def copies_not_reduced() -> Iterator[None]:
    """Hybrid sharding: every instance keeps the sum of its own ranks."""

    def planted(self: BucketReduction) -> None:
        work: Work | None = self._work
        if self._to_cross and work is not None:
            work.wait()
            self._work = None
        self._to_cross = False

    with (
        patch.object(BucketReduction, "cross", planted),
        patch.object(MainGradients, "_cross_once", lambda self: None),
    ):
        yield


@contextmanager
def tied_gradient_summed_over_other_cuts() -> Iterator[None]:
    """The last stage cuts the tied matrix elsewhere: its elements meet others of the first."""
    prepare, run = PartialReduction.__init__, PartialReduction.run

    def planted_init(self: PartialReduction, axis: str, *args: Any) -> None:
        prepare(self, axis, *args)
        windows, gradients = args[1], args[2]
        self.is_shifted = (  # type: ignore[attr-defined]
            axis == "tied_ends"
            and self.group.rank > 0
            and any(windows[index].start > 0 for index in gradients)
        )

    def planted(self: PartialReduction) -> None:
        if not self.is_shifted:  # type: ignore[attr-defined]
            run(self)
            return
        for part in self._ranges:
            part.copy_(part.roll(1))
        run(self)
        for part in self._ranges:
            part.copy_(part.roll(-1))

    with (
        patch.object(PartialReduction, "__init__", planted_init),
        patch.object(PartialReduction, "run", planted),
    ):
        yield


@contextmanager
def partial_sums_skipped_on_shards() -> Iterator[None]:
    """Sequence parallelism's norms and biases are summed only where buckets are whole."""
    prepare, run = PartialReduction.__init__, PartialReduction.run

    def planted_init(
        self: PartialReduction, axis: str, pieces: Any, windows: Any, *args: Any
    ) -> None:
        prepare(self, axis, pieces, windows, *args)
        ends = {piece.bucket: piece.stop for piece in pieces}
        self.is_cut = any(  # type: ignore[attr-defined]
            windows[index].stop < end or windows[index].start > 0 for index, end in ends.items()
        )

    def planted(self: PartialReduction) -> None:
        if not self.is_cut:  # type: ignore[attr-defined]
            run(self)

    with (
        patch.object(PartialReduction, "__init__", planted_init),
        patch.object(PartialReduction, "run", planted),
    ):
        yield
