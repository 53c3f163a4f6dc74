"""Any sharding of the data axis, the same numbers: by the equality classes.

Every strategy meets, in pairs, tied, untied and mixed models, data ranks that divide nothing, TP
with SP, pipelines, accumulation, recomputation and optimizers; the whole product with
MLITE_PARITY_FULL=1 (`scripts/parity_full.sh`). The clip is active.
"""

import os

import pytest

from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    microbatch_axis,
    sequence_axis,
    sharding_axis,
    tensor_axis,
)
from megatron_lite.verify.classes import BITWISE, MATCH32, MATCH32_ADAM, MATCH64
from megatron_lite.verify.compare import compare_runs
from megatron_lite.verify.covering import Row
from tests.parity.conftest import Certifiers
from tests.parity.matrix import pipeline_of
from tests.parity.sharding import (
    BUCKET_FLAGS,
    axes_of,
    batch_of,
    layers_for,
    micro_of,
    row_name,
    sharding_rows,
)

pytestmark = pytest.mark.parity

ROWS = sharding_rows(whole=os.environ.get("MLITE_PARITY_FULL") == "1")
OPTIMIZERS = {
    "sgd": "",
    # eps: the key bias of gpt2 has gradient 0, and Adam makes rounding noise as large as that.
    "adam": "--optimizer adam --lr 0.001 --weight-decay 0.1 --adam-eps 1e-6",
    "muon": "--optimizer muon --lr 0.001 --weight-decay 0.1 --adam-eps 1e-6",
}
LIMITS = {
    ("fp32", "sgd"): MATCH32,
    ("fp32", "adam"): MATCH32_ADAM,
    ("fp32", "muon"): MATCH32_ADAM,
}


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_sharding_equals_one_process(certifier_of: Certifiers, row: Row) -> None:
    optimizer, precision = str(row["optimizer"]), str(row["precision"])
    certifier = certifier_of(
        row["model"],
        precision,
        f"--num-layers {layers_for(row)} {OPTIMIZERS[optimizer]}",
        steps=3,
        batch=batch_of(row),
        micro=micro_of(row),
        limits=LIMITS.get((precision, optimizer), MATCH64),
    )
    differences, _ = certifier.compare(axes_of(row))
    assert not differences, "\n".join(map(str, differences[:8]))


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize(
    ("optimizer", "axes"),
    [
        ("muon", (tensor_axis(2), sequence_axis(), pipeline_of("1f1b-2"))),
        ("adam", (pipeline_of("zbv-2"), microbatch_axis(1))),
    ],
    ids=["muon-tp2-sp-1f1b", "adam-zbv"],
)
def test_overlapped_gathers_change_no_bit_of_a_run(
    certifier_of: Certifiers, strategy: str, optimizer: str, axes: tuple[Axis, ...]
) -> None:
    extra = f"--num-layers 4 {OPTIMIZERS[optimizer]}"
    certifier = certifier_of("llama", "fp32", extra, steps=3, batch=8)
    records, digests = [], []
    for overlap in ((), ("--overlap-param-gather",)):
        sharded = sharding_axis(strategy, *overlap, *BUCKET_FLAGS.split())
        record, shares = certifier.run((data_axis(2), *axes, sharded))
        records.append(record)
        digests.append([share.weights for share in shares])
    assert not compare_runs(*records, BITWISE)
    assert digests[0] == digests[1]
