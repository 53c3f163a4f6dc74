"""tools/inspect_checkpoint.py lists, verifies, hashes, and exits with the right code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.tiny import save_cut, save_tiny, tiny_tensors
from tools.inspect_checkpoint import main

REPOSITORY = Path(__file__).resolve().parents[2]


def test_it_lists_tensors_and_hashes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "one", 4)
    save_cut(tmp_path / "two", 4, 2)
    hashes = []
    for place in (tmp_path / "one" / "iter_0000004", tmp_path / "two"):
        assert main([str(place), "--verify", "--logical-hash"]) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in tiny_tensors(4))
        assert "step 4" in out and "every byte" in out
        hashes.append(out.splitlines()[-1])
    assert hashes[0] == hashes[1]
    assert hashes[0].startswith("logical hash: ")


def test_json_output_has_tensors_state_and_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path, 4)
    assert main([str(tmp_path), "--json", "--logical-hash"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["step"] == report["state"]["iteration"] == 4
    assert report["tensors"].keys() == tiny_tensors(4).keys()
    assert len(report["logical_hash"]) == 64


def test_damage_is_exit_code_3_and_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = save_tiny(tmp_path, 1).directory / "rank00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x77")
    assert main([str(tmp_path), "--verify"]) == 3
    captured = capsys.readouterr()
    assert captured.out == "" and "rank00000.safetensors" in captured.err
    assert main([str(tmp_path)]) == 0, "without --verify tensors are not read"
    assert main([str(tmp_path), "--logical-hash"]) == 3


def test_a_newer_damaged_checkpoint_is_shown_and_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path, 1)
    (save_tiny(tmp_path, 2).directory / "manifest.json").unlink()
    assert main([str(tmp_path), "--verify"]) == 3
    out = capsys.readouterr().out
    assert "passed over step 2" in out and "step 1," in out


def test_nothing_there_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_listing_and_verifying_import_no_torch(tmp_path: Path) -> None:
    save_tiny(tmp_path, 1)
    code = (
        "import sys; from tools.inspect_checkpoint import main; "
        f"code = main([{str(tmp_path)!r}, '--verify']); assert 'torch' not in sys.modules; "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_reader_that_leaves_is_no_failure(tmp_path: Path) -> None:
    save_tiny(tmp_path, 1)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "tools/inspect_checkpoint.py", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environ, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
