"""Files of a Hugging Face directory: hostile ones are refused, written ones are whole."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint.convert.hf_read import read_hf
from megatron_lite.checkpoint.convert.hf_write import write_hf
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.tensors import read_safetensors, write_safetensors
from megatron_lite.errors import DamagedError, UserError
from tests.checkpoint.convert.peers import differing, save_peer, transformers

INDEX = "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Llama in one file."""
    save_peer(tmp_path / "hf", "llama")
    return tmp_path / "hf"


def shard(source: Path) -> dict[str, Any]:
    """Cut the weights into two files with an index; return the index."""
    tensors = read_safetensors(source / "model.safetensors")
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:9], "other.safetensors": names[9:]}
    for file, some in files.items():
        write_safetensors(source / file, {name: tensors[name] for name in some})
    (source / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, some in files.items() for name in some}}
    (source / INDEX).write_text(json.dumps(index))
    return index


def test_shards_with_an_index_are_read(source: Path) -> None:
    whole = {name: tensor.load() for name, tensor in read_hf(source).tensors.items()}
    shard(source)
    for name, tensor in read_hf(source).tensors.items():
        assert torch.equal(tensor.load(), whole[name])


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".x", "", "a\0b", 3]
)
def test_an_index_cannot_name_files_elsewhere(source: Path, name: Any) -> None:
    index = shard(source)
    (source.parent / "outside.safetensors").write_bytes((source / "other.safetensors").read_bytes())
    first = sorted(index["weight_map"])[-1]
    index["weight_map"][first] = name
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(DamagedError):
        read_hf(source)


def test_index_and_files_must_say_the_same(source: Path) -> None:
    index = shard(source)
    names = sorted(index["weight_map"])
    changed = json.loads(json.dumps(index))
    changed["weight_map"][names[0]] = "other.safetensors"
    (source / INDEX).write_text(json.dumps(changed))
    with pytest.raises(DamagedError, match="the index says other"):
        read_hf(source)
    changed = json.loads(json.dumps(index))
    changed["weight_map"]["model.ghost"] = "other.safetensors"
    (source / INDEX).write_text(json.dumps(changed))
    with pytest.raises(DamagedError, match=r"model\.ghost"):
        read_hf(source)


def test_links_are_followed_inside_and_in_a_download_cache_only(
    source: Path, tmp_path: Path
) -> None:
    weights = source / "model.safetensors"
    elsewhere = tmp_path / "elsewhere.safetensors"
    os.rename(weights, elsewhere)
    weights.symlink_to(elsewhere)
    with pytest.raises(DamagedError, match="outside of the directory"):
        read_hf(source)
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    os.rename(elsewhere, cache / "blobs" / "0123abcd")
    weights.unlink()
    snapshot = cache / "snapshots" / "rev"
    os.rename(source, snapshot)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123abcd")
    assert len(read_hf(snapshot).tensors) == 21
    (snapshot / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(DamagedError, match=r"tokenizer\.json: is a link"):
        read_hf(snapshot)


def test_pickles_are_refused_without_leave_and_read_with_it(source: Path, tmp_path: Path) -> None:
    tensors = read_safetensors(source / "model.safetensors")
    wanted = {name: tensor.load() for name, tensor in read_hf(source).tensors.items()}
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    with pytest.raises(UserError, match="--trust-pickle"):
        read_hf(source)
    (tmp_path / "scratch").mkdir()
    bundle = read_hf(source, scratch=tmp_path / "scratch")
    assert all(torch.equal(tensor.load(), wanted[n]) for n, tensor in bundle.tensors.items())


class Bomb:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_a_pickle_that_runs_code_is_refused_even_with_leave(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Bomb(tmp_path / "ran")}, source / "pytorch_model.bin")
    (tmp_path / "scratch").mkdir()
    with pytest.raises(DamagedError, match="could not be unpickled"):
        read_hf(source, scratch=tmp_path / "scratch")
    assert not (tmp_path / "ran").exists()


def test_a_small_shard_size_gives_files_that_transformers_opens(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    written = write_hf(read_hf(source), target, max_shard_bytes=60_000)
    assert len(written.weight_files) > 3
    index = json.loads((target / INDEX).read_text())
    assert index["metadata"]["total_size"] == written.bytes == 281856
    for name in written.weight_files:
        assert (target / name).stat().st_size < 60_000 + 4096
    assert set(index["weight_map"].values()) == set(written.weight_files)
    assert differing(source, target) == []
    transformers.AutoModelForCausalLM.from_pretrained(target)


@pytest.mark.parametrize("operation", ["mkdir", "create", "write", "sync", "rename"])
def test_a_failure_leaves_the_target_as_it_was(
    source: Path, tmp_path: Path, operation: str
) -> None:
    target = tmp_path / "out"
    bundle = read_hf(source)
    write_hf(bundle, target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def fail(what: str, path: Path) -> None:
        if what == operation:
            raise OSError(errno.ENOSPC, "no space", str(path))

    with pytest.raises(DamagedError, match="no space"):
        write_hf(bundle, target, overwrite=True, files=FileSystem(fail))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "out"}


def test_only_a_model_is_overwritten(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    bundle = read_hf(source)
    target.mkdir()
    write_hf(bundle, target)
    with pytest.raises(UserError, match="is not empty; --overwrite"):
        write_hf(bundle, target)
    (target / "stale.safetensors").write_bytes(b"")
    write_hf(bundle, target, overwrite=True)
    assert not (target / "stale.safetensors").exists()
    (target / "notes").mkdir()
    with pytest.raises(UserError, match="it has the directory notes"):
        write_hf(bundle, target, overwrite=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("dear")
    with pytest.raises(UserError, match=r"it has no config\.json"):
        write_hf(bundle, other, overwrite=True)
    assert (other / "thesis.txt").read_text() == "dear"


def test_damaged_weights_are_refused(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"model\.safetensors"):
        read_hf(source)
