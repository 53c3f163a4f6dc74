"""The matrix of layouts as a table of factors; a later axis is one more row and one branch.

Every value of every factor alone, and pairs of values in a covering set, are run by the
ordinary test suite; the whole product by `scripts/parity_full.sh`.
"""

from collections.abc import Mapping, Sequence

from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    microbatch_axis,
    native_axis,
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
