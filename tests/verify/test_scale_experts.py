"""Scaled-down mixtures of experts keep their kind, and are legal."""

from pathlib import Path

import pytest

from megatron_lite.config.flags import parse_config
from megatron_lite.config.rules import check_config
from megatron_lite.verify.scale import scale_down

USER = (
    "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 128 --train-iters 9 "
    "--lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 5000 --mock-data --num-experts 64"
)


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("--expert-model-parallel-size 8", "--expert-model-parallel-size 2"),
        (
            "--tensor-model-parallel-size 8 --expert-tensor-parallel-size 1 "
            "--expert-model-parallel-size 16",
            "--expert-tensor-parallel-size 1",
        ),
        (
            "--tensor-model-parallel-size 64 --expert-model-parallel-size 64 "
            "--expert-tensor-parallel-size 1 --num-attention-heads 64",
            "--expert-model-parallel-size 2",
        ),
        ("--moe-router-topk 8", "--moe-router-topk 4"),
        (
            "--moe-expert-capacity-factor 1 --moe-reroute-candidates 20 --moe-router-topk 8",
            "--moe-reroute-candidates 4",
        ),
        ("--moe-router-topk 64", "--moe-router-topk 8"),
        (
            "--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk 8",
            "--moe-router-group-topk 2",
        ),
        ("--moe-layer-freq ([0]*3+[1]*9)", "--moe-layer-freq [0,1]"),
        ("--moe-layer-freq 2", "--moe-layer-freq [1,0]"),
        (
            "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall "
            "--moe-replicated-experts 2",
            "--moe-replicated-experts 2",
        ),
        (
            "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall "
            "--moe-replicated-experts 60",
            "--moe-replicated-experts 7",
        ),
        (
            "--moe-layer-freq 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 4",
            "--expert-model-parallel-size 2",
        ),
    ],
)
def test_the_kind_is_kept_and_every_subset_is_legal(tmp_path: Path, flags: str, kept: str) -> None:
    config = parse_config([*USER.split(), *flags.split()], {})
    check_config(config, 64)
    case = scale_down(config, 64, tmp_path, steps=1, precision="fp64").case
    layout = case.layout(case.axes)
    words = [*case.flags, *layout.flags]
    text = " ".join(words)
    assert kept in text
    check_config(parse_config(words, {}), layout.ranks)
    for axis in case.axes:
        chosen = [a for a in case.axes if a.name in (axis.name, axis.needs)]
        alone = case.layout(chosen)
        check_config(parse_config([*case.flags, *alone.flags], {}), alone.ranks)
