"""The part of the configuration that decides what is reported, and where.

A frozen copy under the flags' destinations, so that sinks can be built and tested without
a whole `Config`. A field the configuration lacks keeps the default given here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class TelemetryOptions:
    """Reporting flags; names and defaults are Megatron's where Megatron has the flag."""

    log_interval: int = 100
    log_throughput: bool = False
    metrics_jsonl: str | None = None
    flops_convention: str = "full_square"
    tensorboard_dir: str | None = None
    tensorboard_log_interval: int = 1
    tensorboard_queue_size: int = 1000
    log_timers_to_tensorboard: bool = False
    log_memory_to_tensorboard: bool = False
    log_validation_ppl_to_tensorboard: bool = False
    log_loss_scale_to_tensorboard: bool = True
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_save_dir: str | None = None
    wandb_entity: str | None = None


def read_options(config: object) -> TelemetryOptions:
    """Copy the reporting flags out of a configuration with flat fields."""
    values = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(TelemetryOptions)
        if hasattr(config, field.name)
    }
    return TelemetryOptions(**values)
