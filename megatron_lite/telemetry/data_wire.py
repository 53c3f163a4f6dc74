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
from megatron_lite.telemetry.data_axis import (
    FULL,
    NO_SHARD,
    OPTIM_GRADS,
    DataLayout,
    DataSharding,
    Extent,
)

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
    reductions = microbatches if cut.divides(OPTIM_GRADS) and cut.sharded_accumulation else 1
    gathers = unit_gathers(layout, cut, microbatches)
    sent: Counter[Message] = Counter()
    for index, extent in enumerate(layout.extents):
        for message, count in _of_bucket(extent, main_grad, cut, reductions, gathers[index]):
            if count:
                sent[message] += count
    return sent


def _of_bucket(
    extent: Extent, main_grad: str, cut: DataSharding, reductions: int, gathers: int
) -> list[tuple[Message, int]]:
    """What one bucket makes of it."""
    grid, n = extent.grid, extent.elements
    ranks, copies = cut.shard_ranks(extent), cut.shard_copies(extent)
    if cut.strategy == NO_SHARD and copies == 1:
        whole = Message("all_reduce.sum", WHOLE[grid], n, main_grad)
        return [(whole, 1 if ranks > 1 else 0)]
    inside = 1 if ranks > 1 else 0
    # Undivided over several copies, gradients are put together again; else parameters are.
    gathered = main_grad if cut.strategy == NO_SHARD else extent.dtype
    return [
        (Message("reduce_scatter.sum", SHARD[grid], n, main_grad), inside * reductions),
        (Message("all_reduce.sum", ACROSS[grid], cut.owned(extent), main_grad), int(copies > 1)),
        (Message("all_gather", SHARD[grid], n, gathered), inside * gathers),
    ]


def unit_gathers(layout: DataLayout, cut: DataSharding, microbatches: int) -> list[int]:
    """How often each bucket is gathered in a step, the first use to the last."""
    if not cut.divides(FULL) or cut.reshard_after == "step":
        return [1] * len(layout.extents)
    if cut.reshard_after == "backward":
        return [microbatches] * len(layout.extents)
    return [2 * microbatches] * len(layout.extents)


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
