"""Samples of a language-model dataset: tokens, labels, loss mask.

A sample is sequence_length + 1 consecutive tokens of the shuffled stream, split into
inputs and labels one token apart. Reading one copies a few memory-mapped slices and does
no Python work per token; every id is checked against the model's vocabulary here, because
further on an id outside it looks like "another rank's token".
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.blend import BlendIndex
from megatron_lite.data.sample_index import SampleIndex
from megatron_lite.errors import DamagedError, UserError


@dataclass(frozen=True)
class Sample:
    """One training example of s tokens."""

    tokens: NDArray[np.int64]  # [s]
    labels: NDArray[np.int64]  # [s]
    loss_mask: NDArray[np.float32]  # [s], 1 where the label counts
    dataset: int  # number in the blend
    dataset_index: int  # row of that dataset's sample index after shuffling
    boundaries: tuple[int, ...] = ()  # positions in `tokens` at which a document begins


class TokenSource(Protocol):
    """Sequences of tokens with random access; `IndexedDataset` is one."""

    @property
    def name(self) -> str: ...
    @property
    def lengths(self) -> NDArray[np.int32]: ...
    def read_into(self, out: NDArray[np.int64], sequence: int, offset: int) -> None: ...
    def identity(self) -> dict[str, Any]: ...


class SampleDataset(Protocol):
    """What a loader needs: a length and samples by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...


class MockSource:
    """Endless-looking data without files (`--mock-data`).

    100,000 documents of 1 to 4,095 tokens; token i of a document is (i + 1) % vocab_size
    and the last one is EOD. Of samples shorter than 13 tokens it has fewer documents: an
    epoch's samples are all indexed and shuffled at start, and there would be up to 200 million.
    """

    NUM_DOCUMENTS = 100_000
    DOCUMENTS_PER_TOKEN = 8192  # of a sample: 17 million samples
    MAX_LENGTH = 4096

    def __init__(self, vocab_size: int, eod: int, sequence_length: int) -> None:
        self.name = "mock data"
        lengths = np.random.default_rng(0).integers(
            1, self.MAX_LENGTH, self.NUM_DOCUMENTS, dtype=np.int32
        )
        self.lengths: NDArray[np.int32] = lengths[: self.DOCUMENTS_PER_TOKEN * sequence_length]
        self._vocab_size = vocab_size
        self._eod = eod
        self._stream = (np.arange(self.MAX_LENGTH, dtype=np.int64) + 1) % vocab_size

    def read_into(self, out: NDArray[np.int64], sequence: int, offset: int) -> None:
        """Fill `out` with tokens of one document from `offset` on."""
        end = offset + len(out)
        out[:] = self._stream[offset:end]
        if len(out) and end == self.lengths[sequence]:
            out[-1] = self._eod

    def identity(self) -> dict[str, Any]:
        """Describe the content."""
        return {"mock": 1, "vocab_size": self._vocab_size, "eod": self._eod}


class GPTDataset:
    """Samples of one split of one source.

    Args:
        source: the tokens.
        index: which tokens form which sample.
        sequence_length: s.
        vocab_size: the model's vocabulary; ids must be below it.
        eod_mask: id whose following label is not learned (`--eod-mask-loss`), or None.
        pad: id that the tokenizer uses as padding: masked as label, 0 as input; or None.
        number: its place in the blend.
    """

    def __init__(
        self,
        source: TokenSource,
        index: SampleIndex,
        *,
        sequence_length: int,
        vocab_size: int,
        eod_mask: int | None = None,
        pad: int | None = None,
        number: int = 0,
    ) -> None:
        self.source = source
        self.index = index
        self.number = number
        self._sequence_length = sequence_length
        self._vocab_size = vocab_size
        self._eod_mask = eod_mask
        self._pad = pad

    def __len__(self) -> int:
        return len(self.index.shuffle)

    def __getitem__(self, index: int) -> Sample:
        """Read one sample.

        Args:
            index: position in the shuffled order.

        Raises:
            IndexError: beyond the samples that were asked for.
            DamagedError: a token id outside the model's vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} of dataset {self.source.name}")
        stream, boundaries = self._read_stream(int(self.index.shuffle[index]))
        # One pass over the bits finds both ends: a negative id is huge as unsigned.
        if stream.view(np.uint64).max() >= self._vocab_size:
            self._refuse_token(stream, index)
        tokens, labels = stream[:-1], stream[1:]
        loss_mask = np.ones(self._sequence_length, dtype=np.float32)
        if self._eod_mask is not None:
            loss_mask[tokens == self._eod_mask] = 0.0
        if self._pad is not None:
            loss_mask[labels == self._pad] = 0.0
            stream[stream == self._pad] = 0
        return Sample(tokens, labels, loss_mask, self.number, index, boundaries)

    def _read_stream(self, row: int) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """Copy the s + 1 tokens of one row of the sample index, and where documents begin."""
        first, offset = self.index.samples[row].tolist()
        last, end = self.index.samples[row + 1].tolist()
        stream = np.empty(self._sequence_length + 1, dtype=np.int64)
        lengths = self.source.lengths
        boundaries = []
        filled = 0
        for position, sequence in enumerate(self.index.documents[first : last + 1].tolist(), first):
            begin = offset if position == first else 0
            stop = end + 1 if position == last else int(lengths[sequence])
            if begin == 0 and stop and filled < self._sequence_length:
                boundaries.append(filled)
            self.source.read_into(stream[filled : filled + stop - begin], sequence, begin)
            filled += stop - begin
        if filled != len(stream):
            raise DamagedError(
                f"dataset {self.source.name}: its sample index does not fit its lengths"
            )
        return stream, tuple(boundaries)

    def _refuse_token(self, stream: NDArray[np.int64], index: int) -> None:
        bad = stream[(stream < 0) | (stream >= self._vocab_size)][0]
        raise DamagedError(
            f"token id {bad} is outside the model's vocabulary of {self._vocab_size}: dataset "
            f"{self.source.name}, sample {index}; it was made by a tokenizer of a larger "
            f"vocabulary, or it is damaged"
        )


class BlendedDataset:
    """Several datasets mixed by weight.

    Args:
        datasets: in the order of the flags.
        index: which sample comes from which.

    Raises:
        UserError: the blend asks a dataset for more samples than it has.
    """

    def __init__(self, datasets: list[GPTDataset], index: BlendIndex) -> None:
        for dataset, count in zip(datasets, index.counts.tolist(), strict=True):
            if count > len(dataset):
                raise UserError(
                    f"the blend takes {count} samples of {dataset.source.name}, "
                    f"which was built for {len(dataset)}"
                )
        self.datasets = datasets
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> Sample:
        """Read one sample of the blend."""
        dataset, inside = self.index.locate(index)
        return self.datasets[dataset][inside]


def order_hash(dataset: SampleDataset, samples: int = 10) -> str:
    """Hash the tokens of the first samples: nodes with different corpora differ here."""
    digest = hashlib.sha256()
    for index in range(min(samples, len(dataset))):
        sample = dataset[index]
        digest.update(sample.tokens.tobytes())
        digest.update(sample.labels[-1:].tobytes())
    return digest.hexdigest()
