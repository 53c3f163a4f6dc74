"""How a run continues from a checkpoint.

Tensors are logical pieces: NAME for a weight in the compute dtype, optim/{kind}/NAME for
masters and optimizer state. Beside them lies a closed JSON object: counters, schedules and
the facts that must not change unnoticed. Loading is all or nothing: everything is read and
compared before anything of the run is touched.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.catalog import NoCheckpoint
from megatron_lite.checkpoint.commit import TRACKER_FILE
from megatron_lite.checkpoint.load import load_newest
from megatron_lite.checkpoint.reader import Checkpoint
from megatron_lite.checkpoint.resume import (
    Change,
    allowed_fields,
    compare_state,
    resume_contract,
    schedule_changes,
)
from megatron_lite.checkpoint.state import check_state, is_converted
from megatron_lite.checkpoint.stores import local_path, same_place
from megatron_lite.config.upcycling import UPCYCLING
from megatron_lite.errors import UserError
from megatron_lite.optim.recipe import AVERAGE
from megatron_lite.optim.schedule import RateSchedule
from megatron_lite.shard.pieces import StatePiece
from megatron_lite.train.parts import Core
from megatron_lite.train.record import check_cursor, describe_state, name_files
from megatron_lite.train.state import TrainState
from megatron_lite.train.upcycle import as_experts


def entry_name(piece: StatePiece) -> str:
    """Checkpoint name of a piece of state."""
    name = piece.spec.name
    return name if piece.kind == "param" else f"optim/{piece.kind}/{name}"


@dataclass(frozen=True)
class Restored:
    """Where a run starts.

    Attributes:
        state: counters.
        notes: lines to tell.
        loaded: whether weights were loaded.
        passed_over: steps of `--load` that are damaged, which this run may replace.
        saved: state of the checkpoint that was loaded.
        directory: of it, as the user has named it.
    """

    state: TrainState
    notes: tuple[str, ...] = ()
    loaded: bool = False
    passed_over: tuple[int, ...] = ()
    saved: Mapping[str, Any] | None = None
    directory: str | None = None


@dataclass(frozen=True)
class _Source:
    """What is loaded: a directory, and whether only its weights are wanted."""

    path: str
    step: int | None
    finetune: bool


@dataclass(frozen=True)
class _Content:
    """What was read, before anything of the run is touched: values for pieces."""

    values: list[tuple[StatePiece, Tensor]]
    state: TrainState
    changes: list[Change]


def load_run(core: Core) -> Restored | None:
    """Continue from `--load`; None with nothing to load means initial values.

    Raises:
        UserError: no checkpoint (and none is no option), or it does not fit this run.
        DamagedError: there are checkpoints, but none verifies.

    Comm: two exchanges of a few hundred bytes per rank for each checkpoint tried.
    """
    config = core.config
    notes: tuple[str, ...] = ()
    if config.load is not None:
        source = _Source(config.load, config.ckpt_step, config.finetune)
        try:
            return _load(core, source)
        except NoCheckpoint as error:
            # A step that is asked for by name is not replaced by other weights.
            if config.pretrained_checkpoint is None or config.ckpt_step is not None:
                return Restored(TrainState(), (_accept_nothing(core, error),))
            notes = (f"--load: {error}: weights come from --pretrained-checkpoint",)
    if config.pretrained_checkpoint is None:
        return None
    source = _Source(config.pretrained_checkpoint, None, finetune=True)
    try:
        restored = _load(core, source)
    except NoCheckpoint as error:
        raise UserError(f"--pretrained-checkpoint: {error}") from error
    return dataclasses.replace(restored, notes=notes + restored.notes, passed_over=())


def _load(core: Core, source: _Source) -> Restored:
    """Load the newest checkpoint of a directory that verifies, and tell about it."""
    loaded = load_newest(
        source.path,
        core.groups.world,
        lambda checkpoint: _read(core, *_seen(core, checkpoint, source)),
        step=source.step,
        staging=core.config.ckpt_staging_dir,
    )
    content = loaded.value
    checkpoint, source = _seen(core, loaded.checkpoint, source)
    is_upcycled = checkpoint is not loaded.checkpoint
    _apply(core, checkpoint, source, content)
    notes = [f"warning: step {item.step} passed over: {item.reason}" for item in loaded.passed_over]
    changes = content.changes
    if _starts_anew(checkpoint, source):
        # Weights fit every layout, and another run stands elsewhere in its data.
        changes = [c for c in changes if not c.path.startswith(("layout.", "cursor."))]
    notes += [f"  changed since the checkpoint: {change}" for change in changes]
    if is_upcycled:
        notes.append(f"note: every expert is made from the dense MLP of its layer ({UPCYCLING})")
    if is_converted(checkpoint.state):
        origin = checkpoint.state["origin"].get("source", "another format")
        notes.append(f"note: converted from {origin}: weights only, this run starts at step 0")
    elif source.finetune:
        notes.append("note: weights only, this run starts at step 0")
    elif core.config.no_load_optim:
        notes.append("note: --no-load-optim: the optimizer's state starts at zero")
    else:
        notes.append(f"resume contract: {resume_contract(content.changes)}")
    notes.append(
        f"  successfully loaded checkpoint from {source.path} at iteration {checkpoint.step}"
    )
    passed_over = tuple(item.step for item in loaded.passed_over)
    # The mixture is no replay of the dense run.
    saved = None if is_upcycled else checkpoint.state
    return Restored(content.state, tuple(notes), True, passed_over, saved, source.path)


def _seen(core: Core, checkpoint: Checkpoint, source: _Source) -> tuple[Checkpoint, _Source]:
    """What the run loads from: a dense checkpoint may become a mixture of experts."""
    if core.config.moe_use_upcycling:
        upcycled = as_experts(core, checkpoint, source.path)
        if upcycled is not None:
            return upcycled, dataclasses.replace(source, finetune=True)
    return checkpoint, source


def _takes_weights_only(core: Core, checkpoint: Checkpoint, source: _Source) -> bool:
    return source.finetune or core.config.no_load_optim or is_converted(checkpoint.state)


def _starts_anew(checkpoint: Checkpoint, source: _Source) -> bool:
    """Whether counters and schedules start at 0 with what is loaded."""
    return source.finetune or is_converted(checkpoint.state)


def _accept_nothing(core: Core, error: NoCheckpoint) -> str:
    """Say in one line that there is nothing to load, or refuse."""
    config = core.config
    assert config.load is not None
    foreign = (local_path(config.load) / TRACKER_FILE).exists()
    is_first = same_place(config.load, config.save) and config.ckpt_step is None and not foreign
    if is_first and not config.exit_on_missing_checkpoint:
        return f"--load {config.load} is empty: this is a fresh start"
    if config.allow_missing_checkpoint:
        return f"warning: {error}; starting from initial weights"
    raise UserError(
        f"--load: {error} (--allow-missing-checkpoint starts from initial weights instead)"
    ) from error


def _read(core: Core, checkpoint: Checkpoint, source: _Source) -> _Content:
    """Compare names and facts, then read this rank's boxes into new tensors."""
    check_state(checkpoint.state, checkpoint.directory)
    # Before the names: one changed number explains a difference in every tensor.
    changes = _compare(core, checkpoint, source)
    state = TrainState()
    if not _starts_anew(checkpoint, source):
        state = TrainState.from_dict(checkpoint.state["counters"])
        if "data_path" not in allowed_fields(core.config.allow_resume_change):
            check_cursor(core, checkpoint.state, state)
        # On a copy: nothing of the run is touched before all ranks have read everything.
        rates = copy.copy(core.rates)
        _continue_schedules(core, rates, checkpoint.state["schedule"])
        changes += schedule_changes(checkpoint.state["schedule"], rates.state_dict())
    weights_only = _takes_weights_only(core, checkpoint, source)
    expected = _expected(core, weights_only)
    allow = set(core.config.ckpt_allow)
    if weights_only:
        # The optimizer state of the checkpoint stays where it is.
        extra = [n for n in checkpoint.names if n.startswith("optim/") and n not in expected]
        expected |= {name: (checkpoint.dtype(name), checkpoint.shape(name)) for name in extra}
        allow |= {"dtype"}
    difference = checkpoint.check_names(expected, allow)
    left = {*difference.missing, *difference.shape}
    stored = _stored_names(core, checkpoint, left, weights_only)
    pieces = _pieces_by_name(core)
    wanted = [(piece, origin) for name, origin in stored.items() for piece in pieces.get(name, ())]
    boxes = [(origin, piece.box.offset, piece.box.shape) for piece, origin in wanted]
    targets = [piece.tensor for piece, _ in wanted]

    def room(number: int, dtype: torch.dtype) -> Tensor | None:
        # What is read is kept beside the state until every rank has read everything.
        return core.optimizer.home.scratch(targets[number], dtype)

    read = checkpoint.read_many(boxes, room)
    values = zip((piece for piece, _ in wanted), read, strict=True)
    return _Content(list(values), state, changes)


