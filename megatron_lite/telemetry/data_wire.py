"""Elements that a rank sends over the data axis in one step, closed form.

With Psi the elements of all buckets and m microbatches, times (d-1)/d per rank of d:
undivided and with divided optimizer state 2 Psi (an all-reduce; a reduce-scatter and an
all-gather), with divided gradients (m+1) Psi or, accumulated unsharded, 2 Psi; with divided
parameters one gather or more per unit and m or 1 reduce-scatters. Over several copies of
the shards each level is counted by itself. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.mesh.cost import wire_bytes
from megatron_lite.telemetry.data_axis import DataLayout, DataSharding, Extent, Site

WHOLE: Mapping[str, str] = {"dense": "dp_cp", "expert": "edp"}
SHARD: Mapping[str, str] = {"dense": "dp_shard", "expert": "edp_shard"}
ACROSS: Mapping[str, str] = {"dense": "dp_replicate", "expert": "edp_replicate"}


@dataclass(frozen=True)
class Message:
    """One kind of collective, as the recorder names it.

    Attributes:
        op: "all_reduce.sum", "reduce_scatter.sum" or "all_gather".
        group: name of the group.
        elements: of the full message.
        dtype: of what is sent.
    """

    op: str
    group: str
    elements: int
    dtype: str


def step_messages(
    layout: DataLayout,
    main_grad: str,
    sharding: DataSharding | None = None,
    *,
    microbatches: int = 1,
) -> Counter[Message]:
    """Collectives over the data groups in one step that updates; none on groups of one.

    Args:
        layout: buckets of the rank.
        main_grad: dtype of the main gradients, in which they are reduced.
        sharding: nothing is divided when None.
        microbatches: of the step.
    """
    cut = sharding or DataSharding()
    sent: Counter[Message] = Counter()
    for index, extent in enumerate(layout.extents):
        gathers = gathers_of(layout, index, cut, microbatches)
        for message, count in _of_bucket(extent, main_grad, cut, microbatches, gathers):
            if count:
                sent[message] += count
    return sent


def _of_bucket(
    extent: Extent, main_grad: str, cut: DataSharding, microbatches: int, gathers: int
) -> list[tuple[Message, int]]:
    """What one bucket makes of it."""
    grid, n = extent.grid, extent.elements
    ranks, copies = cut.shard_ranks(extent), cut.shard_copies(extent)
    is_cut = cut.is_cut(extent, 1)
    if not is_cut and (copies == 1 or ranks == 1):  # no levels
        whole = Message("all_reduce.sum", WHOLE[grid], n, main_grad)
        return [(whole, 1 if ranks * copies > 1 else 0)]
    has_rounds = cut.is_cut(extent, 2) and cut.shape.sharded_accumulation
    # With nothing cut, gradients are put together again by levels; else parameters are.
    gathered = extent.dtype if is_cut else main_grad
    return [
        (
            Message("reduce_scatter.sum", SHARD[grid], n, main_grad),
            microbatches if has_rounds else 1,
        ),
        (Message("all_reduce.sum", ACROSS[grid], cut.shard(extent), main_grad), int(copies > 1)),
        (Message("all_gather", SHARD[grid], n, gathered), gathers),
    ]


def gathers_of(layout: DataLayout, index: int, cut: DataSharding, microbatches: int) -> int:
    """How often a bucket is gathered in a step.

    Per microbatch once for each use-site that reads it in the forward pass, and again in
    the backward pass unless it was kept. The ends of the model read nothing in the backward
    pass, so an embedding costs one gather, a tied one two. Kept for the backward pass, a
    pipeline with several microbatches in flight needs fewer: this is its most.
    """
    if not cut.is_cut(layout.extents[index], 3) or cut.shape.reshard_after == "step":
        return 1
    reads = _reads(layout.forward, index)
    if cut.shape.reshard_after == "forward":
        reads += _reads(layout.backward, index)
    return microbatches * reads


def _reads(sites: tuple[Site, ...], index: int) -> int:
    return sum(any(index in use for use in site) for site in sites)


def sent_elements(messages: Mapping[Message, int], cut: DataSharding) -> dict[str, float]:
    """Elements that one rank sends in rings, by group."""
    sizes: dict[str, int] = {}
    for grid in WHOLE:
        ranks, copies = cut.ranks.get(grid, 1), cut.copies.get(grid, 1)
        sizes |= {WHOLE[grid]: ranks * copies, SHARD[grid]: ranks, ACROSS[grid]: copies}
    total: dict[str, float] = {}
    for message, count in messages.items():
        op = message.op.partition(".")[0]
        sent = count * wire_bytes(op, sizes[message.group], message.elements)
        total[message.group] = total.get(message.group, 0.0) + sent
    return total
