"""Learning rate and weight decay as functions of consumed samples.

The unit is samples, not steps, so a ramped batch size changes nothing, and `num_steps`
(Megatron's name) advances only with a successful update. The rate of a step is a pure
function of `num_steps` before it: nothing accumulates, and a resume restores the one
number. State has Megatron's keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lite.config.batch_plan import BatchPlan
from megatron_lite.config.optimizer_rules import decoupled_min
from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError


@dataclass(frozen=True)
class ScheduleSettings:
    """Shape of both schedules; lengths are samples, field names Megatron's state keys.

    `init_lr`, `wsd_decay_style` and `wsd_decay_steps` are not part of the state, as there.
    """

    max_lr: float
    min_lr: float
    lr_warmup_steps: float  # a share of the decay length need not be whole
    lr_decay_steps: int
    lr_decay_style: str
    start_wd: float
    end_wd: float
    wd_incr_steps: int
    wd_incr_style: str
    init_lr: float = 0.0
    wsd_decay_style: str = "exponential"
    wsd_decay_steps: int = 0
    decoupled_max_lr: float | None = None
    decoupled_min_lr: float | None = None

    def decoupled(self) -> ScheduleSettings:
        """The schedule of embeddings and output layer: other rates, the same shape."""
        if self.decoupled_max_lr is None or self.decoupled_min_lr is None:
            return self
        return dataclasses.replace(
            self,
            max_lr=self.decoupled_max_lr,
            min_lr=self.decoupled_min_lr,
            decoupled_max_lr=None,
            decoupled_min_lr=None,
        )


# Which flags set a key of the state, for the message about an unequal one.
_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
    "lr_decay_steps": "--lr-decay-iters or --lr-decay-samples (unset: the length of training)",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--weight-decay or --start-weight-decay",
    "end_wd": "--weight-decay or --end-weight-decay",
    "wd_incr_steps": "--train-iters or --train-samples",
    "wd_incr_style": "--weight-decay-incr-style",
}
# Ours, in the state only where they are set.
_OWN_FLAGS = {
    "decoupled_max_lr": "--decoupled-lr",
    "decoupled_min_lr": "--decoupled-min-lr (unset: --min-lr)",
}


def learning_rate_at(settings: ScheduleSettings, num_steps: int) -> float:
    """Learning rate of the update that starts after `num_steps` samples."""
    n, warmup, decay = num_steps, settings.lr_warmup_steps, settings.lr_decay_steps
    low, high = settings.min_lr, settings.max_lr
    if warmup > 0 and n <= warmup:
        return settings.init_lr + (high - settings.init_lr) * n / warmup
    if settings.lr_decay_style == "constant":
        return high
    if n > decay:
        return low
    if settings.lr_decay_style == "inverse-square-root":
        return max(low, high * math.sqrt(max(warmup, 1)) / math.sqrt(max(n, 1)))
    return low + _decay_share(settings, n) * (high - low)


def _decay_share(settings: ScheduleSettings, n: int) -> float:
    """Share of max - min that is left after n samples, warm-up being over."""
    warmup, decay = settings.lr_warmup_steps, settings.lr_decay_steps
    if settings.lr_decay_style == "WSD":
        start = decay - settings.wsd_decay_steps
        if n <= start:
            return 1.0
        return _wsd_share(settings.wsd_decay_style, (n - start) / settings.wsd_decay_steps)
    passed = (n - warmup) / (decay - warmup)
    if settings.lr_decay_style == "linear":
        return 1.0 - passed
    if settings.lr_decay_style == "cosine":
        return (math.cos(math.pi * passed) + 1.0) / 2.0
    raise UserError(f"--lr-decay-style {settings.lr_decay_style} is not supported")


def _wsd_share(style: str, passed: float) -> float:
    if style == "linear":
        return 1.0 - passed
    if style == "cosine":
        return (math.cos(math.pi * passed) + 1.0) / 2.0
    if style == "exponential":
        return 2.0 * 0.5**passed - 1.0
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(passed)
    raise UserError(f"--lr-wsd-decay-style {style} is not supported")


def weight_decay_at(settings: ScheduleSettings, num_steps: int) -> float:
    """Weight decay of the update that starts after `num_steps` samples."""
    if settings.wd_incr_style == "constant" or num_steps > settings.wd_incr_steps:
        return settings.end_wd
    passed = num_steps / settings.wd_incr_steps
    if settings.wd_incr_style == "cosine":
        passed = (math.cos(math.pi * (1.0 - passed)) + 1.0) / 2.0
    elif settings.wd_incr_style != "linear":
        raise UserError(f"--weight-decay-incr-style {settings.wd_incr_style} is not supported")
    return settings.start_wd + passed * (settings.end_wd - settings.start_wd)


class RateSchedule:
    """The schedules of a run and how far they are."""

    def __init__(self, settings: ScheduleSettings) -> None:
        """Start at sample 0.

        Raises:
            UserError: lengths or rates contradict each other.
        """
        _check(settings)
        self.settings = settings
        self.num_steps = 0

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return learning_rate_at(self.settings, self.num_steps)

    @property
    def decoupled_learning_rate(self) -> float:
        """That of embeddings and output layer; `learning_rate` without `--decoupled-lr`."""
        return learning_rate_at(self.settings.decoupled(), self.num_steps)

    @property
    def weight_decay(self) -> float:
        """Weight decay of the next update."""
        return weight_decay_at(self.settings, self.num_steps)

    def advance(self, samples: int) -> None:
        """Count the global batch of a successful update; never called for a skipped one."""
        self.num_steps += samples

    def state_dict(self) -> dict[str, Any]:
        """Megatron's state of its scheduler, and the decoupled rates."""
        state = {key: getattr(self.settings, key) for key in (*_FLAGS, *_OWN_FLAGS)}
        given = {k: value for k, value in state.items() if k in _FLAGS or value is not None}
        return {**given, "num_steps": self.num_steps}

    def load_state_dict(
        self, state: Mapping[str, Any], *, override: bool = False, use_checkpoint: bool = False
    ) -> None:
        """Continue where `state` was taken: progress is set, not added.

        Args:
            state: of `state_dict`.
            override: keep this run's shape (`--override-opt_param-scheduler`).
            use_checkpoint: take the state's (`--use-checkpoint-opt_param-scheduler`).

        Raises:
            UserError: neither is given and the shapes differ, or both are given.
        """
        if override and use_checkpoint:
            raise UserError(
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler "
                "contradict each other: give one"
            )
        saved: dict[str, Any] = {key: state[key] for key in _FLAGS}
        saved |= {key: state.get(key) for key in _OWN_FLAGS}
        if use_checkpoint:
            settings = dataclasses.replace(self.settings, **saved)
            _check(settings)
            self.settings = settings
        elif not override:
            self._check_equal(saved)
        self.num_steps = int(state["num_steps"])

    def _check_equal(self, saved: Mapping[str, Any]) -> None:
        flags = {**_FLAGS, **_OWN_FLAGS}
        different = [key for key in flags if saved[key] != getattr(self.settings, key)]
        if not different:
            return
        lines = [
            f"  {key}: {saved[key]} in the checkpoint, {getattr(self.settings, key)} now"
            f" (set by {flags[key]})"
            for key in different
        ]
        raise UserError(
            "the schedules of this run differ from the checkpoint's:\n"
            + "\n".join(lines)
            + "\nrepeat the old flags, or give --override-opt_param-scheduler (this run's "
            "schedules) or --use-checkpoint-opt_param-scheduler (the checkpoint's)"
        )


