"""Evaluation: the token-weighted loss of a part of the data, without gradients.

The validation cursor counts samples like the training cursor and is part of the state, so
a resumed run evaluates the samples that the uninterrupted one does. Sums and counts are
reduced once per evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_lite.config.plan import Plan
from megatron_lite.config.schema import Config
from megatron_lite.data.build import TrainableDataset
from megatron_lite.data.loader import iterate_microbatches
from megatron_lite.mesh.collectives import all_reduce
from megatron_lite.mesh.groups import Groups
from megatron_lite.microbatch import WeightSource
from megatron_lite.model.gpt import GPTStage
from megatron_lite.pipeline.runner import Runner
from megatron_lite.train.microbatches import Microbatch, Placement, to_device
from megatron_lite.train.passes import Passes, PassOptions, loss_sums
from megatron_lite.train.pipeline import Pipeline

LM = "lm"


@dataclass(frozen=True)
class Evaluation:
    """Token mean of the loss, and over how many tokens; equal on all ranks."""

    lm_loss: float
    valid_tokens: int


class Evaluated(Placement, Protocol):
    """What an evaluation needs of a run: a whole one, or a model alone."""

    @property
    def config(self) -> Config: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def groups(self) -> Groups: ...
    @property
    def stage(self) -> GPTStage: ...
    @property
    def pipeline(self) -> Pipeline: ...
    @property
    def runner(self) -> Runner: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def full_positions(self) -> Tensor: ...
    @property
    def native(self) -> bool: ...
    @property
    def weight_source(self) -> WeightSource | None: ...


def evaluate(
    parts: Evaluated, dataset: TrainableDataset, consumed_samples: int, iteration: int
) -> Evaluation:
    """Evaluate `eval_iters` global batches.

    Args:
        dataset: the part of the data.
        consumed_samples: where to start; from 0 again where the data would not last.
        iteration: for the contexts.

    Comm: those of the forward passes, then one all-reduce of 2 elements over dp x cp and,
        in a pipeline, one over pp: only one of its ranks has losses.
    """
    batch = parts.plan.batch
    needed = batch.eval_iters * batch.eval_global_batch_size
    start = consumed_samples if consumed_samples + needed <= len(dataset) else 0
    totals = torch.zeros(2, dtype=torch.float64, device=parts.device)
    with (
        torch.no_grad(),
        iterate_microbatches(
            dataset,
            consumed_samples=start,
            global_batch_size=batch.eval_global_batch_size,
            micro_batch_size=batch.micro_batch_size,
            dp_rank=parts.groups.dp.rank,
            dp_size=parts.groups.dp.size,
            num_workers=parts.config.num_workers,
            end_samples=start + needed,
        ) as steps,
    ):
        for batches in steps:
            microbatches = to_device(batches, parts)
            for number, loss in _run(parts, microbatches, iteration).items():
                totals[0] += loss
                totals[1] += microbatches[number].valid
    all_reduce(totals, parts.groups.dp_cp)
    all_reduce(totals, parts.groups.pp)
    loss_sum, tokens = totals.tolist()
    return Evaluation(loss_sum / max(tokens, 1.0), round(tokens))


def _run(parts: Evaluated, microbatches: Sequence[Microbatch], iteration: int) -> dict[int, Tensor]:
    """Forward passes of one global batch; undivided losses by microbatch, where they arise."""
    options = PassOptions(
        step=iteration,
        training=False,
        seed=parts.config.seed,
        positions=parts.positions,
        full_positions=parts.full_positions,
        native=parts.native,
        sink=None,
        weights=parts.weight_source,
    )
    denominators = {LM: torch.ones((), dtype=torch.float64, device=parts.device)}
    exchange = parts.pipeline.exchange
    passes = Passes(parts.stage, exchange, microbatches, denominators, options)
    actions = parts.pipeline.actions(len(microbatches), training=False)
    parts.runner.run(actions, passes.handlers(), iteration)
    exchange.finish()
    return loss_sums(passes.sinks, LM)
