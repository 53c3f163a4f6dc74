"""Any layout, the same numbers: the matrix of axes, by the equality classes.

The ordinary rows run always; the whole product with MLITE_PARITY_FULL=1
(`scripts/parity_full.sh`). References run once per model and precision.
"""

import os

import pytest

from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    microbatch_axis,
    native_axis,
    recompute_axis,
    sequence_axis,
    tensor_axis,
)
from megatron_lite.verify.classes import BITWISE, MATCH32_ADAM, Tolerances
from megatron_lite.verify.compare import compare_runs
from megatron_lite.verify.covering import Row, covering_rows
from tests.parity.conftest import Certifiers
from tests.parity.matrix import (
    FACTORS,
    axes_of,
    is_layout,
    ordinary_rows,
    row_name,
    single_axis_rows,
    whole_product,
)
from tests.parity.models import MODELS

pytestmark = pytest.mark.parity

FULL = os.environ.get("MLITE_PARITY_FULL") == "1"
ROWS = whole_product() if FULL else ordinary_rows()
MEASURED = {row_name(row) for row in single_axis_rows()}
# The floor: a key bias without rotary has gradient 0 up to rounding, here bf16's.
NEAR_BF16 = Tolerances(
    "NEAR bf16", activation=2e-2, loss=5e-3, gradient=6e-2, grad_norm=5e-2, weight=1e-2,
    update=1.0, floor=1e-4,
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_layout_equals_one_process(certifier_of: Certifiers, row: Row) -> None:
    certifier = certifier_of(row["model"], row["precision"])
    differences, shares = certifier.compare(axes_of(row), measure=row_name(row) in MEASURED)
    assert not differences, "\n".join(map(str, differences[:8]))
    assert not certifier.share_faults(axes_of(row), shares)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_recomputation_changes_no_bit(
    certifier_of: Certifiers, model: str, granularity: str
) -> None:
    certifier = certifier_of(model, limits=BITWISE)
    differences, _ = certifier.compare((recompute_axis(granularity),))
    assert not differences, "\n".join(map(str, differences[:8]))


@pytest.mark.parametrize(
    "axes",
    [
        (tensor_axis(2),),
        (tensor_axis(2), sequence_axis(), data_axis(2)),
        (data_axis(2), microbatch_axis(2)),
    ],
    ids=lambda axes: "+".join(axis.name for axis in axes),
)
def test_adam_in_fp32_stays_within_its_class(
    certifier_of: Certifiers, axes: tuple[Axis, ...]
) -> None:
    adam = "--optimizer adam --lr 0.001 --weight-decay 0.1"
    certifier = certifier_of("llama", "fp32", adam, limits=MATCH32_ADAM)
    differences, _ = certifier.compare(axes)
    assert not differences, "\n".join(map(str, differences[:8]))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "axes",
    [
        (),
        (native_axis("off"),),
        (tensor_axis(2), sequence_axis()),
        (tensor_axis(2), data_axis(2), microbatch_axis(1)),
    ],
    ids=lambda axes: "+".join(axis.name for axis in axes) or "one",
)
def test_bf16_stays_near_the_fp64_run(
    certifier_of: Certifiers, model: str, axes: tuple[Axis, ...]
) -> None:
    certifier = certifier_of(model)
    bf16 = Axis("bf16", flags=("--fp64=false", "--bf16"))
    record, _ = certifier.run((*axes, bf16))
    found = compare_runs(certifier.reference, record, NEAR_BF16)
    # Initial values are rounded, so only what the model computes is compared.
    far = [d for d in found if d.phase in ("data", "activation", "loss", "gradient", "norm")]
    assert not far, "\n".join(map(str, far[:8]))


def test_ordinary_rows_contain_every_legal_pair() -> None:
    rows = covering_rows(FACTORS, is_layout)
    pairs = {(a, b) for row in rows for a in row.items() for b in row.items()}
    legal = {(a, b) for row in whole_product() for a in row.items() for b in row.items()}
    assert legal <= pairs
    assert len(rows) < len(whole_product()) / 30
