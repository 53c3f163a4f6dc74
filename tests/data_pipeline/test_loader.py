"""Batches: which samples a step has in every layout, workers, resumes, errors."""

import random
import threading
import time

import numpy as np
import pytest
import torch

from megatron_lite.data.gpt_dataset import Sample
from megatron_lite.data.loader import Batch, StepIterator, iterate_microbatches
from megatron_lite.data.sampler import step_sample_ids
from megatron_lite.errors import DamagedError, UserError

SEQ = 4


class NumberedDataset:
    """Sample i starts with token i."""

    def __init__(self, size: int = 200, bad: int | None = None) -> None:
        self.size = size
        self.bad = bad

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        if index == self.bad:
            raise DamagedError(f"sample {index} is bad")
        time.sleep(0.0005 * (index % 3))  # workers finish out of order
        tokens = np.arange(index, index + SEQ + 1, dtype=np.int64)
        mask = np.ones(SEQ, dtype=np.float32)
        return Sample(tokens[:-1], tokens[1:], mask, index % 2, index)


def open_loader(consumed: int = 0, workers: int = 0, **options: object) -> StepIterator:
    settings: dict[str, object] = {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "dp_rank": 0,
        "dp_size": 1,
        **options,
    }
    dataset = settings.pop("dataset", NumberedDataset())
    return iterate_microbatches(  # type: ignore[arg-type]
        dataset, consumed_samples=consumed, num_workers=workers, **settings
    )


def take(loader: StepIterator, steps: int) -> list[list[Batch]]:
    with loader:
        return [next(loader) for _ in range(steps)]


def ids(steps: list[list[Batch]]) -> list[list[int]]:
    return [[i for batch in step for i in batch.sample_ids.tolist()] for step in steps]


def test_a_batch_is_what_its_samples_are() -> None:
    (batch, *others) = take(open_loader(consumed=16), 1)[0]
    assert len(others) == 3
    assert batch.tokens.tolist() == [[16, 17, 18, 19], [17, 18, 19, 20]]
    assert batch.labels.tolist() == [[17, 18, 19, 20], [18, 19, 20, 21]]
    assert (batch.tokens.dtype, batch.loss_mask.dtype) == (torch.int64, torch.float32)
    assert batch.loss_mask.shape == (2, SEQ)
    assert batch.sample_ids.tolist() == [16, 17] and batch.origins == [(0, 16), (1, 17)]


def test_rank_and_microbatch_order_is_megatrons() -> None:
    rows = step_sample_ids(100, 16, 2, dp_rank=1, dp_size=2)
    assert rows.tolist() == [[102, 103], [106, 107], [110, 111], [114, 115]]
    with pytest.raises(ValueError, match="global batch 10"):
        step_sample_ids(0, 10, 2, 0, 2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 8), (2, 1), (4, 2), (2, 4), (8, 1)])
def test_c044_a_global_batch_is_the_same_in_every_layout(
    dp_size: int, micro_batch_size: int, workers: int
) -> None:
    ranks = [
        ids(
            take(
                open_loader(
                    workers=workers,
                    micro_batch_size=micro_batch_size,
                    dp_rank=rank,
                    dp_size=dp_size,
                ),
                10,
            )
        )
        for rank in range(dp_size)
    ]
    for step in range(10):
        together = sorted(i for rank in ranks for i in rank[step])
        assert together == list(range(8 * step, 8 * step + 8))


def test_c044_a_resume_on_other_ranks_continues_the_same_batches() -> None:
    first = [take(open_loader(dp_rank=r, dp_size=4), 5) for r in range(4)]
    assert sorted(i for rank in first for i in ids(rank)[4]) == list(range(32, 40))
    for dp_size in (2, 1):
        later = [ids(take(open_loader(40, dp_rank=r, dp_size=dp_size), 5)) for r in range(dp_size)]
        assert [sorted(i for rank in later for i in rank[step]) for step in range(5)] == [
            list(range(40 + 8 * step, 48 + 8 * step)) for step in range(5)
        ]


def test_c042_a_resume_starts_at_the_cursor() -> None:
    whole = ids(take(open_loader(workers=2), 10))
    loader = open_loader(workers=2)
    head = ids(take(loader, 5))
    assert loader.consumed_samples == 40
    tail = ids(take(open_loader(loader.consumed_samples, workers=2), 5))
    assert head + tail == whole
    assert len({i for step in whole for i in step}) == 80


def test_c045_validation_has_its_own_cursor() -> None:
    dataset = NumberedDataset(40)
    whole = ids(take(open_loader(dataset=dataset, global_batch_size=4), 6))
    resumed = ids(take(open_loader(8, dataset=dataset, global_batch_size=4), 4))
    assert resumed == whole[2:]


@pytest.mark.parametrize("workers", [2, 4])
def test_c039_workers_change_no_batch_and_draw_no_random_number(workers: int) -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    expected = take(open_loader(), 8)
    found = take(open_loader(workers=workers), 8)
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert before == after
    for a, b in zip(expected, found, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x.tokens, y.tokens) and torch.equal(x.sample_ids, y.sample_ids)
            assert torch.equal(x.loss_mask, y.loss_mask) and x.origins == y.origins


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_ramp_follows_the_cursor(workers: int) -> None:
    def size_at(consumed: int) -> int:
        return 4 if consumed < 8 else 8

    steps = ids(take(open_loader(workers=workers, global_batch_size=size_at), 4))
    assert steps == [
        list(range(4)),
        list(range(4, 8)),
        list(range(8, 16)),
        list(range(16, 24)),
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_end_is_before_a_step_that_would_pass_it(workers: int) -> None:
    loader = open_loader(workers=workers, dataset=NumberedDataset(30))
    with loader:
        assert ids(list(loader)) == [list(range(8 * k, 8 * k + 8)) for k in range(3)]
    limited = open_loader(workers=workers, end_samples=16)
    with limited:
        assert len(list(limited)) == 2
    with pytest.raises(UserError, match="31 samples are needed"):
        open_loader(dataset=NumberedDataset(30), end_samples=31)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_surfaces_in_its_own_step(workers: int) -> None:
    with open_loader(workers=workers, dataset=NumberedDataset(bad=13)) as loader:
        assert ids([next(loader)]) == [list(range(8))]
        with pytest.raises(DamagedError, match="sample 13 is bad"):
            next(loader)


def test_workers_read_ahead_and_stop_when_closed() -> None:
    before = threading.active_count()
    loader = open_loader(workers=2)
    next(loader)
    assert threading.active_count() > before
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(loader)
