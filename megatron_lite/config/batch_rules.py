"""Rules of batch sizes, run length, learning-rate and weight-decay schedules."""

from __future__ import annotations

from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.legal import nearest_divisors, nearest_multiples
from megatron_lite.config.model_rules import above_zero_rule, at_least_rule, fraction_rule
from megatron_lite.config.ramp import parse_batch_schedule

GBS = "--global-batch-size"
SCHEDULE = "--step-batch-size-schedule"
LONGEST_RAMP = 2**16
BY_STEPS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
BY_SAMPLES = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")


def flag_list(f: Facts, fields: tuple[str, ...]) -> str:
    """Name the set ones of these fields with their values."""
    given = [name for name in fields if getattr(f.config, name)]
    return ", ".join(f"--{name.replace('_', '-')} {getattr(f.config, name)}" for name in given)


def unit_text(f: Facts) -> str:
    """Explain the smallest global batch."""
    if f.dp == 0:  # told by a rule of its own
        return f"--micro-batch-size {f.config.micro_batch_size}, whatever the data parallel size"
    return (
        f"--micro-batch-size {f.config.micro_batch_size} x data parallel size {f.dp} = "
        f"{f.batch_unit}"
    )


def batch_message(f: Facts) -> str:
    """Tell which batch sizes fit."""
    size, mbs = f.number("global_batch_size"), f.number("micro_batch_size")
    near = f"{GBS} {nearest_multiples(f.batch_unit, size)}"
    if size % f.least_dp == 0:
        near += f", --micro-batch-size {nearest_divisors(size // f.least_dp, mbs)}"
    return f"{GBS} {size} must be a multiple of {unit_text(f)}; nearest legal: {near}"


def eval_message(f: Facts) -> str:
    """Tell which evaluation batch sizes fit."""
    size = f.number("eval_global_batch_size")
    return (
        f"--eval-global-batch-size {size} must be a multiple of {unit_text(f)}; nearest legal: "
        f"{nearest_multiples(f.batch_unit, size)}"
    )


def ramp_fault(f: Facts) -> str:
    """Say what is wrong with --rampup-batch-size, or ''."""
    ramp, final = f.config.rampup_batch_size, f.config.global_batch_size
    if ramp is None:
        return ""
    start, increment, samples = ramp
    if start < 1 or increment < 1 or samples < 0:
        return "START and INCREMENT must be at least 1 and SAMPLES at least 0"
    if final is None:
        return f"{GBS}, where the ramp ends, is required"
    if start > final or (final - start) % increment:
        return (
            f"START plus whole INCREMENTs must reach {GBS} {final}; nearest legal: START "
            f"{max(1, final - final // increment * increment) or increment}, INCREMENT "
            f"{nearest_divisors(max(1, final - start), increment)}"
        )
    if f.batch_unit and (start % f.batch_unit or (increment % f.batch_unit and start != final)):
        return (
            f"every size must be a multiple of {unit_text(f)}; nearest legal: START "
            f"{nearest_multiples(f.batch_unit, start)}, INCREMENT "
            f"{nearest_multiples(f.batch_unit, increment)}"
        )
    if (final - start) // increment > LONGEST_RAMP:
        return (
            f"{(final - start) // increment} increments, but at most {LONGEST_RAMP} are legal: "
            "give a larger INCREMENT"
        )
    return ""


def schedule_fault(f: Facts) -> str:
    """Say what is wrong with --step-batch-size-schedule, or ''."""
    text = f.config.step_batch_size_schedule
    if text is None:
        return ""
    try:
        stages = parse_batch_schedule(text)
    except ValueError as fault:
        return str(fault)
    unfit = [size for _, size in stages if f.batch_unit and size % f.batch_unit]
    if unfit:
        near = ", ".join(f"{s} -> {nearest_multiples(f.batch_unit, s)}" for s in unfit)
        return f"every size must be a multiple of {unit_text(f)}; nearest legal: {near}"
    final = f.config.global_batch_size
    if final is not None and final != stages[-1][1]:
        return f"it ends at {stages[-1][1]} samples, but {GBS} is {final}: leave out {GBS}"
    return ""


