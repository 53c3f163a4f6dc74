"""Planted bugs: each patches one decision inside the ranks, as such bugs happen.

A context manager is entered on every rank before anything is built. What it breaks, where
it must show and what it must be called stands in the table of `test_planted_faults.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.data import loader
from megatron_lite.mesh import collectives
from megatron_lite.mesh.collectives import CompletedWork
from megatron_lite.mesh.groups import Group
from megatron_lite.model import gpt, parts
from megatron_lite.ops import attention, dropout
from megatron_lite.ops.recompute import _Recompute
from megatron_lite.optim import optimizer
from megatron_lite.shard import reduce
from megatron_lite.shard.buckets import MainGradients
from megatron_lite.shard.partial import PartialReduction
from megatron_lite.spec.params import ParamSpec
from megatron_lite.tensor import cross_entropy, embedding, linear
from megatron_lite.train import build, step


@contextmanager
def _respecified(change: Callable[[ParamSpec], ParamSpec]) -> Iterator[None]:
    original = build.model_spec

    def planted(*args: Any) -> tuple[ParamSpec, ...]:
        return tuple(change(spec) for spec in original(*args))

    with patch.object(build, "model_spec", planted):
        yield


def without_partial(spec: ParamSpec, axis: str, *endings: str) -> ParamSpec:
    """Forget that the gradient of these parameters is partial over an axis."""
    if not spec.name.endswith(endings):
        return spec
    kept = tuple(name for name in spec.partial_axes if name != axis)
    return dataclasses.replace(spec, partial_axes=kept)


NORMS = ("input_layernorm.weight", "pre_mlp_layernorm.weight", "final_layernorm.weight")
HEAD_NORMS = ("q_layernorm.weight", "k_layernorm.weight")


@contextmanager
def sp_norm_reduction_dropped() -> Iterator[None]:
    with _respecified(lambda spec: without_partial(spec, "tp", *NORMS)):
        yield


@contextmanager
def sp_row_bias_reduction_dropped() -> Iterator[None]:
    with _respecified(lambda spec: without_partial(spec, "tp", "proj.bias", "fc2.bias")):
        yield


@contextmanager
def head_norm_not_reduced() -> Iterator[None]:
    with _respecified(lambda spec: without_partial(spec, "tp", *HEAD_NORMS)):
        yield


@contextmanager
def norm_reduced_where_replicated() -> Iterator[None]:
    def change(spec: ParamSpec) -> ParamSpec:
        if spec.name.endswith(NORMS):
            return dataclasses.replace(spec, partial_axes=("tp",))
        return spec

    with _respecified(change):
        yield


@contextmanager
def kv_gradient_not_reduced() -> Iterator[None]:
    endings = ("linear_k.weight", "linear_v.weight", "linear_k.bias", "linear_v.bias")
    with _respecified(lambda spec: without_partial(spec, "kv_replica", *endings)):
        yield


@contextmanager
def kv_gradient_doubled() -> Iterator[None]:
    original = PartialReduction.run

    def planted(self: PartialReduction) -> None:
        original(self)
        if self.group.name == "kv_replica" and self.group.size > 1:
            torch._foreach_mul_(self._ranges, 2.0)

    with patch.object(PartialReduction, "run", planted):
        yield


@contextmanager
def position_rows_by_local_index() -> Iterator[None]:
    original = gpt.position_embedding

    def planted(x: Tensor, weight: Any, positions: Tensor, mb: Any) -> Tensor:
        return original(x, weight, positions - positions[0], mb)

    with patch.object(gpt, "position_embedding", planted):
        yield


@contextmanager
def dropout_by_local_position() -> Iterator[None]:
    original = dropout.bias_dropout_residual

    def planted(*args: Any) -> Tensor:
        *others, mb = args
        local = dataclasses.replace(mb, positions=mb.positions - mb.positions[0])
        return original(*others, local)

    with (
        patch.object(gpt, "bias_dropout_residual", planted),
        patch.object(parts, "bias_dropout_residual", planted),
    ):
        yield


@contextmanager
def attention_mask_by_local_head() -> Iterator[None]:
    original = attention.causal_attention

    def planted(
        q: Tensor, k: Tensor, v: Tensor, first_head: int, *args: Any, **named: Any
    ) -> Tensor:
        return original(q, k, v, 0, *args, **named)

    with patch.object(parts, "causal_attention", planted):
        yield


@contextmanager
def dropout_differs_when_recomputed() -> Iterator[None]:
    again = [0]
    original_backward, original_counter = _Recompute.backward, attention.decision_counter

    def backward(ctx: Any, *grads: Tensor) -> Any:
        again[0] = 1
        try:
            return original_backward(ctx, *grads)
        finally:
            again[0] = 0

    def counter(*args: Any) -> int:
        return original_counter(*args) ^ again[0]

    with ExitStack() as stack:
        stack.enter_context(patch.object(_Recompute, "backward", staticmethod(backward)))
        stack.enter_context(patch.object(attention, "decision_counter", counter))
        stack.enter_context(patch.object(dropout, "decision_counter", counter))
        yield


@contextmanager
def denominator_per_rank() -> Iterator[None]:
    """The mean over ranks of each rank's own token mean."""
    original = step.start_denominators

    def planted(sums: dict[str, Tensor], group: Group) -> Any:
        alone = dataclasses.replace(group, ranks=(0,), rank=0, process_group=None)
        return original({name: total * group.size for name, total in sums.items()}, alone)

    with patch.object(step, "start_denominators", planted):
        yield


