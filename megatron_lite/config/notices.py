"""What a user should be told once at start although it is no fault.

Flags accepted without effect, and those of Megatron's defaults that surprise people,
where they are in force. The caller prints the list on one rank.
"""

from __future__ import annotations

from megatron_lite.config.options import build_options
from megatron_lite.config.plan import position_kind
from megatron_lite.config.schema import Config, KnownFlag
from megatron_lite.config.state_plan import offload_kind
from megatron_lite.config.support_rules import shown

LEGACY = "--legacy-loss-normalization"


def notices(config: Config, world_size: int) -> list[str]:
    """Return one line per notice for a checked config."""
    found = inert_notices(config.inert_flags)
    found += gated_notices(config, "num_experts") + gated_notices(config, "multi_latent_attention")
    found += layout_notices(config, world_size)
    found += state_notices(config)
    found += balance_notices(config)
    found += default_notices(config)
    return found


def inert_notices(flags: tuple[KnownFlag, ...]) -> list[str]:
    """Group the flags without effect by reason."""
    by_reason: dict[str, list[str]] = {}
    for flag in flags:
        by_reason.setdefault(flag.reason, []).append(flag.text)
    return [f"accepted, no effect: {', '.join(t)} ({reason})" for reason, t in by_reason.items()]


def gated_notices(config: Config, gate: str) -> list[str]:
    """Name the flags that are given without the one that gives them an effect."""
    options = build_options()
    if getattr(config, gate) != options[gate].default:
        return []
    given = [
        shown(option, getattr(config, option.dest))
        for option in options.values()
        if option.group and option.gate == gate and getattr(config, option.dest) != option.default
    ]
    return [f"{', '.join(given)}: no effect without {options[gate].name}"] if given else []


def layout_notices(config: Config, world_size: int) -> list[str]:
    """Tell what the layout makes of the flags."""
    found = []
    if config.sequence_parallel and config.tensor_model_parallel_size == 1:
        found.append("--sequence-parallel is off: --tensor-model-parallel-size is 1")
    if config.num_query_groups != 1 and not config.group_query_attention:
        found.append(
            f"--num-query-groups {config.num_query_groups} has no effect without "
            "--group-query-attention: every head has its own key and value"
        )
    if config.kv_channels is not None and config.multi_latent_attention:
        found.append(
            f"--kv-channels {config.kv_channels} has no effect with --multi-latent-attention, "
            "whose heads have sizes of their own"
        )
    alone = config.pipeline_model_parallel_size == 1
    if alone and config.pipeline_schedule not in (None, "1f1b", "auto"):
        found.append(
            f"--pipeline-schedule {config.pipeline_schedule} has no effect with one pipeline stage"
        )
    if config.skip_bad_records:
        found.append(
            "--skip-bad-records has no effect here: tools/preprocess_data.py reads records"
        )
    if config.save is None and config.save_interval is not None:
        found.append("--save-interval has no effect without --save: nothing is saved")
    if config.distributed_backend == "nccl" and config.device == "cpu" and world_size > 1:
        found.append("--device cpu: the transport is gloo, not --distributed-backend nccl")
    return found


def balance_notices(config: Config) -> list[str]:
    """Tell of the one loss whose value depends on the layout."""
    if config.num_experts is None or config.moe_global_aux_loss_form != "running":
        return []
    return [
        "--moe-global-aux-loss-form running: the loss depends on the micro-batch size, on the "
        "ranks that share the data and on the order of microbatches; another layout trains "
        "another model (previous-step does not)"
    ]


def state_notices(config: Config) -> list[str]:
    """Tell what narrow and offloaded state costs, where a user may not expect it."""
    found = []
    if config.exp_avg_sq_dtype == "bf16" and 1 - config.adam_beta2 < 2**-8:
        found.append(
            f"--exp-avg-sq-dtype bf16 with --adam-beta2 {config.adam_beta2}: a decay of "
            f"{1 - config.adam_beta2:.2g} per step is rounded away, the second moment hardly "
            "ever falls (from 0.996 down it does)"
        )
    if config.grad_reduce_in_bf16 and config.accumulate_allreduce_grads_in_fp32:
        found.append(
            "--accumulate-allreduce-grads-in-fp32 has no effect with --grad-reduce-in-bf16"
        )
    kind = offload_kind(config)
    if kind == "none" and config.optimizer_offload_fraction != 1.0:
        found.append("--optimizer-offload-fraction has no effect without --optimizer-offload")
    if kind == "cpu" and config.device == "cpu":
        found.append("--optimizer-offload cpu frees no memory with --device cpu")
    if kind == "disk" and config.async_save:
        found.append("--async-save keeps a copy of the optimizer state in memory, offloaded or not")
    return found


def default_notices(config: Config) -> list[str]:
    """Tell which surprising defaults of Megatron, or exceptions from them, are in force."""
    found = []
    if config.hidden_dropout == 0.1 or config.attention_dropout == 0.1:
        found.append(
            f"dropout in force: --hidden-dropout {config.hidden_dropout}, --attention-dropout "
            f"{config.attention_dropout} (0.1 is Megatron's default)"
        )
    if not config.untie_embeddings_and_output_weights:
        found.append(
            "input and output embeddings are tied (--untie-embeddings-and-output-weights unties)"
        )
    if config.optimizer == "adam" and config.adam_beta2 == 0.999:
        found.append("--adam-beta2 0.999 in force (Megatron's default)")
    if (config.data_path or config.data_args_path) and config.split is None:
        found.append("--split 969, 30, 1 in force (Megatron's default)")
    if position_kind(config) == "none":
        found.append("the model has no positions (--position-embedding-type none)")
    balanced = (
        any(config.moe_aux_loss_coeff)
        or config.moe_router_enable_expert_bias
        or "sinkhorn" in config.moe_router_load_balancing_type
    )
    if config.num_experts is not None and not balanced:
        found.append("--moe-aux-loss-coeff 0.0 in force: expert load is not balanced")
    if config.lr_decay_iters is not None and config.lr_decay_iters != config.train_iters:
        found.append(
            f"--lr-decay-iters {config.lr_decay_iters} differs from --train-iters "
            f"{config.train_iters}"
        )
    if config.legacy_loss_normalization:
        found.append(f"{LEGACY}: the loss is the mean of micro-batch means")
    else:
        found.append(
            f"the loss is the mean over the global batch's valid tokens ({LEGACY} gives "
            "Megatron's mean of micro-batch means)"
        )
    if config.rampup_batch_size is not None:
        found.append("--rampup-batch-size is honoured (Megatron parses and ignores it)")
    if config.load is not None and config.allow_missing_checkpoint:
        found.append("--allow-missing-checkpoint: an empty --load starts from random weights")
    return found
