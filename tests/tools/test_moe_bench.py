"""tools/bench/moe.py: what its figures are of, that all compute the same, and that it runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_lite.native.load import load_native
from tools.bench import moe
from tools.bench.moe_peers import SIZES, Size, contestants

SIZE = SIZES["quick"][0]


def test_ratios_are_taken_within_a_round() -> None:
    took = {"ours": [(1.0, 0.5), (10.0, 5.0)], "peer": [(2.0, 0.5), (30.0, 10.0)]}
    ours, peer = moe.layer_rows(replace(SIZE, tokens=10), took, 2, "bf16")
    assert (ours["ratio"], ours["cpu_ratio"]) == (1.0, 1.0)
    assert (peer["ratio"], peer["cpu_ratio"]) == (2.5, 1.5)
    assert ours["tokens_per_s"] == (11.0, 2.0, 20.0), "of both ranks: median, least, most"
    assert ours["tokens_per_cpu_s"] == 11.0, "of this rank: 20 and 2 per CPU-second"
    table = moe.layer_table([ours, peer]).splitlines()
    assert len(table) == 4
    assert "| peer | " in table[3]
    assert table[3].endswith("| 2.50 | 1.50 |")


def test_contestants_take_turns() -> None:
    order: list[str] = []
    steps = [(name, lambda name=name: order.append(name)) for name in ("ours", "peer")]
    took = moe.time_layers(steps, 2, lambda: None)
    assert order == ["ours", "peer", "peer", "ours"]
    assert [len(samples) for samples in took.values()] == [2, 2]


@pytest.mark.parametrize("size", SIZES["quick"], ids=lambda size: size.family)
def test_all_contestants_compute_the_same_layer(size: Size) -> None:
    load_native()
    steps = contestants(size, 0, 1, torch.float32, "cpu")
    results = {name: step() for name, step in steps}
    assert {"ours", "torch grouped_mm"} <= set(results)
    moe.check_agreement(results, moe.AGREEMENT["fp32"])
    out, grad = results["ours"]
    with pytest.raises(RuntimeError, match="peer differs"):
        moe.check_agreement({"ours": (out, grad), "peer": (out, 1.01 * grad)}, 1e-4)


def test_the_program_measures_rows_and_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if load_native().library is None:
        pytest.skip("no native library")
    rows = tmp_path / "rows.json"
    arguments = ["--quick", "--ranks", "1", "--device", "cpu", "--json", str(rows)]
    assert moe.main(arguments) == 0
    kept = json.loads(rows.read_text())
    passes = ("forward", "forward+backward")
    assert [row["pass"] for row in kept["rows"]] == [*passes * 4]
    assert {peer for row in kept["rows"] for peer in row["ratios"]} == {"index_select", "index_add"}
    assert {row["name"] for row in kept["layers"]} >= {"ours", "torch grouped_mm"}
    assert "| pack 32 x 2 h 32 |" in capsys.readouterr().out
    assert moe.main(["--rounds", "0"]) == 2


def test_widths_choose_the_h_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    if load_native().library is None:
        pytest.skip("no native library")
    assert moe.main(["--quick", "--parts", "rows", "--device", "cpu", "--widths", "8", "24"]) == 0
    printed = capsys.readouterr().out
    assert all(f"| pack 32 x {k} h {h} |" in printed for k in (2, 4) for h in (8, 24))
    assert "h 32" not in printed
    assert moe.main(["--device", "cpu", "--widths", "8", "0"]) == 2
    assert "--widths 0: h is at least 1" in capsys.readouterr().err