def _compare(core: Core, checkpoint: Checkpoint, source: _Source) -> list[Change]:
    """Refuse a resume that would silently be another run; return what is told."""
    try:
        return compare_state(
            checkpoint.state,
            describe_state(core, TrainState()),
            core.config.allow_resume_change,
            weights_only=_starts_anew(checkpoint, source),
            names=name_files(core),
        )
    except UserError as error:
        raise UserError(f"{checkpoint.directory}: {error}") from None


def _stored_names(
    core: Core, checkpoint: Checkpoint, left: Container[str], weights_only: bool
) -> dict[str, str]:
    """Tensor of this rank -> tensor of the checkpoint that fills it.

    Weights alone fill the masters too where the checkpoint has them in a wider dtype than
    this run computes in: rounded first, they would have lost what the masters are for.
    """
    pieces = _pieces_by_name(core)
    if not weights_only:
        return {name: name for name in pieces if name not in left}
    weights = [n for n, held in pieces.items() if held[0].kind == "param" and n not in left]
    compute = core.stage.dtype
    widened = [n for n in weights if checkpoint.dtype(n).itemsize > compute.itemsize]
    wanted = {name: name for name in weights}
    if core.optimizer.masters and widened:
        masters = {f"optim/master/{name}": name for name in weights}
        # Frozen weights have none.
        wanted = {k: name for k, name in masters.items() if k in pieces} | {
            name: name for name in weights if f"optim/master/{name}" not in pieces
        }
    return wanted


