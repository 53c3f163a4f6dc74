"""Rules of the layout: how world, heads, layers, sequence and experts divide."""

from __future__ import annotations

from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.legal import (
    nearest_divisors,
    nearest_group_counts,
    nearest_multiples,
)
from megatron_lite.config.plan import ffn_size

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
CP = "--context-parallel-size"
EP = "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"
PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
PER_RANK = "--num-virtual-stages-per-pipeline-rank"


def world_message(f: Facts) -> str:
    """Tell which sizes would fit the world."""
    names = ((TP, f.tp), (PP, f.pp), (CP, f.cp))
    fits = []
    for name, size in names:
        rest = f.model_ranks // size
        if size > 1 and f.world_size % rest == 0:
            fits.append(f"{name} {nearest_divisors(f.world_size // rest, size)}")
    fits.append(f"a world of {nearest_multiples(f.model_ranks, f.world_size)} ranks")
    product = " x ".join(f"{name} {size}" for name, size in names)
    return (
        f"{product} = {f.model_ranks} does not divide the world size {f.world_size} "
        f"(data parallel size = world / (TP x PP x CP)); nearest legal: {', '.join(fits)}"
    )


def heads_message(f: Facts) -> str:
    """Tell which heads or TP would fit."""
    heads = f.number("num_attention_heads")
    return (
        f"--num-attention-heads {heads} must be a multiple of {TP} {f.tp} (each rank holds whole "
        f"heads); nearest legal: {TP} {nearest_divisors(heads, f.tp)}, "
        f"--num-attention-heads {nearest_multiples(f.tp, heads)}"
    )


def groups_fit_tp(f: Facts) -> bool:
    """Each rank holds whole KV heads, or each KV head lies on a whole number of ranks."""
    groups = f.number("num_query_groups")
    return groups % f.tp == 0 or f.tp % groups == 0


def groups_message(f: Facts) -> str:
    """Tell which KV heads fit TP."""
    groups, heads = f.number("num_query_groups"), f.number("num_attention_heads")
    return (
        f"--num-query-groups {groups} and {TP} {f.tp}: one must divide the other (a rank holds "
        "whole KV heads, or a KV head lies on a whole number of ranks); nearest legal: "
        f"--num-query-groups {nearest_group_counts(heads, f.tp, groups)}"
    )


def layers_message(f: Facts) -> str:
    """Tell which layers or PP would fit."""
    layers = f.number("num_layers")
    return (
        f"--num-layers {layers} must be a multiple of {PP} {f.pp} ({layers} % {f.pp} = "
        f"{layers % f.pp}: layers would be lost); nearest legal: "
        f"--num-layers {nearest_multiples(f.pp, layers)}, {PP} {nearest_divisors(layers, f.pp)}"
    )


def is_uneven(f: Facts) -> bool:
    """Say whether flags other than the even split deal out the layers."""
    c = f.config
    return (
        c.pipeline_model_parallel_layout is not None
        or c.decoder_first_pipeline_num_layers is not None
        or c.decoder_last_pipeline_num_layers is not None
        or c.account_for_embedding_in_pipeline_split
        or c.account_for_loss_in_pipeline_split
        or c.account_for_mtp_in_pipeline_split
    )


def layers_broken(f: Facts) -> bool:
    """An even split needs a whole number of layers per rank."""
    return f.has("num_layers") and not is_uneven(f) and f.number("num_layers") % f.pp != 0


def virtual_flag(f: Facts) -> tuple[str, int]:
    """Return the virtual-stage flag that is set, and its value."""
    if f.config.num_layers_per_virtual_pipeline_stage is not None:
        return PER_STAGE, f.config.num_layers_per_virtual_pipeline_stage
    return PER_RANK, f.config.num_virtual_stages_per_pipeline_rank or 0


def has_virtual(f: Facts) -> bool:
    """Say whether a virtual-stage flag is set to a positive number."""
    return f.has("num_layers_per_virtual_pipeline_stage") or f.has(
        "num_virtual_stages_per_pipeline_rank"
    )


def virtual_broken(f: Facts) -> bool:
    """Layers of a pipeline rank must divide into its virtual stages."""
    if not f.has("num_layers") or f.pp == 1 or not has_virtual(f) or is_uneven(f):
        return False
    layers = f.number("num_layers")
    return layers % f.pp == 0 and layers // f.pp % virtual_flag(f)[1] != 0


def virtual_message(f: Facts) -> str:
    """Tell the layers per rank, what would be lost, and what fits."""
    name, value = virtual_flag(f)
    layers = f.number("num_layers")
    per_rank = layers // f.pp
    return (
        f"--num-layers {layers} / {PP} {f.pp} = {per_rank} layers per pipeline rank, which {name} "
        f"{value} does not divide ({per_rank} % {value} = {per_rank % value}: "
        f"{per_rank % value * f.pp} of {layers} layers would be lost); nearest legal: {name} "
        f"{nearest_divisors(per_rank, value)}, --num-layers "
        f"{nearest_multiples(f.pp * value, layers)}"
    )


