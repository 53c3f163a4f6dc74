"""Sample text from a checkpoint: `generate.py --load DIR --prompt TEXT [--greedy]`.

Architecture, precision and tokenizer come from the checkpoint; the layout is that of the
command: one process, or all ranks of `torchrun` as one replica, cut by
`--tensor-model-parallel-size` and `--pipeline-model-parallel-size`; experts are spread over the
tensor ranks by `--expert-model-parallel-size`. Whatever layout wrote the checkpoint, the same
weights, and therefore the same text, come out.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, too

from megatron_lite.checkpoint.catalog import find_checkpoint
from megatron_lite.checkpoint.state import is_converted
from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError
from megatron_lite.mesh.launch import RunStatus, WorldInfo, run_program

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
EP = "--expert-model-parallel-size"
# How the run that wrote the checkpoint was cut; this command has its own layout.
RUN_LAYOUT = (
    "sequence_parallel",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_vp_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "account_for_mtp_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "pipeline_schedule",
    "data_parallel_sharding_strategy",
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "num_distributed_optimizer_instances",
    "overlap_param_gather",
)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of this tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--load", required=True, help="SAVE root or one checkpoint directory")
    parser.add_argument("--step", type=int, help="this step instead of the newest")
    parser.add_argument("--prompt", action="append", required=True, help="text; may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per prompt [tokens]")
    parser.add_argument("--greedy", action="store_true", help="always the most probable token")
    parser.add_argument("--temperature", type=float, default=0.8, help="logits are divided by it")
    parser.add_argument("--top-k", type=int, default=0, help="most probable tokens kept; 0: all")
    parser.add_argument("--top-p", type=float, default=0.95, help="probability mass kept")
    parser.add_argument("--seed", type=int, default=1234, help="of the draws")
    parser.add_argument("--tokenizer-model", help="where the tokenizer's file is now")
    parser.add_argument(TP, type=int, help="unset: the ranks that PP leaves")
    parser.add_argument(PP, type=int, default=1, help="pipeline ranks, one stage each")
    parser.add_argument(EP, type=int, default=1, help="tensor ranks the experts are spread over")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def cut_ranks(args: argparse.Namespace, world_size: int) -> tuple[int, int]:
    """TP and PP of this command; together they are all its ranks."""
    pp = args.pipeline_model_parallel_size
    tp = args.tensor_model_parallel_size
    if pp < 1 or (tp is not None and tp < 1):
        raise UserError(f"{TP} {tp}, {PP} {pp}: must be at least 1")
    if tp is None:
        tp = max(1, world_size // pp)
    if tp * pp != world_size:
        raise UserError(
            f"{TP} {tp} x {PP} {pp} = {tp * pp}, but there are {world_size} ranks: generation "
            "uses all of them for one replica"
        )
    return tp, pp


def saved_config(state: Any, args: argparse.Namespace, world_size: int) -> Config:
    """The checkpoint's configuration in this command's layout."""
    names = {field.name for field in fields(Config)}
    saved = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in state["config"].items()
        if name in names
    }
    tp, pp = cut_ranks(args, world_size)
    ep = args.expert_model_parallel_size
    if ep < 1 or tp % ep:
        raise UserError(f"{EP} {ep} must divide {TP} {tp}: tensor ranks share the experts")
    changes: dict[str, Any] = {
        **{name: getattr(Config, name) for name in RUN_LAYOUT},
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp // ep if saved.get("num_experts") else None,
        "device": args.device,
    }
    if is_converted(state):
        # It has no run: what sampling does not use, but a complete configuration has.
        changes |= {"lr": 0.0, "mock_data": True}
    if args.tokenizer_model is not None:
        changes["tokenizer_model"] = args.tokenizer_model
    return replace(Config(), **(saved | changes))


def run(args: argparse.Namespace, info: WorldInfo, status: RunStatus) -> int:
    """Load the weights, then continue every prompt."""
    from megatron_lite.model.sampling import SamplingOptions, sample_tokens
    from megatron_lite.train.sample import load_stage

    options = SamplingOptions(args.greedy, args.temperature, args.top_k, args.top_p, args.seed)
    if args.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {args.max_new_tokens}: must be at least 1")
    found = find_checkpoint(args.load, args.step)
    config = saved_config(found.manifest.state, args, info.world_size)
    with load_stage(config, found, info, status) as (stage, tokenizer, chain):
        for number, prompt in enumerate(args.prompt):
            tokens = tokenizer.encode(prompt)
            room = stage.plan.model.max_position_embeddings - len(tokens) + 1
            if info.rank == 0 and room < args.max_new_tokens:
                print(
                    f"note: the model's positions end after {max(room, 0)} new tokens, "
                    f"--max-new-tokens {args.max_new_tokens} asks for more",
                    file=sys.stderr,
                )
            produced = sample_tokens(
                stage, tokens, args.max_new_tokens, options, tokenizer.find_special("eod"), chain
            )
            text = tokenizer.decode([*tokens, *produced])
            if info.rank == 0:
                print(("\n" if number else "") + text, flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool on this rank; returns the exit code."""
    args = build_parser().parse_args(argv)
    return run_program(partial(run, args), os.environ)


if __name__ == "__main__":
    sys.exit(main())
