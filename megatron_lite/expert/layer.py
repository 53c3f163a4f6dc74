"""A mixture of experts in the place of an MLP: router, experts, shared expert.

Tokens are sliced over tp, routed, sent to the ranks of their experts inside the expert
block, and what comes back is added up by the router's scores. The shared expert is an
ordinary MLP over the tensor group, on all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.expert.dispatch import run_experts
from megatron_lite.expert.grouped import (
    ExpertRows,
    grouped_linear,
    grouped_linears,
)
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.expert.replicas import Replicas, bring_replicas, run_divided
from megatron_lite.expert.router import route_tokens
from megatron_lite.expert.slices import slice_tokens, unslice_tokens
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.activation import activate
from megatron_lite.tensor.linear import (
    column_parallel_linear,
    replicated_linear,
    row_parallel_linear,
)

_FIRST_GATED, _FIRST = ("linear_gate", "linear_up"), ("linear_fc1",)


def moe(parts: ExpertParts, x: Tensor, sequence_parallel: bool, mb: MicrobatchContext) -> Tensor:
    """Mixture of experts of one layer, biases included.

    Args:
        parts: the layer.
        x: [s_local, b, h], normed.
        sequence_parallel: x is a slice of the sequence.
        mb: the microbatch.

    Returns:
        [s_local, b, h].

    Comm: that of the dispatcher; that of `bring_replicas` where experts are replicated; without
        sequence parallelism an all-gather over tp in both passes; that of one column- and one
        row-parallel linear for the shared expert.
    """
    # A generated token cannot be sliced: every tensor rank then routes it, to the same end.
    is_cut = not sequence_parallel and x.shape[0] % parts.tp.size == 0
    assert is_cut or sequence_parallel or mb.wgrads is None
    tokens = slice_tokens(x, parts.tp) if is_cut else x
    replicas = bring_replicas(parts, mb)  # on their way while the router decides
    routing = route_tokens(parts, tokens, mb)
    placed, ids = parts, routing.ids
    if replicas is not None:
        placed, ids = replicas.parts, replicas.place(ids)
    shared: list[Tensor] = []

    def experts(rows: Tensor, whose: ExpertRows) -> Tensor:
        return _experts(parts, rows, whose, mb, replicas)

    def meanwhile() -> None:
        if parts.shape.shared_ffn_hidden_size:
            shared.append(_shared(parts, x, sequence_parallel, mb))

    flat = tokens.flatten(0, 1)
    out = run_experts(placed, flat, ids, routing.probs, experts, mb, meanwhile)
    out = out.view(tokens.shape)
    if is_cut:
        out = unslice_tokens(out, parts.tp)
    return out + shared[0] if shared else out


def _experts(
    parts: ExpertParts,
    rows: Tensor,
    whose: ExpertRows,
    mb: MicrobatchContext,
    replicas: Replicas | None = None,
) -> Tensor:
    """The experts of this rank on their rows, [rows, h] -> [rows, h]: a part over etp."""
    if replicas is None:
        return _multiply(parts, parts.params, rows, whose, mb)
    return run_divided(
        replicas,
        rows,
        whose,
        lambda own, theirs: _multiply(parts, parts.params, own, theirs, mb),
        lambda hot, theirs: _multiply(parts, replicas.params, hot, theirs, replicas.mb),
    )


def _multiply(
    parts: ExpertParts,
    params: Mapping[str, nn.Parameter],
    rows: Tensor,
    whose: ExpertRows,
    mb: MicrobatchContext,
) -> Tensor:
    """Both linears of the experts in `params`, whose weight gradients go to `mb`."""
    names = _FIRST_GATED if parts.gated else _FIRST
    weights = [params[f"experts.{name}.weight"] for name in names]
    biases = [params.get(f"experts.{name}.bias") for name in names]
    inner = grouped_linears(rows, weights, biases, whose, mb)
    inner = _activate(parts, inner, mb)
    weight, bias = params["experts.linear_fc2.weight"], params.get("experts.linear_fc2.bias")
    if bias is None or parts.etp.rank == 0:
        return grouped_linear(inner, weight, bias, whose, mb)
    return _Bystander.apply(  # type: ignore[no-any-return]
        grouped_linear(inner, weight, None, whose, mb), bias, mb
    )


def _activate(parts: ExpertParts, inner: Tensor, mb: MicrobatchContext) -> Tensor:
    limit, offset = parts.activation_limit, parts.linear_offset
    return activate(inner, parts.activation, parts.gated, mb.native, limit, offset)


class _Bystander(torch.autograd.Function):
    """The parts are summed over etp and the first has the bias: here its gradient is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: nn.Parameter, mb: MicrobatchContext) -> Tensor:
        ctx.bias, ctx.mb = bias, mb
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.mb.wgrads.put(ctx.bias, lambda main: None)
        return grads[0], None, None


def _shared(
    parts: ExpertParts, x: Tensor, sequence_parallel: bool, mb: MicrobatchContext
) -> Tensor:
    """The shared expert, [s_local, b, h] -> [s_local, b, h]."""
    first = parts.params["shared_experts.linear_fc1.weight"]
    inner = column_parallel_linear(x, first, None, parts.tp, sequence_parallel, mb)
    inner = _activate(parts, inner, mb)
    second = parts.params["shared_experts.linear_fc2.weight"]
    out = row_parallel_linear(inner, second, parts.tp, sequence_parallel, mb)
    gate = parts.params.get("shared_experts.gate_weight")
    if gate is not None:
        out = out * torch.sigmoid(replicated_linear(x, gate, None, mb))
    return out
