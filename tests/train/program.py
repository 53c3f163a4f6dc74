"""Runs of the program on pool ranks, small enough for seconds."""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.arguments import complete_config
from megatron_lite.config.flags import parse_config
from megatron_lite.config.rules import check_config
from megatron_lite.mesh.launch import RunStatus, WorldInfo
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.train.build import build_run
from megatron_lite.train.loop import train
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState

LLAMA_WORDS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --ffn-hidden-size 48 --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --vocab-size 90 --make-vocab-size-divisible-by 4"
)
RUN_WORDS = (
    "--seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 10 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --mock-data "
    "--tokenizer-type NullTokenizer --device cpu --log-interval 1 --split 90,10,0 "
    "--eval-iters 1 --eval-interval 100 --num-workers 0 --hidden-dropout 0.1 "
    "--attention-dropout 0.1"
)
# Formed in the pytest process, so all ranks of all tests share one index cache.
CACHE = tempfile.mkdtemp(prefix="index-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
LLAMA, RUN = LLAMA_WORDS.split(), [*RUN_WORDS.split(), "--data-cache-path", CACHE]
# RUN without its data, for tests that bring files of their own.
OWN_DATA = [word for word in RUN if word not in ("--mock-data", "--split", "90,10,0")]
LAYOUTS = {
    "1": (1, ()),
    "dp2": (2, ()),
    "tp2": (2, ("--tensor-model-parallel-size", "2")),
    "tp2-sp": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "pp2": (2, ("--pipeline-model-parallel-size", "2")),
    "pp4": (4, ("--pipeline-model-parallel-size", "4")),
    "pp2-v2": (
        2,
        ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    ),
    "zbv": (2, ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zbv")),
}


def build_and(
    use: Callable[[Parts, TrainState, RunStatus], Any],
    argv: Sequence[str],
    rank: int,
    world_size: int,
    recorder: Recorder | None = None,
) -> Any:
    """Build the run of one rank and hand it to `use`."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share a few cores
    config = complete_config(parse_config(list(argv), {}), argv, world_size)
    check_config(config, world_size)
    info = WorldInfo(rank, world_size, rank, world_size, "", "test")
    status = RunStatus()
    with build_run(config, info, status, recorder) as (parts, state):
        return use(parts, state, status)


def train_rank(argv: Sequence[str], rank: int, world_size: int) -> int:
    """One rank of a whole run; returns its exit code."""
    code: int = build_and(train, argv, rank, world_size)
    return code


def save_now(parts: Parts, state: TrainState) -> None:
    """Save this moment and wait until it is published."""
    parts.saver.save(parts, state)
    parts.saver.finish(parts)


def rows(path: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Rows of a metrics file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]
