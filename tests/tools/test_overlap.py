"""tools/bench/overlap.py: what its figures are of, its rows, and early refusals."""

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from tools.bench.overlap import Row, as_entry, main, together_on_cpu

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "tools/bench/overlap.py"
FLAGS = ["--ranks", "2", "--sizes", "64K", "1K", "--gemm", "32", "--rounds", "2"]


class Clock:
    """Ticks once per look; a thread can wait until another one has looked."""

    def __init__(self) -> None:
        self.owner = threading.current_thread()
        self.looks: Counter[bool] = Counter()  # by the owner's thread, or another
        self.changed = threading.Condition()

    def __call__(self) -> float:
        with self.changed:
            self.looks[self.is_owner()] += 1
            self.changed.notify_all()
            return float(self.looks.total())

    def is_owner(self) -> bool:
        return threading.current_thread() is self.owner

    def wait_for_the_other(self) -> None:
        """Until the other thread's second look: at the end of its work."""
        other = not self.is_owner()
        with self.changed:
            assert self.changed.wait_for(lambda: self.looks[other] >= 2, timeout=60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tools.bench.overlap.time.perf_counter", clock)
    return clock


def nothing() -> None:
    return None


def test_the_end_of_each_and_of_both_are_told(clock: Clock) -> None:
    assert together_on_cpu(nothing, 1, clock.wait_for_the_other, 1) == [1, 2, 2]
    clock.looks.clear()
    assert together_on_cpu(clock.wait_for_the_other, 1, nothing, 1) == [2, 1, 2]


def test_one_alone_leaves_the_other_at_zero(clock: Clock) -> None:
    assert together_on_cpu(nothing, 1, nothing, 0) == [1, 0, 1]
    clock.looks.clear()
    assert together_on_cpu(nothing, 0, clock.wait_for_the_other, 1) == [1, 2, 2]


def test_both_run_at_once_and_each_as_often_as_asked() -> None:
    counts = {"gemm": 0, "collective": 0}
    at_once = threading.Event()

    def gemm() -> None:
        counts["gemm"] += 1
        assert at_once.wait(60)  # for a collective, which starts while this one runs

    def collective() -> None:
        counts["collective"] += 1
        at_once.set()

    together_on_cpu(gemm, 4, collective, 7)
    assert counts == {"gemm": 4, "collective": 7}


def test_ratios_are_busy_over_alone() -> None:
    row = Row("all_reduce", 2, 1024, "float32", "cpu", 100, 10.0, 15.0, 40.0, 50.0, 0.25)
    assert row.compute_slowdown == 1.5 and row.collective_slowdown == 1.25
    assert row.gflops(10.0) == pytest.approx(200)  # 2e6 FLOPs in 10 us
    assert as_entry(row)["compute_slowdown"] == 1.5 and as_entry(row)["hidden"] == 0.25


def test_program_prints_a_table_and_keeps_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "overlap.jsonl"
    flags = [*FLAGS, "--window-ms", "1", "--device", "cpu", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, PROGRAM, *flags], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["message_bytes"], row["ranks"], row["gemm"]) for row in rows] == [
        (1024, 2, 32),
        (65536, 2, 32),
    ]
    for row in rows:
        assert min(row[name] for name in row if name.endswith("_us")) > 0
        assert isinstance(row["hidden"], float) and row["compute_slowdown"] > 0
        assert done.stdout.count(f"| all_reduce | 2 | {row['message_bytes']} |") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ranks", "1"], "--ranks 1: a group has at least 2"),
        (["--gemm", "0"], "--gemm and --rounds are at least 1"),
        (["--window-ms", "nan"], "--window-ms nan: above 0"),
        (["--sizes", "1T"], "size '1T'"),
        (["--out", "/nowhere/rows.jsonl"], "--out /nowhere/rows.jsonl: no file"),
        (["--ranks", "65"], "65 ranks are too many for one machine"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    flags: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--device", "cpu"]) == 2
    err = capfd.readouterr().err
    assert said in err and len(err.splitlines()) == 1
