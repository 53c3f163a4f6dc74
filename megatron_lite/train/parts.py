"""Everything that a run is made of, built once and handed around together.

`Core` computes, `Parts` adds data and reporting. Both are records, not services: `build.py`
fills them, the step, evaluation, saving and the loop read them. What changes during a run
is in `TrainState`, in the tensors of `optimizer` and in the position of `rates`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_lite.config.plan import Plan
from megatron_lite.config.schema import Config
from megatron_lite.data.build import Datasets
from megatron_lite.data.loader import Batch
from megatron_lite.mesh.groups import Groups
from megatron_lite.microbatch import WeightSource
from megatron_lite.model.gpt import GPTStage
from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.optim.schedule import RateSchedule
from megatron_lite.pipeline.runner import Runner
from megatron_lite.resilience.signals import StopDecision
from megatron_lite.shard.buckets import MainGradients
from megatron_lite.shard.buffers import FlatBuffers
from megatron_lite.shard.gather import ResidentWeights
from megatron_lite.spec.params import ParamSpec
from megatron_lite.telemetry.facade import Telemetry
from megatron_lite.telemetry.timers import Timers
from megatron_lite.train.dump import DebugDump
from megatron_lite.train.pipeline import Pipeline

if TYPE_CHECKING:
    from megatron_lite.train.saving import Saver


@dataclass(eq=False)
class Core:
    """What computes: the model, its gradients, its optimizer, on this rank.

    Attributes:
        native: operations run natively on this device.
        native_warning: why not, where the user did not ask for that.
        specs: logical parameters of the whole model.
        pipeline: how it is cut into stages, and what runs them.
        gathered: brings parameters that are sharded.
        datasets: the parts of the data.
        facts: what a checkpoint must agree with on resume, JSON-able, by field name.
        code: commit of the program, for the checkpoint.
    """

    config: Config
    plan: Plan
    groups: Groups
    specs: Sequence[ParamSpec]
    device: torch.device
    pipeline: Pipeline
    stage: GPTStage
    buffers: FlatBuffers
    gathered: ResidentWeights
    gradients: MainGradients
    optimizer: Optimizer
    rates: RateSchedule
    native: bool
    native_warning: str
    datasets: Datasets
    facts: Mapping[str, Any]
    code: Mapping[str, Any]

    @property
    def weight_source(self) -> WeightSource | None:
        """Who brings parameters that are not always there; None where all are."""
        return None if self.gathered.is_quiet else self.gathered

    @property
    def wide_dtype(self) -> torch.dtype:
        """Of loss weights and statistics: fp64 under --fp64, else fp32."""
        return accumulation_dtype(self.stage.dtype)


@dataclass(eq=False)
class Parts(Core):
    """A whole run on this rank.

    Attributes:
        positions: [s_local] logical positions of this rank's slice outside tensor regions.
        full_positions: [s] logical positions inside tensor regions.
        train_loader: one list of microbatches per step, from the cursor on.
        tabled_steps: steps of this process that a timer table has covered.
    """

    positions: Tensor
    full_positions: Tensor
    runner: Runner
    train_loader: Iterator[list[Batch]]
    telemetry: Telemetry
    timers: Timers
    stop: StopDecision
    saver: Saver
    dump: DebugDump | None
    tabled_steps: int = 0
