"""tools/bench/checkpoint.py: rows of real saves and loads, memory and CPU of children, refusals."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.bench import checkpoint


def test_ways_save_and_load_what_they_are_measured_with(tmp_path: Path) -> None:
    """Each process compares what it has loaded; the rows hold figures above zero."""
    rows = tmp_path / "rows.json"
    ways = ["ours-async", "dcp-async", "safetensors"]
    words = [
        "--ways",
        *ways,
        "--size",
        "256K",
        "--rounds",
        "1",
        "--directory",
        str(tmp_path),
        "--json",
        str(rows),
    ]
    assert checkpoint.main(words) == 0
    told = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["way"] for row in told] == ways
    for row in told:
        assert row["bytes"] >= 256 * 1024
        assert row["pause_s"] <= row["wall_s"]
        for key in ("pause_s", "copy_s", "cold_load_s", "cold_raw_s", "warm_load_s", "warm_raw_s"):
            assert row[key] > 0, key
    assert list(tmp_path.iterdir()) == [rows]


def test_time_and_memory_of_children_count() -> None:
    script = "b = bytearray(2**26)\nwhile True: pass"
    cpu, memory = checkpoint.cpu_seconds(), checkpoint.memory_bytes()
    child = subprocess.Popen([sys.executable, "-c", script])
    try:
        deadline = time.monotonic() + 30
        while checkpoint.cpu_seconds() - cpu < 0.2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert checkpoint.cpu_seconds() - cpu >= 0.2
        assert checkpoint.memory_bytes() - memory >= 2**26
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--size", "many"], "size 'many'"),
        (["--json", "/nowhere/rows"], "/nowhere/rows"),
        (["--size", "9000000G"], "bytes are needed there"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoint.main([*words, "--directory", str(tmp_path)]) == 2
    assert text in capsys.readouterr().err
