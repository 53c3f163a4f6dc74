"""Cut the shuffled token stream of a dataset into samples: Megatron-LM's algorithm.

Documents are repeated over as many epochs as the request needs and shuffled; sample i
reads sequence_length + 1 tokens from flat token i * sequence_length on, so neighbours
share one token; the samples are shuffled again by the same generator. When the last
epoch is needed for less than 80 % it is kept apart, so that it comes last. All of it is
a function of (lengths, request, sequence length, seed). The numpy functions here are
the oracle of `csrc/index`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.errors import UserError

ALGORITHM_VERSION = 1
INT32_MAX = 2**31 - 1
# Megatron's limit: the type's maximum minus one.
UINT32_SAMPLE_LIMIT = 2**32 - 2
LAST_EPOCH_SHARE = 0.80

# lengths, document index, sequence length, samples, 64 bit -> [samples + 1, 2]
SampleIndexBuilder = Callable[
    [NDArray[np.int32], NDArray[np.int32], int, int, bool], NDArray[np.signedinteger[Any]]
]


@dataclass(frozen=True)
class IndexPlan:
    """Sizes of an index, known from counts alone."""

    num_sequences: int  # in the slice
    tokens_per_epoch: int
    sequence_length: int
    epochs: int
    separate_last_epoch: bool
    num_samples: int
    last_epoch_start: int  # samples before the separate last epoch, else num_samples
    wide_samples: bool  # sample index needs int64
    wide_shuffle: bool  # shuffle index needs int64

    @property
    def predicted_bytes(self) -> int:
        """Bytes of the three arrays."""
        documents = 4 * self.num_sequences * self.epochs
        rows = (16 if self.wide_samples else 8) * (self.num_samples + 1)
        return documents + rows + (8 if self.wide_shuffle else 4) * self.num_samples


@dataclass(frozen=True)
class SampleIndex:
    """The three arrays of one dataset; sample k is row `shuffle[k]` of `samples`."""

    documents: NDArray[np.int32]
    samples: NDArray[np.signedinteger[Any]]
    shuffle: NDArray[np.integer[Any]]


def plan_index(
    *,
    num_sequences: int,
    tokens_per_epoch: int,
    max_length: int,
    sequence_length: int,
    num_samples: int | None,
    name: str = "dataset",
) -> IndexPlan:
    """Choose epochs and integer types without touching data.

    Args:
        num_sequences: sequences of the slice.
        tokens_per_epoch: their tokens.
        max_length: the longest of them.
        sequence_length: tokens per sample; one more is read for the labels.
        num_samples: samples that must exist; None asks for one epoch.
        name: what to call the dataset in a message.

    Raises:
        UserError: no tokens, no whole sample, or more sequences than the format counts.
    """
    if tokens_per_epoch == 0:
        raise UserError(f"{name}: the selected part holds no tokens")
    if num_sequences > INT32_MAX:
        raise UserError(f"{name}: {num_sequences} sequences; the document index holds {INT32_MAX}")
    epochs = 1
    if num_samples is not None:
        epochs = max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))
    total = (epochs * tokens_per_epoch - 1) // sequence_length
    if total == 0:
        raise UserError(
            f"{name}: {tokens_per_epoch} tokens do not make one sample of {sequence_length} + 1; "
            f"--seq-length may be at most {tokens_per_epoch - 1}"
        )
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // sequence_length
    separate = False
    if epochs > 1 and num_samples is not None:
        per_epoch = (tokens_per_epoch - 1) // sequence_length
        separate = num_samples - before_last < int(LAST_EPOCH_SHARE * per_epoch)
    return IndexPlan(
        num_sequences=num_sequences,
        tokens_per_epoch=tokens_per_epoch,
        sequence_length=sequence_length,
        epochs=epochs,
        separate_last_epoch=separate,
        num_samples=total,
        last_epoch_start=before_last if separate else total,
        wide_samples=max(epochs * num_sequences, max_length) > INT32_MAX,
        wide_shuffle=total >= UINT32_SAMPLE_LIMIT,
    )


def build_document_index(
    first: int, plan: IndexPlan, random: np.random.RandomState
) -> NDArray[np.int32]:
    """Repeat and shuffle the sequence numbers [first, first + plan.num_sequences).

    Returns:
        [epochs * num_sequences] int32.
    """
    if first + plan.num_sequences - 1 > INT32_MAX:
        raise OverflowError("sequence numbers beyond 2^31 - 1 do not fit the document index")
    ids = np.arange(first, first + plan.num_sequences, dtype=np.int32)
    if not plan.separate_last_epoch:
        index = np.tile(ids, plan.epochs)
        random.shuffle(index)
        return index
    head = np.tile(ids, plan.epochs - 1)
    random.shuffle(head)
    random.shuffle(ids)
    return np.concatenate([head, ids])


def build_sample_index(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    sequence_length: int,
    num_samples: int,
    wide: bool,
) -> NDArray[np.signedinteger[Any]]:
    """Locate flat tokens 0, S, 2S, ... in the shuffled stream (oracle and fallback).

    Args:
        lengths: [sequences of the whole dataset] tokens.
        document_index: shuffled sequence numbers.
        sequence_length: S.
        num_samples: n; n * S must be smaller than the tokens of the stream.
        wide: int64 rows in place of int32.

    Returns:
        [n + 1, 2]: position in `document_index`, token offset inside that sequence.

    Raises:
        OverflowError: a value does not fit the chosen type.
    """
    stream_lengths = lengths[document_index].astype(np.int64)
    ends = np.cumsum(stream_lengths)
    tokens = np.arange(num_samples + 1, dtype=np.int64) * sequence_length
    if tokens[-1] >= ends[-1]:
        raise IndexError("more samples asked for than tokens exist")
    # side="right" steps over empty sequences: the row names the one that holds the token.
    positions = np.searchsorted(ends, tokens, side="right")
    rows = np.stack([positions, tokens - (ends - stream_lengths)[positions]], axis=1)
    if not wide and int(rows.max()) > INT32_MAX:
        raise OverflowError("sample index does not fit its integer type")
    return rows.astype(np.int64 if wide else np.int32)


def build_shuffle_index(plan: IndexPlan, random: np.random.RandomState) -> NDArray[np.integer[Any]]:
    """Order the samples; a separate last epoch stays behind the others."""
    dtype: type[np.integer[Any]] = np.int64 if plan.wide_shuffle else np.uint32
    index = np.arange(plan.num_samples, dtype=dtype)
    random.shuffle(index[: plan.last_epoch_start])
    if plan.last_epoch_start < plan.num_samples:
        random.shuffle(index[plan.last_epoch_start :])
    return index


def build_index(
    lengths: NDArray[np.int32],
    first: int,
    plan: IndexPlan,
    seed: int,
    builder: SampleIndexBuilder = build_sample_index,
) -> SampleIndex:
    """Build all three arrays; one generator runs through both shuffles.

    Args:
        lengths: [sequences of the whole dataset].
        first: first sequence of the slice.
        plan: from `plan_index` for the slice.
        seed: `--seed`.
        builder: native or numpy, see `native.py`.
    """
    random = np.random.RandomState(seed)
    documents = build_document_index(first, plan, random)
    samples = builder(
        np.require(lengths, dtype=np.int32, requirements=["A", "C"]),
        documents,
        plan.sequence_length,
        plan.num_samples,
        plan.wide_samples,
    )
    return SampleIndex(documents, samples, build_shuffle_index(plan, random))
