"""The resolved configuration: every field with the value that is in force.

The result of `--print-config`. Given back as `--config-file` it describes the same run,
and prints itself again.
"""

from __future__ import annotations

from typing import Any

from megatron_lite.config import plan
from megatron_lite.config.batch_plan import build_batch
from megatron_lite.config.files import format_yaml
from megatron_lite.config.pipeline_plan import SINGLE, schedule_name
from megatron_lite.config.schema import GROUPS, Config, flag_fields
from megatron_lite.config.sharding_plan import sharding_strategy

# They say how a command was given, not what runs.
LEFT_OUT = ("config_file", "print_config", "local_rank")


def resolved_values(config: Config, world_size: int) -> dict[str, Any]:
    """Return the fields of a checked config by destination, with defaults resolved."""
    values = {
        field.name: getattr(config, field.name)
        for _, group in GROUPS
        for field in flag_fields(group)
        if field.name not in LEFT_OUT
    }
    parallel = plan.build_parallel(config, world_size)
    batch = build_batch(config, parallel.dp)
    recompute = plan.recompute_kind(config)
    name = schedule_name(config)
    values |= {
        "position_embedding_type": plan.position_kind(config),
        "use_rotary_position_embeddings": False,
        "add_position_embedding": True,
        "kv_channels": plan.head_channels(config),
        "num_query_groups": plan.key_value_heads(config),
        "ffn_hidden_size": plan.ffn_size(config),
        "sequence_parallel": parallel.sequence_parallel,
        "global_batch_size": batch.ramp[-1][1],
        "eval_global_batch_size": batch.eval_global_batch_size,
        "calculate_per_token_loss": not config.legacy_loss_normalization,
        "recompute_granularity": None if recompute == "none" else recompute,
        "recompute_activations": False,
        "data_parallel_sharding_strategy": sharding_strategy(config),
        "dataloader_type": config.dataloader_type or "single",
        "pipeline_schedule": name if name != SINGLE else config.pipeline_schedule or "1f1b",
    }
    if config.nan_policy is None and config.check_for_nan_in_loss_and_grad:
        values["nan_policy"] = "stop"
    if (config.data_path or config.data_args_path) and config.split is None:
        values["split"] = "969, 30, 1"
    if config.train_samples is None:
        values["lr_decay_iters"] = config.lr_decay_iters or batch.train_iters or None
    else:
        values["lr_decay_samples"] = config.lr_decay_samples or config.train_samples
    return values


def resolved_yaml(config: Config, world_size: int) -> str:
    """Return the resolved configuration as YAML."""
    return format_yaml(resolved_values(config, world_size))
