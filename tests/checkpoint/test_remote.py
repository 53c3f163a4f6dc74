"""Object stores: the same guarantees as on disks, whatever the store or the way to it does."""

import json
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint import find_checkpoint, load_newest, open_checkpoint
from megatron_lite.checkpoint.catalog import NoCheckpoint
from megatron_lite.checkpoint.commit import CommitPlan
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.manifest import attempt_directory
from megatron_lite.checkpoint.remote import (
    Mirror,
    finalize_remote,
    publish_remote,
    refresh_remote_views,
    upload_attempt,
)
from megatron_lite.checkpoint.remote_retention import retire_remote, sweep_remote
from megatron_lite.checkpoint.stores import (
    Store,
    check_exclusive,
    check_url,
    is_url,
    local_path,
    open_store,
    without_secrets,
)
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.mesh.groups import local_group
from tests.checkpoint.tiny import NONCE, holds_step, save_cut

memory = pytest.importorskip("fsspec.implementations.memory")
local = pytest.importorskip("fsspec.implementations.local")


@pytest.fixture
def url() -> Iterator[str]:
    """A place in memory that no other test uses."""
    place = f"memory://{uuid.uuid4().hex}/run"
    yield place
    if memory.MemoryFileSystem().exists(place.rpartition("/")[0]):
        memory.MemoryFileSystem().rm(place.rpartition("/")[0], recursive=True)


def save_remote(
    store: Store, stage: Path, step: int, size: int = 2, *, replace: bool = False
) -> None:
    """Play all ranks of a save into a store, one after the other."""
    if not (stage / "attempts" / f"{step}-0-{NONCE}").exists():
        save_cut(stage, step, size)
    attempt = f"{step}-0-{NONCE}"
    for rank in range(size):
        upload_attempt(store, stage, attempt, rank)
    mirror = Mirror(store, stage / "finalizer")
    plan = CommitPlan(attempt, step, 0, size, {"iteration": step})
    manifest, sha256 = finalize_remote(mirror, plan, FileSystem())
    publish_remote(store, mirror.root, manifest, sha256, replace=replace)
    refresh_remote_views(store, step, attempt)


@pytest.fixture
def filled(url: str, tmp_path: Path) -> str:
    """Steps 1 and 2, each saved by two ranks."""
    for step in (1, 2):
        save_remote(open_store(url), tmp_path / "stage", step)
    return url


# ---- loading ---------------------------------------------------------------------------------
def test_a_checkpoint_in_a_store_is_the_one_that_was_saved(filled: str) -> None:
    assert holds_step(open_checkpoint(filled), 2)
    assert holds_step(open_checkpoint(filled, 1, verify="structure"), 1)
    loaded = load_newest(filled, local_group("world"), lambda c: holds_step(c, 2))
    assert loaded.value


@pytest.mark.parametrize("inner", ["attempts/1-0-" + NONCE, "iter_0000001", "iter_0000001/"])
def test_one_checkpoint_of_a_store_can_be_named(filled: str, inner: str) -> None:
    assert holds_step(open_checkpoint(f"{filled}/{inner}"), 1)
    with pytest.raises(NoCheckpoint, match="holds step 1, not step 2"):
        open_checkpoint(f"{filled}/{inner}", 2)


def test_another_store_is_the_same_to_us(tmp_path: Path) -> None:
    """fsspec's local file system instead of the one in memory."""
    store = Store(f"{tmp_path}/bucket/run", local.LocalFileSystem(auto_mkdir=True))
    save_remote(store, tmp_path / "stage", 3)
    mirror = Mirror(store, tmp_path / "reader")
    mirror.pointers()
    mirror.checkpoint(f"3-0-{NONCE}")
    found = find_checkpoint(f"memory://{tmp_path.name}", mirror=mirror, verify="structure")
    assert found.step == 3
    assert holds_step(open_checkpoint(tmp_path / "bucket" / "run"), 3)  # and as plain files


def test_nothing_in_the_store_is_told_with_its_url(url: str) -> None:
    with pytest.raises(NoCheckpoint, match=f"^{url}: holds no published checkpoint"):
        find_checkpoint(url)


