"""Bytes of model state per rank, closed form, for every way to divide it over the data axis.

Resident state is exact in elements: parameters, main gradients, masters and moments of every
bucket, whole or one shard of it, padding included. Beside it stands what exists for a moment:
gradient buckets between their first contribution and their reduction, and gathered
parameters. With bf16 parameters, fp32 gradients and Adam over N ranks that is 18,
6 + 12/N, 2 + 16/N and 18/N bytes per parameter (16 undivided with bf16 gradients; Rajbhandari
et al. 2020, ZeRO). No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_lite.telemetry.data_axis import (
    FULL,
    OPTIM,
    OPTIM_GRADS,
    DataLayout,
    DataSharding,
    Extent,
)

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

MOMENTS: Mapping[str, int] = {"adam": 2, "sgd": 1, "sgd_plain": 0}


@dataclass(frozen=True)
class StateBytes:
    """Model state of one rank.

    Attributes:
        parameters, main_grads, masters, moments: there all the time.
        gradient_buckets: most of the undivided gradients that exist at once, where only
            their shards stay.
        gathered: most of the whole parameters that exist at once, where only shards stay.
        largest_unit: name of the largest of these buckets, "" where there is none.
    """

    parameters: int
    main_grads: int
    masters: int
    moments: int
    gradient_buckets: int = 0
    gathered: int = 0
    largest_unit: str = ""

    @property
    def resident(self) -> int:
        """What is there between steps."""
        return self.parameters + self.main_grads + self.masters + self.moments

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
    kinds = [precision.master] * MOMENTS["adam"] if moments is None else list(moments)
    moment_bytes = sum(DTYPE_BYTES[dtype] for dtype in kinds)

    def held(extent: Extent, strategy: str) -> int:
        return cut.owned(extent) if cut.divides(strategy) else extent.elements

    parameters = grads = masters = states = 0
    for extent in layout.extents:
        parameters += held(extent, FULL) * DTYPE_BYTES[extent.dtype]
        grads += held(extent, OPTIM_GRADS) * DTYPE_BYTES[precision.main_grad]
        owned = held(extent, OPTIM)
        if extent.dtype != precision.master:
            masters += owned * DTYPE_BYTES[precision.master]
        states += owned * moment_bytes
    buckets = gathered = 0
    largest = ""
    if cut.divides(OPTIM_GRADS) and layout.extents:
        buckets = peak_gradient_elements(layout, cut, microbatches)
        buckets *= DTYPE_BYTES[precision.main_grad]
        largest = max(layout.extents, key=lambda extent: extent.elements).name
    if cut.divides(FULL):
        gathered = peak_gathered_bytes(layout, cut)
    return StateBytes(parameters, grads, masters, states, buckets, gathered, largest)


def peak_gradient_elements(layout: DataLayout, cut: DataSharding, microbatches: int = 1) -> int:
    """Most elements of whole gradient buckets that exist at once.

    A bucket exists from its first contribution until its reduce-scatter is over: with
    overlap, until the next bucket is complete. One that is accumulated unsharded over
    several microbatches lives until the last one, and then all of them exist together.
    """
    if microbatches > 1 and not cut.sharded_accumulation:
        return layout.elements
    backward = tuple(reversed(layout.sites))
    last = {index: step for step, site in enumerate(backward) for index in site}
    most, alive = 0, set[int]()
    for step, site in enumerate(backward):
        alive |= set(site)
        most = max(most, sum(layout.extents[index].elements for index in alive))
        done = {index for index in alive if last[index] <= step}
        # On the wire while the next site computes; without overlap nothing waits for it.
        alive -= done if not cut.overlap_reduce else {i for i in done if last[i] < step}
    return most


def peak_gathered_bytes(layout: DataLayout, cut: DataSharding) -> int:
    """Most bytes of gathered parameters that exist at once.

    Dropped after each use (`reshard_after` forward), only the unit that computes and, with
    prefetch, the next one are whole; otherwise all units are, at the end of the forward pass.
    """
    if cut.reshard_after != "forward":
        return _parameter_bytes(layout.extents)
    return max(
        (
            _parameter_bytes(layout.extents[index] for index in alive)
            for alive in _read_together(layout.sites, cut.prefetch)
        ),
        default=0,
    )


def _read_together(sites: Sequence[tuple[int, ...]], prefetch: bool) -> Iterator[set[int]]:
    """The buckets that are whole during each use-site, in either direction."""
    for number, site in enumerate(sites):
        alive = set(site)
        if prefetch and number + 1 < len(sites):
            alive |= set(sites[number + 1])
        yield alive


def _parameter_bytes(extents: Iterable[Extent]) -> int:
    return sum(extent.elements * DTYPE_BYTES[extent.dtype] for extent in extents)
