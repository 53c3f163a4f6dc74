"""Saves that are killed, delayed or replaced (CKPT, ASYNC), in processes of the program."""

import json
import threading
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint import find_checkpoint, open_checkpoint
from megatron_lite.checkpoint.catalog import published_steps
from tests.cases.layouts import LAYOUTS
from tests.cases.ranks import program
from tests.checkpoint.faulty import Fault, encode
from tests.pool import RankExit, fork_ranks
from tests.train.faults import faulty_program
from tests.train.program import LLAMA, RUN

MODES = {"sync": (), "async": ("--async-save",)}
IN_MODES = pytest.mark.parametrize("mode", MODES)
# Where all processes are killed in saving step 10; rank 1 is the later of two.
POINTS = {
    "before the shards": ("create", "10-1-", 1),
    "in the middle of a shard": ("write", "10-1-.*/rank00001.safetensors", 4),
    "after the shards": ("create", r"10-1-.*/\.manifest\.json", 1),
    "before the commit mark": ("link", "published/10.json", 1),
}


def argv_of(save: Path, mode: str, *more: str) -> list[str]:
    argv = [*LLAMA, *RUN, "--eval-iters", "0", "--save", str(save), "--load", str(save)]
    return [*argv, "--save-interval", "5", *MODES[mode], *more]


def run(layout: str, argv: list[str], faults: list[Fault] | None = None) -> list[RankExit]:
    place = LAYOUTS[layout]
    argv = [*argv, *place.flags]
    if faults is None:
        return fork_ranks(place.ranks, program, argv)
    return fork_ranks(place.ranks, faulty_program, argv, encode(faults))


def assert_same_checkpoints(first: Path, second: Path, step: int) -> None:
    """Every tensor, counter and schedule, bit for bit."""
    one, two = (open_checkpoint(root, step) for root in (first, second))
    assert one.names == two.names
    for name in one.names:
        assert torch.equal(one.read(name), two.read(name)), name
    for part in ("counters", "schedule"):
        assert one.state[part] == two.state[part]


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps without interruption, saved in the foreground at 5 and 10."""
    save: Path = tmp_path_factory.mktemp("control") / "save"
    assert {found.code for found in run("dp2", argv_of(save, "sync"))} == {0}
    return save


@IN_MODES
@pytest.mark.parametrize("point", POINTS)
def test_c080_an_interrupted_save_is_never_the_newest(
    control: Path, tmp_path: Path, mode: str, point: str
) -> None:
    save, pids = tmp_path / "save", tmp_path / "pids"
    pids.mkdir()
    operation, place, nth = POINTS[point]
    exits = run("dp2", argv_of(save, mode), [Fault(operation, place, nth, kill_all=str(pids))])
    assert {found.code for found in exits} == {-9}, exits
    assert published_steps(save) == [5]
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "5"
    (left,) = (save / "attempts").glob("10-*[0-9a-f]")
    exits = run("dp2", argv_of(save, mode))
    printed = "".join(found.stdout for found in exits)
    assert {found.code for found in exits} == {0}, exits
    assert "at iteration 5" in printed
    assert f"attempt {left.name} to save step 10 is incomplete" in printed
    assert published_steps(save) == [10, 5]
    assert not left.exists(), "the left-over is replaced"
    assert_same_checkpoints(control, save, 10)


def test_c081_row_33_training_goes_on_without_changing_what_is_saved(
    control: Path, tmp_path: Path
) -> None:
    """The writers begin with step 5 only when step 9 is done."""
    save, metrics = tmp_path / "save", tmp_path / "metrics.jsonl"
    late = Fault("create", "5-1-", wait_for=(str(metrics), '"iteration": 9,'))
    exits = run("dp2", argv_of(save, "async", "--metrics-jsonl", str(metrics)), [late])
    assert {found.code for found in exits} == {0}, exits
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    order = [(row["kind"], row["iteration"]) for row in rows if row["kind"] != "header"]
    assert order.index(("train", 9)) < order.index(("event", 5)), "published after step 9"
    for step in (5, 10):
        assert_same_checkpoints(control, save, step)


def test_c083_at_every_moment_one_complete_checkpoint_exists(tmp_path: Path) -> None:
    save, metrics = tmp_path / "save", tmp_path / "metrics.jsonl"
    seen: list[int] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            # Looked at again if what was chosen is retired between choosing and opening.
            for _ in range(100):
                try:
                    seen.append(find_checkpoint(save, verify="structure").step)
                    break
                except Exception as error:
                    last = error
            else:
                if seen:
                    raise last
            stop.wait(0.005)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        late = Fault("create", "-1-", wait_for=(str(metrics), '"iteration": 3,'))
        argv = argv_of(save, "async", "--metrics-jsonl", str(metrics))
        argv += ["--save-interval", "2", "--keep-last", "1"]
        exits = run("dp2", argv, [late])
    finally:
        stop.set()
        watcher.join()
    assert {found.code for found in exits} == {0}, exits
    assert seen == sorted(seen) and seen[-1] == 10
    assert published_steps(save) == [10]


@IN_MODES
@pytest.mark.parametrize("operation", ["unlink", "rmdir"])
def test_c083_killed_around_the_removal_of_the_old_one_the_new_one_loads(
    control: Path, tmp_path: Path, mode: str, operation: str
) -> None:
    save, pids = tmp_path / "save", tmp_path / "pids"
    pids.mkdir()
    place = {"unlink": "published/5.json", "rmdir": "attempts/5-1-"}[operation]
    fault = Fault(operation, place, 1, kill_all=str(pids))
    exits = run("dp2", argv_of(save, mode, "--keep-last", "1"), [fault])
    assert -9 in {found.code for found in exits}
    assert find_checkpoint(save).step == 10
    assert_same_checkpoints(control, save, 10)
