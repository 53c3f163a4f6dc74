"""Every logical parameter of a model, in forward order: `model_spec`.

Sizes of axes decide pieces and partial sums only, never a name, a logical shape or an initial
law.
"""

from __future__ import annotations

import math

from megatron_lite.config.attention_plan import LatentShape
from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.config.plan import ModelShape, ParallelShape
from megatron_lite.pipeline.partition import further_uses
from megatron_lite.spec.params import Cut, InitLaw, ParamSpec


class _Table:
    """Collects specs with what all parameters of one model have in common."""

    def __init__(self, model: ModelShape, parallel: ParallelShape) -> None:
        self.model = model
        self.parallel = parallel
        self.specs: list[ParamSpec] = []
        # Under sequence parallelism norms and row biases see one slice of the tokens.
        self.token_partial: tuple[str, ...] = (
            ("tp",) if parallel.sequence_parallel and parallel.tp > 1 else ()
        )

    def vector(
        self,
        name: str,
        length: int,
        use: str,
        partial: tuple[str, ...],
        init: str = "zeros",
    ) -> None:
        """A replicated 1-D parameter (norm weight or bias): never decayed."""
        self.specs.append(
            ParamSpec(
                name=name,
                shape=(length,),
                partial_axes=partial,
                uses=(use,),
                decay=False,
                init=InitLaw(init),
            )
        )

    def norm(self, name: str, length: int, use: str, partial: tuple[str, ...]) -> None:
        """A norm's weight (1, or 0 when stored as weight - 1) and LayerNorm's bias (0)."""
        law = "zeros" if self.model.norm_one_plus else "ones"
        self.vector(f"{name}.weight", length, use, partial, law)
        if self.model.normalization == "LayerNorm":
            self.vector(f"{name}.bias", length, use, partial)

    def column(
        self,
        name: str,
        rows: int,
        use: str,
        bias: bool,
        parts: int | None = None,
        inner: int | None = None,
    ) -> None:
        """A column-parallel linear: weight [rows, h] (or inner) and bias [rows] cut over dim 0."""
        tp, h = self.parallel.tp, inner or self.model.hidden_size
        parts = tp if parts is None else min(parts, tp)
        partial = ("kv_replica",) if parts < tp else ()
        for suffix, shape in (("weight", (rows, h)), ("bias", (rows,))):
            if suffix == "bias" and not bias:
                continue
            is_weight = suffix == "weight"
            self.specs.append(
                ParamSpec(
                    name=f"{name}.{suffix}",
                    shape=shape,
                    cuts=(Cut(0, "tp", parts),),
                    partial_axes=partial,
                    uses=(use,),
                    deferrable=is_weight,
                    decay=is_weight,
                    init=InitLaw("normal", self.model.init_std) if is_weight else InitLaw("zeros"),
                    matrix=(rows, h) if is_weight else None,
                )
            )

    def whole(self, name: str, rows: int, use: str) -> None:
        """A linear without bias that every tp rank has, for its tokens: weight [rows, h]."""
        shape = (rows, self.model.hidden_size)
        self.specs.append(
            ParamSpec(
                name=f"{name}.weight",
                shape=shape,
                partial_axes=self.token_partial,
                uses=(use,),
                deferrable=True,
                init=InitLaw("normal", self.model.init_std),
                matrix=shape,
            )
        )

    def row(self, name: str, columns: int, use: str, bias: bool) -> None:
        """A row-parallel linear: weight [h, columns] cut over dim 1, bias [h] replicated."""
        h = self.model.hidden_size
        self.specs.append(
            ParamSpec(
                name=f"{name}.weight",
                shape=(h, columns),
                cuts=(Cut(1, "tp", self.parallel.tp),),
                uses=(use,),
                deferrable=True,
                init=InitLaw("normal", self.model.init_std / math.sqrt(2 * self.model.num_layers)),
                matrix=(h, columns),
            )
        )
        if bias:
            self.vector(f"{name}.bias", h, use, self.token_partial)

    @property
    def first_linears(self) -> tuple[str, ...]:
        """Names of what opens an MLP."""
        return ("linear_gate", "linear_up") if self.model.gated else ("linear_fc1",)

    def stack(self, name: str, count: int, width: int, use: str, *, is_row: bool) -> None:
        """The same linear of all experts, [experts, out, in], cut over ep and over etp.

        Biases of row-parallel linears are replicated over etp, of whose ranks the first adds
        them.
        """
        model, parallel = self.model, self.parallel
        h, std = model.hidden_size, model.init_std
        over_experts = Cut(0, "ep", parallel.ep)
        cut = Cut(2 if is_row else 1, "etp", parallel.etp)
        out, inner = (h, width) if is_row else (width, h)
        self.specs.append(
            ParamSpec(
                name=f"{name}.weight",
                shape=(count, out, inner),
                grid="expert",
                cuts=(over_experts, cut),
                uses=(use,),
                deferrable=True,
                init=InitLaw("normal", std / math.sqrt(2 * model.num_layers) if is_row else std),
                matrix=(out, inner),
            )
        )
        if model.linear_bias:
            is_partial = is_row and parallel.etp > 1
            self.specs.append(
                ParamSpec(
                    name=f"{name}.bias",
                    shape=(count, out),
                    grid="expert",
                    cuts=(over_experts,) if is_row else (over_experts, cut),
                    partial_axes=("etp",) if is_partial else (),
                    uses=(use,),
                    decay=False,
                )
            )

    def vocabulary(self, name: str, uses: tuple[str, ...]) -> None:
        """A [v, h] table cut over its padded rows; padding rows are in no file."""
        model, tp = self.model, self.parallel.tp
        self.specs.append(
            ParamSpec(
                name=name,
                shape=(model.vocab_size, model.hidden_size),
                cuts=(Cut(0, "tp", tp),),
                padded=model.padded_vocab_size(tp),
                uses=uses,
                deferrable=False,
                init=InitLaw("normal", model.init_std),
                matrix=(model.vocab_size, model.hidden_size),
            )
        )


