"""What a rank does in the tensor-parallel tests (runs inside the rank pool)."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_lite.mesh import collectives
from megatron_lite.mesh.grid import build_grids
from megatron_lite.mesh.groups import build_groups
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.model.gpt import StageOptions
from tests.model.builders import (
    FAMILIES,
    PlainSink,
    build_context,
    build_plan_of,
    build_stage,
    logical_pieces,
    sample_batch,
)


def loss_and_gradients(
    family: str, sp: bool, dropout: float, recompute: str, rank: int, world_size: int
) -> dict[str, object]:
    """Loss, this rank's logical gradient pieces after partial reductions, and records."""
    model = replace(FAMILIES[family], hidden_dropout=dropout, attention_dropout=dropout)
    plan = build_plan_of(model, world_size, sp, recompute)
    recorder = Recorder()
    groups = build_groups(
        build_grids(plan.parallel), rank, model.num_query_groups, recorder=recorder
    )
    stage, _ = build_stage(plan, groups, rank, StageOptions())
    tokens, labels, weights = sample_batch(model)
    sink = PlainSink(stage)
    mb = build_context(plan, sink, weights, rank)
    with recorder.phase("forward"):
        loss = stage(tokens, labels, mb)
    with recorder.phase("backward"):
        loss.backward()
    records = [(r.phase, r.op, r.group, r.elements) for r in recorder.records]
    coordinate = {"tp": rank, "cp": 0, "dp": 0, "pp": 0}
    pieces = {}
    for spec, grad in logical_pieces(stage, coordinate, sink.main_grad):
        for axis in spec.partial_axes:
            part = grad.contiguous()
            collectives.all_reduce(part, getattr(groups, axis))
            grad.copy_(part)
        pieces[spec.name] = grad.clone()
    elements = sum(p.numel() for p in stage.parameters())
    return {"loss": loss.item(), "pieces": pieces, "records": records, "elements": elements}


def logits(family: str, sp: bool, rank: int, world_size: int) -> torch.Tensor:
    """Logits of the sample batch."""
    plan = build_plan_of(FAMILIES[family], world_size, sp)
    groups = build_groups(build_grids(plan.parallel), rank, plan.model.num_query_groups)
    stage, _ = build_stage(plan, groups, rank)
    tokens, _, weights = sample_batch(plan.model)
    return stage.logits(tokens, build_context(plan, None, weights, rank), None)
