"""What every part of a stage is built from: shape, groups, parameters, and what uses them.

`StageParts` is handed down instead of a configuration: resolved numbers, the groups, and a
way to reach this rank's physical parameters by name. `LayerParts` is one layer's view of it:
everything that owns a parameter or communicates is a method there, so that a layer's own code
is arithmetic on tensors, which torch.compile may trace. Parts hold no tensors of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from megatron_lite.config.plan import ModelShape
from megatron_lite.expert.layer import moe
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.expert.running import RunningCounts
from megatron_lite.mesh.groups import Group, Groups
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.attention import Form, causal_attention
from megatron_lite.ops.dropout import bias_dropout_residual
from megatron_lite.ops.norm import layer_norm, rms_norm
from megatron_lite.ops.recompute import recompute
from megatron_lite.tensor.linear import (
    column_parallel_linear,
    replicated_linear,
    row_parallel_linear,
)
from megatron_lite.tensor.regions import enter_region

SINKS = "self_attention.core_attention.softmax_offset"


@dataclass(frozen=True, eq=False)
class StageParts:
    """What the parts of one stage share.

    Attributes:
        shape: the architecture.
        tp_group: the tensor-parallel group.
        sequence_parallel: activations outside tensor regions are slices of the sequence.
        params: this rank's physical parameters by name.
        fused_attention: never materialise attention probabilities where a kernel can avoid it.
        recompute: "none", "selective" (the attention core) or "full" (whole layers).
    """

    shape: ModelShape
    tp_group: Group
    sequence_parallel: bool
    params: Mapping[str, nn.Parameter]
    fused_attention: bool
    recompute: str

    def norm(self, name: str, x: Tensor, mb: MicrobatchContext) -> Tensor:
        """Apply the architecture's norm with the parameters NAME.weight (and NAME.bias)."""
        weight, eps, plus = (
            self.params[f"{name}.weight"],
            self.shape.norm_epsilon,
            self.shape.norm_one_plus,
        )
        if self.shape.normalization == "RMSNorm":
            return rms_norm(x, weight, eps, plus, mb)
        return layer_norm(x, weight, self.params[f"{name}.bias"], eps, plus, mb)


class LayerParts:
    """One layer's parameters, by their names inside the layer, and what uses them.

    Args:
        stage: what the stage shares.
        index: global number of the layer; depths of multi-token prediction count on.
        prefix: of its parameters.
        experts: its mixture of experts; None where it has an MLP.
    """

    def __init__(
        self, stage: StageParts, index: int, prefix: str, experts: ExpertParts | None = None
    ) -> None:
        self.stage = stage
        self.index = index
        self.experts = experts
        self.prefix = prefix

    def norm(self, name: str, x: Tensor, mb: MicrobatchContext) -> Tensor:
        """Norm over the last dim."""
        return self.stage.norm(f"{self.prefix}.{name}", x, mb)

    def column_linear(self, name: str, x: Tensor, mb: MicrobatchContext) -> Tensor:
        """Open a tensor region, bias included; see `column_parallel_linear`."""
        weight, bias, stage = *self._linear(name), self.stage
        return column_parallel_linear(x, weight, bias, stage.tp_group, stage.sequence_parallel, mb)

    def row_linear(self, name: str, x: Tensor, mb: MicrobatchContext) -> Tensor:
        """Close a tensor region; `add` adds the bias. See `row_parallel_linear`."""
        weight, stage = self._linear(name)[0], self.stage
        return row_parallel_linear(x, weight, stage.tp_group, stage.sequence_parallel, mb)

    def replicated_linear(self, name: str, x: Tensor, mb: MicrobatchContext) -> Tensor:
        """A linear outside of tensor regions; see `replicated_linear`."""
        return replicated_linear(x, *self._linear(name), mb)

    def enter(self, x: Tensor) -> Tensor:
        """Take activations that all heads share into a tensor region; see `enter_region`."""
        return enter_region(x, self.stage.tp_group, self.stage.sequence_parallel)

    def add(
        self, name: str, x: Tensor, residual: Tensor, purpose: str, mb: MicrobatchContext
    ) -> Tensor:
        """dropout(x + bias of the row-parallel linear NAME, if it has one) + residual."""
        bias = self.stage.params.get(f"{self.prefix}.{name}.bias")
        dropout = self.stage.shape.hidden_dropout
        return bias_dropout_residual(x, bias, residual, dropout, purpose, self.index, mb)

    def mix_experts(self, x: Tensor, mb: MicrobatchContext) -> Tensor:
        """The mixture of experts, all of its biases included."""
        assert self.experts is not None
        return moe(self.experts, x, self.stage.sequence_parallel, mb)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mb: MicrobatchContext) -> Tensor:
        """The attention core, recomputed in the backward pass where that is asked for.

        Args:
            q: [s_q, b, n, d], this rank's query heads.
            k: [s_k, b, g, d].
            v: [s_k, b, g, d_v].

        Returns:
            [s_q, b, n * d_v].
        """
        stage, shape, heads = self.stage, self.stage.shape, q.shape[2]
        first_head = stage.tp_group.rank * heads
        form = Form(shape.softmax_scale, shape.window_left(self.index), self._sinks(q))

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return causal_attention(
                *(q, k, v, first_head, shape.attention_dropout, self.index, mb),
                fused=stage.fused_attention,
                form=form,
            )

        if stage.recompute == "selective" and mb.wgrads is not None:
            return recompute(core, q, k, v)
        return core(q, k, v)

    def _sinks(self, q: Tensor) -> Tensor | None:
        kind = self.stage.shape.sinks
        if kind == "learned":
            return self.stage.params[f"{self.prefix}.{SINKS}"]
        return q.new_zeros(q.shape[2]) if kind == "zero" else None

    def _linear(self, name: str) -> tuple[nn.Parameter, nn.Parameter | None]:
        params = self.stage.params
        return params[f"{self.prefix}.{name}.weight"], params.get(f"{self.prefix}.{name}.bias")


def build_layer(stage: StageParts, layer: int, prefix: str, groups: Groups) -> LayerParts:
    """A layer, and its mixture of experts where it has one.

    Args:
        stage: what the stage shares.
        layer: global number; depths of multi-token prediction count on.
        prefix: of its parameters.
        groups: of this rank.
    """
    model, inside = stage.shape, f"{prefix}.mlp."
    if model.experts is None or not model.is_moe(layer):
        return LayerParts(stage, layer, prefix)
    experts = ExpertParts(
        shape=model.experts,
        layer=layer,
        gated=model.gated,
        activation=model.activation,
        params={
            name.removeprefix(inside): param
            for name, param in stage.params.items()
            if name.startswith(inside)
        },
        tp=groups.tp,
        tp_cp=groups.tp_cp,
        block=groups.expert_block,
        etp=groups.etp,
        ep=groups.ep,
        activation_limit=model.activation_limit,
        linear_offset=model.linear_offset,
        running=RunningCounts(groups.stage) if model.experts.running_balance else None,
    )
    return LayerParts(stage, layer, prefix, experts)
