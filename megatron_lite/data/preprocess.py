"""Preprocess a corpus: JSON lines in, one indexed dataset per JSON key out.

The datasets do not depend on the number of workers or partitions: partitions are spans
of the input in order, and their merge is the input in order. Nothing appears under a
final name before everything is written.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from megatron_lite.data.encode import ChunkEncoder, EncodedChunk, encode_chunks
from megatron_lite.data.indexed import token_dtype
from megatron_lite.data.meta import DatasetMeta
from megatron_lite.data.records import find_inputs, read_chunks
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.data.writer import DatasetWriter, merge_datasets
from megatron_lite.errors import DamagedError, UserError

SKIP_REASONS = ("empty", "missing_key", "malformed", "blank")


@dataclass(frozen=True)
class PreprocessRequest:
    """What to preprocess and where to."""

    input: str  # path or glob
    output_prefix: str
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    partitions: int = 1
    skip_bad_records: bool = False
    log_interval: int = 1000


@dataclass
class Summary:
    """Counts of one run; `skipped[key]` has one entry per reason."""

    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, Counter[str]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Render the counts for a person."""
        text = []
        for key, skipped in self.skipped.items():
            text += [
                f"key {key!r}: {self.documents[key]} documents, {self.tokens[key]} tokens",
                f"empty documents skipped: {skipped['empty']}",
                f"records skipped: malformed: {skipped['malformed']}, "
                f"missing key: {skipped['missing_key']}, blank: {skipped['blank']}",
            ]
        return text


class _Outputs:
    """Writers and counters of every key and partition."""

    def __init__(self, request: PreprocessRequest, tokenizer: Tokenizer, stack: ExitStack) -> None:
        self._request = request
        self._tokenizer = tokenizer
        dtype = token_dtype(tokenizer.vocab_size)
        self.parts = range(request.partitions)
        self.writers = {
            (key, part): stack.enter_context(DatasetWriter(self.prefix(key, part), dtype))
            for key in request.json_keys
            for part in self.parts
        }
        self.skipped: dict[tuple[str, int], Counter[str]] = {
            at: Counter(dict.fromkeys(SKIP_REASONS, 0)) for at in self.writers
        }
        self.seen_keys: set[str] = set()
        self.texts_of: Counter[str] = Counter()

    def prefix(self, key: str, part: int | None) -> str:
        """Megatron's names; `part` None is the final dataset."""
        if part is None or self._request.partitions == 1:
            return f"{self._request.output_prefix}_{key}_document"
        return f"{self._request.output_prefix}_{part}_{key}_document"

    def add(self, chunk: EncodedChunk) -> None:
        """Store one chunk's documents and counts."""
        for key, encoded in chunk.keys.items():
            at = (key, chunk.partition)
            self.writers[at].add_documents(encoded.tokens, encoded.lengths)
            self.skipped[at]["empty"] += encoded.empty
            self.skipped[at]["missing_key"] += encoded.missing
            self.skipped[at]["malformed"] += chunk.malformed
            self.skipped[at]["blank"] += chunk.blank
            self.texts_of[key] += len(encoded.lengths) + encoded.empty
        self.seen_keys |= chunk.seen_keys
        if chunk.error is not None:
            hint = self.absent_keys()
            raise DamagedError(
                f"{chunk.error}; --skip-bad-records counts and skips such records"
                + (f". Besides: {hint}" if hint else "")
            )

    def absent_keys(self) -> str | None:
        """Say which wanted keys no record had so far, and which keys there are."""
        absent = [key for key in self._request.json_keys if not self.texts_of[key]]
        if not absent or not self.seen_keys:
            return None
        have = ", ".join(repr(key) for key in sorted(self.seen_keys))
        return f"no record has the key {', '.join(map(repr, absent))}; keys found: {have}"

    def check_not_empty(self) -> None:
        """Refuse to publish a dataset without documents."""
        absent = self.absent_keys()
        if absent is not None:
            raise UserError(f"--json-keys: {absent}")
        for key in self._request.json_keys:
            if not sum(self.writers[key, part].num_documents for part in self.parts):
                raise UserError(f"{self._request.input}: no document with tokens, nothing to write")

    def publish(self) -> Summary:
        """Finish all datasets, merging partitions."""
        summary = Summary()
        for (key, part), writer in self.writers.items():
            writer.finalize(self._meta(writer, self.skipped[key, part]))
        for key in self._request.json_keys:
            prefixes = [self.prefix(key, part) for part in self.parts]
            if len(prefixes) > 1:
                merge_datasets(prefixes, self.prefix(key, None))
            writers = [self.writers[key, part] for part in self.parts]
            summary.documents[key] = sum(writer.num_documents for writer in writers)
            summary.tokens[key] = sum(writer.num_tokens for writer in writers)
            summary.skipped[key] = sum(
                (self.skipped[key, part] for part in self.parts), start=Counter()
            )
        return summary

    def _meta(self, writer: DatasetWriter, skipped: Counter[str]) -> DatasetMeta:
        return DatasetMeta(
            tokenizer_type=self._tokenizer.name,
            tokenizer_sha256=self._tokenizer.model_sha256,
            vocab_size=self._tokenizer.vocab_size,
            eod=self._tokenizer.find_special("eod"),
            max_token_id=writer.max_token_id,
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            skipped=dict(skipped),
        )


