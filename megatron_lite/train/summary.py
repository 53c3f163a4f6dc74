"""What a run says before its first step: the start-up summary and the metrics header.

Printed once, by the rank that prints the log. Every default that surprises is in it, and
the layers are counted over ranks: a cut that lost one would show here and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import torch

from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.config.notices import notices
from megatron_lite.config.state_plan import offload_fraction, offload_kind, offloaded_buckets
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.mesh.collectives import all_gather_json
from megatron_lite.optim.ledger import (
    frozen_elements,
    state_per_element,
    statistics_elements,
    trained_by,
)
from megatron_lite.pipeline.partition import AT_EMBEDDING
from megatron_lite.shard.flat import FlatLayout, build_layout, default_bucket_size
from megatron_lite.shard.units import unit_rule
from megatron_lite.spec.params import ParamSpec
from megatron_lite.spec.physical import PhysicalParam, physical_params
from megatron_lite.spec.stages import specs_on_rank
from megatron_lite.telemetry.data_axis import DataLayout, data_layout, data_sharding
from megatron_lite.telemetry.memory import (
    ActivationShape,
    MemoryLedger,
    estimate_memory,
    estimate_stage_bytes,
)
from megatron_lite.telemetry.pipeline_memory import Alive, peak_alive
from megatron_lite.telemetry.state_memory import DTYPE_BYTES, StateBytes, estimate_state
from megatron_lite.telemetry.summary import SummaryFacts, build_summary
from megatron_lite.tensor.cross_entropy import chunk_count
from megatron_lite.train.parts import Parts
from megatron_lite.train.restore import Restored

LEGACY = "mean of micro-batch means (--legacy-loss-normalization)"


def announce(parts: Parts, tokenizer: Tokenizer, restored: Restored) -> None:
    """Print the summary and what loading had to tell, and write the metrics header.

    Comm: one gather of a few bytes per rank over the world.
    """
    groups, telemetry = parts.groups, parts.telemetry
    elements = sum(param.numel() for param in parts.stage.parameters())
    mine = [groups.tp.rank, groups.pp.rank, elements, groups.dp_cp.rank, count_layers(parts)]
    ranks = all_gather_json(mine, groups.world)
    layers = sum(row[4] for row in ranks if row[3] == 0 and row[0] == 0)
    check_layers(parts, layers)
    table = parts.pipeline.table(parts.plan.batch.num_microbatches_at(0))
    total = sum(spec.elements for spec in parts.specs)
    facts = SummaryFacts(
        parameters=total,
        active_parameters=active_parameters(parts.specs, parts.plan.model.experts),
        rank_parameters=sorted({(row[0], row[1], row[2]) for row in ranks}),
        ledgers=[estimate_ledger(parts, rank) for rank in range(groups.pp.size)],
        data=describe_data(parts, tokenizer),
        warnings=[
            *notices(parts.config, groups.world.size),
            *frozen_routers(parts),
            *telemetry.warnings,
            *([parts.native_warning] if parts.native_warning else []),
            *([parts.pipeline.warning] if parts.pipeline.warning else []),
        ],
        device=describe_device(parts),
        flops_convention=telemetry.options.flops_convention,
        peak=telemetry.peak,
        table=table if groups.pp.size > 1 else None,
    )
    if parts.config.legacy_loss_normalization:
        facts = SummaryFacts(**{**vars(facts), "loss_normalization": LEGACY})
    telemetry.say(build_summary(parts.plan, facts))
    telemetry.say(f" > layers total {layers}, as requested")
    for note in restored.notes:
        telemetry.say(note)
    telemetry.header(total, elements, seed=parts.config.seed, facts=dict(parts.facts))
    if restored.loaded:
        telemetry.event("load", restored.state.iteration, directory=restored.directory)


def active_parameters(specs: Sequence[ParamSpec], experts: ExpertShape | None) -> int:
    """Logical elements that one token meets: of the experts as many as it chooses."""
    dense = sum(spec.elements for spec in specs if spec.grid == "dense")
    if experts is None:
        return dense
    stacked = sum(spec.elements for spec in specs if spec.grid == "expert")
    return dense + stacked // experts.num_experts * experts.topk


def frozen_routers(parts: Parts) -> list[str]:
    """Tell that the biases of frozen routers do not move, where there are any."""
    experts = parts.plan.model.experts
    if experts is None or not experts.expert_bias:
        return []
    routers = [spec.name for spec in parts.specs if spec.name.endswith(".mlp.router.weight")]
    frozen = [name for name in routers if name in parts.optimizer.recipe.frozen]
    if not frozen:
        return []
    return [
        f"--freeze: {len(frozen)} of {len(routers)} routers are frozen, and their expert_bias with "
        "them (--moe-router-enable-expert-bias)"
    ]


def count_layers(parts: Parts) -> int:
    """Transformer layers whose parameters this rank's stage holds."""
    uses = {use for physical in parts.stage.physical.values() for use in physical.uses}
    return sum(use.startswith("layer.") for use in uses)


