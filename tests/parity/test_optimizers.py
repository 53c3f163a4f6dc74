"""Optimizers that see more than an element, in every layout the same updates.

Muon orthogonalises logical matrices and Adafactor sums their rows and columns, so both have
to find them whole behind shards, tensor pieces, shared KV heads, pipeline stages and stacks of
experts, each expert's by itself; groups, decoupled rates and frozen parameters have to be the
same on every rank.
"""

import dataclasses

import pytest

from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    expert_axis,
    sequence_axis,
    sharding_axis,
    tensor_axis,
)
from megatron_lite.verify.classes import MATCH32, MATCH32_ADAM, MATCH64, Tolerances
from tests.parity.conftest import Certifiers
from tests.parity.matrix import pipeline_of
from tests.parity.sharding import BUCKET_FLAGS

pytestmark = pytest.mark.parity

BUCKETS = tuple(BUCKET_FLAGS.split())
STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def sharded(stage: str, *flags: str) -> Axis:
    return sharding_axis(stage, *flags, *BUCKETS)


GROUPED = (
    "--decoupled-lr 0.002 --decoupled-min-lr 0.001 "
    "--param-group *.mlp.*:lr_mult=0.5,wd_mult=2 *.linear_proj.*:lr_mult=3 *norm*:wd_mult=1"
)
OPTIMIZERS = {
    "muon": "--optimizer muon --lr 0.01 --weight-decay 0.1",
    "muon-ahead": (
        "--optimizer muon --lr 0.02 --muon-nesterov --muon-momentum 0.5 "
        "--muon-scale-mode shape_scaling --muon-coefficient-type simple --muon-num-ns-steps 6 "
        f"--weight-decay 0.1 {GROUPED}"
    ),
    "adafactor": "--optimizer adafactor --lr 0.01 --weight-decay 0.1",
    "adafactor-first": (
        "--optimizer adafactor --lr 0.01 --adafactor-beta1 0.5 --adafactor-clip-threshold 0.5 "
        f"{GROUPED}"
    ),
    "adam-groups": f"--optimizer adam --lr 0.01 --weight-decay 0.1 {GROUPED}",
    "sgd-frozen": "--optimizer sgd --lr 0.1 --freeze embedding.* *.layers.0.* *.linear_fc2.*",
}
# name -> (model, axes); three data ranks divide nothing evenly, four tensor ranks share KV heads.
# Not gpt2: the true gradient of its key bias is 0, which a division by its size makes noise of.
LAYOUTS: dict[str, tuple[str, tuple[Axis, ...]]] = {
    **{f"dp3-{s}": ("llama", (data_axis(3), sharded(s))) for s in STAGES},
    "tp2": ("qwen2", (tensor_axis(2),)),
    "tp4-optim": ("qwen3", (tensor_axis(4), data_axis(2), sharded("optim"))),
    "tp2-sp-dp2-optim": (
        "qwen2",
        (tensor_axis(2), sequence_axis(), data_axis(2), sharded("optim", "--overlap-param-gather")),
    ),
    "tp2-sp-dp2-grads": (
        "llama",
        (tensor_axis(2), sequence_axis(), data_axis(2), sharded("optim_grads")),
    ),
    "hybrid": (
        "llama",
        (data_axis(4), sharded("optim", "--num-distributed-optimizer-instances", "2")),
    ),
    "pp2": ("qwen2", (pipeline_of("1f1b-2"),)),
    "pp2-dp2-params": (
        "llama",
        (data_axis(2), sharded("optim_grads_params"), pipeline_of("1f1b-2")),
    ),
    "zbv-dp2-optim": ("llama", (data_axis(2), sharded("optim"), pipeline_of("zbv-2"))),
}
FEW = ("dp3-optim", "tp4-optim", "tp2-sp-dp2-grads", "pp2-dp2-params")
# Experts are cut over ep and etp, and their shards over what is left of the data ranks.
TP2_SP = (tensor_axis(2), sequence_axis())
MIXTURES: dict[str, tuple[str, tuple[Axis, ...]]] = {
    "ep2": ("mixtral", (data_axis(2), expert_axis(2))),
    "ep2-optim": ("deepseek", (data_axis(2), expert_axis(2), sharded("optim"))),
    "ep2-dp4-grads": ("deepseek", (data_axis(4), expert_axis(2), sharded("optim_grads"))),
    "dp3-params": ("mixtral", (data_axis(3), sharded("optim_grads_params"))),
    "ep2-etp2-optim": (
        "mixtral",
        (*TP2_SP, data_axis(2), expert_axis(2, 2, "allgather"), sharded("optim")),
    ),
    "ep2-etp1-optim": (
        "mixtral",
        (*TP2_SP, data_axis(2), expert_axis(2, 1), sharded("optim", "--overlap-param-gather")),
    ),
    "ep2-etp1-params": (
        "qwen3-moe",
        (*TP2_SP, data_axis(2), expert_axis(2, 1), sharded("optim_grads_params")),
    ),
    "ep2-hybrid": (
        "mixtral",
        (
            data_axis(4),
            expert_axis(2),
            sharded("optim_grads", "--num-distributed-optimizer-instances", "2"),
        ),
    ),
    "pp2-ep2-params": (
        "deepseek",
        (data_axis(2), expert_axis(2), sharded("optim_grads_params"), pipeline_of("1f1b-2")),
    ),
}
LAYOUTS |= {f"moe-{name}": row for name, row in MIXTURES.items()}
FEW_MIXTURES = ("moe-ep2-dp4-grads", "moe-ep2-etp2-optim")
ROWS = [
    (optimizer, layout)
    for optimizer in OPTIMIZERS
    for layout in (LAYOUTS if optimizer in ("muon", "adafactor") else (*FEW, *FEW_MIXTURES))
]
# Orthogonalisation and division by roots amplify rounding as Adam does.
MATCH32_MATRICES = dataclasses.replace(MATCH32_ADAM, name="MATCH32 after matrix updates")


