"""The optimizer of one rank: masters, state, update, norm, and their logical pieces.

All of it lies in flat tensors, one per bucket, as long as what this rank owns of the bucket
or of the groups in it, so elementwise rules make one fused call per optimizer group and no
Python runs per parameter. Masters exist where their dtype differs from the compute dtype;
otherwise the parameters are updated directly. Invariant: after every step and every
`after_load` the compute parameters are the rounded masters, on the ranks that own them and,
once gathered, on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from megatron_lite.optim.adafactor import Adafactor
from megatron_lite.optim.average import WeightAverage
from megatron_lite.optim.chunked import build_updates
from megatron_lite.optim.elementwise import GroupTensors, collect_groups
from megatron_lite.optim.factored_updates import FactoredUpdates
from megatron_lite.optim.frozen import FrozenParameters
from megatron_lite.optim.groups import StepRates
from megatron_lite.optim.matrix_updates import MatrixUpdates
from megatron_lite.optim.norm import SquaredNorm
from megatron_lite.optim.recipe import AVERAGE, MatrixRules, Recipe, Rule
from megatron_lite.optim.rules import UpdateRule
from megatron_lite.optim.segments import OwnedSegment, RankPlace, allocate_state, owned_segments
from megatron_lite.optim.state_home import StateHome
from megatron_lite.shard.buffers import FlatBuffers
from megatron_lite.shard.gather import ResidentWeights
from megatron_lite.shard.pieces import StatePiece, norm_ranges, state_pieces


class Updates(Protocol):
    """Some groups and the way they are updated; rounds what it updates."""

    def step(self, update: int, rates: StepRates, clip: float | Tensor) -> None:
        """Make update number `update`, from 1, with gradients times `clip`."""
        ...


class Optimizer:
    """Updates what this rank owns of the parameters of `buffers` by `recipe`.

    Initial weights go the way loaded ones do: write them into `weight_pieces()`, which are
    the masters where there are any, then call `after_load("master")`. A master made in the
    constructor is the widened parameter, which has already lost bits.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        recipe: Recipe | Rule,
        native: bool = False,
        gathered: ResidentWeights | None = None,
        *,
        place: RankPlace | None = None,
        frozen: FrozenParameters | None = None,
        home: StateHome | None = None,
    ) -> None:
        """Allocate masters and state.

        Args:
            buffers: parameters and main gradients.
            recipe: rules, groups, average; a rule alone is that of all parameters.
            native: update and sum by the native operations (none for fp64 on CUDA).
            gathered: told when owned parameters have changed.
            place: of this rank; rules of matrices need it.
            frozen: the parameters that are in no bucket.
            home: of masters and state; default: beside the parameters.

        Raises:
            UserError: there is no room for masters and state.
        """
        self.buffers = buffers
        self.recipe = recipe if isinstance(recipe, Recipe) else Recipe(recipe)
        self._frozen = frozen
        self._gathered = gathered or ResidentWeights()
        master = buffers.precision.master
        self.home = home or StateHome(buffers.device)
        native_away = native
        native = native and not (buffers.device.type == "cuda" and master == "float64")
        self.masters: dict[int, Tensor] = {
            index: self.home.zeros(index, len(values), master).copy_(values)
            for index, values in buffers.owned_values.items()
            if buffers.layout.buckets[index].key.dtype != master
        }
        segments = owned_segments(buffers)
        self.state = allocate_state(buffers, segments, self.recipe.kinds, self.home)
        self._updates = 0
        resident, away = (self._collect(segments, is_away) for is_away in (False, True))
        self._groups = [*resident, *away]
        self._factored: FactoredUpdates | None = None
        self._updaters: list[Updates] = []
        rule = self.recipe.rule
        if isinstance(rule, Adafactor):
            assert place is not None
            self._factored = FactoredUpdates(
                rule, buffers, segments, self._groups, self.weights, self.state, place
            )
            self._updaters.append(self._factored)
        else:
            self._updaters += build_updates(
                self._by_elements(resident), self._by_elements(away), buffers, self.home,
                native=native, native_away=native_away,
            )  # fmt: skip
        if isinstance(rule, MatrixRules):
            assert place is not None
            matrices = [segment for segment in segments if segment.group.matrix]
            self._updaters.append(
                MatrixUpdates(
                    rule.matrices, buffers, matrices, self.weights, self.masters, self.state,
                    place.tensor_groups,
                )
            )  # fmt: skip
        self._average: WeightAverage | None = None
        if self.recipe.average_decay is not None:
            self._average = WeightAverage(buffers, self.weights, self.recipe.average_decay)
        buckets = enumerate(buffers.layout.buckets)
        copies = {index: buffers.ownership.copies(bucket) for index, bucket in buckets}
        ranges = norm_ranges(buffers.pieces, buffers.windows, copies)
        self.squared_norm = SquaredNorm(buffers.owned_gradients, ranges, native)

    def _collect(self, segments: Sequence[OwnedSegment], is_away: bool) -> list[GroupTensors]:
        """The groups of the buckets whose state is elsewhere, or of the others."""
        chosen = [s for s in segments if (s.bucket in self.home.buckets) == is_away]
        return collect_groups(self.buffers, chosen, self.weights, self.masters, self.state)

    def _by_elements(self, groups: list[GroupTensors]) -> list[tuple[UpdateRule, GroupTensors]]:
        """Those that are updated element by element, with their rules."""
        rules = [(self.recipe.elementwise(tensors.group), tensors) for tensors in groups]
        return [(found, tensors) for found, tensors in rules if found is not None]

    @property
    def weights(self) -> dict[int, Tensor]:
        """What a step updates: masters, or owned parameters where they are the same."""
        return {**self.buffers.owned_values, **self.masters}

    @property
    def updates(self) -> int:
        """Number of updates so far, skipped steps not counted."""
        return self._updates

    @torch.no_grad()
    def step(
        self,
        lr: float,
        weight_decay: float,
        clip_coefficient: float | Tensor,
        *,
        decoupled_lr: float | None = None,
    ) -> None:
        """Update all parameters by the main gradients.

        Args:
            lr: scheduled learning rate.
            weight_decay: scheduled weight decay.
            clip_coefficient: factor of the gradients; a 1.0 is not applied. Afterwards the
                gradients are scaled, or used up, or not (native): nobody may read them.
            decoupled_lr: learning rate of groups with a schedule of their own; default `lr`.

        Comm: see `gathered`, and the rules of matrices.
        """
        self._gathered.settle()  # a gather reads what is about to change
        self._updates += 1
        rates = StepRates(lr, weight_decay, lr if decoupled_lr is None else decoupled_lr)
        for updater in self._updaters:
            updater.step(self._updates, rates, clip_coefficient)
        if self._average is not None:
            self._average.update()
        self._gathered.updated()

    def state_pieces(self) -> Iterator[StatePiece]:
        """Logical pieces of parameters, masters and state, for checkpoints; all writable.

        Kinds: "param" (compute dtype), "master" where masters exist, and those of the
        recipe. The update count is `updates`. A reader writes the tensors, then calls
        `after_load`.
        """
        self._gathered.settle()
        yield from self.buffers.value_pieces()
        if self._frozen is not None:
            yield from self._frozen.state_pieces()
        if self.masters:
            yield from state_pieces("master", self.masters, self.buffers.owned_pieces)
        for kind, tensors in self.state.items():
            yield from tensors.state_pieces(kind)
        if self._factored is not None:
            yield from self._factored.state_pieces()
        if self._average is not None:
            yield from self._average.state_pieces(AVERAGE)

    def weight_pieces(self) -> Iterator[StatePiece]:
        """Owned logical weights in the best precision there is: masters, else parameters."""
        kind = "master" if self.masters else "param"
        yield from state_pieces(kind, self.weights, self.buffers.owned_pieces)
        if self._frozen is not None:
            yield from self._frozen.state_pieces()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """A block in which the parameters are the moving average, where there is one.

        Comm: see `gathered`, before and after.
        """
        if self._average is None:
            return nullcontext()
        return self._average.in_place(self._gathered)

    @torch.no_grad()
    def after_load(
        self, written: str, updates: int | None = None, *, has_average: bool = False
    ) -> None:
        """Make parameters, masters and average agree after their pieces were written.

        Args:
            written: "master": the weights of `weight_pieces` are new, round them into the
                parameters; "param": only parameters are new (weights without optimizer
                state), widen them into the masters.
            updates: number of updates that the loaded state has seen; None leaves it.
            has_average: the average was written too; else it begins at the weights.

        Comm: see `gathered`; nothing is under way afterwards.
        """
        if written == "param":
            for index, master in self.masters.items():
                master.copy_(self.buffers.owned_values[index])
        elif written == "master":
            for tensors in self._groups:
                tensors.round()
        else:
            raise ValueError(f"written is {written!r}, neither 'master' nor 'param'")
        if updates is not None:
            self._updates = updates
        if self._average is not None and not has_average:
            self._average.restart()
        self.home.leave_all()
        self._gathered.updated()
        self._gathered.settle()

    def nonfinite_gradients(self) -> Counter[str]:
        """Non-finite gradient elements of this rank by logical name; for messages only."""
        found: Counter[str] = Counter()
        for piece in self.buffers.gradient_pieces():
            count = int((~piece.tensor.isfinite()).sum())
            if count:
                found[piece.spec.name] = count
        return found
