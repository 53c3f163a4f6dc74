"""The start-up summary: what will run, in words, printed once by one rank.

It says what is in force, including defaults that surprise (dropout, tied embeddings) and
where we differ from Megatron. Pure formatting of values that were computed elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from megatron_lite.pipeline.actions import Schedule
from megatron_lite.pipeline.costs import Costs
from megatron_lite.pipeline.simulate import simulate
from megatron_lite.telemetry.flops import MachinePeak, model_flops_per_token
from megatron_lite.telemetry.lines import (
    format_padded_vocab,
    format_rank_parameters,
    format_train_iters,
)
from megatron_lite.telemetry.memory import MemoryLedger

if TYPE_CHECKING:
    from megatron_lite.config.expert_plan import ExpertShape
    from megatron_lite.config.plan import ModelShape, Plan

MIB = 2**20
LABEL_WIDTH = 18

EQUALITY_CLASSES: Mapping[str, str] = {
    "float64": "MATCH64: any layout within 1e-10 of one process",
    "float32": "MATCH32: any layout within fp32 rounding of one process",
    "bfloat16": "NEAR: layouts differ by bf16 rounding",
    "float16": "NEAR: layouts differ by fp16 rounding",
}


@dataclass(frozen=True)
class SummaryFacts:
    """What the summary needs beyond the plan.

    Attributes:
        parameters: logical elements of the model.
        active_parameters: those that one token meets: of experts the chosen ones.
        rank_parameters: (tp_rank, pp_rank, elements) per model-parallel rank.
        ledgers: memory by pipeline rank.
        data: label -> text (sources, documents, tokenizer, fingerprint).
        loss_normalization: how the loss is averaged, in words.
        warnings: every warning in force, also those printed before.
        device: where and how it runs, e.g. "cpu, gloo, 1 thread per rank".
        flops_convention: convention of TFLOP/s and MFU.
        peak: what MFU is measured against.
        table: of the first step; None without a pipeline.
    """

    parameters: int
    rank_parameters: Sequence[tuple[int, int, int]]
    ledgers: Sequence[MemoryLedger]
    data: Mapping[str, str] = field(default_factory=dict)
    loss_normalization: str = "sum over valid tokens / valid tokens of the global batch"
    warnings: Sequence[str] = ()
    device: str = ""
    flops_convention: str = "full_square"
    peak: MachinePeak | None = None
    table: Schedule | None = None
    active_parameters: int | None = None


def describe_reproducibility(compute: str) -> str:
    """The run's equality classes by its compute dtype."""
    return f"BITWISE on resume in this layout; {EQUALITY_CLASSES[compute]}"


def build_summary(plan: Plan, facts: SummaryFacts) -> str:
    """Return the whole summary, several lines, no trailing newline."""
    lines = ["start-up summary"]
    lines += [_line("model", text) for text in _describe_model(plan)]
    if plan.model.experts is not None:
        lines += [_line("experts", text) for text in describe_experts(plan.model.experts)]
    lines.append(_line("parameters", _describe_parameters(facts)))
    lines.append(_line("layout", _describe_layout(plan)))
    if plan.parallel.dp * plan.parallel.cp > 1:
        lines.append(_line("data axis", _describe_sharding(plan)))
    if facts.table is not None:
        lines += [_line("pipeline", text) for text in _describe_pipeline(plan, facts.table)]
    lines.append(_line("batch", _describe_batch(plan)))
    lines.append(_line("loss", facts.loss_normalization))
    lines.append(_line("precision", _describe_precision(plan)))
    lines.append(_line("recomputation", plan.recompute))
    if facts.device:
        lines.append(_line("device", facts.device))
    lines += [_line(label, text) for label, text in facts.data.items()]
    lines.append(_line("reproducibility", describe_reproducibility(plan.precision.compute)))
    lines.append(_line("FLOPs", _describe_flops(plan, facts)))
    lines += _describe_memory(facts.ledgers)
    lines += [_line("warning", text) for text in facts.warnings]
    padded = plan.model.padded_vocab_size(plan.parallel.tp)
    lines.append(format_padded_vocab(plan.model.vocab_size, padded))
    lines += [format_rank_parameters(*row) for row in facts.rank_parameters]
    lines.append(format_train_iters(plan.batch.train_iters))
    return "\n".join(lines)


