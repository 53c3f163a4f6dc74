"""`--verify-resume`: a few known samples prove that a loaded run is the one that was saved.

At a save the loss and the gradient norm of the samples consumed last are computed once more
with the saved weights, without dropout, and stored with the samples' numbers and a hash of
their tokens. After loading the same is done again: on the same layout and arithmetic the
bits must be equal, else the figures must MATCH. It costs one small step per save and per
load, and touches nothing but the gradient buffers, which every step clears.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megatron_lite.checkpoint.resume import ARITHMETIC_FIELDS
from megatron_lite.config.pipeline_plan import plain_table
from megatron_lite.data.loader import Batch, read_batch
from megatron_lite.errors import DamagedError
from megatron_lite.mesh.collectives import all_gather_json
from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.train.closing import reduce_closing
from megatron_lite.train.denominators import LM, local_counts, start_denominators
from megatron_lite.train.microbatches import Microbatch, to_device
from megatron_lite.train.parts import Parts
from megatron_lite.train.passes import Passes, PassOptions, backward_passes, loss_sums, no_loss
from megatron_lite.train.record import describe_state
from megatron_lite.train.state import TrainState
from megatron_lite.verify.classes import MATCH32, MATCH64

MAX_SAMPLES = 4
# Compute dtype -> relative limits of loss and gradient norm in another layout.
LIMITS: Mapping[str, tuple[float, float]] = {
    "float64": (MATCH64.loss, MATCH64.grad_norm),
    "float32": (MATCH32.loss, MATCH32.grad_norm),
    "bfloat16": (2e-2, 5e-2),
    "float16": (5e-3, 2e-2),
}


def take_canary(parts: Parts, state: TrainState) -> dict[str, Any] | None:
    """Return the canary of this moment; None without `--verify-resume` or training data.

    Comm: that of a step of a few microbatches of one sample, on all ranks.
    """
    if not parts.config.verify_resume or parts.datasets.train is None:
        return None
    count = min(parts.plan.batch.micro_batch_size, MAX_SAMPLES, len(parts.datasets.train))
    first = max(min(state.consumed_samples, len(parts.datasets.train)) - count, 0)
    samples = list(range(first, first + count))
    batches = _read(parts, samples)
    return {"samples": samples, "tokens_sha256": _hash(batches), **_Replay(parts, batches).run()}


def check_canary(parts: Parts, saved: Mapping[str, Any] | None) -> str | None:
    """Replay the canary of the checkpoint that was loaded.

    Args:
        saved: state of the checkpoint; None where nothing was loaded.

    Returns:
        A line for the log; None where there is nothing to say.

    Raises:
        DamagedError: the figures differ, on all ranks.

    Comm: one exchange of a few bytes per rank, and that of `take_canary`.
    """
    if not parts.config.verify_resume or saved is None:
        return None
    canary = saved["canary"]
    if canary is None:
        return "canary: the checkpoint holds none (it was saved without --verify-resume)"
    if parts.config.ckpt_allow:
        return "canary: not replayed, --ckpt-allow lets the weights differ"
    train = parts.datasets.train
    if train is None or max(canary["samples"]) >= len(train):
        return "canary: not replayed, its samples are not among this run's data"
    batches = _read(parts, canary["samples"])
    # Nodes may differ in machine or data: what is done is the same on all ranks.
    mine = [
        _hash(batches) == canary["tokens_sha256"],
        is_exact(saved, describe_state(parts, TrainState())),
    ]
    same_data, exact = map(all, zip(*all_gather_json(mine, parts.groups.world), strict=True))
    if not same_data:
        return "canary: not replayed, this run's data differs from the checkpoint's"
    found = _Replay(parts, batches).run()
    limits = (0.0, 0.0)
    if not exact:
        dtypes = (saved["arithmetic"]["compute"], parts.plan.precision.compute)
        limits = max(LIMITS[dtype] for dtype in dtypes)
    for name, limit in zip(("loss", "grad_norm"), limits, strict=True):
        if not agree(canary[name], found[name], limit):
            raise DamagedError(
                f"--verify-resume: the {name} of the canary samples {canary['samples']} was "
                f"{canary[name]} when the checkpoint was saved and is {found[name]} now "
                f"({'equal bits' if exact else f'within {limit:g}'} expected): weights, data or "
                "code differ from what was saved"
            )
    how = "equal bits" if exact else f"within {limits[0]:g} and {limits[1]:g}"
    return f"canary: loss {found['loss']} and gradient norm {found['grad_norm']}, {how}"


def is_exact(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether both states compute with the same bits: layout, machine, versions, settings."""
    parts = ("arithmetic", "code", "layout", "versions")
    same = all(saved[part] == current[part] for part in parts)
    before, now = saved["config"], current["config"]
    return same and all(before.get(name) == now.get(name) for name in ARITHMETIC_FIELDS)