def differences(
    certifier_of: Certifiers, optimizer: str, layout: str, precision: str, limits: Tolerances
) -> list[str]:
    model, axes = LAYOUTS[layout]
    layers = 4 if "zbv" in layout else 2
    certifier = certifier_of(
        model,
        precision,
        f"--num-layers {layers} {OPTIMIZERS[optimizer]}",
        steps=3,
        batch=12,
        micro=1,
        limits=limits,
    )
    found, _ = certifier.compare(axes)
    return [str(difference) for difference in found]


@pytest.mark.parametrize(("optimizer", "layout"), ROWS, ids=["-".join(row) for row in ROWS])
def test_updates_equal_those_of_one_process(
    certifier_of: Certifiers, optimizer: str, layout: str
) -> None:
    assert not differences(certifier_of, optimizer, layout, "fp64", MATCH64)[:8]


@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "sgd-frozen"])
@pytest.mark.parametrize("layout", [*FEW, "moe-ep2-etp2-optim", "moe-ep2-etp1-optim"])
def test_updates_in_single_precision_stay_within_their_class(
    certifier_of: Certifiers, optimizer: str, layout: str
) -> None:
    limits = MATCH32 if optimizer == "sgd-frozen" else MATCH32_MATRICES
    assert not differences(certifier_of, optimizer, layout, "fp32", limits)[:8]


PLANTED = {
    "experts_orthogonalised_together": ((data_axis(2), expert_axis(2, needs="dp")), "dp"),
    "slices_of_an_expert_orthogonalised_apart": ((tensor_axis(2),), "tp"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_experts_that_are_not_orthogonalised_one_by_one_are_named(
    certifier_of: Certifiers, fault: str
) -> None:
    axes, named = PLANTED[fault]
    extra = f"--num-layers 2 {OPTIMIZERS['muon']}"
    certifier = certifier_of("mixtral", extra=extra, steps=3, batch=12, micro=1, limits=MATCH64)
    planted = f"tests.parity.optimizer_faults:{fault}"
    verdict = certifier.certify(axes, fault=planted, measure=False)
    cause = verdict.causes[0]
    assert (cause.axes, cause.first.phase) == ((named,), "update"), str(cause)
    assert ".mlp.experts." in cause.first.name, str(cause)
