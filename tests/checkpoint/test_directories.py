"""Directories that cannot hold checkpoints: one clear message each, and nothing is lost.

The program runs as real processes, each in a mount namespace of its own where it has a
small, read-only or private file system under the name of the save directory. Where no
namespace can be made (no root, a strict container) those are skipped; the same faults are
also injected, or made by a limit that every system has.
"""

import errno
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from megatron_lite.checkpoint import find_checkpoint, open_checkpoint
from megatron_lite.checkpoint.catalog import published_steps
from megatron_lite.checkpoint.files import FileSystem, OpenFile
from megatron_lite.checkpoint.save import check_writable
from megatron_lite.checkpoint.shared import check_shared
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.mesh.groups import local_group, world_group
from tests.checkpoint.tiny import holds_step, save_tiny
from tests.pool import REPOSITORY, RankPool
from tests.train.program import LLAMA, RUN

PROGRAM = [*LLAMA, *RUN, "--train-iters", "6", "--save-interval", "1", "--eval-iters", "0"]


@cache
def can_mount() -> bool:
    """Whether this process may make a mount namespace and mount in it."""
    try:
        command = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


needs_mounts = pytest.mark.skipif(not can_mount(), reason="no mount namespaces here")


@dataclass(frozen=True)
class Ended:
    """How one process has ended."""

    code: int
    stdout: str
    stderr: str


