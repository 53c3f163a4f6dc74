"""Train a SentencePiece model on a JSON-lines corpus, lossless by construction.

Identity normalisation and byte fallback make every text round-trip; newline is a user
symbol, so lines are trained on one by one and never join into one piece.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_lite.data.exits import check_output_prefix
from megatron_lite.data.records import BadRecordError, find_inputs, parse_record, read_chunks
from megatron_lite.errors import DamagedError, UserError

MAX_LINE_BYTES = 1 << 16
LOSSLESS_OPTIONS: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "byte_fallback": True,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "user_defined_symbols": ["\n"],
    "character_coverage": 0.9995,
}


def train_tokenizer(
    pattern: str,
    output_prefix: str,
    vocab_size: int,
    *,
    key: str = "text",
    model_type: str = "bpe",
    max_bytes: int | None = None,
    num_threads: int = 4,
    skip_bad: bool = False,
) -> int:
    """Train and write PREFIX.model and PREFIX.vocab.

    Args:
        pattern: JSON-lines file or glob.
        output_prefix: path without suffix.
        vocab_size: number of ids, at least 256 bytes plus special tokens.
        key: key of the text.
        model_type: "bpe" or "unigram".
        max_bytes: train on the first so many bytes of text.
        num_threads: training threads; the model does not depend on them.
        skip_bad: leave out malformed lines.

    Returns:
        The number of ids of the model.

    Raises:
        UserError: no text, or a vocabulary that this corpus cannot give.
        DamagedError: a malformed line.
    """
    import sentencepiece

    paths = find_inputs(pattern)
    check_output_prefix(output_prefix)
    target = Path(output_prefix)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    lines = corpus_lines(paths, key, max_bytes, skip_bad)
    first = next(lines, None)
    if first is None:
        raise UserError(f"{pattern}: no text under the key {key!r}")

    def sentences() -> Iterator[str]:
        yield first
        yield from lines

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(),
            model_prefix=str(temporary),
            model_type=model_type,
            vocab_size=vocab_size,
            num_threads=num_threads,
            max_sentence_length=MAX_LINE_BYTES,
            minloglevel=2,
            **LOSSLESS_OPTIONS,
        )
        for suffix in (".vocab", ".model"):
            Path(f"{temporary}{suffix}").replace(f"{target}{suffix}")
    except RuntimeError as error:
        raise UserError(f"--vocab-size {vocab_size}: SentencePiece refused: {error}") from None
    finally:
        for suffix in (".vocab", ".model"):
            Path(f"{temporary}{suffix}").unlink(missing_ok=True)
    model = sentencepiece.SentencePieceProcessor(model_file=f"{target}.model")
    return int(model.get_piece_size())


def corpus_lines(
    paths: list[str], key: str, max_bytes: int | None, skip_bad: bool
) -> Iterator[str]:
    """Yield the non-empty lines of all texts, cut where one is very long.

    Raises:
        DamagedError: a malformed record that is not to be skipped.
    """
    used = 0
    for chunk in read_chunks(paths):
        for number, line in enumerate(chunk.lines, chunk.first_line):
            if not line.strip():
                continue
            try:
                text = parse_record(line, (key,))[0].get(key, "")
            except BadRecordError as error:
                if skip_bad:
                    continue
                raise DamagedError(f"{chunk.path}, line {number}: {error}") from None
            used += len(text.encode("utf-8"))
            if max_bytes is not None and used > max_bytes:
                return
            # A quarter of the limit in characters stays below it in bytes.
            step = MAX_LINE_BYTES // 4
            for part in text.split("\n"):
                yield from (part[i : i + step] for i in range(0, len(part), step))