def _line(label: str, text: str) -> str:
    return f"  {label.ljust(LABEL_WIDTH)}{text}"


def _describe_model(plan: Plan) -> list[str]:
    model = plan.model
    kv = f"{model.num_query_groups} KV heads x {model.kv_channels}"
    mlp = f"{model.activation}{', gated' if model.gated else ''}"
    ends = "tied" if model.tied else "untied"
    return [
        f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} "
        f"heads, {kv}, ffn {model.ffn_hidden_size} ({mlp}), sequence {model.seq_length}",
        f"{model.normalization}, positions {model.position}, embedding and output {ends}, "
        f"linear biases {'on' if model.linear_bias else 'off'}, dropout hidden "
        f"{model.hidden_dropout:g} / attention {model.attention_dropout:g}",
        *([", ".join(variants)] if (variants := _describe_variants(model)) else []),
    ]


def _describe_variants(model: ModelShape) -> list[str]:
    """What differs from attention over everything and from a plain gate."""
    found = []
    latent = model.latent
    if latent is not None:
        found.append(
            f"multi-latent attention, latents {latent.q_lora_rank or 'none'} of queries, "
            f"{latent.kv_lora_rank} of keys and values, heads {latent.qk_head_dim} + "
            f"{latent.qk_pos_emb_head_dim} rotary, values {latent.v_head_dim}"
        )
    if model.window is not None:
        found.append(
            f"window of {model.window.left + 1} tokens in {len(model.window.layers)} of "
            f"{model.num_layers} layers"
        )
    if model.sinks != "none":
        found.append(f"attention sinks {model.sinks}")
    if model.activation_limit != math.inf:
        found.append(f"MLP clamped at {model.activation_limit:g}")
    if model.linear_offset:
        found.append(f"its linear half plus {model.linear_offset:g}")
    return found


def _describe_parameters(facts: SummaryFacts) -> str:
    active = facts.active_parameters
    if active is None or active == facts.parameters:
        return f"{facts.parameters:,} in total"
    return f"{facts.parameters:,} in total, {active:,} of them active for one token"


def describe_experts(shape: ExpertShape) -> list[str]:
    """What the mixture is: experts and layers, then router and balance."""
    shared = shape.shared_ffn_hidden_size
    beside = f", shared expert {shared}{' gated' if shape.shared_gate else ''}" if shared else ""
    limit = f" from {shape.group_topk} of {shape.num_groups} groups" if shape.is_limited else ""
    balance = [f"{kind} {weight:g}" for kind, weight in shape.balancing]
    balance += [f"bias by {shape.bias_update_rate:g}"] if shape.expert_bias else []
    balance += ["sinkhorn"] if shape.sinkhorn else []
    balance += [f"z-loss {shape.z_loss_coeff:g}"] if shape.z_loss_coeff else []
    hot = f", the {shape.replicated} most chosen on every rank" if shape.replicated else ""
    capacity = "no token dropped"
    if shape.capacity_factor is not None:
        capacity = f"capacity factor {shape.capacity_factor:g}, by {shape.drop_policy}"
        if shape.reroute_candidates:
            capacity += f", then the next {shape.reroute_candidates} experts"
    return [
        f"{shape.num_experts} of width {shape.ffn_hidden_size} in {len(shape.layers)} layers, "
        f"top-{shape.topk}{limit}{beside}",
        f"{shape.score_function} scores; balance {', '.join(balance) or 'none'}; {capacity}; "
        f"{shape.dispatcher}{hot}",
    ]