def run_mounted(
    setup: str, save: Path, *words: str, ranks: int = 1, after: str = ""
) -> list[Ended]:
    """Run the program on ranks that each see their own `setup` of mounts.

    Args:
        setup: shell commands; $SAVE is the save directory.
        after: shell commands once the program has ended, before the mounts go.
    """
    save.mkdir(exist_ok=True)
    argv = shlex.join([sys.executable, str(REPOSITORY / "pretrain.py"), *PROGRAM, *words])
    script = f"set -e\n{setup}\nset +e\n{argv} --save $SAVE\ncode=$?\n{after}\nexit $code\n"
    processes = []
    for rank in range(ranks):
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "SAVE": str(save)}
        if ranks > 1:
            environ |= {
                **{"RANK": str(rank), "WORLD_SIZE": str(ranks)},
                **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
                "MLITE_RENDEZVOUS": f"file://{save.parent}/meet",
            }
        processes.append(
            subprocess.Popen(
                ["unshare", "-m", "sh", "-c", script],
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = []
    for process in processes:
        stdout, stderr = process.communicate(timeout=90)
        ended.append(Ended(process.returncode, stdout, stderr))
    return ended


def one_message(ended: Sequence[Ended], text: str) -> str:
    """Return the line of the message, told by one rank only and without a traceback."""
    told = "".join(each.stderr for each in ended)
    assert "Traceback" not in told, told
    lines = [line for line in told.splitlines() if text in line]
    assert len(lines) == 1, told
    return lines[0]


# ---- full ------------------------------------------------------------------------------------
@needs_mounts
@pytest.mark.parametrize("mode", [(), ("--async-save",)], ids=["sync", "async"])
def test_row_31_32_c7_a_full_disk_ends_the_run_and_keeps_what_is_saved(
    tmp_path: Path, mode: tuple[str, ...]
) -> None:
    """Room for some saves of this model, not for six; the files are looked at afterwards."""
    save, kept = tmp_path / "save", tmp_path / "kept"
    (ended,) = run_mounted(
        "mount -t tmpfs -o size=1m tmpfs $SAVE", save, *mode, after=f"cp -a $SAVE {kept}"
    )
    assert ended.code == 3, ended.stderr
    assert "bytes free" in one_message([ended], "no space left writing")
    steps = published_steps(kept)
    assert 1 <= len(steps) < 6
    found = open_checkpoint(kept)
    assert found.step == max(steps)
    assert found.found.passed_over == ()
    found.read_many([(name, None, None) for name in found.names])


def test_row_31_c7_a_file_that_may_not_grow_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """The same without any mount: a limit on the size of files."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))

    save = tmp_path / "save"
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "pretrain.py"), *PROGRAM, "--save", str(save)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        preexec_fn=limit,
    )
    assert done.returncode == 3, done.stderr
    line = one_message([Ended(done.returncode, done.stdout, done.stderr)], "File too large")
    assert "rank00000.safetensors" in line
    assert published_steps(save) == []
    assert not list((save / "attempts").glob("*/*.safetensors"))


class FullDisk(FileSystem):
    """A disk that is full from the k-th write on."""

    def __init__(self, writes: int):
        super().__init__(self._count)
        self._left = writes

    def _count(self, operation: str, path: Path) -> None:
        if operation in ("write", "create", "mkdir"):
            self._left -= 1
            if self._left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_row_31_c7_a_disk_that_is_full_at_any_write_loses_nothing(tmp_path: Path) -> None:
    """Each write of a save in turn, and every later one, finds no space."""
    outcomes = []
    for writes in range(40):
        root = tmp_path / f"at{writes}"
        save_tiny(root, 1)
        try:
            save_tiny(root, 2, files=FullDisk(writes), keep_last=1)
        except (DamagedError, OSError) as error:
            assert "o space left" in str(error), writes
        found = open_checkpoint(root)
        assert holds_step(found, found.step), writes
        outcomes.append(found.step)
        save_tiny(root, 3)  # room again: the next save succeeds
        assert holds_step(open_checkpoint(root), 3), writes
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, 2}


# ---- read-only -------------------------------------------------------------------------------
@needs_mounts
def test_c7_a_read_only_directory_is_refused_before_the_first_step(tmp_path: Path) -> None:
    setup = "mount --bind $SAVE $SAVE && mount -o remount,ro,bind $SAVE"
    (ended,) = run_mounted(setup, tmp_path / "save")
    assert ended.code == 2, ended.stderr
    one_message([ended], "Read-only file system")
    assert "iteration        1/" not in ended.stdout


@needs_mounts
def test_c7_a_read_only_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    """Loading writes nothing that it needs."""
    (first,) = run_mounted(":", tmp_path / "old")
    assert first.code == 0, first.stderr
    old = tmp_path / "old"
    setup = f"mount --bind {old} {old} && mount -o remount,ro,bind {old}"
    words = (
        "--load",
        str(tmp_path / "old"),
        "--train-iters",
        "7",
        "--override-opt_param-scheduler",
    )
    (ended,) = run_mounted(setup, tmp_path / "new", *words)
    assert ended.code == 0, ended.stderr
    assert published_steps(tmp_path / "new") == [7]


class ReadOnlyDisk(FileSystem):
    """A file system mounted read-only."""

    def __init__(self) -> None:
        super().__init__(self._refuse)

    def _refuse(self, operation: str, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def test_c7_a_read_only_disk_is_the_users_to_set_right(tmp_path: Path) -> None:
    save_tiny(tmp_path, 1)
    for work in (
        lambda: check_writable(tmp_path, local_group("world"), ReadOnlyDisk()),
        lambda: save_tiny(tmp_path, 2, files=ReadOnlyDisk()),
    ):
        with pytest.raises(UserError, match="Read-only file system") as caught:
            work()
        assert caught.value.exit_code == 2
    assert holds_step(open_checkpoint(tmp_path), 1)


# ---- local to a node -------------------------------------------------------------------------
@needs_mounts
def test_c084_a_directory_of_one_node_is_refused_at_start(tmp_path: Path) -> None:
    """Two ranks as two nodes: the same path, a disk of their own under it."""
    ended = run_mounted(
        "mount -t tmpfs -o size=8m tmpfs $SAVE",
        tmp_path / "save",
        ranks=2,
        after="find $SAVE -name '*.safetensors'",
    )
    assert [each.code for each in ended] == [2, 2], ended
    one_message(ended, "save directory is not shared: rank 1 does not see")
    for each in ended:
        assert "iteration        1/" not in each.stdout
        assert ".safetensors" not in each.stdout  # no half checkpoint


def test_c084_every_rank_is_told_that_the_directory_is_not_shared(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """The same in one file system: each rank looks into another directory."""
    messages = rank_pool.run(2, look_into_own_directory, root=str(tmp_path))
    assert messages[0] == messages[1]
    assert "save directory is not shared: rank 1 does not see" in messages[0]
    assert rank_pool.run(2, look_into_own_directory, root=str(tmp_path), same=True)[1] == "shared"
    assert not list(tmp_path.rglob(".shared*"))


def look_into_own_directory(root: str, rank: int, world_size: int, same: bool = False) -> str:
    """What a rank is told of its directory."""
    place = Path(root) / ("all" if same else f"node{rank}")
    place.mkdir(exist_ok=True)
    try:
        check_shared(place, world_group(rank, world_size))
    except UserError as error:
        return str(error)
    return "shared"


# ---- without hard links ----------------------------------------------------------------------
class Linkless(FileSystem):
    """A file system that refuses hard and symbolic links."""

    def __init__(self, number: int):
        super().__init__()
        self._number = number

    def link(self, source: Path, target: Path) -> None:
        raise OSError(self._number, os.strerror(self._number), str(target))

    def symlink(self, text: str, path: Path) -> None:
        raise OSError(self._number, os.strerror(self._number), str(path))


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_c7_a_directory_that_refuses_links_holds_checkpoints_all_the_same(
    tmp_path: Path, number: int
) -> None:
    """Creation is exclusive there, too: of two saves of one step the second is told."""
    files = Linkless(number)
    for step in (1, 2, 3):
        save_tiny(tmp_path, step, files=files, keep_last=2)
    assert published_steps(tmp_path) == [3, 2]
    assert holds_step(open_checkpoint(tmp_path), 3)
    assert holds_step(open_checkpoint(tmp_path / "iter_0000002"), 2)
    with pytest.raises(UserError, match="already published"):
        save_tiny(tmp_path, 3, files=files)
    assert find_checkpoint(tmp_path).step == 3


def test_an_injected_disk_counts_what_it_refuses(tmp_path: Path) -> None:
    """The fault of the tests above is one: a save needs these operations."""
    with pytest.raises((DamagedError, OSError), match="o space left"):
        save_tiny(tmp_path, 1, files=FullDisk(3))
    assert isinstance(FullDisk(9).create(tmp_path / "file"), OpenFile)
