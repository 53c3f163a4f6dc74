"""Mixtures of experts as a table of factors, crossed with the axes that exist.

Capacities and the losses of routers are defined over one microbatch, so a row and its
reference have the same micro-batch size. 16 heads do not fit the models, so TP stops at 4.
"""

from collections.abc import Mapping, Sequence

from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    expert_axis,
    recompute_axis,
    sequence_axis,
    sharding_axis,
    tensor_axis,
)
from megatron_lite.verify.covering import Row, all_rows, covering_rows
from tests.parity.matrix import MOST_RANKS, PIPELINES, pipeline_of
from tests.parity.models import MIXTURES
from tests.parity.sharding import BUCKET_FLAGS

GLOBAL_BATCH_SIZE = 16
FACTORS: Mapping[str, Sequence[object]] = {
    "model": tuple(MIXTURES),
    "ep": (1, 2, 4),
    "etp": (1, 2, 4),
    "dispatcher": ("alltoall", "allgather"),
    "tp": ("1", "2", "2-sp", "4-sp"),
    "dp": (1, 2, 4),
    "pipeline": ("none", "1f1b-2", "zbv-2"),
    "sharding": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "micro": (1, 2),
    "recompute": ("none", "full"),
    "precision": ("fp64", "fp32"),
}

# Layouts that replicate two experts, whose weights and gradients take part in everything.
REPLICATED: Mapping[str, tuple[str, int, tuple[Axis, ...]]] = {  # model, layers, layout
    "ep2-tp2": ("mixtral", 2, (tensor_axis(2), data_axis(2), expert_axis(2))),
    "ep4-etp1-tp2-sp-recompute": (
        "mixtral",
        2,
        (
            *(tensor_axis(2), sequence_axis(), data_axis(2), expert_axis(4, 1)),
            *(sharding_axis("optim_grads", *BUCKET_FLAGS.split()), recompute_axis("full")),
        ),
    ),
    "ep4-zero1": (
        "deepseek",
        2,
        (data_axis(4), expert_axis(4), sharding_axis("optim", *BUCKET_FLAGS.split())),
    ),
    "ep2-zbv-zero3": (
        "biased",
        4,
        (
            *(data_axis(2), pipeline_of("zbv-2"), expert_axis(2)),
            sharding_axis("optim_grads_params", *BUCKET_FLAGS.split()),
        ),
    ),
}


def is_layout(row: Row) -> bool:
    """Whether the row can run on the pool and is not another row's twin."""
    tp, dp = int(str(row["tp"])[0]), int(str(row["dp"]))
    pp = 1 if row["pipeline"] == "none" else 2
    block = int(str(row["ep"])) * int(str(row["etp"]))
    if tp * dp * pp > MOST_RANKS or (tp * dp) % block:
        return False
    is_same = block == 1 and row["dispatcher"] == "allgather"
    return not is_same and (dp > 1 or row["sharding"] == "no_shard")


def layers_for(row: Row) -> int:
    """Layers of the model that this row cuts; at least one dense and one MoE layer."""
    if row["pipeline"] == "none":
        return 2
    ranks, stages, _ = PIPELINES[str(row["pipeline"])]
    return ranks * stages


def axes_of(row: Row) -> tuple[Axis, ...]:
    """The axes that the row switches on."""
    tp, dp = int(str(row["tp"])[0]), int(str(row["dp"]))
    axes: list[Axis] = [tensor_axis(tp)] if tp > 1 else []
    if str(row["tp"]).endswith("sp"):
        axes.append(sequence_axis())
    if dp > 1:
        axes.append(data_axis(dp))
    if row["pipeline"] != "none":
        axes.append(pipeline_of(str(row["pipeline"])))
    etp = int(str(row["etp"]))
    axes.append(expert_axis(int(str(row["ep"])), etp, str(row["dispatcher"])))
    if row["sharding"] != "no_shard":
        axes.append(sharding_axis(str(row["sharding"]), *BUCKET_FLAGS.split()))
    if row["recompute"] != "none":
        axes.append(recompute_axis(str(row["recompute"])))
    return tuple(axes)


def expert_rows(*, whole: bool) -> list[Row]:
    """Every pair of values, or every combination."""
    make = all_rows if whole else covering_rows
    return [row for row in make(FACTORS, is_layout) if row["tp"] != "1" or row["dp"] != 1]


def row_name(row: Row) -> str:
    """The test's name."""
    return "-".join(
        f"{name}{value}" if name in ("ep", "etp", "tp", "dp", "micro") else str(value)
        for name, value in row.items()
    ).replace("-none", "")
