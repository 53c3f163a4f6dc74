"""Pairs of a forward and a backward at the same time: the numbers of one process, and the bits
of one after the other.

Losses, every logical gradient, the norm with an active clip, updates and balancing biases
against one process; and after the last step every weight bitwise what it is without the flag.
"""

import pytest

from megatron_lite.verify.axes import Axis, data_axis, expert_axis, sharding_axis, tensor_axis
from tests.parity.conftest import Certifiers
from tests.parity.matrix import pipeline_of
from tests.parity.sharding import BUCKET_FLAGS

pytestmark = pytest.mark.parity

PAIRS = Axis("pairs", flags=("--overlap-moe-expert-parallel-comm",), needs="ep")
# name -> (model, axes, further flags of the reference)
LAYOUTS = {
    "ep2": ("deepseek", (data_axis(2), expert_axis(2)), "--num-layers 2"),
    "1f1b-2": (
        "deepseek",
        (data_axis(2), pipeline_of("1f1b-2"), expert_axis(2)),
        "--num-layers 2",
    ),
    "optim-gathering-dp4": (
        "mixtral",
        (
            data_axis(4),
            expert_axis(2),
            sharding_axis("optim", "--overlap-param-gather", *BUCKET_FLAGS.split()),
        ),
        "--num-layers 2",
    ),
    "dualpipev-2": (
        "mixtral",
        (data_axis(2), pipeline_of("dualpipev-2"), expert_axis(2)),
        "--num-layers 4",
    ),
    "interleaved-2x2-tp2": (
        "mixtral",
        (tensor_axis(2), pipeline_of("interleaved-2x2"), expert_axis(2, 1)),
        "--num-layers 4 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pairs_equal_one_process_and_one_half_after_the_other_bitwise(
    certifier_of: Certifiers, name: str
) -> None:
    model, axes, flags = LAYOUTS[name]
    certifier = certifier_of(model, "fp64", flags, steps=3, batch=8, micro=1)
    differences, paired = certifier.compare((*axes, PAIRS))
    assert not differences, "\n".join(map(str, differences[:8]))
    _, plain = certifier.run(axes, dump=False)
    assert [share.weights for share in paired] == [share.weights for share in plain]
