"""Accumulation, readiness and reductions of the main gradients."""

import math
from typing import Any

import pytest
import torch

from megatron_lite.microbatch import GradientSink, WeightGradientStore
from megatron_lite.spec.physical import PhysicalParam
from tests.pool import RankPool
from tests.shard.stand import Stand, build_stand, parallel_shape

LAYOUTS = [
    {"dp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2},
    {"tp": 4, "sequence_parallel": True},
    {"tp": 2, "dp": 2, "sequence_parallel": True},
    {"dp": 2, "cp": 2},
]


def weight_of(rank: int) -> float:
    """What a rank contributes: any sum tells which ranks are in it."""
    return float(2**rank)


def reduced(rank: int, layout: dict[str, Any], dtype: str, overlap: bool) -> dict[str, Any]:
    """Two microbatches of power-of-two gradients: sums are exact in every dtype."""
    parallel = parallel_shape(**layout)
    stand = build_stand(parallel, rank, dtype=dtype, overlap=overlap)
    stand.sink.start_step(2)
    for _ in range(2):
        with stand.recorder.phase("backward"):
            stand.contribute(lambda physical: weight_of(rank) / len(physical.uses))
    with stand.recorder.phase("finish"):
        absent = stand.sink.finish()
    values = {
        piece.spec.name: (float(piece.tensor.min()), float(piece.tensor.max()))
        for piece in stand.buffers.gradient_pieces()
    }
    members = {
        "data": stand.groups.dp_cp.ranks,
        "tp": stand.groups.tp.ranks,
        "kv_replica": stand.groups.kv_replica.ranks,
    }
    records = [(r.phase, r.op, r.group, r.elements, r.dtype) for r in stand.recorder.records]
    buckets = [bucket.elements for bucket in stand.sink.buckets]
    partial = {
        axis: sum(
            math.prod(piece.box.shape)
            for piece in stand.buffers.pieces
            if axis in piece.spec.partial_axes
        )
        for axis in ("tp", "kv_replica")
    }
    axes = {piece.spec.name: piece.spec.partial_axes for piece in stand.buffers.pieces}
    return {
        "absent": absent, "values": values, "members": members, "records": records,
        "buckets": buckets, "partial": partial, "axes": axes,
    }  # fmt: skip


CASES = [(layout, "float64") for layout in LAYOUTS] + [
    ({"tp": 2, "dp": 2, "sequence_parallel": True}, dtype) for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("layout", "dtype"), CASES, ids=str)
def test_gradients_are_summed_over_exactly_their_groups(
    rank_pool: RankPool, layout: dict[str, Any], dtype: str
) -> None:
    world = parallel_shape(**layout).world_size
    results = rank_pool.run(world, reduced, layout=layout, dtype=dtype, overlap=True)
    for rank, result in enumerate(results):
        assert result["absent"] == ()
        for name, (low, high) in result["values"].items():
            axis = result["axes"][name]
            # The data group of every rank of the partial axis' group.
            ranks = set(result["members"]["data"])
            if axis:
                tensor_ranks = results[rank]["members"][axis[0]]
                ranks = {r for t in tensor_ranks for r in results[t]["members"]["data"]}
            expected = 2 * sum(weight_of(r) for r in ranks)
            assert (low, high) == (expected, expected), (rank, name)


@pytest.mark.parametrize(
    ("layout", "overlap"),
    [*((layout, True) for layout in LAYOUTS), ({"tp": 2, "dp": 2}, False)],
    ids=str,
)
def test_collectives_are_the_buckets_and_one_per_partial_axis(
    rank_pool: RankPool, layout: dict[str, Any], overlap: bool
) -> None:
    parallel = parallel_shape(**layout)
    for result in rank_pool.run(
        parallel.world_size, reduced, layout=layout, dtype="bfloat16", overlap=overlap
    ):
        expected = []
        if parallel.dp * parallel.cp > 1:
            phase = "backward" if overlap else "finish"
            expected += [
                (phase, "all_reduce.sum", "dp_cp", elements, "float32")
                for elements in result["buckets"]
            ]
        for axis, size in (("tp", parallel.tp), ("kv_replica", parallel.tp // 2)):
            if size > 1:
                elements = result["partial"][axis]
                assert elements > 0
                expected.append(("finish", "all_reduce.sum", axis, elements, "float32"))
        assert result["records"] == expected


def random_gradients(rank: int, layout: dict[str, Any], overlap: bool) -> bytes:
    stand = build_stand(parallel_shape(**layout), rank, dtype="float32", overlap=overlap)
    generator = torch.Generator().manual_seed(rank)

    def draw(physical: PhysicalParam) -> torch.Tensor:
        return torch.randn(physical.shape, generator=generator)

    stand.sink.start_step(2)
    for _ in range(2):
        stand.contribute(draw)
    stand.sink.finish()
    return b"".join(part.numpy().tobytes() for part in stand.buffers.gradients.values())


@pytest.mark.parametrize("layout", [{"dp": 3}, {"dp": 2, "tp": 2, "sequence_parallel": True}])
def test_overlap_on_and_off_are_bitwise_equal(rank_pool: RankPool, layout: dict[str, Any]) -> None:
    world = parallel_shape(**layout).world_size
    on = rank_pool.run(world, random_gradients, layout=layout, overlap=True)
    off = rank_pool.run(world, random_gradients, layout=layout, overlap=False)
    assert on == off


def test_data_replicas_hold_equal_bits(rank_pool: RankPool) -> None:
    layout = {"dp": 2, "tp": 2, "sequence_parallel": True}
    bits = rank_pool.run(4, random_gradients, layout=layout, overlap=True)
    # tp is the fastest axis: ranks 0 and 2, 1 and 3 are data replicas.
    assert bits[0] == bits[2] and bits[1] == bits[3]
    assert bits[0] != bits[1]


def replicated_gradients(rank: int, layout: dict[str, Any]) -> dict[str, bytes]:
    stand = build_stand(parallel_shape(**layout), rank, dtype="float32")
    generator = torch.Generator().manual_seed(rank)
    stand.sink.start_step(1)
    stand.contribute(lambda physical: torch.randn(physical.shape, generator=generator))
    stand.sink.finish()
    return {
        piece.spec.name: piece.tensor.numpy().tobytes()
        for piece in stand.buffers.gradient_pieces()
        if piece.spec.partial_axes
    }


@pytest.mark.parametrize("tp", [2, 4])
def test_c057_c058_norm_gradients_are_bitwise_equal_over_tp_ranks(
    rank_pool: RankPool, tp: int
) -> None:
    layout = {"tp": tp, "sequence_parallel": True}
    first, *others = rank_pool.run(tp, replicated_gradients, layout=layout)
    names = {name for name in first if "linear_k" not in name and "linear_v" not in name}
    for part in ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias"):
        assert part in names
    assert any("q_layernorm" in name for name in names)
    assert any("linear_fc2.bias" in name for name in names)
    for other in others:
        assert {name: other[name] for name in names} == {name: first[name] for name in names}


def test_c059_shared_kv_heads_have_one_gradient(rank_pool: RankPool) -> None:
    results = rank_pool.run(4, replicated_gradients, layout={"tp": 4})
    names = [n for n in results[0] if "linear_k" in n or "linear_v" in n]
    assert any(name.endswith("linear_k.bias") for name in names)
    for name in names:
        bits = [result[name] for result in results]
        assert bits[0] == bits[1] and bits[2] == bits[3] and bits[0] != bits[2], name


def launch_order(rank: int, world_size: int) -> dict[str, list[int]]:
    """Complete the buckets in reverse order; note what is sent after each."""
    sent: dict[str, list[int]] = {}
    stand = build_stand(parallel_shape(dp=world_size), rank)
    stand.sink.start_step(1)
    for index in reversed(range(len(stand.sink.buckets))):
        complete(stand, index)
        sent[f"after {index}"] = [record.elements for record in stand.recorder.records]
    stand.sink.finish()
    sent["buckets"] = [bucket.elements for bucket in stand.sink.buckets]
    return sent


def complete(stand: Stand, bucket: int) -> None:
    for name in stand.sink.buckets[bucket].names:
        param = stand.params[name]
        for _ in range(stand.buffers.layout.slots[name].uses):
            stand.sink.main_grad(param).add_(1.0)
            stand.sink.written(param)


def test_buckets_leave_in_order_whatever_completes_first(rank_pool: RankPool) -> None:
    for sent in rank_pool.run(2, launch_order):
        last = len(sent["buckets"]) - 1
        assert last > 2
        assert sent[f"after {last}"] == sent["after 1"] == []
        assert sent["after 0"] == sent["buckets"]


def first_microbatches(rank: int, world_size: int) -> list[int]:
    stand = build_stand(parallel_shape(dp=world_size), rank)
    sent = []
    stand.sink.start_step(3)
    for _ in range(3):
        stand.contribute(lambda _: 1.0)
        sent.append(len(stand.recorder.records))
    stand.sink.finish()
    return [*sent, len(stand.sink.buckets)]


def test_no_bucket_is_sent_before_accumulation_ends(rank_pool: RankPool) -> None:
    for first, second, third, buckets in rank_pool.run(2, first_microbatches):
        assert (first, second, third) == (0, 0, buckets)


def uneven_ranks(rank: int, world_size: int) -> list[Any]:
    """Rank 1 has no gradient for one parameter."""
    stand = build_stand(parallel_shape(dp=world_size), rank)
    missing = "decoder.layers.1.mlp.linear_fc2.bias"
    answers: list[Any] = []
    for _ in range(2):
        stand.sink.start_step(1)
        for physical in reversed(stand.physicals):
            if rank == 1 and physical.name == missing:
                continue
            for _ in physical.uses:
                param = stand.params[physical.name]
                stand.sink.main_grad(param).add_(1.0)
                stand.sink.written(param)
        answers.append(stand.sink.finish())
        answers.append(stand.buffers.gradient_of(missing).unique().tolist())
    return answers


def test_a_parameter_without_gradient_is_zero_and_named_once(rank_pool: RankPool) -> None:
    contributing, missing = rank_pool.run(2, uneven_ranks)
    assert contributing == [(), [1.0], (), [1.0]]
    assert missing == [("decoder.layers.1.mlp.linear_fc2.bias",), [1.0], (), [1.0]]


def test_the_sink_is_what_weight_gradient_stores_expect() -> None:
    stand = build_stand()
    sink: GradientSink = stand.sink
    store = WeightGradientStore(sink, deferred=True)
    stand.sink.start_step(1)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    store.put(stand.params[name], lambda grad: grad.add_(3.0), deferrable=True)  # type: ignore[func-returns-value,arg-type]
    assert stand.buffers.gradient_of(name).unique().tolist() == [0.0]
    store.flush()
    stand.sink.finish()
    assert stand.buffers.gradient_of(name).unique().tolist() == [3.0]


def test_one_contribution_too_many_is_refused() -> None:
    stand = build_stand()
    param = stand.params["decoder.final_layernorm.weight"]
    stand.sink.start_step(2)
    for _ in range(2):
        stand.sink.main_grad(param).add_(1.0)
        stand.sink.written(param)
    with pytest.raises(RuntimeError, match=r"final_layernorm\.weight: more than the 2"):
        stand.sink.main_grad(param)
    with pytest.raises(RuntimeError, match="more than the 2"):
        stand.sink.written(param)


def test_a_lost_contribution_is_refused() -> None:
    stand = build_stand()
    param = stand.params["embedding.word_embeddings.weight"]
    stand.sink.start_step(1)
    stand.sink.main_grad(param).add_(1.0)
    stand.sink.written(param)  # the head's; the embedding's is missing
    with pytest.raises(RuntimeError, match=r"word_embeddings\.weight: 1 of 2"):
        stand.sink.finish()


def test_gradients_outside_of_a_step_are_refused() -> None:
    stand = build_stand()
    param = stand.params["decoder.final_layernorm.weight"]
    with pytest.raises(RuntimeError, match="outside of a step"):
        stand.sink.main_grad(param)
    with pytest.raises(RuntimeError, match="no step"):
        stand.sink.finish()
    stand.sink.start_step(1)
    with pytest.raises(RuntimeError, match="has not been finished"):
        stand.sink.start_step(1)


def test_a_step_starts_from_zero() -> None:
    stand = build_stand()
    for _ in range(2):
        stand.sink.start_step(1)
        stand.contribute(lambda physical: 1.0 / len(physical.uses))
        stand.sink.finish()
    for piece in stand.buffers.gradient_pieces():
        assert piece.tensor.unique().tolist() == [1.0], piece.spec.name


def test_frozen_parameters_have_no_place_in_the_buffers() -> None:
    stand = build_stand(frozen=("embedding.word_embeddings.weight",))
    assert "embedding.word_embeddings.weight" not in stand.buffers.layout.slots
    stand.sink.start_step(1)
    stand.contribute(lambda _: 1.0)
    assert stand.sink.finish() == ()


def test_parameters_and_buffers_are_one_storage() -> None:
    stand = build_stand()
    for values in stand.buffers.values.values():
        values.fill_(5.0)
    for name, param in stand.params.items():
        assert param.unique().tolist() == [5.0], name
