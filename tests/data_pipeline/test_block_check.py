"""Sampled blocks of data files: what is watched, and what a change is told as."""

from pathlib import Path

import pytest

from megatron_lite.data.block_check import BLOCK_BYTES, BLOCKS, BlockCheck, sampled_offsets
from megatron_lite.errors import DamagedError


def test_blocks_reach_from_the_first_to_the_last_byte() -> None:
    offsets = sampled_offsets(10_000_000)
    assert len(offsets) == BLOCKS
    assert offsets[0] == 0
    assert offsets[-1] + BLOCK_BYTES == 10_000_000


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, BLOCKS * BLOCK_BYTES])
def test_row_48_every_byte_of_a_small_file_is_watched(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(size))
    blocks = BlockCheck([path])
    for turn in range(len(blocks)):
        blocks.check(turn)
    for place in {0, size // 2, size - 1} if size else ():
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\1")
        found = []
        for turn in range(len(blocks)):
            try:
                blocks.check(turn)
            except DamagedError as error:
                found.append(str(error))
        assert found, place
        assert all(str(path) in text for text in found)
        path.write_bytes(bytes(size))


def test_row_48_a_changed_block_is_told_with_file_and_offset(tmp_path: Path) -> None:
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for path in paths:
        path.write_bytes(bytes(1_000_000))
    blocks = BlockCheck(paths)
    offset = sampled_offsets(1_000_000)[7]
    with paths[1].open("r+b") as file:
        file.seek(offset + 100)
        file.write(b"\1")
    for turn in range(len(blocks)):
        if turn != BLOCKS + 7:
            blocks.check(turn)
    with pytest.raises(DamagedError, match=rf"b\.bin: the block of 4096 bytes at offset {offset} "):
        blocks.check(BLOCKS + 7)
    with pytest.raises(DamagedError, match="other bytes"):
        blocks.check(3 * BLOCKS + 7)  # around


def test_row_48_a_file_that_ends_early_or_is_gone_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(10_000))
    blocks = BlockCheck([path])
    path.write_bytes(bytes(5_000))
    with pytest.raises(DamagedError, match="is shorter than when the run began"):
        blocks.check(len(blocks) - 1)
    path.unlink()
    with pytest.raises(DamagedError, match="cannot be read any more"):
        blocks.check(0)


def test_made_up_data_has_nothing_to_watch() -> None:
    BlockCheck().check(5)
