"""A stage that dies or stands still ends the job, and the message says which one it was."""

import re

import pytest

from tests.pool import fork_ranks
from tests.resilience.stalls import BAD_RANK, stalling_program
from tests.train.program import LLAMA, RUN

ARGV = [*LLAMA, *RUN, "--train-iters", "3", "--eval-iters", "0"]
ARGV += ["--pipeline-model-parallel-size", "4"]
CAUSE = {
    "killed": f"ranks that do not answer, killed or stopped: {BAD_RANK}\n",
    "stopped": f"ranks that do not answer, killed or stopped: {BAD_RANK}\n",
    "asleep": f"ranks that wait for no other: {BAD_RANK}\n",
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", CAUSE)
def test_a_stage_that_fails_ends_the_job_and_is_named(kind: str, schedule: str) -> None:
    argv = [*ARGV, "--pipeline-schedule", schedule]
    exits = fork_ranks(4, stalling_program, kind, argv, timeout=60.0)
    codes = [found.code for found in exits]
    assert [code for rank, code in enumerate(codes) if rank != BAD_RANK] == [1, 1, 1], exits
    told = "".join(found.stderr for found in exits)
    assert told.count("where the ranks are:") == 1
    assert CAUSE[kind] in told + "\n"
    # Every other rank says its step, stage and microbatch, place in the table, and for whom
    # it waits; none of them has gone on.
    places = re.findall(r"  rank (\d), step 2: \S+ \(action \d+ of \d+\) waits for ", told)
    assert set(places) | {str(BAD_RANK)} == set("0123")
