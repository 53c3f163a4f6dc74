"""The whole program saving to a store and resuming from it, in the foreground and behind.

The store is `local://`, a directory behind fsspec, because the writer and finalizer
processes must see it, too; it has no create-if-absent, which the program is told to accept.
"""

import os
from pathlib import Path

import pytest

from megatron_lite.checkpoint import logical_hash, open_checkpoint
from megatron_lite.checkpoint.catalog import published_steps
from tests.pool import RankExit, run_ranks
from tests.train.program import LLAMA, RUN

pytest.importorskip("fsspec")
PROGRAM = [*LLAMA, *RUN, "--eval-iters", "0", "--lr-decay-iters", "8", "--lr-warmup-iters", "0"]
PROGRAM += ["--override-opt_param-scheduler"]
UNSAFE = "--ckpt-allow-unsafe-publish"


def run(ranks: int, save: str, steps: int, *words: str, env: dict[str, str]) -> list[RankExit]:
    argv = [*PROGRAM, "--train-iters", str(steps), "--save", save, "--load", save]
    return run_ranks(ranks, [*argv, "--save-interval", "2", *words], env=env)


@pytest.mark.parametrize("mode", [(), ("--async-save",)], ids=["sync", "async"])
def test_a_run_saves_to_a_store_and_resumes_from_it_in_another_layout(
    tmp_path: Path, mode: tuple[str, ...]
) -> None:
    bucket, stage = tmp_path / "bucket" / "run", tmp_path / "stage"
    secret = {"AWS_SECRET_ACCESS_KEY": "TOPSECRET", "FSSPEC_LOCAL_TOKEN": "TOPSECRET"}
    url, words = f"local://{bucket}", (UNSAFE, "--ckpt-staging-dir", str(stage), *mode)
    first = run(2, url, 4, *words, "--keep-last", "1", env=secret)
    assert [each.code for each in first] == [0, 0], first
    assert (
        "successfully saved checkpoint from iteration       4" in first[0].stdout + first[1].stdout
    )
    assert published_steps(bucket) == [4]  # retention
    assert list(stage.iterdir()) == []  # staging is given back
    (second,) = run(1, url, 6, *words, env=secret)
    assert second.code == 0, second.stderr
    assert f"successfully loaded checkpoint from {url} at iteration 4" in second.stdout
    assert open_checkpoint(url).step == 6
    assert logical_hash(open_checkpoint(url)) == logical_hash(open_checkpoint(bucket))
    assert (bucket / "latest_checkpointed_iteration.txt").read_text() == "6\n"
    # Row 52e: no credential of the environment in any file or line.
    told = "".join(each.stdout + each.stderr for each in [*first, second])
    assert "TOPSECRET" not in told
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert b"TOPSECRET" not in path.read_bytes(), path


def test_a_store_holds_the_same_state_as_a_directory(tmp_path: Path) -> None:
    (there,) = run(1, f"local://{tmp_path}/bucket", 2, UNSAFE, env={})
    (here,) = run(1, str(tmp_path / "plain"), 2, env={})
    assert (there.code, here.code) == (0, 0), there.stderr + here.stderr
    stored, plain = (
        open_checkpoint(f"local://{tmp_path}/bucket"),
        open_checkpoint(tmp_path / "plain"),
    )
    assert logical_hash(stored) == logical_hash(plain)


def test_a_store_without_exclusive_creation_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    results = run(2, f"local://{tmp_path}/bucket", 2, env={})
    assert [each.code for each in results] == [2, 2]
    told = "".join(each.stderr for each in results)
    assert told.count("--ckpt-allow-unsafe-publish") == 1
    assert "Traceback" not in told and "iteration        1/" not in results[0].stdout
    assert published_steps(tmp_path / "bucket") == []


def test_a_store_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "bucket").write_text("")
    (result,) = run(1, f"local://{tmp_path}/bucket/run", 2, UNSAFE, env={})
    assert result.code == 2
    assert f"local://{tmp_path}/bucket/run" in result.stderr and "Traceback" not in result.stderr
    assert not any("s3:" in name or "local:" in name for name in os.listdir("."))
