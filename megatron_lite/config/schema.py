"""The configuration: frozen dataclasses whose fields are the flags.

Names are Megatron-LM's argparse destinations, types and defaults are Megatron-LM's too;
where ours differ the field says so. `Config` inherits every group, so access is flat
(`config.hidden_size`); the groups only order the help text. A field's metadata carries
its help text, unit, spellings and legal values: the parser, the help, the YAML files and
the documentation are all derived from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


def flag(
    default: T,
    doc: str,
    *,
    unit: str = "",
    names: Sequence[str] = (),
    choices: Sequence[Any] = (),
    words: Sequence[str] = (),
    nargs: str = "",
    join: bool = False,
) -> T:
    """Declare a field that is a flag.

    Args:
        default: value when the flag is not given.
        doc: one sentence for the help text.
        unit: unit of the value, shown in the help.
        names: spellings; empty means `--field-name`, or `--no-field-name` and
            `--disable-field-name` for a bool that is true by default.
        choices: legal values; empty means any.
        words: accepted beside the numbers of the field's type.
        nargs: "" one value, "+" one or more, "*" any number, "3" exactly three.
        join: several words on the command line form one string.
    """
    metadata = {
        "doc": doc,
        "unit": unit,
        "names": tuple(names),
        "choices": tuple(choices),
        "words": tuple(words),
        "nargs": nargs,
        "join": join,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of the Transformer."""

    num_layers: int | None = flag(None, "Transformer layers.", unit="layers")
    hidden_size: int | None = flag(None, "Width of the residual stream.", unit="channels")
    num_attention_heads: int | None = flag(None, "Query heads per layer.", unit="heads")
    ffn_hidden_size: int | None = flag(
        None,
        "Inner width of the MLP; unset: 4h, with --swiglu int((4h*2/3)/64)*64.",
        unit="channels",
    )
    kv_channels: int | None = flag(
        None, "Channels per head; unset: hidden size / heads.", unit="channels"
    )
    group_query_attention: bool = flag(
        False, "Share key/value heads between query heads (the gate of --num-query-groups)."
    )
    num_query_groups: int = flag(
        1, "Key/value heads; ignored without --group-query-attention.", unit="heads"
    )
    max_position_embeddings: int | None = flag(
        None, "Longest sequence the positions allow (>= --seq-length).", unit="tokens"
    )
    position_embedding_type: str = flag(
        "learned_absolute",
        "How positions enter the model; learned_absolute, rope, yarn and none so far.",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    )
    use_rotary_position_embeddings: bool = flag(
        False, "Older spelling of --position-embedding-type rope."
    )
    add_position_embedding: bool = flag(
        True,
        "Older spelling of --position-embedding-type none.",
        names=("--no-position-embedding",),
    )
    rotary_base: int = flag(10000, "Base of the rotary frequencies.")
    rotary_percent: float = flag(1.0, "Rotated share of the head channels.", unit="fraction")
    rotary_interleaved: bool = flag(
        False, "Rotate neighbouring channels (GPT-J) instead of halves."
    )
    use_rope_scaling: bool = flag(False, "Llama-3 scaling of the rotary frequencies.")
    rope_scaling_factor: float = flag(8.0, "Factor of --use-rope-scaling.")
    rotary_seq_len_interpolation_factor: int | None = flag(
        None, "Divide rotary positions by this factor."
    )
    rotary_scaling_factor: float = flag(1.0, "YaRN: how much longer texts get.")
    yarn_original_max_position_embeddings: int | None = flag(
        None, "YaRN: positions before they were scaled; unset: 4096.", unit="tokens"
    )
    yarn_beta_fast: float | None = flag(
        None, "YaRN: channels that turn more often over those are kept; unset: 32.", unit="turns"
    )
    yarn_beta_slow: float | None = flag(
        None, "YaRN: channels that turn less often are slowed down; unset: 1.", unit="turns"
    )
    yarn_correction_range_round_to_int: bool = flag(
        True,
        "YaRN: the border between the two is a whole channel.",
        names=(
            "--yarn-correction-range-round-to-int",
            "--no-yarn-correction-range-round-to-int",
        ),
    )
    mscale: float = flag(1.0, "YaRN: growth of the rotary part with the logarithm of the factor.")
    mscale_all_dim: float = flag(
        0.0, "YaRN: the same divided out again; multi-latent scores grow by its square."
    )
    normalization: str = flag(
        "LayerNorm", "Kind of normalisation.", choices=("LayerNorm", "RMSNorm")
    )
    layernorm_epsilon: float = flag(
        1e-5, "Added to the variance in norms.", names=("--norm-epsilon",)
    )
    layernorm_zero_centered_gamma: bool = flag(
        False, "Store norm weights as their difference from 1.", names=("--apply-layernorm-1p",)
    )
    qk_layernorm: bool = flag(False, "Normalise queries and keys per head.")
    softmax_type: str = flag(
        "vanilla",
        "Attention's denominator: as it is, plus 1, or plus exp(a learned number per head).",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    window_size: str | None = flag(
        None,
        "LEFT,0: a token sees LEFT earlier ones and itself; unset: all.",
        unit="tokens",
    )
    window_attn_skip_freq: str | None = flag(
        None, "Every n-th layer has no window, or a list like [1,0]*12 with 1 for a window."
    )
    swiglu: bool = flag(False, "SiLU-gated MLP.")
    quick_geglu: bool = flag(False, "MLP gated by x * sigmoid(1.702 x).")
    activation_func_clamp_value: float | None = flag(
        None, "Gated MLPs: the gate is at most this, the linear half within +- this."
    )
    glu_linear_offset: float = flag(0.0, "Gated MLPs: added to the linear half.")
    squared_relu: bool = flag(False, "Squared-ReLU MLP.")
    openai_gelu: bool = flag(False, "Tanh form of GELU (GPT-2's).")
    add_bias_linear: bool = flag(
        True, "Linear layers have no bias.", names=("--disable-bias-linear",)
    )
    add_qkv_bias: bool = flag(False, "Bias on query, key and value only.")
    untie_embeddings_and_output_weights: bool = flag(
        False, "Separate weights for input embedding and output layer."
    )
    make_vocab_size_divisible_by: int = flag(
        128, "The padded vocabulary is a multiple of this times TP.", unit="tokens"
    )
    vocab_size: int | None = flag(
        None, "Vocabulary size, for tokenizers without a model file.", unit="tokens"
    )
    hidden_dropout: float = flag(
        0.1, "Dropout on embeddings and residual branches.", unit="probability"
    )
    attention_dropout: float = flag(0.1, "Dropout on attention weights.", unit="probability")
    init_method_std: float = flag(
        0.02, "Deviation of initial weights; output projections use std/sqrt(2L)."
    )
    mtp_num_layers: int | None = flag(None, "Multi-token-prediction depths.", unit="layers")
    mtp_loss_scaling_factor: float = flag(
        0.1, "Weight of the mean of the losses of multi-token prediction."
    )
    multi_latent_attention: bool = flag(
        False, "Keys and values of all heads come from one small latent per token."
    )
    q_lora_rank: int | None = flag(
        None, "Width of the queries' latent; unset: queries have none.", unit="channels"
    )
    kv_lora_rank: int = flag(32, "Width of the latent of keys and values.", unit="channels")
    qk_head_dim: int = flag(
        128, "Multi-latent: channels per head without position.", unit="channels"
    )
    qk_pos_emb_head_dim: int = flag(
        64, "Multi-latent: channels per head with position.", unit="channels"
    )
    v_head_dim: int = flag(128, "Multi-latent: channels per head of values.", unit="channels")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Layout: how the work is cut over processes."""

    tensor_model_parallel_size: int = flag(
        1, "TP: ranks that share each layer's matrices.", unit="ranks"
    )
    sequence_parallel: bool = flag(
        False, "Cut the sequence over TP between the tensor regions (off at TP=1)."
    )
    pipeline_model_parallel_size: int = flag(1, "PP: pipeline ranks.", unit="ranks")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "Layers per virtual pipeline stage.", unit="layers"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "Virtual stages per pipeline rank.", unit="stages"
    )
    microbatch_group_size_per_vp_stage: int | None = flag(
        None,
        "Microbatches in a row on a virtual stage (interleaved schedules); unset: PP.",
        unit="microbatches",
        names=("--microbatch-group-size-per-virtual-pipeline-stage",),
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "Layers of the first pipeline rank; the others share the rest.", unit="layers"
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "Layers of the last pipeline rank; the others share the rest.", unit="layers"
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "Count the embedding as a layer of the first stage when layers are dealt out."
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "Count the loss as a layer of the last stage when layers are dealt out."
    )
    account_for_mtp_in_pipeline_split: bool = flag(
        False,
        "Count each depth of --mtp-num-layers as a layer of the last stage when layers are dealt "
        "out.",
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "Stages written out: E embedding, t layer, L loss, | next stage, x*n and (...)*n repeat.",
    )
    context_parallel_size: int = flag(
        1, "CP: ranks that share each sequence in attention.", unit="ranks"
    )
    expert_model_parallel_size: int = flag(
        1, "EP: ranks the experts are spread over.", unit="ranks"
    )
    expert_tensor_parallel_size: int | None = flag(
        None, "TP of the expert layers; unset: TP.", unit="ranks"
    )
    use_tp_pp_dp_mapping: bool = flag(False, "Rank order tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp.")
    use_distributed_optimizer: bool = flag(False, "Shard the optimizer state over DP (ZeRO-1).")
    use_megatron_fsdp: bool = flag(False, "Shard parameters over DP (ZeRO-3).")
    use_torch_fsdp2: bool = flag(False, "The same as --use-megatron-fsdp.")
    data_parallel_sharding_strategy: str | None = flag(
        None,
        "What DP shards: nothing, optimizer state, gradients too, parameters too (ZeRO-0 to 3).",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    num_distributed_optimizer_instances: int = flag(
        1, "Copies of the sharded state (hybrid sharding).", unit="copies"
    )
    gradient_accumulation: str = flag(
        "sharded",
        "Sharded gradients: reduce after each microbatch, or once and keep whole ones till then.",
        choices=("sharded", "unsharded"),
    )
    reshard_after: str = flag(
        "forward",
        "Sharded parameters: drop gathered ones after forward, after backward, or per step.",
        choices=("forward", "backward", "step"),
    )
    overlap_param_gather: bool = flag(
        False, "Gather sharded parameters while the model computes with others."
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(
        None, "Sizes of the context levels; their product is CP.", nargs="+", unit="ranks"
    )
    ddp_bucket_size: int | None = flag(
        None, "Gradient elements per reduction bucket; unset: chosen.", unit="elements"
    )
    overlap_grad_reduce: bool = flag(
        False, "Accepted; gradients are always reduced during the backward pass."
    )
    distributed_backend: str = flag(
        "nccl",
        "Accepted; NCCL on CUDA and gloo on the CPU whatever it says.",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: int = flag(
        10, "Longest wait in a collective before the run fails.", unit="minutes"
    )


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts."""

    num_experts: int | None = flag(None, "Experts per MoE layer; unset: dense.", unit="experts")
    moe_layer_freq: str = flag(
        "1", "MoE layers: every n-th from the first, or a list like ([0]*3+[1]*58)."
    )
    moe_ffn_hidden_size: int | None = flag(
        None, "Inner width of an expert; unset: that of a dense MLP.", unit="channels"
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None,
        "Inner width of the shared expert, all of them together; unset: none.",
        unit="channels",
    )
    moe_shared_expert_gate: bool = flag(
        False, "Multiply the shared expert's output by a sigmoid of the token."
    )
    moe_router_topk: int = flag(2, "Experts per token.", unit="experts")
    moe_router_score_function: str = flag(
        "softmax", "Scores of the router.", choices=("softmax", "sigmoid", "sqrtsoftplus")
    )
    moe_router_pre_softmax: bool = flag(
        False, "Softmax over all experts before the choice, not over the chosen ones."
    )
    moe_router_topk_scaling_factor: float | None = flag(
        None, "Factor of the chosen scores; unset: 1."
    )
    moe_router_num_groups: int | None = flag(
        None, "Groups of experts; with --moe-router-group-topk.", unit="groups"
    )
    moe_router_group_topk: int | None = flag(
        None, "Groups that the experts of one token come from.", unit="groups"
    )
    moe_router_dtype: str | None = flag(
        None, "Dtype of the router; unset: fp32.", choices=("fp32", "fp64")
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "Balance by a bias in the choice of experts instead of a loss."
    )
    moe_router_bias_update_rate: float = flag(0.001, "Step of that bias per update.")
    moe_router_load_balancing_type: tuple[str, ...] = flag(
        ("aux_loss",),
        "Balancing of the router.",
        nargs="+",
        choices=(
            "aux_loss",
            "seq_aux_loss",
            "global_aux_loss",
            "sinkhorn",
            "quantile_balancing",
            "none",
        ),
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag((0.0,), "Weight of the balancing loss.", nargs="+")
    moe_global_aux_loss_form: str = flag(
        "previous-step",
        "What global_aux_loss compares with: the expert counts of the step before, or Megatron's "
        "mean over the step so far, whose value depends on the layout.",
        choices=("previous-step", "running"),
    )
    moe_z_loss_coeff: float | None = flag(None, "Weight of the router's z-loss; unset: none.")
    moe_input_jitter_eps: float | None = flag(
        None, "Noise of the router's input: times 1 +- this; unset: none."
    )
    moe_expert_capacity_factor: float | None = flag(
        None, "Most tokens of an expert, in units of its fair share; unset: no token is dropped."
    )
    moe_pad_expert_input_to_capacity: bool = flag(
        False, "Pad every expert's tokens to its capacity."
    )
    moe_token_drop_policy: str = flag(
        "probs",
        "What an expert over its capacity keeps: the largest scores or the first tokens.",
        choices=("probs", "position"),
    )
    moe_reroute_candidates: int = flag(
        0,
        "Next best experts of its token that a choice over the capacity tries before it is "
        "dropped; 0: dropped at once.",
        unit="experts",
    )
    moe_per_layer_logging: bool = flag(
        False, "Log losses, drops and loads of every MoE layer on its own."
    )
    moe_token_dispatcher_type: str = flag(
        "allgather",
        "How tokens reach their experts.",
        choices=("allgather", "alltoall", "flex"),
    )
    moe_replicated_experts: int = flag(
        0,
        "Experts per layer that every rank computes for its own tokens: those that the step "
        "before chose most.",
        unit="experts",
    )
    overlap_moe_expert_parallel_comm: bool = flag(
        False,
        "Hide the all-to-alls of experts behind another microbatch: a forward and a backward "
        "at the same time.",
    )


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch sizes and length of the run."""

    seq_length: int | None = flag(None, "Tokens per sample.", unit="tokens")
    micro_batch_size: int | None = flag(
        None, "Samples per forward pass of one data-parallel rank.", unit="samples"
    )
    global_batch_size: int | None = flag(
        None, "Samples per step over all ranks; unset: micro-batch size x DP.", unit="samples"
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES.",
        nargs="3",
        unit="samples",
    )
    step_batch_size_schedule: str | None = flag(
        None,
        "Global batch by consumed tokens, as '0:768 250B:1536'.",
        unit="tokens:samples",
        nargs="+",
        join=True,
    )
    train_iters: int | None = flag(None, "Steps to train.", unit="steps")
    train_samples: int | None = flag(None, "Samples to train, instead of steps.", unit="samples")
    eval_iters: int = flag(100, "Steps per evaluation; 0: none.", unit="steps")
    eval_interval: int | None = flag(
        None, "Steps between evaluations; unset: only at the end.", unit="steps"
    )
    eval_global_batch_size: int | None = flag(
        None, "Samples per evaluation step; unset: the global batch size.", unit="samples"
    )
    calculate_per_token_loss: bool = flag(
        False, "Loss per valid token of the global batch (the default here)."
    )
    legacy_loss_normalization: bool = flag(
        False, "Mean of the micro-batch means, as Megatron's default."
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and schedules."""

    optimizer: str = flag(
        "adam",
        "Update rule (adam decouples decay, as AdamW); adam, sgd, muon, adafactor so far.",
        choices=("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon", "adafactor"),
    )
    lr: float | None = flag(None, "Peak learning rate.")
    min_lr: float = flag(0.0, "Lowest learning rate of the decay.")
    lr_decay_style: str = flag(
        "linear",
        "Shape of the decay.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(
        None, "Steps until --min-lr; unset: --train-iters.", unit="steps"
    )
    lr_decay_samples: int | None = flag(
        None, "Samples until --min-lr, in a run by samples.", unit="samples"
    )
    lr_warmup_iters: int = flag(0, "Steps of linear warm-up.", unit="steps")
    lr_warmup_samples: int = flag(0, "Samples of linear warm-up.", unit="samples")
    lr_warmup_fraction: float | None = flag(
        None, "Warm-up as a share of the decay length.", unit="fraction"
    )
    lr_warmup_init: float = flag(0.0, "Learning rate at step 0 of the warm-up.")
    lr_wsd_decay_style: str = flag(
        "exponential",
        "Shape of WSD's final decay.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(None, "Steps of WSD's final decay.", unit="steps")
    lr_wsd_decay_samples: int | None = flag(None, "Samples of WSD's final decay.", unit="samples")
    weight_decay: float = flag(0.01, "Weight decay of matrices.")
    start_weight_decay: float | None = flag(None, "Weight decay at the start of its increase.")
    end_weight_decay: float | None = flag(None, "Weight decay at the end of its increase.")
    weight_decay_incr_style: str = flag(
        "constant", "How weight decay grows.", choices=("constant", "linear", "cosine")
    )
    adam_beta1: float = flag(0.9, "Decay of Adam's first moment.")
    adam_beta2: float = flag(0.999, "Decay of Adam's second moment.")
    adam_eps: float = flag(1e-8, "Added to Adam's denominator.")
    sgd_momentum: float = flag(0.9, "Momentum of SGD.")
    muon_momentum: float = flag(0.9, "Decay of Muon's average of gradients.")
    muon_nesterov: bool = flag(False, "Muon looks ahead: orthogonalise the next average.")
    muon_scale_mode: str = flag(
        "spectral",
        "Scale of Muon's update by the sides of the matrix.",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = flag(1.0, "Further factor of Muon's update.")
    muon_coefficient_type: str = flag(
        "quintic",
        "Coefficients of the Newton-Schulz iteration.",
        choices=("simple", "quintic", "polar_express", "aol"),
    )
    muon_num_ns_steps: int = flag(5, "Newton-Schulz iterations of Muon.", unit="iterations")
    muon_fp32_matmul_prec: str = flag(
        "medium",
        "Newton-Schulz on CUDA in bf16, or in fp32 (high); fp32 on the CPU.",
        choices=("low", "medium", "high"),
    )
    muon_tp_mode: str = flag(
        "duplicated",
        "Accepted; matrices are whole in both modes (blockwise would depend on TP).",
        choices=("blockwise", "duplicated", "distributed"),
    )
    muon_scalar_optimizer: str = flag(
        "adam",
        "Update of what Muon leaves: vectors, embeddings, output; adam so far.",
        choices=("adam", "lion"),
    )
    adafactor_beta2_decay: float = flag(
        0.8, "Adafactor's second moment decays by 1 - update^-this.", unit="exponent"
    )
    adafactor_beta1: float = flag(0.0, "Decay of Adafactor's first moment; 0: none is kept.")
    adafactor_eps: float = flag(1e-30, "Added to the squared gradients of Adafactor.")
    adafactor_clip_threshold: float = flag(
        1.0, "Largest root mean square of Adafactor's update of a tensor; 0: none."
    )
    decoupled_lr: float | None = flag(
        None, "Peak learning rate of embeddings and output layer; unset: --lr."
    )
    decoupled_min_lr: float | None = flag(
        None, "Lowest learning rate of embeddings and output layer; unset: --min-lr."
    )
    param_group: tuple[str, ...] = flag(
        (),
        "PATTERN:lr_mult=X,wd_mult=Y, for parameters whose logical name matches; the first wins.",
        nargs="+",
    )
    freeze: tuple[str, ...] = flag(
        (), "Patterns of logical names of parameters that are not trained.", nargs="+"
    )
    weight_ema_decay: float | None = flag(
        None, "Keep a moving average of the weights with this decay per update."
    )
    eval_with_ema: bool = flag(False, "Evaluate the average of --weight-ema-decay.")
    optimizer_offload: str = flag(
        "none",
        "Where masters and moments lie: beside the parameters, in host memory, in a file.",
        choices=("none", "cpu", "disk"),
    )
    optimizer_cpu_offload: bool = flag(False, "The same as --optimizer-offload cpu.")
    optimizer_offload_fraction: float = flag(
        1.0, "Share of the state that is offloaded, in whole buckets.", unit="fraction"
    )
    offload_dir: str | None = flag(
        None, "Directory of --optimizer-offload disk; each rank has a file without a name in it."
    )
    clip_grad: float = flag(1.0, "Largest global gradient norm; 0: no clipping.")
    override_opt_param_scheduler: bool = flag(
        False,
        "On resume take the schedules of this command.",
        names=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "On resume take the schedules of the checkpoint.",
        names=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    bf16: bool = flag(False, "Compute in bfloat16 with fp32 masters and gradients.")
    fp16: bool = flag(False, "Compute in float16 with a loss scale.")
    fp64: bool = flag(False, "Everything in float64: the verification mode.")
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "Accumulate and reduce gradients in fp32 (the default here)."
    )
    grad_reduce_in_bf16: bool = flag(
        False, "Accumulate and reduce gradients in bf16: half the bytes, 2^-9 off per sum."
    )
    use_precision_aware_optimizer: bool = flag(
        False, "Let main gradients and Adam's moments be narrower (the gate of the next four)."
    )
    main_grads_dtype: str = flag(
        "fp32", "Dtype of main gradients, accumulated and reduced.", choices=("fp32", "bf16")
    )
    main_params_dtype: str = flag(
        "fp32", "Dtype of the masters; fp32 so far.", choices=("fp32", "fp16")
    )
    exp_avg_dtype: str = flag(
        "fp32",
        "Dtype of Adam's first moment; fp32, bf16 so far.",
        choices=("fp32", "fp16", "bf16", "fp8"),
    )
    exp_avg_sq_dtype: str = flag(
        "fp32",
        "Dtype of Adam's second moment; fp32, bf16 so far.",
        choices=("fp32", "fp16", "bf16", "fp8"),
    )
    attention_softmax_in_fp32: bool = flag(False, "Softmax in fp32 (always done here).")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Recomputation of activations in the backward pass."""

    recompute_granularity: str | None = flag(
        None, "What is recomputed.", choices=("full", "selective")
    )
    recompute_activations: bool = flag(False, "Shorthand for --recompute-granularity selective.")
    recompute_method: str | None = flag(
        None,
        "Full recomputation: every group of layers, or the first ones of each stage.",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(
        None, "Layers per group (uniform) or recomputed layers (block).", unit="layers"
    )
    recompute_modules: tuple[str, ...] | None = flag(
        None, "Modules of selective recomputation; only core_attn so far.", nargs="+"
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data and tokenizer."""

    data_path: tuple[str, ...] | None = flag(
        None, "Dataset prefixes, or WEIGHT PREFIX pairs; cut by --split.", nargs="*"
    )
    data_args_path: str | None = flag(None, "File that holds what --data-path would.")
    split: str | None = flag(None, "Shares of train, validation and test; unset: 969, 30, 1.")
    train_data_path: tuple[str, ...] | None = flag(None, "Training prefixes.", nargs="*")
    valid_data_path: tuple[str, ...] | None = flag(None, "Validation prefixes.", nargs="*")
    test_data_path: tuple[str, ...] | None = flag(None, "Test prefixes.", nargs="*")
    data_cache_path: str | None = flag(None, "Directory of the index cache.")
    mock_data: bool = flag(False, "Counting sequences instead of data.")
    num_workers: int = flag(2, "Loader threads per rank; 0: in the main thread.")
    dataloader_type: str | None = flag(
        None,
        "Order of samples; unset: single, the only one so far.",
        choices=("single", "cyclic", "external"),
    )
    eod_mask_loss: bool = flag(False, "No loss where the input is the end of a document.")
    reset_position_ids: bool = flag(False, "Restart positions after each document.")
    reset_attention_mask: bool = flag(False, "No attention across documents.")
    create_attention_mask_in_dataloader: bool = flag(
        True,
        "Masks are made in the kernels (always done here).",
        names=("--no-create-attention-mask-in-dataloader",),
    )
    mmap_bin_files: bool = flag(
        True, "Read token files instead of mapping them.", names=("--no-mmap-bin-files",)
    )
    data_check_interval: int = flag(
        10, "Steps between looks at one sampled block of the data files; 0: none.", unit="steps"
    )
    mid_level_dataset_surplus: float = flag(
        0.005, "Extra samples requested from each dataset of a blend.", unit="fraction"
    )
    tokenizer_type: str | None = flag(
        None,
        "Tokenizer (required); SentencePiece, byte-level and null so far.",
        choices=(
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "ByteLevelTokenizer",
            "NullTokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "GPT2BPETokenizer",
            "HuggingFaceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "MultimodalTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
        ),
    )
    tokenizer_model: str | None = flag(None, "Tokenizer model file.")
    vocab_file: str | None = flag(None, "Vocabulary file of a BPE tokenizer.")
    merge_file: str | None = flag(None, "Merges file of a BPE tokenizer.")
    skip_bad_records: bool = flag(False, "Count and skip unreadable records instead of failing.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = flag(None, "Directory to save to.")
    save_interval: int | str | None = flag(
        None,
        "Steps between saves; auto: as often as pauses and failures make it pay.",
        unit="steps",
        names=("--save-interval", "--persistent-save-interval"),
        words=("auto",),
    )
    mean_time_between_failures: float | None = flag(
        None,
        "What --save-interval auto reckons with; unset: by the number of ranks.",
        unit="seconds",
    )
    async_save: bool = flag(
        False, "Save in the background, from a copy of the state in host memory."
    )
    ckpt_fully_parallel_save: bool = flag(
        True,
        "Let the owner write all of a tensor that several ranks hold, not each a part.",
        names=("--no-ckpt-fully-parallel-save", "--disable-ckpt-fully-parallel-save"),
    )
    save_failure_policy: str = flag(
        "stop", "After a failed save: stop, or train on.", choices=("stop", "continue")
    )
    max_failed_saves: int = flag(
        3, "Failed saves in a row that --save-failure-policy continue accepts.", unit="saves"
    )
    save_retain_interval: int | None = flag(
        None, "Keep every checkpoint at a multiple of this, delete older others.", unit="steps"
    )
    keep_last: int | None = flag(
        None, "Keep this many newest verified checkpoints; unset: all.", unit="checkpoints"
    )
    overwrite_save: bool = flag(False, "Allow --save to hold another run's checkpoints.")
    ckpt_staging_dir: str | None = flag(
        None, "Directory on each node for checkpoints of URLs; unset: the system's temporary one."
    )
    ckpt_allow_unsafe_publish: bool = flag(
        False, "Save to a store without create-if-absent: no other job may ever save there."
    )
    load: str | None = flag(None, "Directory to resume from.")
    pretrained_checkpoint: str | None = flag(
        None, "Directory to take weights from, at step 0, where --load holds no checkpoint."
    )
    moe_use_upcycling: bool = flag(
        False, "Make the experts from a dense checkpoint's MLPs; the run starts at step 0."
    )
    moe_upcycling_granularity: int = flag(
        1, "Slices that upcycling cuts a dense MLP into, one per expert.", unit="slices"
    )
    ckpt_step: int | None = flag(None, "Load this step instead of the newest.", unit="steps")
    use_checkpoint_args: bool = flag(
        False, "Take architecture and tokenizer from the checkpoint, below explicit flags."
    )
    use_mp_args_from_checkpoint_args: bool = flag(
        False, "Take the layout from the checkpoint, below explicit flags."
    )
    finetune: bool = flag(False, "Load weights only and start at step 0.")
    no_load_optim: bool = flag(
        False, "Do not load the optimizer state.", names=("--no-load-optim",)
    )
    no_save_optim: bool = flag(
        False, "Do not save the optimizer state.", names=("--no-save-optim",)
    )
    exit_on_missing_checkpoint: bool = flag(
        False, "Fail when --load holds no checkpoint (the default here)."
    )
    allow_missing_checkpoint: bool = flag(
        False, "Start from random weights when --load holds no checkpoint."
    )
    ckpt_allow: tuple[str, ...] = flag(
        (), "Kinds of difference between checkpoint and model to accept.", nargs="+"
    )
    allow_resume_change: tuple[str, ...] = flag(
        (), "Fields that may differ from the checkpoint's on resume.", nargs="+"
    )
    verify_resume: bool = flag(
        False, "Save a canary batch with its loss and gradient norm; replay it on loading."
    )
    check_weights_hash: bool = flag(
        False, "Print one logical hash of the weights at start, equal in every layout."
    )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is printed and recorded."""

    log_interval: int = flag(100, "Steps between log lines.", unit="steps")
    log_throughput: bool = flag(
        False, "Log model TFLOP/s per rank, and measure the peak that MFU is a share of."
    )
    log_params_norm: bool = flag(False, "Log the norm of the parameters.")
    log_num_zeros_in_grad: bool = flag(False, "Log the number of zero gradient elements.")
    log_progress: bool = flag(False, "Append a line per save to progress.txt in --save.")
    timing_log_level: int = flag(0, "Detail of the timers.", choices=(0, 1, 2))
    timing_log_option: str = flag(
        "minmax", "What timers report over ranks.", choices=("max", "minmax", "all")
    )
    flops_convention: str = flag(
        "full_square",
        "How attention FLOPs are counted: Megatron's full square, or the causal half.",
        choices=("full_square", "causal_half"),
    )
    tensorboard_dir: str | None = flag(None, "Directory of TensorBoard events.")
    tensorboard_log_interval: int = flag(1, "Steps between TensorBoard points.", unit="steps")
    tensorboard_queue_size: int = flag(
        1000, "Points TensorBoard keeps before it writes.", unit="points"
    )
    log_timers_to_tensorboard: bool = flag(False, "Write timers to TensorBoard.")
    log_memory_to_tensorboard: bool = flag(False, "Write memory figures to TensorBoard.")
    log_validation_ppl_to_tensorboard: bool = flag(
        False, "Write the validation perplexity to TensorBoard."
    )
    log_loss_scale_to_tensorboard: bool = flag(
        True,
        "Leave the loss scale out of TensorBoard.",
        names=("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard"),
    )
    wandb_project: str | None = flag(None, "Weights & Biases project; unset: none.")
    wandb_exp_name: str | None = flag(None, "Weights & Biases run name.")
    wandb_save_dir: str | None = flag(None, "Directory of Weights & Biases' local files.")
    wandb_entity: str | None = flag(None, "Weights & Biases account or team.")
    metrics_jsonl: str | None = flag(None, "File for one JSON object per step.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run control."""

    seed: int = flag(1234, "Seed of weights, dropout and data order (> 0).")
    exit_interval: int | None = flag(
        None, "Stop after a step that this number divides.", unit="steps"
    )
    exit_duration_in_mins: int | None = flag(None, "Stop after this time.", unit="minutes")
    exit_signal_handler: bool = flag(
        False, "Save and stop on SIGTERM (always done here with --save); SIGINT ends unsaved."
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "Do not stop on non-finite losses and gradients.",
        names=("--no-check-for-nan-in-loss-and-grad",),
    )
    nan_policy: str | None = flag(
        None,
        "On non-finite gradients; unset: stop; no rollback yet.",
        choices=("skip", "stop", "rollback"),
    )
    deterministic_mode: bool = flag(False, "Only repeatable operations (always so on the CPU).")
    manual_gc: bool = flag(False, "Collect Python garbage only between steps.")
    manual_gc_interval: int = flag(0, "Steps between collections; 0: never.", unit="steps")
    local_rank: int = flag(0, "Local rank, as old launchers pass it; the environment decides.")


@dataclass(frozen=True, kw_only=True)
class OwnConfig:
    """Flags beyond Megatron's."""

    device: str = flag("auto", "Where to run.", choices=("auto", "cpu", "cuda"))
    config_file: str | None = flag(None, "YAML or JSON file of fields; the command line wins.")
    print_config: bool = flag(False, "Print the resolved configuration as YAML and stop.")
    dry_run: bool = flag(False, "Report the plan without training (not yet supported).")
    pipeline_schedule: str | None = flag(
        None,
        "Schedule by name or file:PATH; unset: interleaved with virtual stages, else 1f1b.",
    )
    loss_chunks: int = flag(8, "Pieces in which the cross-entropy is computed.", unit="chunks")
    native_ops: str = flag(
        "on",
        "Operations in C++ and CUDA, or their references in plain torch.",
        choices=("on", "off"),
    )
    compile: bool = flag(False, "Trace each layer with torch.compile between its operations.")
    require_native: bool = flag(False, "Fail instead of warning without the native helpers.")
    debug_dump: str | None = flag(None, "Directory for each step's logical gradients.")
    debug_dump_weights: bool = flag(False, "Add the updated weights to --debug-dump.")
    debug_dump_activations: bool = flag(False, "Add activations to --debug-dump.")


GROUPS: tuple[tuple[str, type], ...] = (
    ("model", ModelConfig),
    ("layout", ParallelConfig),
    ("mixture of experts", MoEConfig),
    ("batch and length", BatchConfig),
    ("optimizer and schedules", OptimizerConfig),
    ("precision", PrecisionConfig),
    ("recomputation", RecomputeConfig),
    ("data and tokenizer", DataConfig),
    ("checkpoints", CheckpointConfig),
    ("logging", LoggingConfig),
    ("run control", RunConfig),
    ("beyond Megatron", OwnConfig),
)


@dataclass(frozen=True)
class KnownFlag:
    """A Megatron flag that was given but is not a field.

    `text` is what the user wrote, `dest` its destination, `reason` why it does nothing
    here or is refused.
    """

    text: str
    dest: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Config(
    ModelConfig,
    ParallelConfig,
    MoEConfig,
    BatchConfig,
    OptimizerConfig,
    PrecisionConfig,
    RecomputeConfig,
    DataConfig,
    CheckpointConfig,
    LoggingConfig,
    RunConfig,
    OwnConfig,
):
    """Everything the user said, with defaults for the rest; never changed afterwards.

    The two last fields are no flags: Megatron flags outside the schema that were given
    at a value other than their default, accepted without effect or refused.
    """

    inert_flags: tuple[KnownFlag, ...] = ()
    refused_flags: tuple[KnownFlag, ...] = ()


def flag_fields(group: type = Config) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of `group` that are flags, in order of declaration."""
    return tuple(f for f in dataclasses.fields(group) if "doc" in f.metadata)


def required(value: int | None) -> int:
    """Narrow a field that the rules demand; a None here is a defect of ours."""
    if value is None:
        raise ValueError("a required field is unset: check_config was not called")
    return value
