"""Safe loading and saving (CKPT): nothing is passed over, nothing starts from zero unseen."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint import StateEntry, open_checkpoint, save_checkpoint
from megatron_lite.mesh.groups import local_group
from tests.cases.layouts import LAYOUTS
from tests.cases.ranks import program
from tests.pool import RankExit, RankPool, fork_ranks
from tests.train.program import LLAMA, RUN, rows, train_rank

ARGV = [*LLAMA, *RUN, "--train-iters", "2", "--eval-iters", "0"]
NORM = "decoder.final_layernorm.weight"
MOMENT = f"optim/exp_avg/{NORM}"


def rename(tensors: dict[str, Tensor]) -> None:
    tensors["decoder.final_norm.weight"] = tensors.pop(NORM)


def remove(tensors: dict[str, Tensor]) -> None:
    del tensors[MOMENT]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["optim/exp_avg_max/added"] = torch.zeros(3)


CHANGES: dict[str, tuple[list[Callable[[dict[str, Tensor]], None]], list[str], list[str]]] = {
    "renamed": ([rename], [f"missing: {NORM} ", "unexpected: decoder.final_norm.weight "],
                ["missing", "unexpected"]),
    "removed": ([remove], [f"missing: {MOMENT} "], ["missing"]),
    "added": ([add], ["unexpected: optim/exp_avg_max/added "], ["unexpected"]),
    "all": ([rename, remove, add], [f"missing: {NORM} ", f"missing: {MOMENT} ",
            "unexpected: decoder.final_norm.weight ", "unexpected: optim/exp_avg_max/added "],
            ["missing", "unexpected"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("saved")
    save = ["--save", str(root), "--save-interval", "1", "--exit-interval", "1"]
    rank_pool.run(2, train_rank, argv=[*ARGV, *save, *LAYOUTS["tp2"].flags])
    return root


def changed(saved: Path, target: Path, name: str) -> Path:
    """A complete checkpoint that verifies, with other tensors than a run expects."""
    checkpoint = open_checkpoint(saved)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names}
    for change in CHANGES[name][0]:
        change(tensors)
    entries = [
        StateEntry(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), True)
        for name, tensor in tensors.items()
    ]
    save_checkpoint(target, checkpoint.step, entries, checkpoint.state, local_group("world"))
    return target


def load(directory: Path, layout: str, *more: str) -> list[RankExit]:
    argv = [*ARGV, *LAYOUTS[layout].flags, "--load", str(directory), *more]
    return fork_ranks(LAYOUTS[layout].ranks, program, argv)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("renamed", "1"), ("removed", "tp2"), ("added", "dp2"), ("all", "tp2-sp-dp2")],
)
def test_c085_a_load_lists_all_missing_and_unexpected_names_and_fails(
    saved: Path, tmp_path: Path, name: str, layout: str
) -> None:
    exits = load(changed(saved, tmp_path, name), layout)
    assert {found.code for found in exits} == {2}, exits
    told = "".join(found.stderr for found in exits)
    assert "Traceback" not in told
    for line in CHANGES[name][1]:
        assert told.count(line) == 1, line
    assert "--ckpt-allow" in told
    assert not any("iteration        2/" in found.stdout for found in exits)


@pytest.mark.parametrize("name", CHANGES)
def test_c085_only_the_kinds_that_are_allowed_are_accepted(
    saved: Path, tmp_path: Path, name: str
) -> None:
    directory, kinds = changed(saved, tmp_path, name), CHANGES[name][2]
    (allowed,) = load(directory, "1", "--ckpt-allow", *kinds)
    assert allowed.code == 0, allowed.stderr
    assert "iteration        2/" in allowed.stdout
    other = {"missing": "unexpected", "unexpected": "missing"}[kinds[0]]
    (refused,) = load(directory, "1", "--ckpt-allow", other, "dtype", "shape")
    assert refused.code == 2


# C082: with a complete iteration in the directory, in an empty or missing one, among another
# run's checkpoints.


def start(root: Path, *more: str) -> RankExit:
    """One process that would train two steps."""
    (found,) = fork_ranks(1, program, [*ARGV, *more, "--metrics-jsonl", str(root / "metrics")])
    return found


def trained(root: Path) -> list[int]:
    path = root / "metrics"
    return [row["iteration"] for row in rows(path)] if path.exists() else []


def test_c082_a_complete_checkpoint_is_found_without_tracker_and_views(
    saved: Path, tmp_path: Path
) -> None:
    place = tmp_path / "save"
    shutil.copytree(saved, place, symlinks=True)
    (place / "latest_checkpointed_iteration.txt").unlink()
    (place / "iter_0000001").unlink()
    found = start(tmp_path, "--load", str(place))
    assert (found.code, trained(tmp_path)) == (0, [2]), found.stderr


def test_c082_a_checkpoint_whose_pointer_is_gone_is_no_fresh_start(
    saved: Path, tmp_path: Path
) -> None:
    place = tmp_path / "save"
    shutil.copytree(saved, place, symlinks=True)
    shutil.rmtree(place / "published")
    found = start(tmp_path, "--load", str(place))
    assert found.code in (2, 3) and trained(tmp_path) == []
    assert str(place) in found.stderr and "Traceback" not in found.stderr


@pytest.mark.parametrize("exists", [True, False], ids=["empty", "missing"])
def test_c082_a_directory_without_a_checkpoint_needs_the_explicit_flag(
    tmp_path: Path, exists: bool
) -> None:
    place = tmp_path / "there"
    if exists:
        place.mkdir()
    refused = start(tmp_path, "--load", str(place))
    assert (refused.code, trained(tmp_path)) == (2, [])
    assert str(place) in refused.stderr and "--allow-missing-checkpoint" in refused.stderr
    strict = start(tmp_path, "--load", str(place), "--exit-on-missing-checkpoint")
    assert (strict.code, trained(tmp_path)) == (2, [])
    allowed = start(tmp_path, "--load", str(place), "--allow-missing-checkpoint")
    assert (allowed.code, trained(tmp_path)) == (0, [1, 2])
    assert "starting from initial weights" in allowed.stdout


def test_c082_the_first_start_of_a_run_that_restarts_itself_says_that_it_is_one(
    tmp_path: Path,
) -> None:
    place = str(tmp_path / "save")
    words = ("--save", place, "--load", place, "--save-interval", "1")
    first = start(tmp_path, *words)
    assert (first.code, trained(tmp_path)) == (0, [1, 2])
    assert f"--load {place} is empty: this is a fresh start" in first.stdout
    strict = start(tmp_path, *("--save", f"{place}2", "--load", f"{place}2"),
                   "--save-interval", "1", "--exit-on-missing-checkpoint")  # fmt: skip
    assert strict.code == 2


def test_c082_a_save_directory_with_checkpoints_is_not_written_over(
    saved: Path, tmp_path: Path
) -> None:
    place = tmp_path / "save"
    shutil.copytree(saved, place, symlinks=True)
    before = sorted(path.name for path in (place / "attempts").iterdir())
    refused = start(tmp_path, "--save", str(place), "--save-interval", "1")
    assert (refused.code, trained(tmp_path)) == (2, [])
    assert "--overwrite-save" in refused.stderr and "--load" in refused.stderr
    assert before == sorted(path.name for path in (place / "attempts").iterdir())
    assert open_checkpoint(place).step == 1


# C084: two nodes with disks of their own under one name.


def program_on_its_own_disk(argv: Sequence[str], disks: Sequence[str]) -> int:
    """The main program in a directory that only this rank has."""
    os.chdir(disks[int(os.environ["RANK"])])
    return program(argv)


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp-dp2"])
def test_c084_a_save_directory_that_is_not_shared_is_told_before_the_first_step(
    tmp_path: Path, layout: str
) -> None:
    disks = [tmp_path / f"node{rank}" for rank in range(LAYOUTS[layout].ranks)]
    for disk in disks:
        disk.mkdir()
    argv = [*ARGV, *LAYOUTS[layout].flags, "--save", "save", "--save-interval", "1"]
    exits = fork_ranks(len(disks), program_on_its_own_disk, argv, [str(disk) for disk in disks])
    assert {found.code for found in exits} == {2}, exits
    told = "".join(found.stderr for found in exits)
    assert told.count("save directory is not shared: rank 1 does not see") == 1
    assert "Traceback" not in told
    assert not any("iteration        1/" in found.stdout for found in exits)
    assert list(tmp_path.rglob("*.safetensors")) == list(tmp_path.rglob("published")) == []


def test_c084_a_shared_directory_is_accepted_and_the_marker_is_gone(tmp_path: Path) -> None:
    argv = [*ARGV, "--save", str(tmp_path), "--save-interval", "1"]
    exits = fork_ranks(2, program, argv)
    assert {found.code for found in exits} == {0}, exits
    assert list(tmp_path.rglob(".shared-*")) == list(tmp_path.rglob(".probe-*")) == []
