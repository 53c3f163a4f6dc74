"""Any sharding of the data axis, the same numbers: by the equality classes.

Every strategy meets, in pairs, tied, untied and mixed models, data ranks that divide nothing, TP
with SP, pipelines, accumulation, recomputation and optimizers; the whole product with
MLITE_PARITY_FULL=1 (`scripts/parity_full.sh`). The clip is active.
"""

import os

import pytest

from megatron_lite.verify.classes import MATCH32, MATCH32_ADAM, MATCH64
from megatron_lite.verify.covering import Row
from tests.parity.conftest import Certifiers
from tests.parity.sharding import axes_of, batch_of, layers_for, micro_of, row_name, sharding_rows

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
