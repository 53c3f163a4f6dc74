"""Any schedule, the same numbers: pipelines against one process, by the equality classes.

Every schedule meets every number of microbatches and, in pairs, tied and untied models,
TP, SP, DP, recomputation and native operations; the whole product with
MLITE_PARITY_FULL=1 (`scripts/parity_full.sh`).
"""

import os

import pytest

from megatron_lite.verify.axes import Axis, microbatch_axis, recompute_axis
from megatron_lite.verify.classes import BITWISE
from megatron_lite.verify.covering import Row
from tests.parity.conftest import Certifiers
from tests.parity.matrix import (
    PIPELINES,
    batch_of,
    layers_for,
    pipeline_axes,
    pipeline_of,
    pipeline_row_name,
    pipeline_rows,
)

pytestmark = pytest.mark.parity

ROWS = pipeline_rows(whole=os.environ.get("MLITE_PARITY_FULL") == "1")


@pytest.mark.parametrize("row", ROWS, ids=pipeline_row_name)
def test_pipeline_equals_one_process(certifier_of: Certifiers, row: Row) -> None:
    _, batch, _ = batch_of(row)
    layers = f"--num-layers {layers_for(str(row['pipeline']))}"
    certifier = certifier_of(row["model"], extra=layers, steps=3, batch=batch)
    differences, _ = certifier.compare(pipeline_axes(row))
    assert not differences, "\n".join(map(str, differences[:8]))


@pytest.mark.parametrize(("batch", "micro"), [(8, 2), (5, 1)], ids=["m4", "m5"])
@pytest.mark.parametrize("name", PIPELINES)
def test_first_losses_and_gradients_equal_accumulation_bit_by_bit(
    certifier_of: Certifiers, name: str, batch: int, micro: int
) -> None:
    certifier = certifier_of(
        "llama", extra="--num-layers 8", steps=1, limits=BITWISE, batch=batch, micro=micro
    )
    differences, _ = certifier.compare((pipeline_of(name), microbatch_axis(micro)))
    # The norm, and with it the clipped update, sums squares in another order.
    found = [str(d) for d in differences if d.phase not in ("norm", "update")]
    assert not found, "\n".join(found[:8])
    assert {d.phase for d in differences} <= {"norm", "update"}
    assert certifier.reference.tensors(1, "grad")


@pytest.mark.parametrize(
    "recompute",
    [recompute_axis("full"), recompute_axis("full", "block", 1), recompute_axis("selective")],
    ids=["uniform", "block", "selective"],
)
@pytest.mark.parametrize("name", ["1f1b-2", "interleaved-2x2", "zbv-2"])
def test_every_rank_holds_and_computes_its_share_also_when_it_recomputes(
    certifier_of: Certifiers, name: str, recompute: Axis
) -> None:
    certifier = certifier_of("gpt2", extra="--num-layers 8", steps=2)
    axes = (pipeline_of(name), microbatch_axis(2), recompute)
    _, shares = certifier.run(axes, measure=True, dump=False)
    assert certifier.share_faults(axes, shares) == ()
    assert len({share.gemm_flops for share in shares}) == 2  # who has the head has more
