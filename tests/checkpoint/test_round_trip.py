"""What was saved comes back bit for bit, in any box, from any number of ranks."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.checkpoint import (
    Checkpoint,
    StateEntry,
    find_checkpoint,
    load_newest,
    logical_hash,
    open_checkpoint,
    read_safetensors,
    read_safetensors_metadata,
    save_checkpoint,
    write_safetensors,
)
from megatron_lite.checkpoint.shards import DTYPES
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.mesh.groups import Group, local_group
from tests.checkpoint.tiny import (
    cut_entries,
    holds_step,
    same_bits,
    save_cut,
    save_tiny,
    tiny_state,
    tiny_tensors,
)
from tests.pool import RankPool


def test_save_and_load_on_one_rank(tmp_path: Path) -> None:
    result = save_tiny(tmp_path, 3)
    checkpoint = open_checkpoint(tmp_path)
    assert holds_step(checkpoint, 3)
    assert checkpoint.state == {**tiny_state(3), "ramp": [[0, 8]]}
    files = list(result.directory.glob("*.safetensors"))
    assert result.bytes == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("name", ["decoder.layers.0.mlp.linear_fc1.weight", "optim/master/"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_box_equals_the_slice(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    root = tmp_path_factory.getbasetemp() / "boxes"
    if not root.exists():
        save_cut(root, 1, 2)
    checkpoint = open_checkpoint(root)
    name = next(known for known in checkpoint.names if known.startswith(name))
    tensor = tiny_tensors(1)[name]
    offset = tuple(data.draw(st.integers(0, size)) for size in tensor.shape)
    shape = tuple(
        data.draw(st.integers(0, size - low))
        for size, low in zip(tensor.shape, offset, strict=True)
    )
    cut = tuple(slice(low, low + size) for low, size in zip(offset, shape, strict=True))
    assert same_bits(checkpoint.read(name, offset, shape), tensor[cut])


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_keeps_its_bits(tmp_path: Path, dtype: str) -> None:
    raw = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    raw = raw % 2 if dtype == "bool" else raw
    tensor = raw.view(getattr(torch, dtype))  # NaN payloads and infinities are among these
    write_safetensors(tmp_path / "x.safetensors", {"x": tensor})
    assert same_bits(read_safetensors(tmp_path / "x.safetensors")["x"], tensor)
    assert same_bits(safetensors.torch.load_file(tmp_path / "x.safetensors")["x"], tensor)


def test_the_safetensors_package_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    tensors = {
        "wide": torch.randn(3, 5).bfloat16(),
        "turned": torch.randn(4, 3).t(),  # not contiguous
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "odd": torch.arange(3, dtype=torch.uint8),
    }
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    write_safetensors(ours, tensors, {"made": "here"})
    safetensors.torch.save_file({k: t.contiguous() for k, t in tensors.items()}, theirs, {"k": "v"})
    for path in (ours, theirs):
        for found in (safetensors.torch.load_file(path), read_safetensors(path)):
            assert found.keys() == tensors.keys()
            assert all(same_bits(found[name], tensors[name]) for name in tensors)
    assert read_safetensors_metadata(theirs) == {"k": "v"}
    with safetensors.safe_open(ours, "pt") as file:
        assert file.metadata() == {"made": "here"}


def test_tensors_are_aligned_to_their_element_size(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(2).double()})
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert (8 + length + header["b"]["data_offsets"][0]) % 8 == 0


@pytest.mark.parametrize("size", [1, 2])
def test_logical_hash_does_not_depend_on_the_cut(tmp_path: Path, size: int) -> None:
    save_cut(tmp_path / "cut", 2, size)
    save_tiny(tmp_path / "one", 2)
    save_tiny(tmp_path / "other", 3)
    one = logical_hash(open_checkpoint(tmp_path / "one"))
    assert logical_hash(open_checkpoint(tmp_path / "cut")) == one
    assert logical_hash(open_checkpoint(tmp_path / "other")) != one


def test_reading_touches_only_the_shards_it_needs(tmp_path: Path) -> None:
    directory = save_cut(tmp_path, 1, 2)
    checkpoint = Checkpoint(find_checkpoint(tmp_path))
    (directory / "rank00001.safetensors").unlink()
    name = "optim/exp_avg/decoder.layers.0.mlp.linear_fc1.weight"
    assert same_bits(checkpoint.read(name, (0, 0), (2, 6)), tiny_tensors(1)[name][:2])
    with pytest.raises(DamagedError, match="rank00001"):
        checkpoint.read(name)


def test_reading_does_not_change_the_files(tmp_path: Path) -> None:
    save_tiny(tmp_path, 1)
    checkpoint = open_checkpoint(tmp_path)
    for name in checkpoint.names:
        checkpoint.read(name).zero_()
    assert holds_step(open_checkpoint(tmp_path), 1)


def test_a_box_outside_of_the_tensor_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, 1)
    with pytest.raises(UserError, match="no box"):
        open_checkpoint(tmp_path).read(next(iter(tiny_tensors(1))), (3, 0), (2, 6))


@pytest.mark.parametrize("bad", [{1: 2}, {"x": float("nan")}, {"x": {1, 2}}, {"x": 2**70}])
def test_a_state_that_json_would_change_is_refused(tmp_path: Path, bad: dict[Any, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        save_checkpoint(tmp_path, 1, [], bad, local_group("world"))


def test_overlapping_and_missing_owners_are_refused(tmp_path: Path) -> None:
    tensor = torch.randn(4)
    whole = StateEntry("a", tensor, (4,), (0,), True)
    part = StateEntry("a", tensor[:2], (4,), (0,), True)
    for entries, fault in (([whole, part], "in 2 files"), ([part], "in no file")):
        with pytest.raises(DamagedError, match=fault):
            save_checkpoint(tmp_path, 1, entries, {}, local_group("world"))
    assert list((tmp_path / "attempts").iterdir()) == []


def save_share(root: str, step: int, rank: int, world_size: int) -> str:
    """Save this rank's share (runs in the pool)."""
    entries = cut_entries(tiny_tensors(step), rank, world_size)
    group = world_group(rank, world_size)
    return str(save_checkpoint(root, step, entries, tiny_state(step), group).directory)


