"""A stage of a GPT-style decoder: its parameters, and the pass from tokens to the loss.

Parameters are the physical tensors of the spec, registered under their Megatron names; the
model never invents one. `forward` goes from tokens to the loss on one rank that holds all;
in a pipeline a rank holds some of the stages (`StagePart`), and `run_part` is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron_lite.config.plan import Plan
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.mesh.groups import Groups
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.model.attention import KeyValueCache
from megatron_lite.model.block import transformer_layer
from megatron_lite.model.compile import compile_layer
from megatron_lite.model.multi_token import further_weights, join_and_run, shift, term_name
from megatron_lite.model.parts import LayerParts, StageParts, build_layer
from megatron_lite.model.presence import forward_only, with_parameters
from megatron_lite.ops.dropout import bias_dropout_residual
from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.ops.recompute import recompute
from megatron_lite.ops.rotary import rotary_table
from megatron_lite.pipeline.partition import (
    AT_EMBEDDING,
    AT_FINAL_NORM,
    AT_HEAD,
    StagePart,
    further_uses,
    whole_model,
)
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.physical import PhysicalParam, physical_params
from megatron_lite.spec.shards import local_box
from megatron_lite.tensor.cross_entropy import LossTerm, head_cross_entropy, vocabulary_logits
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


def _further_layer(depth: int) -> str:
    return f"mtp.{depth}.transformer_layer"


def _register(root: nn.Module, dotted: str, param: nn.Parameter) -> None:
    *path, leaf = dotted.split(".")
    for name in path:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.register_parameter(leaf, param)


class GPTStage(nn.Module):
    """What this rank holds of the model: all of it, or its stages of a pipeline.

    Args:
        plan: architecture, axes, precision, recomputation.
        specs: logical parameters of this rank, forward order.
        groups: process groups of this rank.
        coordinate: this rank's coordinate on the dense grid.
        device: where parameters live.
        options: choices that do not change the result.
        parts: the stages of this rank, ascending; the whole model when empty.
    """

    def __init__(
        self,
        plan: Plan,
        specs: Sequence[ParamSpec],
        groups: Groups,
        coordinate: Mapping[str, int],
        device: torch.device | str = "cpu",
        options: StageOptions | None = None,
        parts: Sequence[StagePart] = (),
    ) -> None:
        super().__init__()
        self.plan = plan
        self.options = options or StageOptions()
        self.tp_group = groups.tp
        self.dtype: torch.dtype = getattr(torch, plan.precision.compute)
        self.physical: dict[str, PhysicalParam] = {p.name: p for p in physical_params(specs)}
        self._params: dict[str, nn.Parameter] = {}
        for name, physical in self.physical.items():
            # One element for all: memory comes with the buckets, which may be shards.
            dtype = self.dtype if physical.trained else accumulation_dtype(self.dtype)
            nothing = torch.zeros((), dtype=dtype, device=device).expand(physical.shape)
            param = nn.Parameter(nothing)
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
        self.stage_parts = {
            part.stage: part
            for part in parts or whole_model(plan.model.num_layers, plan.model.mtp_depths)
        }
        held = self.stage_parts.values()
        self.layers = {
            layer: self._layer(layer, f"decoder.layers.{layer}", groups)
            for part in held
            for layer in part.layers
        }
        self.further = {
            depth: self._layer(plan.model.num_layers + depth, _further_layer(depth), groups)
            for part in held
            for depth in part.mtp
        }
        self._run_layer = transformer_layer
        if self.options.compile_layers:
            self._run_layer = compile_layer([*self.layers.values(), *self.further.values()])
        self.vocab_range = (0, 0)  # rows of the vocabulary, where a rank has any
        for spec in specs:
            if spec.name in (WORD_EMBEDDING, OUTPUT_LAYER):
                box = local_box(spec, coordinate, plan.parallel)
                self.vocab_range = (box.offset[0], box.shape[0])

    def _layer(self, layer: int, prefix: str, groups: Groups) -> LayerParts:
        return build_layer(self.parts, layer, prefix, groups)

    @property
    def expert_parts(self) -> tuple[ExpertParts, ...]:
        """The MoE layers of this rank, in forward order."""
        layers = (*self.layers.values(), *self.further.values())
        return tuple(layer.experts for layer in layers if layer.experts is not None)

    def allocate(self) -> None:
        """Give the parameters memory of their own, zeroed: for a stage without buckets."""
        for param in self._params.values():
            param.data = param.data.contiguous()

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
        return self.run_part(self._whole, tokens, labels, mb)

    @property
    def _whole(self) -> StagePart:
        """The one stage of a rank that holds the whole model."""
        (part,) = self.stage_parts.values()
        return part

    def run_part(
        self, part: StagePart, source: Tensor, labels: Tensor, mb: MicrobatchContext
    ) -> Tensor:
        """One stage of one microbatch.

        Args:
            part: one of `stage_parts`.
            source: [s, b] int64 tokens for the first stage, else the output of the stage
                before, [s, b, h], under sequence parallelism this rank's [s/tp, b, h].
            labels: [s, b] int64; the last stage reads them. They are the tokens that
                multi-token prediction embeds, too.
            mb: the microbatch.

        Returns:
            The last stage's 0-dim loss, else a tensor like `source` of a later stage.
        """
        x = self._embed(source, mb) if part.embedding else source
        if mb.wgrads is not None and not x.requires_grad:
            # Behind a frozen embedding: recomputed regions and later stages send a gradient.
            x.requires_grad_()
        hidden = self._layers(part, x, mb)
        if not part.head:
            return hidden

        hidden = self._final_norm(hidden, mb)
        loss = self._loss(AT_HEAD, hidden, labels, mb)
        if mb.wgrads is not None:
            for depth in part.mtp:
                hidden, further = self._predict_further(depth, hidden, labels, mb)
                loss = loss + further
        return loss

    def _loss(
        self,
        use: str,
        hidden: Tensor,
        labels: Tensor,
        mb: MicrobatchContext,
        term: LossTerm | None = None,
    ) -> Tensor:
        def loss(hidden: Tensor) -> Tensor:
            return head_cross_entropy(
                hidden,
                self._output_weight,
                labels,
                self.vocab_range,
                self.options.loss_chunks,
                self.tp_group,
                self.parts.sequence_parallel,
                mb,
                term,
            )

        return forward_only(use, loss, hidden, mb)

    def _predict_further(
        self, depth: int, hidden: Tensor, labels: Tensor, mb: MicrobatchContext
    ) -> tuple[Tensor, Tensor]:
        """Hidden states and loss of a depth of multi-token prediction, in training only."""
        at_embedding, at_layer, at_head = further_uses(depth)
        layer, model = self.further[depth], self.plan.model
        rotary = self._rotary(mb)
        again = self.plan.recompute == "full"

        def run(x: Tensor) -> Tensor:
            return self._run_layer(layer, x, rotary, mb, None)

        def join(pair: Tensor) -> Tensor:
            return join_and_run(layer, f"mtp.{depth}", pair, run, mb)

        embedded = forward_only(at_embedding, self._look_up(mb), shift(labels, depth), mb)
        # One input, so that its gradient leaves when all of the depth's parameters are used.
        pair = torch.stack((embedded, hidden))
        hidden = with_parameters((at_layer,), partial(recompute, join) if again else join, pair, mb)
        assert mb.loss_weights is not None
        term = LossTerm(
            term_name(depth),
            further_weights(mb.loss_weights, depth),
            model.mtp_loss_factor / model.mtp_depths,
        )
        return hidden, self._loss(at_head, hidden, shift(labels, depth + 1), mb, term)

    @property
    def _output_weight(self) -> nn.Parameter:
        return self._params[WORD_EMBEDDING if self.plan.model.tied else OUTPUT_LAYER]

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
            return self.run_logits(self._whole, tokens, mb, cache)

    def run_logits(
        self, part: StagePart, source: Tensor, mb: MicrobatchContext, cache: KeyValueCache | None
    ) -> Tensor:
        """One stage on the way to `logits`: the last returns them, the others their output."""
        x = self._embed(source, mb) if part.embedding else source
        hidden = self._layers(part, x, mb, cache)
        if not part.head:
            return hidden
        hidden = self._final_norm(hidden, mb)
        if self.parts.sequence_parallel:
            hidden = gather_sequence(hidden, self.tp_group)
        vocab_size = self.plan.model.vocab_size

        def logits(hidden: Tensor) -> Tensor:
            return vocabulary_logits(hidden, self._output_weight, vocab_size, self.tp_group)

        return forward_only(AT_HEAD, logits, hidden, mb)

    def _look_up(self, mb: MicrobatchContext) -> Callable[[Tensor], Tensor]:
        """[s, b] tokens -> [s_local, b, h] embeddings of the words."""

        def look_up(tokens: Tensor) -> Tensor:
            return vocabulary_embedding(
                self._params[WORD_EMBEDDING],
                tokens,
                self.vocab_range[0],
                self.tp_group,
                self.parts.sequence_parallel,
                mb,
            )

        return look_up

    def _embed(self, tokens: Tensor, mb: MicrobatchContext) -> Tensor:
        def look_up(tokens: Tensor) -> Tensor:
            x = self._look_up(mb)(tokens)
            if POSITION_EMBEDDING in self._params:
                x = position_embedding(x, self._params[POSITION_EMBEDDING], mb.positions, mb)
            return x

        x = forward_only(AT_EMBEDDING, look_up, tokens, mb)
        dropout = self.plan.model.hidden_dropout
        x = bias_dropout_residual(x, None, None, dropout, "embedding_dropout", 0, mb)
        self._keep("embedding", x, mb)
        return x

    def _rotary(self, mb: MicrobatchContext) -> tuple[Tensor, Tensor] | None:
        """Tables of the full sequence's positions."""
        rotary = self.plan.model.rotary
        if rotary is None:
            return None
        return rotary_table(rotary, mb.full_positions, accumulation_dtype(self.dtype))

    def _layers(
        self,
        part: StagePart,
        x: Tensor,
        mb: MicrobatchContext,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        rotary = self._rotary(mb)
        for group, again in self._layer_groups(part, mb):

            def run(x: Tensor, group: Sequence[int] = group) -> Tensor:
                for layer in group:
                    x = self._run_layer(self.layers[layer], x, rotary, mb, cache)
                    self._keep(f"layers.{layer}", x, mb)
                return x

            def run_again(x: Tensor, run: Callable[[Tensor], Tensor] = run) -> Tensor:
                return recompute(run, x)

            # What is recomputed needs all its parameters again, so they come and go together.
            uses = tuple(f"layer.{layer}" for layer in group)
            x = with_parameters(uses, run_again if again else run, x, mb)
        return x

    def _layer_groups(
        self, part: StagePart, mb: MicrobatchContext
    ) -> Iterator[tuple[Sequence[int], bool]]:
        """Runs of the stage's layers, and whether each is recomputed as a whole."""
        layers, size = part.layers, max(self.options.recompute_layers, 1)
        if self.plan.recompute != "full" or mb.wgrads is None:
            for layer in layers:
                yield (layer,), False
        elif self.options.recompute_method == "block":
            for layer in layers:
                yield (layer,), layer in layers[:size]
        else:
            for first in range(0, len(layers), size):
                yield layers[first : first + size], True

    def _final_norm(self, x: Tensor, mb: MicrobatchContext) -> Tensor:
        def norm(x: Tensor) -> Tensor:
            return self.parts.norm("decoder.final_layernorm", x, mb)

        x = with_parameters((AT_FINAL_NORM,), norm, x, mb)
        self._keep("final_norm", x, mb)
        return x

    def _keep(self, name: str, x: Tensor, mb: MicrobatchContext) -> None:
        """Debug dump: keep the full [s, b, h] hidden states."""
        if mb.keep_activations and name not in mb.losses.activations:
            x = x.detach()
            if self.parts.sequence_parallel:
                x = gather_sequence(x, self.tp_group)
            mb.losses.activations[name] = x.clone()
