"""The validation loss of weights that are in no checkpoint: merges on trial.

One stage is built, its weights are exchanged for each candidate, and the program's own
evaluation runs over the same samples each time. No optimizer and no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.checkpoint.catalog import Found
from megatron_lite.config.plan import Plan
from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError
from megatron_lite.mesh.groups import Groups, local_groups
from megatron_lite.mesh.launch import RunStatus, WorldInfo
from megatron_lite.microbatch import WeightSource
from megatron_lite.model.gpt import GPTStage
from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.pipeline.runner import Runner
from megatron_lite.spec.physical import logical_piece
from megatron_lite.spec.shards import Box
from megatron_lite.train.build import open_data, pick_device
from megatron_lite.train.evaluate import evaluate
from megatron_lite.train.pipeline import Pipeline, build_pipeline
from megatron_lite.train.sample import load_stage

Reader = Callable[[str], Tensor]  # whole logical tensors by name


@dataclass(eq=False)
class Bench:
    """What an evaluation needs of a run; see `evaluate.Evaluated`."""

    config: Config
    plan: Plan
    groups: Groups
    device: torch.device
    stage: GPTStage
    pipeline: Pipeline
    runner: Runner
    positions: Tensor
    full_positions: Tensor
    native: bool = False
    weight_source: WeightSource | None = None

    @property
    def wide_dtype(self) -> torch.dtype:
        """Of loss weights and statistics."""
        return accumulation_dtype(self.stage.dtype)


@contextmanager
def open_bench(config: Config, found: Found) -> Iterator[Callable[[Reader], float]]:
    """Build a model in this process; yield what computes the loss of given weights.

    Args:
        config: of one process, with a validation part in its data and `eval_iters` above 0.
        found: a checkpoint of this architecture, whose tokenizer the data has.

    Yields:
        A function from a reader of whole logical tensors to the lm loss, token mean.

    Raises:
        UserError: there is no validation data.
    """
    with load_stage(config, found, WorldInfo(), RunStatus()) as (stage, tokenizer, _):
        dataset = open_data(config, stage.plan, tokenizer, is_builder=True).valid
        if dataset is None or config.eval_iters < 1:
            raise UserError(
                "no validation data: --valid-data-path names some, or --data-path with a --split "
                "whose second share is not 0; --eval-iters must be at least 1"
            )
        device = torch.device(pick_device(config))
        positions = torch.arange(stage.plan.model.seq_length, device=device)
        groups = local_groups()
        pipeline, runner = build_pipeline(config, stage.plan, groups, device), Runner(0)
        bench = Bench(
            config, stage.plan, groups, device, stage, pipeline, runner, positions, positions
        )

        def loss_of(read: Reader) -> float:
            fill_stage(stage, read)
            return evaluate(bench, dataset, 0, 0).lm_loss

        yield loss_of


def fill_stage(stage: GPTStage, read: Reader) -> None:
    """Exchange the weights of an uncut stage."""
    with torch.no_grad():
        for name, physical in stage.physical.items():
            for view in physical.views:
                whole = Box((0,) * len(view.spec.shape), view.spec.shape)
                logical_piece(stage.param(name).data, view, whole).copy_(read(view.spec.name))
