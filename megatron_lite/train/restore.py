"""How a run continues from a checkpoint.

Tensors are logical pieces: NAME for a weight in the compute dtype, optim/{kind}/NAME for
masters and optimizer state. Beside them lies a closed JSON object: counters, schedules and
the facts that must not change unnoticed. Loading is all or nothing: everything is read and
compared before anything of the run is touched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.catalog import NoCheckpoint
from megatron_lite.checkpoint.commit import TRACKER_FILE
from megatron_lite.checkpoint.load import load_newest
from megatron_lite.checkpoint.reader import Checkpoint
from megatron_lite.checkpoint.state import check_state, is_converted
from megatron_lite.errors import UserError
from megatron_lite.shard.pieces import StatePiece
from megatron_lite.train.parts import Core
from megatron_lite.train.state import TrainState

TOLD_CHANGES = ("clip_grad", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum")


def entry_name(piece: StatePiece) -> str:
    """Checkpoint name of a piece of state."""
    name = piece.spec.name
    return name if piece.kind == "param" else f"optim/{piece.kind}/{name}"


def plain_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON gives back of a value, so that saved and present ones compare equal."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain


@dataclass(frozen=True)
class Restored:
    """Where a run starts.

    Attributes:
        state: counters.
        notes: lines to tell.
        loaded: whether weights were loaded.
        passed_over: steps of `--load` that are damaged, which this run may replace.
    """

    state: TrainState
    notes: tuple[str, ...] = ()
    loaded: bool = False
    passed_over: tuple[int, ...] = ()


def load_run(core: Core) -> Restored | None:
    """Continue from `--load`; None with nothing to load means initial values.

    Raises:
        UserError: no checkpoint (and none is no option), or it does not fit this run.
        DamagedError: there are checkpoints, but none verifies.

    Comm: two exchanges of a few hundred bytes per rank for each checkpoint tried.
    """
    config = core.config
    if config.load is None:
        return None
    try:
        loaded = load_newest(
            config.load,
            core.groups.world,
            lambda checkpoint: _read(core, checkpoint),
            step=config.ckpt_step,
        )
    except NoCheckpoint as error:
        return Restored(TrainState(), (_accept_nothing(core, error),))
    notes = [f"warning: step {item.step} passed over: {item.reason}" for item in loaded.passed_over]
    state = _apply(core, loaded.checkpoint, loaded.value)
    step = loaded.checkpoint.step
    notes += _changed_settings(core, loaded.checkpoint)
    if is_converted(loaded.checkpoint.state):
        source = loaded.checkpoint.state["origin"]["source"]
        notes.append(f"note: converted from {source}: weights only, this run starts at step 0")
    notes.append(f"  successfully loaded checkpoint from {config.load} at iteration {step}")
    passed_over = tuple(item.step for item in loaded.passed_over)
    return Restored(state, tuple(notes), loaded=True, passed_over=passed_over)


def _takes_weights_only(core: Core, checkpoint: Checkpoint) -> bool:
    config = core.config
    return config.finetune or config.no_load_optim or is_converted(checkpoint.state)


def _starts_anew(core: Core, checkpoint: Checkpoint) -> bool:
    """Whether counters and schedules start at 0 with what is loaded."""
    return core.config.finetune or is_converted(checkpoint.state)


def _accept_nothing(core: Core, error: NoCheckpoint) -> str:
    """Say in one line that there is nothing to load, or refuse."""
    config = core.config
    assert config.load is not None
    foreign = (Path(config.load) / TRACKER_FILE).exists()
    is_first = config.load == config.save and config.ckpt_step is None and not foreign
    if is_first and not config.exit_on_missing_checkpoint:
        return f"--load {config.load} is empty: this is a fresh start"
    if config.allow_missing_checkpoint:
        return f"warning: {error}; starting from initial weights"
    raise UserError(
        f"--load: {error} (--allow-missing-checkpoint starts from initial weights instead)"
    ) from error


def _read(core: Core, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Compare names and facts, then read this rank's boxes into new tensors."""
    check_state(checkpoint.state, checkpoint.directory)
    weights_only = _takes_weights_only(core, checkpoint)
    expected = _expected(core, weights_only)
    allow = set(core.config.ckpt_allow)
    if weights_only:
        # The optimizer state of the checkpoint stays where it is.
        extra = [n for n in checkpoint.names if n.startswith("optim/") and n not in expected]
        expected |= {name: (checkpoint.dtype(name), checkpoint.shape(name)) for name in extra}
        allow |= {"dtype"}
    if not core.config.finetune:
        # Before the names: one changed number explains a difference in every tensor.
        _check_facts(core, checkpoint)
    difference = checkpoint.check_names(expected, allow)
    left = {*difference.missing, *difference.shape}
    return {
        name: checkpoint.read(name, piece.box.offset, piece.box.shape)
        for name, piece in _pieces_by_name(core).items()
        if name not in left and (piece.kind == "param" or not weights_only)
    }


