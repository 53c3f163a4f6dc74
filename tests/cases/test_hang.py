"""No hang (HANG): a fault on one rank ends all ranks, and the message names it."""

from pathlib import Path

import pytest

from megatron_lite.checkpoint.reader import open_checkpoint
from tests.cases.layouts import LAYOUTS
from tests.cases.ranks import program
from tests.pool import RankPool, fork_ranks
from tests.train.program import LLAMA, RUN, rows, train_rank

ARGV = [*LLAMA, *RUN, "--train-iters", "3", "--eval-iters", "0"]


def spoil(root: Path, rank: int) -> Path:
    """Flip bytes in the middle of the tensors that one rank has written."""
    shard = open_checkpoint(root, verify="structure").directory / f"rank{rank:05d}.safetensors"
    data = bytearray(shard.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    for position in range(header, len(data), 97):
        data[position] ^= 0x10
    shard.chmod(0o600)
    shard.write_bytes(bytes(data))
    return shard


@pytest.mark.parametrize("older", [False, True], ids=["only one", "an older one"])
def test_c086_a_damaged_shard_of_rank_1_ends_the_job_or_an_older_step_is_loaded(
    rank_pool: RankPool, tmp_path: Path, older: bool
) -> None:
    root, metrics = tmp_path / "save", tmp_path / "metrics"
    saving = ["--save", str(root), "--save-interval", "1", "--exit-interval", "2"]
    saving += ["--no-ckpt-fully-parallel-save"]  # so that each rank reads what it has written
    rank_pool.run(2, train_rank, argv=[*ARGV, *LAYOUTS["tp2"].flags, *saving])
    if not older:
        (root / "published" / "1.json").unlink()
    shard = spoil(root, 1)
    argv = [*ARGV, *LAYOUTS["tp2"].flags, "--load", str(root), "--metrics-jsonl", str(metrics)]
    # The time limit is that of a hang.
    exits = fork_ranks(2, program, argv, timeout=60.0)
    told = "".join(found.stdout + found.stderr for found in exits)
    assert "Traceback" not in told
    assert "rank 1: " in told and str(shard) in told
    assert "sha256" in told and "expected" in told and "found" in told
    if older:
        assert {found.code for found in exits} == {0}, exits
        assert "step 2 passed over" in told
        assert [row["iteration"] for row in rows(metrics)] == [2, 3]
    else:
        assert {found.code for found in exits} == {3}, exits
        assert not metrics.exists()