def test_only_the_bytes_that_are_read_are_fetched(
    filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[tuple[int, int]] = []
    whole = Mirror.fetch

    def fetch(self: Mirror, path: Path, begin: int, end: int) -> None:
        fetched.append((begin, end))
        whole(self, path, begin, end)

    monkeypatch.setattr(Mirror, "fetch", fetch)
    checkpoint = open_checkpoint(filled, verify="structure")
    assert fetched == []
    checkpoint.read("optim/step")
    assert [end - begin for begin, end in fetched] == [8]


def test_the_mirror_goes_when_the_checkpoint_goes(filled: str, tmp_path: Path) -> None:
    mirror = Mirror(open_store(filled), tmp_path / "staging")
    found = find_checkpoint(filled, mirror=mirror)
    assert found.directory.is_dir() and found.directory.is_relative_to(tmp_path / "staging")
    assert oct(mirror.root.stat().st_mode)[-3:] == "700"
    del mirror, found
    assert list((tmp_path / "staging").iterdir()) == []


# ---- damage ----------------------------------------------------------------------------------
def damaged(data: bytes, kind: str, generator: random.Random) -> bytes:
    if kind == "flip":
        position = generator.randrange(len(data) * 8)
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        return bytes(changed)
    return {"short": data[:-1], "empty": b"", "long": data + b" "}[kind]


@pytest.mark.parametrize("kind", ["flip", "short", "empty", "long", "gone"])
def test_damage_in_a_store_is_passed_over_with_its_place(filled: str, kind: str) -> None:
    generator = random.Random(0)
    fs = memory.MemoryFileSystem()
    folder = filled.removeprefix("memory:/")
    names = [f"{folder}/published/2.json", *fs.ls(f"{folder}/attempts/2-0-{NONCE}", detail=False)]
    assert len(names) == 6
    for name in names:
        data = fs.cat_file(name)
        if kind == "gone":
            fs.rm_file(name)
        else:
            fs.pipe_file(name, damaged(data, kind, generator))
        found = find_checkpoint(filled)
        assert found.step == 1
        if not (kind == "gone" and "published" in name):
            assert filled in found.passed_over[0].reason, name
        loaded = load_newest(filled, local_group("world"), lambda c: holds_step(c, c.step))
        assert (loaded.checkpoint.step, loaded.value) == (1, True)
        fs.pipe_file(name, data)
    assert holds_step(open_checkpoint(filled), 2)


def test_a_header_that_claims_much_costs_nothing(filled: str) -> None:
    fs = memory.MemoryFileSystem()
    name = f"{filled.removeprefix('memory:/')}/attempts/2-0-{NONCE}/rank00000.safetensors"
    fs.pipe_file(name, (2**62).to_bytes(8, "little") + fs.cat_file(name)[8:])
    assert find_checkpoint(filled).step == 1


def test_names_that_do_not_belong_to_a_checkpoint_are_not_mirrored(filled: str) -> None:
    fs = memory.MemoryFileSystem()
    folder = filled.removeprefix("memory:/")
    fs.pipe_file(f"{folder}/published/..json", b"x")
    fs.pipe_file(f"{folder}/published/9/8.json", b"x")
    assert holds_step(open_checkpoint(filled), 2)


# ---- a store that fails ----------------------------------------------------------------------
class Flaky:
    """A file system of which one operation, or all from one on, fail: undone, or done and lost."""

    OPERATIONS = ("ls", "info", "cat_file", "put_file", "pipe_file", "rm_file", "modified")

    def __init__(
        self, inner: Any, fail_at: int | None = None, lost: bool = False, forever: bool = False
    ):
        self.count = 0
        self._inner, self._fail_at, self._lost, self._forever = inner, fail_at, lost, forever

    def __getattr__(self, name: str) -> Any:
        work = getattr(self._inner, name)
        return self._counted(work) if name in self.OPERATIONS else work

    def _counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            index, self.count = self.count, self.count + 1
            hit = self._fail_at is not None and (
                index >= self._fail_at if self._forever else index == self._fail_at
            )
            if hit and not self._lost:
                raise TimeoutError("the store does not answer")
            result = work(*args, **kwargs)
            if hit:
                raise TimeoutError("the answer was lost")
            return result

        return counted


def flaky_store(url: str, **faults: Any) -> tuple[Store, Flaky]:
    fs = Flaky(memory.MemoryFileSystem(), **faults)
    return Store(url, fs, sleep=lambda seconds: None), fs


def count_operations(tmp_path: Path) -> int:
    place = f"memory://{uuid.uuid4().hex}/run"
    store, fs = flaky_store(place)
    save_remote(store, tmp_path / "count", 2)
    return fs.count


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer-lost"])
def test_one_failure_at_any_operation_of_a_save_changes_nothing(
    url: str, tmp_path: Path, lost: bool
) -> None:
    """A put that was done though its answer was lost is ours: its content says so."""
    total = count_operations(tmp_path)
    assert total > 20
    for point in range(total):
        place = f"{url}/at{point}"
        store, _ = flaky_store(place, fail_at=point, lost=lost)
        save_remote(store, tmp_path / f"stage{point}", 2)
        assert holds_step(open_checkpoint(place), 2), point


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer-lost"])
def test_a_store_that_stops_answering_leaves_the_old_or_the_new_checkpoint(
    url: str, tmp_path: Path, lost: bool
) -> None:
    total = count_operations(tmp_path)
    steps = []
    for point in range(total):
        place = f"{url}/at{point}"
        save_remote(open_store(place), tmp_path / f"stage{point}", 1)
        store, _ = flaky_store(place, fail_at=point, lost=lost, forever=True)
        with pytest.raises(UserError, match=r"does not answer|answer was lost") as caught:
            save_remote(store, tmp_path / f"stage{point}", 2)
        assert not isinstance(caught.value, DamagedError)
        found = open_checkpoint(place)
        assert holds_step(found, found.step)
        steps.append(found.step)
    assert steps == sorted(steps) and set(steps) == {1, 2}  # one instant publishes


def test_a_store_that_does_not_answer_is_never_a_reason_to_load_an_older_step(filled: str) -> None:
    """Damage falls back; a network must not, at any operation of a load."""
    _, counter = flaky_store(filled)
    find_checkpoint(filled, mirror=Mirror(Store(filled, counter)))
    assert counter.count > 10
    for point in range(counter.count):
        store, _ = flaky_store(filled, fail_at=point, forever=True)
        with pytest.raises(UserError, match="does not answer") as caught:
            find_checkpoint(filled, mirror=Mirror(store))
        assert not isinstance(caught.value, DamagedError | NoCheckpoint)
        once, _ = flaky_store(filled, fail_at=point)
        assert find_checkpoint(filled, mirror=Mirror(once)).step == 2


def test_a_refusal_is_told_at_once(url: str) -> None:
    class Forbidden(Flaky):
        OPERATIONS = ()

        def ls(self, path: str, detail: bool = True) -> list[str]:
            self.count += 1
            raise PermissionError("Access Denied: https://host/x?X-Amz-Signature=SECRET")

    fs = Forbidden(memory.MemoryFileSystem())
    with pytest.raises(UserError, match=r"PermissionError: Access Denied") as caught:
        Store(url, fs).names("published")
    assert fs.count == 1
    assert "SECRET" not in str(caught.value)


# ---- two jobs --------------------------------------------------------------------------------
def test_row_35_of_two_jobs_one_publishes_and_the_other_is_told(
    filled: str, tmp_path: Path
) -> None:
    store = open_store(filled)
    fs = memory.MemoryFileSystem()
    name = f"{filled.removeprefix('memory:/')}/published/2.json"
    other = fs.cat_file(name).replace(NONCE.encode(), b"f" * 16)
    fs.pipe_file(name, other)
    with pytest.raises(UserError, match="step 2 is already published"):
        save_remote(store, tmp_path / "again", 2)
    assert fs.cat_file(name) == other
    save_remote(store, tmp_path / "replaced", 2, replace=True)
    assert holds_step(open_checkpoint(filled), 2)


def test_publishing_again_what_was_published_is_success(filled: str, tmp_path: Path) -> None:
    save_remote(open_store(filled), tmp_path / "again", 2)
    assert holds_step(open_checkpoint(filled), 2)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda fs, folder: fs.rm_file(f"{folder}/rank00001.receipt.json"),
        lambda fs, folder: fs.pipe_file(f"{folder}/rank00002.safetensors", b"x"),
        lambda fs, folder: fs.pipe_file(f"{folder}/anything", b"x"),
        lambda fs, folder: fs.pipe_file(f"{folder}/rank00001.safetensors", b"x"),
        lambda fs, folder: fs.cp_file(
            f"{folder}/rank00000.receipt.json", f"{folder}/rank00001.receipt.json"
        ),
    ],
)
def test_an_attempt_that_is_not_whole_in_the_store_is_not_published(
    url: str, tmp_path: Path, spoil: Callable[[Any, str], None]
) -> None:
    store = open_store(url)
    attempt = f"2-0-{NONCE}"
    save_cut(tmp_path, 2, 2)
    for rank in range(2):
        upload_attempt(store, tmp_path, attempt, rank)
    assert not list(attempt_directory(tmp_path, attempt).glob("rank*"))  # staging is given back
    spoil(memory.MemoryFileSystem(), f"{url.removeprefix('memory:/')}/attempts/{attempt}")
    plan = CommitPlan(attempt, 2, 0, 2, {"iteration": 2})
    with pytest.raises(DamagedError):
        finalize_remote(Mirror(store), plan, FileSystem())
    with pytest.raises(NoCheckpoint):
        find_checkpoint(url)