def load_share(root: str, rank: int, world_size: int) -> tuple[int, bool, list[int]]:
    """Load this rank's share with fallback (runs in the pool)."""

    def load(checkpoint: Checkpoint) -> bool:
        entries = cut_entries(tiny_tensors(checkpoint.step), rank, world_size)
        return all(
            same_bits(checkpoint.read(e.name, e.offset, tuple(e.tensor.shape)), e.tensor)
            for e in entries
        )

    loaded = load_newest(root, world_group(rank, world_size), load)
    return loaded.checkpoint.step, loaded.value, [item.step for item in loaded.passed_over]


def world_group(rank: int, world_size: int) -> Group:
    """The pool's default group."""
    process_group = torch.distributed.group.WORLD if world_size > 1 else None
    return Group("world", tuple(range(world_size)), rank, process_group)


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2), (2, 2)])
def test_any_number_of_ranks_reads_what_any_number_saved(
    rank_pool: RankPool, tmp_path: Path, saved: int, loaded: int
) -> None:
    directories = rank_pool.run(saved, save_share, root=str(tmp_path), step=1)
    assert len(set(directories)) == 1
    assert rank_pool.run(loaded, load_share, root=str(tmp_path)) == [(1, True, [])] * loaded


def test_all_ranks_fall_back_together_when_one_reads_damage(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(2, save_share, root=str(tmp_path), step=1)
    directory = Path(rank_pool.run(2, save_share, root=str(tmp_path), step=2)[0])
    shard = directory / "rank00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert rank_pool.run(2, load_share, root=str(tmp_path)) == [(1, True, [2])] * 2


def test_a_failing_load_on_one_rank_raises_the_same_error_on_all(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    results = rank_pool.run(2, load_nothing, root=str(tmp_path / "none"))
    assert results[0] == results[1]
    assert results[0][0] == "NoCheckpoint"


def load_nothing(root: str, rank: int, world_size: int) -> tuple[str, str]:
    """Try to load from a directory without checkpoints (runs in the pool)."""
    try:
        load_newest(root, world_group(rank, world_size), lambda checkpoint: None)
    except UserError as error:
        return type(error).__name__, str(error)
    return "", ""
