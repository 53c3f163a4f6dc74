"""Mixtures of experts in any layout, the same numbers: against one process, by the classes.

Every router, dispatcher and kind of balance meets, in pairs, EP, ETP (also other than TP),
TP with and without SP, DP, pipelines, sharding and recomputation; the whole product with
MLITE_PARITY_FULL=1 (`scripts/parity_full.sh`). Compared are all losses, every logical
gradient, the norm with an active clip, updates, and the routers' balancing biases.
"""

import os

import pytest

from megatron_lite.verify.axes import tensor_axis
from megatron_lite.verify.classes import MATCH32, MATCH64
from megatron_lite.verify.covering import Row
from tests.parity.conftest import Certifiers
from tests.parity.experts import GLOBAL_BATCH_SIZE, axes_of, expert_rows, layers_for, row_name

pytestmark = pytest.mark.parity

ROWS = expert_rows(whole=os.environ.get("MLITE_PARITY_FULL") == "1")


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_experts_equal_one_process(certifier_of: Certifiers, row: Row) -> None:
    certifier = certifier_of(
        row["model"],
        str(row["precision"]),
        f"--num-layers {layers_for(row)}",
        steps=3,
        batch=GLOBAL_BATCH_SIZE,
        micro=int(str(row["micro"])),
        limits=MATCH32 if row["precision"] == "fp32" else MATCH64,
    )
    differences, _ = certifier.compare(axes_of(row))
    assert not differences, "\n".join(map(str, differences[:8]))


def test_scores_that_are_off_by_rounding_choose_the_same_experts(
    certifier_of: Certifiers,
) -> None:
    # The reference is taken only where every choice is clearer than this.
    certifier = certifier_of(
        "mixtral", "fp32", "--num-layers 2", steps=3, batch=GLOBAL_BATCH_SIZE, micro=1
    )
    fault = "tests.parity.expert_faults:scores_off_by_rounding"
    differences, _ = certifier.compare((tensor_axis(2),), fault=fault)
    assert not differences, "\n".join(map(str, differences[:8]))
