"""Mix datasets by weight: sample i comes from the dataset that lags its share most.

Megatron-LM's greedy rule, argmax of w * max(i, 1) - count, the first of equals; no
randomness, and the first k choices do not depend on the total. Only the counts at every
4,096th sample are kept and a block is replayed when it is read, so a blend of 10^8
samples costs megabytes. The numpy functions are the oracle of `csrc/index`.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_lite.errors import UserError

BLOCK = 4096
MAX_DATASETS = 32767


class BlendBackend(Protocol):
    """The two loops of a blend, native or numpy (`native.py`)."""

    def blend_starts(
        self, weights: NDArray[np.float64], capacity: NDArray[np.int64], size: int, block: int
    ) -> NDArray[np.int64]: ...

    def blend_block(
        self,
        weights: NDArray[np.float64],
        capacity: NDArray[np.int64],
        counts: NDArray[np.int64],
        start: int,
        length: int,
    ) -> tuple[NDArray[np.int16], NDArray[np.int64]]: ...


def normalize_weights(weights: list[float]) -> NDArray[np.float64]:
    """Scale weights to sum 1.

    Raises:
        UserError: a weight that is not positive and finite, or too many datasets.
    """
    if len(weights) > MAX_DATASETS:
        raise UserError(f"a blend of {len(weights)} datasets; at most {MAX_DATASETS} are possible")
    array = np.array(weights, dtype=np.float64)
    if not np.all(np.isfinite(array)) or np.any(array <= 0):
        raise UserError(f"blend weights must be positive numbers, got {weights}")
    if array.max() > np.finfo(np.float64).max / len(array):
        array = array / array.max()  # the sum would overflow
    normalized: NDArray[np.float64] = array / array.sum()
    return normalized


def blend_starts(
    weights: NDArray[np.float64], capacity: NDArray[np.int64], size: int, block: int
) -> NDArray[np.int64]:
    """Walk a whole blend and keep the counts at every block's start.

    Args:
        weights: [d] normalised.
        capacity: [d] samples each can give, or [0] for no limits.
        size: samples of the blend.
        block: samples between two rows.

    Returns:
        [ceil(size / block) + 1, d]; the last row holds the totals.
    """
    counts = np.zeros(len(weights), dtype=np.int64)
    rows = []
    for start in range(0, size, block):
        rows.append(counts)
        chosen, _ = blend_block(weights, capacity, counts, start, min(block, size - start))
        counts = counts + np.bincount(chosen, minlength=len(weights))
    return np.stack([*rows, counts])


def blend_block(
    weights: NDArray[np.float64],
    capacity: NDArray[np.int64],
    counts: NDArray[np.int64],
    start: int,
    length: int,
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Replay choices [start, start + length) given the counts before them.

    Returns:
        [length] dataset numbers and [length] sample numbers inside them.
    """
    running = counts.copy()
    datasets = np.empty(length, dtype=np.int16)
    samples = np.empty(length, dtype=np.int64)
    for i in range(length):
        lag = weights * float(max(start + i, 1)) - running
        if len(capacity):
            lag[running >= capacity] = -np.inf
        chosen = int(lag.argmax())
        if lag[chosen] == -np.inf:
            raise IndexError("all datasets of the blend are exhausted")
        datasets[i] = chosen
        samples[i] = running[chosen]
        running[chosen] += 1
    return datasets, samples


class BlendIndex:
    """Sample number of the blend -> (dataset, sample inside it).

    Args:
        weights: [d] normalised.
        size: samples of the blend.
        backend: native or numpy loops.
        capacity: [d] what each dataset can give at most; None for no limits.
    """

    def __init__(
        self,
        weights: NDArray[np.float64],
        size: int,
        backend: BlendBackend,
        capacity: NDArray[np.int64] | None = None,
    ) -> None:
        self._weights = weights
        self._capacity = np.empty(0, dtype=np.int64) if capacity is None else capacity
        self._backend = backend
        self._size = size
        self._starts = backend.blend_starts(weights, self._capacity, size, BLOCK)
        # One replayed block: (its number, datasets, samples); replaced as one reference,
        # so several loader threads can read it without a lock.
        self._replayed: tuple[int, NDArray[np.int16], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self._size

    @property
    def counts(self) -> NDArray[np.int64]:
        """[d] samples that each dataset gives in total."""
        totals: NDArray[np.int64] = self._starts[-1]
        return totals

    def counts_after(self, samples: int) -> list[int]:
        """Return how many of the first `samples` each dataset gives."""
        if not 0 <= samples <= self._size:
            raise IndexError(f"{samples} samples of a blend of {self._size}")
        number, inside = divmod(samples, BLOCK)
        counts: NDArray[np.int64] = self._starts[number].copy()
        if inside:
            chosen, _ = self._backend.blend_block(
                self._weights, self._capacity, self._starts[number], number * BLOCK, inside
            )
            counts += np.bincount(chosen, minlength=len(counts))
        return [int(count) for count in counts]

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (dataset, sample inside it) of one sample of the blend."""
        if not 0 <= sample < self._size:
            raise IndexError(f"sample {sample} of a blend of {self._size}")
        number, inside = divmod(sample, BLOCK)
        replayed = self._replayed
        if replayed is None or replayed[0] != number:
            start = number * BLOCK
            length = min(BLOCK, self._size - start)
            datasets, samples = self._backend.blend_block(
                self._weights, self._capacity, self._starts[number], start, length
            )
            replayed = (number, datasets, samples)
            self._replayed = replayed
        return int(replayed[1][inside]), int(replayed[2][inside])