def length_message(f: Facts) -> str:
    """Tell that exactly one length is needed."""
    if f.config.train_iters is None and f.config.train_samples is None:
        return "one of --train-iters and --train-samples is required"
    return (
        f"--train-iters {f.config.train_iters} and --train-samples {f.config.train_samples} both "
        "give the length of the run: give one"
    )


def first_batch(f: Facts) -> int:
    """Return the global batch size of the first step; 0 where it is unknown or illegal."""
    if f.config.rampup_batch_size is not None:
        return max(f.config.rampup_batch_size[0], 0)
    if f.config.step_batch_size_schedule is not None:
        try:
            return parse_batch_schedule(f.config.step_batch_size_schedule)[0][1]
        except ValueError:
            return 0
    return f.number("global_batch_size") if f.has("global_batch_size") else f.batch_unit


def decay_length(f: Facts) -> tuple[int | None, int, str]:
    """Return (decay length, warm-up, unit) in the unit of the run."""
    c = f.config
    if c.train_samples is not None:
        return c.lr_decay_samples or c.train_samples, c.lr_warmup_samples, "samples"
    return c.lr_decay_iters or c.train_iters, c.lr_warmup_iters, "iters"


def warmup_broken(f: Facts) -> bool:
    """The warm-up must end before the decay does."""
    decay, warmup, _ = decay_length(f)
    return decay is not None and decay > 0 and warmup > decay


def warmup_message(f: Facts) -> str:
    """Tell both lengths."""
    decay, warmup, unit = decay_length(f)
    return (
        f"--lr-warmup-{unit} {warmup} is longer than the decay of {decay} {unit} "
        f"(--lr-decay-{unit}, by default --train-{unit}); nearest legal: --lr-warmup-{unit} {decay}"
    )


def wsd_fault(f: Facts) -> str:
    """Say what is wrong with the WSD decay, or ''."""
    if f.config.lr_decay_style != "WSD":
        return ""
    decay, _, unit = decay_length(f)
    length = getattr(f.config, f"lr_wsd_decay_{unit}")
    if length is None or length < 1:
        return f"--lr-decay-style WSD needs --lr-wsd-decay-{unit} of at least 1"
    if decay is not None and length > decay:
        return (
            f"--lr-wsd-decay-{unit} {length} is longer than the whole decay of {decay} {unit}; "
            f"nearest legal: {decay}"
        )
    return ""


def weight_decay_fault(f: Facts) -> str:
    """Say what is wrong with the weight-decay increase, or ''."""
    c = f.config
    start, end, style = c.start_weight_decay, c.end_weight_decay, c.weight_decay_incr_style
    if style == "constant":
        if start is not None or end is not None:
            return (
                "--start-weight-decay and --end-weight-decay belong to --weight-decay-incr-style "
                "linear or cosine; with constant give --weight-decay"
            )
        return ""
    if start is None or end is None:
        return (
            f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay"
        )
    if not 0 <= start <= end:
        return f"--start-weight-decay {start} must lie between 0 and --end-weight-decay {end}"
    return ""


def min_lr_message(f: Facts) -> str:
    """Tell both rates."""
    return f"--min-lr {f.config.min_lr} exceeds --lr {f.config.lr}; nearest legal: {f.config.lr}"


