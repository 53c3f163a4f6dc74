"""Converted mixtures of experts continue a text as transformers does, on one rank and on two."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.catalog import find_checkpoint
from megatron_lite.mesh.launch import RunStatus, WorldInfo
from megatron_lite.model.sampling import SamplingOptions, sample_tokens
from megatron_lite.train.sample import load_stage
from tests.checkpoint.convert.peers import prompt, save_peer, to_native
from tests.pool import RankPool
from tools.generate import build_parser, saved_config

COUNT = 12


def generate_rank(
    root: str, tokens: Sequence[int], out: str, ep: int, rank: int = 0, world_size: int = 1
) -> None:
    """Continue a prompt greedily on `world_size` tensor ranks; rank 0 writes the new tokens."""
    found = find_checkpoint(root)
    words = ["--load", root, "--prompt", "", "--device", "cpu"]
    args = build_parser().parse_args([*words, "--expert-model-parallel-size", str(ep)])
    config = saved_config(found.manifest.state, args, world_size)
    info = WorldInfo(rank, world_size, rank, world_size, "", "test")
    with load_stage(config, found, info, RunStatus()) as (stage, _, chain):
        options = SamplingOptions(True, 1.0, 0, 1.0, 1)
        produced = list(sample_tokens(stage, list(tokens), COUNT, options, None, chain))
    if rank == 0:
        Path(out).write_text(json.dumps(produced))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss"])
def test_greedy_tokens_equal_transformers_alone_and_with_experts_over_tensor_ranks(
    tmp_path: Path, kind: str, rank_pool: RankPool
) -> None:
    source, native = tmp_path / "hf", tmp_path / "native"
    peer = save_peer(source, kind)
    to_native(source, native)
    tokens = prompt(9)
    with torch.no_grad():
        whole = peer.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=COUNT,
            eos_token_id=None,
            pad_token_id=0,
        )
    wanted = whole[0, tokens.shape[1] :].tolist()
    assert len(set(wanted)) > 2
    for ranks, ep in ((1, 1), (2, 2), (2, 1)):
        out = tmp_path / f"{ranks}-{ep}.json"
        arguments = {"root": str(native), "tokens": tokens[0].tolist(), "out": str(out), "ep": ep}
        if ranks == 1:
            generate_rank(**arguments)
        else:
            rank_pool.run(ranks, generate_rank, **arguments)
        assert json.loads(out.read_text()) == wanted, (ranks, ep)
