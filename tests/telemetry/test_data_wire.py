"""Elements on the wire of a step, by hand, for every way to divide the state."""

from __future__ import annotations

import pytest

from megatron_lite.config.sharding_plan import STRATEGIES, ShardingShape
from megatron_lite.telemetry.data_axis import DataLayout, DataSharding, Extent
from megatron_lite.telemetry.data_wire import Message, sent_elements, step_messages
from tests.telemetry.test_state_memory import (
    EXTENTS,
    FULL,
    GROUPED,
    NO_SHARD,
    OPTIM,
    OPTIM_GRADS,
    PSI,
    TIED,
    UNITS,
    cut,
)


def sent(sharding: DataSharding, microbatches: int = 1, main_grad: str = "float32") -> float:
    messages = step_messages(UNITS, main_grad, sharding, microbatches=microbatches)
    return sum(sent_elements(messages, sharding).values())


@pytest.mark.parametrize("d", [2, 3, 4])
@pytest.mark.parametrize("m", [1, 4])
def test_elements_sent_by_each_strategy(d: int, m: int) -> None:
    share = PSI * (d - 1) / d
    assert sent(cut(NO_SHARD, d), m) == pytest.approx(2 * share)
    assert sent(cut(OPTIM, d), m) == pytest.approx(2 * share)
    assert sent(cut(OPTIM_GRADS, d), m) == pytest.approx(2 * share)
    per_microbatch = cut(OPTIM_GRADS, d, sharded_accumulation=True)
    assert sent(per_microbatch, m) == pytest.approx((m + 1) * share)


ENDS, LAYERS = 1200 + 2400, 600 + 840


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("units", [UNITS, GROUPED], ids=["alone", "recomputed-together"])
@pytest.mark.parametrize(
    ("after", "gathered"),
    # The ends of the model read nothing in the backward pass.
    [("forward", ENDS + 2 * LAYERS), ("backward", ENDS + LAYERS)],
)
def test_sharded_parameters_are_gathered_for_each_use(
    units: DataLayout, m: int, after: str, gathered: int
) -> None:
    for sharded, reductions in ((True, m), (False, 1)):
        sharding = cut(FULL, 3, reshard_after=after, sharded_accumulation=sharded)
        messages = step_messages(units, "float32", sharding, microbatches=m)
        total = sum(sent_elements(messages, sharding).values())
        assert total == pytest.approx((m * gathered + reductions * PSI) * 2 / 3)


def test_parameters_kept_for_the_step_are_gathered_once() -> None:
    sharding = cut(FULL, 3, reshard_after="step")
    assert sent(sharding, 4) == pytest.approx(2 * PSI * 2 / 3)


def test_a_tied_embedding_is_gathered_at_both_ends() -> None:
    messages = step_messages(TIED, "float32", cut(FULL, 2), microbatches=3)
    assert messages[Message("all_gather", "dp_shard", 2400, "bfloat16")] == 3 * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_sends_nothing(strategy: str) -> None:
    assert not step_messages(UNITS, "float32", cut(strategy), microbatches=2)


def test_gradients_are_sent_in_their_dtype_and_parameters_in_theirs() -> None:
    messages = step_messages(UNITS, "float32", cut(OPTIM, 2))
    assert messages == {
        message: 1
        for extent in EXTENTS
        for message in (
            Message("reduce_scatter.sum", "dp_shard", extent.elements, "float32"),
            Message("all_gather", "dp_shard", extent.elements, "bfloat16"),
        )
    }


def test_undivided_gradients_over_one_group_are_all_reduced_whole() -> None:
    messages = step_messages(UNITS, "bfloat16", cut(NO_SHARD, 4))
    sizes = [extent.elements for extent in EXTENTS]
    assert messages == {Message("all_reduce.sum", "dp_cp", n, "bfloat16"): 1 for n in sizes}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_over_two_copies_each_level_is_counted_by_itself(strategy: str) -> None:
    sharding = cut(strategy, 3, copies=2)
    messages = step_messages(UNITS, "float32", sharding)
    by_group = sent_elements(messages, sharding)
    gathered = ENDS + 2 * LAYERS if strategy == FULL else PSI
    assert by_group["dp_shard"] == pytest.approx((PSI + gathered) * 2 / 3)
    # The shard alone crosses, once: 2 (copies-1)/copies of a third.
    assert by_group["dp_replicate"] == pytest.approx(2 * 1 / 2 * PSI / 3)
    assert set(by_group) == {"dp_shard", "dp_replicate"}


def test_the_hierarchical_reduction_gathers_gradients_not_parameters() -> None:
    messages = step_messages(UNITS, "float32", cut(NO_SHARD, 2, copies=2))
    assert messages[Message("all_gather", "dp_shard", 1200, "float32")] == 1
    assert all(message.dtype == "float32" for message in messages)


def test_sums_of_several_microbatches_cross_once() -> None:
    sharding = cut(OPTIM_GRADS, 3, copies=2, sharded_accumulation=True)
    by_group = sent_elements(step_messages(UNITS, "float32", sharding, microbatches=4), sharding)
    assert by_group["dp_shard"] == pytest.approx((4 + 1) * PSI * 2 / 3)
    assert by_group["dp_replicate"] == pytest.approx(PSI / 3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_of_one_rank_reduce_whole_buckets_over_all(strategy: str) -> None:
    messages = step_messages(UNITS, "float32", cut(strategy, 1, copies=3))
    assert {message.group for message in messages} == {"dp_cp"}
    assert sum(message.elements for message in messages) == PSI


def test_experts_are_reduced_over_their_own_groups() -> None:
    layout = DataLayout((EXTENTS[0], Extent("experts", "expert", "bfloat16", 600)))
    sharding = DataSharding(
        ShardingShape(OPTIM), {"dense": 4, "expert": 2}, {"dense": 1, "expert": 1}
    )
    by_group = sent_elements(step_messages(layout, "float32", sharding), sharding)
    assert by_group == pytest.approx({"dp_shard": 2 * 1200 * 3 / 4, "edp_shard": 2 * 600 / 2})
