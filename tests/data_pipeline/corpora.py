"""Small corpora and settings that the data tests share."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatron_lite.data.indexed import token_dtype
from megatron_lite.data.meta import DatasetMeta
from megatron_lite.data.sample_index import IndexPlan, plan_index
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.data.writer import DatasetWriter


@dataclass(frozen=True)
class Settings:
    """The fields of a configuration that datasets and tokenizers read."""

    data_path: tuple[str, ...] | None = None
    split: str | None = "1,0,0"
    train_data_path: tuple[str, ...] | None = None
    valid_data_path: tuple[str, ...] | None = None
    test_data_path: tuple[str, ...] | None = None
    data_args_path: str | None = None
    data_cache_path: str | None = None
    mock_data: bool = False
    mmap_bin_files: bool = True
    mid_level_dataset_surplus: float = 0.005
    eod_mask_loss: bool = False
    seq_length: int = 4
    seed: int = 1234
    require_native: bool = False
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_size: int | None = None


class WordTokenizer(Tokenizer):
    """Fixed words between spaces: a=5, b=6, c=7, EOD=0."""

    WORDS: ClassVar = {"a": 5, "b": 6, "c": 7}

    def __init__(self) -> None:
        super().__init__("WordTokenizer", 8, {"eod": 0})

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self.WORDS[word] for word in text.split()] for text in texts]


def write_dataset(
    prefix: Path | str,
    documents: Sequence[Sequence[int]],
    vocab_size: int = 256,
    recorded_vocab_size: int | None = None,
    eod: int | None = None,
) -> str:
    """Write documents; with `recorded_vocab_size` also the record beside them."""
    with DatasetWriter(prefix, token_dtype(vocab_size)) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype=np.int64))
        meta = None
        if recorded_vocab_size is not None:
            meta = DatasetMeta(
                "NullTokenizer",
                None,
                recorded_vocab_size,
                eod,
                writer.max_token_id,
                writer.num_documents,
                writer.num_tokens,
            )
        writer.finalize(meta)
    return str(prefix)


def write_jsonl(path: Path, records: Sequence[dict[str, Any]]) -> str:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def plan_of(lengths: Sequence[int], sequence_length: int, num_samples: int | None) -> IndexPlan:
    """Plan the index of a whole small dataset."""
    return plan_index(
        num_sequences=len(lengths),
        tokens_per_epoch=sum(lengths),
        max_length=max(lengths),
        sequence_length=sequence_length,
        num_samples=num_samples,
    )