def _check(settings: ScheduleSettings) -> None:
    problems = []
    if not 0.0 <= settings.min_lr <= settings.max_lr:
        problems.append(f"--min-lr {settings.min_lr} must be between 0 and --lr {settings.max_lr}")
    if settings.decoupled_max_lr is not None:
        low, high = settings.decoupled_min_lr, settings.decoupled_max_lr
        if low is None or not 0.0 <= low <= high:
            problems.append(f"--decoupled-min-lr {low} must be between 0 and --decoupled-lr {high}")
    if not settings.init_lr <= settings.max_lr:
        problems.append(f"--lr-warmup-init {settings.init_lr} exceeds --lr {settings.max_lr}")
    if settings.lr_decay_steps <= 0:
        problems.append(f"the learning rate decays over {settings.lr_decay_steps} samples")
    elif not 0 <= settings.lr_warmup_steps < settings.lr_decay_steps:
        problems.append(
            f"warm-up takes {settings.lr_warmup_steps} samples of the "
            f"{settings.lr_decay_steps} until --min-lr: it must be shorter"
        )
    if settings.lr_decay_style == "WSD" and not (
        0 < settings.wsd_decay_steps <= settings.lr_decay_steps
    ):
        problems.append(
            f"--lr-decay-style WSD needs --lr-wsd-decay-iters (or -samples) within the decay: "
            f"{settings.wsd_decay_steps} of {settings.lr_decay_steps} samples"
        )
    if not 0.0 <= settings.start_wd <= settings.end_wd:
        problems.append(
            f"weight decay goes from {settings.start_wd} to {settings.end_wd}: it cannot shrink"
        )
    if problems:
        raise UserError("; ".join(problems))