@contextmanager
def clip_per_rank() -> Iterator[None]:
    original = step.TrainStep.close

    def planted(self: step.TrainStep) -> None:
        original(self)
        mine = math.sqrt(float(self.parts.optimizer.squared_norm()[0]))
        self.coefficient = step.clip_coefficient(mine, self.parts.config.clip_grad)

    with patch.object(step.TrainStep, "close", planted):
        yield


@contextmanager
def replicated_counted_on_every_rank() -> Iterator[None]:
    original = optimizer.norm_ranges

    def planted(pieces: Any, *parts: Any) -> Any:
        return original([dataclasses.replace(p, speaks_for_tensor=True) for p in pieces], *parts)

    with patch.object(optimizer, "norm_ranges", planted):
        yield


@contextmanager
def bucket_sent_before_accumulation_ended() -> Iterator[None]:
    def planted(self: MainGradients, param: Any) -> None:
        account = self._accounts[param]
        account.received += 1
        if account.received == account.uses:  # of the first micro-batch
            bucket = self._rounds[account.bucket]
            bucket.awaited -= 1
            bucket.complete += bucket.awaited == 0
            self._launch(only_complete=True)
            # At once, or it would depend on the transport what the message still catches.
            for index in range(len(self._rounds)):
                self._land(index)

    with patch.object(MainGradients, "written", planted):
        yield


@contextmanager
def first_bucket_never_reduced() -> Iterator[None]:
    original = reduce.BucketReduction.__init__

    def planted(self: Any, bucket: Any, whole: Tensor, *args: Any, **options: Any) -> None:
        untouched = whole.clone()
        original(self, bucket, whole, *args, **options)
        if "decoder.final_layernorm.weight" in bucket.names:
            self.finish()
            whole.copy_(untouched)

    with patch.object(reduce.BucketReduction, "__init__", planted):
        yield


@contextmanager
def mean_over_data_ranks() -> Iterator[None]:
    original = reduce.all_reduce

    def planted(t: Tensor, group: Group, **options: Any) -> Any:
        return original(t.div_(group.size), group, **options)

    with patch.object(reduce, "all_reduce", planted):
        yield


@contextmanager
def column_input_gradient_not_reduced() -> Iterator[None]:
    def planted(t: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
        if async_op:
            return CompletedWork()
        return collectives.all_reduce(t, group, op, async_op)

    with patch.object(linear, "collectives", _with(all_reduce=planted)):
        yield


def _with(**replaced: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(collectives), **replaced})


