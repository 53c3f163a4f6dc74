"""tools/inspect_checkpoint.py lists, verifies, hashes, and exits with the right code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint.compare import GROUPS, hash_groups, names_of
from megatron_lite.checkpoint.reader import logical_hash, open_checkpoint
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.checkpoint.tensors import StateEntry
from megatron_lite.mesh.groups import local_group
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
        f"code = main([{str(tmp_path)!r}, '--verify']) or main([{str(tmp_path)!r}, '--list']); "
        "assert 'torch' not in sys.modules; "
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


def save_tensors(root: Path, tensors: dict[str, Tensor], **state: object) -> str:
    """Save whole tensors as step 1."""
    entries = [
        StateEntry(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), True)
        for name, tensor in tensors.items()
    ]
    save_checkpoint(root, 1, entries, {"iteration": 1, **state}, local_group("world"))
    return str(root)


def test_groups_are_hashed_as_their_names_alone_would_be(tmp_path: Path) -> None:
    save_tiny(tmp_path, 4)
    checkpoint = open_checkpoint(tmp_path)
    groups, whole = hash_groups(checkpoint)
    assert whole == logical_hash(checkpoint)
    assert groups == {g: logical_hash(checkpoint, names_of(checkpoint, [g])) for g in GROUPS}
    assert len(set(groups.values())) == 3


def test_the_list_has_every_step_and_what_was_never_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        save_tiny(tmp_path, step)
    broken = open_checkpoint(tmp_path, 2).directory
    (broken / "manifest.json").unlink()
    attempt = tmp_path / "attempts" / "9-0-0123456789abcdef"
    attempt.mkdir()
    (attempt / "rank00000.safetensors").write_bytes(b"half")
    assert main([str(tmp_path), "--list"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["3", "2", "1", "9"]
    assert "1 rank(s)" in lines[0] and "damaged: " in lines[1]
    assert "not published: attempts/9-0-0123456789abcdef, 1 files" in lines[3]
    assert main([str(tmp_path), "--list", "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert [entry["step"] for entry in report["steps"]] == [3, 2, 1]
    assert report["unpublished"][0]["bytes"] == 4
    assert main([str(tmp_path / "attempts"), "--list"]) == 2


def test_the_list_tells_layout_and_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {
        "layout": {"tp": 2, "dp": 1, "pp": 4},
        "origin": {"kind": "run"},
        "counters": {"consumed_samples": 64},
    }
    save_tensors(tmp_path / "run", {"a": torch.ones(2)}, **state)
    converted = {"origin": {"kind": "converted", "source": "hf Llama"}, "layout": {}}
    save_tensors(tmp_path / "converted", {"a": torch.ones(2)}, **converted)
    for name in ("run", "converted"):
        assert main([str(tmp_path / name), "--list"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "tp 2, pp 4, a run, 64 samples consumed" in first
    assert second.endswith("1 rank(s), converted from hf Llama")


def test_the_same_state_in_two_layouts_is_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "one", 4)
    save_cut(tmp_path / "two", 4, 2)
    words = [str(tmp_path / "one"), "--diff", str(tmp_path / "two")]
    assert main([*words, "--only", *GROUPS]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "equal in weights, masters, moments"
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "state lr: 4.1 here, 'absent' there" in out and "0 tensors" in out


def test_what_neither_has_is_not_called_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [save_tensors(tmp_path / name, {"a": torch.ones(2)}) for name in ("a", "b")]
    words.insert(1, "--diff")
    assert main([*words, "--only", "moments"]) == 2
    told = capsys.readouterr()
    assert "neither has moments, so there is nothing to compare" in told.err
    assert "equal" not in told.out
    assert main([*words, "--only", "weights", "masters", "moments"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["neither has masters or moments", "equal in weights"]


def test_differences_are_told_tensor_by_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = {
        "equal": torch.tensor([1.0, float("nan"), float("inf")]),
        "zeros": torch.tensor([0.0, 2.0]),
        "values": torch.tensor([1.0, 2.0, 4.0]),
        "broken": torch.tensor([1.0, 2.0]),
        "shape": torch.ones(2, 3),
        "dtype": torch.tensor([1.0, 1.5]),
        "mine": torch.ones(1),
        "count": torch.tensor(7),
    }
    there = here | {
        "zeros": torch.tensor([-0.0, 2.0]),
        "values": torch.tensor([1.0, 2.5, 3.0]),
        "broken": torch.tensor([1.0, float("nan")]),
        "shape": torch.ones(3, 2),
        "dtype": torch.tensor([1.0, 1.5], dtype=torch.bfloat16),
        "yours": torch.ones(1),
        "count": torch.tensor(9),
    }
    del there["mine"]
    words = [save_tensors(tmp_path / "a", here), "--diff", save_tensors(tmp_path / "b", there)]
    assert main([*words, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    found = {entry["name"]: entry for entry in report["tensors"]}
    assert {name: entry["kind"] for name, entry in found.items()} == {
        "broken": "values", "count": "values", "dtype": "dtype", "mine": "only_here",
        "shape": "shape", "values": "values", "yours": "only_there", "zeros": "values",
    }  # fmt: skip
    numbers = ("differing", "elements", "max_abs", "max_relative")
    assert [found["values"][n] for n in numbers] == [2, 3, 1.0, 0.25]
    assert [found["zeros"][n] for n in numbers] == [1, 2, 0.0, 0.0]
    assert [found["broken"][n] for n in numbers] == [1, 2, None, None]
    assert [found["dtype"][n] for n in numbers] == [0, 2, 0.0, 0.0]
    assert (found["count"]["max_abs"], report["equal"]) == (2.0, False)
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "values: 2 of 3 elements, max abs 1.000e+00, max relative 2.500e-01" in out
    assert "shape: float32 [2, 3] here, float32 [3, 2] there\n" in out
    assert "mine: only here, float32 [1]" in out and "8 tensors" in out


def test_two_steps_of_one_directory_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save_tiny(tmp_path, step)
    words = [str(tmp_path), "--step", "1", "--diff", str(tmp_path)]
    assert main([*words, "--diff-step", "1"]) == 0
    assert main([*words, "--only", "weights"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "decoder.layers.0.mlp.linear_fc1.weight: 24 of 24 elements" in out[-2]
    assert out[-1] == "1 tensors and 0 values of the state differ"


def test_a_damaged_side_is_exit_code_3(tmp_path: Path) -> None:
    save_tiny(tmp_path / "one", 1)
    shard = save_tiny(tmp_path / "two", 1).directory / "rank00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x77")
    assert main([str(tmp_path / "one"), "--diff", str(tmp_path / "two")]) == 3


def test_a_store_is_listed_like_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem()
    for step in (1, 2):
        save_tiny(tmp_path, step)
    (open_checkpoint(tmp_path, 2).directory / "manifest.json").unlink()
    place = f"/{tmp_path.name}-list"
    for path in tmp_path.rglob("*"):
        if path.is_file() and "iter_" not in str(path):
            memory.pipe(f"{place}/{path.relative_to(tmp_path)}", path.read_bytes())
    try:
        assert main([f"memory:/{place}", "--list"]) == 3
    finally:
        memory.rm(place, recursive=True)
    newest, oldest = capsys.readouterr().out.splitlines()
    assert f"damaged: memory:/{place}" in newest
    assert "1 rank(s)" in oldest


def test_a_pointer_that_leads_nowhere_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        save_tiny(tmp_path, step)
    for step, target in ((2, "2.json"), (3, "none")):
        pointer = tmp_path / "published" / f"{step}.json"
        pointer.unlink()
        pointer.symlink_to(target)
    assert main([str(tmp_path), "--list"]) == 3
    out = capsys.readouterr().out
    assert all(f"step        {step}" in out for step in (1, 2, 3))
