"""The benchmark of sharding: what it compares with what, and what it says of absent peers."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from megatron_lite.config.flags import parse_config
from tools.bench import sharding


def rounds(*seconds: tuple[float, ...]) -> list[list[dict[str, float]]]:
    """Rounds of steps; CPU time is twice the wall time."""
    return [[{"wall_s": s, "cpu_s": 2 * s, "rss_mib": 10 * s} for s in steps] for steps in seconds]


def test_ratios_are_taken_within_a_round() -> None:
    own, other = rounds((1.0, 1.0), (10.0, 10.0)), rounds((2.0, 2.0), (20.0, 20.0))
    assert sharding.ratio(own, other, "wall_s") == (2.0, 2.0, 2.0)
    assert sharding.ratio(own, None, "wall_s") is None


def test_a_row_has_rates_ratios_and_the_largest_peak(capsys: pytest.CaptureFixture[str]) -> None:
    table = sharding.summarize(
        {
            "ours-2threads": rounds((1.0, 1.0)),
            "ours-optim": rounds((2.0, 4.0)),
            "torch-ddp": rounds((6.0, 6.0)),
        },
        tokens=8,
    )
    row: dict[str, Any] = table[1]
    assert row["tokens_per_s"] == (3.0, 2.0, 4.0)
    assert row["tokens_per_cpu_s"] == (1.5, 1.0, 2.0)
    assert row["wall_ratio"] == (2.0, 2.0, 2.0)
    assert row["wall_ratio_alone"][0] == pytest.approx(1 / 3)
    assert row["rss_mib"] == 40.0
    sharding.print_table(table)
    printed = capsys.readouterr().out.splitlines()
    assert printed[3].startswith("| ours-optim | 3 [2-4] | 2 [1-2] | 2.00 [2.00-2.00] |")
    assert printed[4].endswith("|  | 60 |")  # nothing in one process to hold DDP against


def test_absent_deepspeed_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert sharding.available(["ours-optim", "deepspeed-1"]) == ["ours-optim"]
    assert "DeepSpeed is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", sharding.STRATEGIES)
def test_our_cases_are_the_flags_that_users_give(strategy: str) -> None:
    config = parse_config(
        sharding.our_flags(f"ours-{strategy}", sharding.SIZES["30M"], 4, "/x"), {}
    )
    assert config.data_parallel_sharding_strategy == strategy
    assert config.ddp_bucket_size is None  # what users get
    assert (config.micro_batch_size, config.global_batch_size) == (2, 4)


@pytest.mark.parametrize(("name", "millions"), [("30M", 30), ("125M", 125)])
def test_sizes_have_about_as_many_parameters_as_their_names_say(name: str, millions: int) -> None:
    size = sharding.SIZES[name]
    h, ffn = size["h"], 8 * size["h"] // 3
    parameters = size["layers"] * (4 * h * h + 3 * h * ffn) + size["v"] * h
    assert parameters == pytest.approx(millions * 1e6, rel=0.02)
