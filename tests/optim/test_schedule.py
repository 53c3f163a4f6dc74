"""Learning rate and weight decay schedules: golden values and resumption."""

import json

import pytest

from megatron_lite.config.batch_plan import BatchPlan
from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError
from megatron_lite.optim.schedule import (
    RateSchedule,
    ScheduleSettings,
    build_schedule,
    learning_rate_at,
    samples_after,
    weight_decay_at,
)

# C036: cosine 1e-3 -> 1e-4 over 10 iterations, no warm-up.
C036_RATES = [
    1.000000e-03, 9.779754e-04, 9.140576e-04, 8.145034e-04, 6.890576e-04,
    5.500000e-04, 4.109424e-04, 2.854966e-04, 1.859424e-04, 1.220246e-04,
]  # fmt: skip


def settings(style: str, **changes: object) -> ScheduleSettings:
    values: dict[str, object] = {
        "max_lr": 1e-3,
        "min_lr": 1e-4,
        "lr_warmup_steps": 10,
        "lr_decay_steps": 100,
        "lr_decay_style": style,
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": 100,
        "wd_incr_style": "constant",
    }
    return ScheduleSettings(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("style", "changes", "golden"),
    [
        ("linear", {}, {5: 5e-4, 15: 9.5e-4, 25: 8.5e-4, 75: 3.5e-4, 95: 1.5e-4}),
        (
            "cosine",
            {},
            {5: 5e-4, 15: 9.93163e-4, 25: 9.39711e-4, 75: 2.60746e-4, 95: 1.06837e-4},
        ),
        (
            "WSD",
            {"wsd_decay_steps": 30, "wsd_decay_style": "exponential"},
            {70: 1e-3, 75: 8.03618e-4, 85: 4.72792e-4, 95: 2.10216e-4},
        ),
        ("WSD", {"wsd_decay_steps": 30, "wsd_decay_style": "minus_sqrt"}, {75: 6.32577e-4}),
        ("WSD", {"wsd_decay_steps": 30, "wsd_decay_style": "linear"}, {85: 5.5e-4}),
        ("WSD", {"wsd_decay_steps": 30, "wsd_decay_style": "cosine"}, {85: 5.5e-4}),
        ("constant", {}, {5: 5e-4, 10: 1e-3, 1000: 1e-3}),
        ("inverse-square-root", {}, {5: 5e-4, 10: 1e-3, 40: 5e-4, 100: 10**-3.5, 101: 1e-4}),
        ("linear", {"init_lr": 2e-4}, {0: 2e-4, 5: 6e-4, 10: 1e-3, 100: 1e-4, 101: 1e-4}),
    ],
)
def test_learning_rates_equal_the_goldens(
    style: str, changes: dict[str, object], golden: dict[int, float]
) -> None:
    shape = settings(style, **changes)
    for samples, rate in golden.items():
        assert learning_rate_at(shape, samples) == pytest.approx(rate, rel=1e-5), samples


@pytest.mark.parametrize(
    ("style", "golden"),
    [
        ("constant", {0: 0.3, 50: 0.3, 200: 0.3}),
        ("linear", {0: 0.1, 50: 0.2, 75: 0.25, 100: 0.3, 101: 0.3}),
        ("cosine", {0: 0.1, 50: 0.2, 25: 0.12928932, 100: 0.3, 101: 0.3}),
    ],
)
def test_weight_decay_increases_over_training(style: str, golden: dict[int, float]) -> None:
    shape = settings("linear", start_wd=0.1, end_wd=0.3, wd_incr_style=style)
    for samples, decay in golden.items():
        assert weight_decay_at(shape, samples) == pytest.approx(decay, rel=1e-6), samples


def cosine_run() -> RateSchedule:
    # Global batch 8, 10 iterations.
    return RateSchedule(settings("cosine", lr_warmup_steps=0, lr_decay_steps=80, wd_incr_steps=80))


