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
from megatron_lite.data.tokenizer import BOS_NAME, SPACE_MARK
from megatron_lite.errors import UserError

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
MAX_GENERATION_BYTES = 2**20
NO_LENGTH_LIMIT = 10**30  # Hugging Face's "no limit"
MODEL_BPE, MODEL_UNIGRAM = 2, 1  # SentencePiece's model_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of pieces


def find_assets(directory: Path) -> dict[str, Path | bytes]:
    """Return the tokenizer and generation files of a directory, by name.

    Raises:
        DamagedError: one of them is a link that leads elsewhere.
    """
    found = {name: locate(directory, name) for name in ASSET_FILES}
    return {name: path for name, path in found.items() if path is not None}


def asset_bytes(asset: Path | bytes) -> bytes:
    """Return the content of an asset."""
    return asset if isinstance(asset, bytes) else asset.read_bytes()


def sentencepiece_assets(path: Path, tokenizer_type: str) -> dict[str, Path | bytes]:
    """Return the files with which AutoTokenizer opens one of our SentencePiece models.

    Args:
        path: the `.model` file.
        tokenizer_type: Llama2Tokenizer begins every text with BOS, also there.

    Raises:
        UserError: no such file, or no SentencePiece model.
    """
    proto = _model_proto(path)
    begins = tokenizer_type == BOS_NAME
    files: dict[str, Path | bytes] = {
        SENTENCEPIECE_FILE: path,
        CONFIG_FILE: _encode(_tokenizer_config(proto, begins)),
    }
    if _is_expressible(proto):
        files["tokenizer.json"] = _encode(_tokenizer_json(proto, begins))
    return files


def special_ids(assets: Mapping[str, Path | bytes]) -> dict[str, Any]:
    """Return bos_token_id and eos_token_id of the assets, for config.json."""
    if GENERATION_FILE in assets:
        try:
            value = json.loads(asset_bytes(assets[GENERATION_FILE])[:MAX_GENERATION_BYTES])
        except ValueError:
            value = {}
        if isinstance(value, dict):
            names = ("bos_token_id", "eos_token_id", "pad_token_id")
            return {name: value[name] for name in names if name in value}
    model = assets.get(SENTENCEPIECE_FILE)
    if isinstance(model, Path):
        trainer = _model_proto(model).trainer_spec
        ids = {"bos_token_id": trainer.bos_id, "eos_token_id": trainer.eos_id}
        return {name: number for name, number in ids.items() if number >= 0}
    return {}


def sentencepiece_size(path: Path) -> int:
    """Return the number of pieces of a SentencePiece model."""
    return len(_model_proto(path).pieces)


def _model_proto(path: Path) -> Any:
    from sentencepiece import sentencepiece_model_pb2 as messages

    if not path.is_file():
        raise UserError(f"{path}: no such file (the tokenizer of the model)")
    proto: Any = messages.ModelProto()  # type: ignore[attr-defined, unused-ignore]
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's own type, whose home differs between its versions
        raise UserError(f"{path}: not a SentencePiece model ({error})") from None
    return proto


def _is_expressible(proto: Any) -> bool:
    """Whether identity normalisation lets tokenizer.json say what the model does."""
    normalizer = proto.normalizer_spec
    return (
        not normalizer.precompiled_charsmap
        and not normalizer.remove_extra_whitespaces
        and proto.trainer_spec.model_type in (MODEL_BPE, MODEL_UNIGRAM)
    )


def _tokenizer_config(proto: Any, begins: bool) -> dict[str, Any]:
    trainer = proto.trainer_spec
    named = {
        "bos_token": trainer.bos_id,
        "eos_token": trainer.eos_id,
        "pad_token": trainer.pad_id,
        "unk_token": trainer.unk_id,
    }
    expressible = _is_expressible(proto)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast" if expressible else "LlamaTokenizer",
        "clean_up_tokenization_spaces": False,
        "model_max_length": NO_LENGTH_LIMIT,
        "add_bos_token": begins,
        "add_eos_token": False,
    }
    pieces = proto.pieces
    return config | {name: pieces[i].piece if i >= 0 else None for name, i in named.items()}


def _tokenizer_json(proto: Any, begins: bool) -> dict[str, Any]:
    pieces, normalizer = proto.pieces, proto.normalizer_spec
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    steps = [{"type": "Prepend", "prepend": SPACE_MARK}] if normalizer.add_dummy_prefix else []
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if normalizer.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": piece.piece,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": piece.type != USER_DEFINED,
            }
            for number, piece in enumerate(pieces)
            if piece.type in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [*steps, mark]},
        "pre_tokenizer": None,
        "post_processor": _post_processor(proto) if begins else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(proto),
    }


def _model(proto: Any) -> dict[str, Any]:
    pieces, trainer = proto.pieces, proto.trainer_spec
    if trainer.model_type == MODEL_UNIGRAM:
        return {
            "type": "Unigram",
            "unk_id": trainer.unk_id,
            "vocab": [[piece.piece, piece.score] for piece in pieces],
            "byte_fallback": trainer.byte_fallback,
        }
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": pieces[trainer.unk_id].piece,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": trainer.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.piece: number for number, piece in enumerate(pieces)},
        "merges": bpe_merges({p.piece: p.score for p in pieces if p.type == NORMAL}),
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


def _post_processor(proto: Any) -> dict[str, Any]:
    bos = proto.trainer_spec.bos_id
    token = proto.pieces[bos].piece
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
