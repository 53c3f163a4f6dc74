"""Model state to the byte: every way to divide it, and what exists for a moment beside it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_lite.config.plan import ModelShape, PrecisionShape
from megatron_lite.optim.groups import param_group
from megatron_lite.pipeline.partition import whole_model
from megatron_lite.shard.flat import build_layout
from megatron_lite.spec.params import model_spec
from megatron_lite.spec.physical import physical_params
from megatron_lite.telemetry.data_axis import (
    FULL,
    NO_SHARD,
    OPTIM,
    OPTIM_GRADS,
    DataLayout,
    DataSharding,
    Extent,
    data_layout,
)
from megatron_lite.telemetry.state_memory import StateBytes, estimate_state
from tests.telemetry.shapes import BF16, FP32, layout, tiny_model

NARROW_GRADS = PrecisionShape("bfloat16", "float32", "bfloat16")
FP64 = PrecisionShape("float64", "float64", "float64")
# One bucket per use-site, as under divided parameters; 12 divides all.
UNITS = DataLayout(
    (
        Extent("head", "dense", "bfloat16", 1200),
        Extent("layer.1", "dense", "bfloat16", 600),
        Extent("layer.0", "dense", "bfloat16", 840),
        Extent("embedding", "dense", "bfloat16", 2400),
    ),
    ((3,), (2,), (1,), (0,)),
)
PSI = 1200 + 600 + 840 + 2400
# A tied embedding: read first and last.
TIED = DataLayout(UNITS.extents, ((3,), (2,), (1,), (0, 3)))


def cut(strategy: str, ranks: int = 1, copies: int = 1, **more: object) -> DataSharding:
    return DataSharding(strategy, {"dense": ranks}, {"dense": copies}, **more)  # type: ignore[arg-type]


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
    return DataLayout(tuple(replace(e, dtype=dtype) for e in UNITS.extents), UNITS.sites)


def test_full_precision_has_no_separate_masters() -> None:
    state = estimate_state(replace_dtype("float32"), FP32)
    assert state == StateBytes(4 * PSI, 4 * PSI, 0, 8 * PSI)


def test_a_buffer_of_fp32_parameters_in_a_bf16_run_has_no_masters() -> None:
    mixed = DataLayout((UNITS.extents[0], Extent("router", "dense", "float32", 120)), ())
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
    both = DataLayout((UNITS.extents[0], Extent("experts", "expert", "bfloat16", 600)), ())
    sharding = DataSharding(OPTIM, {"dense": 4, "expert": 2})
    assert estimate_state(both, BF16, sharding).masters == 4 * (1200 // 4 + 600 // 2)


def test_a_bucket_that_was_not_padded_for_the_ranks_is_no_shard() -> None:
    with pytest.raises(ValueError, match="head: 1200 elements do not divide into 7 shards"):
        estimate_state(UNITS, BF16, cut(OPTIM, 7))


# ---- what comes and goes ---------------------------------------------------------------------
@pytest.mark.parametrize("strategy", [NO_SHARD, OPTIM])
def test_undivided_gradients_have_no_passing_buckets(strategy: str) -> None:
    assert estimate_state(UNITS, BF16, cut(strategy, 2), microbatches=4).transient == 0


@pytest.mark.parametrize(
    ("sites", "overlap", "elements"),
    [
        (UNITS, False, 2400),  # the embedding alone
        (UNITS, True, 2400 + 840),  # while layer.0 is on the wire
        (TIED, False, 2400 + 1200),  # opened by the head, open until the end
        (TIED, True, 2400 + 1200 + 600),  # layer.1 fills, the head is on the wire
    ],
)
def test_gradient_buckets_exist_from_first_contribution_to_reduction(
    sites: DataLayout, overlap: bool, elements: int
) -> None:
    sharding = cut(OPTIM_GRADS, 2, overlap_reduce=overlap, sharded_accumulation=True)
    state = estimate_state(sites, BF16, sharding, microbatches=4)
    assert state.gradient_buckets == 4 * elements
    assert (state.gathered, state.largest_unit) == (0, "embedding")


def test_unsharded_accumulation_keeps_all_buckets_until_the_last_microbatch() -> None:
    sharding = cut(OPTIM_GRADS, 2)
    assert estimate_state(UNITS, BF16, sharding, microbatches=4).gradient_buckets == 4 * PSI
    one = estimate_state(UNITS, BF16, sharding, microbatches=1)
    assert one.gradient_buckets == 4 * (2400 + 840)


@pytest.mark.parametrize(
    ("sites", "prefetch", "elements"),
    [
        (UNITS, False, 2400),
        (UNITS, True, 2400 + 840),
        (TIED, False, 2400 + 1200),
        (TIED, True, 2400 + 1200 + 600),
    ],
)
def test_gathered_are_the_unit_at_work_and_the_next(
    sites: DataLayout, prefetch: bool, elements: int
) -> None:
    state = estimate_state(sites, BF16, cut(FULL, 2, prefetch=prefetch))
    assert state.gathered == 2 * elements


@pytest.mark.parametrize("after", ["backward", "step"])
def test_parameters_that_stay_for_the_backward_pass_are_all_gathered(after: str) -> None:
    assert estimate_state(UNITS, BF16, cut(FULL, 2, reshard_after=after)).gathered == 2 * PSI


# ---- the layout of a model -------------------------------------------------------------------
def model_layout(model: ModelShape, bucket_size: int) -> DataLayout:
    physicals = physical_params(model_spec(model, layout()))
    flat = build_layout(
        physicals,
        dtype_of=lambda _: "bfloat16",
        group_of=param_group,
        bucket_size=bucket_size,
    )
    return data_layout(flat, whole_model(model.num_layers)[0].uses)


def aligned(count: int) -> int:
    return -(-count // 64) * 64


def test_a_models_buckets_hold_every_parameter_once_with_its_padding() -> None:
    model = tiny_model(hidden_size=63, kv_channels=16, ffn_hidden_size=127)
    h, layers = 63, 4
    layer = 2 * aligned(h) + aligned((4 + 2 * 2) * 16 * h) + aligned(h * 64)
    layer += aligned(2 * 127 * h) + aligned(h * 127)
    elements = layers * layer + aligned(h) + 2 * aligned(256 * h)
    for bucket_size in (1, 10_000, 10**9):
        found = model_layout(model, bucket_size)
        assert found.elements == elements
        assert estimate_state(found, BF16).resident == 18 * elements
    assert [extent.name for extent in found.extents] == ["embedding to head"]


def test_a_tied_embedding_is_read_at_both_ends() -> None:
    found = model_layout(tiny_model(tied=True), 1)
    assert found.sites[0] == found.sites[-1] == (len(found.extents) - 1,)
    assert found.extents[-1].name == "embedding to head"
