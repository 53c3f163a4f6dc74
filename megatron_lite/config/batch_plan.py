"""The global batch by consumed samples, and lengths in steps.

The batch at a point of the run depends only on the consumed samples, never on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.ramp import Ramp, count_train_iters, linear_ramp, schedule_ramp
from megatron_lite.config.schema import Config, required


@dataclass(frozen=True)
class BatchPlan:
    """Global batch by consumed samples, and lengths in steps.

    Args:
        ramp: (first consumed sample, global batch size) in ascending order; the first
            entry starts at 0.
        train_iters: steps of the run.
        eval_interval: steps between evaluations; 0 means only after training.
    """

    micro_batch_size: int
    dp_size: int
    seq_length: int
    ramp: Ramp
    train_iters: int
    eval_iters: int
    eval_interval: int
    eval_global_batch_size: int

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Return the samples of the step that starts after `consumed_samples`."""
        size = self.ramp[0][1]
        for first_sample, batch_size in self.ramp:
            if consumed_samples >= first_sample:
                size = batch_size
        return size

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Return the microbatches of one data-parallel rank in that step."""
        return self.global_batch_size_at(consumed_samples) // (self.micro_batch_size * self.dp_size)


def build_ramp(config: Config, dp: int) -> Ramp:
    """Return the global batch sizes of the run by consumed samples."""
    final = config.global_batch_size or required(config.micro_batch_size) * dp
    if config.step_batch_size_schedule is not None:
        return schedule_ramp(config.step_batch_size_schedule, required(config.seq_length))
    if config.rampup_batch_size is not None:
        start, increment, samples = config.rampup_batch_size
        return linear_ramp(start, increment, samples, final)
    return ((0, final),)


def build_batch(config: Config, dp: int) -> BatchPlan:
    """Resolve batch sizes and lengths."""
    ramp = build_ramp(config, dp)
    train_iters = config.train_iters
    if train_iters is None:
        train_iters = count_train_iters(ramp, required(config.train_samples))
    return BatchPlan(
        micro_batch_size=required(config.micro_batch_size),
        dp_size=dp,
        seq_length=required(config.seq_length),
        ramp=ramp,
        train_iters=train_iters,
        eval_iters=config.eval_iters,
        eval_interval=config.eval_interval or 0,
        eval_global_batch_size=config.eval_global_batch_size or ramp[-1][1],
    )
