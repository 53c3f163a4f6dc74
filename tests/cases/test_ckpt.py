"""Strict loading (CKPT): renamed, missing and added tensors are told, never passed over."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint import StateEntry, open_checkpoint, save_checkpoint
from megatron_lite.mesh.groups import local_group
from tests.cases.layouts import LAYOUTS
from tests.cases.ranks import program
from tests.pool import RankExit, RankPool, fork_ranks
from tests.train.program import LLAMA, RUN, train_rank

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
