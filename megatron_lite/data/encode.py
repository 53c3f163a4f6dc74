"""Encode chunks of records, on this process or on several, in input order.

Each worker process has its own queue; chunk i goes to worker i mod n and results are
taken back in the same turn, so the output cannot depend on scheduling. A few chunks per
worker are under way at a time, so memory stays flat on any corpus.
"""

import multiprocessing
import queue
from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.indexed import token_dtype
from megatron_lite.data.records import BadRecordError, Chunk, parse_record
from megatron_lite.data.tokenizer import TextError, Tokenizer
from megatron_lite.errors import DamagedError

CHUNKS_PER_WORKER = 3
SEEN_KEYS_LIMIT = 20
PARENT_CHECK_S = 2.0


@dataclass
class EncodedKey:
    """Documents of one key of one chunk, those without tokens left out."""

    tokens: NDArray[Any]  # [sum of lengths], stored type
    lengths: NDArray[np.int32]  # [documents]
    empty: int
    missing: int


@dataclass
class EncodedChunk:
    """What one chunk gave."""

    partition: int
    num_bytes: int
    keys: dict[str, EncodedKey]
    blank: int = 0
    malformed: int = 0
    seen_keys: set[str] = field(default_factory=set)  # of records that lack a wanted key
    error: str | None = None  # the first malformed record, when those are not skipped


@dataclass(frozen=True)
class ChunkEncoder:
    """Turns chunks into token arrays.

    Args:
        tokenizer: the tokenizer.
        keys: JSON keys to encode, each on its own.
        append_eod: end every document that has tokens with the EOD id.
        skip_bad: count malformed records instead of stopping at the first.
    """

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool
    skip_bad: bool

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Encode one chunk; after an error it holds what came before it."""
        result = EncodedChunk(chunk.partition, chunk.num_bytes, {})
        texts: dict[str, list[str]] = {key: [] for key in self.keys}
        places: dict[str, list[int]] = {key: [] for key in self.keys}
        missing: Counter[str] = Counter()
        for number, line in enumerate(chunk.lines, chunk.first_line):
            if not line.strip():
                result.blank += 1
                continue
            try:
                found, record = parse_record(line, self.keys)
            except BadRecordError as error:
                self._count_bad(result, f"{chunk.path}, line {number}: {error}")
                if result.error:
                    break
                continue
            for key, text in found.items():
                texts[key].append(text)
                places[key].append(number)
            if len(found) < len(self.keys):
                missing.update(key for key in self.keys if key not in found)
                if len(result.seen_keys) < SEEN_KEYS_LIMIT:
                    result.seen_keys.update(record)
        for key in self.keys:
            documents = self._encode_texts(result, chunk.path, texts[key], places[key])
            result.keys[key] = self._pack(documents, missing[key])
        return result

    def _count_bad(self, result: EncodedChunk, message: str) -> None:
        if self.skip_bad:
            result.malformed += 1
        elif result.error is None:
            result.error = message

    def _encode_texts(
        self, result: EncodedChunk, path: str, texts: Sequence[str], places: Sequence[int]
    ) -> list[list[int]]:
        try:
            return self.tokenizer.encode_batch(texts)
        except TextError:
            pass
        # Some text is not acceptable: encode one by one to find which.
        documents = []
        for text, number in zip(texts, places, strict=True):
            try:
                documents.append(self.tokenizer.encode(text))
            except TextError as error:
                self._count_bad(result, f"{path}, line {number}: {error}")
        return documents

    def _pack(self, documents: list[list[int]], missing: int) -> EncodedKey:
        kept = [document for document in documents if document]
        if self.append_eod:
            eod = self.tokenizer.eod
            for document in kept:
                document.append(eod)
        lengths = np.fromiter(map(len, kept), dtype=np.int32, count=len(kept))
        count = int(lengths.sum(dtype=np.int64))
        tokens = np.fromiter(chain.from_iterable(kept), dtype=np.int64, count=count)
        vocab_size = self.tokenizer.vocab_size
        if count and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise DamagedError(
                f"{self.tokenizer.name} gave token id {int(tokens.max())}, its vocabulary "
                f"has {vocab_size}"
            )
        stored = tokens.astype(token_dtype(vocab_size))
        return EncodedKey(stored, lengths, len(documents) - len(kept), missing)


def encode_chunks(
    encoder: ChunkEncoder, chunks: Iterable[Chunk], workers: int
) -> Generator[EncodedChunk, None, None]:
    """Encode chunks in order with a number of processes; 1 stays in this one.

    Raises:
        RuntimeError: a worker process died.
    """
    if workers <= 1:
        yield from map(encoder, chunks)
        return
    team = [_Worker(encoder) for _ in range(workers)]
    try:
        waiting: deque[_Worker] = deque()
        for number, chunk in enumerate(chunks):
            if len(waiting) == workers * CHUNKS_PER_WORKER:
                yield waiting.popleft().receive()
            worker = team[number % workers]
            worker.send(chunk)
            waiting.append(worker)
        while waiting:
            yield waiting.popleft().receive()
    finally:
        for worker in team:
            worker.stop()


class _Worker:
    """One process with its queue of chunks and its pipe of results."""

    def __init__(self, encoder: ChunkEncoder) -> None:
        # A queue in, because a second blocking pipe could leave both ends sending.
        self._chunks: Any = multiprocessing.Queue()
        self._results, results = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.Process(
            target=_serve, args=(encoder, self._chunks, results), daemon=True
        )
        self._process.start()
        results.close()  # the worker holds the only writing end: its death is an end of file

    def send(self, chunk: Chunk) -> None:
        self._chunks.put(chunk)

    def receive(self) -> EncodedChunk:
        try:
            result = self._results.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"a preprocessing worker died (exit code {code})") from None
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, EncodedChunk)
        return result

    def stop(self) -> None:
        self._chunks.cancel_join_thread()
        self._chunks.close()
        self._process.terminate()
        self._process.join()


def _serve(encoder: ChunkEncoder, chunks: Any, results: "Connection[Any, Any]") -> None:
    """Answer chunks until terminated, or until the main process is gone."""
    main_process = multiprocessing.parent_process()
    while True:
        try:
            results.send(encoder(chunks.get(timeout=PARENT_CHECK_S)))
        except queue.Empty:
            # The queue stays open in this process, so a killed parent shows nowhere else.
            if main_process is None or not main_process.is_alive():
                return
        except (KeyboardInterrupt, BrokenPipeError):
            return
        except Exception as error:
            results.send(error)