# ---- stores without create-if-absent ---------------------------------------------------------
def test_a_store_without_exclusive_creation_is_refused_unless_allowed(url: str) -> None:
    check_exclusive(open_store(url), "n")
    assert open_store(url).names("attempts") == []

    class Replaces(Flaky):
        OPERATIONS = ()

        def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
            del mode
            self._inner.pipe_file(path, data)

    store = Store(url, Replaces(memory.MemoryFileSystem()))
    with pytest.raises(UserError, match="an object was replaced") as caught:
        check_exclusive(store, "n")
    assert "--ckpt-allow-unsafe-publish" in str(caught.value)
    check_exclusive(store, "n", allow_unsafe=True)
    unknown = Store(url.replace("memory", "oss"), memory.MemoryFileSystem())
    with pytest.raises(UserError, match="oss:// is not known to have it"):
        check_exclusive(unknown, "n")


# ---- retention -------------------------------------------------------------------------------
def test_retention_in_a_store_keeps_the_newest_that_verify(url: str, tmp_path: Path) -> None:
    store = open_store(url)
    for step in range(1, 6):
        save_remote(store, tmp_path / "stage", step)
    fs = memory.MemoryFileSystem()
    folder = url.removeprefix("memory:/")
    fs.rm_file(f"{folder}/attempts/5-0-{NONCE}/rank00000.safetensors")
    retired = retire_remote(Mirror(store), 1, 2)
    assert (sorted(retired.steps), [item.step for item in retired.damaged]) == ([1, 3], [5])
    assert store.names("published") == ["2.json", "4.json", "5.json"]
    for step in range(1, 6):
        assert bool(store.names(f"attempts/{step}-0-{NONCE}")) == (step in (2, 4, 5))
        assert bool(store.names(f"iter_000000{step}")) == (step in (2, 4, 5))
    assert holds_step(open_checkpoint(url), 4)


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer-lost"])
def test_retention_that_is_cut_off_leaves_whole_checkpoints(
    url: str, tmp_path: Path, lost: bool
) -> None:
    for step in (1, 2):
        save_remote(open_store(url), tmp_path / "stage", step)
    failed = 0
    for point in range(30):
        store, _ = flaky_store(url, fail_at=point, lost=lost, forever=True)
        try:
            retire_remote(Mirror(store), 1, None)
        except UserError:
            failed += 1
        for name in open_store(url).names("published"):
            step = int(name.removesuffix(".json"))
            assert holds_step(open_checkpoint(url, step), step)
    assert failed > 10
    retire_remote(Mirror(open_store(url)), 1, None)
    assert open_store(url).names("published") == ["2.json"]


