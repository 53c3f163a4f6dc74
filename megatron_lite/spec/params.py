"""The logical parameters of a model: the one table everything else derives from.

`model_spec` lists every parameter with its logical (unsharded, unpadded, unfused) shape,
how it is cut over an axis, where it is used, over which axes its gradient is partial, its
initial law and its weight decay. Initial values, gradient reductions, the norm, ownership,
checkpoints, resharding, conversion and the memory ledger read this table; no code path
knows a parameter by its name. Names are Megatron-core's with unfused sub-blocks and stay
for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_lite.config.plan import ModelShape, ParallelShape


@dataclass(frozen=True)
class InitLaw:
    """How the initial values are drawn; `std` only counts for "normal"."""

    kind: str  # "normal" | "zeros" | "ones"
    std: float = 0.0


@dataclass(frozen=True)
class ParamSpec:
    """One logical parameter.

    Attributes:
        name: logical name; {i} in layer names is the global layer index.
        shape: logical shape, without vocabulary padding.
        grid: "dense" or "expert", the rank grid its axes belong to.
        cut_dim: the dim that is cut, None when every rank holds all of it.
        cut_axis: the axis it is cut over.
        parts: distinct pieces over that axis. Fewer than the axis is long: each piece is
            held by axis/parts consecutive ranks (KV heads fewer than TP).
        padded: length of `cut_dim` including padding rows (vocabulary), else None.
        partial_axes: groups over which the gradient is a partial sum, besides the data and
            context axes: "tp" (each rank sees part of the tokens or heads) or
            "kv_replica" (the ranks that share KV heads see different queries), "tied_ends"
            (one rank uses a tied embedding as embedding, the other as output layer).
        uses: forward use-sites; each writes one gradient contribution per microbatch.
        deferrable: whether its weight gradient can be computed apart from the input's.
        decay: whether weight decay applies.
        init: law of the initial values.
        matrix: shape of the matrix that a matrix optimizer acts on, None for vectors.
        holders: pipeline ranks that hold copies, where several do; else empty.
    """

    name: str
    shape: tuple[int, ...]
    grid: str = "dense"
    cut_dim: int | None = None
    cut_axis: str | None = None
    parts: int = 1
    padded: int | None = None
    partial_axes: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    deferrable: bool = False
    decay: bool = True
    init: InitLaw = InitLaw("zeros")
    matrix: tuple[int, int] | None = None
    holders: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)


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

    def column(self, name: str, rows: int, use: str, bias: bool, parts: int | None = None) -> None:
        """A column-parallel linear: weight [rows, h] and bias [rows] cut over dim 0."""
        tp, h = self.parallel.tp, self.model.hidden_size
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
                    cut_dim=0,
                    cut_axis="tp",
                    parts=parts,
                    partial_axes=partial,
                    uses=(use,),
                    deferrable=is_weight,
                    decay=is_weight,
                    init=InitLaw("normal", self.model.init_std) if is_weight else InitLaw("zeros"),
                    matrix=(rows, h) if is_weight else None,
                )
            )

    def row(self, name: str, columns: int, use: str, bias: bool) -> None:
        """A row-parallel linear: weight [h, columns] cut over dim 1, bias [h] replicated."""
        h = self.model.hidden_size
        self.specs.append(
            ParamSpec(
                name=f"{name}.weight",
                shape=(h, columns),
                cut_dim=1,
                cut_axis="tp",
                parts=self.parallel.tp,
                uses=(use,),
                deferrable=True,
                init=InitLaw("normal", self.model.init_std / math.sqrt(2 * self.model.num_layers)),
                matrix=(h, columns),
            )
        )
        if bias:
            self.vector(f"{name}.bias", h, use, self.token_partial)

    def vocabulary(self, name: str, uses: tuple[str, ...]) -> None:
        """A [v, h] table cut over its padded rows; padding rows are in no file."""
        model, tp = self.model, self.parallel.tp
        self.specs.append(
            ParamSpec(
                name=name,
                shape=(model.vocab_size, model.hidden_size),
                cut_dim=0,
                cut_axis="tp",
                parts=tp,
                padded=model.padded_vocab_size(tp),
                uses=uses,
                deferrable=False,
                init=InitLaw("normal", model.init_std),
                matrix=(model.vocab_size, model.hidden_size),
            )
        )


def _attention(table: _Table, layer: int) -> None:
    model = table.model
    prefix, use = f"decoder.layers.{layer}.self_attention", f"layer.{layer}"
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
    table.row(f"{prefix}.linear_proj", q_rows, use, model.linear_bias)


def _mlp(table: _Table, layer: int) -> None:
    model = table.model
    prefix, use = f"decoder.layers.{layer}.mlp", f"layer.{layer}"
    if model.gated:
        table.column(f"{prefix}.linear_gate", model.ffn_hidden_size, use, model.linear_bias)
        table.column(f"{prefix}.linear_up", model.ffn_hidden_size, use, model.linear_bias)
    else:
        table.column(f"{prefix}.linear_fc1", model.ffn_hidden_size, use, model.linear_bias)
    table.row(f"{prefix}.linear_fc2", model.ffn_hidden_size, use, model.linear_bias)


def model_spec(model: ModelShape, parallel: ParallelShape) -> tuple[ParamSpec, ...]:
    """List every logical parameter in forward order.

    Args:
        model: resolved architecture.
        parallel: sizes of the axes; only partial sums and pieces depend on it, never a
            name, a logical shape or an initial law.

    Returns:
        The specs, embedding first, output layer last.
    """
    table = _Table(model, parallel)
    head = ("head",) if model.tied else ()
    table.vocabulary("embedding.word_embeddings.weight", ("embedding", *head))
    if model.position == "learned_absolute":
        table.specs.append(
            ParamSpec(
                name="embedding.position_embeddings.weight",
                shape=(model.max_position_embeddings, model.hidden_size),
                partial_axes=table.token_partial,
                uses=("embedding",),
                init=InitLaw("normal", model.init_std),
            )
        )
    for layer in range(model.num_layers):
        prefix, use = f"decoder.layers.{layer}", f"layer.{layer}"
        table.norm(f"{prefix}.input_layernorm", model.hidden_size, use, table.token_partial)
        _attention(table, layer)
        table.norm(f"{prefix}.pre_mlp_layernorm", model.hidden_size, use, table.token_partial)
        _mlp(table, layer)
    table.norm("decoder.final_layernorm", model.hidden_size, "final_norm", table.token_partial)
    if not model.tied:
        table.vocabulary("output_layer.weight", ("head",))
    return tuple(table.specs)