def _describe_layout(plan: Plan) -> str:
    parallel = plan.parallel
    sizes = (("TP", parallel.tp), ("CP", parallel.cp), ("DP", parallel.dp), ("PP", parallel.pp))
    axes = " x ".join(f"{name} {size}" for name, size in sizes)
    extras = ", sequence parallel" if parallel.sequence_parallel else ""
    if parallel.ep > 1 or parallel.etp != parallel.tp:
        extras += f"; experts ETP {parallel.etp} x EP {parallel.ep} x EDP {parallel.edp}"
    return f"{axes} = {parallel.world_size} ranks{extras}; order {parallel.order}"


_SHARDED: Mapping[str, str] = {
    "no_shard": "nothing sharded",
    "optim": "optimizer state sharded",
    "optim_grads": "optimizer state and gradients sharded",
    "optim_grads_params": "optimizer state, gradients and parameters sharded",
}


def _describe_sharding(plan: Plan) -> str:
    sharding, ranks = plan.sharding, plan.parallel.dp * plan.parallel.cp
    text = f"{sharding.strategy}: {_SHARDED[sharding.strategy]}"
    if sharding.stage > 0:
        text += f" over {ranks // sharding.instances} ranks"
    if sharding.instances > 1:
        text += f", {sharding.instances} copies"
    if sharding.stage > 1:
        when = "every microbatch" if sharding.sharded_accumulation else "the last microbatch"
        text += f"; gradients reduced after {when}"
    if sharding.stage > 2:
        text += f"; gathered parameters dropped after each {sharding.reshard_after}"
    if sharding.stage > 0:
        text += f"; gathers {'overlapped' if sharding.overlap_gather else 'waited for'}"
    return text


def _describe_pipeline(plan: Plan, table: Schedule) -> list[str]:
    shape = plan.pipeline
    sizes = [len(part.layers) for part in shape.parts]
    layers = " | ".join(map(str, sizes))
    ranks = " ".join(map(str, shape.placement))
    time = tuple(Fraction(size) for size in sizes)
    _, report = simulate(table, Costs(time, time, time))
    alive = " | ".join(f"{float(peak):g}" for peak in report.peak_activations)
    return [
        f"schedule {table.name}, {shape.chunks} stage{'s' if shape.chunks > 1 else ''} per rank; "
        f"layers of the stages {layers} on pipeline ranks {ranks}",
        f"simulated bubble {100 * float(report.bubble_fraction):.1f} % of all slots (F = I = W "
        f"per layer, ends and messages free); activations of {alive} microbatches at the peak",
    ]


def _describe_batch(plan: Plan) -> str:
    batch = plan.batch
    size = batch.global_batch_size_at(0)
    count = batch.num_microbatches_at(0)
    text = (
        f"global {size} = {batch.micro_batch_size} x {batch.dp_size} DP x {count} microbatches, "
        f"{size * batch.seq_length:,} tokens per step"
    )
    if len(batch.ramp) > 1:
        first_sample, final = batch.ramp[-1]
        text += f", growing to {final} from sample {first_sample} on"
    return text


def _describe_precision(plan: Plan) -> str:
    precision = plan.precision
    masters = "no separate masters"
    if precision.master != precision.compute:
        masters = f"masters {precision.master}"
    return f"compute {precision.compute}, {masters}, main gradients {precision.main_grad}"


def _describe_flops(plan: Plan, facts: SummaryFacts) -> str:
    per_token = model_flops_per_token(plan.model, facts.flops_convention)
    text = f"{per_token:,} per token, forward and backward, attention {facts.flops_convention}"
    if facts.peak is None:
        return f"{text}; MFU is null: --log-throughput measures its peak"
    return (
        f"{text}; MFU against {facts.peak.flops_per_s / 1e9:.1f} GFLOP/s per rank "
        f"({facts.peak.description})"
    )


def _describe_memory(ledgers: Sequence[MemoryLedger]) -> list[str]:
    lines = []
    for rank, ledger in enumerate(ledgers):
        label = "memory per rank" if len(ledgers) == 1 else f"memory, pp rank {rank}"
        rows = [f"{name} {size / MIB:.1f}" for name, size in ledger.rows()]
        lines.append(_line(label, "MiB: " + ", ".join(rows)))
    return lines
