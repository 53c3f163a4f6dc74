"""Elements on the wire of a step, by hand, for every way to divide the state."""

from __future__ import annotations

import pytest

from megatron_lite.telemetry.data_axis import (
    FULL,
    NO_SHARD,
    OPTIM,
    OPTIM_GRADS,
    STRATEGIES,
    DataLayout,
    DataSharding,
    Extent,
)
from megatron_lite.telemetry.data_wire import Message, sent_elements, step_messages
from tests.telemetry.test_state_memory import PSI, UNITS, cut


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


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize(
    ("after", "gathers"), [("forward", (2, 8)), ("backward", (1, 4)), ("step", (1, 1))]
)
def test_elements_sent_with_divided_parameters(
    m: int, after: str, gathers: tuple[int, int]
) -> None:
    times = gathers[m == 4]
    for sharded, reductions in ((True, m), (False, 1)):
        sharding = cut(FULL, 3, reshard_after=after, sharded_accumulation=sharded)
        assert sent(sharding, m) == pytest.approx((times + reductions) * PSI * 2 / 3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_sends_nothing(strategy: str) -> None:
    assert not step_messages(UNITS, "float32", cut(strategy), microbatches=2)


def test_gradients_are_sent_in_their_dtype_and_parameters_in_theirs() -> None:
    messages = step_messages(UNITS, "float32", cut(OPTIM, 2))
    assert messages == {
        message: 1
        for extent in UNITS.extents
        for message in (
            Message("reduce_scatter.sum", "dp_shard", extent.elements, "float32"),
            Message("all_gather", "dp_shard", extent.elements, "bfloat16"),
        )
    }


def test_undivided_gradients_over_one_group_are_all_reduced_whole() -> None:
    messages = step_messages(UNITS, "bfloat16", cut(NO_SHARD, 4))
    sizes = [extent.elements for extent in UNITS.extents]
    assert messages == {Message("all_reduce.sum", "dp_cp", n, "bfloat16"): 1 for n in sizes}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_over_two_copies_each_level_is_counted_by_itself(strategy: str) -> None:
    sharding = cut(strategy, 3, copies=2)
    messages = step_messages(UNITS, "float32", sharding)
    by_group = sent_elements(messages, sharding)
    gathers = 2 if strategy == FULL else 1
    assert by_group["dp_shard"] == pytest.approx((1 + gathers) * PSI * 2 / 3)
    # The shard alone crosses, once: 2 (copies-1)/copies of a third.
    assert by_group["dp_replicate"] == pytest.approx(2 * 1 / 2 * PSI / 3)
    assert set(by_group) == {"dp_shard", "dp_replicate"}


def test_the_hierarchical_reduction_gathers_gradients_not_parameters() -> None:
    messages = step_messages(UNITS, "float32", cut(NO_SHARD, 2, copies=2))
    assert messages[Message("all_gather", "dp_shard", 1200, "float32")] == 1
    assert all(message.dtype == "float32" for message in messages)


def test_experts_are_reduced_over_their_own_groups() -> None:
    layout = DataLayout((UNITS.extents[0], Extent("experts", "expert", "bfloat16", 600)), ())
    sharding = DataSharding(OPTIM, {"dense": 4, "expert": 2}, {"dense": 1, "expert": 1})
    by_group = sent_elements(step_messages(layout, "float32", sharding), sharding)
    assert by_group == pytest.approx({"dp_shard": 2 * 1200 * 3 / 4, "edp_shard": 2 * 600 / 2})
