"""The optimizer of one rank: masters, state, update, norm, and their logical pieces.

All of it lies in flat tensors, one per bucket, as long as what this rank owns of the bucket,
so a step is one fused call per optimizer group and no Python runs per parameter. Masters
exist where their dtype differs from the compute dtype; otherwise the parameters are updated
directly. Invariant: after every step and every `after_load` the compute parameters are the
rounded masters, on the ranks that own them and, once gathered, on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError
from megatron_lite.optim.adamw import AdamW
from megatron_lite.optim.groups import ParamGroup
from megatron_lite.optim.norm import SquaredNorm
from megatron_lite.optim.rules import UpdateRule
from megatron_lite.optim.sgd import SGD
from megatron_lite.shard.buffers import FlatBuffers
from megatron_lite.shard.gather import ResidentWeights
from megatron_lite.shard.pieces import StatePiece, norm_ranges, state_pieces


@dataclass(frozen=True)
class _GroupTensors:
    """The segments of one optimizer group."""

    group: ParamGroup
    weights: list[Tensor]
    gradients: list[Tensor]
    state: dict[str, list[Tensor]]
    copies: list[Tensor | None]  # the parameters where masters are updated


class Optimizer:
    """Updates what this rank owns of the parameters of `buffers` by `rule`.

    Initial weights go the way loaded ones do: write them into `weight_pieces()`, which are
    the masters where there are any, then call `after_load("master")`. A master made in the
    constructor is the widened parameter, which has already lost bits.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        rule: UpdateRule,
        native: bool = False,
        gathered: ResidentWeights | None = None,
    ) -> None:
        """Allocate masters and state.

        Args:
            buffers: parameters and main gradients.
            rule: the update rule.
            native: update and sum by the native operations (none for fp64 on CUDA).
            gathered: told when owned parameters have changed.
        """
        self.buffers = buffers
        self.rule = rule
        self._gathered = gathered or ResidentWeights()
        master = buffers.precision.master
        self._native = native and not (buffers.device.type == "cuda" and master == "float64")
        self.masters: dict[int, Tensor] = {
            index: buffers.zeros(index, master).copy_(values)
            for index, values in buffers.owned_values.items()
            if buffers.layout.buckets[index].key.dtype != master
        }
        self.state: dict[str, dict[int, Tensor]] = {
            kind: {index: buffers.zeros(index, master) for index in buffers.owned_values}
            for kind in rule.kinds
        }
        # Shared by all segments; fp32 on the weights' device is what the fused kernels read.
        self._step = torch.zeros((), dtype=torch.float32, device=buffers.device)
        self._updates = 0
        self._groups = self._collect_groups()
        buckets = enumerate(buffers.layout.buckets)
        copies = {index: buffers.ownership.copies(bucket) for index, bucket in buckets}
        ranges = norm_ranges(buffers.pieces, buffers.windows, copies)
        self.squared_norm = SquaredNorm(buffers.owned_gradients, ranges, self._native)

    @property
    def weights(self) -> dict[int, Tensor]:
        """What a step updates: masters, or owned parameters where they are the same."""
        return {**self.buffers.owned_values, **self.masters}

    @property
    def updates(self) -> int:
        """Number of updates so far, skipped steps not counted."""
        return self._updates

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, clip_coefficient: float | Tensor) -> None:
        """Update all parameters by the main gradients.

        Args:
            lr: scheduled learning rate.
            weight_decay: scheduled weight decay.
            clip_coefficient: factor of the gradients; a 1.0 is not applied. Afterwards the
                gradients are scaled, or not (native): nobody may read them.

        Comm: see `gathered`.
        """
        self._gathered.settle()  # a gather reads what is about to change
        self._step += 1
        self._updates += 1
        if self._native:
            self._step_native(lr, weight_decay, clip_coefficient)
        else:
            self._step_plain(lr, weight_decay, clip_coefficient)
        self._gathered.updated()

    def _step_plain(self, lr: float, weight_decay: float, clip_coefficient: float | Tensor) -> None:
        scaled = isinstance(clip_coefficient, Tensor) or clip_coefficient != 1.0
        for tensors in self._groups:
            if scaled:
                torch._foreach_mul_(tensors.gradients, clip_coefficient)
            self.rule.update(
                tensors.weights,
                [g.to(w.dtype) for g, w in zip(tensors.gradients, tensors.weights, strict=True)],
                tensors.state,
                self._step,
                lr=lr * tensors.group.lr_mult,
                weight_decay=weight_decay * tensors.group.wd_mult,
            )
        self._round_masters()

    def _step_native(self, lr: float, weight_decay: float, clip: float | Tensor) -> None:
        dtype, device = getattr(torch, self.buffers.precision.master), self.buffers.device
        given = isinstance(clip, Tensor) or clip != 1.0
        scale = torch.as_tensor(clip, dtype=dtype, device=device) if given else None
        for tensors in self._groups:
            self.rule.update_native(
                tensors.weights,
                tensors.gradients,
                tensors.state,
                tensors.copies,
                self._updates,
                clip=scale,
                lr=lr * tensors.group.lr_mult,
                weight_decay=weight_decay * tensors.group.wd_mult,
            )

    def state_pieces(self) -> Iterator[StatePiece]:
        """Logical pieces of parameters, masters and state, for checkpoints; all writable.

        Kinds: "param" (compute dtype), "master" where masters exist, and the rule's own.
        The update count is `updates`. A reader writes the tensors, then calls `after_load`.
        """
        self._gathered.settle()
        yield from self.buffers.value_pieces()
        owned = self.buffers.owned_pieces
        if self.masters:
            yield from state_pieces("master", self.masters, owned)
        for kind, tensors in self.state.items():
            yield from state_pieces(kind, tensors, owned)

    def weight_pieces(self) -> Iterator[StatePiece]:
        """Owned logical weights in the best precision there is: masters, else parameters."""
        kind = "master" if self.masters else "param"
        return state_pieces(kind, self.weights, self.buffers.owned_pieces)

    @torch.no_grad()
    def after_load(self, written: str, updates: int | None = None) -> None:
        """Make parameters and masters agree after their pieces were written.

        Args:
            written: "master": the weights of `weight_pieces` are new, round them into the
                parameters; "param": only parameters are new (weights without optimizer
                state), widen them into the masters.
            updates: number of updates that the loaded state has seen; None leaves it.

        Comm: see `gathered`; nothing is under way afterwards.
        """
        if written == "param":
            for index, master in self.masters.items():
                master.copy_(self.buffers.owned_values[index])
        elif written == "master":
            self._round_masters()
        else:
            raise ValueError(f"written is {written!r}, neither 'master' nor 'param'")
        if updates is not None:
            self._step.fill_(updates)
            self._updates = updates
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

    def _round_masters(self) -> None:
        indices = list(self.masters)
        if indices:
            owned = self.buffers.owned_values
            masters = [self.masters[index] for index in indices]
            torch._foreach_copy_([owned[index] for index in indices], masters)

    def _collect_groups(self) -> list[_GroupTensors]:
        weights = self.weights
        collected: dict[ParamGroup, _GroupTensors] = {}
        for segment in self.buffers.layout.segments:
            group = segment.group
            if not isinstance(group, ParamGroup):
                raise TypeError(f"the layout was built with groups {type(group).__name__}")
            tensors = collected.setdefault(
                group, _GroupTensors(group, [], [], {kind: [] for kind in self.state}, [])
            )
            window = self.buffers.windows[segment.bucket].cut(segment.start, segment.stop)
            if window.elements == 0:
                continue
            index, part = segment.bucket, slice(window.start, window.stop)
            tensors.weights.append(weights[index][part])
            tensors.gradients.append(self.buffers.owned_gradients[index][part])
            for kind, buffers in self.state.items():
                tensors.state[kind].append(buffers[index][part])
            values = self.buffers.owned_values[index][part]
            tensors.copies.append(values if index in self.masters else None)
        return [tensors for tensors in collected.values() if tensors.weights]


def build_rule(config: Config) -> UpdateRule:
    """The update rule that `--optimizer` names."""
    if config.optimizer == "adam":
        return AdamW(config.adam_beta1, config.adam_beta2, config.adam_eps)
    if config.optimizer == "sgd":
        return SGD(config.sgd_momentum)
    raise UserError(f"--optimizer {config.optimizer} is not supported; use adam or sgd")
