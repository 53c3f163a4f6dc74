"""The index cache: complete or absent, one builder among many, damage repaired."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_lite.data import cache as cache_module
from megatron_lite.data.build import Datasets, build_datasets
from megatron_lite.data.cache import IndexCache
from megatron_lite.data.gpt_dataset import order_hash
from megatron_lite.errors import DamagedError
from tests.data_pipeline.corpora import Settings, write_dataset

NAMES = ("a", "b")
SLOW_WRITE_S = 0.3


def silent(_: str) -> None:
    pass


def arrays() -> dict[str, NDArray[Any]]:
    return {"a": np.arange(5), "b": np.arange(6).reshape(3, 2)}


def counting(calls: list[int]) -> Callable[[], dict[str, NDArray[Any]]]:
    def build() -> dict[str, NDArray[Any]]:
        calls.append(1)
        return arrays()

    return build


def build_small(root: Path, prefix: str, **changes: Any) -> Datasets:
    settings = Settings(data_path=(prefix,), data_cache_path=str(root), **changes)
    return build_datasets(
        settings, train_samples=20, valid_samples=0, test_samples=0, vocab_size=256, eod=None
    )


def test_second_use_loads_what_the_first_built(tmp_path: Path) -> None:
    calls: list[int] = []
    for _ in range(2):
        found = IndexCache(tmp_path, silent).get({"key": 1}, NAMES, counting(calls))
        assert found["b"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert len(calls) == 1
    IndexCache(tmp_path, silent).get({"key": 2}, NAMES, counting(calls))
    assert len(calls) == 2


@pytest.mark.parametrize(
    "damage", ["truncate", "remove", "garbage", "zeros", "flip", "shorter", "type", "file"]
)
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    calls: list[int] = []
    said: list[str] = []
    cache = IndexCache(tmp_path, said.append)
    cache.get({}, NAMES, counting(calls))
    path = next(tmp_path.glob("*/b.npy"))
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "remove":
        path.unlink()
    elif damage == "file":
        shutil.rmtree(path.parent)
        path.parent.write_text("not a folder")
    elif damage == "garbage":
        path.write_bytes(b"nonsense")
    else:
        # Still a good .npy file, whose samples would be wrong without a word.
        whole = np.load(path)
        changes = {
            "zeros": np.zeros_like(whole),
            "flip": whole ^ (whole == 3),
            "shorter": whole[:-1],
            "type": whole.astype(np.int32),
        }
        np.save(path, changes[damage])
    assert cache.get({}, NAMES, counting(calls))["b"].tolist() == arrays()["b"].tolist()
    assert len(calls) == 2 and "damaged" in said[0]


def test_leftovers_of_a_killed_builder_are_removed(tmp_path: Path) -> None:
    key = cache_module.cache_key({})
    (tmp_path / f"{key}.tmp-host-1").mkdir()
    IndexCache(tmp_path, silent).get({}, NAMES, arrays)
    assert not list(tmp_path.glob("*.tmp-*"))


def test_an_unwritable_folder_is_told_and_built_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache_module, "_publish", refuse)
    said: list[str] = []
    assert IndexCache(tmp_path, said.append).get({}, NAMES, arrays)["a"].tolist() == [0, 1, 2, 3, 4]
    assert "--data-cache-path" in said[0]


def test_no_space_left_has_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module, "_publish", refuse)
    with pytest.raises(DamagedError, match="no space left"):
        IndexCache(tmp_path, silent).get({}, NAMES, arrays)


def test_without_file_locks_the_first_to_publish_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache_module.fcntl, "flock", no_locks)
    facts = {"key": 1}

    def build_while_another_publishes() -> dict[str, NDArray[Any]]:
        cache_module._publish(tmp_path / cache_module.cache_key(facts), facts, arrays())
        return arrays()

    found = IndexCache(tmp_path, silent).get(facts, NAMES, build_while_another_publishes)
    assert found["a"].tolist() == [0, 1, 2, 3, 4]
    assert not list(tmp_path.glob("*.tmp-*"))


def build_slowly(root: Path, prefix: str, results: Any, barrier: Any) -> None:
    """One rank: its writes stall between creating and completing a file."""
    save = np.save

    def slow_save(file: Any, array: Any) -> None:
        file.write(b"partial")
        file.flush()
        time.sleep(SLOW_WRITE_S)
        file.seek(0)
        save(file, array)

    cache_module.np.save = slow_save  # type: ignore[assignment]
    barrier.wait()
    try:
        train = build_small(root, prefix).train
        assert train is not None
        results.put(order_hash(train))
    except BaseException as error:
        results.put(repr(error))


def test_c019_racing_ranks_never_see_half_an_entry(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[i % 250] * (i % 9 + 1) for i in range(60)])
    context = get_context("fork")
    for attempt in range(2):
        results, barrier = context.Queue(), context.Barrier(4)
        root = tmp_path / f"cache{attempt}"
        ranks = [
            context.Process(target=build_slowly, args=(root, prefix, results, barrier))
            for _ in range(4)
        ]
        for rank in ranks:
            rank.start()
        hashes = {results.get(timeout=60) for _ in ranks}
        for rank in ranks:
            rank.join()
        assert len(hashes) == 1 and len(hashes.pop()) == 64
        assert len([path for path in root.iterdir() if path.is_dir()]) == 1


def test_c019_threads_of_one_process_share_one_build(tmp_path: Path) -> None:
    calls: list[int] = []

    def slow() -> dict[str, NDArray[Any]]:
        time.sleep(0.1)
        calls.append(os.getpid())
        return arrays()

    threads = [
        threading.Thread(target=lambda: IndexCache(tmp_path, silent).get({}, NAMES, slow))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_c018_nodes_with_their_own_copies_agree_and_others_differ(tmp_path: Path) -> None:
    corpus = [[i % 250, i // 250, 7] * (i % 5 + 1) for i in range(50)]
    built = []
    for node in range(2):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        prefix = write_dataset(folder / "x", corpus)
        built.append(build_small(folder / "cache", prefix))
    other = write_dataset(tmp_path / "y", [[8, *document[1:]] for document in corpus])
    different = build_small(tmp_path / "cache", other)
    for datasets in (*built, different):
        assert datasets.train is not None
    first, second, third = (order_hash(d.train) for d in (*built, different) if d.train)
    assert first == second != third
    assert built[0].fingerprint() == built[1].fingerprint() != different.fingerprint()


def test_a_replaced_corpus_at_the_same_path_is_not_served_stale(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[1] * 50, [2] * 50])
    before = build_small(tmp_path / "cache", prefix).train
    write_dataset(prefix, [[3] * 9] * 20)
    after = build_small(tmp_path / "cache", prefix).train
    assert before is not None and after is not None
    assert set(after[0].tokens.tolist()) == {3}
    assert len(after) == (20 * 9 - 1) // 4 != len(before)


def test_default_cache_lies_beside_the_data(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[1] * 100])
    settings = Settings(data_path=(prefix,))
    build_datasets(
        settings, train_samples=4, valid_samples=0, test_samples=0, vocab_size=256, eod=None
    )
    entries = list((tmp_path / "cache" / "GPTDataset_indices").glob("*/shuffle_index.npy"))
    assert len(entries) == 1


@pytest.mark.parametrize("place", ["file", "below a file", "lock is a folder"])
def test_a_cache_that_cannot_be_used_is_told_and_done_without(tmp_path: Path, place: str) -> None:
    said: list[str] = []
    root = tmp_path / "cache"
    if place == "lock is a folder":
        (root / f"{cache_module.cache_key({})}.lock").mkdir(parents=True)
    else:
        root.write_text("in the way")
        root = root / "sub" if place == "below a file" else root
    found = IndexCache(root, said.append).get({}, NAMES, arrays)
    assert found["a"].tolist() == [0, 1, 2, 3, 4]
    assert len(said) == 1 and "cannot be used" in said[0] and "--data-cache-path" in said[0]


def test_a_large_array_is_checked_in_blocks_from_end_to_end() -> None:
    array = np.zeros(cache_module.CHECKED_BLOCKS * cache_module.CHECKED_BLOCK_BYTES + 4096, "u1")
    before = cache_module._describe(array)
    for place in (0, len(array) - 1):
        array[place] = 1
        assert cache_module._describe(array) != before
        array[place] = 0