def build_schedule(config: Config, batch: BatchPlan) -> RateSchedule:
    """Both schedules of a run, iterations converted to the samples they consume.

    Args:
        config: accepted by the rules.
        batch: batch sizes; with a ramp, an early iteration counts for fewer samples.
    """
    if config.lr is None:
        raise UserError("--lr is required for training")
    if config.train_samples is not None:
        decay = config.lr_decay_samples or config.train_samples
        warmup: float = config.lr_warmup_samples
        wsd, length = config.lr_wsd_decay_samples or 0, config.train_samples
    else:
        decay_iters = config.lr_decay_iters or batch.train_iters
        decay = samples_after(batch, decay_iters)
        warmup = samples_after(batch, config.lr_warmup_iters)
        stable_iters = max(decay_iters - (config.lr_wsd_decay_iters or 0), 0)
        wsd = decay - samples_after(batch, stable_iters)
        length = samples_after(batch, batch.train_iters)
    if config.lr_warmup_fraction is not None:
        warmup = config.lr_warmup_fraction * decay
    constant = config.weight_decay_incr_style == "constant"
    start_wd = config.weight_decay if constant else config.start_weight_decay
    end_wd = config.weight_decay if constant else config.end_weight_decay
    if start_wd is None or end_wd is None:
        raise UserError(
            f"--weight-decay-incr-style {config.weight_decay_incr_style} needs "
            f"--start-weight-decay and --end-weight-decay"
        )
    return RateSchedule(
        ScheduleSettings(
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=decay,
            lr_decay_style=config.lr_decay_style,
            start_wd=start_wd,
            end_wd=end_wd,
            wd_incr_steps=length,
            wd_incr_style=config.weight_decay_incr_style,
            init_lr=config.lr_warmup_init,
            wsd_decay_style=config.lr_wsd_decay_style,
            wsd_decay_steps=wsd,
            decoupled_max_lr=config.decoupled_lr,
            decoupled_min_lr=None if config.decoupled_lr is None else decoupled_min(config),
        )
    )


def samples_after(batch: BatchPlan, iterations: int) -> int:
    """Samples that the first `iterations` steps consume: iterations x GBS without a ramp."""
    consumed, left = 0, iterations
    for index, (_, size) in enumerate(batch.ramp):
        last = index + 1 == len(batch.ramp)
        steps = left
        if not last:
            # A step that starts before the next entry still has this entry's size.
            until_next = batch.ramp[index + 1][0] - consumed
            steps = min(left, max(-(-until_next // size), 0))
        consumed += steps * size
        left -= steps
    return consumed