def check_layers(parts: Parts, found: int) -> None:
    """Refuse to train a model that lost layers in being cut."""
    if found != parts.plan.model.num_layers:
        raise RuntimeError(
            f"the stages hold {found} layers, --num-layers is {parts.plan.model.num_layers}"
        )


def estimate_ledger(parts: Parts, pipeline_rank: int) -> MemoryLedger:
    """Memory of a pipeline rank by the closed formula and the table of the first step."""
    plan, config, shape = parts.plan, parts.config, parts.plan.pipeline
    state = estimate_rank_state(parts, pipeline_rank)
    tokens = plan.batch.micro_batch_size * plan.model.seq_length
    logit_bytes = parts.stage.dtype.itemsize if parts.native else 4
    vocab_rows = plan.model.padded_vocab_size(plan.parallel.tp) // plan.parallel.tp
    chunks = chunk_count(tokens, vocab_rows, config.loss_chunks, logit_bytes)
    held = [part for part in shape.parts if shape.placement[part.stage] == pipeline_rank]
    ledger = estimate_memory(
        plan.model,
        plan.parallel,
        plan.precision,
        state,
        micro_batch_size=plan.batch.micro_batch_size,
        layers=[layer for part in held for layer in part.layers],
        has_head=any(part.head for part in held),
        logits_chunk_tokens=math.ceil(tokens / chunks),
        native=parts.native,
    )
    peak = estimate_peak(parts, pipeline_rank)
    return replace(
        ledger, activations_bytes=peak.activations_bytes, messages_bytes=peak.messages_bytes
    )


def estimate_rank_state(parts: Parts, pipeline_rank: int) -> StateBytes:
    """Model state of a pipeline rank, with what the optimizer's rules keep of each group."""
    plan, recipe = parts.plan, parts.optimizer.recipe
    one = estimate_state(
        rank_layout(parts, pipeline_rank),
        plan.precision,
        data_sharding(plan),
        moments=[plan.precision.master],
        microbatches=plan.batch.num_microbatches_at(0),
    )
    layout = rank_buckets(parts, pipeline_rank)
    whole = statistics_elements(recipe, layout) * DTYPE_BYTES[plan.precision.master]
    physicals = rank_physicals(parts, pipeline_rank)
    master = DTYPE_BYTES[plan.precision.master]
    frozen = frozen_elements(recipe, physicals, trained=True) * DTYPE_BYTES[plan.precision.compute]
    frozen += frozen_elements(recipe, physicals, trained=False) * master
    spared = sum(master - DTYPE_BYTES[dtype] for _, dtype in plan.precision.moments)
    moments = round(one.moments * state_per_element(recipe, layout)) + whole
    state = replace(
        one,
        parameters=one.parameters + frozen,
        moments=moments - one.moments // master * spared,  # only Adam's, which all groups have
    )
    away = offloaded_share(parts, pipeline_rank) * (state.masters + state.moments)
    return replace(state, elsewhere=int(away))


def offloaded_share(parts: Parts, pipeline_rank: int) -> Fraction:
    """Share of masters and moments that is not in the memory of the parameters' device."""
    config, sharding = parts.config, data_sharding(parts.plan)
    if offload_kind(config) == "cpu" and parts.device.type == "cpu":
        return Fraction(0)
    held = [sharding.held(extent, 1) for extent in rank_layout(parts, pipeline_rank).extents]
    chosen = offloaded_buckets(held, offload_fraction(config))
    return Fraction(sum(held[index] for index in chosen), max(sum(held), 1))


def rank_physicals(parts: Parts, pipeline_rank: int) -> tuple[PhysicalParam, ...]:
    """The stored parameters of a pipeline rank."""
    shape = parts.plan.pipeline
    return physical_params(specs_on_rank(parts.specs, shape.parts, shape.placement, pipeline_rank))


