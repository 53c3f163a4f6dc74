"""Adafactor (Shazeer and Stern, arXiv 1804.04235) with the run's own learning rate.

u = g / root(v), v factored for matrices (`factored.py`) and kept whole for vectors, both
averaged with decay 1 - t^-c; u is scaled down where the root of its mean square over the
logical tensor exceeds a threshold, in a stack each expert by itself; a first moment of u is
kept where `beta1` is not 0; decay is decoupled. Left out are the paper's relative step and
the scale by the weight's own size: rates come from the schedules. State of a matrix: rows +
columns numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.schema import Config
from megatron_lite.mesh.collectives import all_reduce
from megatron_lite.optim.factored import FactoredMoments, OwnedBox, Spread, is_factored
from megatron_lite.optim.groups import ParamGroup
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.shards import Box


@dataclass(frozen=True)
class Adafactor:
    """Hyper-parameters of Adafactor."""

    beta2_decay: float
    beta1: float = 0.0
    eps: float = 1e-30
    clip_threshold: float = 1.0

    def decay_at(self, update: int) -> float:
        """Decay of the second moment in this update, from 1: the first has no past."""
        return 1.0 - float(update) ** -self.beta2_decay


@dataclass(frozen=True, eq=False)
class OwnedPart:
    """A box of a parameter that this rank updates; all tensors are views of its shape."""

    spec: ParamSpec
    box: Box  # of the logical tensor
    group: ParamGroup
    weight: Tensor
    gradient: Tensor
    first: Tensor | None = None  # with beta1
    second: Tensor | None = None  # of what is not factored


Rates = Callable[[ParamGroup], tuple[float, float]]


class AdafactorUpdates:
    """The updates of one rank's parts.

    Attributes:
        moments: of the factored parameters.
    """

    def __init__(
        self,
        rule: Adafactor,
        held: Sequence[tuple[ParamSpec, Box]],
        parts: Sequence[OwnedPart],
        spread: Spread,
    ) -> None:
        """Allocate the statistics of rows and columns.

        Args:
            rule: the hyper-parameters.
            held: every parameter of this tensor rank and its box, in one order on all ranks
                of the shard and the tensor group.
            parts: disjoint; over the shard group they cover `held`.
            spread: over which ranks.
        """
        self.rule, self.parts = rule, parts
        self._spread = spread
        self.moments = FactoredMoments(
            [(spec, box) for spec, box in held if is_factored(spec)], spread
        )
        matrices = {spec.name: i for i, spec in enumerate(self.moments.specs)}
        self._boxes = [
            OwnedBox(matrices[part.spec.name], part.box, part.gradient)
            if is_factored(part.spec)
            else None
            for part in parts
        ]
        # The tensors whose mean squares count: a parameter, or each expert's of a stack.
        firsts: dict[str, int] = {}
        sizes: list[int] = []
        copies: list[int] = []  # how often the tensor group has an element; 0: need not be asked
        for spec, box in held:
            count, whole = (box.shape[0], spec.shape[0]) if spec.is_stack else (1, 1)
            # Counted from the logical stack's first expert, as boxes are.
            firsts[spec.name] = len(sizes) - (box.offset[0] if spec.is_stack else 0)
            sizes += [spec.elements // whole] * count
            is_cut = spec.tensor_parts > 1
            copies += [spread.tensor.size // spec.tensor_parts if is_cut else 0] * count
        self._places = [_tensors_of(part, firsts[part.spec.name]) for part in parts]
        self._sizes = torch.tensor(sizes, dtype=spread.dtype, device=spread.device)
        self._copies = torch.tensor(copies, dtype=spread.dtype, device=spread.device)
        self._is_cut = spread.tensor.size > 1 and any(copies)

    @torch.no_grad()
    def step(self, update: int, rates: Rates) -> None:
        """Update weights and state by the parts' gradients, which are used up.

        Args:
            update: its number, from 1.
            rates: learning rate and weight decay of a group.

        Comm: of the statistics (`FactoredMoments.accumulate`), then of one number per
            parameter, or expert of a stack, over the shard group and over tp.
        """
        rule, decay = self.rule, self.rule.decay_at(update)
        self.moments.accumulate([box for box in self._boxes if box is not None], rule.eps, decay)
        for part, box in zip(self.parts, self._boxes, strict=True):
            if box is not None:
                root = self.moments.root(box)
            else:
                assert part.second is not None
                part.second.lerp_(part.gradient.square().add_(rule.eps), 1.0 - decay)
                root = part.second.sqrt()
            part.gradient.div_(root)
        scales = self._scales()
        for part, place in zip(self.parts, self._places, strict=True):
            lr, weight_decay = rates(part.group)
            change = part.gradient
            if scales is not None:
                change.view(_by_tensor(part)).mul_(scales[place].unsqueeze(1))
            if part.first is not None:
                change = part.first.lerp_(change, 1.0 - rule.beta1)
            part.weight.mul_(1.0 - lr * weight_decay).add_(change, alpha=-lr)

    def _scales(self) -> Tensor | None:
        """Factor of every held tensor's update, at most 1; None without a threshold."""
        if self.rule.clip_threshold == 0.0:
            return None
        squares = torch.zeros_like(self._sizes)
        for part, place in zip(self.parts, self._places, strict=True):
            squares[place] += part.gradient.view(_by_tensor(part)).square().sum(1)
        all_reduce(squares, self._spread.shard)
        if self._is_cut:
            across = torch.where(self._copies > 0, squares / self._copies, 0.0)
            all_reduce(across, self._spread.tensor)
            squares = torch.where(self._copies > 0, across, squares)
        root = (squares / self._sizes).sqrt() / self.rule.clip_threshold
        return root.clamp_min(1.0).reciprocal()


def _tensors_of(part: OwnedPart, first: int) -> slice:
    """Which of the held tensors a part belongs to."""
    if not part.spec.is_stack:
        return slice(first, first + 1)
    return slice(first + part.box.offset[0], first + part.box.offset[0] + part.box.shape[0])


def _by_tensor(part: OwnedPart) -> tuple[int, int]:
    """[tensors, elements of each] of a part."""
    return (part.box.shape[0] if part.spec.is_stack else 1), -1


def build_adafactor(config: Config) -> Adafactor:
    """Adafactor as the flags describe it."""
    return Adafactor(
        beta2_decay=config.adafactor_beta2_decay,
        beta1=config.adafactor_beta1,
        eps=config.adafactor_eps,
        clip_threshold=config.adafactor_clip_threshold,
    )