def agree(saved: float | None, found: float | None, limit: float) -> bool:
    """Compare two figures; None stands for one that is not finite, which equals only itself."""
    if saved is None or found is None:
        return saved is found
    return abs(saved - found) <= limit * abs(saved)


@dataclasses.dataclass(eq=False)
class _Replay:
    """Forward, backward and norm of a few samples, the same ones on every data rank."""

    parts: Parts
    batches: list[Batch]

    def run(self) -> dict[str, float | None]:
        """Return loss and gradient norm."""
        parts = self.parts
        self.microbatches: list[Microbatch] = to_device(self.batches, parts)
        actions = plain_table(parts.pipeline.placement, len(self.microbatches)).ranks[
            parts.groups.pp.rank
        ]
        parts.gradients.start_step(len(self.microbatches), backward_passes(actions))
        # Every data rank brings the same samples: the counts over all of them are the means'.
        counts = local_counts(parts.plan.model, self.microbatches, parts.groups.cp.size)
        denominators = start_denominators(counts, parts.groups.dp_cp)
        options = PassOptions(
            step=0,
            training=False,  # as in evaluation, but with gradients
            seed=parts.config.seed,
            positions=parts.positions,
            full_positions=parts.full_positions,
            native=parts.native,
            sink=parts.gradients,
            weights=parts.weight_source,
        )
        exchange = parts.pipeline.exchange
        self.passes = Passes(parts.stage, exchange, self.microbatches, denominators, options)
        handlers = self.passes.handlers() | {
            Kind.REDUCE: lambda action: None,
            Kind.NORM: self.close,
            Kind.STEP: lambda action: None,
        }
        parts.runner.run(actions, handlers, 0)
        exchange.finish()
        return self.figures

    def close(self, action: Action) -> None:
        """Complete the gradient reductions; reduce norm and loss over all ranks."""
        self.parts.gradients.finish()
        losses = loss_sums(self.passes.sinks, LM)
        sums = {LM: no_loss(self.parts.device), "valid": no_loss(self.parts.device)}
        if losses and self.parts.groups.tp.rank == 0:  # tp ranks see the same samples
            valid = [microbatch.valid for microbatch in self.microbatches]
            total = torch.stack([loss.detach().to(torch.float64) for loss in losses.values()])
            sums = {LM: total.sum(), "valid": torch.stack(valid).sum()}
        closing = reduce_closing(
            squares=self.parts.optimizer.squared_norm(),
            sums=sums,
            step=0,
            vote=0.0,
            world_group=self.parts.groups.world,
        )
        loss = closing.sums[LM] / max(closing.sums["valid"], 1.0)
        figures = {"loss": loss, "grad_norm": closing.grad_norm}
        self.figures = {k: v if math.isfinite(v) else None for k, v in figures.items()}


def _read(parts: Parts, samples: list[int]) -> list[Batch]:
    """One microbatch per sample: no more memory than any micro-batch size needs."""
    assert parts.datasets.train is not None
    pin = parts.device.type == "cuda"
    return [
        read_batch(parts.datasets.train, np.array([sample], dtype=np.int64), pin)
        for sample in samples
    ]


def _hash(batches: list[Batch]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for tensor in (batch.tokens, batch.labels, batch.loss_mask):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