class _Progress:
    """Megatron's progress line, every so many documents."""

    def __init__(self, interval: int, say: Callable[[str], None]) -> None:
        self._interval = interval
        self._say = say
        self._start = time.perf_counter()
        self._documents = 0
        self._bytes = 0

    def add(self, documents: int, num_bytes: int) -> None:
        due = (self._documents + documents) // self._interval > self._documents // self._interval
        self._documents += documents
        self._bytes += num_bytes
        if due:
            elapsed = max(time.perf_counter() - self._start, 1e-9)
            self._say(
                f"Processed {self._documents} documents ({self._documents / elapsed:.1f} docs/s, "
                f"{self._bytes / elapsed / 1e6:.2f} MB/s)."
            )


def say_on_stderr(message: str) -> None:
    """Print progress where it does not mix with results."""
    print(message, file=sys.stderr, flush=True)


def preprocess(
    request: PreprocessRequest,
    tokenizer: Tokenizer,
    say: Callable[[str], None] = say_on_stderr,
) -> Summary:
    """Run one preprocessing job.

    Args:
        request: inputs, outputs and options.
        tokenizer: makes the ids.
        say: receives progress lines.

    Raises:
        UserError: no input, no EOD although asked for, no such key, nothing to write.
        DamagedError: a malformed record, unless those are skipped.
    """
    if request.workers < 1 or request.partitions < 1 or request.log_interval < 1:
        raise UserError("--workers, --partitions and --log-interval must be at least 1")
    if request.workers % request.partitions:
        raise UserError(
            f"--workers {request.workers} must be a multiple of --partitions {request.partitions}"
        )
    unusable = [key for key in request.json_keys if not key or "/" in key]
    if unusable:
        raise UserError(
            f"--json-keys {' '.join(map(repr, unusable))}: a key is part of a file's name, so it "
            "cannot be empty or contain '/'"
        )
    encoder = _build_encoder(request, tokenizer)
    paths = find_inputs(request.input)
    progress = _Progress(request.log_interval, say)
    with ExitStack() as stack:
        outputs = _Outputs(request, tokenizer, stack)
        chunks = read_chunks(paths, request.partitions)
        for encoded in encode_chunks(encoder, chunks, request.workers):
            outputs.add(encoded)
            documents = max(len(part.lengths) for part in encoded.keys.values())
            progress.add(documents, encoded.num_bytes)
        outputs.check_not_empty()
        return outputs.publish()


def find_best_workers(
    request: PreprocessRequest,
    tokenizer: Tokenizer,
    candidates: Iterable[int],
    max_documents: int,
    say: Callable[[str], None] = say_on_stderr,
) -> int:
    """Time each number of workers on the first documents, writing nothing.

    Returns:
        The fastest number.
    """
    encoder = _build_encoder(request, tokenizer)
    paths = find_inputs(request.input)
    rates: dict[int, float] = {}
    for workers in candidates:
        start = time.perf_counter()
        documents = 0
        with closing(encode_chunks(encoder, read_chunks(paths), workers)) as results:
            for encoded in results:
                documents += max(len(part.lengths) for part in encoded.keys.values())
                if documents >= max_documents:
                    break
        rates[workers] = documents / max(time.perf_counter() - start, 1e-9)
        say(f"{workers} workers: {rates[workers]:.1f} docs/s")
    best = max(rates, key=lambda workers: rates[workers])
    say(f"best: --workers {best}")
    return best


def _build_encoder(request: PreprocessRequest, tokenizer: Tokenizer) -> ChunkEncoder:
    if request.append_eod and tokenizer.find_special("eod") is None:
        raise UserError(
            f"--append-eod: {tokenizer.name} has no EOD token; train the model with an end "
            f"token, or name an id of its vocabulary with --eod-id N"
        )
    return ChunkEncoder(tokenizer, request.json_keys, request.append_eod, request.skip_bad_records)
