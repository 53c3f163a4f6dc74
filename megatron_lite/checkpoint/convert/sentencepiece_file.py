"""What a SentencePiece model file says, read without the protobuf library.

The file is one protocol-buffer message: pieces (field 1), the trainer's settings (2) and
the normaliser's (3). Only the fields that a conversion needs are read. Torch-free.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.errors import UserError

UNIGRAM, BPE = 1, 2  # kinds of models
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of pieces; 5 unused, 6 byte
MAX_MODEL_BYTES = 2**28
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


@dataclass(frozen=True)
class Piece:
    """One id of the vocabulary."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceFile:
    """A model; ids of special pieces are -1 where there is none."""

    pieces: tuple[Piece, ...]
    model_type: int
    byte_fallback: bool
    unk: int
    bos: int
    eos: int
    pad: int
    charsmap: bytes
    dummy_prefix: bool
    remove_extra_spaces: bool


def read_sentencepiece(path: Path) -> SentencePieceFile:
    """Read a `.model` file.

    Raises:
        UserError: no such file, or not of this format.
    """
    if not path.is_file() or path.stat().st_size > MAX_MODEL_BYTES:
        raise UserError(f"{path}: no such file, or too large for a tokenizer's model")
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = tuple(_piece(value) for number, value in fields if number == 1)
        trainer, normalizer = (
            dict(_fields(b"".join(value for number, value in fields if number == wanted)))
            for wanted in (2, 3)
        )
    except (ValueError, IndexError, TypeError, struct.error) as error:
        raise UserError(f"{path}: not a SentencePiece model ({error})") from None
    if not pieces:
        raise UserError(f"{path}: not a SentencePiece model (it has no pieces)")
    special = (_signed(trainer.get(40 + i, default)) for i, default in enumerate((0, 1, 2, -1)))
    unk, bos, eos, pad = (number if number < len(pieces) else -1 for number in special)
    return SentencePieceFile(
        pieces=pieces,
        model_type=trainer.get(3, UNIGRAM),
        byte_fallback=bool(trainer.get(35, 0)),
        unk=unk,
        bos=bos,
        eos=eos,
        pad=pad,
        charsmap=normalizer.get(2, b""),
        dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_spaces=bool(normalizer.get(4, 1)),
    )


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", fields.get(2, b"\0\0\0\0"))
    return Piece(fields.get(1, b"").decode("utf-8"), score, fields.get(3, NORMAL))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of one message; nested messages come as bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, position = _varint(data, position)
            yield number, value
            continue
        if kind not in (FIXED64, BYTES, FIXED32):
            raise ValueError(f"wire type {kind}")
        length = {FIXED64: 8, FIXED32: 4}.get(kind, 0)
        if kind == BYTES:
            length, position = _varint(data, position)
        if position + length > len(data):
            raise ValueError("ends inside a field")
        yield number, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("number without end")