BATCH_RULES: tuple[Rule, ...] = (
    *(
        at_least_rule(field, 1)
        for field in (
            "global_batch_size",
            "eval_global_batch_size",
            "train_samples",
            "lr_decay_iters",
            "lr_decay_samples",
        )
    ),
    *(
        at_least_rule(field, 0)
        for field in (
            "train_iters",
            "eval_iters",
            "eval_interval",
            "lr_warmup_iters",
            "lr_warmup_samples",
            "lr",
            "min_lr",
            "lr_warmup_init",
            "weight_decay",
            "clip_grad",
        )
    ),
    above_zero_rule("adam_eps"),
    fraction_rule("adam_beta1"),
    fraction_rule("adam_beta2"),
    fraction_rule("sgd_momentum"),
    fraction_rule("lr_warmup_fraction", one_allowed=True),
    Rule(
        "batch-divides",
        lambda f: (
            f.has("global_batch_size")
            and f.batch_unit > 0
            and f.number("global_batch_size") % f.batch_unit != 0
        ),
        batch_message,
    ),
    Rule(
        "eval-batch-divides",
        lambda f: (
            f.has("eval_global_batch_size")
            and f.batch_unit > 0
            and f.number("eval_global_batch_size") % f.batch_unit != 0
        ),
        eval_message,
    ),
    Rule(
        "rampup",
        lambda f: bool(ramp_fault(f)),
        lambda f: (
            f"--rampup-batch-size {' '.join(map(str, f.config.rampup_batch_size or ()))}: "
            f"{ramp_fault(f)}"
        ),
    ),
    Rule(
        "batch-schedule",
        lambda f: bool(schedule_fault(f)),
        lambda f: f"{SCHEDULE} '{f.config.step_batch_size_schedule}': {schedule_fault(f)}",
    ),
    Rule(
        "one-batch-schedule",
        lambda f: (
            f.config.rampup_batch_size is not None and f.config.step_batch_size_schedule is not None
        ),
        lambda f: f"--rampup-batch-size and {SCHEDULE} both set the batch by progress: give one",
    ),
    Rule(
        "one-length",
        lambda f: (f.config.train_iters is None) == (f.config.train_samples is None),
        length_message,
    ),
    Rule(
        "samples-of-a-step",
        lambda f: f.has("train_samples") and f.number("train_samples") < first_batch(f),
        lambda f: (
            f"--train-samples {f.config.train_samples} is less than the first step takes "
            f"({first_batch(f)} samples): nothing would be trained; nearest legal: {first_batch(f)}"
        ),
    ),
    Rule(
        "lr-required",
        lambda f: f.config.lr is None and f.config.train_iters != 0,
        lambda f: "--lr is required",
    ),
    Rule(
        "min-lr",
        lambda f: f.config.lr is not None and 0 <= f.config.lr < f.config.min_lr,
        min_lr_message,
    ),
    Rule(
        "warmup-init",
        lambda f: f.config.lr is not None and 0 <= f.config.lr < f.config.lr_warmup_init,
        lambda f: (
            f"--lr-warmup-init {f.config.lr_warmup_init} exceeds --lr {f.config.lr}; nearest "
            f"legal: {f.config.lr}"
        ),
    ),
    Rule("warmup-in-decay", warmup_broken, warmup_message),
    Rule(
        "warmup-once",
        lambda f: (
            f.config.lr_warmup_fraction is not None
            and bool(f.config.lr_warmup_iters or f.config.lr_warmup_samples)
        ),
        lambda f: (
            f"--lr-warmup-fraction {f.config.lr_warmup_fraction} and "
            f"{flag_list(f, ('lr_warmup_iters', 'lr_warmup_samples'))} both set the warm-up"
        ),
    ),
    Rule(
        "schedule-unit-steps",
        lambda f: f.config.train_iters is not None and bool(flag_list(f, BY_SAMPLES)),
        lambda f: (
            f"{flag_list(f, BY_SAMPLES)}: the run is given in steps (--train-iters "
            f"{f.config.train_iters}), so schedules are too; use the -iters flags"
        ),
    ),
    Rule(
        "schedule-unit-samples",
        lambda f: f.config.train_samples is not None and bool(flag_list(f, BY_STEPS)),
        lambda f: (
            f"{flag_list(f, BY_STEPS)}: the run is given in samples (--train-samples "
            f"{f.config.train_samples}), so schedules are too; use the -samples flags"
        ),
    ),
    Rule("wsd", lambda f: bool(wsd_fault(f)), wsd_fault),
    Rule("weight-decay-increase", lambda f: bool(weight_decay_fault(f)), weight_decay_fault),
    Rule(
        "one-scheduler-source",
        lambda f: (
            f.config.override_opt_param_scheduler and f.config.use_checkpoint_opt_param_scheduler
        ),
        lambda f: (
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict "
            "each other: give one"
        ),
    ),
)
