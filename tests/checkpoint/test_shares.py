"""Holders of equal copies share the writing: every element once, the load even."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lite.checkpoint.attempt import SaveRequest, publish_attempt, write_rank
from megatron_lite.checkpoint.commit import CommitPlan
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.reader import open_checkpoint
from megatron_lite.checkpoint.tensors import Share, StateEntry, take_snapshot, written_entries
from megatron_lite.config.plan import ParallelShape
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.shards import is_owner, local_box, replica
from tests.checkpoint.tiny import same_bits
from tests.model.builders import FAMILIES

KINDS = ("", "optim/master/", "optim/exp_avg/", "optim/exp_avg_sq/")


def parallel_of(tp: int, dp: int) -> ParallelShape:
    return ParallelShape(tp * dp, tp, 1, 1, tp, dp, dp, 1, 1, False, "tp-cp-ep-dp-pp")


def coordinates(tp: int, dp: int) -> Iterator[dict[str, int]]:
    for dp_rank, tp_rank in itertools.product(range(dp), range(tp)):
        yield {"tp": tp_rank, "cp": 0, "dp": dp_rank, "pp": 0}


def held(family: str, parallel: ParallelShape, coordinate: dict[str, int]) -> list[StateEntry]:
    """What a rank of this layout holds, in the run's order."""
    entries = []
    for kind in KINDS:
        dtype = torch.float32 if kind else torch.bfloat16
        for spec in model_spec(FAMILIES[family], parallel):
            box = local_box(spec, coordinate, parallel)
            if box.elements:
                copy = replica(spec, coordinate, parallel)
                share = Share(copy.index, copy.count, copy.axes)
                tensor = torch.empty(box.shape, dtype=dtype, device="meta")
                entries.append(
                    StateEntry(kind + spec.name, tensor, spec.shape, box.offset, True, share)
                )
    return entries


LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 3)]


@pytest.mark.parametrize("cut_bytes", [0, 2**10, 2**16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
def test_every_element_is_written_once_in_every_layout(
    monkeypatch: pytest.MonkeyPatch, family: str, tp: int, dp: int, cut_bytes: int
) -> None:
    """KV heads shared by tp/g ranks, norms held by all, cut and whole pieces."""
    monkeypatch.setattr("megatron_lite.checkpoint.tensors.CUT_BYTES", cut_bytes)
    parallel = parallel_of(tp, dp)
    written = {
        kind + spec.name: np.zeros(spec.shape, dtype=int)
        for kind in KINDS
        for spec in model_spec(FAMILIES[family], parallel)
    }
    for coordinate in coordinates(tp, dp):
        for entry in written_entries(held(family, parallel, coordinate)):
            region = tuple(
                slice(low, low + size)
                for low, size in zip(entry.offset, entry.tensor.shape, strict=True)
            )
            written[entry.name][region] += 1
    for name, count in written.items():
        assert (count == 1).all(), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (1, 4), (2, 2), (2, 4)])
def test_the_bytes_that_ranks_write_differ_by_less_than_a_tenth(
    family: str, tp: int, dp: int
) -> None:
    parallel = parallel_of(tp, dp)
    written = [
        sum(e.tensor.nbytes for e in written_entries(held(family, parallel, coordinate)))
        for coordinate in coordinates(tp, dp)
    ]
    assert max(written) <= 1.1 * sum(written) / len(written), written


def test_the_copies_of_a_region_are_numbered_and_the_owner_is_the_first() -> None:
    parallel = parallel_of(4, 2)
    for spec in model_spec(FAMILIES["llama"], parallel):
        numbers: dict[tuple[int, ...], list[int]] = {}
        for coordinate in coordinates(4, 2):
            copy = replica(spec, coordinate, parallel)
            offset = local_box(spec, coordinate, parallel).offset
            numbers.setdefault(offset, []).append(copy.index)
            assert copy.count == 8 // spec.tensor_parts if spec.cuts else copy.count == 8
            assert (copy.index == 0) == is_owner(spec, coordinate, parallel)
        for found in numbers.values():
            assert sorted(found) == list(range(len(found)))


def test_a_large_piece_is_cut_among_its_holders_and_reads_back_whole(tmp_path: Path) -> None:
    """Each of three holders writes a range of rows; a scalar and a short tensor stay whole."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "large": torch.randn(700, 64, generator=generator),
        "two rows".replace(" ", "_"): torch.randn(2, 40000, generator=generator),
        "scalar": torch.tensor(7.0),
        "short": torch.randn(5, generator=generator),
    }
    files, size = FileSystem(), 3
    attempt = f"1-0-{'a' * 16}"
    files.ensure_directory(tmp_path / "attempts" / attempt)
    plan = CommitPlan(attempt, 1, 0, size, {"iteration": 1})
    requests = [SaveRequest(tmp_path, plan, rank, False, ()) for rank in range(size)]
    sizes = []
    for request in requests:
        entries = [
            StateEntry(
                name,
                tensor,
                tuple(tensor.shape),
                (0,) * tensor.dim(),
                True,
                Share(request.rank, size, "all"),
            )
            for name, tensor in tensors.items()
        ]
        sizes.append(write_rank(request, take_snapshot(entries), files))
    publish_attempt(requests[0], files)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names) == set(tensors)
    for name, tensor in tensors.items():
        assert same_bits(checkpoint.read(name), tensor), name
    assert sum(sizes) < 1.1 * sum(tensor.nbytes for tensor in tensors.values())
