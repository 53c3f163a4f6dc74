"""Derived values, computed once from a checked `Config`.

The shapes here are what the rest of the program reads: no other module repeats a
default such as the MLP width or the data-parallel size. The functions expect a config
that `rules.check_config` accepted. The global batch at a point of the run depends only
on the consumed samples, never on the layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron_lite.config.attention_plan import (
    SINKS,
    LatentShape,
    WindowShape,
    YarnShape,
    plan_latent,
    plan_window,
    plan_yarn,
)
from megatron_lite.config.batch_plan import BatchPlan, build_batch
from megatron_lite.config.expert_plan import ExpertShape, plan_experts
from megatron_lite.config.pipeline_plan import PipelineShape, plan_pipeline, stages_per_rank
from megatron_lite.config.schema import Config, required
from megatron_lite.config.sharding_plan import ShardingShape, plan_sharding
from megatron_lite.config.state_plan import main_grad_dtype, narrow_moments


@dataclass(frozen=True)
class RotaryShape:
    """Rotary position embedding.

    Args:
        base: base of the frequencies.
        dim: rotated channels per head, even.
        interleaved: neighbouring channels form a pair instead of the two halves.
        interpolation_factor: positions are divided by it; 1.0 means none.
        llama3_factor: Llama-3 scaling (low factor 1, high factor 4, original context
            8192 tokens); None means off.
        yarn: YaRN's scaling; None means off.
    """

    base: float
    dim: int
    interleaved: bool
    interpolation_factor: float
    llama3_factor: float | None
    yarn: YarnShape | None = None


@dataclass(frozen=True)
class ModelShape:
    """Architecture with every default resolved; sizes are logical (uncut, unpadded).

    `sinks` is what joins the softmax's denominator: "none", "zero" (a logit of 0) or "learned"
    (one per head). Gated activations clamp both halves at `activation_limit` and add
    `linear_offset` to the linear one.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int
    vocab_multiple: int
    seq_length: int
    max_position_embeddings: int
    position: str
    rotary: RotaryShape | None
    normalization: str
    norm_epsilon: float
    norm_one_plus: bool
    gated: bool
    activation: str
    linear_bias: bool
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    hidden_dropout: float
    attention_dropout: float
    init_std: float
    experts: ExpertShape | None = None
    mtp_depths: int = 0
    mtp_loss_factor: float = 0.0
    sinks: str = "none"
    window: WindowShape | None = None
    latent: LatentShape | None = None
    activation_limit: float = math.inf
    linear_offset: float = 0.0

    def padded_vocab_size(self, tp_size: int) -> int:
        """Return the vocabulary rounded up to a multiple of `vocab_multiple` x TP."""
        return padded_vocab_size(self.vocab_size, self.vocab_multiple, tp_size)

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts instead of an MLP; depths of MTP count on.

        A layer of multi-token prediction is like the model's last one.
        """
        layer = min(layer, self.num_layers - 1)
        return self.experts is not None and layer in self.experts.layers

    @property
    def softmax_scale(self) -> float:
        """Factor of attention's scores."""
        plain = 1.0 / math.sqrt(self.kv_channels)
        if self.latent is None or self.rotary is None or self.rotary.yarn is None:
            return plain
        return plain * self.rotary.yarn.score_factor

    @property
    def value_channels(self) -> int:
        """Channels per head of values; `kv_channels` are those of queries and keys."""
        return self.kv_channels if self.latent is None else self.latent.v_head_dim

    def window_left(self, layer: int) -> int:
        """Earlier keys that a layer's queries see; -1: all. Depths of MTP as in `is_moe`."""
        layer = min(layer, self.num_layers - 1)
        return self.window.left if self.window and layer in self.window.layers else -1


@dataclass(frozen=True)
class ParallelShape:
    """Sizes of all axes; dense tp x cp x dp x pp = experts' etp x ep x edp x pp = world."""

    world_size: int
    tp: int
    cp: int
    ep: int
    etp: int
    dp: int
    edp: int
    pp: int
    vpp: int
    sequence_parallel: bool
    order: str


@dataclass(frozen=True)
class PrecisionShape:
    """Dtype names; `master == compute` means that there is no separate master copy.

    `moments`: (kind, dtype) of the optimizer state that is narrower than the masters.
    """

    compute: str
    master: str
    main_grad: str
    moments: tuple[tuple[str, str], ...] = ()

    def state(self, kind: str) -> str:
        """Dtype of the optimizer state of a kind."""
        return dict(self.moments).get(kind, self.master)


@dataclass(frozen=True)
class Plan:
    """All derived values of one run."""

    model: ModelShape
    parallel: ParallelShape
    batch: BatchPlan
    precision: PrecisionShape
    recompute: str
    pipeline: PipelineShape
    sharding: ShardingShape = field(default_factory=ShardingShape)


def build_plan(config: Config, world_size: int, vocab_size: int) -> Plan:
    """Derive everything from a checked config.

    Args:
        config: accepted by `rules.check_config` for this world size.
        world_size: number of rank processes.
        vocab_size: the tokenizer's true vocabulary, unpadded.
    """
    parallel = build_parallel(config, world_size)
    batch = build_batch(config, parallel.dp)
    return Plan(
        model=build_model(config, vocab_size),
        parallel=parallel,
        batch=batch,
        precision=build_precision(config),
        recompute=recompute_kind(config),
        pipeline=plan_pipeline(config, batch.num_microbatches_at(0)),
        sharding=plan_sharding(config),
    )


