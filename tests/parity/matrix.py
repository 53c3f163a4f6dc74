"""The matrix of layouts as a table of factors; a later axis is one more row and one branch.

Every value of every factor alone, and pairs of values in a covering set, are run by the
ordinary test suite; the whole product by `scripts/parity_full.sh`. Pipelines have a table of
their own: what they have to be crossed with is the number of microbatches, and models have
to have a layer for every stage.
"""

from collections.abc import Callable, Mapping, Sequence

from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    microbatch_axis,
    native_axis,
    pipeline_axis,
    recompute_axis,
    sequence_axis,
    tensor_axis,
)
from megatron_lite.verify.covering import Row, all_rows, covering_rows
from tests.parity.models import GLOBAL_BATCH_SIZE, MODELS

MOST_RANKS = 8
# The first value of a factor is the reference's. micro-batch 0: a rank's whole share at once.
FACTORS: Mapping[str, Sequence[object]] = {
    "model": tuple(MODELS),
    "precision": ("fp64", "fp32"),
    "tp": (1, 2, 4, 8),
    "sp": (False, True),
    "dp": (1, 2, 4),
    "micro-batch": (0, 1, 2, 4),
    "recompute": ("none", "selective", "full"),
    "native": ("on", "off"),
}
# name -> (pipeline ranks, stages per rank, --pipeline-schedule)
PIPELINES: Mapping[str, tuple[int, int, str | None]] = {
    "1f1b-2": (2, 1, None),
    "1f1b-4": (4, 1, "1f1b"),
    "gpipe-2": (2, 1, "gpipe"),
    "gpipe-4": (4, 1, "gpipe"),
    "interleaved-2x2": (2, 2, None),
    "interleaved-4x2": (4, 2, "interleaved"),
    "zb-h1-2": (2, 1, "zb-h1"),
    "zb-h1-4": (4, 1, "zb-h1"),
    "zb-h2-2": (2, 1, "zb-h2"),
    "interleaved-zb-2x2": (2, 2, "interleaved-zb"),
    "zbv-2": (2, 2, "zbv"),
    "zbv-4": (4, 2, "zbv"),
    "v-half-2": (2, 2, "v-half"),
    "v-min-2": (2, 2, "v-min"),
    "dualpipev-2": (2, 2, "dualpipev"),
    "auto-2": (2, 1, "auto"),
}
V_SHAPED = ("zbv", "v-half", "v-min", "dualpipev")  # always two stages per rank
# microbatches per step and data-parallel rank, in terms of the pipeline ranks p
MICROBATCHES: Mapping[str, Callable[[int], int]] = {
    "1": lambda p: 1,
    "p-1": lambda p: p - 1,
    "p": lambda p: p,
    "p+1": lambda p: p + 1,
    "2p": lambda p: 2 * p,
    "4p": lambda p: 4 * p,
}
PIPELINE_FACTORS: Mapping[str, Sequence[object]] = {
    "pipeline": tuple(PIPELINES),
    "microbatches": tuple(MICROBATCHES),
    "model": ("gpt2", "llama"),  # tied and untied
    "tp": ("1", "2", "2-sp"),
    "dp": (1, 2),
    "recompute": ("none", "full"),
    "native": ("on", "off"),
}
LAYOUT_FACTORS = tuple(name for name in FACTORS if name not in ("model", "precision"))


def is_layout(row: Row) -> bool:
    """Whether the row can run on the pool and is not another row's twin."""
    tp, dp, micro = int(str(row["tp"])), int(str(row["dp"])), int(str(row["micro-batch"]))
    if row["sp"] and tp == 1:
        return False
    fits = micro == 0 or micro * dp < GLOBAL_BATCH_SIZE
    return fits and tp * dp <= MOST_RANKS


def axes_of(row: Row) -> tuple[Axis, ...]:
    """The axes that the row switches on."""
    tp, dp, micro = int(str(row["tp"])), int(str(row["dp"])), int(str(row["micro-batch"]))
    axes: list[Axis] = []
    if tp > 1:
        axes.append(tensor_axis(tp))
    if row["sp"]:
        axes.append(sequence_axis())
    if dp > 1:
        axes.append(data_axis(dp))
    if micro:
        axes.append(microbatch_axis(micro))
    if row["recompute"] != "none":
        axes.append(recompute_axis(str(row["recompute"])))
    if row["native"] == "off":
        axes.append(native_axis("off"))
    return tuple(axes)


