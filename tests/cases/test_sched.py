"""Schedules on resume (SCHED): progress is restored once, for every shape and at every step."""

import json

import pytest

from megatron_lite.optim.schedule import RateSchedule
from tests.cases.conftest import Resumed
from tests.optim.test_schedule import settings

RATES = (
    "1.000000e-03 9.779754e-04 9.140576e-04 8.145034e-04 6.890576e-04 5.500000e-04 "
    "4.109424e-04 2.854966e-04 1.859424e-04 1.220246e-04"
)
SHAPES = [
    ("constant", {}),
    ("linear", {"init_lr": 1e-5}),
    ("cosine", {"lr_warmup_steps": 0}),
    ("inverse-square-root", {}),
    ("WSD", {"wsd_decay_steps": 30, "wsd_decay_style": "exponential"}),
    ("WSD", {"wsd_decay_steps": 30, "wsd_decay_style": "minus_sqrt"}),
    ("cosine", {"start_wd": 0.1, "end_wd": 0.3, "wd_incr_style": "linear"}),
    ("linear", {"start_wd": 0.1, "end_wd": 0.3, "wd_incr_style": "cosine"}),
]


@pytest.mark.parametrize("layout", ["tp2-sp", "dp2"])
def test_c036_an_interrupted_cosine_uses_the_known_rates(resumed: Resumed, layout: str) -> None:
    whole, rest = resumed(layout)
    assert [f"{row['learning_rate']:.6e}" for row in whole.rows] == RATES.split()
    assert [f"{row['learning_rate']:.6e}" for row in rest.rows] == RATES.split()[5:]


@pytest.mark.parametrize(("style", "changes"), SHAPES, ids=str)
def test_c036_every_shape_continues_where_it_stopped(
    style: str, changes: dict[str, object]
) -> None:
    def fresh() -> RateSchedule:
        return RateSchedule(settings(style, **changes))

    whole, expected, states = fresh(), [], []
    for _ in range(14):  # beyond the end of the decay
        states.append(json.dumps(whole.state_dict()))
        expected.append((whole.learning_rate, whole.weight_decay))
        whole.advance(8)
    assert len(set(expected)) > 1
    for stop, state in enumerate(states):
        continued = fresh()
        continued.load_state_dict(json.loads(state))
        for wanted in expected[stop:]:
            assert (continued.learning_rate, continued.weight_decay) == wanted
            continued.advance(8)
