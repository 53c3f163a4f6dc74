"""One optimizer step as named calls, in the order of the schedule's table.

take batch -> denominators -> run the schedule (forward, backward, finish reductions,
closing reduction and verdict, update or skip everywhere) -> commit -> report. The data
cursor advances with every attempted step, the schedules only with an update. Two
collectives per step are this file's: the opening and the closing reduction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_lite.errors import UserError
from megatron_lite.expert.balance import Balance, log_scalars, start_balance
from megatron_lite.mesh.collectives import all_gather_json
from megatron_lite.model.multi_token import term_name
from megatron_lite.optim.norm import clip_coefficient
from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.pairs import pair_handler
from megatron_lite.pipeline.runner import Handler
from megatron_lite.resilience.nonfinite import SKIP, UPDATE, StepVerdict, judge_step
from megatron_lite.train.closing import Closing, reduce_closing
from megatron_lite.train.denominators import (
    LM,
    MOE,
    Denominators,
    local_counts,
    start_denominators,
)
from megatron_lite.train.dump import dump_gradients, write_dump
from megatron_lite.train.microbatches import Microbatch, to_device
from megatron_lite.train.parts import Parts
from megatron_lite.train.passes import (
    Passes,
    PassOptions,
    backward_passes,
    loss_sums,
    no_loss,
    once,
)
from megatron_lite.train.state import TrainState

ZEROS = "zeros"


TIMERS = {
    Kind.F: "forward-compute",
    Kind.B: "backward-compute",
    Kind.I: "backward-compute",
    Kind.W: "backward-compute",
}


class NonFiniteError(UserError):
    """The run stops at non-finite numbers; a failure, which a restart would meet again."""

    exit_code = 1


@dataclass(frozen=True)
class StepReport:
    """What one attempted step tells the log, equal on all ranks.

    `learning_rate` and `weight_decay` are those this step used; `lm_loss` is the token mean
    of its global batch; `note` says why the update was left out; `vote` is the reduced one;
    `figures` are further losses and the routers' balance, by name.
    """

    iteration: int
    consumed_samples: int
    global_batch_size: int
    lm_loss: float
    valid_tokens: int
    grad_norm: float
    learning_rate: float
    weight_decay: float
    skipped: bool
    nan: bool
    note: str
    vote: float
    num_zeros: int | None
    figures: Mapping[str, float]


@dataclass(eq=False)
class TrainStep:
    """One attempted step; an object because its calls share the step's tensors.

    Attributes:
        vote: this rank's wish to stop, carried by the closing reduction.
    """

    parts: Parts
    state: TrainState
    vote: float = 0.0
    microbatches: list[Microbatch] = field(default_factory=list)

    def run(self) -> StepReport:
        """Execute the step."""
        with self.parts.timers.measure("batch-generator"):
            self.take_batch()
        self.share_denominators()
        self.passes = self._passes()
        handlers = self.passes.handlers()
        for kind, timer in TIMERS.items():
            handlers[kind] = self._timed(timer, handlers[kind])
        stages = len(self.parts.pipeline.local_parts)
        handlers |= {
            Kind.PAIR: pair_handler(handlers, self.parts.groups.expert_block.lane),
            Kind.REDUCE: lambda action: None,  # complete buckets are on their way already
            Kind.NORM: self.end_pass,
            Kind.STEP: once(stages, self._timed("optimizer", self.update_or_skip)),
        }
        actions = self.parts.pipeline.actions(len(self.microbatches))
        self.parts.runner.run(actions, handlers, self.state.iteration)
        self.parts.pipeline.exchange.finish()
        self.commit()
        return self.report()

    def take_batch(self) -> None:
        """Take this rank's microbatches of the global batch and clear the gradients."""
        consumed = self.state.consumed_samples
        self.global_batch_size = self.parts.plan.batch.global_batch_size_at(consumed)
        self.microbatches = to_device(next(self.parts.train_loader), self.parts)
        actions = self.parts.pipeline.actions(len(self.microbatches))
        self.parts.gradients.start_step(len(self.microbatches), backward_passes(actions))

    def share_denominators(self) -> None:
        """Start the opening reduction: valid tokens of the global batch, and its microbatches.

        Comm: one asynchronous all-reduce of one element per loss term over dp x cp.
        """
        groups, number = self.parts.groups, len(self.microbatches)
        terms = local_counts(self.parts.plan.model, self.microbatches, groups.cp.size)
        self.counts = start_denominators(terms, groups.dp_cp)
        self.denominators = self.counts
        if self.parts.config.legacy_loss_normalization:
            # Megatron's mean of microbatch means: every microbatch of every data-parallel
            # rank weighs the same, however many valid tokens it has.
            for microbatch in self.microbatches:
                microbatch.average()
            weights = {LM: number * groups.dp_cp.size, MOE: number * groups.dp.size}
            means = [torch.full_like(terms[LM], weights[term]) for term in terms]
            self.denominators = Denominators(tuple(terms), torch.stack(means), None)

    def _passes(self) -> Passes:
        parts = self.parts
        options = PassOptions(
            step=self.state.iteration,
            training=True,
            seed=parts.config.seed,
            positions=parts.positions,
            full_positions=parts.full_positions,
            native=parts.native,
            sink=parts.gradients,
            weights=parts.weight_source,
            timers=parts.timers,
            keep_activations=parts.dump is not None and parts.dump.activations,
        )
        exchange = parts.pipeline.exchange
        return Passes(parts.stage, exchange, self.microbatches, self.denominators, options)

    def end_pass(self, action: Action) -> None:
        """Wait for the gradient reductions, then close; every transfer has begun by now."""
        self.start_balance()
        with self.parts.timers.measure("all-grads-sync"):
            self.parts.gradients.finish()
        with self.parts.timers.measure("optimizer-clip-main-grad"):
            self.close()

    def start_balance(self) -> None:
        """Begin to sum up what the routers did, where there are any.

        Comm: see `expert.balance.start_balance`.
        """
        parts, shape = self.parts, self.parts.plan.model.experts
        self.balance: Balance | None = None
        if shape is not None:
            sinks, layers = self.passes.sinks.values(), parts.stage.expert_parts
            self.balance = start_balance(shape, layers, sinks, parts.groups.stage, parts.device)

    def close(self) -> None:
        """Run the closing reduction and judge; every rank comes to the same verdict."""
        self.closing: Closing = reduce_closing(
            squares=self.parts.optimizer.squared_norm(),
            sums=self._sums(),
            step=self.state.iteration,
            vote=self.vote,
            world_group=self.parts.groups.world,
        )
        if not self.closing.step_agrees:
            raise RuntimeError(f"ranks disagree on the step; here it is {self.state.iteration + 1}")
        config = self.parts.config
        self.verdict: StepVerdict = judge_step(
            step=self.state.iteration + 1,
            nonfinite_gradients=self.closing.non_finite,
            loss_is_finite=math.isfinite(self.closing.sums[LM]),
            compute=self.parts.plan.precision.compute,
            policy=config.nan_policy,
            check=config.check_for_nan_in_loss_and_grad,
        )
        self.coefficient = clip_coefficient(self.closing.grad_norm, config.clip_grad)
        if self.parts.dump is not None:
            dump_gradients(self.parts.dump, self)
        if self.verdict.action not in (UPDATE, SKIP):
            raise NonFiniteError(f"{self.verdict.message}{self._where_non_finite()}")

    def update_or_skip(self, action: Action) -> None:
        """Update the weights, or leave everything alone, on all ranks alike."""
        self.learning_rate = self.parts.rates.learning_rate
        self.weight_decay = self.parts.rates.weight_decay
        if self.verdict.action == UPDATE:
            self.parts.optimizer.step(
                self.learning_rate,
                self.weight_decay,
                self.coefficient,
                decoupled_lr=self.parts.rates.decoupled_learning_rate,
            )
            if self.balance is not None:
                self.balance.update()
        if self.parts.dump is not None:
            write_dump(self.parts.dump, self)

    def commit(self) -> None:
        """Advance the counters: the cursor always, the schedules with an update."""
        self.state.iteration += 1
        self.state.consumed_samples += self.global_batch_size
        if self.verdict.action == UPDATE:
            self.parts.rates.advance(self.global_batch_size)
            self.state.updates += 1
        else:
            self.state.skipped_iterations += 1
        self.state.nan_iterations += self.verdict.nan

    def report(self) -> StepReport:
        """Return the figures of this step."""
        valid_tokens = round(self.closing.sums["valid"])
        return StepReport(
            iteration=self.state.iteration,
            consumed_samples=self.state.consumed_samples,
            global_batch_size=self.global_batch_size,
            lm_loss=self.closing.sums[LM] / max(valid_tokens, 1),
            valid_tokens=valid_tokens,
            grad_norm=self.closing.grad_norm,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            skipped=self.verdict.action == SKIP,
            nan=self.verdict.nan,
            note=self.verdict.message,
            vote=self.closing.vote,
            num_zeros=round(self.closing.sums[ZEROS]) if ZEROS in self.closing.sums else None,
            figures=self._figures(),
        )

    def _figures(self) -> dict[str, float]:
        """Further losses and what the routers did, by the names of the log."""
        model, sums, found = self.parts.plan.model, self.closing.sums, {}
        for depth in range(model.mtp_depths):
            term = term_name(depth)
            found[f"{term}_loss"] = sums[term] / float(self.counts[term])
        if model.experts is not None:
            found |= log_scalars(
                model.experts, sums, float(self.counts[MOE]), self._logged_layers()
            )
        return found

    def _logged_layers(self) -> list[int]:
        """The MoE layers, those of further depths too, whose own figures are wanted."""
        model = self.parts.plan.model
        if not self.parts.config.moe_per_layer_logging:
            return []
        return [n for n in range(model.num_layers + model.mtp_depths) if model.is_moe(n)]

    def _timed(self, timer: str, handler: Handler) -> Handler:
        """The handler under its timer, which is off below its level."""

        def run(action: Action) -> None:
            with self.parts.timers.measure(timer):
                handler(action)

        return run

    def _sums(self) -> dict[str, Tensor]:
        """What the closing reduction sums for the log: each sample and element once."""
        losses = loss_sums(self.passes.sinks, LM)
        sums = {LM: no_loss(self.parts.device), "valid": no_loss(self.parts.device)}
        further = [term_name(depth) for depth in range(self.parts.plan.model.mtp_depths)]
        sums |= {term: no_loss(self.parts.device) for term in further}
        if losses and self.parts.groups.tp.rank == 0:  # tp ranks see the same samples
            scaled = [
                losses[number].detach().to(torch.float64) * microbatch.scale
                for number, microbatch in enumerate(self.microbatches)
            ]
            valid = [microbatch.valid for microbatch in self.microbatches]
            sums |= {LM: torch.stack(scaled).sum(), "valid": torch.stack(valid).sum()}
            for term in further:
                found = loss_sums(self.passes.sinks, term).values()
                sums[term] = torch.stack([loss.detach().double() for loss in found]).sum()
        if self.balance is not None:
            sums |= self.balance.log_sums(self._logged_layers())
        if self.parts.config.log_num_zeros_in_grad:
            zeros = [
                (piece.tensor == 0).sum(dtype=torch.float64)
                for piece in self.parts.buffers.gradient_pieces()
                if piece.owned
            ]
            sums[ZEROS] = torch.stack([torch.zeros_like(sums[LM]), *zeros]).sum()
        return sums

    def _where_non_finite(self) -> str:
        """Name the ranks, samples and parameters; only called when there are some.

        Comm: one gather of a few bytes per rank over the world, on a path that ends the run.
        """
        samples = [
            sample
            for number, loss in sorted(loss_sums(self.passes.sinks, LM).items())
            if not bool(loss.isfinite())
            for sample in self.microbatches[number].sample_ids.tolist()
        ]
        names = list(self.parts.optimizer.nonfinite_gradients())
        mine = {"samples": samples[:8], "names": names[:3]}
        found = ""
        for rank, theirs in enumerate(all_gather_json(mine, self.parts.groups.world)[:64]):
            if theirs["samples"]:
                found += f"\n  rank {rank}: loss of the samples {theirs['samples']}"
            elif theirs["names"]:
                found += f"\n  rank {rank}: gradient of {', '.join(theirs['names'])}"
        return found
