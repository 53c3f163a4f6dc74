"""Global batch size along the run, in consumed samples.

A ramp is a tuple of (first consumed sample, global batch size), ascending, the first
entry at 0. Both Megatron forms (`--rampup-batch-size`, `--step-batch-size-schedule`)
become one, so the batch at any point depends on the consumed samples alone: a resumed
run and another layout see the same sequence of batches.
"""

from __future__ import annotations

import itertools
import re

Ramp = tuple[tuple[int, int], ...]

TOKEN_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
STAGE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?):(\d+)")


def parse_batch_schedule(text: str) -> tuple[tuple[int, int], ...]:
    """Parse '0:768 250B:1536' into (consumed tokens, global batch size) pairs.

    Raises:
        ValueError: with what is wrong, for the rule that reports it.
    """
    stages: list[tuple[int, int]] = []
    for word in text.replace(",", " ").split():
        match = STAGE_PATTERN.fullmatch(word)
        if match is None:
            raise ValueError(f"'{word}' is not TOKENS:SAMPLES (TOKENS may end in K, M, B or T)")
        number, suffix, size = match.groups()
        stages.append((round(float(number) * TOKEN_SUFFIXES[suffix]), int(size)))
    if not stages or stages[0][0] != 0:
        raise ValueError("the first entry must start at 0 tokens")
    if any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(stages)):
        raise ValueError("the token counts must grow from entry to entry")
    if any(size < 1 for _, size in stages):
        raise ValueError("every batch size must be at least 1")
    return tuple(stages)


def schedule_ramp(text: str, seq_length: int) -> Ramp:
    """Turn a token schedule into a ramp; a stage begins at the first sample past its tokens."""
    return tuple((-(-tokens // seq_length), size) for tokens, size in parse_batch_schedule(text))


def linear_ramp(start: int, increment: int, samples: int, final: int) -> Ramp:
    """Grow from `start` to `final` by `increment`, evenly over `samples` samples."""
    count = (final - start) // increment
    # The k-th increment happens at the first sample >= k/count of the ramp.
    return tuple(
        (-(-k * samples // count) if count else 0, start + k * increment) for k in range(count + 1)
    )


def count_train_iters(ramp: Ramp, train_samples: int) -> int:
    """Return how many whole steps `train_samples` allow along the ramp."""
    iters = consumed = 0
    ends = [first for first, _ in ramp[1:]] + [train_samples]
    for (_, size), end in zip(ramp, ends, strict=True):
        if end > consumed:
            steps = min(-(-(end - consumed) // size), (train_samples - consumed) // size)
            iters += steps
            consumed += steps * size
    return iters
