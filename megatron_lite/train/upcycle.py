"""A dense checkpoint, seen as one of a mixture of experts (`--moe-use-upcycling`).

Loading reads boxes of logical tensors; here the boxes of experts are made from the dense MLP
of their layer as they are asked for, so every layout takes what it holds and the dense
tensors are read in slices. Routers are drawn like those of a new run, their state is zero.
Only weights are there: the run starts at step 0. See `config/upcycling.py` for the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.reader import BoxRequest, Checkpoint
from megatron_lite.config.upcycling import UPCYCLING, Upcycling, plan_upcycling
from megatron_lite.errors import UserError
from megatron_lite.model.init import initial_value
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.shards import Box
from megatron_lite.train.parts import Core

_EXPERTS, _ROUTER = ".mlp.experts.", ".mlp.router."


def as_experts(core: Core, checkpoint: Checkpoint, path: str) -> Checkpoint | None:
    """Return a dense checkpoint as one of the run's mixture of experts.

    Args:
        core: of a run with `--moe-use-upcycling`.
        checkpoint: what was found.
        path: where, as the user has named it.

    Returns:
        None where `--load` has found a mixture: it goes on with it, so that the same command
        continues a run that began by upcycling.

    Raises:
        UserError: `--pretrained-checkpoint` is a mixture already.
    """
    if any(_EXPERTS in name for name in checkpoint.names):
        if path != core.config.load:
            raise UserError(
                f"{UPCYCLING}: {checkpoint.directory} is a mixture of experts already; leave the "
                "flag out to load its experts"
            )
        return None
    return _DenseAsExperts(core, checkpoint)


class _DenseAsExperts(Checkpoint):
    """What the mixture's checkpoint would hold."""

    def __init__(self, core: Core, dense: Checkpoint) -> None:
        super().__init__(dense.found)
        self._core, self._dense = core, dense
        self._plan: Upcycling = plan_upcycling(
            core.plan.model, core.config.moe_upcycling_granularity
        )
        self._made = {
            spec.name: spec for spec in core.specs if _EXPERTS in spec.name or _ROUTER in spec.name
        }

    @property
    def state(self) -> Mapping[str, Any]:
        """That of the dense run, with the experts of this one."""
        state = self._dense.state
        facts = {**state["facts"], "num_experts": self._core.facts["num_experts"]}
        return {**state, "facts": facts}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of weights, sorted; the dense run's optimizer stays where it is."""
        taken = {_dense_name(name) for name in self._made}
        kept = {name for name in self._dense.names if "/" not in name and name not in taken}
        found = [n for n in self._made if _EXPERTS not in n or _dense_name(n) in self._dense.names]
        return tuple(sorted({*kept, *found}))

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape; a dense MLP of another width keeps its own, to be told."""
        if name not in self._made:
            return self._dense.shape(name)
        shape = self._made[name].shape
        if _EXPERTS not in name:
            return shape
        dense, cut = list(self._dense.shape(_dense_name(name))), _sliced_dim(name)
        if cut is not None:
            dense[cut] //= self._plan.granularity
        return (shape[0], *dense)

    def dtype(self, name: str) -> torch.dtype:
        """That of the dense tensor; of what is drawn or scaled, not below the masters'."""
        if name not in self._made:
            return self._dense.dtype(name)
        master: torch.dtype = getattr(torch, self._core.plan.precision.master)
        if _EXPERTS not in name:
            return master
        dense = self._dense.dtype(_dense_name(name))
        return dense if self._factor(name) == 1.0 else torch.promote_types(dense, master)

    def read_many(
        self,
        requests: Iterable[BoxRequest],
        room: Callable[[int, torch.dtype], Tensor | None] | None = None,
    ) -> list[Tensor]:
        """Read dense tensors and make those of experts and routers."""
        asked = list(requests)
        plain = [number for number, (name, *_) in enumerate(asked) if name not in self._made]
        inner = None if room is None else lambda i, dtype: room(plain[i], dtype)
        read = self._dense.read_many([asked[number] for number in plain], inner)
        found = dict(zip(plain, read, strict=True))
        for number, (name, offset, shape) in enumerate(asked):
            if number in found:
                continue
            values = self._make(name, offset or (0,) * len(self.shape(name)), shape)
            given = None if room is None else room(number, values.dtype)
            found[number] = values if given is None else given.copy_(values)
        return [found[number] for number in range(len(asked))]

    def _make(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...] | None) -> Tensor:
        if shape is None:
            shape = tuple(n - low for n, low in zip(self.shape(name), offset, strict=True))
        make = self._experts if _EXPERTS in name else self._router
        return make(self._made[name], offset, shape).to(self.dtype(name))

    def _router(self, spec: ParamSpec, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The experts that share a copy share the first values of the copy's first row."""
        seed, dtype, g = self._core.config.seed, self.dtype(spec.name), self._plan.granularity
        if g == 1 or not spec.trained:
            return initial_value(spec, Box(offset, shape), seed, dtype)
        copies = range(offset[0] // g, (offset[0] + shape[0] - 1) // g + 1)
        rows = initial_value(
            spec, Box((copies.start, *offset[1:]), (len(copies), *shape[1:])), seed, dtype
        )
        first = offset[0] - copies.start * g
        return rows.repeat_interleave(g, dim=0)[first : first + shape[0]]

    def _experts(self, spec: ParamSpec, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Expert e is slice e mod g of the dense weight, times the factor."""
        name, g, cut = _dense_name(spec.name), self._plan.granularity, _sliced_dim(spec.name)
        width = 0 if cut is None else spec.shape[1 + cut]
        slices: dict[int, Tensor] = {}
        stack = []
        for expert in range(offset[0], offset[0] + shape[0]):
            part = 0 if cut is None else expert % g
            if part not in slices:
                start = list(offset[1:])
                if cut is not None:
                    start[cut] += part * width
                values = self._dense.read(name, tuple(start), shape[1:])
                slices[part] = values.to(self.dtype(spec.name)) * self._factor(spec.name)
            stack.append(slices[part])
        return torch.stack(stack)

    def _factor(self, name: str) -> float:
        model, plan = self._core.plan.model, self._plan
        if ".linear_fc2." in name:
            return plan.bias if name.endswith(".bias") else plan.second
        # The activation is applied to the gate alone, or to all there is.
        is_scaled = ".linear_up." in name or not model.gated
        return plan.first if is_scaled else 1.0


def _dense_name(name: str) -> str:
    return name.replace(_EXPERTS, ".mlp.")


def _sliced_dim(name: str) -> int | None:
    """The dim of a dense MLP's tensor that is its inner width; None: it has none."""
    if ".linear_fc2." in name:
        return 1 if name.endswith(".weight") else None
    return 0
