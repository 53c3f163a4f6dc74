"""Nothing extra is sent: the collectives of whole steps equal the closed formula."""

from collections import Counter
from itertools import pairwise

import pytest

from megatron_lite.config.flags import parse_config
from megatron_lite.config.pipeline_plan import PipelineShape
from megatron_lite.config.plan import Plan, build_plan
from megatron_lite.mesh.grid import build_grids
from megatron_lite.optim.groups import param_group
from megatron_lite.shard.flat import ALIGNMENT, build_layout
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.physical import physical_params
from megatron_lite.spec.shards import local_shape
from megatron_lite.verify.axes import (
    Axis,
    data_axis,
    microbatch_axis,
    pipeline_axis,
    sequence_axis,
    tensor_axis,
)
from megatron_lite.verify.certify import Certifier
from megatron_lite.verify.share import rank_specs
from tests.parity.conftest import Certifiers

pytestmark = pytest.mark.parity

Sent = Counter[tuple[str, str, int]]
STEPS = 2
LOGGED_SUMS = 2  # loss and valid tokens, in the closing reduction


def microbatch_sends(plan: Plan, cut: PipelineShape, rank: int) -> Sent:
    """Forward and backward of one microbatch: over tp, and to and from other pipeline ranks."""
    tokens = plan.model.seq_length * plan.batch.micro_batch_size
    full = tokens * plan.model.hidden_size
    here = [part for part in cut.parts if cut.placement[part.stage] == rank]
    layers = sum(len(part.layers) for part in here)
    ends = sum(part.embedding + part.head for part in here)
    sent: Sent = Counter()
    sequence_parallel = plan.parallel.sequence_parallel and plan.parallel.tp > 1
    message = full // plan.parallel.tp if sequence_parallel else full
    for stage, following in pairwise(range(len(cut.placement))):
        source, destination = cut.placement[stage], cut.placement[following]
        if source != destination and rank in (source, destination):
            sent["send" if rank == source else "recv", "pp.F", message] += 1
            sent["recv" if rank == source else "send", "pp.B", message] += 1
    if plan.parallel.tp == 1:
        return sent
    if sequence_parallel:
        # Per layer: two regions, each gathers at the entry and scatters at the exit; the
        # backward mirrors that and gathers the saved slice once more. The embedding
        # scatters, the head gathers, and both the other way round in the backward.
        sent["all_gather", "tp", full] = layers * (2 + 2 + 2) + ends
        sent["reduce_scatter.sum", "tp", full] = layers * (2 + 2) + ends
    else:
        sent["all_reduce.sum", "tp", full] = layers * (2 + 2) + ends
    if any(part.head for part in here):
        # The cross-entropy of one chunk: peaks, then sums and picked logits.
        sent["all_reduce.max", "tp", tokens] += 1
        sent["all_reduce.sum", "tp", 2 * tokens] += 1
    return sent


def partial_elements(specs: tuple[ParamSpec, ...], axis: str) -> int:
    total = 0
    for spec in specs:
        size = 1
        for length in local_shape(spec):
            size *= length
        total += size * (axis in spec.partial_axes)
    return total


def step_sends(plan: Plan, cut: PipelineShape, rank: int, bucket_size: int) -> Sent:
    """Everything that a rank of this pipeline coordinate starts in one step."""
    specs = rank_specs(plan, cut, rank)
    sent: Sent = Counter()
    for key, count in microbatch_sends(plan, cut, rank).items():
        sent[key] += count * plan.batch.num_microbatches_at(0)
    if plan.parallel.dp > 1:
        sent["all_reduce.sum", "dp_cp", 1] += 1  # the opening reduction: the denominator
        layout = build_layout(
            physical_params(specs),
            dtype_of=lambda physical: "float64",
            group_of=param_group,
            bucket_size=bucket_size,
        )
        for bucket in layout.buckets:
            sent["all_reduce.sum", "dp_cp", bucket.elements] += 1
        numels = [slot.numel for slot in layout.slots.values()]
        aligned = sum(-(-numel // ALIGNMENT) * ALIGNMENT for numel in numels)
        assert sum(bucket.elements for bucket in layout.buckets) <= aligned
    for axis, size in (
        ("tp", plan.parallel.tp),
        ("kv_replica", kv_replicas(plan)),
        ("tied_ends", 2),  # only a tied embedding on two ranks is partial over it
    ):
        if size > 1 and partial_elements(specs, axis):
            sent["all_reduce.sum", axis, partial_elements(specs, axis)] += 1
    sent["all_reduce.sum", "world", 5 + LOGGED_SUMS] += 1  # the closing reduction
    return sent


def kv_replicas(plan: Plan) -> int:
    return max(plan.parallel.tp // plan.model.num_query_groups, 1)


@pytest.mark.parametrize("model", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize(
    "axes",
    [
        (tensor_axis(2),),
        (tensor_axis(4),),
        (tensor_axis(2), sequence_axis()),
        (data_axis(2),),
        (data_axis(2), microbatch_axis(1)),
        (tensor_axis(2), sequence_axis(), data_axis(2), microbatch_axis(2)),
    ],
    ids=lambda axes: "+".join(f"{axis.name}{axis.ranks}" for axis in axes),
)
def test_collectives_of_a_step_equal_the_formula(
    certifier_of: Certifiers, model: str, axes: tuple[Axis, ...]
) -> None:
    check_sends(certifier_of(model, steps=STEPS), axes)


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        ("gpt2", (pipeline_axis(2), microbatch_axis(2))),
        ("gpt2", (pipeline_axis(4, "zb-h1"), microbatch_axis(2))),
        ("llama", (pipeline_axis(2, "interleaved-zb", 2), microbatch_axis(1))),
        ("gpt2", (pipeline_axis(2, "zbv"), microbatch_axis(2))),
        ("qwen3", (pipeline_axis(2), tensor_axis(2), sequence_axis(), microbatch_axis(2))),
        ("gpt2", (pipeline_axis(2, "zb-h2"), data_axis(2), microbatch_axis(1))),
    ],
    ids=["1f1b2", "zb-h1-4", "interleaved-zb-2x2", "zbv2", "1f1b2+tp2+sp", "zb-h2-2+dp2"],
)
def test_messages_and_collectives_of_a_pipeline_equal_the_formula(
    certifier_of: Certifiers, model: str, axes: tuple[Axis, ...]
) -> None:
    check_sends(certifier_of(model, steps=STEPS, extra="--num-layers 4"), axes)


def check_sends(certifier: Certifier, axes: tuple[Axis, ...]) -> None:
    _, shares = certifier.run(axes, measure=True, dump=False)
    layout = certifier.case.layout(axes)
    config = parse_config([*certifier.case.flags, *layout.flags], {})
    assert config.vocab_size is not None and config.ddp_bucket_size is not None
    plan = build_plan(config, layout.ranks, config.vocab_size)
    cut, grid = plan.pipeline, build_grids(plan.parallel).dense
    for rank, share in enumerate(shares):
        pipeline_rank = grid.coordinate(rank)["pp"]
        expected = step_sends(plan, cut, pipeline_rank, config.ddp_bucket_size)
        wanted = Counter({key: count * STEPS for key, count in expected.items()})
        assert Counter(share.collectives) == wanted, f"rank {rank}"
    assert not certifier.share_faults(axes, shares)
