"""Batches of each step, read ahead by worker threads.

All microbatches of a step are handed over together, because the loss denominators are
computed before the work. Reading is a pure function of sample numbers: workers are
threads (the copies release the interpreter lock), draw no random number and keep no
state, so 0, 2 or 4 of them give the same batches and a resume needs only the cursor.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lite.data.gpt_dataset import Sample, SampleDataset
from megatron_lite.data.sampler import step_sample_ids
from megatron_lite.errors import UserError

STEPS_AHEAD = 2


@dataclass(frozen=True)
class Batch:
    """One microbatch of one data-parallel rank."""

    tokens: Tensor  # [b, s] int64
    labels: Tensor  # [b, s] int64
    loss_mask: Tensor  # [b, s] float32
    sample_ids: Tensor  # [b] int64, consumed-sample index
    origins: list[tuple[int, int]]  # (dataset in the blend, row of its shuffled index)
    boundaries: list[tuple[int, ...]]  # per sample, positions at which a document begins


def read_batch(dataset: SampleDataset, sample_ids: NDArray[np.int64], pin: bool = False) -> Batch:
    """Read one microbatch.

    Args:
        dataset: where the samples come from.
        sample_ids: [b] numbers of the samples.
        pin: put it into page-locked memory, for asynchronous copies to a GPU.
    """
    samples: list[Sample] = [dataset[index] for index in sample_ids.tolist()]
    tensors = [
        torch.from_numpy(np.stack(arrays))
        for arrays in (
            [sample.tokens for sample in samples],
            [sample.labels for sample in samples],
            [sample.loss_mask for sample in samples],
            list(sample_ids),
        )
    ]
    tokens, labels, loss_mask, ids = (t.pin_memory() for t in tensors) if pin else tensors
    return Batch(
        tokens=tokens,
        labels=labels,
        loss_mask=loss_mask,
        sample_ids=ids,
        origins=[(sample.dataset, sample.dataset_index) for sample in samples],
        boundaries=[sample.boundaries for sample in samples],
    )


class StepIterator(Iterator[list[Batch]]):
    """Yields the microbatches of one step after the other; close it when done.

    Args:
        dataset: samples by consumed index.
        consumed_samples: the cursor to start from.
        global_batch_size: fixed, or a function of consumed samples (batch ramp).
        micro_batch_size: b.
        dp_rank: this rank's place on the data axis.
        dp_size: size of the data axis.
        num_workers: reading threads; 0 reads in `__next__`.
        end_samples: stop before a step that would pass it; None is the dataset's length.
        pin: page-locked tensors.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        consumed_samples: int,
        global_batch_size: int | Callable[[int], int],
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int = 0,
        end_samples: int | None = None,
        pin: bool = False,
    ) -> None:
        self._dataset = dataset
        self._scheduled = consumed_samples  # samples of the steps already handed to workers
        self._batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._end = len(dataset) if end_samples is None else end_samples
        self._pin = pin
        if self._end > len(dataset):
            raise UserError(f"{self._end} samples are needed, the dataset has {len(dataset)}")
        self.consumed_samples = consumed_samples  # after the steps already yielded
        self._pool = (
            ThreadPoolExecutor(num_workers, thread_name_prefix="data-loader")
            if num_workers > 0
            else None
        )
        self._ahead: deque[tuple[int, list[Future[Batch]]]] = deque()
        self._schedule()

    def __enter__(self) -> "StepIterator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> "StepIterator":
        return self

    def __next__(self) -> list[Batch]:
        """Return the next step's microbatches.

        Raises:
            StopIteration: the next step would pass the end.
            Exception: whatever reading one of these samples raised.
        """
        if self._pool is None:
            size = self._size_at(self.consumed_samples)
            if self.consumed_samples + size > self._end:
                raise StopIteration
            ids = self._ids(self.consumed_samples, size)
            batches = [read_batch(self._dataset, row, self._pin) for row in ids]
            self.consumed_samples += size
            return batches
        if not self._ahead:
            raise StopIteration
        size, futures = self._ahead[0]
        batches = [future.result() for future in futures]
        self._ahead.popleft()
        self.consumed_samples += size
        self._schedule()
        return batches

    def close(self) -> None:
        """Drop what was read ahead and stop the workers; may be called twice."""
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._end = self.consumed_samples

    def _schedule(self) -> None:
        """Keep workers busy with the following steps."""
        while self._pool is not None and len(self._ahead) < STEPS_AHEAD:
            size = self._size_at(self._scheduled)
            if self._scheduled + size > self._end:
                return
            futures = [
                self._pool.submit(read_batch, self._dataset, row, self._pin)
                for row in self._ids(self._scheduled, size)
            ]
            self._ahead.append((size, futures))
            self._scheduled += size

    def _size_at(self, consumed: int) -> int:
        return self._batch_size if isinstance(self._batch_size, int) else self._batch_size(consumed)

    def _ids(self, consumed: int, size: int) -> NDArray[np.int64]:
        return step_sample_ids(consumed, size, self._micro_batch_size, self._dp_rank, self._dp_size)


def iterate_microbatches(
    dataset: SampleDataset,
    *,
    consumed_samples: int,
    global_batch_size: int | Callable[[int], int],
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int = 0,
    end_samples: int | None = None,
    pin: bool = False,
) -> StepIterator:
    """Iterate over steps from a cursor; see `StepIterator`. Validation uses its own cursor."""
    return StepIterator(
        dataset,
        consumed_samples=consumed_samples,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        num_workers=num_workers,
        end_samples=end_samples,
        pin=pin,
    )
