"""No damage is silent: the loader falls back to an older checkpoint and says why."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_lite.checkpoint import Checkpoint, find_checkpoint, load_newest, open_checkpoint
from megatron_lite.checkpoint.manifest import attempt_directory
from megatron_lite.errors import DamagedError
from megatron_lite.mesh.groups import local_group
from tests.checkpoint.tiny import NONCE, holds_step, save_cut


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 and 2, each saved by two ranks."""
    save_cut(tmp_path, 1, 2)
    save_cut(tmp_path, 2, 2)
    return tmp_path


def trusted_files(root: Path, step: int) -> list[Path]:
    """Every file that belongs to one step."""
    directory = attempt_directory(root, f"{step}-0-{NONCE}")
    return [root / "published" / f"{step}.json", *sorted(directory.iterdir())]


def test_a_thousand_bit_flips_none_silent(root: Path) -> None:
    generator = random.Random(0)
    files = trusted_files(root, 2)
    for _ in range(1000):
        path = generator.choice(files)
        original = path.read_bytes()
        position = generator.randrange(len(original) * 8)
        flipped = bytearray(original)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        found = find_checkpoint(root)
        assert found.step == 1, (path, position)
        assert [item.step for item in found.passed_over] == [2]
        assert path.name in found.passed_over[0].reason or "2-0-" in found.passed_over[0].reason
        path.write_bytes(original)
    assert holds_step(open_checkpoint(root), 2)


def test_bit_flips_in_tensors_are_found_by_the_ranks_that_read_them(root: Path) -> None:
    generator = random.Random(1)
    shard = trusted_files(root, 2)[2]
    original = shard.read_bytes()
    assert shard.name == "rank00000.receipt.json" or shard.suffix == ".safetensors"
    shard = next(path for path in trusted_files(root, 2) if path.suffix == ".safetensors")
    original = shard.read_bytes()
    for _ in range(50):
        flipped = bytearray(original)
        flipped[generator.randrange(len(original))] ^= 1 << generator.randrange(8)
        shard.write_bytes(flipped)
        loaded = load_newest(root, local_group("world"), lambda c: holds_step(c, c.step))
        assert (loaded.checkpoint.step, loaded.value) == (1, True)
        assert shard.name in loaded.passed_over[0].reason
    shard.write_bytes(original)


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("keep", ["half", "minus 1024", "minus 1", "nothing", "plus 1", "gone"])
def test_truncated_grown_or_missing_files_are_passed_over(
    root: Path, index: int, keep: str
) -> None:
    path = trusted_files(root, 2)[index]
    data = path.read_bytes()
    cut = {
        "half": data[: len(data) // 2],
        "minus 1024": data[:-1024],
        "minus 1": data[:-1],
        "nothing": b"",
        "plus 1": data + b" ",
    }
    path.unlink()
    if keep != "gone":
        path.write_bytes(cut[keep])
    found = find_checkpoint(root)
    assert found.step == 1
    if index or keep != "gone":
        assert [item.step for item in found.passed_over] == [2]


def swap(a: Path, b: Path) -> None:
    """Exchange two files."""
    other = a.with_name("swap")
    a.rename(other)
    b.rename(a)
    other.rename(b)


@pytest.mark.parametrize("name", ["rank00000.safetensors", "rank00000.receipt.json"])
def test_swapped_shards_and_receipts_are_passed_over(root: Path, name: str) -> None:
    directory = attempt_directory(root, f"2-0-{NONCE}")
    swap(directory / name, directory / name.replace("00000", "00001"))
    assert find_checkpoint(root).step == 1


@pytest.mark.parametrize("index", range(6))
def test_a_file_of_another_step_is_not_taken_for_this_one(root: Path, index: int) -> None:
    """A stale shard of the same layout (and any other file) must not load silently."""
    shutil.copy(trusted_files(root, 1)[index], trusted_files(root, 2)[index])
    assert find_checkpoint(root).step == 1


def test_a_whole_directory_of_another_step_is_not_taken_for_this_one(root: Path) -> None:
    directory = attempt_directory(root, f"2-0-{NONCE}")
    shutil.rmtree(directory)
    shutil.copytree(attempt_directory(root, f"1-0-{NONCE}"), directory)
    assert find_checkpoint(root).step == 1


def test_a_step_that_was_asked_for_is_not_replaced_by_an_older_one(root: Path) -> None:
    trusted_files(root, 2)[1].write_bytes(b"{}")
    with pytest.raises(DamagedError, match="step 2"):
        find_checkpoint(root, 2)
    assert find_checkpoint(root, 1).step == 1


def test_when_nothing_verifies_every_reason_is_listed(root: Path) -> None:
    for step in (1, 2):
        trusted_files(root, step)[0].write_bytes(b"")
    with pytest.raises(DamagedError, match=r"(?s)step 2: .*step 1: ") as caught:
        find_checkpoint(root)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("text", ["", "7", "garbage", "release", "4160813071"])
def test_the_tracker_and_the_views_are_not_trusted(root: Path, text: str) -> None:
    (root / "latest_checkpointed_iteration.txt").write_text(text)
    (root / "iter_0000009").mkdir()
    (root / "iter_0000002").symlink_to(f"attempts/1-0-{NONCE}")
    assert holds_step(open_checkpoint(root), 2)


def _open_view(root: Path) -> Path:
    (root / "iter_0000002").symlink_to(f"attempts/2-0-{NONCE}")
    return root / "iter_0000002"


def _open_pointer_directory(root: Path) -> Path:
    view = root / "iter_0000002"
    view.mkdir()
    (view / "attempt.txt").write_text(f"attempts/2-0-{NONCE}\n")
    return view


def _open_copy(root: Path) -> Path:
    shutil.copytree(attempt_directory(root, f"2-0-{NONCE}"), root / "elsewhere")
    return root / "elsewhere"


@pytest.mark.parametrize(
    "place",
    [_open_view, _open_pointer_directory, _open_copy, lambda r: trusted_files(r, 2)[1].parent],
)
def test_one_checkpoint_directory_can_be_opened(root: Path, place: Callable[[Path], Path]) -> None:
    assert holds_step(open_checkpoint(place(root)), 2)


def test_a_changed_manifest_of_a_copy_is_noticed_without_a_pointer(root: Path) -> None:
    copy = _open_copy(root)
    manifest = copy / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"iteration":2', b'"iteration":3'))
    with pytest.raises(DamagedError, match="sha256"):
        find_checkpoint(copy)


def test_an_attempt_that_was_never_published_cannot_be_opened(root: Path) -> None:
    trusted_files(root, 2)[0].unlink()
    with pytest.raises(DamagedError, match="never published"):
        find_checkpoint(attempt_directory(root, f"2-0-{NONCE}"))


def test_damage_after_opening_is_found_at_the_read(root: Path) -> None:
    checkpoint = Checkpoint(find_checkpoint(root, verify="structure"))
    for rank in (0, 1):
        shard = attempt_directory(root, f"2-0-{NONCE}") / f"rank0000{rank}.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
        with shard.open("r+b") as file:
            file.truncate(200)
    with pytest.raises(DamagedError):
        holds_step(checkpoint, 2)
