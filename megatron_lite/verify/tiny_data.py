"""A tiny indexed data set whose samples differ widely in their valid tokens.

With `--eod-mask-loss` an input token that is the end of a document has no loss. Documents
of a few tokens, long ones, and long runs of end-of-document tokens make samples with
anything between no and all valid tokens: a denominator that is formed per rank or per
micro-batch then differs from the global one in the first digit, not in the tenth. Where equal
tokens in a row would tie, there are no runs, and samples differ less.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_lite.data.writer import DatasetWriter

_SEED = 20240229


def write_tiny_dataset(
    prefix: Path, vocab_size: int, seq_length: int, samples: int, runs: bool = True
) -> None:
    """Write PREFIX.bin and .idx; the same content for the same arguments.

    Args:
        prefix: path without suffix; an existing data set is left as it is.
        vocab_size: of a NullTokenizer, whose end of document is vocab_size - 1.
        seq_length: tokens per sample.
        samples: at least so many samples are in one epoch.
        runs: with long runs of ends of documents; else no two follow each other.
    """
    if prefix.with_name(f"{prefix.name}.idx").exists():
        return
    rng = np.random.default_rng(_SEED)
    eod, wanted = vocab_size - 1, samples * seq_length + 1
    with DatasetWriter(prefix, np.uint16) as writer:
        for number in range(1_000_000):
            if writer.num_tokens >= wanted:
                break
            if runs and number % 3 == 0:
                length = int(rng.integers(1, 2 * seq_length))
                tokens = np.full(length, eod)
            else:
                longest = 8 if number % 3 == 1 else 3 * seq_length
                tokens = rng.integers(0, eod, int(rng.integers(2, longest)))
            writer.add_document(np.append(tokens, eod))
        writer.finalize()
