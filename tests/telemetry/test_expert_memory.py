"""The weights of hot experts are kept by every MoE layer; their gradients pass one by one."""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.telemetry.memory import ActivationShape, StageMemory, estimate_stage_bytes
from tests.telemetry.shapes import BF16, layout, tiny_model

HOT, WIDTH, HIDDEN = 3, 48, 64
MIXTURE = ExpertShape(8, 2, WIDTH, layers=(1, 2), dispatcher="alltoall")


def stage(hot: int, ep: int, recompute: str = "none", bias: bool = False) -> StageMemory:
    """Four layers, two of them MoE layers."""
    model = tiny_model(experts=replace(MIXTURE, replicated=hot), linear_bias=bias)
    parallel = replace(layout(dp=2), ep=ep, edp=2 // ep)
    shape = ActivationShape(model, parallel, BF16, 2)
    return estimate_stage_bytes(shape, range(4), recompute=recompute)


def test_hot_experts_are_kept_in_each_layer_and_differentiated_one_layer_at_a_time() -> None:
    for bias in (False, True):
        elements = HOT * (3 * WIDTH * HIDDEN + (2 * WIDTH + HIDDEN if bias else 0))
        plain, hot = (stage(n, ep=2, bias=bias) for n in (0, HOT))
        assert hot.kept_bytes - plain.kept_bytes == 2 * elements * 2  # bf16, two layers
        assert hot.working_bytes - plain.working_bytes == elements * 4  # fp32, one layer
        assert hot.deferred_bytes == plain.deferred_bytes


def test_recomputation_brings_the_weights_of_one_layer_again() -> None:
    elements = HOT * 3 * WIDTH * HIDDEN
    plain, hot = (stage(n, ep=2, recompute="full") for n in (0, HOT))
    assert hot.kept_bytes == plain.kept_bytes
    assert hot.working_bytes - plain.working_bytes == elements * 2 + elements * 4


def test_one_expert_rank_replicates_nothing() -> None:
    assert stage(HOT, ep=1) == stage(0, ep=1)
