"""Model state to the byte: every way to divide it, and what exists for a moment beside it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_lite.config.plan import ModelShape, PrecisionShape
from megatron_lite.config.sharding_plan import ShardingShape
from megatron_lite.pipeline.partition import whole_model
from megatron_lite.shard.flat import build_layout
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.physical import physical_params
from megatron_lite.telemetry.data_axis import (
    DataLayout,
    DataSharding,
    Extent,
    data_layout,
    data_sharding,
)
from megatron_lite.telemetry.state_memory import StateBytes, estimate_state
from tests.telemetry.shapes import BF16, FP32, layout, tiny_model, tiny_plan

NO_SHARD, OPTIM, OPTIM_GRADS, FULL = "no_shard", "optim", "optim_grads", "optim_grads_params"
NARROW_GRADS = PrecisionShape("bfloat16", "float32", "bfloat16")
FP64 = PrecisionShape("float64", "float64", "float64")
# One bucket per use-site, as under sharded parameters; 12 divides all.
EXTENTS = (
    Extent("head", "dense", "bfloat16", 1200),
    Extent("layer.1", "dense", "bfloat16", 600),
    Extent("layer.0", "dense", "bfloat16", 840),
    Extent("embedding", "dense", "bfloat16", 2400),
)
EMBEDDING, LAYER0, LAYER1, HEAD = ((3,),), ((2,),), ((1,),), ((0,),)
UNITS = DataLayout(
    EXTENTS, (EMBEDDING, LAYER0, LAYER1, HEAD), (LAYER1, LAYER0), contributions=(0, 1, 1, 2, 3)
)
PSI = 1200 + 600 + 840 + 2400
# The head reads the embedding, too, and contributes to it first.
TIED = replace(
    UNITS,
    forward=(EMBEDDING, LAYER0, LAYER1, ((0, 3),)),
    contributions=(3, 0, 1, 1, 2, 3),
)
GROUPED = replace(UNITS, forward=(EMBEDDING, ((2,), (1,)), HEAD), backward=(((2,), (1,)),))


def cut(strategy: str, ranks: int = 1, copies: int = 1, **more: object) -> DataSharding:
    shape = ShardingShape(strategy, copies, **more)  # type: ignore[arg-type]
    return DataSharding(shape, {"dense": ranks}, {"dense": copies})


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("strategy", "undivided", "divided"),
    [(NO_SHARD, 18, 0), (OPTIM, 6, 12), (OPTIM_GRADS, 2, 16), (FULL, 0, 18)],
)
def test_bytes_per_parameter_with_fp32_gradients(
    strategy: str, undivided: int, divided: int, ranks: int
) -> None:
    state = estimate_state(UNITS, BF16, cut(strategy, ranks))
    assert Fraction(state.resident, PSI) == undivided + Fraction(divided, ranks)


def test_bytes_per_parameter_with_bf16_gradients() -> None:
    def per_parameter(strategy: str) -> Fraction:
        return Fraction(estimate_state(UNITS, NARROW_GRADS, cut(strategy, 4)).resident, PSI)

    assert per_parameter(NO_SHARD) == 16
    assert per_parameter(OPTIM) == 4 + Fraction(12, 4)
    assert per_parameter(OPTIM_GRADS) == 2 + Fraction(14, 4)
    assert per_parameter(FULL) == Fraction(16, 4)


def test_each_purpose_by_itself() -> None:
    assert estimate_state(UNITS, BF16) == StateBytes(2 * PSI, 4 * PSI, 4 * PSI, 8 * PSI)
    half = estimate_state(UNITS, BF16, cut(OPTIM, 2))
    assert half == StateBytes(2 * PSI, 4 * PSI, 2 * PSI, 4 * PSI)
    wide = estimate_state(replace_dtype("float64"), FP64, cut(FULL, 3))
    assert (wide.parameters, wide.main_grads) == (8 * PSI // 3, 8 * PSI // 3)
    assert (wide.masters, wide.moments) == (0, 16 * PSI // 3)


def replace_dtype(dtype: str) -> DataLayout:
    return DataLayout(tuple(replace(e, dtype=dtype) for e in EXTENTS))


def test_full_precision_has_no_separate_masters() -> None:
    state = estimate_state(replace_dtype("float32"), FP32)
    assert state == StateBytes(4 * PSI, 4 * PSI, 0, 8 * PSI)


def test_a_buffer_of_fp32_parameters_in_a_bf16_run_has_no_masters() -> None:
    mixed = DataLayout((EXTENTS[0], Extent("router", "dense", "float32", 120)))
    assert estimate_state(mixed, BF16) == StateBytes(2880, 5280, 4800, 10560)


@pytest.mark.parametrize(
    ("moments", "size"), [([], 0), (["float32"], 4), (["float32", "float32"], 8), (["bfloat16"], 2)]
)
def test_moments_are_counted_in_their_own_dtypes(moments: list[str], size: int) -> None:
    assert estimate_state(UNITS, BF16, moments=moments).moments == size * PSI


def test_copies_of_the_shards_save_nothing() -> None:
    hybrid = estimate_state(UNITS, BF16, cut(FULL, 2, copies=3))
    assert hybrid.resident == estimate_state(UNITS, BF16, cut(FULL, 2)).resident == 9 * PSI


def test_experts_are_divided_over_their_own_data_group() -> None:
    both = DataLayout((EXTENTS[0], Extent("experts", "expert", "bfloat16", 600)))
    sharding = DataSharding(ShardingShape(OPTIM), {"dense": 4, "expert": 2})
    assert estimate_state(both, BF16, sharding).masters == 4 * (1200 // 4 + 600 // 2)


def test_a_bucket_that_was_not_padded_for_the_ranks_is_no_shard() -> None:
    with pytest.raises(ValueError, match="head: 1200 elements do not divide into 7 shards"):
        estimate_state(UNITS, BF16, cut(OPTIM, 7))


def test_one_rank_per_copy_shards_nothing() -> None:
    alone = estimate_state(UNITS, BF16, cut(FULL, 1, copies=3))
    assert alone == estimate_state(UNITS, BF16)


# ---- what comes and goes ---------------------------------------------------------------------
@pytest.mark.parametrize("strategy", [NO_SHARD, OPTIM])
def test_whole_gradients_and_parameters_do_not_come_and_go(strategy: str) -> None:
    state = estimate_state(UNITS, BF16, cut(strategy, 2), microbatches=4)
    assert (state.transient, state.largest_unit) == (0, "")


@pytest.mark.parametrize(
    ("units", "elements"),
    [
        # The embedding fills; behind it both layers are being reduced.
        (UNITS, 2400 + 840 + 600),
        # Opened by the head and open until the end.
        (TIED, 2400 + 1200 + 600 + 840),
    ],
)
def test_gradient_buckets_exist_from_first_contribution_to_reduction(
    units: DataLayout, elements: int
) -> None:
    state = estimate_state(units, BF16, cut(OPTIM_GRADS, 2))
    assert state.gradient_buckets == 4 * elements
    assert (state.gathered, state.largest_unit) == (0, "embedding")


def test_from_the_second_microbatch_on_a_reduction_needs_a_shard_to_receive_into() -> None:
    sharding = cut(OPTIM_GRADS, 2, sharded_accumulation=True)
    one = estimate_state(UNITS, BF16, sharding).gradient_buckets
    assert one == 4 * (2400 + 840 + 600)
    for microbatches in (2, 4):
        more = estimate_state(UNITS, BF16, sharding, microbatches=microbatches).gradient_buckets
        # The embedding leaves as soon as only the layer behind it is being reduced.
        assert more == 4 * (2400 + 840) * 3 // 2 > one


def test_a_bucket_lands_before_the_next_microbatch_writes_to_it() -> None:
    alone = DataLayout((EXTENTS[3],), contributions=(0,))
    sharding = cut(OPTIM_GRADS, 2, sharded_accumulation=True)
    state = estimate_state(alone, BF16, sharding, microbatches=4)
    assert state.gradient_buckets == 4 * (2400 + 1200)


def test_without_overlap_nothing_is_on_the_wire_while_a_bucket_fills() -> None:
    sharding = cut(OPTIM_GRADS, 2, sharded_accumulation=True, overlap_reduce=False)
    assert estimate_state(UNITS, BF16, sharding).gradient_buckets == 4 * 2400


def test_unsharded_accumulation_keeps_all_buckets_until_the_last_microbatch() -> None:
    sharding = cut(OPTIM_GRADS, 2)
    assert estimate_state(UNITS, BF16, sharding, microbatches=4).gradient_buckets == 4 * PSI
    one = estimate_state(UNITS, BF16, sharding, microbatches=1)
    assert one.gradient_buckets == 4 * (2400 + 840 + 600)


@pytest.mark.parametrize(
    ("units", "overlap", "elements"),
    [
        (UNITS, False, 2400),
        (UNITS, True, 2400 + 840),
        (TIED, False, 2400 + 1200),
        (TIED, True, 2400 + 1200 + 600),
        (GROUPED, False, 2400),
        (GROUPED, True, 2400 + 840),  # of the group only the nearest layer
    ],
)
def test_gathered_are_the_site_at_work_and_the_next_use(
    units: DataLayout, overlap: bool, elements: int
) -> None:
    state = estimate_state(units, BF16, cut(FULL, 2, overlap_gather=overlap))
    assert state.gathered == 2 * elements


@pytest.mark.parametrize(
    ("after", "elements"),
    [("backward", 600 + 840 + 1200), ("step", PSI)],  # the embedding is not read again
)
def test_parameters_that_stay_are_whole_together(after: str, elements: int) -> None:
    assert estimate_state(UNITS, BF16, cut(FULL, 2, reshard_after=after)).gathered == 2 * elements


# ---- the layout of a model -------------------------------------------------------------------
def model_layout(model: ModelShape, bucket_size: int, shards: int = 1) -> DataLayout:
    flat = build_layout(
        physical_params(model_spec(model, layout())),
        dtype_of=lambda _: "bfloat16",
        group_of=lambda _: None,
        bucket_size=bucket_size,
        shards={"dense": shards},
    )
    part = whole_model(model.num_layers)[0]
    forward, backward = [(use,) for use in part.uses], [(use,) for use in part.backward_uses]
    return data_layout(flat, forward, backward)


def aligned(count: int, multiple: int = 64) -> int:
    return -(-count // multiple) * multiple


ODD = tiny_model(hidden_size=63, kv_channels=16, ffn_hidden_size=127)


def test_a_models_buckets_hold_every_parameter_once_with_its_padding() -> None:
    h, layers = 63, 4
    layer = 2 * aligned(h) + aligned((4 + 2 * 2) * 16 * h) + aligned(h * 64)
    layer += aligned(2 * 127 * h) + aligned(h * 127)
    elements = layers * layer + aligned(h) + 2 * aligned(256 * h)
    for bucket_size in (1, 10_000, 10**9):
        found = model_layout(ODD, bucket_size)
        assert found.elements == elements
        assert estimate_state(found, BF16).resident == 18 * elements
    assert [extent.name for extent in found.extents] == ["embedding to head"]


def test_every_bucket_is_padded_to_shards_of_whole_alignments() -> None:
    whole, cut3 = model_layout(ODD, 10_000), model_layout(ODD, 10_000, shards=3)
    assert [aligned(e.elements, 3 * 64) for e in whole.extents] == [
        extent.elements for extent in cut3.extents
    ]
    padded = sum(aligned(extent.elements, 3 * 64) for extent in whole.extents)
    state = estimate_state(cut3, BF16, cut(OPTIM, 3))
    assert state == StateBytes(2 * padded, 4 * padded, 4 * padded // 3, 8 * padded // 3)


def test_a_tied_embedding_is_read_at_both_ends_and_contributes_twice() -> None:
    found = model_layout(tiny_model(tied=True), 1)
    last = len(found.extents) - 1
    assert found.forward[0] == found.forward[-1] == ((last,),)
    assert found.extents[-1].name == "embedding to head"
    assert found.contributions[0] == found.contributions[-1] == last
    assert found.contributions[1:-1] == tuple(range(last))
    assert len(found.backward) == len(found.forward) - 2


def test_ranks_of_a_shard_and_copies_follow_from_the_plan() -> None:
    plan = replace(tiny_plan(layout(dp=6)), sharding=ShardingShape(OPTIM, instances=2))
    sharding = data_sharding(plan)
    assert (sharding.ranks, sharding.copies) == (
        {"dense": 3, "expert": 3},
        {"dense": 2, "expert": 2},
    )
    assert sharding.shards == {"dense": 3, "expert": 3}
    whole = data_sharding(tiny_plan(layout(dp=6)))
    assert (whole.ranks["dense"], whole.shards["dense"]) == (6, 1)
