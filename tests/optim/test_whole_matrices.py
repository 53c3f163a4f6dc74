"""Matrices made whole out of shards and tensor pieces, and Muon's and Adafactor's sums."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.mesh.groups import local_group
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.optim.factored import (
    COLUMN,
    ROW,
    FactoredMoments,
    OwnedBox,
    Spread,
    is_factored,
    statistic_spec,
)
from megatron_lite.optim.groups import is_matrix
from megatron_lite.optim.muon import Muon
from megatron_lite.optim.newton_schulz import orthogonalize, scale_factor
from megatron_lite.optim.whole_matrices import BucketMatrices, MatrixView, matrix_views
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.params import Cut, ParamSpec
from megatron_lite.spec.shards import Box, local_box
from tests.pool import RankPool
from tests.shard.stand import build_rank_groups, logical_value, model_shape, parallel_shape, region

STEPS = ((3.4445, -4.7750, 2.0315),) * 3


def specs_of(tp: int, kv_heads: int = 2) -> list[ParamSpec]:
    model = model_shape(num_query_groups=kv_heads, tied=False)
    return list(model_spec(model, parallel_shape(tp=tp)))


def views_of(specs: list[ParamSpec], tp: int, rank: int) -> tuple[list[MatrixView], int]:
    """Matrices behind one another with odd gaps; the bucket's length fits any shard group."""
    views, cursor = [], 3
    for spec in filter(is_matrix, specs):
        box = local_box(spec, {"tp": rank % tp}, parallel_shape(tp=tp))
        views += matrix_views(spec, box, cursor)
        cursor += box.elements + 5
    return views, -(-cursor // 12) * 12


def whole_of(view: MatrixView) -> Tensor:
    (spec,) = (spec for spec in specs_of(1) if spec.name == view.name)
    return logical_value(spec, torch.float64)


def values_of(views: list[MatrixView], elements: int) -> Tensor:
    bucket = torch.full((elements,), 99.0, dtype=torch.float64)
    for view in views:
        whole = whole_of(view)
        bucket[view.start : view.stop] = region(whole, view.box).reshape(-1)
    return bucket


def gathered(rank: int, tp: int, dp: int) -> dict[str, Any]:
    parallel = parallel_shape(tp=tp, dp=dp)
    recorder = Recorder()
    groups = build_rank_groups(parallel, rank, 2, recorder)
    views, elements = views_of(specs_of(tp), tp, rank)
    shard = groups.dp_cp
    bucket = BucketMatrices(views, elements, shard, groups.tp)
    mine = values_of(views, elements)[bucket.first : bucket.last]
    bucket.start_gather(mine.clone())
    wholes = bucket.whole()
    names = [view.name for view in bucket.views]
    right = all(
        torch.equal(whole, whole_of(view)) for view, whole in zip(bucket.views, wholes, strict=True)
    )
    back = torch.full_like(mine, 99.0)
    bucket.take([whole + 1 for whole in wholes], back)
    expected = mine + 1
    outside = torch.ones(elements, dtype=torch.bool)
    for view in views:
        outside[view.start : view.stop] = False
    expected[outside[bucket.first : bucket.last]] = 99.0
    sent = [(r.op, r.group, r.elements) for r in recorder.records]
    cut = sum(view.box.elements for view in bucket.views if view.cut is not None)
    return {
        "names": names, "right": right, "back": torch.equal(back, expected),
        "sent": sent, "elements": elements, "cut": cut, "views": len(views),
    }  # fmt: skip


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 2), (1, 3), (2, 1), (4, 1), (2, 2)])
def test_every_rank_sees_the_logical_matrices_that_touch_its_range(
    rank_pool: RankPool, tp: int, dp: int
) -> None:
    found = rank_pool.run(tp * dp, gathered, tp=tp, dp=dp)
    for rank in found:
        assert rank["right"] and rank["back"]
        expected = [("all_gather", "dp_cp", rank["elements"])] if dp > 1 else []
        expected += [("all_gather", "tp", tp * rank["cut"])] if tp > 1 else []
        assert rank["sent"] == expected
    names = {name for rank in found for name in rank["names"]}
    assert len(names) == found[0]["views"]
    if dp > 1:  # no rank works on all of them
        assert all(len(rank["names"]) < found[0]["views"] for rank in found)


def test_a_piece_that_all_tensor_ranks_hold_does_not_travel() -> None:
    views, elements = views_of(specs_of(4, kv_heads=1), 4, 0)
    shared = [view for view in views if view.name.endswith("linear_k.weight")]
    assert shared and all(view.cut is None for view in shared)
    bucket = BucketMatrices(shared, elements, local_group("shard"), local_group("tp"))
    bucket.start_gather(values_of(shared, elements))
    assert [m.shape for m in bucket.whole()] == [view.box.shape for view in shared]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
