"""What one rank does in the tests of replicated experts (runs inside the rank pool)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.expert import alltoall
from megatron_lite.expert.dispatch import run_experts
from megatron_lite.expert.grouped import ExpertRows
from megatron_lite.expert.layer import _experts
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.expert.replicas import bring_replicas
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.microbatch import MicrobatchContext, WeightGradientStore
from megatron_lite.native.load import load_native
from megatron_lite.ops.recompute import recompute
from megatron_lite.telemetry.meters import LiveStorageMeter
from tests.expert.dispatch_ranks import counted_reads, groups_of, mine
from tests.expert.moe_problem import (
    EARLIER,
    PARAMS,
    Case,
    Layout,
    Problem,
    Sink,
    build_parts,
    context,
    draw,
)


@contextmanager
def sent_rows(rank: int) -> Iterator[list[int]]:
    """Rows that leave this rank for others, per all-to-all with sizes."""
    plain, found = alltoall.collectives.all_to_all_single, []

    def counting(out: Tensor, inp: Tensor, there: Any, here: Any, *args: Any, **named: Any) -> Any:
        if here is not None:
            found.append(sum(here) - here[rank])
        return plain(out, inp, there, here, *args, **named)

    alltoall.collectives.all_to_all_single = counting
    try:
        yield found
    finally:
        alltoall.collectives.all_to_all_single = plain


def with_counts(parts: ExpertParts, hot: Sequence[int], frozen: bool) -> ExpertParts:
    """The layer after a step that chose these experts most, in this order."""
    counts = torch.zeros(parts.shape.num_experts)
    for place, expert in enumerate(hot):
        counts[expert] = 100 - place
    params = dict(parts.params)
    params["router.expert_counts"] = nn.Parameter(counts, requires_grad=False)
    if frozen:
        params["experts.linear_up.weight"].requires_grad_(False)
    return replace(parts, params=params, shape=replace(parts.shape, replicated=len(hot)))


def _layer(
    parts: ExpertParts, x: Tensor, ids: Tensor, probs: Tensor, mb: MicrobatchContext
) -> Tensor:
    """What a MoE layer does with its routing."""
    replicas = bring_replicas(parts, mb)
    placed = parts
    if replicas is not None:
        placed, ids = replicas.parts, replicas.place(ids)

    def experts(rows: Tensor, whose: ExpertRows) -> Tensor:
        return _experts(parts, rows, whose, mb, replicas)

    return run_experts(placed, x, ids, probs, experts, mb)


def pass_through(
    parts: ExpertParts,
    problem: Problem,
    layout: Layout,
    rank: int,
    native: bool,
    recorder: Recorder,
    again: bool,
    deferred: bool,
) -> dict[str, Any]:
    """Forward and backward pass of this rank's tokens, as a layer does it."""
    sink = Sink()
    store = WeightGradientStore(sink, deferred)
    mb = context(store, native)
    ids = mine(problem.ids, layout, rank)

    def run(x: Tensor, probs: Tensor) -> Tensor:
        return _layer(parts, x, ids, probs, mb)

    x = mine(problem.x, layout, rank).requires_grad_()
    probs = mine(problem.probs, layout, rank).requires_grad_()
    recorder.clear()
    with sent_rows(parts.block.rank) as sent:
        with counted_reads() as forward_reads, recorder.phase("forward"):
            out = recompute(run, x, probs) if again else run(x, probs)
        with counted_reads() as backward_reads, recorder.phase("backward"):
            out.backward(mine(problem.grad, layout, rank))
    early = dict(sink.counts)
    store.flush()
    result: dict[str, Any] = {"out": out.detach(), "x": x.grad, "probs": probs.grad}
    for name, (inner, _) in PARAMS.items():
        if inner in parts.params and parts.params[inner].requires_grad:
            param = parts.params[inner]
            result[name] = sink.mains[id(param)] - EARLIER
            result[f"{name} written"] = sink.counts[id(param)]
            result[f"{name} early"] = early.get(id(param), 0)
    result["reads"] = dict(forward_reads), dict(backward_reads)
    result["records"] = [(r.phase, r.op, r.group, r.elements) for r in recorder.records]
    result["sent"] = sent
    return result


def run_cases(
    cases: Sequence[Case],
    hot: Sequence[int],
    layout: Layout,
    rank: int,
    native: bool = False,
    again: bool = False,
    deferred: bool = False,
    frozen: bool = False,
) -> list[dict[str, Any]]:
    """`pass_through` of each case; `hot` were chosen most."""
    if native:
        load_native()
    recorder = Recorder()
    groups = groups_of(layout, rank, recorder)
    results = []
    for case in cases:
        problem = draw(case)
        parts = with_counts(build_parts(case, problem, layout, groups, "alltoall"), hot, frozen)
        results.append(
            pass_through(parts, problem, layout, rank, native, recorder, again, deferred)
        )
    return results


def kept_bytes(case: Case, hot: Sequence[int], layout: Layout, rank: int) -> int:
    """Alive between the passes, the rank's parameters and inputs left out."""
    load_native()
    problem = draw(case)
    groups = groups_of(layout, rank)
    parts = with_counts(build_parts(case, problem, layout, groups, "alltoall"), hot, frozen=False)
    mb = context(WeightGradientStore(Sink()), True)
    x, ids = mine(problem.x, layout, rank).requires_grad_(), mine(problem.ids, layout, rank)
    probs = mine(problem.probs, layout, rank).requires_grad_()
    with LiveStorageMeter() as meter:
        meter.track([x, ids, probs, *parts.params.values()])
        before = meter.live_bytes
        out = _layer(parts, x, ids, probs, mb)
        kept = meter.live_bytes - before
    out.sum().backward()  # others wait for it
    return int(kept)
