"""tools/bench/collectives.py measures what it says, writes what a planner reads, refuses early."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.mesh.collectives import all_gather_json
from megatron_lite.mesh.cost import OPERATIONS, Measurement, load_costs
from megatron_lite.mesh.groups import Group, world_group
from megatron_lite.mesh.recorder import Recorder
from tests.pool import RankPool, run_ranks
from tools.bench.collectives import build_call, main, measure_group, shift

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "tools/bench/collectives.py"
RECORDED = {  # the name under which the project's collectives record themselves
    "all_reduce": "all_reduce.sum",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter.sum",
    "broadcast": "broadcast",
    "all_to_all": "all_to_all",
}


# ---- on ranks --------------------------------------------------------------------------------
def recorded_calls(rank: int, world_size: int, size: int, dtype: str) -> dict[str, Any]:
    """Per operation: message bytes, and what one call of it recorded."""
    found = {}
    for op in OPERATIONS:
        recorder = Recorder()
        group = world_group(rank, world_size, recorder)
        call, message_bytes = build_call(op, size, group, dtype, "cpu")
        call()
        found[op] = message_bytes, [(row.op, row.elements) for row in recorder.records]
    return found


def shifted(rank: int, world_size: int) -> list[float]:
    import torch

    received = torch.zeros(3)
    shift(received, torch.full((3,), float(rank)), world_group(rank, world_size))
    values: list[float] = received.tolist()
    return values


def measured(rank: int, world_size: int) -> tuple[list[Measurement], list[Any]]:
    """Rows of one rank, and the rows of all as JSON."""
    options = argparse.Namespace(
        ops=list(OPERATIONS), sizes=[1 << 10, 1 << 14], dtype="float32", device="cpu", rounds=3
    )
    group: Group = world_group(rank, world_size)
    shown: list[Measurement] = []
    rows = measure_group(options, group, 1, shown.append)
    assert rows == shown
    times = [[row.median_us, row.least_us] for row in rows]
    return rows, all_gather_json(times, group)


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_each_call_is_one_collective_of_the_message_it_claims(
    rank_pool: RankPool, dtype: str, item: int
) -> None:
    for found in rank_pool.run(3, recorded_calls, size=1000, dtype=dtype):
        for op, (message_bytes, records) in found.items():
            assert 1000 <= message_bytes < 1000 + 3 * item and message_bytes % (3 * item) == 0
            want = [(RECORDED[op], message_bytes // item)] if op in RECORDED else []
            assert records == want


def test_send_recv_shifts_around_the_ring(rank_pool: RankPool) -> None:
    assert rank_pool.run(3, shifted) == [[2.0] * 3, [0.0] * 3, [1.0] * 3]


def test_rows_are_the_slowest_ranks_and_equal_everywhere(rank_pool: RankPool) -> None:
    results = rank_pool.run(2, measured)
    rows, gathered = results[0]
    assert gathered[0] == gathered[1]
    assert [(row.op, row.message_bytes) for row in rows] == [
        (op, size) for op in OPERATIONS for size in (1 << 10, 1 << 14)
    ]
    assert all(0 < row.least_us <= row.median_us and row.ranks == 2 for row in rows)


# ---- the program -----------------------------------------------------------------------------
def test_program_starts_its_ranks_and_writes_the_file(tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    flags = ["--ops", "all_reduce", "send_recv", "--sizes", "64K", "1K", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, PROGRAM, *flags, "--device", "cpu", "--fit", "least", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    costs = load_costs(out)
    assert costs.fits.keys() == {("all_reduce", 2, 1), ("send_recv", 2, 1)}
    assert [row.message_bytes for row in costs.rows] == [1024, 65536] * 2
    assert costs.backend == "gloo" and costs.fitted == "least_us" and costs.device
    for row in costs.rows:
        line = f"| {row.op} | 2 | 1 | {row.message_bytes} | {row.median_us:.1f} |"
        assert done.stdout.count(line) == 1
    assert done.stdout.count("| alpha us |") == 1


def test_launched_ranks_that_are_not_in_a_group_wait(tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    flags = ["--ops", "broadcast", "--ranks", "2", "--stride", "2", "--sizes", "1K", "4K"]
    flags += ["--rounds", "1", "--device", "cpu", "--out", str(out)]
    exits = run_ranks(3, flags, program=PROGRAM, timeout=100)
    assert [exit.code for exit in exits] == [0, 0, 0], exits[0].stderr
    assert exits[0].stdout and not exits[1].stdout and not exits[2].stdout
    assert load_costs(out).fits.keys() == {("broadcast", 2, 1)}


# ---- refusals --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ranks", "1"], "--ranks 1: a group has at least 2"),
        (["--ranks", "2", "100"], "100 ranks are too many for one machine"),
        (["--sizes", "4X", "8K"], "size '4X'"),
        (["--sizes", "0", "8K"], "size '0'"),
        (["--sizes", "-4K", "8K"], None),
        (["--sizes", "8K"], "--sizes: 2 ranks need two different ones"),
        (["--sizes", "1", "2"], "--sizes: 2 ranks need two different ones"),
        (["--rounds", "0"], "--stride and --rounds are at least 1"),
        (["--out", "/nowhere/costs.json"], "--out /nowhere/costs.json: no file"),
        (["--ops", "all_to_none"], None),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    flags: list[str], said: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*flags, "--device", "cpu"])
    except SystemExit as stop:  # argparse speaks by itself
        code = stop.code if isinstance(stop.code, int) else 1
        assert said is None
    assert code == 2
    err = capfd.readouterr().err
    assert said is None or (said in err and len(err.splitlines()) == 1)


def test_more_ranks_than_cuda_devices_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "64", "--device", "cuda"]) == 2
    assert "64 ranks need as many CUDA devices" in capfd.readouterr().err
