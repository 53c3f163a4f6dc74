"""A hostile directory costs a message, never code, memory, other files or a traceback."""

import hashlib
import json
import os
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint import (
    StateEntry,
    find_checkpoint,
    load_newest,
    open_checkpoint,
    read_safetensors,
    save_checkpoint,
)
from megatron_lite.checkpoint.commit import publish
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.manifest import is_legal_name
from megatron_lite.checkpoint.strict_json import encode_json, parse_json
from megatron_lite.checkpoint.verify import load_manifest
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.mesh.groups import local_group
from tests.checkpoint.tiny import NONCE, save_cut, save_tiny

HOSTILE_JSON = {
    "nan": b'{"a": NaN}',
    "infinity": b"[Infinity]",
    "minus infinity": b"[-Infinity]",
    "overflow": b"[1e999]",
    "duplicate": b'{"a": 1, "a": 1}',
    "deep list": b"[" * 60_000 + b"]" * 60_000,
    "deep object": b'{"a":' * 60_000 + b"1" + b"}" * 60_000,
    "a little too deep": b"[" * 40 + b"]" * 40,
    "long integer": b"[" + b"9" * 100_000 + b"]",
    "65 bits": b"[18446744073709551616]",
    "not utf-8": b'["\xff"]',
    "two documents": b"{} {}",
    "empty": b"",
    "huge": b"[" + b"1," * 600 + b"1]",
}


@pytest.mark.parametrize("kind", HOSTILE_JSON)
def test_row_52d_hostile_json_is_refused(kind: str) -> None:
    with pytest.raises(DamagedError, match=r"^some\.json: "):
        parse_json(HOSTILE_JSON[kind], "some.json", 1000 if kind == "huge" else 10**6)


def test_good_json_comes_back() -> None:
    value = {"a": [1, -2.5, "ä\ud800", None, True], "b": {"c": 2**64 - 1}}
    assert parse_json(encode_json(value), "x", 1000) == value


@pytest.mark.parametrize("file", ["published/1.json", "manifest.json", "rank00000.receipt.json"])
@pytest.mark.parametrize("kind", HOSTILE_JSON)
def test_row_52d_hostile_json_in_a_checkpoint_is_one_message(
    tmp_path: Path, file: str, kind: str
) -> None:
    directory = save_tiny(tmp_path, 1).directory
    path = tmp_path / file if file.startswith("published") else directory / file
    path.write_bytes(HOSTILE_JSON[kind])
    with pytest.raises(DamagedError, match="no published checkpoint verifies"):
        find_checkpoint(tmp_path)


