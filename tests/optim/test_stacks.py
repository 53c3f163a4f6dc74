"""Stacks of experts: what happens to one is what would happen to a matrix of its own.

The oracle is one process whose experts are separate parameters. Ranks hold some experts (ep),
parts of each (etp) and shards of both (edp); no parameter is even in elements.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.config.plan import ParallelShape
from megatron_lite.mesh.grid import build_grids
from megatron_lite.mesh.groups import Groups, build_groups, local_groups
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.optim.adafactor import Adafactor
from megatron_lite.optim.adamw import AdamW
from megatron_lite.optim.factored import is_factored
from megatron_lite.optim.groups import Grouping, is_matrix
from megatron_lite.optim.ledger import state_per_element, statistics_elements
from megatron_lite.optim.muon import Muon
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.optim.recipe import MatrixRules, Recipe
from megatron_lite.optim.segments import RankPlace
from megatron_lite.optim.sgd import SGD
from megatron_lite.shard.buffers import FlatBuffers
from megatron_lite.shard.flat import build_layout
from megatron_lite.shard.gather import ResidentWeights
from megatron_lite.shard.ownership import build_ownership
from megatron_lite.spec.params import Cut, ParamSpec
from megatron_lite.spec.physical import physical_params
from megatron_lite.spec.shards import Box
from tests.pool import RankPool
from tests.shard.stand import PRECISIONS, region

EXPERTS, UPDATES, TOLERANCE = 4, 3, 1e-12
ADAMW = AdamW(0.9, 0.95, 1e-8)
STEPS = ((3.4445, -4.7750, 2.0315),) * 3
RECIPES = {
    "muon": Recipe(
        MatrixRules(Muon(0.9, True, STEPS), ADAMW), Grouping(is_matrix=is_matrix)
    ),
    "adafactor": Recipe(Adafactor(0.8, clip_threshold=0.5), Grouping(is_matrix=is_factored)),
    "adafactor-first": Recipe(Adafactor(0.8, 0.5), Grouping(is_matrix=is_factored)),
    "adam": Recipe(ADAMW),
    "sgd": Recipe(SGD(0.9)),
}  # fmt: skip
# name -> (tp, ep, etp, dp); experts are replicated over tp dp / (ep etp) ranks.
LAYOUTS = {
    "one": (1, 1, 1, 1),
    "ep2": (1, 2, 1, 2),
    "etp2": (2, 1, 2, 1),
    "edp3": (1, 1, 1, 3),
    "ep2-edp2": (1, 2, 1, 4),
    "ep2-etp2": (2, 2, 2, 2),
    "etp2-edp2": (2, 1, 2, 2),
    "tp2-ep2-edp2": (2, 2, 1, 2),
}


def parallel_of(layout: str) -> ParallelShape:
    tp, ep, etp, dp = LAYOUTS[layout]
    return ParallelShape(
        world_size=tp * dp, tp=tp, cp=1, ep=ep, etp=etp, dp=dp, edp=tp * dp // (ep * etp), pp=1,
        vpp=1, sequence_parallel=False, order="tp-cp-ep-dp-pp",
    )  # fmt: skip


def specs_of(parallel: ParallelShape) -> list[ParamSpec]:
    """Stacks of two linears with biases, beside a dense matrix and a dense vector."""
    ep, out = Cut(0, "ep", parallel.ep), Cut(1, "etp", parallel.etp)
    stack: dict[str, Any] = {"grid": "expert", "uses": ("layer.0",)}
    return [
        ParamSpec(
            "dense.weight", (6, 5), cuts=(Cut(0, "tp", parallel.tp),), uses=("layer.0",),
            matrix=(6, 5),
        ),
        ParamSpec("dense.bias", (5,), uses=("layer.0",), decay=False),
        ParamSpec("fc1.weight", (EXPERTS, 6, 7), cuts=(ep, out), matrix=(6, 7), **stack),
        ParamSpec("fc1.bias", (EXPERTS, 6), cuts=(ep, out), decay=False, **stack),
        ParamSpec(
            "fc2.weight", (EXPERTS, 7, 6), cuts=(ep, Cut(2, "etp", parallel.etp)), matrix=(7, 6),
            **stack,
        ),
        ParamSpec("fc2.bias", (EXPERTS, 7), cuts=(ep,), decay=False, **stack),
    ]  # fmt: skip


def value(name: str, shape: tuple[int, ...], update: int = 0) -> Tensor:
    """Experts that differ, in size too, so that a threshold tells them apart."""
    seed = sum(map(ord, name)) * 10 + update
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for expert in range(shape[0] if name.startswith("fc") else 0):
        drawn[expert] *= 10.0 ** (expert * update)
    return drawn


def build(
    specs: list[ParamSpec], parallel: ParallelShape, rank: int, groups: Groups, stage: int,
    recipe: Recipe,
) -> tuple[FlatBuffers, Optimizer]:  # fmt: skip
    stored = physical_params(specs)
    params = {p.name: nn.Parameter(torch.zeros(p.shape, dtype=torch.float64)) for p in stored}
    ownership = build_ownership(stage, groups)
    layout = build_layout(
        stored,
        dtype_of=lambda _: "float64",
        group_of=recipe.grouping,
        bucket_size=100,
        shards=ownership.shards,
    )
    grids = build_grids(parallel)
    coordinates = {"dense": grids.dense.coordinate(rank), "expert": grids.expert.coordinate(rank)}
    buffers = FlatBuffers(layout, params, coordinates, parallel, PRECISIONS["float64"], ownership)
    place = RankPlace(coordinates, parallel, {"dense": groups.tp, "expert": groups.etp})
    return buffers, Optimizer(buffers, recipe, False, ResidentWeights(), place=place)


def updated(buffers: FlatBuffers, optimizer: Optimizer, values: Any) -> None:
    for piece in optimizer.weight_pieces():
        piece.tensor.copy_(region(values(piece.spec, 0), piece.box))
    optimizer.after_load("master")
    for update in range(1, UPDATES + 1):
        for piece in buffers.gradient_pieces():
            piece.tensor.copy_(region(values(piece.spec, update), piece.box))
        optimizer.step(0.01, 0.1, 1.0)


def stacked(rank: int, layout: str, stage: int, recipe: str) -> dict[str, Any]:
    parallel, recorder = parallel_of(layout), Recorder()
    groups = local_groups(recorder)
    if parallel.world_size > 1:
        groups = build_groups(build_grids(parallel), rank, 4, recorder=recorder)
    specs = specs_of(parallel)
    buffers, optimizer = build(specs, parallel, rank, groups, stage, RECIPES[recipe])
    updated(buffers, optimizer, lambda spec, update: value(spec.name, spec.shape, update))
    state: list[tuple[str, str, Box, Tensor, bool]] = []
    for piece in optimizer.state_pieces():
        if stage == 0 or piece.kind != "param":  # nobody has gathered them
            state.append(
                (piece.kind, piece.spec.name, piece.box, piece.tensor.clone(), piece.owned)
            )
    for piece in optimizer.weight_pieces():
        if stage > 0:
            state.append(
                (piece.kind, piece.spec.name, piece.box, piece.tensor.clone(), piece.owned)
            )
    kept = sum(t.numel() for kind in optimizer.state.values() for t in kind.tensors.values())
    rule, layout_ = RECIPES[recipe], buffers.layout
    if stage == 0:
        elements = sum(bucket.elements for bucket in layout_.buckets)
        assert kept == round(state_per_element(rule, layout_) * elements)
    factored = optimizer._factored
    moments = [] if factored is None else [updates.moments for updates in factored._updates]
    assert sum(m._flat.numel() for m in moments) == statistics_elements(rule, layout_)
    return {"state": state, "groups": {record.group for record in recorder.records}}


def separate(recipe: str) -> dict[tuple[str, str], Tensor]:
    """(kind, parameter) -> state of one process whose experts are parameters."""
    parallel = parallel_of("one")
    specs = []
    for spec in specs_of(parallel):
        if spec.is_stack:
            specs += [
                replace(spec, name=f"{spec.name}.{e}", shape=spec.shape[1:], cuts=(), grid="dense")
                for e in range(EXPERTS)
            ]
        else:
            specs.append(spec)

    def values(spec: ParamSpec, update: int) -> Tensor:
        if not spec.name.startswith("fc"):
            return value(spec.name, spec.shape, update)
        name, _, expert = spec.name.rpartition(".")
        return value(name, (EXPERTS, *spec.shape), update)[int(expert)]

    buffers, optimizer = build(specs, parallel, 0, local_groups(), 0, RECIPES[recipe])
    updated(buffers, optimizer, values)
    return {(p.kind, p.spec.name): p.tensor.clone() for p in optimizer.state_pieces()}


CASES = [
    (layout, stage, recipe)
    for recipe in RECIPES
    for layout in LAYOUTS
    for stage in ((0, 1) if recipe in ("muon", "adafactor") else (1,))
]


@pytest.mark.parametrize(("layout", "stage", "recipe"), CASES, ids=str)
def test_each_expert_of_a_stack_is_updated_like_a_parameter_of_its_own(
    rank_pool: RankPool, layout: str, stage: int, recipe: str
) -> None:
    parallel, wanted = parallel_of(layout), separate(recipe)
    ranks = rank_pool.run(
        parallel.world_size, stacked, layout=layout, stage=stage, recipe=recipe
    )  # fmt: skip
    shapes = {spec.name: spec.shape for spec in specs_of(parallel)}
    covered: Counter[tuple[str, str]] = Counter()
    for rank in ranks:
        assert "ep" not in rank["groups"] and "expert_block" not in rank["groups"]
        for kind, name, box, tensor, owned in rank["state"]:
            covered[kind, name] += box.elements * owned
            if name.startswith("dense"):
                whole = wanted[kind, name]
            else:
                whole = torch.stack([wanted[kind, f"{name}.{e}"] for e in range(EXPERTS)])
            expected = region(whole, box)
            error = (tensor - expected).abs().max() / whole.abs().max()
            assert float(error) <= TOLERANCE, (kind, name, box)
    assert {name for _, name in covered} == set(shapes)
    for (kind, name), elements in covered.items():
        shape = shapes[name]
        if "row" in kind:
            shape = shape[:-1]
        elif "column" in kind:
            shape = (*shape[:-2], shape[-1])
        assert elements == prod(shape), (kind, name)


def test_biases_of_experts_are_vectors_however_many_there_are() -> None:
    kinds = {spec.name: is_factored(spec) for spec in specs_of(parallel_of("one"))}
    assert kinds == {name: name.endswith("weight") for name in kinds}