def rank_buckets(parts: Parts, pipeline_rank: int) -> FlatLayout:
    """The buckets of a pipeline rank; as arithmetic, so those of other ranks, too."""
    plan, shape, recipe = parts.plan, parts.plan.pipeline, parts.optimizer.recipe
    held = [part for part in shape.parts if shape.placement[part.stage] == pipeline_rank]
    physicals = trained_by(recipe, rank_physicals(parts, pipeline_rank))
    size = parts.config.ddp_bucket_size or default_bucket_size(plan.parallel.dp, physicals)
    return build_layout(
        physicals,
        dtype_of=lambda physical: plan.precision.compute,
        group_of=recipe.grouping,
        bucket_size=size,
        shards=data_sharding(plan).shards,
        unit_of=unit_rule(plan.sharding, held),
    )


def rank_layout(parts: Parts, pipeline_rank: int) -> DataLayout:
    """The buckets of a pipeline rank, and their use in one pass."""
    plan, shape = parts.plan, parts.plan.pipeline
    held = [part for part in shape.parts if shape.placement[part.stage] == pipeline_rank]
    group = 1
    if plan.recompute == "full" and parts.config.recompute_method != "block":
        group = parts.config.recompute_num_layers or 1
    forward = [site for part in held for site in held_together(part.uses, group)]
    read_again = {use for part in held for use in part.backward_uses}
    backward = [site for site in reversed(forward) if read_again.issuperset(site)]
    return data_layout(rank_buckets(parts, pipeline_rank), forward, backward)


def held_together(uses: Sequence[str], group: int) -> list[tuple[str, ...]]:
    """A stage's use-sites with so many layers in one, as they are recomputed."""
    layers = [use for use in uses if use.startswith("layer.")]
    grouped = [tuple(layers[start : start + group]) for start in range(0, len(layers), group)]
    others = [(use,) for use in uses if use not in layers]
    first = [site for site in others if site == (AT_EMBEDDING,)]
    return [*first, *grouped, *others[len(first) :]]


def estimate_peak(parts: Parts, pipeline_rank: int) -> Alive:
    """Activations and messages of a pipeline rank at the peak of the first step."""
    plan, config, shape = parts.plan, parts.config, parts.plan.pipeline
    is_block = config.recompute_method == "block"
    recomputed = config.recompute_num_layers or 1
    microbatch = ActivationShape(
        plan.model,
        plan.parallel,
        plan.precision,
        plan.batch.micro_batch_size,
        native=parts.native,
    )
    stages = {
        part.stage: estimate_stage_bytes(
            microbatch,
            part.layers,
            embedding=part.embedding,
            head=part.head,
            recompute=plan.recompute,
            recomputed_layers=recomputed if is_block else None,
            recompute_group=1 if is_block else recomputed,
        )
        for part in shape.parts
    }
    table = parts.pipeline.table(plan.batch.num_microbatches_at(0))
    return peak_alive(table.ranks[pipeline_rank], stages, microbatch.stream_bytes)


def describe_data(parts: Parts, tokenizer: Tokenizer) -> dict[str, str]:
    """Lines about data and tokenizer."""
    sizes = {
        name: len(dataset)
        for name, dataset in (
            ("train", parts.datasets.train),
            ("valid", parts.datasets.valid),
            ("test", parts.datasets.test),
        )
        if dataset is not None
    }
    shown = ", ".join(f"{name} {size:,}" for name, size in sizes.items()) or "none"
    source = "mock data" if parts.config.mock_data else "indexed datasets"
    return {
        "data": f"{source}; samples: {shown}",
        "tokenizer": f"{tokenizer.name}, {tokenizer.vocab_size:,} ids",
    }


def describe_device(parts: Parts) -> str:
    """Where the run computes and how its ranks talk."""
    operations = "native" if parts.native else "plain torch"
    if parts.device.type == "cuda":
        return f"{torch.cuda.get_device_name(parts.device)}, NCCL, {operations} operations"
    threads = torch.get_num_threads()
    transport = "gloo" if parts.groups.world.size > 1 else "one process"
    per_rank = f"{threads} thread{'s' if threads > 1 else ''} per rank"
    return f"cpu, {transport}, {per_rank}, {operations} operations"
