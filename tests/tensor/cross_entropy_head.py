"""A head's problem, its fp64 answer, and what one rank does of it (also in the rank pool)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_lite.mesh.grid import build_grids
from megatron_lite.mesh.groups import Group, build_groups
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.microbatch import MicrobatchContext, WeightGradientStore
from megatron_lite.native.load import load_native
from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.tensor import cross_entropy
from tests.model.builders import LLAMA, build_plan_of

S, B, H = 32, 3, 24
EARLIER = 2.0**-7  # what the main gradient holds before
ALONE = Group("tp", (0,), 0, None)


@dataclass
class Problem:
    """Hidden states [s, b, h], a padded weight, labels and weights, some of them 0."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    weights: Tensor
    v: int


def draw(dtype: torch.dtype, v: int, padded: int) -> Problem:
    """Inputs rounded to `dtype`; the weight's padding rows are not 0, as nothing may use them."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(S, B, H, dtype=torch.float64, generator=generator).to(dtype)
    weight = 0.7 * torch.randn(padded, H, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, v, (S, B), generator=generator)
    weights = (torch.rand(S, B, generator=generator) > 0.25).double()
    return Problem(hidden, weight.to(dtype), labels, weights, v)


def answer(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and both gradients by torch's own operations in fp64 on the whole vocabulary."""
    hidden = problem.hidden.double().requires_grad_()
    weight = problem.weight.double().requires_grad_()
    logits = (hidden @ weight.t())[..., : problem.v]
    losses = functional.cross_entropy(
        logits.flatten(0, 1), problem.labels.flatten(), reduction="none"
    )
    loss = (losses * problem.weights.flatten()).sum() / problem.weights.sum()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


class Sink:
    """One main gradient in the accumulation dtype, with something in it already."""

    def __init__(self, param: nn.Parameter) -> None:
        dtype = accumulation_dtype(param.dtype)
        self.main = torch.full(param.shape, EARLIER, dtype=dtype)
        self.count = 0

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Buffer of the weight."""
        return self.main

    def written(self, param: nn.Parameter) -> None:
        """Count contributions."""
        self.count += 1


def context(problem: Problem, sink: Sink | None, native: bool) -> MicrobatchContext:
    """Of one microbatch."""
    positions = torch.arange(S)
    return MicrobatchContext(
        step=0,
        microbatch=0,
        stage=0,
        training=sink is not None,
        seed=1,
        sample_ids=torch.arange(B),
        positions=positions,
        full_positions=positions,
        loss_weights=problem.weights,
        denominators={"lm": problem.weights.sum()},
        wgrads=WeightGradientStore(sink) if sink is not None else None,
        native=native,
    )


def run_head(
    problem: Problem,
    native: bool,
    most_chunks: int = 1,
    tp_group: Group = ALONE,
    sequence_parallel: bool = False,
    frozen: bool = False,
) -> dict[str, Any]:
    """Forward and backward pass of this rank's share.

    Returns:
        loss; hidden gradient (of this rank's slice under `sequence_parallel`); what was added
        to the rows of the main gradient; how often the weight was reported.
    """
    rows = problem.weight.shape[0] // tp_group.size
    first = rows * tp_group.rank
    weight = nn.Parameter(problem.weight[first : first + rows].clone(), requires_grad=not frozen)
    hidden = problem.hidden
    if sequence_parallel:
        hidden = hidden.chunk(tp_group.size)[tp_group.rank]
    hidden = hidden.clone().requires_grad_()
    sink = Sink(weight)
    loss = cross_entropy.head_cross_entropy(
        hidden,
        weight,
        problem.labels,
        (first, min(max(problem.v - first, 0), rows)),
        most_chunks,
        tp_group,
        sequence_parallel,
        context(problem, sink, native),
    )
    loss.backward()
    assert hidden.grad is not None
    return {
        "loss": loss.detach(),
        "hidden": hidden.grad,
        "weight": sink.main - EARLIER,
        "written": sink.count,
    }


def run_rank(
    dtype: torch.dtype,
    v: int,
    padded: int,
    sp: bool,
    chunks: int,
    native: bool,
    rank: int,
    world_size: int,
) -> dict[str, Any]:
    """`run_head` on one rank of a pool, with the collectives it took part in."""
    if native:
        load_native()
    cross_entropy._CHUNK_BYTES = 1 if chunks > 1 else 32 * 2**20
    recorder = Recorder()
    plan = build_plan_of(LLAMA, world_size, sp)
    groups = build_groups(
        build_grids(plan.parallel), rank, plan.model.num_query_groups, recorder=recorder
    )
    try:
        out = run_head(draw(dtype, v, padded), native, chunks, groups.tp, sp)
    finally:
        cross_entropy._CHUNK_BYTES = 32 * 2**20
    out["records"] = [(r.op, r.elements) for r in recorder.records]
    return out
