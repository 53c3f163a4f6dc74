"""Multi-token prediction: more losses, an embedding used again, layers behind the head."""

import pytest

from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    pipeline_axis,
    recompute_axis,
    sequence_axis,
    sharding_axis,
    tensor_axis,
)
from tests.parity.conftest import Certifiers
from tests.parity.matrix import GLOBAL_BATCH_SIZE

pytestmark = pytest.mark.parity

TIED, UNTIED = "qwen3", "llama"
DEPTHS = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3"
LAYOUTS = {
    "tp2": (tensor_axis(2),),
    "tp2-sp-dp2": (tensor_axis(2), sequence_axis(), data_axis(2)),
    "pp2": (pipeline_axis(2),),
    "pp2-tp2-sp": (tensor_axis(2), sequence_axis(), pipeline_axis(2, "zb-h1")),
    "zbv": (pipeline_axis(2, "zbv"),),
    "recompute": (tensor_axis(2), sequence_axis(), recompute_axis("full")),
    "params-dp2": (data_axis(2), sharding_axis("optim_grads_params")),
}


@pytest.mark.parametrize("model", [TIED, UNTIED])
@pytest.mark.parametrize("axes", LAYOUTS.values(), ids=LAYOUTS)
def test_depths_equal_one_process(
    certifier_of: Certifiers, model: str, axes: tuple[Axis, ...]
) -> None:
    extra = f"{DEPTHS} --num-layers 4"
    certifier = certifier_of(model, extra=extra, steps=2, batch=GLOBAL_BATCH_SIZE, micro=2)
    differences, _ = certifier.compare(axes)
    assert not differences, str(differences[0])
