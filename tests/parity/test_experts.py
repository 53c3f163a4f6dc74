"""Mixtures of experts in every layout against one process, at equal micro-batch size."""

import pytest

from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    expert_axis,
    pipeline_axis,
    recompute_axis,
    sequence_axis,
    sharding_axis,
    tensor_axis,
)
from tests.parity.conftest import Certifiers
from tests.parity.matrix import GLOBAL_BATCH_SIZE
from tests.parity.models import MIXTURES

pytestmark = pytest.mark.parity

LAYOUTS: dict[str, tuple[Axis, ...]] = {
    "tp2": (tensor_axis(2),),
    "tp2-etp1": (tensor_axis(2), expert_axis(1, 1)),
    "tp2-sp-ep2-etp1": (tensor_axis(2), sequence_axis(), expert_axis(2, 1)),
    "dp2-ep2": (data_axis(2), expert_axis(2)),
    "dp2-ep2-gather": (data_axis(2), expert_axis(2, dispatcher="allgather")),
    "dp2-ep1-etp2": (data_axis(2), expert_axis(1, 2)),
    "tp2-dp2-ep2": (tensor_axis(2), data_axis(2), expert_axis(2)),
    "tp2-sp-dp2-ep4-etp1": (tensor_axis(2), sequence_axis(), data_axis(2), expert_axis(4, 1)),
    "pp2-ep2": (data_axis(2), pipeline_axis(2), expert_axis(2)),
    "zbv-ep2": (data_axis(2), pipeline_axis(2, "zbv"), expert_axis(2)),
    "params-ep2": (data_axis(4), expert_axis(2), sharding_axis("optim_grads_params")),
    "recompute-ep2": (data_axis(2), expert_axis(2), recompute_axis("full")),
}


@pytest.mark.parametrize("model", MIXTURES)
@pytest.mark.parametrize("axes", LAYOUTS.values(), ids=LAYOUTS)
def test_experts_equal_one_process(
    certifier_of: Certifiers, model: str, axes: tuple[Axis, ...]
) -> None:
    certifier = certifier_of(
        model, extra="--num-layers 4", steps=2, batch=GLOBAL_BATCH_SIZE, micro=2
    )
    differences, _ = certifier.compare(axes)
    assert not differences, str(differences[0])