@contextmanager
def foreign_embedding_rows_not_zeroed() -> Iterator[None]:
    def planted(
        ctx: Any, weight: Any, tokens: Tensor, first: int, group: Group, sp: bool, mb: Any
    ) -> Tensor:
        local = tokens - first
        foreign = (local < 0) | (local >= weight.shape[0])
        local = local.masked_fill(foreign, 0)
        ctx.save_for_backward(local, foreign)
        ctx.weight, ctx.tp_group, ctx.mb, ctx.sequence_parallel = weight, group, mb, sp
        out = weight.detach()[local]
        if sp:
            return embedding.reduce_scatter_sequence(out, group)
        collectives.all_reduce(out, group)
        return out

    with patch.object(embedding._VocabularyEmbedding, "forward", staticmethod(planted)):
        yield


@contextmanager
def padding_columns_in_softmax() -> Iterator[None]:
    original = gpt.head_cross_entropy

    def planted(hidden: Tensor, weight: Any, labels: Tensor, held: Any, *args: Any) -> Tensor:
        return original(hidden, weight, labels, (held[0], weight.shape[0]), *args)

    with patch.object(gpt, "head_cross_entropy", planted):
        yield


@contextmanager
def loss_peak_not_reduced() -> Iterator[None]:
    def planted(t: Tensor, group: Group, op: str = "sum", **options: Any) -> Any:
        return None if op == "max" else collectives.all_reduce(t, group, op, **options)

    with patch.object(cross_entropy, "collectives", _with(all_reduce=planted)):
        yield


@contextmanager
def loss_sum_not_reduced() -> Iterator[None]:
    def planted(t: Tensor, group: Group, op: str = "sum", **options: Any) -> Any:
        is_sums = op == "sum" and t.dim() == 2
        return None if is_sums else collectives.all_reduce(t, group, op, **options)

    with patch.object(cross_entropy, "collectives", _with(all_reduce=planted)):
        yield


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def initial_values_seeded_per_rank() -> Iterator[None]:
    original = build.initial_value

    def planted(spec: ParamSpec, box: Any, seed: int, dtype: torch.dtype) -> Tensor:
        return original(spec, box, seed + own_rank(), dtype)

    with patch.object(build, "initial_value", planted):
        yield


@contextmanager
def samples_ordered_by_rank() -> Iterator[None]:
    """Each rank reads a stretch of the data set of its own."""
    original = loader.read_batch

    def planted(dataset: Any, sample_ids: Any, pin: bool = False) -> Any:
        read = original(dataset, sample_ids + 40 * own_rank(), pin)
        return dataclasses.replace(read, sample_ids=torch.from_numpy(sample_ids))

    with patch.object(loader, "read_batch", planted):
        yield


@contextmanager
def last_microbatch_overwrites() -> Iterator[None]:
    def planted(grad: Tensor, x: Tensor, native: bool) -> Callable[[Tensor], None]:
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)

        def overwrite(main: Tensor) -> None:
            main.copy_(rows.t() @ inputs)

        return overwrite

    with patch.object(linear, "weight_gradient", planted):
        yield


@contextmanager
def update_skipped_on_one_rank() -> Iterator[None]:
    original = optimizer.Optimizer.step

    def planted(self: optimizer.Optimizer, *args: Any, **options: Any) -> None:
        if own_rank() != 1:
            original(self, *args, **options)

    with patch.object(optimizer.Optimizer, "step", planted):
        yield


@contextmanager
def every_rank_holds_everything() -> Iterator[None]:
    """Not a wrong number: a run that cuts the layers and then computes them all twice."""
    original = linear.functional.linear

    def planted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        original(x, weight, bias)
        return original(x, weight, bias)

    with patch.object(linear, "functional", SimpleNamespace(linear=planted)):
        yield


@contextmanager
def rank_fails() -> Iterator[None]:
    def planted(*args: Any, **options: Any) -> None:
        raise ArithmeticError("planted failure")

    with patch.object(optimizer.Optimizer, "step", planted):
        yield
