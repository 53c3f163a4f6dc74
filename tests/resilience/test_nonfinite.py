"""The non-finite decision: fp16 skips, others stop, policies are honoured, steps are named."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.resilience.nonfinite import judge_step


def verdict(**changes: Any) -> tuple[str, bool]:
    values: dict[str, Any] = {
        "step": 7,
        "nonfinite_gradients": 3,
        "loss_is_finite": True,
        "compute": "bfloat16",
    }
    result = judge_step(**{**values, **changes})
    return result.action, result.nan


def test_a_finite_step_is_updated_silently() -> None:
    result = judge_step(step=7, nonfinite_gradients=0, loss_is_finite=True, compute="float16")
    assert (result.action, result.nan, result.message) == ("update", False, "")


@pytest.mark.parametrize("compute", ["bfloat16", "float32", "float64"])
def test_other_precisions_stop_by_default(compute: str) -> None:
    assert verdict(compute=compute) == ("stop", True)
    assert verdict(compute=compute, nonfinite_gradients=0, loss_is_finite=False) == ("stop", True)


@pytest.mark.parametrize("policy", [None, "skip", "stop", "rollback"])
@pytest.mark.parametrize("check", [True, False])
def test_fp16_always_skips_an_overflow(policy: str | None, check: bool) -> None:
    assert verdict(compute="float16", policy=policy, check=check) == ("skip", True)


@pytest.mark.parametrize("policy", ["skip", "stop", "rollback"])
@pytest.mark.parametrize("check", [True, False])
def test_a_given_policy_is_followed(policy: str, check: bool) -> None:
    assert verdict(policy=policy, check=check) == (policy, True)


def test_the_switched_off_check_updates_but_still_says_so() -> None:
    result = judge_step(
        step=7, nonfinite_gradients=1, loss_is_finite=True, compute="float32", check=False
    )
    assert (result.action, result.nan) == ("update", True)
    assert "1 gradient element is not finite" in result.message


def test_the_message_names_step_count_and_parameter() -> None:
    result = judge_step(
        step=7,
        nonfinite_gradients=3,
        loss_is_finite=False,
        compute="float32",
        parameter="decoder.layers.2.mlp.linear_fc2.weight",
    )
    assert result.message == (
        "step 7 stopped before the update: the loss is not finite and 3 gradient elements are "
        "not finite, first in decoder.layers.2.mlp.linear_fc2.weight; the weights are those of "
        "step 6. --nan-policy skip would leave such steps out"
    )


def test_a_skip_in_fp16_names_the_loss_scale() -> None:
    result = judge_step(
        step=7,
        nonfinite_gradients=3,
        loss_is_finite=True,
        compute="float16",
        loss_scale=65536.0,
    )
    assert result.message == (
        "step 7 skipped: 3 gradient elements are not finite (loss scale 65536)"
    )


def test_an_unknown_policy_is_a_defect() -> None:
    with pytest.raises(ValueError, match="skip, stop, rollback"):
        verdict(policy="ignore")
