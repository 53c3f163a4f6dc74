"""Runs of the program whose saves meet faults (`tests/checkpoint/faulty.py`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from megatron_lite.train.loop import train
from megatron_lite.train.saving import Children, Saver
from tests.cases.ranks import program
from tests.checkpoint.faulty import FaultyFileSystem, decode
from tests.train.program import build_and

MODULE = "tests.checkpoint.faulty"


@contextmanager
def with_faults(faults: str) -> Iterator[None]:
    """Ranks that are built in the block save through a faulty disk."""
    children = Children((MODULE, "writer", faults), (MODULE, "finalizer", faults))
    files = FaultyFileSystem(decode(faults))
    with patch("megatron_lite.train.build.Saver", partial(Saver, files=files, children=children)):
        yield


def faulty_program(argv: Sequence[str], faults: str) -> int:
    """The main program in this process."""
    with with_faults(faults):
        return program(argv)


def faulty_rank(argv: Sequence[str], faults: str, rank: int, world_size: int) -> int:
    """One rank of a whole run in the pool; returns its exit code."""
    with with_faults(faults):
        code: int = build_and(train, argv, rank, world_size)
    return code
