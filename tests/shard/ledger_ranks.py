"""What a rank sends and keeps in real steps, beside what the closed forms say."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch

from megatron_lite.mesh.launch import RunStatus
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.shard.buckets import MainGradients
from megatron_lite.shard.buffers import FlatBuffers, is_released
from megatron_lite.telemetry.data_axis import data_sharding
from megatron_lite.telemetry.data_wire import sent_elements, step_messages
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from megatron_lite.train.summary import estimate_ledger, rank_layout
from tests.train.program import build_and

DATA_GROUPS = ("dp_cp", "dp_shard", "dp_replicate", "edp", "edp_shard", "edp_replicate")


def two_steps(argv: Sequence[str], rank: int, world_size: int) -> dict[str, Any]:
    """Two steps: collectives of the second over the data groups, bytes, and the formulas'."""
    recorder = Recorder()

    def use(parts: Parts, state: TrainState, status: RunStatus) -> dict[str, Any]:
        with most_alive(parts) as most:
            TrainStep(parts, state).run()
            recorder.clear()
            TrainStep(parts, state).run()
        return {**wire_of(parts, recorder), **bytes_of(parts), "most": most}

    told: dict[str, Any] = build_and(use, argv, rank, world_size, recorder)
    return told


def wire_of(parts: Parts, recorder: Recorder) -> dict[str, Any]:
    """What was sent over the data groups, and what the formula says."""
    found = Counter(
        (entry.op, entry.group, entry.elements, entry.dtype)
        for entry in recorder.records
        if entry.group in DATA_GROUPS and entry.elements > 2  # up to two: denominators
    )
    plan, sharding = parts.plan, data_sharding(parts.plan)
    count = plan.batch.num_microbatches_at(0)
    layout = rank_layout(parts, parts.groups.pp.rank)
    formula = step_messages(layout, plan.precision.main_grad, sharding, microbatches=count)
    return {
        "found": dict(found),
        "formula": {tuple(asdict(message).values()): n for message, n in formula.items()},
        "sent": sent_elements(formula, sharding),
        "psi": layout.elements,
        "buckets": len(layout.extents),
    }


def bytes_of(parts: Parts) -> dict[str, Any]:
    """Bytes of state between steps, of all tensors of the process, and the ledger's."""
    buffers, optimizer = parts.buffers, parts.optimizer
    frozen = optimizer._frozen
    assert frozen is not None
    kept = {
        "parameters": [
            *buffers.values.values(),
            *buffers.owned_values.values(),
            *(frozen.params[physical.name].data for physical in frozen.physicals),
        ],
        "main_grads": [*buffers.gradients.values(), *buffers.owned_gradients.values()],
        "masters": [*optimizer.masters.values()],
        "moments": [t for kind in optimizer.state.values() for t in kind.tensors.values()],
    }
    parts.gathered.settle()
    gc.collect()
    everything = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    ledger = estimate_ledger(parts, parts.groups.pp.rank)
    return {
        "held": {name: storage_bytes(tensors) for name, tensors in kept.items()},
        "live": storage_bytes(everything),
        "resident": ledger.state.resident,
        "ledger": asdict(ledger.state),
    }


def storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages under tensors, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@contextmanager
def most_alive(parts: Parts) -> Iterator[dict[str, int]]:
    """Follow what comes and goes: whole gradients with their receivers, whole parameters."""
    most = {"gradient_buckets": 0, "gathered": 0}
    buffers = parts.buffers

    def look() -> None:
        gradients = gathered = 0
        for index, whole in buffers.gradients.items():
            if buffers.is_transient(index) and not is_released(whole):
                gradients += whole.numel() * whole.element_size()
        for bucket in parts.gradients._rounds:
            if bucket.spare is not None:
                gradients += bucket.spare.numel() * bucket.spare.element_size()
        for index in buffers.gathered_buckets:
            if index not in buffers.released:
                gathered += buffers.values[index].numel() * buffers.values[index].element_size()
        most["gradient_buckets"] = max(most["gradient_buckets"], gradients)
        most["gathered"] = max(most["gathered"], gathered)

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            look()
            return result

        return run

    with (
        patch.object(MainGradients, "_make_writable", watched(MainGradients._make_writable)),
        patch.object(MainGradients, "_reduce", watched(MainGradients._reduce)),
        patch.object(FlatBuffers, "restore_values", watched(FlatBuffers.restore_values)),
    ):
        yield most
