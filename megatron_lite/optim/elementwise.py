"""Updates that go element by element: one fused call per optimizer group.

The segments of a group are long whatever the number of parameters, so no Python runs per
parameter. Where masters are updated, the rounded parameters are written in the same pass
(native) or after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_lite.optim.groups import ParamGroup, StepRates
from megatron_lite.optim.rules import Segments, UpdateRule
from megatron_lite.optim.segments import KindState, OwnedSegment
from megatron_lite.shard.buffers import FlatBuffers


@dataclass(frozen=True, eq=False)
class GroupTensors(Segments):
    """The segments of one optimizer group; copies are the parameters where masters are updated."""

    group: ParamGroup
    state: dict[str, list[Tensor]]

    def round(self) -> None:
        """Write the rounded masters into the parameters."""
        rounded = [
            (copy, weight)
            for copy, weight in zip(self.copies, self.weights, strict=True)
            if copy is not None
        ]
        if rounded:
            torch._foreach_copy_([copy for copy, _ in rounded], [weight for _, weight in rounded])

    def scale_gradients(self, clip: float | Tensor) -> None:
        """Clip in place; a factor of 1.0 changes nothing."""
        if isinstance(clip, Tensor) or clip != 1.0:
            torch._foreach_mul_(self.gradients, clip)


def collect_groups(
    buffers: FlatBuffers,
    segments: Sequence[OwnedSegment],
    weights: Mapping[int, Tensor],
    masters: Mapping[int, Tensor],
    state: Mapping[str, KindState],
) -> list[GroupTensors]:
    """The tensors of every group that this rank owns something of, ordered by name.

    Args:
        buffers: of this rank.
        segments: of `owned_segments`.
        weights: what is updated, by bucket.
        masters: those of them that are not the parameters.
        state: by kind.
    """
    collected: dict[ParamGroup, GroupTensors] = {}
    for segment in segments:
        kinds = [kind for kind, tensors in state.items() if segment in tensors.places]
        tensors = collected.setdefault(
            segment.group,
            GroupTensors([], [], {kind: [] for kind in kinds}, [], segment.group),
        )
        tensors.weights.append(segment.of(weights))
        tensors.gradients.append(segment.of(buffers.owned_gradients))
        for kind in kinds:
            tensors.state[kind].append(state[kind].of(segment))
        values = segment.of(buffers.owned_values)
        tensors.copies.append(values if segment.bucket in masters else None)
    return [collected[group] for group in sorted(collected)]


class ElementwiseUpdates:
    """Updates groups by rules of the kind `UpdateRule`."""

    def __init__(
        self, parts: Sequence[tuple[UpdateRule, GroupTensors]], device: torch.device, native: bool
    ) -> None:
        """Take over.

        Args:
            parts: groups with their rules.
            device: of the weights.
            native: by the native operations.
        """
        self._parts, self._device, self._native = parts, device, native
        # fp32 on the weights' device is what the fused kernels read.
        self._step = torch.zeros((), dtype=torch.float32, device=device)

    def step(self, update: int, rates: StepRates, clip: float | Tensor) -> None:
        """Update weights, state and parameters.

        Args:
            update: its number, from 1.
            rates: of this update.
            clip: factor of the gradients. Afterwards they are scaled, or not (native).
        """
        self._step.fill_(update)
        for rule, tensors in self._parts:
            lr, weight_decay = rates.of(tensors.group)
            if self._native:
                rule.update_native(
                    tensors,
                    update,
                    clip=self._native_clip(clip, tensors.weights[0].dtype),
                    lr=lr,
                    weight_decay=weight_decay,
                )
                continue
            tensors.scale_gradients(clip)
            wide = [g.to(w.dtype) for g, w in zip(tensors.gradients, tensors.weights, strict=True)]
            rule.update(
                replace(tensors, gradients=wide), self._step, lr=lr, weight_decay=weight_decay
            )
            tensors.round()

    def _native_clip(self, clip: float | Tensor, dtype: torch.dtype) -> Tensor | None:
        if not isinstance(clip, Tensor) and clip == 1.0:
            return None
        return torch.as_tensor(clip, dtype=dtype, device=self._device)
