"""The layouts in which a reported fault must be impossible; a later axis adds rows here.

Every case that concerns an axis is run from this one table, so that a new axis meets all
old faults. The first row is the reference.
"""

import tempfile
from collections.abc import Collection, Mapping

from megatron_lite.verify.session import Layout

_SP = "--sequence-parallel"


def _tensor(size: int, *more: str) -> tuple[str, ...]:
    return ("--tensor-model-parallel-size", str(size), *more)


def _pipeline(size: int, *more: str) -> tuple[str, ...]:
    return ("--pipeline-model-parallel-size", str(size), *more)


def _sharded(strategy: str, *more: str) -> tuple[str, ...]:
    """Buckets so small that there are many, each with padding."""
    return (SHARDING[1], strategy, "--ddp-bucket-size", "1000", *more)


# "zero" of `axis_sizes`: parts that what is sharded over the data axis is cut into; "offload":
# places where optimizer state lies.
SHARDING = ("--use-distributed-optimizer", "--data-parallel-sharding-strategy")
INSTANCES = "--num-distributed-optimizer-instances"
_GATHER_AHEAD = "--overlap-param-gather"
_OFFLOAD = "--optimizer-offload"
REFERENCE = "1"
LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(REFERENCE),
        Layout("tp2", 2, _tensor(2)),
        Layout("tp4", 4, _tensor(4)),
        Layout("tp2-sp", 2, _tensor(2, _SP)),
        Layout("tp4-sp", 4, _tensor(4, _SP)),
        Layout("dp2", 2),
        Layout("pp2", 2, _pipeline(2)),
        Layout("pp4", 4, _pipeline(4)),
        Layout("pp2-v2", 2, _pipeline(2, "--num-virtual-stages-per-pipeline-rank", "2")),
        Layout("zbv", 2, _pipeline(2, "--pipeline-schedule", "zbv")),
        Layout("pp2-dp2", 4, _pipeline(2, "--pipeline-schedule", "zb-h1")),
        Layout("pp2-tp2-sp", 4, (*_pipeline(2), *_tensor(2, _SP))),
        Layout("tp2-sp-dp2", 4, _tensor(2, _SP)),
        Layout("dp2-optim", 2, _sharded("optim")),
        Layout("dp2-grads", 2, _sharded("optim_grads", _GATHER_AHEAD)),
        Layout("dp2-params", 2, _sharded("optim_grads_params")),
        Layout("dp3-params", 3, _sharded("optim_grads_params", _GATHER_AHEAD)),
        Layout("dp4-hybrid", 4, _sharded("optim_grads_params", INSTANCES, "2")),
        Layout("tp2-sp-dp2-optim", 4, (*_tensor(2, _SP), *_sharded("optim", _GATHER_AHEAD))),
        Layout("pp2-dp2-grads", 4, (*_pipeline(2), *_sharded("optim_grads"))),
        Layout(
            "zbv-dp2-params",
            4,
            (*_pipeline(2, "--pipeline-schedule", "zbv"), *_sharded("optim_grads_params")),
        ),
        Layout(
            "dp2-optim-cpu",
            2,
            (*_sharded("optim"), _OFFLOAD, "cpu", "--optimizer-offload-fraction", "0.5"),
        ),
        Layout(
            "dp2-params-disk",
            2,
            (
                *_sharded("optim_grads_params"),
                *(_OFFLOAD, "disk", "--offload-dir", tempfile.gettempdir()),
            ),
        ),
    )
}
PARALLEL = tuple(name for name in LAYOUTS if name != REFERENCE)
# One layout per kind of cut, where a case is about something else.
FEW = (REFERENCE, "tp2", "dp2", "tp2-sp-dp2")
# Checkpoints go from each of these to each: a later axis joins with its rows above.
RESHARD = tuple(LAYOUTS)
# Axis -> the flag with its size.
AXIS_FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}


def _experts(size: int, tensor: int = 1, dispatcher: str = "alltoall") -> tuple[str, ...]:
    """Expert axes; the dispatcher too, so that both are met."""
    return (
        *("--expert-model-parallel-size", str(size), "--expert-tensor-parallel-size", str(tensor)),
        *("--moe-token-dispatcher-type", dispatcher),
    )


# Mixtures of experts only: dense models have no expert axis.
EXPERT_LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(REFERENCE),
        Layout("tp2", 2, (*_tensor(2), *_experts(1, 2))),
        Layout("dp2-ep2", 2, _experts(2)),
        Layout("dp2-ep2-optim", 2, (*_experts(2, dispatcher="allgather"), *_sharded("optim"))),
        Layout("tp2-sp-ep2", 2, (*_tensor(2, _SP), *_experts(2))),
        Layout("dp4-ep4", 4, _experts(4)),
        Layout("dp4-ep2-etp2", 4, _experts(2, 2, "allgather")),
        Layout("tp2-ep2", 4, (*_tensor(2), *_experts(2))),
        Layout("pp2-dp2-ep2", 4, (*_pipeline(2), *_experts(2))),
        Layout("zbv", 2, _pipeline(2, "--pipeline-schedule", "zbv")),
        Layout("dp4-ep2-params", 4, (*_experts(2), *_sharded("optim_grads_params"))),
    )
}


def axis_sizes(layout: Layout) -> dict[str, int]:
    """Size of every axis of a layout."""
    words = layout.flags
    sizes = {
        axis: int(words[words.index(flag) + 1]) if flag in words else 1
        for axis, flag in AXIS_FLAGS.items()
    }
    sizes["sp"] = 2 if _SP in words else 1
    sizes["dp"] = layout.ranks // (sizes["tp"] * sizes["cp"] * sizes["pp"])
    copies = int(words[words.index(INSTANCES) + 1]) if INSTANCES in words else 1
    is_sharded = any(flag in words for flag in SHARDING)
    sizes["zero"] = sizes["dp"] // copies if is_sharded else 1
    sizes["offload"] = 2 if _OFFLOAD in words else 1
    return sizes


def with_axes(axes: Collection[str], layouts: Mapping[str, Layout] = LAYOUTS) -> tuple[str, ...]:
    """Layouts of the table that cut over all of these axes; none before an axis exists."""
    return tuple(
        name
        for name, layout in layouts.items()
        if all(axis_sizes(layout)[axis] > 1 for axis in axes)
    )


def data_ranks(name: str) -> int:
    """Data-parallel ranks of a layout of the table."""
    return axis_sizes(LAYOUTS[name])["dp"]


def batch_for(name: str, at_least: int) -> int:
    """The smallest global batch from there on that the layout's data ranks divide."""
    ranks = data_ranks(name)
    return -(-at_least // ranks) * ranks
