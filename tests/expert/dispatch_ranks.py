"""What one rank does in the tests of dispatch (runs inside the rank pool)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_lite.expert import alltoall
from megatron_lite.expert.dispatch import run_experts
from megatron_lite.expert.grouped import ExpertRows
from megatron_lite.expert.layer import _experts
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.mesh.grid import build_grids
from megatron_lite.mesh.groups import Groups, build_groups, local_groups
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.microbatch import WeightGradientStore
from megatron_lite.native.load import load_native
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

READS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Count what would make the host wait for a device."""
    found: Counter[str] = Counter()
    kept = {name: getattr(torch.Tensor, name) for name in READS}

    def counting(name: str) -> Any:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return kept[name](self, *args, **kwargs)

        return read

    for name in READS:
        setattr(torch.Tensor, name, counting(name))
    try:
        yield found
    finally:
        for name, method in kept.items():
            setattr(torch.Tensor, name, method)


def groups_of(layout: Layout, rank: int, recorder: Recorder | None = None) -> Groups:
    """Groups of this rank."""
    if layout.world == 1:
        return local_groups(recorder)
    return build_groups(build_grids(layout.parallel()), rank, 1, recorder=recorder)


def mine(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    """This rank's tokens."""
    return whole.chunk(layout.world)[rank].clone()


def pass_through(
    parts: ExpertParts,
    problem: Problem,
    layout: Layout,
    rank: int,
    native: bool,
    recorder: Recorder,
    deferred: bool = False,
) -> dict[str, Any]:
    """Forward and backward pass of this rank's tokens."""
    sink = Sink()
    store = WeightGradientStore(sink, deferred)
    mb = context(store, native)

    def experts(rows: Tensor, where: ExpertRows) -> Tensor:
        return _experts(parts, rows, where, mb)

    x = mine(problem.x, layout, rank).requires_grad_()
    probs = mine(problem.probs, layout, rank).requires_grad_()
    ids, grad = mine(problem.ids, layout, rank), mine(problem.grad, layout, rank)
    recorder.clear()
    with counted_reads() as forward_reads, recorder.phase("forward"):
        out = run_experts(parts, x, ids, probs, experts, mb)
    with counted_reads() as backward_reads, recorder.phase("backward"):
        out.backward(grad)
    early = dict(sink.counts)
    store.flush()
    result: dict[str, Any] = {"out": out.detach(), "x": x.grad, "probs": probs.grad}
    for name, (inner, _) in PARAMS.items():
        if inner in parts.params:
            param = parts.params[inner]
            used = id(param) in sink.mains
            result[name] = sink.mains[id(param)] - EARLIER if used else torch.zeros_like(param)
            result[f"{name} written"] = sink.counts.get(id(param), 0)
            result[f"{name} early"] = early.get(id(param), 0)
    result["reads"] = dict(forward_reads), dict(backward_reads)
    result["records"] = [(r.phase, r.op, r.group, r.elements) for r in recorder.records]
    return result


def run_cases(
    cases: Sequence[Case],
    layout: Layout,
    dispatcher: str,
    native: bool,
    rank: int,
    deferred: bool = False,
) -> list[dict[str, Any]]:
    """`pass_through` of each case."""
    if native:
        load_native()
    recorder = Recorder()
    groups = groups_of(layout, rank, recorder)
    results = []
    for case in cases:
        problem = draw(case)
        parts = build_parts(case, problem, layout, groups, dispatcher)
        args = (parts, problem, layout, rank, native, recorder, deferred)
        results.append(pass_through(*args))
    return results


def train(
    cases: Sequence[Case], layout: Layout, dispatcher: str, rank: int, rate: float = 0.1
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """SGD over one case per step; this rank's weights and last gradients."""
    recorder = Recorder()
    groups = groups_of(layout, rank, recorder)
    parts = build_parts(cases[0], draw(cases[0]), layout, groups, dispatcher)
    result: dict[str, Any] = {}
    for case in cases:
        result = pass_through(parts, draw(case), layout, rank, False, recorder)
        for name in ("gate", "up", "fc2"):
            parts.params[PARAMS[name][0]].data.sub_(result[name], alpha=rate)
    names = ("gate", "up", "fc2")
    weights = {name: parts.params[PARAMS[name][0]].detach() for name in names}
    return weights, {name: result[name] for name in names}


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str]) -> Tensor:
        ctx.events = events
        events.append("meanwhile")
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.events.append("meanwhile back")
        return grads[0] * 2, None


class _MarkedWork:
    def __init__(self, work: Any, events: list[str]) -> None:
        self._work, self._events = work, events

    def wait(self) -> None:
        """Wait and say so."""
        self._events.append("arrive")
        self._work.wait()


def order_of_events(layout: Layout, rank: int) -> tuple[list[str], list[str], Tensor, Tensor]:
    """Departures and arrivals of rows and what runs between; gradient of x with and without."""
    case = Case()
    problem = draw(case)
    parts = build_parts(case, problem, layout, groups_of(layout, rank), "alltoall")
    mb = context(WeightGradientStore(Sink()), False)
    events: list[str] = []
    plain = alltoall.collectives.all_to_all_single

    def marked(*args: Any, **kwargs: Any) -> Any:
        work = plain(*args, **kwargs)
        if not kwargs.get("async_op"):
            return work
        events.append("depart")
        return _MarkedWork(work, events)

    x = mine(problem.x, layout, rank).requires_grad_()
    ids, probs = mine(problem.ids, layout, rank), mine(problem.probs, layout, rank)
    shared: list[Tensor] = []
    alltoall.collectives.all_to_all_single = marked
    try:
        out = run_experts(
            parts,
            x,
            ids,
            probs,
            lambda rows, where: _experts(parts, rows, where, mb),
            mb,
            meanwhile=lambda: shared.append(_Marked.apply(x, events)),
        )
        forward = list(events)
        events.clear()
        (out + shared[0]).sum().backward()
    finally:
        alltoall.collectives.all_to_all_single = plain
    assert x.grad is not None
    with_shared, x.grad = x.grad, None
    out = run_experts(
        parts, x, ids, probs, lambda rows, where: _experts(parts, rows, where, mb), mb
    )
    out.sum().backward()
    return forward, events, with_shared, x.grad + 2
