"""The attention of newer families in layouts of every axis against one process."""

import pytest

from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    microbatch_axis,
    native_axis,
    pipeline_axis,
    recompute_axis,
    sequence_axis,
    sharding_axis,
    tensor_axis,
)
from tests.parity.conftest import Certifiers
from tests.parity.models import VARIANTS

pytestmark = pytest.mark.parity

LAYOUTS: dict[str, tuple[Axis, ...]] = {
    "tp2": (tensor_axis(2),),
    "tp4-sp": (tensor_axis(4), sequence_axis()),
    "tp8": (tensor_axis(8),),
    "tp2-sp-dp2": (tensor_axis(2), sequence_axis(), data_axis(2), microbatch_axis(2)),
    "tp2-sp-pp2": (tensor_axis(2), sequence_axis(), pipeline_axis(2), microbatch_axis(2)),
    "zbv": (pipeline_axis(2, "zbv"), microbatch_axis(2)),
    "params": (data_axis(2), sharding_axis("optim_grads_params")),
    "selective": (recompute_axis("selective"), native_axis("off")),
    "tp2-sp-full": (tensor_axis(2), sequence_axis(), recompute_axis("full")),
    "plain torch": (tensor_axis(2), native_axis("off")),
}


@pytest.mark.parametrize("model", VARIANTS)
@pytest.mark.parametrize("axes", LAYOUTS.values(), ids=LAYOUTS)
def test_attention_equals_one_process(
    certifier_of: Certifiers, model: str, axes: tuple[Axis, ...]
) -> None:
    differences, _ = certifier_of(model, extra="--num-layers 4", steps=2).compare(axes)
    assert not differences, "\n".join(map(str, differences[:8]))


@pytest.mark.parametrize("model", VARIANTS)
def test_attention_equals_one_process_in_fp32(certifier_of: Certifiers, model: str) -> None:
    certifier = certifier_of(model, "fp32", "--num-layers 4", steps=2)
    differences, _ = certifier.compare((tensor_axis(2), sequence_axis()))
    assert not differences, "\n".join(map(str, differences[:8]))