def _continue_schedules(core: Core, rates: RateSchedule, saved: Mapping[str, Any]) -> None:
    """Set schedules to where the checkpoint's were."""
    rates.load_state_dict(
        saved,
        override=core.config.override_opt_param_scheduler,
        use_checkpoint=core.config.use_checkpoint_opt_param_scheduler,
    )


def _pieces_by_name(core: Core) -> dict[str, list[StatePiece]]:
    """What this rank holds of each tensor: a shard may be several boxes."""
    found: dict[str, list[StatePiece]] = {}
    for piece in core.optimizer.state_pieces():
        found.setdefault(entry_name(piece), []).append(piece)
    return found


def _expected(
    core: Core, weights_only: bool
) -> dict[str, tuple[torch.dtype | str, tuple[int, ...]]]:
    """Every tensor that the run wants to load, over all ranks: from the specs alone."""
    precision, recipe = core.plan.precision, core.optimizer.recipe
    found: dict[str, tuple[torch.dtype | str, tuple[int, ...]]] = {
        spec.name: (precision.compute if spec.trained else precision.master, spec.shape)
        for spec in core.specs
    }
    if weights_only:
        return found
    for spec in core.specs:
        shapes = recipe.state_shapes(spec)
        if precision.master != precision.compute and spec.name not in recipe.frozen:
            shapes["master"] = spec.shape
        for kind, shape in shapes.items():
            found[f"optim/{kind}/{spec.name}"] = (precision.state(kind), shape)
    return found


def _apply(core: Core, checkpoint: Checkpoint, source: _Source, content: _Content) -> None:
    """Put what was read into the run."""
    state = content.state
    if not _starts_anew(checkpoint, source):
        _continue_schedules(core, core.rates, checkpoint.state["schedule"])
    if core.config.no_load_optim:
        state.updates = 0
    with torch.no_grad():
        for piece, value in content.values:
            piece.tensor.copy_(value)
    kinds = {piece.kind for piece, _ in content.values}
    core.optimizer.after_load(
        "master" if "master" in kinds else "param",
        updates=state.updates,
        has_average=AVERAGE in kinds,
    )
