"""Describe, verify and compare indexed datasets (what `tools/inspect_dataset.py` prints)."""

import hashlib

import numpy as np

from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.errors import DamagedError, UserError

SHOWN_TOKENS = 32


def describe_dataset(dataset: IndexedDataset) -> list[str]:
    """Return lines about counts, lengths and the record."""
    lengths = dataset.lengths
    text = [
        f"dataset    {dataset.prefix}",
        f"tokens     {dataset.num_tokens} of {dataset.dtype.name}, {dataset.bin_bytes} bytes",
        f"documents  {dataset.num_documents}",
        f"sequences  {len(lengths)}",
    ]
    if len(lengths):
        text.append(
            f"lengths    min {lengths.min()}, mean {lengths.mean(dtype=np.float64):.1f}, "
            f"median {np.median(lengths):.0f}, max {lengths.max()}"
        )
    meta = dataset.meta
    if meta is None:
        return [*text, "record     none (no .meta.json)"]
    skipped = ", ".join(f"{reason} {count}" for reason, count in meta.skipped.items()) or "nothing"
    return [
        *text,
        f"tokenizer  {meta.tokenizer_type}, vocabulary {meta.vocab_size}, EOD {meta.eod}, "
        f"model sha256 {meta.tokenizer_sha256}",
        f"largest id {meta.max_token_id}",
        f"skipped    {skipped}",
    ]


def describe_document(dataset: IndexedDataset, number: int) -> str:
    """Return the first ids of one document.

    Raises:
        UserError: there is no such document.
    """
    if not 0 <= number < dataset.num_documents:
        raise UserError(f"document {number}: {dataset.prefix} has {dataset.num_documents}")
    tokens = dataset.document(number)
    shown = " ".join(map(str, tokens[:SHOWN_TOKENS].tolist()))
    more = f" ... ({len(tokens)} tokens)" if len(tokens) > SHOWN_TOKENS else ""
    return f"document {number}: {shown}{more}"


def verify_tokens(dataset: IndexedDataset, vocab_size: int | None) -> str:
    """Read every token and compare with the limit and the record.

    Args:
        dataset: opened, so its index is already checked.
        vocab_size: ids must be below it; None takes the recorded vocabulary, if any.

    Raises:
        DamagedError: an id too large, or content that is not what was recorded.
    """
    meta = dataset.meta
    limit = vocab_size if vocab_size is not None else (meta.vocab_size if meta else None)
    digest = hashlib.sha256()
    low, high, seen = 0, -1, 0
    for block in dataset.blocks():
        digest.update(block.tobytes())
        low, high = min(low, int(block.min())), max(high, int(block.max()))
        if low < 0 or (limit is not None and high >= limit):
            bad = int(np.flatnonzero((block < 0) | (block >= (limit or high + 1)))[0])
            raise DamagedError(
                f"{dataset.prefix}: token {seen + bad} is id {block[bad]}, "
                + ("below 0" if limit is None else f"outside the vocabulary of {limit}")
            )
        seen += len(block)
    if meta is not None:
        recorded = (meta.documents, meta.tokens, meta.max_token_id)
        found = (dataset.num_documents, dataset.num_tokens, high)
        if recorded != found:
            raise DamagedError(
                f"{dataset.prefix}: recorded (documents, tokens, largest id) {recorded}, "
                f"found {found}"
            )
        if meta.bin_sha256 not in (None, digest.hexdigest()):
            raise DamagedError(f"{dataset.prefix}: the .bin is not the one that was recorded")
    ids = f"ids 0 to {high}" if seen else "no tokens"
    return f"verified: {ids}, .bin sha256 {digest.hexdigest()}"


def first_difference(one: IndexedDataset, other: IndexedDataset) -> str | None:
    """Say where two datasets differ first; None when they hold the same documents."""
    if one.dtype != other.dtype:
        return f"token types {one.dtype.name} and {other.dtype.name}"
    for what, a, b in (
        ("sequence lengths", one.lengths, other.lengths),
        ("document indices", one.document_indices, other.document_indices),
    ):
        if len(a) != len(b):
            return f"{len(a)} and {len(b)} {what}"
        unequal = np.flatnonzero(a != b)
        if len(unequal):
            at = int(unequal[0])
            return f"{what} at {at}: {a[at]} and {b[at]}"
    seen = 0
    for a, b in zip(one.blocks(), other.blocks(), strict=True):
        unequal = np.flatnonzero(a != b)
        if len(unequal):
            at = int(unequal[0])
            ends = np.cumsum(one.lengths, dtype=np.int64)
            sequence = int(np.searchsorted(ends, seen + at, side="right"))
            return f"token {seen + at} (sequence {sequence}): {a[at]} and {b[at]}"
        seen += len(a)
    return None
