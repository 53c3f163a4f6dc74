"""Whole runs with replicated experts: exact resume, other layouts, rows and the summary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.reader import open_checkpoint
from megatron_lite.telemetry.summary import describe_experts
from megatron_lite.verify.session import Layout
from tests.cases.hops import hop_in_pool, train_and_save
from tests.expert.moe_problem import SHAPE
from tests.expert.test_log import run
from tests.pool import RankPool

# Hot are experts of both ranks, and others every step; nothing but replication wants counts.
_WORDS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-layer-freq ([0]+[1]*3) "
    "--moe-aux-loss-coeff 0.01 --global-batch-size 4"
)
MIXTURE = _WORDS.split()
HOT = ("--moe-replicated-experts", "2")
_ALLTOALL = ("--moe-token-dispatcher-type", "alltoall")
EP2 = Layout("dp2-ep2", 2, ("--expert-model-parallel-size", "2", *_ALLTOALL))
ONE = Layout("1")


def test_a_run_resumes_bit_by_bit(rank_pool: RankPool, tmp_path: Path) -> None:
    more = (*MIXTURE, *HOT, "--bf16", "--save-interval", "2")
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    hashed = train_and_save(rank_pool, whole, EP2, 4, *more)
    again = (*more, "--load", str(whole), "--ckpt-step", "2")
    assert train_and_save(rank_pool, rest, EP2, 4, *again) == hashed
    first, second = open_checkpoint(whole), open_checkpoint(rest)
    between = open_checkpoint(whole, 2)
    counts = [between.read(n) for n in first.names if n.endswith("router.expert_counts")]
    assert len(counts) == 3
    # Else a resume that forgot them would take the same experts.
    assert any(sorted(found.topk(2).indices.tolist()) != [0, 1] for found in counts)
    for name in first.names:
        assert torch.equal(first.read(name), second.read(name)), name


def test_a_checkpoint_goes_on_in_other_layouts(rank_pool: RankPool, tmp_path: Path) -> None:
    more = (*MIXTURE, *HOT, "--fp64", "--optimizer", "sgd")
    train_and_save(rank_pool, tmp_path / "from", EP2, 2, *more)
    figures = [
        hop_in_pool(rank_pool, tmp_path / "from", tmp_path / place.name, place, *more)
        for place in (ONE, EP2)
    ]
    assert figures[1] == pytest.approx(figures[0], rel=1e-11)


def test_rows_tell_the_share_of_replicated_experts_in_every_layout(tmp_path: Path) -> None:
    alone, _ = run(tmp_path / "one.jsonl", 1, " ".join((*HOT, "--moe-per-layer-logging")))
    spread, printed = run(tmp_path / "two.jsonl", 2, " ".join((*EP2.flags, *HOT)))
    for step, (row, other) in enumerate(zip(alone, spread, strict=True)):
        share = row["moe/replicated_share"]
        assert other["moe/replicated_share"] == pytest.approx(share, rel=1e-9)
        by_layer = []
        for layer in (0, 2):
            loads = [row[f"moe/load_expert_{e}_layer_{layer}"] for e in range(4)]
            before = [alone[step - 1][f"moe/load_expert_{e}_layer_{layer}"] for e in range(4)]
            order = sorted(range(4), key=lambda e: -before[e]) if step else [0, 1]
            by_layer.append(sum(loads[e] for e in order[:2]))
        assert share == pytest.approx(sum(by_layer) / 2)
    assert "alltoall, the 2 most chosen on every rank" in printed
    assert not [name for name in run(tmp_path / "no.jsonl", 1, "")[0][0] if "replicated" in name]


def test_a_mixture_without_hot_experts_does_not_tell_of_them() -> None:
    assert describe_experts(SHAPE)[1].endswith("; alltoall")
