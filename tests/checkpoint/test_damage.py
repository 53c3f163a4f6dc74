"""No damage is silent: the loader falls back to an older checkpoint and says why."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_lite.checkpoint import Checkpoint, find_checkpoint, load_newest, open_checkpoint
from megatron_lite.checkpoint.catalog import suspect_path
from megatron_lite.checkpoint.commit import refresh_views
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.manifest import attempt_directory
from megatron_lite.checkpoint.retention import retire_checkpoints
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


def test_row_39_40_a_thousand_bit_flips_none_silent(root: Path) -> None:
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


def test_row_39_bit_flips_in_tensors_are_found_by_the_ranks_that_read_them(root: Path) -> None:
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
def test_row_38_41_truncated_grown_or_missing_files_are_passed_over(
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
    assert [item.step for item in found.passed_over] == [2]


def swap(a: Path, b: Path) -> None:
    """Exchange two files."""
    other = a.with_name("swap")
    a.rename(other)
    b.rename(a)
    other.rename(b)


@pytest.mark.parametrize("name", ["rank00000.safetensors", "rank00000.receipt.json"])
def test_row_42_swapped_shards_and_receipts_are_passed_over(root: Path, name: str) -> None:
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
def test_row_43_the_tracker_and_the_views_are_not_trusted(root: Path, text: str) -> None:
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


# ---- everything at random --------------------------------------------------------------------
STEPS = (1, 2, 3)


def files_of(root: Path) -> list[Path]:
    """Every file and link below a root, in one order."""
    paths = (path for path in root.rglob("*") if path.is_symlink() or path.is_file())
    return sorted(path for path in paths if not path.parent.is_symlink())


def step_of(path: Path) -> int | None:
    """The step whose checkpoint a file is part of; None for views."""
    if path.parent.name == "published":
        return int(path.stem)
    return int(path.parent.name.partition("-")[0]) if "attempts" in path.parts else None


def spoil(path: Path, other: Path, kind: str, generator: random.Random) -> None:
    """Do one damage; `other` is what `path` is exchanged with."""
    if path.is_symlink() or (kind == "swap" and other.is_symlink()):
        (path if path.is_symlink() else other).unlink()
        return
    data = path.read_bytes()
    if kind == "flip":
        flipped = bytearray(data)
        for _ in range(generator.choice((1, 1, 1, 8))):
            flipped[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
    elif kind == "truncate":
        path.write_bytes(data[: generator.randrange(len(data))])
    elif kind == "swap":
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        path.unlink()


@pytest.mark.parametrize("kind", ["flip", "truncate", "swap", "delete"])
def test_c2_no_damage_of_any_file_is_silent(tmp_path: Path, kind: str) -> None:
    """250 damages of each kind, over all files of three steps with their views.

    The newest step whose files all have their bytes is loaded, bit for bit; a reason is
    told for each newer one. Damaged views change nothing at all.
    """
    for step in STEPS:
        save_cut(tmp_path, step, 2)
        refresh_views(tmp_path, step, f"{step}-0-{NONCE}", FileSystem())
    files = files_of(tmp_path)
    assert len(files) == 6 * len(STEPS) + len(STEPS) + 1
    originals = {path: None if path.is_symlink() else path.read_bytes() for path in files}
    targets = {path: path.readlink() for path in files if path.is_symlink()}
    generator = random.Random(f"c2 {kind}")
    fell_back = 0
    for _ in range(250):
        chosen = generator.sample(files, 2)
        spoil(*chosen, kind, generator)
        broken = set()
        for path in chosen:
            same = path.is_symlink() or (path.exists() and path.read_bytes() == originals[path])
            broken |= set() if same else {step_of(path)}
        right = max(step for step in STEPS if step not in broken)
        loaded = load_newest(tmp_path, local_group("world"), lambda c: holds_step(c, c.step))
        assert (loaded.checkpoint.step, loaded.value) == (right, True), chosen
        told = {item.step: item.reason for item in loaded.passed_over}
        assert set(told) == {step for step in STEPS if step > right}, chosen
        assert all(
            "3-0-" in reason or "/3.json" in reason or "/2" in reason for reason in told.values()
        )
        fell_back += right != max(STEPS)
        for path in chosen:
            data = originals[path]
            if data is not None:
                path.write_bytes(data)
            elif not path.is_symlink():
                path.symlink_to(targets[path])
        for mark in (tmp_path / "attempts").glob("*.suspect"):
            mark.unlink()
    assert fell_back > 50
    assert holds_step(open_checkpoint(tmp_path), 3)


# ---- copies, marks, lost pointers ------------------------------------------------------------
def test_row_44_a_copy_on_another_tier_is_verified_like_the_original(root: Path) -> None:
    copy = _open_copy(root)
    shard = copy / "rank00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x99")
    with pytest.raises(DamagedError, match=r"rank00001\.safetensors.* is damaged"):
        find_checkpoint(copy)
    with pytest.raises(DamagedError, match=r"rank00001\.safetensors.* is damaged"):
        load_newest(copy, local_group("world"), lambda c: holds_step(c, 2))
    assert holds_step(open_checkpoint(root), 2)


def test_a_checkpoint_whose_pointer_is_lost_is_told(root: Path) -> None:
    (root / "published" / "2.json").unlink()
    found = find_checkpoint(root)
    assert found.step == 1
    assert [item.step for item in found.passed_over] == [2]
    assert "its pointer is gone" in found.passed_over[0].reason


def test_what_a_load_found_damaged_is_kept_and_does_not_count_as_good(root: Path) -> None:
    """Retention reads no tensors: without the mark it would keep the damaged one only."""
    directory = attempt_directory(root, f"2-0-{NONCE}")
    shard = directory / "rank00000.safetensors"
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    loaded = load_newest(root, local_group("world"), lambda c: holds_step(c, c.step))
    assert (loaded.checkpoint.step, loaded.value) == (1, True)
    assert "is damaged" in suspect_path(directory).read_text()
    retired = retire_checkpoints(root, 1, None, FileSystem())
    assert retired.steps == () and [item.step for item in retired.damaged] == [2]
    assert holds_step(open_checkpoint(root), 1) and shard.exists()
    shard.write_bytes(good)  # the mark convicts nobody
    assert load_newest(root, local_group("world"), lambda c: holds_step(c, 2)).value is True