def test_muon_is_the_scaled_orthogonalised_average(nesterov: bool, mode: str) -> None:
    rule = Muon(0.75, nesterov, STEPS, mode, 0.5)
    gradients = [torch.randn(6, 4, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)]
    momenta = [torch.randn_like(g) for g in gradients]
    expected = [0.75 * m + 0.25 * g for m, g in zip(momenta, gradients, strict=True)]
    ahead = [0.75 * m + 0.25 * g for m, g in zip(expected, gradients, strict=True)]
    directions = rule.directions(gradients, momenta)
    for momentum, value in zip(momenta, expected, strict=True):
        torch.testing.assert_close(momentum, value, rtol=1e-14, atol=1e-14)
    for update, value in zip(
        rule.updates(directions, torch.float64), ahead if nesterov else expected, strict=True
    ):
        scale = 0.5 * scale_factor(*value.shape, mode)
        torch.testing.assert_close(
            update, orthogonalize(value, STEPS) * scale, rtol=1e-12, atol=1e-12
        )


def halves(box: Box, share: int, count: int) -> list[Box]:
    """Rows of a box dealt out to `count` ranks, the last rows cut across."""
    rows, columns = box.shape
    found = []
    for row in range(rows):
        middle = columns // 2 if row == rows - 1 else 0
        if row % count == share:
            found.append(Box((box.offset[0] + row, box.offset[1] + middle), (1, columns - middle)))
        if middle and (row + 1) % count == share:
            found.append(Box((box.offset[0] + row, box.offset[1]), (1, middle)))
    return found


def factored(rank: int, tp: int, dp: int) -> float:
    """Largest difference from whole matrices after two updates."""
    parallel = parallel_shape(tp=tp, dp=dp)
    recorder = Recorder()
    groups = build_rank_groups(parallel, rank, 2, recorder)
    specs = [spec for spec in specs_of(tp) if is_factored(spec)]
    held = [(spec, local_box(spec, {"tp": groups.tp.rank}, parallel)) for spec in specs]
    moments = FactoredMoments(
        held, Spread(groups.dp_cp, groups.tp, torch.float64, torch.device("cpu"))
    )
    worst = 0.0
    rows = {spec.name: torch.zeros(spec.shape[0], dtype=torch.float64) for spec in specs}
    columns = {spec.name: torch.zeros(spec.shape[1], dtype=torch.float64) for spec in specs}
    for decay, scale in ((0.0, 1.0), (0.6, 3.0)):
        owned = []
        for index, (spec, box) in enumerate(held):
            whole = logical_value(spec, torch.float64, scale)
            for part in halves(box, groups.dp_cp.rank, groups.dp_cp.size):
                owned.append(OwnedBox(index, part, region(whole, part)))
            squares = whole.square() + 1e-3
            rows[spec.name] = decay * rows[spec.name] + (1 - decay) * squares.mean(1)
            columns[spec.name] = decay * columns[spec.name] + (1 - decay) * squares.mean(0)
        moments.accumulate(owned, 1e-3, decay)
        for part in owned:
            spec = specs[part.index]
            row, column = rows[spec.name], columns[spec.name]
            expected = (torch.outer(row, column) / row.mean()).sqrt()
            worst = max(
                worst, float((moments.root(part) / region(expected, part.box) - 1).abs().max())
            )
    for kind, spec, tensor in moments.statistics():
        box = local_box(spec, {"tp": groups.tp.rank}, parallel)
        whole = rows[spec.name] if kind == ROW else columns[spec.name]
        assert tuple(tensor.shape) == box.shape
        if tensor.numel():
            worst = max(worst, float((tensor / region(whole, box) - 1).abs().max()))
    each = ["dp_cp"] * (dp > 1) + ["tp"] * (tp > 1)
    assert [r.group for r in recorder.records] == each * 2
    return worst


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 3), (2, 1), (4, 1), (2, 2)])
def test_factored_moments_are_those_of_the_logical_matrix(
    rank_pool: RankPool, tp: int, dp: int
) -> None:
    assert max(rank_pool.run(tp * dp, factored, tp=tp, dp=dp)) < 1e-13


def test_statistics_are_cut_like_the_dim_they_keep() -> None:
    specs = {spec.name: spec for spec in specs_of(2)}
    proj = specs["decoder.layers.0.self_attention.linear_proj.weight"]
    table = specs["embedding.word_embeddings.weight"]
    row, column = statistic_spec(proj, ROW), statistic_spec(proj, COLUMN)
    assert (row.shape, row.cuts) == ((proj.shape[0],), ())
    assert (column.shape, column.cuts) == ((proj.shape[1],), (Cut(0, "tp", 2),))
    row, column = statistic_spec(table, ROW), statistic_spec(table, COLUMN)
    assert (row.shape, row.cuts, row.padded) == ((37,), table.cuts, table.padded)
    assert (column.shape, column.cuts, column.padded) == ((16,), (), None)