def test_c036_resuming_does_not_advance_the_schedule_twice() -> None:
    whole = cosine_run()
    rates = []
    for _ in range(10):
        rates.append(whole.learning_rate)
        whole.advance(8)
    assert rates == pytest.approx(C036_RATES, rel=1e-6)

    first, resumed_rates = cosine_run(), []
    for _ in range(5):
        resumed_rates.append(first.learning_rate)
        first.advance(8)
    second = cosine_run()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.load_state_dict(first.state_dict())  # loading twice is loading once
    for _ in range(5):
        resumed_rates.append(second.learning_rate)
        second.advance(8)
    assert resumed_rates == rates


def test_a_skipped_update_repeats_its_rate() -> None:
    schedule = cosine_run()
    schedule.advance(8)
    rate = schedule.learning_rate
    assert schedule.learning_rate == rate
    schedule.advance(8)
    assert schedule.learning_rate < rate


def test_state_has_megatrons_keys() -> None:
    assert set(cosine_run().state_dict()) == {
        "max_lr", "lr_warmup_steps", "num_steps", "lr_decay_style", "lr_decay_steps", "min_lr",
        "start_wd", "end_wd", "wd_incr_style", "wd_incr_steps",
    }  # fmt: skip


def test_loading_another_schedule_names_every_difference() -> None:
    saved = cosine_run()
    saved.advance(40)
    now = RateSchedule(settings("linear", lr_warmup_steps=0, lr_decay_steps=80))
    with pytest.raises(UserError) as error:
        now.load_state_dict(saved.state_dict())
    message = str(error.value)
    assert "lr_decay_style: cosine in the checkpoint, linear now" in message
    assert "wd_incr_steps: 80 in the checkpoint, 100 now" in message
    assert "--lr-decay-style" in message and "--train-iters" in message
    assert "max_lr" not in message
    assert now.num_steps == 0


def test_override_keeps_this_runs_shape_and_the_saved_progress() -> None:
    saved = cosine_run()
    saved.advance(40)
    now = RateSchedule(settings("linear", lr_warmup_steps=0, lr_decay_steps=80))
    now.load_state_dict(saved.state_dict(), override=True)
    assert (now.settings.lr_decay_style, now.num_steps) == ("linear", 40)


