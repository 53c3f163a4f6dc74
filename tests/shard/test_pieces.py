"""Logical pieces in flat buffers, and the ranges of the norm."""

import pytest
import torch

from megatron_lite.config.plan import ParallelShape
from megatron_lite.mesh.grid import build_grids
from megatron_lite.shard.flat import FlatLayout, Window
from megatron_lite.shard.pieces import (
    Piece,
    Range,
    boxes_of_range,
    find_pieces,
    norm_ranges,
    state_pieces,
)
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.physical import physical_params
from megatron_lite.spec.shards import Box
from tests.shard.stand import (
    build_stand,
    logical_value,
    model_shape,
    parallel_shape,
    region,
    small_layout,
)


def ranges_of(
    layout: FlatLayout, pieces: tuple[Piece, ...], index: int = 0, count: int = 1
) -> tuple[Range, ...]:
    """Norm ranges of one of `count` data ranks that each hold whole buckets."""
    whole = {number: Window(0, bucket.elements) for number, bucket in enumerate(layout.buckets)}
    return norm_ranges(pieces, whole, dict.fromkeys(whole, (index, count)))


def counted_elements(parallel: ParallelShape) -> dict[str, torch.Tensor]:
    """How often the norm ranges of all ranks contain each logical element."""
    specs = model_spec(model_shape(), parallel)
    layout = small_layout(physical_params(specs))
    grids = build_grids(parallel)
    counts = {spec.name: torch.zeros(spec.shape) for spec in specs}
    for rank in range(parallel.world_size):
        coordinates = {"dense": grids.dense.coordinate(rank)}
        data_group = grids.dense.group(rank, ("cp", "dp"))
        pieces = find_pieces(layout, coordinates, parallel)
        ranges = ranges_of(layout, pieces, data_group.index(rank), len(data_group))
        marks = {i: torch.zeros(bucket.elements) for i, bucket in enumerate(layout.buckets)}
        for bucket, start, stop in ranges:
            marks[bucket][start:stop] += 1
        for piece in state_pieces("mark", marks, pieces):
            region(counts[piece.spec.name], piece.box).add_(piece.tensor)
    return counts


@pytest.mark.parametrize(
    "parallel",
    [
        parallel_shape(),
        parallel_shape(dp=3),
        parallel_shape(tp=2),
        parallel_shape(tp=4, sequence_parallel=True),
        parallel_shape(tp=8, sequence_parallel=True),
        parallel_shape(tp=4, dp=2, cp=2),
    ],
    ids=str,
)
def test_norm_ranges_of_all_ranks_hold_every_logical_element_once(
    parallel: ParallelShape,
) -> None:
    for name, count in counted_elements(parallel).items():
        assert torch.equal(count, torch.ones_like(count)), name


# The output layer lies before other parameters of its segment, the embedding behind them.
@pytest.mark.parametrize("name", ["embedding.word_embeddings.weight", "output_layer.weight"])
def test_vocabulary_padding_is_in_no_range_and_no_piece(name: str) -> None:
    parallel = parallel_shape(tp=4)  # 37 rows padded to 48: rank 3 holds 1 row and 11 of padding
    specs = model_spec(model_shape(tied=False), parallel)
    layout = small_layout(physical_params(specs), bucket_size=10**9)
    slot = layout.slots[name]
    padding = (slot.start + 1 * 16, slot.start + slot.numel)
    pieces = find_pieces(layout, {"dense": {"tp": 3, "cp": 0, "dp": 0, "pp": 0}}, parallel)
    (table,) = (piece for piece in pieces if piece.spec.name == name)
    assert table.box.shape == (1, 16)
    for _, start, stop in ranges_of(layout, pieces):
        assert stop <= padding[0] or start >= padding[1]


def test_the_norm_runs_over_few_ranges_on_the_first_tensor_rank() -> None:
    parallel = parallel_shape(tp=2)
    specs = model_spec(model_shape(num_layers=20, vocab_size=40), parallel)
    layout = small_layout(physical_params(specs), bucket_size=10**9)
    pieces = find_pieces(layout, {"dense": {"tp": 0, "cp": 0, "dp": 0, "pp": 0}}, parallel)
    assert len(ranges_of(layout, pieces)) == 1


def test_data_ranks_share_the_norm_equally() -> None:
    parallel = parallel_shape(dp=2)
    layout = small_layout(physical_params(model_spec(model_shape(), parallel)))
    pieces = find_pieces(layout, {"dense": {"tp": 0, "cp": 0, "dp": 0, "pp": 0}}, parallel)
    lengths = [
        sum(stop - start for _, start, stop in ranges_of(layout, pieces, index, 2))
        for index in range(2)
    ]
    assert abs(lengths[0] - lengths[1]) <= 1


def test_pieces_are_views_of_the_stored_parameters() -> None:
    stand = build_stand()
    for piece in state_pieces("param", stand.buffers.values, stand.buffers.pieces):
        piece.tensor.copy_(region(logical_value(piece.spec, torch.float64), piece.box))
    for physical in stand.physicals:
        for view in physical.views:
            stored = stand.params[physical.name][view.start : view.start + view.spec.shape[0]]
            assert torch.equal(stored, logical_value(view.spec, torch.float64)), view.spec.name


@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 1), (1, 6), (2, 3, 4)], ids=str)
def test_any_range_of_a_box_is_a_few_boxes_in_order(shape: tuple[int, ...]) -> None:
    box = Box(tuple(range(2, 2 + len(shape))), shape)
    whole = torch.zeros([offset + size for offset, size in zip(box.offset, shape, strict=True)])
    region(whole, box).copy_(torch.arange(box.elements).view(shape))
    for start in range(box.elements + 1):
        for stop in range(start, box.elements + 1):
            parts = list(boxes_of_range(box, start, stop))
            assert len(parts) <= 2 * len(shape) - 1
            values = [value for part in parts for value in region(whole, part).flatten().tolist()]
            assert values == list(range(start, stop))
