"""Throughput figures (TELEM): model FLOPs by a stated convention, against a stated peak."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases.layouts import LAYOUTS
from tests.cases.ranks import program
from tests.cases.tiny import flags
from tests.pool import fork_ranks

TINY = "--num-attention-heads 4 --num-query-groups 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MHA_GELU = ("--num-attention-heads", "4", "--ffn-hidden-size", "256")


def run(tmp_path: Path, argv: list[str], layout: str = "1") -> tuple[list[dict[str, Any]], str]:
    metrics = tmp_path / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    words = [*argv, *LAYOUTS[layout].flags, "--metrics-jsonl", str(metrics), "--log-throughput"]
    exits = fork_ranks(LAYOUTS[layout].ranks, program, words)
    assert {found.code for found in exits} == {0}, exits
    return [json.loads(line) for line in metrics.read_text().splitlines()], "".join(
        found.stdout for found in exits
    )


def flops_of(row: dict[str, Any], ranks: int) -> float:
    return float(row["model_tflops_per_rank"] * 1e12 * ranks * row["elapsed_ms"] * 1e-3)


def mha_gelu() -> list[str]:
    words = [w for w in flags(steps=1) if w not in ("--swiglu", "--group-query-attention")]
    return [*words, *MHA_GELU]


@pytest.mark.parametrize(
    ("argv", "layout", "convention", "expected"),
    [
        (flags(TINY, steps=1), "1", "full_square", 276_824_064),
        (flags(f"{TINY} {FULL}", steps=1), "1", "full_square", 276_824_064),
        (flags(TINY, steps=1), "tp2", "full_square", 276_824_064),
        (flags(f"{TINY} {FULL}", steps=1), "tp2-sp-dp2", "full_square", 276_824_064),
        (flags(TINY, steps=1), "dp2-optim", "full_square", 276_824_064),
        (flags(f"{TINY} {FULL}", steps=1), "zbv-dp2-params", "full_square", 276_824_064),
        (flags(TINY, steps=1), "dp4-hybrid", "full_square", 276_824_064),
        (mha_gelu(), "1", "full_square", 352_321_536),
        (flags(f"{TINY} --flops-convention causal_half", steps=1), "1", "causal_half",
         264_241_152),
    ],
    ids=[
        "tiny", "recompute", "tp2", "tp2-sp-dp2-recompute", "dp2-optim",
        "zbv-dp2-params-recompute", "dp4-hybrid", "mha-gelu", "causal-half",
    ],
)  # fmt: skip
def test_c089_logged_flops_mfu_and_peak_follow_the_stated_convention(
    tmp_path: Path, argv: list[str], layout: str, convention: str, expected: int
) -> None:
    (header, *others), printed = run(tmp_path, argv, layout)
    (row,) = [row for row in others if row["kind"] == "train"]
    ranks = LAYOUTS[layout].ranks
    assert flops_of(row, ranks) == pytest.approx(expected, rel=1e-12)
    assert header["flops_convention"] == convention
    assert header["model_flops_per_token"] * 8 * 32 == expected
    # At equal time MFU is a function of the model FLOPs alone; the peak says what it is.
    achieved = expected / ranks / (row["elapsed_ms"] * 1e-3)
    assert row["mfu"] == pytest.approx(achieved / header["peak_flops_per_rank"], rel=1e-12)
    assert "measured dense float32 matmul" in header["peak_convention"]
    assert "sparse" not in header["peak_convention"]
    assert printed.count(f"attention {convention}; MFU against ") == 1
    assert header["peak_convention"] in printed