def _sinks(table: _Table, prefix: str, use: str) -> None:
    """One learned logit per head."""
    if table.model.sinks == "learned":
        table.specs.append(
            ParamSpec(
                name=f"{prefix}.core_attention.softmax_offset",
                shape=(table.model.num_attention_heads,),
                cuts=(Cut(0, "tp", table.parallel.tp),),
                uses=(use,),
                decay=False,
                init=InitLaw("normal", table.model.init_std),
            )
        )


def _latent_attention(table: _Table, prefix: str, use: str, latent: LatentShape) -> None:
    """Projections to the latents, from them to all heads, and back."""
    model, partial = table.model, table.token_partial
    heads = model.num_attention_heads
    q_rows, low = heads * model.kv_channels, latent.q_lora_rank
    if low:
        table.whole(f"{prefix}.linear_q_down_proj", low, use)
        if model.qk_norm:
            table.norm(f"{prefix}.q_layernorm", low, use, partial)
        table.column(f"{prefix}.linear_q_up_proj", q_rows, use, bias=False, inner=low)
    else:
        table.column(f"{prefix}.linear_q_proj", q_rows, use, bias=False)
    low = latent.kv_lora_rank
    table.whole(f"{prefix}.linear_kv_down_proj", low + latent.qk_pos_emb_head_dim, use)
    if model.qk_norm:
        table.norm(f"{prefix}.kv_layernorm", low, use, partial)
    kv_rows = heads * (latent.qk_head_dim + latent.v_head_dim)
    table.column(f"{prefix}.linear_kv_up_proj", kv_rows, use, bias=False, inner=low)
    _sinks(table, prefix, use)
    table.row(f"{prefix}.linear_proj", heads * latent.v_head_dim, use, model.linear_bias)


def _attention(table: _Table, prefix: str, use: str) -> None:
    model = table.model
    if model.latent is not None:
        _latent_attention(table, prefix, use, model.latent)
        return
    q_rows = model.num_attention_heads * model.kv_channels
    kv_rows = model.num_query_groups * model.kv_channels
    bias = model.linear_bias or model.qkv_bias
    table.column(f"{prefix}.linear_q", q_rows, use, bias)
    table.column(f"{prefix}.linear_k", kv_rows, use, bias, parts=model.num_query_groups)
    table.column(f"{prefix}.linear_v", kv_rows, use, bias, parts=model.num_query_groups)
    if model.qk_norm:
        # Every rank normalises only its own heads, so the gradient is partial over tp with
        # or without sequence parallelism.
        partial = ("tp",) if table.parallel.tp > 1 else ()
        table.norm(f"{prefix}.q_layernorm", model.kv_channels, use, partial)
        table.norm(f"{prefix}.k_layernorm", model.kv_channels, use, partial)
    _sinks(table, prefix, use)
    table.row(f"{prefix}.linear_proj", q_rows, use, model.linear_bias)


def _mlp(table: _Table, prefix: str, use: str, width: int, bias: bool) -> None:
    for name in table.first_linears:
        table.column(f"{prefix}.{name}", width, use, bias)
    table.row(f"{prefix}.linear_fc2", width, use, bias)