def whole_product() -> list[Row]:
    """Every layout of every model in every precision."""
    return [row for row in all_rows(FACTORS, is_layout) if axes_of(row)]


def single_axis_rows() -> list[Row]:
    """Each axis value alone (SP with the TP it needs): in fp64 for every model, fp32 for one."""
    base: Row = {name: values[0] for name, values in FACTORS.items()}
    rows = []
    for row in whole_product():
        changed = [name for name in LAYOUT_FACTORS if row[name] != base[name]]
        alone = len(changed) == 1 or changed == ["tp", "sp"]
        once = row["precision"] == "fp64" or row["model"] == "llama"
        if alone and once and not (row["sp"] and row["tp"] == 8):
            rows.append(row)
    return rows


def ordinary_rows() -> list[Row]:
    """What runs every time."""
    rows = single_axis_rows()
    pairs = covering_rows(FACTORS, is_layout)
    return rows + [row for row in pairs if row not in rows and axes_of(row)]


def row_name(row: Row) -> str:
    """The test's name."""
    layout = "+".join(axis.name for axis in axes_of(row))
    sizes = "-".join(
        f"{name}{row[name]}" for name in ("tp", "dp", "micro-batch", "recompute", "native")
    )
    return f"{row['model']}-{row['precision']}-{layout}-{sizes}"


def pipeline_of(name: str) -> Axis:
    """The axis of a name in `PIPELINES`."""
    ranks, stages, schedule = PIPELINES[name]
    return pipeline_axis(ranks, schedule, 1 if schedule in V_SHAPED else stages)


def layers_for(name: str) -> int:
    """Layers of the model that this pipeline cuts: one per stage or more."""
    ranks, stages, _ = PIPELINES[name]
    return max(4, ranks * stages)


def batch_of(row: Row) -> tuple[int, int, int]:
    """Microbatches, global batch and micro-batch size; few batches, as each has a reference."""
    ranks, _, _ = PIPELINES[str(row["pipeline"])]
    count = MICROBATCHES[str(row["microbatches"])](ranks)
    batch = 16 if 16 % count == 0 else 2 * count
    return count, batch, batch // (count * int(str(row["dp"])))


def is_pipeline_layout(row: Row) -> bool:
    """Whether the row can run on the pool and is not another row's twin."""
    ranks, _, _ = PIPELINES[str(row["pipeline"])]
    ranks *= int(str(row["tp"])[0]) * int(str(row["dp"]))
    count, _, micro = batch_of(row)
    is_twin = row["microbatches"] == "p-1" and count == 1
    return ranks <= MOST_RANKS and micro > 0 and not is_twin


def pipeline_axes(row: Row) -> tuple[Axis, ...]:
    """The axes that a row of `PIPELINE_FACTORS` switches on."""
    axes = [pipeline_of(str(row["pipeline"]))]
    if row["tp"] != "1":
        axes.append(tensor_axis(2))
    if row["tp"] == "2-sp":
        axes.append(sequence_axis())
    if row["dp"] != 1:
        axes.append(data_axis(int(str(row["dp"]))))
    axes.append(microbatch_axis(batch_of(row)[2]))
    if row["recompute"] != "none":
        axes.append(recompute_axis(str(row["recompute"])))
    if row["native"] == "off":
        axes.append(native_axis("off"))
    return tuple(axes)


def pipeline_rows(*, whole: bool) -> list[Row]:
    """Every pipeline with every number of microbatches and, in pairs or all, the rest."""
    make = all_rows if whole else covering_rows
    return make(PIPELINE_FACTORS, is_pipeline_layout)


def pipeline_row_name(row: Row) -> str:
    """The test's name."""
    return "-".join(
        f"{name}{value}" if name in ("tp", "dp", "native") else str(value)
        for name, value in row.items()
    ).replace("-none", "")
