"""Mixtures of experts in any layout, the same numbers: against one process, by the classes.

Every router, dispatcher and kind of balance meets, in pairs, EP, ETP (also other than TP),
TP with and without SP, DP, pipelines, sharding and recomputation; the whole product with
MLITE_PARITY_FULL=1 (`scripts/parity_full.sh`). Compared are all losses, every logical
gradient, the norm with an active clip, updates, and the routers' balancing biases.
"""

import os
import re

import pytest

from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    expert_axis,
    sequence_axis,
    sharding_axis,
    tensor_axis,
)
from megatron_lite.verify.certify import Certifier
from megatron_lite.verify.classes import MATCH32, MATCH64
from megatron_lite.verify.covering import Row
from tests.parity.conftest import Certifiers
from tests.parity.experts import (
    GLOBAL_BATCH_SIZE,
    REPLICATED,
    axes_of,
    expert_rows,
    layers_for,
    row_name,
)
from tests.parity.matrix import pipeline_of
from tests.parity.models import FAMILIES
from tests.parity.sharding import BUCKET_FLAGS

pytestmark = pytest.mark.parity

FAMILY_LAYOUTS: dict[str, tuple[Axis, ...]] = {
    "tp2-sp-dp2-ep2-params": (
        *(tensor_axis(2), sequence_axis(), data_axis(2), expert_axis(2, 2)),
        sharding_axis("optim_grads_params", *BUCKET_FLAGS.split()),
    ),
    "tp2-ep2-1f1b": (tensor_axis(2), pipeline_of("1f1b-2"), expert_axis(2, 1)),
    "dp2-ep2-zbv": (data_axis(2), pipeline_of("zbv-2"), expert_axis(2, 1, "allgather")),
}
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


@pytest.mark.parametrize("axes", FAMILY_LAYOUTS.values(), ids=FAMILY_LAYOUTS)
@pytest.mark.parametrize("model", FAMILIES)
def test_attention_and_experts_of_a_family_equal_one_process(
    certifier_of: Certifiers, model: str, axes: tuple[Axis, ...]
) -> None:
    certifier = certifier_of(model, extra="--num-layers 4", steps=2, batch=8, micro=1)
    differences, _ = certifier.compare(axes)
    assert not differences, "\n".join(map(str, differences[:8]))


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("mixtral", "--moe-expert-capacity-factor 1.0 --moe-reroute-candidates 2"),
        ("deepseek", "--moe-expert-capacity-factor 0.75 --moe-token-drop-policy position"),
        ("qwen3-moe", "--moe-expert-capacity-factor 0.75"),
    ],
    ids=["rerouted", "by-position", "by-weight"],
)
def test_a_full_expert_takes_the_same_tokens(
    certifier_of: Certifiers, model: str, flags: str, precision: str
) -> None:
    certifier = certifier_of(
        model,
        precision,
        f"--num-layers 2 {flags}",
        steps=3,
        batch=GLOBAL_BATCH_SIZE,
        micro=2,
        limits=MATCH32 if precision == "fp32" else MATCH64,
    )
    axes = (tensor_axis(2), sequence_axis(), data_axis(2), expert_axis(2, 1))
    differences, _ = certifier.compare(axes)
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


def replicating(certifier_of: Certifiers, model: str, layers: int) -> Certifier:
    """A run that replicates two experts; its reference is one process."""
    return certifier_of(
        model,
        extra=f"--num-layers {layers} --moe-replicated-experts 2",
        steps=3,
        batch=GLOBAL_BATCH_SIZE,
        micro=1,
    )


@pytest.mark.parametrize("name", REPLICATED)
def test_replicated_experts_equal_one_process(certifier_of: Certifiers, name: str) -> None:
    model, layers, axes = REPLICATED[name]
    # The closed form counts dropped tokens and leaves multi-token prediction out.
    verdict = replicating(certifier_of, model, layers).certify(axes, measure=model == "mixtral")
    assert verdict.holds, [*map(str, verdict.causes), *verdict.share_faults]


@pytest.mark.parametrize("tensor", [(), (tensor_axis(2),)], ids=["etp1", "etp2"])
def test_unsummed_gradients_of_replicas_are_caught_and_named(
    certifier_of: Certifiers, tensor: tuple[Axis, ...]
) -> None:
    axes = (*tensor, data_axis(2), expert_axis(2, needs="dp"))
    fault = "tests.parity.expert_faults:replica_gradients_not_summed"
    verdict = replicating(certifier_of, "mixtral", 2).certify(axes, fault=fault, measure=False)
    (cause,) = verdict.causes
    assert cause.axes == ("ep",), str(cause)
    assert cause.first.phase == "gradient", str(cause)
    assert re.match(r"decoder\.layers\.1\.mlp\.experts\.linear_fc2", cause.first.name), str(cause)