def rewrite(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of step 1 and make every hash fit again, as an attacker would."""
    pointer_path = root / "published" / "1.json"
    pointer = json.loads(pointer_path.read_bytes())
    path = root / "attempts" / pointer["attempt"] / "manifest.json"
    content = json.loads(path.read_bytes())
    content.pop("content_sha256")
    change(content)
    content["content_sha256"] = hashlib.sha256(encode_json(content)).hexdigest()
    path.write_bytes(encode_json(content))
    pointer["manifest_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    pointer_path.write_bytes(encode_json(pointer))


def test_rewriting_with_fitting_hashes_is_what_the_next_tests_do(tmp_path: Path) -> None:
    save_tiny(tmp_path, 1)
    rewrite(tmp_path, lambda content: content["state"].update(added=1))
    assert open_checkpoint(tmp_path).state["added"] == 1


NAME = "optim/step"


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(attempt="../../etc"),
        lambda c: c.update(attempt="1-0-" + "f" * 16),
        lambda c: c.update(step=2),
        lambda c: c.update(step=-1),
        lambda c: c.update(step=True),
        lambda c: c.update(format="other"),
        lambda c: c.update(extra=1),
        lambda c: c.pop("epoch"),
        lambda c: c["tensors"].update({"../x": c["tensors"][NAME]}),
        lambda c: c["tensors"].update({"/abs": c["tensors"][NAME]}),
        lambda c: c["tensors"].update({"unknown": c["tensors"][NAME]}),
        lambda c: c["tensors"].pop(NAME),
        lambda c: c["tensors"][NAME].update(dtype="float32"),
        lambda c: c["tensors"][NAME].update(dtype="object"),
        lambda c: c["tensors"][NAME].update(shape=[2**60]),
        lambda c: c["tensors"][NAME].update(pieces=[]),
        lambda c: c["tensors"][NAME]["pieces"][0].__setitem__(0, 1),
        lambda c: c["tensors"][NAME]["pieces"][0].__setitem__(0, -1),
        lambda c: c["tensors"][NAME]["pieces"][0].__setitem__(1, [0]),
        lambda c: c["tensors"][NAME]["pieces"][0].append("../file"),
        lambda c: c["shards"].append(c["shards"][0]),
        lambda c: c["shards"][0].update(size=1),
        lambda c: c.update(shards=[]),
        lambda c: c.update(state=[]),
    ],
)
def test_a_manifest_with_fitting_hashes_but_bad_content_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    save_tiny(tmp_path, 1)
    rewrite(tmp_path, change)
    with pytest.raises(DamagedError):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "attempt", ["../../../etc", "/etc", "1-0-0123456789abcdef/..", "", "1-0-0123456789ABCDEF"]
)
def test_row_52c_a_pointer_cannot_lead_out_of_the_directory(tmp_path: Path, attempt: str) -> None:
    save_tiny(tmp_path, 1)
    path = tmp_path / "published" / "1.json"
    path.write_bytes(encode_json({**json.loads(path.read_bytes()), "attempt": attempt}))
    with pytest.raises(DamagedError, match="illegal value"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text", ["attempts/../../x", "/etc", "attempts/1-0-0123456789abcdef/../.."]
)
def test_row_52c_a_view_cannot_lead_out_of_the_directory(tmp_path: Path, text: str) -> None:
    view = tmp_path / "iter_0000001"
    view.mkdir()
    (view / "attempt.txt").write_text(text)
    with pytest.raises(DamagedError, match="does not name an attempt"):
        find_checkpoint(view)


@pytest.mark.parametrize(
    "file", ["manifest.json", "rank00000.receipt.json", "rank00000.safetensors", "pointer", "."]
)
def test_row_52c_symbolic_links_inside_a_checkpoint_are_not_followed(
    tmp_path: Path, file: str
) -> None:
    root = tmp_path / "save"
    directory = save_tiny(root, 1).directory
    path = root / "published" / "1.json" if file == "pointer" else directory / file
    path = path.resolve()
    moved = path.rename(tmp_path / "moved")
    path.symlink_to(moved)
    with pytest.raises(DamagedError, match=r"symbolic link|missing"):
        find_checkpoint(root)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "directory"])
def test_a_shard_that_is_no_file_does_not_hang(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = save_tiny(tmp_path, 1).directory / "rank00000.safetensors"
    path.unlink()
    make(path)
    with pytest.raises(DamagedError, match="not a regular file"):
        find_checkpoint(tmp_path)


def shard_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """Bytes of a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


FIELD = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        shard_bytes({}, length=2**63),
        shard_bytes({}, length=99_000_000),
        shard_bytes([]),
        shard_bytes(b"[" * 50_000),
        shard_bytes({"a": FIELD}),
        shard_bytes({"a": FIELD}, b"12345"),
        shard_bytes({"a": {**FIELD, "data_offsets": [4, 8]}}, b"12345678"),
        shard_bytes({"a": FIELD, "b": FIELD}, b"12345678"),
        shard_bytes({"a": {**FIELD, "data_offsets": [4, 0]}}, b"1234"),
        shard_bytes({"a": {**FIELD, "shape": [2**62, 2**62]}}, b"1234"),
        shard_bytes({"a": {**FIELD, "shape": [-1]}}, b"1234"),
        shard_bytes({"a": {**FIELD, "shape": [1.0]}}, b"1234"),
        shard_bytes({"a": {**FIELD, "dtype": "OBJ"}}, b"1234"),
        shard_bytes({"a": {**FIELD, "dtype": ["F32"]}}, b"1234"),
        shard_bytes({"a": {**FIELD, "more": 1}}, b"1234"),
        shard_bytes({"a": None}, b"1234"),
        shard_bytes({"__metadata__": {"a": 1}}),
    ],
)
def test_hostile_safetensors_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=r"x\.safetensors"):
        read_safetensors(path)


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", True),
        ("optim/exp_avg/output_layer.weight", True),
        ("../x", False),
        ("a/../b", False),
        ("/a", False),
        ("a//b", False),
        ("a/", False),
        (".a", False),
        ("a.", False),
        ("", False),
        ("a b", False),
        ("a\n", False),
        ("a[0:1]", False),
        ("a" * 600, False),
    ],
)
def test_names_of_tensors(name: str, legal: bool, tmp_path: Path) -> None:
    assert is_legal_name(name) == legal
    if not legal:
        entry = StateEntry(name, torch.ones(1), (1,), (0,), True)
        with pytest.raises(ValueError):
            save_checkpoint(tmp_path, 1, [entry], {}, local_group("world"))


def test_empty_and_foreign_directories_are_refused_as_such(tmp_path: Path) -> None:
    for place, reason in ((tmp_path / "none", "does not exist"), (tmp_path, "no published")):
        with pytest.raises(UserError, match=reason) as caught:
            find_checkpoint(place)
        assert caught.value.exit_code == 2
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(UserError, match="convert_checkpoint"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "loop"])
def test_a_name_that_leads_nowhere_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError) as caught:
        find_checkpoint(tmp_path / name)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_row_52e_nothing_that_is_written_is_readable_by_all(tmp_path: Path, umask: int) -> None:
    """Saves, views, marks of damage, retention: every file and directory."""
    root = tmp_path / "save"
    before = os.umask(umask)
    try:
        for step in (1, 2):
            shard = save_tiny(root, step, keep_last=3).directory / "rank00000.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x99")
        load_newest(root, local_group("world"), lambda c: [c.read(name) for name in c.names][:0])
    finally:
        os.umask(before)
    assert list(root.rglob("*.suspect"))
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            mode, most = stat.S_IMODE(path.stat().st_mode), 0o750 if path.is_dir() else 0o640
            assert mode & ~most == 0, (path, oct(mode))


def test_row_52g_a_rank_cannot_publish_what_is_published(tmp_path: Path) -> None:
    """Not by the ordinary way, not over a pointer, not with an old attempt as a later step."""
    files = FileSystem()
    right = save_cut(tmp_path, 1, 2)
    manifest, sha256 = load_manifest(right)
    pointer = tmp_path / "published" / "1.json"
    before = pointer.read_bytes()
    with pytest.raises(UserError, match="already published"):
        publish(tmp_path, manifest, sha256[::-1], files, replace=False)
    with pytest.raises(FileExistsError):
        files.write_file(pointer, b"{}")
    assert pointer.read_bytes() == before
    other = tmp_path / "attempts" / f"2-0-{NONCE}"
    shutil.copytree(right, other)  # a stale attempt passed off as a later step
    pointer.with_name("2.json").write_bytes(
        before.replace(b'"step":1', b'"step":2').replace(b'"1-0-', b'"2-0-')
    )
    found = find_checkpoint(tmp_path)
    assert (found.step, [item.step for item in found.passed_over]) == (1, [2])
    assert "belongs to attempt 1-0-" in found.passed_over[0].reason