def test_only_old_attempts_that_no_pointer_names_are_swept(filled: str, tmp_path: Path) -> None:
    store, stage = open_store(filled), tmp_path / "more"
    save_cut(stage, 7, 1)
    upload_attempt(store, stage, f"7-0-{NONCE}", 0)
    time.sleep(0.01)
    save_remote(store, stage, 8)
    assert sweep_remote(Mirror(store), 8) == []
    assert sweep_remote(Mirror(store), 8, older_than=0.0) == [f"7-0-{NONCE}"]
    assert [holds_step(open_checkpoint(filled, s), s) for s in (1, 2, 8)] == [True] * 3


# ---- URLs ------------------------------------------------------------------------------------
def test_what_is_a_url() -> None:
    assert is_url("s3://bucket/run") and is_url("memory://x")
    assert not is_url("/data/run") and not is_url("runs/a:b") and not is_url("file:///data/run")
    assert local_path("file:///data/run") == Path("/data/run") == local_path("/data/run")


@pytest.mark.parametrize(
    "place", ["s3://KEY:SECRET@bucket/run", "https://host/run?sig=SECRET", "s3://SECRET@bucket"]
)
def test_row_52e_credentials_in_a_url_are_refused_and_not_repeated(place: str) -> None:
    for work in (check_url, find_checkpoint, open_store):
        with pytest.raises(UserError, match="credentials belong in the environment") as caught:
            work(place)
        assert "SECRET" not in str(caught.value)
    assert "SECRET" not in without_secrets(f"GET {place} failed")


@pytest.mark.parametrize("place", ["nosuch://bucket/run", "s3://bucket/run"])
def test_a_store_that_cannot_be_opened_is_one_message(place: str) -> None:
    try:
        import s3fs  # noqa: F401
    except ImportError:
        pass
    else:
        if place.startswith("s3"):
            pytest.skip("the client of s3:// is installed")
    with pytest.raises(UserError, match=place.partition(":")[0]):
        find_checkpoint(place)


def test_a_staging_directory_without_room_is_named(
    filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    mirror = Mirror(open_store(filled), tmp_path / "staging")
    checkpoint = open_checkpoint(filled, verify="structure")
    del checkpoint
    found = find_checkpoint(filled, verify="structure", mirror=mirror)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DamagedError, match="no space left"):
        mirror.fetch(found.directory / "rank00000.safetensors", 0, 8)


def test_a_staging_directory_that_cannot_be_made_is_told(filled: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        load_newest(
            filled, local_group("world"), lambda c: None, staging=str(tmp_path / "file" / "x")
        )


def test_the_inspecting_tool_takes_a_url(filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tools.inspect_checkpoint import main

    assert main([filled, "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["directory"] == f"{filled}/attempts/2-0-{NONCE}"
    assert report["step"] == 2
