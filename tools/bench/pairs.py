"""What pairs of a forward and a backward gain, simulated: DeepSeek-V3's shape and layout.

2,048 GPUs, 16 pipeline ranks, 64-way expert parallelism, 128-way data parallelism, batches of
15,360 sequences of 4,096 tokens, as published with the model; without multi-token prediction
and recomputation. FLOPs are those of the model's shape, an all-to-all moves `--copies` rows of h
per token; speeds are flags. Nothing is measured here: prints a Markdown table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, too

from megatron_lite.config.flags import parse_config
from megatron_lite.config.pipeline_plan import PipelineShape
from megatron_lite.config.plan import ModelShape, Plan, build_plan
from megatron_lite.pipeline.costs import Costs
from megatron_lite.pipeline.simulate import Report, simulate
from megatron_lite.telemetry.flops import (
    FLOPS_PER_MULTIPLY_ADD,
    layer_matmul_weights,
    model_flops_per_token,
)

GPUS = 2048
_FLAGS = """
--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
--seq-length 4096 --max-position-embeddings 4096 --normalization RMSNorm --swiglu
--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --num-experts 256
--moe-ffn-hidden-size 2048 --moe-router-topk 8 --moe-shared-expert-intermediate-size 2048
--moe-layer-freq [0]*3+[1]*58 --moe-router-score-function sigmoid --moe-router-num-groups 8
--moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias
--expert-model-parallel-size 64 --moe-token-dispatcher-type alltoall
--pipeline-model-parallel-size 16 --micro-batch-size 1 --global-batch-size 15360 --train-iters 1
--lr 1e-4 --bf16 --tokenizer-type NullTokenizer --vocab-size 129279 --mock-data
"""
DEEPSEEK_V3 = tuple(_FLAGS.split())
VOCABULARY = 129_280
# The head computes as much as 1.4 layers; the layers before it are dealt out evenly.
LAYOUTS = {1: "Etttt|" + "tttt|" * 14 + "tL", 2: "Ett|" + "tt|" * 29 + "t|L"}
CASES = (("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("dualpipev", 2))


@dataclass(frozen=True)
class Machine:
    """Assumed speeds of one GPU."""

    flops_s: float
    bytes_s: float
    row_bytes: float  # of dispatch and combine together, per element of a row
    copies: int


def plan_of(schedule: str, chunks: int, paired: bool) -> Plan:
    """The run as the program would plan it."""
    argv = [*DEEPSEEK_V3, "--pipeline-schedule", schedule]
    argv += ["--pipeline-model-parallel-layout", LAYOUTS[chunks]]
    argv += ["--overlap-moe-expert-parallel-comm"] if paired else []
    return build_plan(parse_config(argv, {}), GPUS, VOCABULARY)


def costs_of(model: ModelShape, shape: PipelineShape, machine: Machine, exchange: bool) -> Costs:
    """Seconds per microbatch of every stage; I computes attention's products twice, W not."""
    tokens = model.seq_length
    attention = attention_flops_per_token(model) * tokens / machine.flops_s
    forward, input_grad, weight_grad, exchanges = [], [], [], []
    for part in shape.parts:
        weights = sum(layer_matmul_weights(model, layer) for layer in part.layers)
        weights += model.hidden_size * model.vocab_size if part.head else 0
        linear = FLOPS_PER_MULTIPLY_ADD * weights * tokens / machine.flops_s
        inside = attention * len(part.layers)
        forward.append(linear + inside)
        input_grad.append(linear + 2 * inside)
        weight_grad.append(linear)
        rows = machine.copies * tokens * sum(model.is_moe(layer) for layer in part.layers)
        travel = rows * model.hidden_size * machine.row_bytes / machine.bytes_s
        exchanges.append((travel, travel, 0.0) if exchange else (0.0, 0.0, 0.0))
    message = 2 * tokens * model.hidden_size / machine.bytes_s
    return Costs(
        tuple(forward),
        tuple(input_grad),
        tuple(weight_grad),
        transfer=message,
        exchanges=tuple(exchanges),
    )


def attention_flops_per_token(model: ModelShape) -> float:
    """Forward FLOPs of scores and values of one layer, causal."""
    channels = model.num_attention_heads * (model.kv_channels + model.value_channels)
    return FLOPS_PER_MULTIPLY_ADD * channels * model.seq_length / 2


def play(schedule: str, chunks: int, paired: bool, machine: Machine, exchange: bool) -> Report:
    """Simulate one step."""
    plan = plan_of(schedule, chunks, paired)
    table = plan.pipeline.table(plan.batch.num_microbatches_at(0))
    costs = costs_of(plan.model, plan.pipeline, machine, exchange)
    return simulate(table, costs)[1]


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--peak-tflops", type=float, default=989, help="of one GPU (989)")
    parser.add_argument(
        "--efficiency", type=float, default=0.5, help="share of it that products reach (0.5)"
    )
    parser.add_argument(
        "--bandwidth-gb-s", type=float, default=50, help="of one GPU's network (50)"
    )
    parser.add_argument(
        "--dispatch-bytes", type=float, default=1, help="per element on the way there (1)"
    )
    parser.add_argument(
        "--combine-bytes", type=float, default=2, help="per element on the way back (2)"
    )
    parser.add_argument(
        "--copies",
        type=int,
        default=4,
        help="rows that leave a GPU per token: 4 if a node gets one, 8 if every expert does (4)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    options = build_parser().parse_args(argv)
    machine = Machine(
        options.peak_tflops * 1e12 * options.efficiency,
        options.bandwidth_gb_s * 1e9,
        options.dispatch_bytes + options.combine_bytes,
        options.copies,
    )
    plan = plan_of("1f1b", 1, False)
    flops = model_flops_per_token(plan.model, "causal_half")
    costs = costs_of(plan.model, plan.pipeline, machine, exchange=True)
    layers = len(plan.pipeline.parts[1].layers)
    print(
        f"{flops / 1e9:.1f} GFLOP per token, {plan.batch.num_microbatches_at(0)} microbatches; a "
        f"MoE layer's forward computes {1e3 * costs.forward[1] / layers:.2f} ms and exchanges "
        f"{1e3 * costs.exchanges[1][0] / layers:.2f} ms per microbatch\n"
    )
    print("| schedule | no all-to-alls, s | one after the other, s | pairs, s | gain | peak u |")
    print("|---|---|---|---|---|---|")
    for schedule, chunks in CASES:
        free = play(schedule, chunks, False, machine, exchange=False)
        plain = play(schedule, chunks, False, machine, exchange=True)
        cells = [f"{float(report.makespan):.2f}" for report in (free, plain)]
        peak = f"{float(max(plain.peak_activations)):g}"
        if schedule == "zbv":
            cells += ["no pairs", "", peak]
        else:
            paired = play(schedule, chunks, True, machine, exchange=True)
            gain = plain.makespan / paired.makespan - 1
            cells += [f"{float(paired.makespan):.2f}", f"{100 * float(gain):.1f} %"]
            cells.append(f"{peak} -> {float(max(paired.peak_activations)):g}")
        print(f"| {schedule}{f' (v={chunks})' if chunks > 1 else ''} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
