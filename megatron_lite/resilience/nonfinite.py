"""What to do with a step whose loss or gradients are not finite: one pure decision.

It takes numbers that the closing reduction made equal on all ranks, so every rank takes
the same branch. fp16 always skips an overflow (the loss scaler then lowers its scale);
other precisions stop by default, because a NaN there is a fault and not a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

UPDATE = "update"
SKIP = "skip"
STOP = "stop"
ROLLBACK = "rollback"

POLICIES = (SKIP, STOP, ROLLBACK)


@dataclass(frozen=True)
class StepVerdict:
    """What every rank does with the step.

    Attributes:
        action: "update", "skip", "stop" or "rollback" (to the newest checkpoint).
        nan: whether the loss or a gradient was not finite.
        message: why, naming the step; empty for a clean update.
    """

    action: str
    nan: bool = False
    message: str = ""


def judge_step(
    *,
    step: int,
    nonfinite_gradients: int,
    loss_is_finite: bool,
    compute: str,
    policy: str | None = None,
    check: bool = True,
    loss_scale: float = 1.0,
    parameter: str | None = None,
) -> StepVerdict:
    """Decide about one step.

    Args:
        step: iteration, for the message.
        nonfinite_gradients: global count of non-finite gradient elements.
        loss_is_finite: of the global loss.
        compute: compute dtype; "float16" skips whatever the policy.
        policy: `--nan-policy`; None = stop.
        check: `check_for_nan_in_loss_and_grad`. Off and without a policy the update goes
            ahead with whatever the gradients are (never in fp16).
        loss_scale: for the message in fp16.
        parameter: the first parameter found, when a rank knows it.
    """
    if policy is not None and policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; legal: {', '.join(POLICIES)}")
    if nonfinite_gradients == 0 and loss_is_finite:
        return StepVerdict(UPDATE)
    what = _describe(nonfinite_gradients, loss_is_finite, parameter)
    if compute == "float16" and (nonfinite_gradients > 0 or policy is None):
        message = f"step {step} skipped: {what} (loss scale {loss_scale:g})"
        return StepVerdict(SKIP, True, message)
    if policy == SKIP:
        return StepVerdict(SKIP, True, f"step {step} skipped: {what} (--nan-policy skip)")
    if policy == ROLLBACK:
        message = f"step {step} rolled back to the newest checkpoint: {what}"
        return StepVerdict(ROLLBACK, True, message)
    if policy is None and not check:
        message = f"step {step}: {what}; updated all the same, the check is switched off"
        return StepVerdict(UPDATE, True, message)
    message = (
        f"step {step} stopped before the update: {what}; the weights are those of step "
        f"{step - 1}. --nan-policy skip would leave such steps out"
    )
    return StepVerdict(STOP, True, message)


def _describe(nonfinite_gradients: int, loss_is_finite: bool, parameter: str | None) -> str:
    parts = []
    if not loss_is_finite:
        parts.append("the loss is not finite")
    if nonfinite_gradients > 0:
        where = f", first in {parameter}" if parameter is not None else ""
        noun = "element is" if nonfinite_gradients == 1 else "elements are"
        parts.append(f"{nonfinite_gradients} gradient {noun} not finite{where}")
    return " and ".join(parts)
