"""Tokenizer and generation files that go along with a model, and those of our own models.

Files of a source are carried as they are. A SentencePiece model becomes tokenizer.json in
Hugging Face's form (the byte-pair merges follow from the pieces' scores), so AutoTokenizer
encodes as we do, with two known exceptions: names of control tokens in a text are their
ids there, and a literal U+2581 is a space.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.convert.hf_source import locate
from megatron_lite.checkpoint.convert.sentencepiece_file import (
    BPE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceFile,
    read_sentencepiece,
)
from megatron_lite.checkpoint.files import read_file
from megatron_lite.checkpoint.strict_json import parse_json
from megatron_lite.data.tokenizer import BOS_NAME, SPACE_MARK

ASSET_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
SENTENCEPIECE_FILE = "tokenizer.model"
CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
MAX_ASSET_BYTES = 2**28
NO_LENGTH_LIMIT = 10**30  # Hugging Face's "no limit"


def find_assets(directory: Path) -> dict[str, Path | bytes]:
    """Return the tokenizer and generation files of a directory, by name.

    Raises:
        DamagedError: one of them is a link that leads elsewhere.
    """
    found = {name: locate(directory, name) for name in ASSET_FILES}
    return {name: path for name, path in found.items() if path is not None}


def asset_bytes(asset: Path | bytes) -> bytes:
    """Return the content of an asset."""
    return asset if isinstance(asset, bytes) else read_file(asset, MAX_ASSET_BYTES)


def sentencepiece_assets(path: Path, tokenizer_type: str) -> dict[str, Path | bytes]:
    """Return the files with which AutoTokenizer opens one of our SentencePiece models.

    Args:
        path: the `.model` file.
        tokenizer_type: Llama2Tokenizer begins every text with BOS, also there.

    Raises:
        UserError: no such file, or no SentencePiece model.
    """
    model = read_sentencepiece(path)
    begins = tokenizer_type == BOS_NAME
    files: dict[str, Path | bytes] = {
        SENTENCEPIECE_FILE: path,
        CONFIG_FILE: _encode(_tokenizer_config(model, begins)),
    }
    if _is_expressible(model):
        files["tokenizer.json"] = _encode(_tokenizer_json(model, begins))
    return files


def special_ids(assets: Mapping[str, Path | bytes]) -> dict[str, Any]:
    """Return bos_token_id and eos_token_id of the assets, for config.json."""
    if GENERATION_FILE in assets:
        data = asset_bytes(assets[GENERATION_FILE])
        value = parse_json(data, GENERATION_FILE, MAX_ASSET_BYTES)
        found = value if isinstance(value, dict) else {}
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {name: found[name] for name in names if _are_ids(found.get(name))}
    path = assets.get(SENTENCEPIECE_FILE)
    if isinstance(path, Path):
        model = read_sentencepiece(path)
        ids = {"bos_token_id": model.bos, "eos_token_id": model.eos}
        return {name: number for name, number in ids.items() if number >= 0}
    return {}


def _are_ids(value: Any) -> bool:
    several = value if isinstance(value, list) and value else [value]
    return all(isinstance(item, int) and not isinstance(item, bool) for item in several)


def _is_expressible(model: SentencePieceFile) -> bool:
    """Whether identity normalisation lets tokenizer.json say what the model does."""
    known = model.model_type in (BPE, UNIGRAM)
    return known and not model.charsmap and not model.remove_extra_spaces


def _tokenizer_config(model: SentencePieceFile, begins: bool) -> dict[str, Any]:
    named = {
        "bos_token": model.bos,
        "eos_token": model.eos,
        "pad_token": model.pad,
        "unk_token": model.unk,
    }
    expressible = _is_expressible(model)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast" if expressible else "LlamaTokenizer",
        "clean_up_tokenization_spaces": False,
        "model_max_length": NO_LENGTH_LIMIT,
        "add_bos_token": begins,
        "add_eos_token": False,
    }
    pieces = model.pieces
    return config | {name: pieces[i].text if i >= 0 else None for name, i in named.items()}


def _tokenizer_json(model: SentencePieceFile, begins: bool) -> dict[str, Any]:
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    steps = [{"type": "Prepend", "prepend": SPACE_MARK}] if model.dummy_prefix else []
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": piece.text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": piece.kind != USER_DEFINED,
            }
            for number, piece in enumerate(model.pieces)
            if piece.kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [*steps, mark]},
        "pre_tokenizer": None,
        "post_processor": _post_processor(model) if begins else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(model),
    }


def _model(model: SentencePieceFile) -> dict[str, Any]:
    pieces = model.pieces
    if model.model_type == UNIGRAM:
        return {
            "type": "Unigram",
            "unk_id": model.unk,
            "vocab": [[piece.text, piece.score] for piece in pieces],
            "byte_fallback": model.byte_fallback,
        }
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": pieces[model.unk].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: number for number, piece in enumerate(pieces)},
        "merges": bpe_merges({p.text: p.score for p in pieces if p.kind == NORMAL}),
    }


def bpe_merges(scores: Mapping[str, float]) -> list[list[str]]:
    """Return the pairs that may merge, best first.

    SentencePiece merges the neighbours whose joined piece scores highest; every way to cut
    a piece into two pieces is therefore a pair, ranked by the score of the whole.
    """
    ranked = sorted(scores.items(), key=lambda item: -item[1])
    return [
        [piece[:cut], piece[cut:]]
        for piece, _ in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]


def _post_processor(model: SentencePieceFile) -> dict[str, Any]:
    bos = model.bos
    token = model.pieces[bos].text
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = [
        {"SpecialToken": {"id": token, "type_id": 1}},
        {"Sequence": {"id": "B", "type_id": 1}},
    ]
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, *second],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }


def _encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