def padded_vocab_size(vocab_size: int, multiple: int, tp_size: int) -> int:
    """Round the vocabulary up to a multiple of `multiple * tp_size`."""
    unit = multiple * tp_size
    return -(-vocab_size // unit) * unit


ROTARY = ("rope", "yarn")  # kinds of positions that turn channels


def position_kind(config: Config) -> str:
    """Resolve the position type with its two older spellings."""
    if config.use_rotary_position_embeddings:
        return "rope"
    if not config.add_position_embedding:
        return "none"
    return config.position_embedding_type


def head_channels(config: Config) -> int:
    """Return channels per head of queries and keys."""
    if config.multi_latent_attention:
        return config.qk_head_dim + config.qk_pos_emb_head_dim
    if config.kv_channels is not None:
        return config.kv_channels
    return required(config.hidden_size) // required(config.num_attention_heads)


def key_value_heads(config: Config) -> int:
    """Return key/value heads: all heads unless the grouping gate is on."""
    if config.group_query_attention:
        return config.num_query_groups
    return required(config.num_attention_heads)


def ffn_size(config: Config) -> int:
    """Return the MLP width: 4h, gated 2/3 of it rounded down to a multiple of 64."""
    if config.ffn_hidden_size is not None:
        return config.ffn_hidden_size
    width = 4 * required(config.hidden_size)
    return int((width * 2 / 3) / 64) * 64 if config.swiglu else width


def rotary_dim(config: Config) -> int:
    """Return the rotated channels per head."""
    if config.multi_latent_attention:
        return config.qk_pos_emb_head_dim
    channels = head_channels(config)
    return int(channels * config.rotary_percent) if config.rotary_percent < 1.0 else channels


def build_rotary(config: Config) -> RotaryShape:
    """Resolve the rotary embedding."""
    return RotaryShape(
        base=float(config.rotary_base),
        dim=rotary_dim(config),
        interleaved=config.rotary_interleaved or config.multi_latent_attention,
        interpolation_factor=float(config.rotary_seq_len_interpolation_factor or 1.0),
        llama3_factor=config.rope_scaling_factor if config.use_rope_scaling else None,
        yarn=plan_yarn(config),
    )


def is_gated(config: Config) -> bool:
    """Whether an MLP's first linear has a gate."""
    return config.swiglu or config.quick_geglu


def activation_name(config: Config) -> str:
    """Return the activation; `gelu` is the exact (erf) form."""
    if config.swiglu:
        return "silu"
    if config.quick_geglu:
        return "quick_gelu"
    if config.squared_relu:
        return "squared_relu"
    return "gelu_tanh" if config.openai_gelu else "gelu"


def build_model(config: Config, vocab_size: int) -> ModelShape:
    """Resolve the architecture."""
    position = position_kind(config)
    return ModelShape(
        num_layers=required(config.num_layers),
        hidden_size=required(config.hidden_size),
        num_attention_heads=required(config.num_attention_heads),
        num_query_groups=key_value_heads(config),
        kv_channels=head_channels(config),
        ffn_hidden_size=ffn_size(config),
        vocab_size=vocab_size,
        vocab_multiple=config.make_vocab_size_divisible_by,
        seq_length=required(config.seq_length),
        max_position_embeddings=required(config.max_position_embeddings),
        position=position,
        rotary=build_rotary(config) if position in ROTARY else None,
        normalization=config.normalization,
        norm_epsilon=config.layernorm_epsilon,
        norm_one_plus=config.layernorm_zero_centered_gamma,
        gated=is_gated(config),
        activation=activation_name(config),
        linear_bias=config.add_bias_linear,
        qkv_bias=(config.add_bias_linear or config.add_qkv_bias)
        and not config.multi_latent_attention,
        qk_norm=config.qk_layernorm,
        tied=not config.untie_embeddings_and_output_weights,
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        init_std=config.init_method_std,
        experts=plan_experts(config, required(config.num_layers), ffn_size(config)),
        mtp_depths=config.mtp_num_layers or 0,
        mtp_loss_factor=config.mtp_loss_scaling_factor,
        sinks=SINKS[config.softmax_type],
        window=plan_window(config, required(config.num_layers)),
        latent=plan_latent(config),
        activation_limit=config.activation_func_clamp_value or math.inf,
        linear_offset=config.glu_linear_offset,
    )


def build_parallel(config: Config, world_size: int) -> ParallelShape:
    """Resolve the layout."""
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    pp, ep = config.pipeline_model_parallel_size, config.expert_model_parallel_size
    etp = tp
    if config.num_experts is not None and config.expert_tensor_parallel_size is not None:
        etp = config.expert_tensor_parallel_size
    return ParallelShape(
        world_size=world_size,
        tp=tp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=world_size // (tp * cp * pp),
        edp=world_size // (etp * ep * pp),
        pp=pp,
        vpp=stages_per_rank(config),
        sequence_parallel=config.sequence_parallel and tp > 1,
        order="tp-cp-ep-pp-dp" if config.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )


def build_precision(config: Config) -> PrecisionShape:
    """Resolve the dtypes of compute, masters and main gradients."""
    if config.fp64:
        return PrecisionShape("float64", "float64", "float64")
    if config.bf16 or config.fp16:
        compute = "bfloat16" if config.bf16 else "float16"
        gradients, moments = main_grad_dtype(config), narrow_moments(config)
        return PrecisionShape(compute, "float32", gradients, moments)
    return PrecisionShape("float32", "float32", "float32", narrow_moments(config))


def recompute_kind(config: Config) -> str:
    """Return "none", "selective" or "full"."""
    if config.recompute_granularity is not None:
        return config.recompute_granularity
    return "selective" if config.recompute_activations else "none"
