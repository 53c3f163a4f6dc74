"""Scale a user's own flags down to a case that a laptop runs in seconds.

Kept is what decides which code runs: norms, biases, activation, rotary settings, dropout,
tying, recomputation, the relation of query heads, KV heads and TP, loss normalisation.
Scaled are sizes and the axes (at most eight ranks). Replaced are data (tiny documents,
their ends masked), optimizer (plain SGD, clipped) and precision. Whatever saves, loads, logs
or profiles is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_lite.config.batch_plan import build_batch
from megatron_lite.config.options import Option, build_options
from megatron_lite.config.plan import (
    ROTARY,
    ffn_size,
    head_channels,
    key_value_heads,
    position_kind,
    recompute_kind,
    rotary_dim,
)
from megatron_lite.config.schema import Config, ModelConfig, MoEConfig, flag_fields, required
from megatron_lite.config.sharding_plan import plan_sharding
from megatron_lite.verify.axes import (
    Axis,
    Case,
    data_axis,
    microbatch_axis,
    native_axis,
    recompute_axis,
    sequence_axis,
    sharding_axis,
    tensor_axis,
)
from megatron_lite.verify.scale_attention import scale_attention
from megatron_lite.verify.scale_experts import scale_experts, scaled_expert_axis
from megatron_lite.verify.scale_pipeline import ScaledPipeline, scale_pipeline
from megatron_lite.verify.tiny_data import write_tiny_dataset

MOST_RANKS = 8
# No multiple of anything: the last rows of every padded vocabulary are padding.
VOCABULARY = 101
KEPT_FIELDS = (
    "seed",
    "legacy_loss_normalization",
    "loss_chunks",
    "reset_position_ids",
    "reset_attention_mask",
    "use_tp_pp_dp_mapping",
)
PRECISIONS: Mapping[str, tuple[str, ...]] = {"fp64": ("--fp64",), "fp32": (), "bf16": ("--bf16",)}


@dataclass(frozen=True)
class Scaled:
    """A scaled-down case, and what was scaled, one line each."""

    case: Case
    notes: tuple[str, ...]


def equal_tokens_tie(config: Config) -> bool:
    """Whether tokens alike, whose states are alike without positions, compete for a full expert."""
    return (
        config.num_experts is not None
        and config.moe_expert_capacity_factor is not None
        and config.moe_token_drop_policy == "probs"
        and (
            config.position_embedding_type != "learned_absolute"
            or config.use_rotary_position_embeddings
        )
    )


def run_flags(
    data: Path, *, seq_length: int, steps: int, precision: str, runs: bool = True
) -> tuple[str, ...]:
    """Flags of every verification run apart from model, layout and batch.

    Args:
        data: folder for the tiny data set; written when missing.
        seq_length: tokens per sample.
        steps: to train.
        precision: key of `PRECISIONS`.
        runs: of ends of documents, see `write_tiny_dataset`.
    """
    prefix = data / f"tiny-{VOCABULARY}-{seq_length}{'' if runs else '-plain'}"
    write_tiny_dataset(prefix, VOCABULARY, seq_length, samples=200, runs=runs)
    return (
        "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY),
        "--data-path", str(prefix), "--data-cache-path", str(data / "cache"), "--split", "1",
        "--eod-mask-loss", "--num-workers", "0", "--eval-iters", "0",
        "--seq-length", str(seq_length), "--train-iters", str(steps),
        "--optimizer", "sgd", "--sgd-momentum", "0", "--weight-decay", "0",
        "--lr", "0.1", "--lr-decay-style", "constant",
        # Several buckets also in a tiny model.
        "--ddp-bucket-size", "4096",
        *PRECISIONS[precision],
    )  # fmt: skip


def scale_axis_sizes(sizes: Mapping[str, int], most: int = MOST_RANKS) -> dict[str, int]:
    """Shrink the axes to at most `most` ranks; every axis longer than 1 stays longer than 1.

    Grows each axis again, in turn, as long as all fit and it divides its original.
    """
    factors = {name: _prime_factors(size) for name, size in sizes.items()}
    scaled = {name: parts.pop(0) if parts else 1 for name, parts in factors.items()}
    if math.prod(scaled.values()) > most:
        scaled = {name: min(size, 2) for name, size in scaled.items()}
        factors = {name: [] for name in sizes}
    grown = True
    while grown:
        grown = False
        for name, parts in factors.items():
            if parts and math.prod(scaled.values()) * parts[0] <= most:
                scaled[name] *= parts.pop(0)
                grown = True
    return scaled


def _prime_factors(size: int) -> list[int]:
    factors, prime = [], 2
    while size > 1:
        while size % prime == 0:
            factors.append(prime)
            size //= prime
        prime += 1
    return factors


def scale_heads(heads: int, kv_heads: int, user_tp: int, tp: int) -> tuple[int, int]:
    """Few heads in the same relation: grouped or not, replicated over tp or not.

    Query heads per KV head and KV heads differ where the user's may, because equal numbers
    hide a swapped layout.
    """
    if kv_heads == heads:
        count = tp * min(max(heads // user_tp, 1), 2)
        return count, count
    replicas = max(user_tp // kv_heads, 1)
    if replicas == 1:
        groups = tp * min(max(kv_heads // user_tp, 1), 2)
    else:
        # Two different KV heads where the user has several and TP leaves room for replicas.
        groups = max(tp // replicas, min(tp // 2, 2) if kv_heads > 1 else 1, 1)
    per_group = max(2, tp // math.gcd(tp, groups))
    if per_group == groups and heads // kv_heads != kv_heads:
        per_group *= 2
    return groups * per_group, groups


def scale_down(config: Config, world_size: int, data: Path, steps: int, precision: str) -> Scaled:
    """Make the case of a checked config.

    Args:
        config: accepted by the rules for `world_size` ranks.
        world_size: of the user's job.
        data: folder for the tiny data set.
        steps: of every run.
        precision: "fp64" or "fp32".
    """
    user = {
        "tp": config.tensor_model_parallel_size,
        "pp": config.pipeline_model_parallel_size,
    }
    user["dp"] = world_size // (user["tp"] * user["pp"])
    sizes = scale_axis_sizes(user)
    plan = build_batch(config, user["dp"])
    microbatches = plan.ramp[-1][1] // (plan.micro_batch_size * user["dp"])
    pipeline = None
    if user["pp"] > 1:
        pipeline = scale_pipeline(config, sizes["pp"], microbatches)
    model = scale_model(config, sizes["tp"], pipeline)
    seq_length = model.pop("seq_length")
    experts = scale_experts(config, model["num_layers"], sizes["tp"])
    attention = scale_attention(config, model["num_layers"])
    kept = kept_values(config, model | experts | attention)
    micro = min(plan.micro_batch_size, 2)
    accumulation = scale_microbatches(microbatches, pipeline)
    batch = micro * accumulation * sizes["dp"]
    # The mean of micro-batch means, and everything that routes tokens, depends on them.
    fixed = config.legacy_loss_normalization or config.num_experts is not None
    axes = scaled_axes(config, sizes, pipeline, micro, accumulation > 1 and not fixed)
    case = Case(
        flags=(
            *format_flags(kept),
            *run_flags(
                data,
                seq_length=seq_length,
                steps=steps,
                precision=precision,
                runs=not equal_tokens_tie(config),
            ),
            "--global-batch-size",
            str(batch),
            # The reference is plain torch; native operations are one more axis.
            "--native-ops",
            "off",
        ),
        global_batch_size=batch,
        axes=axes,
        micro_batch_size=micro if fixed else None,
    )
    notes = [
        f"{name}: {getattr(config, name)} -> {value}"
        for name, value in {**model, **experts, **attention, "seq_length": seq_length}.items()
        if getattr(config, name, None) != value
    ]
    notes += [f"{name}: {user[name]} -> {size}" for name, size in sizes.items()]
    notes.append(
        f"global batch: {plan.ramp[-1][1]} -> {batch} "
        f"(micro-batch {micro}, {accumulation} per rank)"
    )
    notes += pipeline.notes(config) if pipeline is not None else []
    copies = config.num_distributed_optimizer_instances
    if copies != scale_copies(config, sizes["dp"]):
        notes.append(f"copies of shards: {copies} -> {scale_copies(config, sizes['dp'])}")
    notes.append(f"data -> tiny documents, their ends masked; optimizer -> SGD, {precision}")
    return Scaled(case, tuple(notes))


def scale_model(config: Config, tp: int, pipeline: ScaledPipeline | None) -> dict[str, int]:
    """Sizes of the scaled model by destination."""
    heads, groups = scale_heads(
        required(config.num_attention_heads),
        key_value_heads(config),
        config.tensor_model_parallel_size,
        tp,
    )
    channels = scale_channels(config)
    hidden = heads * channels
    if config.kv_channels is not None and config.kv_channels * required(
        config.num_attention_heads
    ) != required(config.hidden_size):
        hidden += 2 * channels  # the width of the heads is not that of the model
    ratio = min(max(ffn_size(config) / required(config.hidden_size), 1.0), 4.0)
    layers = min(required(config.num_layers), 2)
    if pipeline is not None:
        layers = sum(pipeline.layers)
    seq_length = 3 * tp if tp > 8 or 24 % tp else 24
    longer = required(config.max_position_embeddings) > required(config.seq_length)
    sizes = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "kv_channels": channels,
        "ffn_hidden_size": max(round(hidden * ratio / (4 * tp)), 1) * 4 * tp,
        "seq_length": seq_length,
        "max_position_embeddings": seq_length + 8 * longer,
        "make_vocab_size_divisible_by": min(config.make_vocab_size_divisible_by, 8),
    }
    if config.group_query_attention:
        sizes["num_query_groups"] = groups
    return sizes


def scale_channels(config: Config) -> int:
    """Channels per head: 8, or more where the rotated share would not be a number of pairs."""
    if position_kind(config) not in ROTARY:
        return 8
    share = rotary_dim(config) / head_channels(config)
    for channels in (8, 16, 32, 64):
        rotated = int(channels * config.rotary_percent) if share < 1.0 else channels
        if rotated >= 2 and rotated % 2 == 0:
            return channels
    return head_channels(config)


def scale_microbatches(microbatches: int, pipeline: ScaledPipeline | None) -> int:
    """Micro-batches per rank: one stays one, several become two.

    In a pipeline they become twice its ranks, so that it has a steady phase, or stay fewer;
    a table has its number.
    """
    if pipeline is None:
        return min(microbatches, 2)
    return pipeline.microbatches or min(microbatches, 2 * pipeline.ranks)


def scaled_axes(
    config: Config,
    sizes: Mapping[str, int],
    pipeline: ScaledPipeline | None,
    micro: int,
    accumulates: bool,
) -> tuple[Axis, ...]:
    """The axes that the user's layout has.

    Args:
        micro: micro-batch size.
        accumulates: several micro-batches against one are an axis.
    """
    axes: list[Axis] = []
    if sizes["tp"] > 1:
        axes.append(tensor_axis(sizes["tp"]))
        if config.sequence_parallel:
            axes.append(sequence_axis())
    has_table = pipeline is not None and pipeline.microbatches is not None
    if pipeline is not None:
        axes.append(pipeline.axis(sizes["dp"], micro) if has_table else pipeline.axis())
    if sizes["dp"] > 1 and not has_table:
        axes.append(data_axis(sizes["dp"]))
    if sizes["dp"] > 1:
        axes += scale_sharding(config, sizes["dp"], needs="pp" if has_table else "dp")
    if not has_table:
        axes += scaled_expert_axis(config, sizes["tp"], sizes["dp"])
    if accumulates and not has_table:
        axes.append(microbatch_axis(micro))
    recompute = recompute_kind(config)
    if recompute != "none":
        layers = min(config.recompute_num_layers or 1, min(required(config.num_layers), 2))
        if config.recompute_method == "block" and config.recompute_num_layers != config.num_layers:
            layers = 1
        axes.append(recompute_axis(recompute, config.recompute_method or "uniform", layers))
    if config.native_ops == "on":
        axes.append(native_axis("on"))
    return tuple(axes)


def scale_sharding(config: Config, dp: int, needs: str) -> list[Axis]:
    """What the user's data axis shards, in two copies where there were several and ranks allow."""
    sharding = plan_sharding(config)
    copies = scale_copies(config, dp)
    if sharding.stage == 0 and copies == 1:
        return []
    flags = ["--num-distributed-optimizer-instances", str(copies)] if copies > 1 else []
    if sharding.overlap_gather:
        flags.append("--overlap-param-gather")
    if sharding.stage > 1:
        flags += ["--gradient-accumulation", config.gradient_accumulation]
    if sharding.stage > 2:
        flags += ["--reshard-after", sharding.reshard_after]
    return [replace(sharding_axis(sharding.strategy, *flags), needs=needs)]


def scale_copies(config: Config, dp: int) -> int:
    """Copies of the shards: two, of at least two ranks each, or one."""
    several = config.num_distributed_optimizer_instances > 1
    return 2 if several and dp % 2 == 0 and dp > 2 else 1


def kept_values(config: Config, scaled: Mapping[str, Any]) -> dict[str, Any]:
    """Destinations and values of the scaled model's flags."""
    names = [field.name for group in (ModelConfig, MoEConfig) for field in flag_fields(group)]
    values = {name: getattr(config, name) for name in (*names, *KEPT_FIELDS)}
    for replaced in ("seq_length", "vocab_size"):
        values.pop(replaced, None)
    return {**values, **scaled}


def format_flags(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Write values as words of a command line; defaults are left out."""
    options = build_options()
    words: list[str] = []
    for dest, value in values.items():
        if value is not None and value != options[dest].default:
            words += _format_flag(options[dest], value)
    return tuple(words)


def _format_flag(option: Option, value: Any) -> list[str]:
    if option.kind == "bool":
        return [next(name for name, sets in option.spellings if sets is value)]
    if isinstance(value, tuple):
        return [option.name, *(str(item) for item in value)]
    return [option.name, str(value)]
