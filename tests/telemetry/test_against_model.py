"""The closed forms equal what the real stage executes and keeps, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.pool import RankPool
from tests.telemetry.ranks import measure_flops, measure_memory


def measure(
    pool: RankPool, function: Callable[..., dict[str, int]], tp: int, **changes: Any
) -> list[dict[str, int]]:
    settings = {
        "family": "llama",
        "dtype": "float32",
        "recompute": "none",
        "sp": False,
        "fused": True,
        "method": "uniform",
        "group": 1,
    }
    results: list[dict[str, int]] = pool.run(tp, function, **{**settings, **changes})
    return results


@pytest.mark.parametrize(
    ("family", "recompute", "tp", "sp"),
    [
        ("llama", "none", 1, False),
        ("llama", "selective", 2, False),
        ("llama", "full", 2, True),
        ("llama", "none", 4, True),  # one KV head on two ranks each
        ("gpt2_dropout", "none", 2, False),
        ("gpt2_dropout", "selective", 1, False),
        ("gpt2_dropout", "full", 1, False),
        ("gptoss", "none", 2, True),
        ("mla", "none", 2, True),
        ("mla", "full", 2, False),
        ("mla_plain", "selective", 1, False),
    ],
)
def test_executed_flops_equal_the_count_of_every_rank(
    rank_pool: RankPool, family: str, recompute: str, tp: int, sp: bool
) -> None:
    # Explicit attention: the flop counter does not know the CPU's fused kernel.
    for result in measure(
        rank_pool, measure_flops, tp, family=family, recompute=recompute, sp=sp, fused=False
    ):
        assert result["executed"] == result["counted"]


def test_block_recompute_executes_only_its_layers_again(rank_pool: RankPool) -> None:
    (result,) = measure(
        rank_pool, measure_flops, 1, recompute="full", method="block", group=2, fused=False
    )
    assert result["executed"] == result["counted"]


@pytest.mark.parametrize(
    ("family", "dtype", "tp", "sp"),
    [
        ("llama", "float32", 1, False),
        ("llama", "bfloat16", 4, True),
        ("qwen3", "bfloat16", 1, False),
        ("qwen3", "float32", 2, True),
        ("gpt2", "bfloat16", 2, False),
        ("gpt2", "float32", 2, True),
        ("gpt2_dropout", "bfloat16", 1, False),
        ("gpt2_dropout", "float32", 4, True),
        ("gptoss", "float32", 2, False),
        ("gptoss", "bfloat16", 2, True),
        ("mla", "float32", 2, False),
        ("mla", "bfloat16", 2, True),
        ("mla_plain", "float32", 1, False),
    ],
)
@pytest.mark.parametrize("native", [False, True], ids=["reference", "native"])
def test_kept_activations_equal_the_formula(
    rank_pool: RankPool, family: str, dtype: str, tp: int, sp: bool, native: bool
) -> None:
    settings = {"family": family, "dtype": dtype, "sp": sp, "native": native}
    for result in measure(rank_pool, measure_memory, tp, **settings):
        # What the formula leaves out: scalars, positions, sums per sample.
        assert result["estimate"] == pytest.approx(result["kept"], rel=0.003)


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_experts_execute_and_keep_what_the_formulas_say_in_sum(
    rank_pool: RankPool, tp: int, sp: bool
) -> None:
    """A rank's part depends on the routing; what all ranks do together does not."""
    settings = {"family": "mixture", "sp": sp}
    flops = measure(rank_pool, measure_flops, tp, **settings, fused=False)
    assert sum(r["executed"] for r in flops) == sum(r["counted"] for r in flops)
    for dtype in ("float32", "bfloat16"):
        memory = measure(rank_pool, measure_memory, tp, **settings, dtype=dtype, native=True)
        kept, estimate = (sum(r[name] for r in memory) for name in ("kept", "estimate"))
        assert estimate == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize(("family", "fused"), [("llama", True), ("gpt2_dropout", False)])
def test_selective_recompute_keeps_what_the_formula_says(
    rank_pool: RankPool, family: str, fused: bool
) -> None:
    (kept,) = measure(
        rank_pool, measure_memory, 1, family=family, recompute="selective", fused=fused
    )
    (none,) = measure(rank_pool, measure_memory, 1, family=family, recompute="none", fused=fused)
    assert kept["kept"] <= none["kept"]
    # The estimate holds one layer's probabilities on top of what is kept.
    assert kept["kept"] <= kept["estimate"] * 1.02
    assert kept["estimate"] <= none["kept"] * 1.15


@pytest.mark.parametrize("group", [1, 2])
def test_full_recompute_peaks_where_the_formula_says(rank_pool: RankPool, group: int) -> None:
    (result,) = measure(rank_pool, measure_memory, 1, recompute="full", group=group)
    # The peak also holds the temporaries of single operations, a third of a layer here.
    assert result["estimate"] < result["peak"] < 1.35 * result["estimate"]
    assert result["kept"] < result["estimate"]
