"""The axes in which a layout can differ from one process, as rows that combine.

A later parallel axis is one more row: how many ranks it multiplies, and the flags that
switch it on. Everything that runs layouts (the certifier, the parity matrix) combines rows
and never spells a layout out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lite.verify.session import Layout


@dataclass(frozen=True)
class Axis:
    """One difference from the reference.

    Attributes:
        name: "tp", "sp", "dp", "micro-batch", "recompute", ...
        ranks: factor of the number of ranks.
        data_ranks: factor of the data-parallel size.
        flags: what switches it on; they come after the reference's and win.
        needs: name of an axis without which this one means nothing.
    """

    name: str
    ranks: int = 1
    data_ranks: int = 1
    flags: tuple[str, ...] = ()
    needs: str | None = None


@dataclass(frozen=True)
class Case:
    """A reference run and the axes of the layout that has to equal it.

    Attributes:
        flags: of the reference, without micro-batch size.
        global_batch_size: samples per step.
        axes: of the full layout; an axis comes after the one it needs.
        micro_batch_size: of every run, where the loss depends on it; None lets a run without
            the micro-batch axis take its whole share at once, so that accumulation is
            compared with none.
    """

    flags: tuple[str, ...]
    global_batch_size: int
    axes: tuple[Axis, ...] = ()
    micro_batch_size: int | None = None

    def layout(self, axes: Sequence[Axis] = ()) -> Layout:
        """The run with these axes switched on; none: the reference."""
        data_ranks = math.prod(axis.data_ranks for axis in axes)
        size = self.micro_batch_size or self.global_batch_size // data_ranks
        flags = [word for axis in axes for word in axis.flags]
        name = "+".join(axis.name for axis in axes) or "reference"
        ranks = math.prod(axis.ranks for axis in axes)
        return Layout(name, ranks, ("--micro-batch-size", str(size), *flags))


def tensor_axis(size: int) -> Axis:
    """TP."""
    return Axis("tp", ranks=size, flags=("--tensor-model-parallel-size", str(size)))


def sequence_axis() -> Axis:
    """SP, on top of TP."""
    return Axis("sp", flags=("--sequence-parallel",), needs="tp")


def data_axis(size: int) -> Axis:
    """DP: what is left of the ranks."""
    return Axis("dp", ranks=size, data_ranks=size)


def microbatch_axis(size: int) -> Axis:
    """Micro-batches of `size` samples instead of one with all samples of a rank."""
    return Axis("micro-batch", flags=("--micro-batch-size", str(size)))


def pipeline_axis(size: int, schedule: str | None = None, virtual: int = 1) -> Axis:
    """PP by a schedule, which may want several stages per rank."""
    flags = ["--pipeline-model-parallel-size", str(size)]
    if schedule is not None:
        flags += ["--pipeline-schedule", schedule]
    if virtual > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(virtual)]
    return Axis("pp", ranks=size, flags=tuple(flags))


def recompute_axis(granularity: str, method: str = "uniform", layers: int = 1) -> Axis:
    """Activation recomputation."""
    flags = ["--recompute-granularity", granularity]
    if granularity == "full":
        flags += ["--recompute-method", method, "--recompute-num-layers", str(layers)]
    return Axis("recompute", flags=tuple(flags))


def sharding_axis(strategy: str, *flags: str) -> Axis:
    """Sharding of the data axis; `flags` say how (accumulation, resharding, overlap)."""
    words = ("--data-parallel-sharding-strategy", strategy, *flags)
    return Axis("sharding", flags=words, needs="dp")


def expert_axis(
    size: int,
    tensor: int | None = None,
    dispatcher: str = "alltoall",
    needs: str | None = None,
) -> Axis:
    """EP over ranks that other axes bring, and ETP where it is not TP."""
    flags = ["--expert-model-parallel-size", str(size), "--moe-token-dispatcher-type", dispatcher]
    if tensor is not None:
        flags += ["--expert-tensor-parallel-size", str(tensor)]
    return Axis("ep", flags=tuple(flags), needs=needs)


def native_axis(switch: str) -> Axis:
    """Native operations "on" against a reference in plain torch, or "off" against a native one."""
    return Axis(f"native-{switch}", flags=("--native-ops", switch))


def subsets_by_depth(axes: Sequence[Axis]) -> Iterator[list[tuple[Axis, ...]]]:
    """Combinations that make sense, fewest independent axes first, one list per depth.

    An axis that needs another one counts with it: {tp, sp} is as deep as {tp}, and comes
    after it.
    """
    by_depth: dict[int, list[tuple[Axis, ...]]] = {}
    for size in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, size):
            names = {axis.name for axis in chosen}
            if all(axis.needs is None or axis.needs in names for axis in chosen):
                by_depth.setdefault(len(independent_names(chosen)), []).append(chosen)
    for depth in sorted(by_depth):
        yield by_depth[depth]


def independent_names(axes: Sequence[Axis]) -> tuple[str, ...]:
    """Names without those that only serve another one: {tp, sp} is told as "sp"."""
    served = {axis.needs for axis in axes}
    return tuple(axis.name for axis in axes if axis.name not in served)
