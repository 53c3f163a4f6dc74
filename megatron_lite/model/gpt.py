"""A stage of a GPT-style decoder: its parameters, and the pass from tokens to the loss.

Parameters are the physical tensors of the spec, registered under their Megatron names; the
stage never invents one. `forward` covers all layers (one stage); pipeline stages cut the
same three parts (embed, layers, head).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_lite.config.plan import Plan
from megatron_lite.mesh.groups import Groups
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.model.attention import KeyValueCache
from megatron_lite.model.block import transformer_layer
from megatron_lite.model.compile import compile_layer
from megatron_lite.model.parts import LayerParts, StageParts
from megatron_lite.ops.dropout import bias_dropout_residual
from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.ops.recompute import recompute
from megatron_lite.ops.rotary import rotary_table
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.physical import PhysicalParam, physical_params
from megatron_lite.spec.shards import local_box
from megatron_lite.tensor.cross_entropy import head_cross_entropy, vocabulary_logits
from megatron_lite.tensor.embedding import position_embedding, vocabulary_embedding
from megatron_lite.tensor.linear import gather_sequence

WORD_EMBEDDING = "embedding.word_embeddings.weight"
POSITION_EMBEDDING = "embedding.position_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


@dataclass(frozen=True)
class StageOptions:
    """Choices that do not change the result.

    Attributes:
        recompute_method: "uniform" (all layers, in groups) or "block" (the first layers,
            one by one); only with full recomputation.
        recompute_layers: layers per group (uniform) or recomputed layers (block).
        fused_attention: use torch's fused attention where there is no dropout.
        loss_chunks: most chunks of the cross-entropy.
        compile_layers: trace layers with torch.compile.
    """

    recompute_method: str = "uniform"
    recompute_layers: int = 1
    fused_attention: bool = True
    loss_chunks: int = 8
    compile_layers: bool = False


def _register(root: nn.Module, dotted: str, param: nn.Parameter) -> None:
    *path, leaf = dotted.split(".")
    for name in path:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.register_parameter(leaf, param)


class GPTStage(nn.Module):
    """All layers of the model on this rank.

    Args:
        plan: architecture, axes, precision, recomputation.
        specs: logical parameters of the stage, forward order.
        groups: process groups of this rank.
        coordinate: this rank's coordinate on the dense grid.
        device: where parameters live.
        options: choices that do not change the result.
    """

    def __init__(
        self,
        plan: Plan,
        specs: Sequence[ParamSpec],
        groups: Groups,
        coordinate: Mapping[str, int],
        device: torch.device | str = "cpu",
        options: StageOptions | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.options = options or StageOptions()
        self.tp_group = groups.tp
        self.dtype: torch.dtype = getattr(torch, plan.precision.compute)
        self.physical: dict[str, PhysicalParam] = {p.name: p for p in physical_params(specs)}
        self._params: dict[str, nn.Parameter] = {}
        for name, physical in self.physical.items():
            param = nn.Parameter(torch.zeros(physical.shape, dtype=self.dtype, device=device))
            self._params[name] = param
            _register(self, name, param)
        self.parts = StageParts(
            shape=plan.model,
            tp_group=groups.tp,
            sequence_parallel=plan.parallel.sequence_parallel and groups.tp.size > 1,
            params=self._params,
            fused_attention=self.options.fused_attention,
            recompute=plan.recompute,
        )
        self.layers = [LayerParts(self.parts, i) for i in range(plan.model.num_layers)]
        self._run_layer = transformer_layer
        if self.options.compile_layers:
            self._run_layer = compile_layer(self.layers)
        table = next(spec for spec in specs if spec.name == WORD_EMBEDDING)
        box = local_box(table, coordinate, plan.parallel)
        self.vocab_range = (box.offset[0], box.shape[0])

    def param(self, name: str) -> nn.Parameter:
        """The physical parameter of a name in `physical`."""
        return self._params[name]

    def forward(self, tokens: Tensor, labels: Tensor, mb: MicrobatchContext) -> Tensor:
        """Loss of one microbatch, divided by the step's denominator.

        Args:
            tokens: [s, b] int64, this rank's context slice, replicated over tp.
            labels: like tokens.
            mb: the microbatch; with `wgrads` the head leaves its gradients at once.

        Returns:
            0-dim loss of this rank's tokens; call backward with gradient 1.
        """
        hidden = self._layers(self._embed(tokens, mb), mb)
        tied = OUTPUT_LAYER not in self._params
        return head_cross_entropy(
            self._final_norm(hidden, mb),
            self._params[WORD_EMBEDDING if tied else OUTPUT_LAYER],
            labels,
            self.vocab_range,
            self.options.loss_chunks,
            self.tp_group,
            self.parts.sequence_parallel,
            mb,
        )

    def logits(self, tokens: Tensor, mb: MicrobatchContext, cache: KeyValueCache | None) -> Tensor:
        """Logits of every given position, for sampling and comparison.

        Args:
            tokens: [s, b] int64 of the new positions `mb.full_positions`.
            mb: a context without gradients and not training.
            cache: earlier keys and values; extended. None for a whole sequence.

        Returns:
            [s, b, v], replicated over tp; padding columns are left out.
        """
        with torch.no_grad():
            hidden = self._final_norm(self._layers(self._embed(tokens, mb), mb, cache), mb)
            if self.parts.sequence_parallel:
                hidden = gather_sequence(hidden, self.tp_group)
            tied = OUTPUT_LAYER not in self._params
            weight = self._params[WORD_EMBEDDING if tied else OUTPUT_LAYER]
            return vocabulary_logits(hidden, weight, self.plan.model.vocab_size, self.tp_group)

    def _embed(self, tokens: Tensor, mb: MicrobatchContext) -> Tensor:
        x = vocabulary_embedding(
            self._params[WORD_EMBEDDING],
            tokens,
            self.vocab_range[0],
            self.tp_group,
            self.parts.sequence_parallel,
            mb,
        )
        if POSITION_EMBEDDING in self._params:
            x = position_embedding(x, self._params[POSITION_EMBEDDING], mb.positions, mb)
        dropout = self.plan.model.hidden_dropout
        x = bias_dropout_residual(x, None, None, dropout, "embedding_dropout", 0, mb)
        self._keep("embedding", x, mb)
        return x

    def _layers(
        self, x: Tensor, mb: MicrobatchContext, cache: KeyValueCache | None = None
    ) -> Tensor:
        model = self.plan.model
        rotary = None
        if model.rotary is not None:
            rotary = rotary_table(model.rotary, mb.full_positions, accumulation_dtype(self.dtype))
        for group, again in self._layer_groups(mb):

            def run(x: Tensor, group: range = group) -> Tensor:
                for layer in group:
                    x = self._run_layer(self.layers[layer], x, rotary, mb, cache)
                    self._keep(f"layers.{layer}", x, mb)
                return x

            x = recompute(run, x) if again else run(x)
        return x

    def _layer_groups(self, mb: MicrobatchContext) -> Iterator[tuple[range, bool]]:
        """Runs of layers, and whether each is recomputed as a whole."""
        total, size = self.plan.model.num_layers, max(self.options.recompute_layers, 1)
        if self.plan.recompute != "full" or mb.wgrads is None:
            yield range(total), False
        elif self.options.recompute_method == "block":
            for layer in range(min(size, total)):
                yield range(layer, layer + 1), True
            yield range(min(size, total), total), False
        else:
            for first in range(0, total, size):
                yield range(first, min(first + size, total)), True

    def _final_norm(self, x: Tensor, mb: MicrobatchContext) -> Tensor:
        x = self.parts.norm("decoder.final_layernorm", x, mb)
        self._keep("final_norm", x, mb)
        return x

    def _keep(self, name: str, x: Tensor, mb: MicrobatchContext) -> None:
        """Debug dump: keep the full [s, b, h] hidden states."""
        if mb.keep_activations and name not in mb.losses.activations:
            x = x.detach()
            if self.parts.sequence_parallel:
                x = gather_sequence(x, self.tp_group)
            mb.losses.activations[name] = x.clone()
