"""Every planted bug of the sharded data axis is caught, and its axis, phase and tensor named."""

import re
from typing import NamedTuple

import pytest

from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    microbatch_axis,
    pipeline_axis,
    sequence_axis,
    sharding_axis,
    tensor_axis,
)
from megatron_lite.verify.classes import Tolerances
from tests.parity import sharding_faults
from tests.parity.conftest import Certifiers

DP2, MBS1 = data_axis(2), microbatch_axis(1)
SMALL = ("--ddp-bucket-size", "1500")
OPTIM = sharding_axis("optim", *SMALL)
GRADS = sharding_axis("optim_grads", *SMALL)
PARAMS = sharding_axis("optim_grads_params", "--overlap-param-gather")
KEPT = sharding_axis("optim_grads_params", "--reshard-after", "step")
HYBRID = sharding_axis("optim_grads", "--num-distributed-optimizer-instances", "2", *SMALL)
SP2 = (tensor_axis(2), sequence_axis())
# Masters exist beside bf16 weights; what rounding does to correct code stays below.
ROUNDED = Tolerances("bf16", 0.1, 0.01, 0.2, 0.1, 1e-2, 0.2)

pytestmark = pytest.mark.parity


class Planted(NamedTuple):
    """A bug, the layout that meets it, and what it must be called."""

    name: str
    layout: tuple[Axis, ...]
    axes: tuple[str, ...]
    phase: str
    tensor: str  # regular expression
    model: str = "llama"


SHARDING = ("sharding",)
ANY = r".*\.weight"
TIED = r"embedding\.word_embeddings\.weight"
PLANTED = (
    Planted("second_bucket_not_reduced", (DP2, OPTIM), SHARDING, "gradient", ANY),
    Planted("second_bucket_not_reduced", (DP2, GRADS), SHARDING, "gradient", ANY),
    Planted("shard_of_the_next_rank_updated", (DP2, OPTIM), SHARDING, "update", ANY),
    Planted("gather_misses_the_last_bucket", (DP2, OPTIM), SHARDING, "loss", "lm_loss"),
    Planted("parameters_not_gathered_after_the_update", (DP2, OPTIM), SHARDING, "loss", "lm_loss"),
    Planted("gathered_parameters_kept_over_the_update", (DP2, KEPT), SHARDING, "loss", "lm_loss"),
    Planted("bucket_in_use_overwritten_by_the_prefetch", (DP2, PARAMS), SHARDING, "gradient", ANY),
    Planted("transient_gradient_not_zeroed", (DP2, GRADS), SHARDING, "norm", "grad_norm"),
    Planted(
        "accumulated_shard_overwritten",
        (DP2, MBS1, GRADS),
        ("micro-batch", "sharding"),
        "gradient",
        ANY,
    ),
    Planted("padding_counted_in_the_norm", (DP2, OPTIM), SHARDING, "norm", "grad_norm"),
    Planted("copies_not_reduced", (data_axis(4), HYBRID), SHARDING, "gradient", ANY),
    Planted(
        "tied_gradient_summed_over_other_cuts",
        (pipeline_axis(2), DP2, OPTIM),
        ("pp", "sharding"),
        "gradient",
        TIED,
        "gpt2",
    ),
    Planted(
        "partial_sums_skipped_on_shards",
        (*SP2, DP2, OPTIM),
        ("sp", "sharding"),
        "gradient",
        r".*layernorm\.weight",
    ),
)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_planted_sharding_fault_is_caught_and_named(
    certifier_of: Certifiers, planted: Planted
) -> None:
    certifier = certifier_of(planted.model, steps=2)
    fault = f"{sharding_faults.__name__}:{planted.name}"
    verdict = certifier.certify(planted.layout, fault=fault, measure=False)
    assert not verdict.holds
    told = [*map(str, verdict.causes)]
    assert [cause.axes for cause in verdict.causes] == [planted.axes], told
    first = verdict.causes[0].first
    assert first.phase == planted.phase, told
    assert re.match(planted.tensor, first.name), told


def test_master_of_another_ranks_range_is_caught_and_named(certifier_of: Certifiers) -> None:
    certifier = certifier_of("llama", "bf16", steps=2, limits=ROUNDED)
    fault = f"{sharding_faults.__name__}:master_of_another_ranks_range"
    assert certifier.certify((DP2, OPTIM), measure=False).holds
    verdict = certifier.certify((DP2, OPTIM), fault=fault, measure=False)
    (cause,) = verdict.causes
    assert (cause.axes, cause.first.phase) == (SHARDING, "activation"), str(cause)


LAYOUTS = {planted.layout: planted.model for planted in PLANTED}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda axes: "+".join(a.name for a in axes))
def test_layouts_of_the_planted_faults_are_certified_without_them(
    certifier_of: Certifiers, layout: tuple[Axis, ...]
) -> None:
    verdict = certifier_of(LAYOUTS[layout], steps=2).certify(layout)
    assert verdict.holds, [*map(str, verdict.causes), *verdict.share_faults]