def _experts(table: _Table, prefix: str, use: str, experts: ExpertShape) -> None:
    """Router, experts and shared expert of one layer."""
    model, n = table.model, experts.num_experts
    # Every tp rank routes its own slice of the tokens, with sequence parallelism or without.
    partial = ("tp",) if table.parallel.tp > 1 else ()
    table.specs.append(
        ParamSpec(
            name=f"{prefix}.router.weight",
            shape=(n, model.hidden_size),
            partial_axes=partial,
            uses=(use,),
            init=InitLaw("normal", model.init_std),
            matrix=(n, model.hidden_size),
        )
    )
    if model.linear_bias:
        table.vector(f"{prefix}.router.bias", n, use, partial)
    states = ["expert_bias"] if experts.expert_bias else []
    keeps_counts = experts.coefficient("global_aux_loss") or experts.replicated
    states += ["expert_counts"] if keeps_counts else []
    for state in states:
        table.specs.append(
            ParamSpec(
                name=f"{prefix}.router.{state}",
                shape=(n,),
                uses=(use,),
                decay=False,
                trained=False,
            )
        )
    for name in table.first_linears:
        table.stack(f"{prefix}.experts.{name}", n, experts.ffn_hidden_size, use, is_row=False)
    table.stack(f"{prefix}.experts.linear_fc2", n, experts.ffn_hidden_size, use, is_row=True)
    if experts.shared_ffn_hidden_size:
        shared = f"{prefix}.shared_experts"
        _mlp(table, shared, use, experts.shared_ffn_hidden_size, bias=False)
        if experts.shared_gate:
            table.specs.append(
                ParamSpec(
                    name=f"{shared}.gate_weight",
                    shape=(1, model.hidden_size),
                    partial_axes=table.token_partial,
                    uses=(use,),
                    init=InitLaw("normal", model.init_std),
                    matrix=(1, model.hidden_size),
                )
            )


def _layer(table: _Table, prefix: str, use: str, *, is_moe: bool) -> None:
    """One Transformer layer."""
    model = table.model
    table.norm(f"{prefix}.input_layernorm", model.hidden_size, use, table.token_partial)
    _attention(table, f"{prefix}.self_attention", use)
    table.norm(f"{prefix}.pre_mlp_layernorm", model.hidden_size, use, table.token_partial)
    if model.experts is not None and is_moe:
        _experts(table, f"{prefix}.mlp", use, model.experts)
    else:
        _mlp(table, f"{prefix}.mlp", use, model.ffn_hidden_size, model.linear_bias)


def _further(table: _Table, depth: int) -> None:
    """What a depth of multi-token prediction adds: two norms, their join, a layer, a norm."""
    model, partial = table.model, table.token_partial
    h, (_, use, _) = model.hidden_size, further_uses(depth)
    table.norm(f"mtp.{depth}.enorm", h, use, partial)
    table.norm(f"mtp.{depth}.hnorm", h, use, partial)
    table.specs.append(
        ParamSpec(
            name=f"mtp.{depth}.eh_proj.weight",
            shape=(h, 2 * h),
            partial_axes=partial,
            uses=(use,),
            deferrable=True,
            init=InitLaw("normal", model.init_std),
            matrix=(h, 2 * h),
        )
    )
    is_moe = model.is_moe(model.num_layers + depth)
    _layer(table, f"mtp.{depth}.transformer_layer", use, is_moe=is_moe)
    table.norm(f"mtp.{depth}.final_layernorm", h, use, partial)


def model_spec(model: ModelShape, parallel: ParallelShape) -> tuple[ParamSpec, ...]:
    """List every logical parameter in forward order.

    Args:
        model: resolved architecture.
        parallel: sizes of the axes; only partial sums and pieces depend on it, never a
            name, a logical shape or an initial law.

    Returns:
        The specs, embedding first, then layers and output layer, multi-token prediction last.
    """
    table = _Table(model, parallel)
    head = ("head",) if model.tied else ()
    further = [further_uses(depth) for depth in range(model.mtp_depths)]
    again = [use for at, _, end in further for use in (at, *((end,) if model.tied else ()))]
    table.vocabulary("embedding.word_embeddings.weight", ("embedding", *head, *again))
    if model.position == "learned_absolute":
        table.specs.append(
            ParamSpec(
                name="embedding.position_embeddings.weight",
                shape=(model.max_position_embeddings, model.hidden_size),
                partial_axes=table.token_partial,
                uses=("embedding",),
                init=InitLaw("normal", model.init_std),
                matrix=(model.max_position_embeddings, model.hidden_size),
            )
        )
    for layer in range(model.num_layers):
        _layer(table, f"decoder.layers.{layer}", f"layer.{layer}", is_moe=model.is_moe(layer))
    table.norm("decoder.final_layernorm", model.hidden_size, "final_norm", table.token_partial)
    if not model.tied:
        table.vocabulary("output_layer.weight", ("head", *(end for _, _, end in further)))
    for depth in range(model.mtp_depths):
        _further(table, depth)
    return tuple(table.specs)