def _pieces_by_name(core: Core) -> dict[str, StatePiece]:
    return {entry_name(piece): piece for piece in core.optimizer.state_pieces()}


def _expected(
    core: Core, weights_only: bool
) -> dict[str, tuple[torch.dtype | str, tuple[int, ...]]]:
    """Every tensor that the run wants to load, over all ranks: from the specs alone."""
    precision, optimizer = core.plan.precision, core.optimizer
    kinds = {"": precision.compute}
    if not weights_only:
        if optimizer.masters:
            kinds["optim/master/"] = precision.master
        kinds |= {f"optim/{kind}/": precision.master for kind in optimizer.state}
    return {
        f"{prefix}{spec.name}": (dtype, spec.shape)
        for prefix, dtype in kinds.items()
        for spec in core.specs
    }


def _check_facts(core: Core, checkpoint: Checkpoint) -> None:
    """Refuse a resume that would silently be another run."""
    saved: Mapping[str, Any] = checkpoint.state["facts"]
    allowed = {
        word.removeprefix("--").replace("-", "_") for word in core.config.allow_resume_change
    }
    names = saved if is_converted(checkpoint.state) else core.facts
    lines = [
        f"\n  {name}: {saved.get(name)!r} in the checkpoint, {value!r} now"
        for name, value in core.facts.items()
        if name in names and name not in allowed and saved.get(name) != value
    ]
    if lines:
        raise UserError(
            f"{checkpoint.directory}: this run is not the one that was saved; "
            f"--allow-resume-change FIELD accepts a difference:{''.join(lines)}"
        )


def _changed_settings(core: Core, checkpoint: Checkpoint) -> list[str]:
    """Name what may be changed on purpose, but should not change unseen."""
    saved: Mapping[str, Any] = checkpoint.state["config"]
    now = {name: getattr(core.config, name) for name in TOLD_CHANGES}
    return [
        f"note: {name} was {saved[name]!r} in the checkpoint and is {value!r} now"
        for name, value in now.items()
        if name in saved and saved[name] != value
    ]


def _apply(core: Core, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> TrainState:
    """Put what was read into the run."""
    config = core.config
    state = TrainState()
    if not _starts_anew(core, checkpoint):
        state = TrainState.from_dict(checkpoint.state["counters"])
        core.rates.load_state_dict(
            checkpoint.state["schedule"],
            override=config.override_opt_param_scheduler,
            use_checkpoint=config.use_checkpoint_opt_param_scheduler,
        )
    if config.no_load_optim:
        state.updates = 0
    pieces = _pieces_by_name(core)
    with torch.no_grad():
        for name, tensor in tensors.items():
            pieces[name].tensor.copy_(tensor)
    masters = any(name.startswith("optim/master/") for name in tensors)
    core.optimizer.after_load("master" if masters else "param", updates=state.updates)
    return state
