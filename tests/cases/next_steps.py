"""One built run loads the checkpoints of many layouts in turn and makes the step after each.

A load into a run that has just trained on other values shows more than one into a new run:
whatever is not loaded still has the bits of the step before. Building is the dear part of
a hop, so a layout is built once for all the checkpoints that it meets.
"""

import dataclasses
import hashlib
import io
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lite.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_lite.mesh.launch import RunStatus
from megatron_lite.shard.pieces import StatePiece
from megatron_lite.train.build import read_training_data
from megatron_lite.train.parts import Parts
from megatron_lite.train.restore import entry_name, load_run
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from megatron_lite.verify.classes import Tolerances
from megatron_lite.verify.session import Layout
from tests.cases.hops import ARGV, place_of
from tests.cases.ranks import Pieces, gathered
from tests.pool import RankPool
from tests.train.program import build_and, save_now

# (name in the checkpoint, offset, shape, sha256 of the bits, whether this rank owns it)
Held = tuple[str, tuple[int, ...], tuple[int, ...], str, bool]


@dataclass(frozen=True)
class Step:
    """What one rank has after a load, and of the step that follows.

    Attributes:
        loaded: every piece of state, as it was loaded.
        figures: loss and gradient norm of the step.
        gradients: owned pieces before clipping.
        weights: owned pieces after the step, in the best precision there is.
    """

    loaded: tuple[Held, ...]
    figures: tuple[float, float]
    gradients: Pieces
    weights: Pieces


@dataclass(frozen=True)
class NextStep:
    """The same of the whole layout, as logical tensors."""

    loaded: tuple[Held, ...]
    figures: tuple[float, float]
    gradients: Mapping[str, np.ndarray[Any, Any]]
    weights: Mapping[str, np.ndarray[Any, Any]]

    def differences(self, other: "NextStep", limits: Tolerances) -> list[str]:
        """What is further from `other` than the limits."""
        found = []
        pairs = zip(self.figures, other.figures, (limits.loss, limits.grad_norm), strict=True)
        for name, (mine, theirs, limit) in zip(("loss", "grad norm"), pairs, strict=True):
            if not abs(mine - theirs) <= limit * abs(theirs):
                found.append(f"{name} {mine!r} is not {theirs!r}")
        # State of a rule of the step (a router's bias) has no gradient.
        assert self.gradients.keys() == other.gradients.keys() <= other.weights.keys()
        assert self.weights.keys() == other.weights.keys()
        floor = limits.floor * other.figures[1]
        for name, wanted in other.gradients.items():
            limit = limits.gradient * max(float(np.linalg.norm(wanted)), floor)
            if not float(np.linalg.norm(self.gradients[name] - wanted)) <= limit:
                found.append(f"gradient of {name}")
        for name, wanted in other.weights.items():
            if not np.max(np.abs(self.weights[name] - wanted)) <= limits.weight:
                found.append(f"{name} after the step")
        return found


def next_steps(
    pool: RankPool, sources: Sequence[Path], save: Path, layout: str | Layout, *more: str
) -> list[NextStep]:
    """Load each source in a layout and make the step after it; save what the last one loads."""
    found = []
    for parts in zip(*_run(pool, steps_of_rank, sources, save, layout, more), strict=True):
        assert len({part.figures for part in parts}) == 1
        held = tuple(piece for part in parts for piece in part.loaded)
        gradients = gathered([part.gradients for part in parts])
        weights = gathered([part.weights for part in parts])
        found.append(NextStep(held, parts[0].figures, gradients, weights))
    return found


def loads(
    pool: RankPool, sources: Sequence[Path], save: Path, layout: str | Layout, *more: str
) -> list[list[Held]]:
    """Load each source in a layout, over NaN; save what the last one loads."""
    ranks = _run(pool, loads_of_rank, sources, save, layout, more)
    return [[piece for part in parts for piece in part] for parts in zip(*ranks, strict=True)]


def _run(
    pool: RankPool,
    target: Any,
    sources: Sequence[Path],
    save: Path,
    layout: str | Layout,
    more: Any,
) -> list[Any]:
    place, places = place_of(layout), [str(root) for root in sources]
    argv = [*ARGV, *place.flags, *more, "--save", str(save)]
    return pool.run(place.ranks, target, timeout_s=400.0, argv=argv, sources=places)


def train_and_hold(
    pool: RankPool, root: Path, layout: str | Layout, steps: int, *more: str
) -> tuple[list[Held], list[tuple[int, ...]]]:
    """Train and save; what all ranks held when they saved, and each one's buckets' padding."""
    place = place_of(layout)
    argv = [*ARGV, *place.flags, *more, "--save", str(root)]
    ranks = pool.run(place.ranks, held_by_rank, timeout_s=400.0, argv=argv, steps=steps)
    return [piece for held, _ in ranks for piece in held], [padding for _, padding in ranks]


