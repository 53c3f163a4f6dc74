"""Bytes of model state per rank, closed form, for every way to divide it over the data axis.

Resident state is exact in elements: parameters, main gradients, masters and moments of every
bucket, whole or one shard of it, padding included. Beside it stands what exists for a moment:
gradient buckets between their first contribution and their reduction, and gathered
parameters. With bf16 parameters, fp32 gradients and Adam over N ranks that is 18,
6 + 12/N, 2 + 16/N and 18/N bytes per parameter (16 undivided with bf16 gradients; Rajbhandari
et al. 2020, ZeRO). No torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_lite.telemetry.data_axis import DataLayout, DataSharding, Extent, Site

if TYPE_CHECKING:
    from megatron_lite.config.plan import PrecisionShape

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "uint8": 1,
    "int64": 8,
}

ADAM_MOMENTS = 2
IN_FLIGHT = 2  # whole gradient buckets under reduction at once, where only shards stay


@dataclass(frozen=True)
class StateBytes:
    """Model state of one rank.

    Attributes:
        parameters, main_grads, masters, moments: there all the time.
        gradient_buckets: most of the undivided gradients that exist at once, where only
            their shards stay.
        gathered: most of the whole parameters that exist at once, where only shards stay.
        largest_unit: the largest bucket that comes and goes, "" where none does.
        elsewhere: of masters and moments, what is not in the memory that is counted here.
    """

    parameters: int
    main_grads: int
    masters: int
    moments: int
    gradient_buckets: int = 0
    gathered: int = 0
    largest_unit: str = ""
    elsewhere: int = 0

    @property
    def resident(self) -> int:
        """What is there between steps."""
        optimizer = self.masters + self.moments - self.elsewhere
        return self.parameters + self.main_grads + optimizer

    @property
    def transient(self) -> int:
        """What comes and goes inside a step."""
        return self.gradient_buckets + self.gathered


def estimate_state(
    layout: DataLayout,
    precision: PrecisionShape,
    sharding: DataSharding | None = None,
    *,
    moments: Sequence[str] | None = None,
    microbatches: int = 1,
) -> StateBytes:
    """Bytes of one rank's model state.

    Args:
        layout: its buckets.
        precision: master and main-gradient dtypes. A parameter stored in the master
            dtype has no separate master.
        sharding: nothing is divided when None.
        moments: dtype of each moment; Adam's two in the master dtype when None.
        microbatches: of a step.
    """
    cut = sharding or DataSharding()
    kinds = [precision.master] * ADAM_MOMENTS if moments is None else list(moments)
    moment_bytes = sum(DTYPE_BYTES[dtype] for dtype in kinds)
    parameters = grads = masters = states = 0
    for extent in layout.extents:
        parameters += cut.held(extent, 3) * DTYPE_BYTES[extent.dtype]
        grads += cut.held(extent, 2) * DTYPE_BYTES[precision.main_grad]
        owned = cut.held(extent, 1)
        if extent.dtype != precision.master:
            masters += owned * DTYPE_BYTES[precision.master]
        states += owned * moment_bytes
    passing = [extent for extent in layout.extents if cut.is_cut(extent, 2)]
    buckets = peak_gradient_elements(layout, cut, microbatches) * DTYPE_BYTES[precision.main_grad]
    return StateBytes(
        *(parameters, grads, masters, states, buckets, peak_gathered_bytes(layout, cut)),
        largest_unit=max(passing, key=lambda extent: extent.elements).name if passing else "",
    )


def peak_gradient_elements(layout: DataLayout, cut: DataSharding, microbatches: int = 1) -> int:
    """Most gradient elements that exist for a time at once, on a rank of one stage.

    A bucket exists from its first contribution until its reduction is over, and at most
    IN_FLIGHT are reduced at once. What is accumulated unsharded over several microbatches
    lives until the last one, and then all buckets exist together. From the second microbatch
    on a reduction needs a shard to receive into, beside the one that accumulates.
    """
    sizes = {
        index: extent.elements
        for index, extent in enumerate(layout.extents)
        if cut.is_cut(extent, 2)
    }
    is_sharded = cut.shape.sharded_accumulation
    if not is_sharded and (microbatches > 1 or not cut.shape.overlap_reduce):
        return sum(sizes.values())
    contributions = [index for index in layout.contributions if index in sizes]
    last = {index: place for place, index in enumerate(contributions)}
    most, alive = 0, dict[int, int]()  # bucket -> elements with its spare shard
    flying: deque[int] = deque()
    for number in range(min(microbatches, 2)):
        for place, index in enumerate(contributions):
            if index in flying:  # needed again before its reduction was over
                flying.remove(index)
                alive[index] = 0
            alive[index] = sizes[index]
            most = max(most, sum(alive.values()))
            if place == last[index]:
                while len(flying) >= IN_FLIGHT:
                    alive[flying.popleft()] = 0
                alive[index] += cut.shard(layout.extents[index]) if number else 0
                most = max(most, sum(alive.values()))
                flying.append(index)
                while flying and not cut.shape.overlap_reduce:
                    alive[flying.popleft()] = 0
    return most


def peak_gathered_bytes(layout: DataLayout, cut: DataSharding) -> int:
    """Most bytes of gathered parameters that exist at once.

    Dropped after each use (`reshard_after` forward) these are the site that computes and,
    with overlap, the use-site after it, behind the head the first of the way back; kept for
    the backward pass, everything that it reads again besides; kept for the step, everything.
    """
    turn = layout.backward[:1] if layout.forward[-1:] != layout.backward[:1] else ()
    kept = {index for site in layout.backward for use in site for index in use}
    most, held = 0, set[int]()
    for sites in (layout.forward, layout.backward):
        for number, site in enumerate(sites):
            here = {index for use in site for index in use}
            alive = held | here
            is_forward = sites is layout.forward
            after = sites[number + 1 : number + 2] or (turn if is_forward else ())
            if cut.shape.overlap_gather and after:
                alive |= set(_next_use(after[0], is_forward=is_forward and after is not turn))
            whole = [layout.extents[index] for index in alive]
            most = max(most, _parameter_bytes(e for e in whole if cut.is_cut(e, 3)))
            if cut.shape.reshard_after == "step":
                held |= here
            elif cut.shape.reshard_after == "backward":
                held |= here & kept
    return most


def _next_use(site: Site, *, is_forward: bool) -> tuple[int, ...]:
    """Only one use-site is gathered ahead, the nearest."""
    return site[0] if is_forward else site[-1]


def _parameter_bytes(extents: Iterable[Extent]) -> int:
    return sum(extent.elements * DTYPE_BYTES[extent.dtype] for extent in extents)