def virtual_without_pipeline_message(f: Facts) -> str:
    """Tell that virtual stages need a pipeline."""
    name, value = virtual_flag(f)
    return (
        f"{name} {value} needs a pipeline, but {PP} is {f.pp}; nearest legal: {PP} 2, or leave "
        f"out {name}"
    )


def sequence_message(f: Facts) -> str:
    """Tell which lengths or TP fit sequence parallelism."""
    length = f.number("seq_length")
    return (
        f"--seq-length {length} must be a multiple of {TP} {f.tp} under --sequence-parallel "
        f"({length} % {f.tp} = {length % f.tp}); nearest legal: --seq-length "
        f"{nearest_multiples(f.tp, length)}, {TP} {nearest_divisors(length, f.tp)}"
    )


def context_message(f: Facts) -> str:
    """Tell which lengths fit the context axis."""
    length, unit = f.number("seq_length"), 2 * f.cp
    return (
        f"--seq-length {length} must be a multiple of 2 x {CP} {f.cp} = {unit} (each rank holds "
        f"an early and a late chunk); nearest legal: --seq-length "
        f"{nearest_multiples(unit, length)}"
    )


def experts_message(f: Facts) -> str:
    """Tell which experts or EP fit."""
    experts = f.number("num_experts")
    return (
        f"--num-experts {experts} must be a multiple of {EP} {f.ep} ({experts} % {f.ep} = "
        f"{experts % f.ep}); nearest legal: {EP} {nearest_divisors(experts, f.ep)}, "
        f"--num-experts {nearest_multiples(f.ep, experts)}"
    )


def expert_world_message(f: Facts) -> str:
    """Tell which EP fits the world."""
    unit = f.etp * f.pp
    fits = f"a world of {nearest_multiples(f.ep * unit, f.world_size)} ranks"
    if f.world_size % unit == 0:
        fits = f"{EP} {nearest_divisors(f.world_size // unit, f.ep)}, {fits}"
    return (
        f"{EP} {f.ep} x {ETP} {f.etp} x {PP} {f.pp} = {f.ep * unit} does not divide the world "
        f"size {f.world_size}; nearest legal: {fits}"
    )


def ffn_width(f: Facts) -> int:
    """Return the MLP width; 0 where it is unknown."""
    known = f.config.ffn_hidden_size is not None or f.has("hidden_size")
    return ffn_size(f.config) if known else 0


def ffn_message(f: Facts) -> str:
    """Tell which MLP widths fit TP."""
    width = ffn_width(f)
    return (
        f"--ffn-hidden-size {width} must be a multiple of {TP} {f.tp}; nearest legal: "
        f"--ffn-hidden-size {nearest_multiples(f.tp, width)}, {TP} {nearest_divisors(width, f.tp)}"
    )


LAYOUT_RULES: tuple[Rule, ...] = (
    Rule("world-divides", lambda f: f.dp == 0, world_message),
    Rule(
        "heads-divide-tp",
        lambda f: f.has("num_attention_heads") and f.number("num_attention_heads") % f.tp != 0,
        heads_message,
    ),
    Rule(
        "kv-heads-fit-tp",
        lambda f: (
            f.config.group_query_attention
            and f.has("num_query_groups", "num_attention_heads")
            and not groups_fit_tp(f)
        ),
        groups_message,
    ),
    Rule("ffn-divides-tp", lambda f: ffn_width(f) > 0 and ffn_width(f) % f.tp != 0, ffn_message),
    Rule("layers-divide-pp", layers_broken, layers_message),
    Rule(
        "virtual-flags-exclusive",
        lambda f: (
            f.config.num_layers_per_virtual_pipeline_stage is not None
            and f.config.num_virtual_stages_per_pipeline_rank is not None
        ),
        lambda f: (
            f"{PER_STAGE} {f.config.num_layers_per_virtual_pipeline_stage} and {PER_RANK} "
            f"{f.config.num_virtual_stages_per_pipeline_rank} say the same thing twice: give one"
        ),
    ),
    Rule(
        "virtual-needs-pipeline",
        lambda f: has_virtual(f) and f.pp == 1,
        virtual_without_pipeline_message,
    ),
    Rule("virtual-divides", virtual_broken, virtual_message),
    Rule(
        "sequence-divides-tp",
        lambda f: (
            f.config.sequence_parallel
            and f.has("seq_length")
            and f.number("seq_length") % f.tp != 0
        ),
        sequence_message,
    ),
    Rule(
        "sequence-divides-cp",
        lambda f: f.cp > 1 and f.has("seq_length") and f.number("seq_length") % (2 * f.cp) != 0,
        context_message,
    ),
    Rule(
        "experts-divide-ep",
        lambda f: f.has("num_experts") and f.number("num_experts") % f.ep != 0,
        experts_message,
    ),
    Rule(
        "ep-needs-experts",
        lambda f: f.ep > 1 and f.config.num_experts is None,
        lambda f: (
            f"{EP} {f.ep} needs experts, but --num-experts is not given; nearest legal: {EP} 1, "
            f"or --num-experts {f.ep}"
        ),
    ),
    Rule(
        "experts-divide-world",
        lambda f: f.has("num_experts") and f.world_size % (f.ep * f.etp * f.pp) != 0,
        expert_world_message,
    ),
)
