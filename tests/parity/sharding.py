"""The sharded data axis as a table of factors, crossed with the axes that exist.

Buckets are small, so that every parameter is cut somewhere and several travel at once; three
data ranks divide no parameter count evenly.
"""

import tempfile
from collections.abc import Mapping, Sequence

from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    expert_axis,
    microbatch_axis,
    recompute_axis,
    sequence_axis,
    sharding_axis,
    tensor_axis,
)
from megatron_lite.verify.covering import Row, all_rows, covering_rows
from tests.parity.matrix import MOST_RANKS, PIPELINES, pipeline_of

_UNSHARDED = ("--gradient-accumulation", "unsharded")
_OVERLAP = ("--overlap-param-gather",)
_HYBRID = ("--num-distributed-optimizer-instances", "2")
# name -> (strategy, how)
SHARDINGS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "none-levels": ("no_shard", _HYBRID),
    "optim": ("optim", ()),
    "optim-overlap": ("optim", _OVERLAP),
    "optim-hybrid": ("optim", (*_HYBRID, *_OVERLAP)),
    "optim-offload": (
        "optim",
        ("--optimizer-offload", "disk", "--offload-dir", tempfile.gettempdir()),
    ),
    "grads": ("optim_grads", _OVERLAP),
    "grads-whole": ("optim_grads", _UNSHARDED),
    "grads-hybrid": ("optim_grads", _HYBRID),
    "params": ("optim_grads_params", ()),
    "params-overlap": ("optim_grads_params", _OVERLAP),
    "params-kept": ("optim_grads_params", ("--reshard-after", "backward", *_OVERLAP)),
    "params-step": ("optim_grads_params", ("--reshard-after", "step", *_UNSHARDED)),
    "params-hybrid": ("optim_grads_params", (*_HYBRID, *_OVERLAP)),
}
FACTORS: Mapping[str, Sequence[object]] = {
    "sharding": tuple(SHARDINGS),
    "model": ("gpt2", "llama", "mixtral"),  # tied, untied, experts
    "dp": (2, 3, 4),
    "accumulate": (1, 4),
    "tp": ("1", "2-sp"),
    "pipeline": ("none", "1f1b-2", "zbv-2"),
    "recompute": ("none", "full"),
    "optimizer": ("sgd", "adam", "muon"),
    "precision": ("fp64", "fp32"),
}
BUCKET_FLAGS = "--ddp-bucket-size 1500"


def is_layout(row: Row) -> bool:
    """Whether the row can run on the pool."""
    dp, pp = int(str(row["dp"])), 1 if row["pipeline"] == "none" else 2
    _, flags = SHARDINGS[str(row["sharding"])]
    copies = 2 if _HYBRID[0] in flags else 1
    if row["sharding"] == "optim-offload" and row["optimizer"] == "muon":
        return False  # refused: whole matrices are not updated chunk by chunk
    return dp * pp * int(str(row["tp"])[0]) <= MOST_RANKS and dp % copies == 0


def batch_of(row: Row) -> int:
    """Samples per step: four microbatches of one sample or one of four on each data rank."""
    return 4 * int(str(row["dp"]))


def micro_of(row: Row) -> int | None:
    """Samples per microbatch of the reference too: what balances experts depends on it."""
    return 4 // int(str(row["accumulate"])) if row["model"] == "mixtral" else None


def layers_for(row: Row) -> int:
    """Layers of the model that this row cuts."""
    if row["pipeline"] == "none":
        return 2
    ranks, stages, _ = PIPELINES[str(row["pipeline"])]
    return ranks * stages


def axes_of(row: Row) -> tuple[Axis, ...]:
    """The axes that the row switches on."""
    axes = [data_axis(int(str(row["dp"])))]
    strategy, flags = SHARDINGS[str(row["sharding"])]
    axes.append(sharding_axis(strategy, *flags, *BUCKET_FLAGS.split()))
    if row["tp"] != "1":
        axes += [tensor_axis(2), sequence_axis()]
    if row["pipeline"] != "none":
        axes.append(pipeline_of(str(row["pipeline"])))
    axes.append(microbatch_axis(4 // int(str(row["accumulate"]))))
    if row["model"] == "mixtral" and int(str(row["dp"])) * int(str(row["tp"])[0]) % 2 == 0:
        axes.append(expert_axis(2, 1))
    if row["recompute"] != "none":
        axes.append(recompute_axis(str(row["recompute"])))
    return tuple(axes)


def sharding_rows(*, whole: bool) -> list[Row]:
    """Every pair of values, or every combination."""
    make = all_rows if whole else covering_rows
    return make(FACTORS, is_layout)


def row_name(row: Row) -> str:
    """The test's name."""
    return "-".join(
        f"{name}{value}" if name in ("tp", "dp", "accumulate") else str(value)
        for name, value in row.items()
    ).replace("-none", "")