def test_use_checkpoint_takes_the_saved_shape() -> None:
    saved = cosine_run()
    saved.advance(40)
    now = RateSchedule(settings("linear"))
    now.load_state_dict(saved.state_dict(), use_checkpoint=True)
    assert now.learning_rate == saved.learning_rate == pytest.approx(5.5e-4)
    with pytest.raises(UserError, match="contradict"):
        now.load_state_dict(saved.state_dict(), use_checkpoint=True, override=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_lr": 1.0}, "--min-lr"),
        ({"lr_warmup_steps": 100}, "warm-up takes 100 samples"),
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters"),
        ({"start_wd": 0.2}, "cannot shrink"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RateSchedule(settings("linear", **changes))


def batch_plan(ramp: tuple[tuple[int, int], ...] = ((0, 8),)) -> BatchPlan:
    return BatchPlan(
        micro_batch_size=1, dp_size=1, seq_length=8, ramp=ramp, train_iters=10,
        eval_iters=1, eval_interval=0, eval_global_batch_size=8,
    )  # fmt: skip


def test_iterations_count_as_the_samples_they_consume() -> None:
    ramp = batch_plan(((0, 2), (5, 4), (16, 8)))
    # Steps start at 0, 2, 4 (size 2), 6, 10, 14 (size 4), 18, ... (size 8).
    assert [samples_after(ramp, n) for n in range(8)] == [0, 2, 4, 6, 10, 14, 18, 26]
    assert samples_after(batch_plan(), 7) == 56


def test_build_schedule_converts_iterations_and_fractions_to_samples() -> None:
    config = Config(lr=1e-3, train_iters=10, lr_warmup_iters=2, lr_decay_style="cosine")
    built = build_schedule(config, batch_plan()).settings
    assert (built.lr_warmup_steps, built.lr_decay_steps, built.wd_incr_steps) == (16, 80, 80)
    config = Config(lr=1e-3, train_samples=70, lr_warmup_fraction=0.1, lr_decay_samples=50)
    built = build_schedule(config, batch_plan()).settings
    assert (built.lr_warmup_steps, built.lr_decay_steps, built.wd_incr_steps) == (5.0, 50, 70)
    config = Config(lr=1e-3, train_iters=10, lr_decay_style="WSD", lr_wsd_decay_iters=3)
    assert build_schedule(config, batch_plan()).settings.wsd_decay_steps == 24


def test_an_increasing_weight_decay_needs_both_ends() -> None:
    config = Config(lr=1e-3, train_iters=10, weight_decay_incr_style="linear")
    with pytest.raises(UserError, match="--start-weight-decay"):
        build_schedule(config, batch_plan())


def test_decoupled_rates_follow_the_same_shape_between_their_own_bounds() -> None:
    shape = settings("cosine", decoupled_max_lr=4e-3, decoupled_min_lr=1e-3)
    schedule = RateSchedule(shape)
    for samples in (0, 5, 10, 40, 100, 101):
        schedule.num_steps = samples
        assert schedule.learning_rate == learning_rate_at(shape, samples)
        own = settings("cosine", max_lr=4e-3, min_lr=1e-3)
        assert schedule.decoupled_learning_rate == learning_rate_at(own, samples)
    assert schedule.decoupled_learning_rate == 1e-3 != schedule.learning_rate


def test_without_decoupled_lr_there_is_one_rate() -> None:
    schedule = RateSchedule(settings("linear"))
    for samples in (0, 25, 101):
        schedule.num_steps = samples
        assert schedule.decoupled_learning_rate == schedule.learning_rate


def test_decoupled_flags_reach_the_schedule_and_min_lr_stands_in() -> None:
    config = Config(lr=1e-3, min_lr=1e-4, train_iters=10, decoupled_lr=5e-3)
    built = build_schedule(config, batch_plan()).settings
    assert (built.decoupled_max_lr, built.decoupled_min_lr) == (5e-3, 1e-4)
    config = Config(lr=1e-3, train_iters=10, decoupled_lr=5e-3, decoupled_min_lr=2e-3)
    assert build_schedule(config, batch_plan()).settings.decoupled_min_lr == 2e-3
    with pytest.raises(UserError, match=r"--decoupled-min-lr 0\.2 must be between 0 and"):
        RateSchedule(settings("linear", decoupled_max_lr=0.1, decoupled_min_lr=0.2))


def test_changed_decoupled_rates_are_refused_overridden_or_taken() -> None:
    state = RateSchedule(settings("linear", decoupled_max_lr=4e-3, decoupled_min_lr=0.0))
    saved = json.loads(json.dumps(state.state_dict() | {"num_steps": 7}))
    with pytest.raises(UserError, match=r"decoupled_max_lr: 0\.004 in .* by --decoupled-lr\)"):
        RateSchedule(settings("linear")).load_state_dict(saved)
    kept = RateSchedule(settings("linear"))
    kept.load_state_dict(saved, override=True)
    assert (kept.settings.decoupled_max_lr, kept.num_steps) == (None, 7)
    taken = RateSchedule(settings("linear"))
    taken.load_state_dict(saved, use_checkpoint=True)
    assert (taken.settings.decoupled_max_lr, taken.num_steps) == (4e-3, 7)


def test_a_state_without_decoupled_rates_had_none() -> None:
    saved = RateSchedule(settings("linear")).state_dict()
    assert not [key for key in saved if key.startswith("decoupled")]
    RateSchedule(settings("linear")).load_state_dict(saved)
    other = RateSchedule(settings("linear", decoupled_max_lr=4e-3, decoupled_min_lr=0.0))
    with pytest.raises(UserError, match="decoupled_max_lr: None in the checkpoint"):
        other.load_state_dict(saved)