def held_by_rank(
    argv: Sequence[str], steps: int, rank: int, world_size: int
) -> tuple[tuple[Held, ...], tuple[int, ...]]:
    """One rank's part of `train_and_hold`; runs inside the pool."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        for _ in range(steps):
            TrainStep(parts, state).run()
        held = tuple(_held(piece) for piece in parts.optimizer.state_pieces())
        save_now(parts, state)
        layout = parts.buffers.layout
        used = [sum(layout.slots[name].numel for name in b.names) for b in layout.buckets]
        sizes = [bucket.elements for bucket in layout.buckets]
        return held, tuple(size - part for size, part in zip(sizes, used, strict=True))

    with redirect_stdout(io.StringIO()):
        found: tuple[tuple[Held, ...], tuple[int, ...]] = build_and(use, argv, rank, world_size)
    return found


def steps_of_rank(
    argv: Sequence[str], sources: Sequence[str], rank: int, world_size: int
) -> list[Step]:
    """One rank's part of `next_steps`; runs inside the pool."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        return [_step(parts, _load(parts, source, source is sources[-1])) for source in sources]

    with redirect_stdout(io.StringIO()):
        found: list[Step] = build_and(use, argv, rank, world_size)
    return found


def loads_of_rank(
    argv: Sequence[str], sources: Sequence[str], rank: int, world_size: int
) -> list[tuple[Held, ...]]:
    """One rank's part of `loads`; runs inside the pool."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Any:
        found = []
        for source in sources:
            for piece in parts.optimizer.state_pieces():
                piece.tensor.fill_(torch.nan)
            found.append(_load(parts, source, source is sources[-1])[0])
        return found

    with redirect_stdout(io.StringIO()):
        found: list[tuple[Held, ...]] = build_and(use, argv, rank, world_size)
    return found


def _load(parts: Parts, source: str, is_saved: bool) -> tuple[tuple[Held, ...], TrainState]:
    parts.config = dataclasses.replace(parts.config, load=source)
    restored = load_run(parts)
    assert restored is not None
    assert restored.loaded
    loaded = tuple(_held(piece) for piece in parts.optimizer.state_pieces())
    if is_saved:
        save_now(parts, restored.state)
    return loaded, restored.state


def _step(parts: Parts, loaded: tuple[tuple[Held, ...], TrainState]) -> Step:
    held, state = loaded
    with ExitStack() as stack:
        parts.train_loader = read_training_data(parts, state, stack)
        step = _KeepsGradients(parts, state)
        report = step.run()
    weights = _owned(parts.optimizer.weight_pieces())
    return Step(held, (report.lm_loss, report.grad_norm), step.kept, weights)


class _KeepsGradients(TrainStep):
    """A step that keeps the gradients before they are clipped."""

    def close(self) -> None:
        super().close()
        self.kept = _owned(self.parts.buffers.gradient_pieces())


def _owned(pieces: Any) -> Pieces:
    found: Pieces = {}
    for piece in pieces:
        if piece.owned:
            _, held = found.setdefault(piece.spec.name, (piece.spec.shape, []))
            held.append((piece.box.offset, piece.tensor.detach().double().numpy().copy()))
    return found


def _held(piece: StatePiece) -> Held:
    box = piece.box
    return entry_name(piece), box.offset, box.shape, _digest(piece.tensor), piece.owned


def _digest(values: Tensor) -> str:
    flat = values.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


class Stored:
    """A checkpoint's tensors, read whole once, and what any part of them must hash to."""

    def __init__(self, root: Path) -> None:
        checkpoint: Checkpoint = open_checkpoint(root)
        self.tensors = {name: checkpoint.read(name) for name in checkpoint.names}
        self._known: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = {}

    def wrong(self, held: Sequence[Held]) -> list[str]:
        """Pieces with other bits, and tensors that the pieces do not cover exactly once."""
        found = []
        covered = dict.fromkeys(self.tensors, 0)
        for name, offset, shape, digest, is_owned in held:
            if self._wanted(name, offset, shape) != digest:
                found.append(f"{name} at {list(offset)}")
            covered[name] += is_owned * int(np.prod(shape, dtype=np.int64))
        sizes = {name: tensor.numel() for name, tensor in self.tensors.items()}
        return found + [f"elements of {name}" for name in sizes if covered[name] != sizes[name]]

    def _wanted(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> str:
        key = name, offset, shape
        if key not in self._known:
            part = tuple(slice(low, low + n) for low, n in zip(offset, shape, strict=True))
            self._known[key] = _digest(self.tensors[name][part])
        return self._known[key]
