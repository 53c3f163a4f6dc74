"""The layout of flat buffers."""

from dataclasses import replace

import pytest

from megatron_lite.optim.groups import DECAYED, NOT_DECAYED, param_group
from megatron_lite.shard.flat import ALIGNMENT, build_layout, default_bucket_size
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.physical import PhysicalParam, physical_params
from tests.shard.stand import model_shape, parallel_shape, small_layout


def physicals(num_layers: int = 2, tp: int = 1) -> tuple[PhysicalParam, ...]:
    model = model_shape(num_layers=num_layers)
    return physical_params(model_spec(model, parallel_shape(tp=tp)))


def one_matrix(elements: int) -> tuple[PhysicalParam, ...]:
    return (PhysicalParam("a", (elements // 1000, 1000), ()),)


def test_default_bucket_size_is_megatrons_for_large_models() -> None:
    large = one_matrix(10**9)
    assert default_bucket_size(8, large) == 40_000_000
    assert default_bucket_size(64, large) == 64_000_000


def test_smaller_models_have_eight_buckets_of_a_million_elements_or_more() -> None:
    assert default_bucket_size(8, one_matrix(80_000_000)) == 10_000_000
    assert default_bucket_size(64, one_matrix(80_000_000)) == 10_000_000
    assert default_bucket_size(8, one_matrix(80_000)) == 1_000_000


def test_slots_are_aligned_disjoint_and_inside_their_bucket() -> None:
    layout = small_layout(physicals())
    assert len(layout.buckets) > 3
    ends = [0] * len(layout.buckets)
    for name, slot in layout.slots.items():
        assert slot.start % ALIGNMENT == 0
        assert ends[slot.bucket] <= slot.start < ends[slot.bucket] + ALIGNMENT
        ends[slot.bucket] = slot.start + slot.numel
        assert name in layout.buckets[slot.bucket].names
    for end, bucket in zip(ends, layout.buckets, strict=True):
        assert end <= bucket.elements < end + ALIGNMENT


def test_buckets_follow_the_backward_pass_and_close_when_full() -> None:
    stored = physicals()
    layout = small_layout(stored, bucket_size=500)
    backward = [physical.name for physical in reversed(stored)]
    position = 0
    for index, bucket in enumerate(layout.buckets):
        assert set(bucket.names) == set(backward[position : position + len(bucket.names)])
        position += len(bucket.names)
        if index + 1 < len(layout.buckets):
            assert bucket.elements >= 500
    assert position == len(backward)


def test_a_tied_embedding_is_in_the_last_bucket_with_both_its_uses() -> None:
    layout = small_layout(physicals())
    slot = layout.slots["embedding.word_embeddings.weight"]
    assert slot.bucket == len(layout.buckets) - 1
    assert slot.uses == 2


def test_one_bucket_has_two_segments_however_many_layers() -> None:
    layout = small_layout(physicals(num_layers=20), bucket_size=10**9)
    assert len(layout.slots) > 200
    assert [segment.group for segment in layout.segments] == [NOT_DECAYED, DECAYED]
    assert layout.segments[-1].stop == layout.buckets[0].elements


def test_segments_cover_the_buffers_with_members_of_one_group() -> None:
    layout = small_layout(physicals())
    assert len(layout.segments) <= 2 * len(layout.buckets)
    for slot in layout.slots.values():
        segments = [s for s in layout.segments if s.bucket == slot.bucket]
        owners = [s for s in segments if s.start <= slot.start < s.stop]
        assert [s.group for s in owners] == [param_group(slot.physical)]


def test_dtypes_have_buffers_of_their_own() -> None:
    stored = physicals()
    layout = build_layout(
        stored,
        dtype_of=lambda p: "float32" if len(p.shape) == 1 else "bfloat16",
        group_of=param_group,
        bucket_size=500,
    )
    assert {bucket.key.dtype for bucket in layout.buckets} == {"float32", "bfloat16"}
    for slot in layout.slots.values():
        dtype = layout.buckets[slot.bucket].key.dtype
        assert (dtype == "float32") == (len(slot.physical.shape) == 1)
    # One order over all buffers: a bucket is sent when its last member can be complete.
    backward = {physical.name: i for i, physical in enumerate(reversed(stored))}
    closing = [max(backward[name] for name in bucket.names) for bucket in layout.buckets]
    assert closing == sorted(closing)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_tp_size_has_the_same_buckets_of_names_with_a_large_size(tp: int) -> None:
    layout = small_layout(physicals(tp=tp), bucket_size=10**9)
    assert set(layout.buckets[0].names) == {p.name for p in physicals()}


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_every_bucket_divides_into_equal_aligned_shards(shards: int) -> None:
    layout = small_layout(physicals(), shards={"dense": shards})
    for bucket in layout.buckets:
        windows = [bucket.shard(index) for index in range(shards)]
        assert {window.elements for window in windows} == {bucket.elements // shards}
        assert all(window.start % ALIGNMENT == 0 for window in windows)
        assert windows[0].start == 0 and windows[-1].stop == bucket.elements
        held = sum(layout.slots[name].numel for name in bucket.names)
        assert bucket.elements < held + ALIGNMENT * (len(bucket.names) + shards)


def test_no_bucket_spans_two_units() -> None:
    layout = small_layout(
        physicals(num_layers=3), bucket_size=10**9, unit_of=lambda physical: physical.uses[0]
    )
    units = [
        {layout.slots[name].physical.uses[0] for name in bucket.names} for bucket in layout.buckets
    ]
    assert units == [{"final_norm"}, {"layer.2"}, {"layer.1"}, {"layer.0"}, {"embedding"}]


def test_a_parameter_with_a_copy_in_another_layout_has_a_bucket_of_its_own() -> None:
    specs = model_spec(model_shape(), parallel_shape())
    tied = [
        replace(spec, partial_axes=("tied_ends",)) if "word_embeddings" in spec.name else spec
        for spec in specs
    ]
    layout = small_layout(physical_params(tied), bucket_size=10**9)
    assert layout.buckets[-1].names == ("embedding.word_embeddings.weight",)
    assert len(layout.buckets) == 2
