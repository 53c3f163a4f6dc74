"""What a rank does in the routers' tests (runs inside the rank pool)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_lite.expert.balance import log_scalars, start_balance
from megatron_lite.expert.router import route_tokens
from megatron_lite.mesh import collectives
from megatron_lite.mesh.groups import Group, local_group, world_group
from megatron_lite.mesh.recorder import Recorder
from tests.expert.routing_parts import (
    ALL_LOSSES,
    SEQUENCE,
    SHAPES,
    SIGMOID,
    Sink,
    build_parts,
    build_tokens,
    context,
)

SLICED = {
    **SHAPES,
    "jitter": replace(SHAPES["post"], jitter=0.2),
    "sinkhorn": replace(SHAPES["post"], sinkhorn=True, balancing=(), topk=1),
    "capacity_probs": replace(SHAPES["sigmoid"], capacity_factor=0.75),
    "capacity_position": replace(SHAPES["pre"], capacity_factor=0.75, drop_policy="position"),
    "capacity_reroute": replace(SHAPES["pre"], capacity_factor=0.75, reroute_candidates=3),
    "sinkhorn_reroute": replace(
        SHAPES["post"], sinkhorn=True, balancing=(), capacity_factor=1.0, reroute_candidates=1
    ),
}
STATEFUL = replace(
    SIGMOID, balancing=ALL_LOSSES, z_loss_coeff=0.001, capacity_factor=1.0, bias_update_rate=0.001
)


def zigzag(cp: int, rank: int) -> Tensor:
    """Positions of a context rank: chunk r and the r-th from the end."""
    chunks = torch.arange(SEQUENCE).chunk(2 * cp)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])


def route_slice(
    name: str, tp: int, cp: int, sp: bool, rank: int, world_size: int
) -> dict[str, object]:
    """Route this rank's tokens of one microbatch; everything by logical token."""
    shape = SLICED[name]
    recorder = Recorder()
    tp_rank, cp_rank = rank % tp, rank // tp
    mine = zigzag(cp, cp_rank) if cp > 1 else torch.arange(SEQUENCE)
    part = mine.chunk(tp)[tp_rank]
    # The router needs of its tensor group only which slice of the sequence is this rank's.
    tp_group = Group("tp", tuple(range(tp)), tp_rank, None) if tp > 1 else local_group("tp")
    parts = build_parts(shape, tp=tp_group, tp_cp=world_group(rank, world_size, recorder))
    sink = Sink()
    mb = context(sink, part if sp else mine)
    x = build_tokens()[part].requires_grad_()
    routing = route_tokens(parts, x, mb)
    cotangent = torch.cos(torch.arange(SEQUENCE)[part].double()).view(-1, 1, 1)
    (routing.probs.view(*x.shape[:2], -1) * cotangent).square().sum().backward()
    record = mb.losses.routing[1]
    return {
        "positions": part,
        "ids": routing.ids.view(*x.shape[:2], -1),
        "probs": routing.probs.detach().view(*x.shape[:2], -1),
        "grad_x": x.grad,
        "grad_weight": sink.grads[parts.params["router.weight"]],
        "losses": dict(record.losses),
        "counts": record.counts,
        "dropped": record.dropped,
        "rerouted": record.rerouted,
        "records": [(r.op, r.elements) for r in recorder.records],
    }


def balance_steps(
    steps: int, microbatches: int, twice: bool, evaluate: bool, rank: int, world_size: int
) -> dict[str, object]:
    """Steps of two layers over data ranks: bias, counts and log after each."""
    groups = world_group(rank, world_size)
    layers = [build_parts(STATEFUL, layer=layer) for layer in STATEFUL.layers]
    seen = []
    number = microbatches // world_size
    for step in range(steps):
        sinks = []
        for index in range(number):
            mb = context(Sink(), step=step, microbatches=microbatches)
            x = build_tokens(seed=100 * step + rank * number + index)
            for parts in layers:
                for _ in range(2 if twice else 1):
                    route_tokens(parts, x, mb)
            sinks.append(mb.losses)
        balance = start_balance(STATEFUL, layers, sinks, groups, "cpu")
        sums = balance.log_sums(STATEFUL.layers)
        vector = torch.stack(list(sums.values()))
        collectives.all_reduce(vector, groups)
        total = dict(zip(sums, vector.tolist(), strict=True))
        balance.update()
        if evaluate:
            with torch.no_grad():
                for parts in layers:
                    route_tokens(parts, build_tokens(seed=7), context(None))
        seen.append(
            {
                "bias": [parts.state("expert_bias").clone() for parts in layers],
                "counts": [parts.state("expert_counts").clone() for parts in layers],
                "log": log_scalars(STATEFUL, total, microbatches, STATEFUL.layers),
            }
        )
    return {"steps": seen}
