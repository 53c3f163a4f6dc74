"""Tokenizers: text to ids and back, with special tokens that never lie.

A special token that a tokenizer does not have is an error with a name, never another
token's id. SentencePiece models serve Megatron's names SentencePieceTokenizer,
GPTSentencePieceTokenizer and Llama2Tokenizer (the last puts BOS before every text, as
there); ByteLevelTokenizer and NullTokenizer need no file.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_lite.errors import UserError

SENTENCEPIECE_NAMES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
# Megatron's class of this name begins every text with BOS.
BOS_NAME = "Llama2Tokenizer"
TOKENIZER_TYPES = (*SENTENCEPIECE_NAMES, "ByteLevelTokenizer", "NullTokenizer")
# SentencePiece writes spaces as this character, so a literal one needs care.
SPACE_MARK = "\u2581"


class TokenizerSettings(Protocol):
    """The part of the configuration that chooses a tokenizer."""

    @property
    def tokenizer_type(self) -> str | None: ...
    @property
    def tokenizer_model(self) -> str | None: ...
    @property
    def vocab_size(self) -> int | None: ...


class MissingTokenError(UserError):
    """The tokenizer has no such special token."""


class TextError(UserError):
    """A text that this tokenizer cannot encode."""


class Tokenizer:
    """Common surface; subclasses supply `vocab_size`, `encode_batch` and `decode`.

    Args:
        name: the `--tokenizer-type` it answers to.
        vocab_size: number of ids.
        special: ids of those of eod, pad, bos, unk that exist.
        model_sha256: hash of the model file, None without one.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        special: Mapping[str, int],
        model_sha256: str | None = None,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.model_sha256 = model_sha256
        self._special = dict(special)

    def find_special(self, kind: str) -> int | None:
        """Return the id of a special token (eod, pad, bos, unk), None where there is none."""
        return self._special.get(kind)

    def special(self, kind: str) -> int:
        """Return the id of a special token.

        Raises:
            MissingTokenError: this tokenizer has none.
        """
        found = self.find_special(kind)
        if found is None:
            have = ", ".join(f"{k} {i}" for k, i in self._special.items()) or "none"
            raise MissingTokenError(f"{self.name} has no {kind} token (its special tokens: {have})")
        return found

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        return self.special("eod")

    @property
    def pad(self) -> int:
        """Id that fills up."""
        return self.special("pad")

    @property
    def bos(self) -> int:
        """Id that begins a sequence."""
        return self.special("bos")

    @property
    def unk(self) -> int:
        """Id of what cannot be encoded."""
        return self.special("unk")

    def encode(self, text: str) -> list[int]:
        """Encode one text; no special tokens but Llama2Tokenizer's leading BOS."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts on the calling thread."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids back into text."""
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """Describe what gives the ids their meaning, for checkpoints and comparisons."""
        return {
            "type": self.name,
            "model_sha256": self.model_sha256,
            "vocab_size": self.vocab_size,
            "eod": self.find_special("eod"),
        }


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model file; EOD is the model's eos id.

    Args:
        path: the `.model` file.
        name: the tokenizer type under which it was asked for.
        eod: id to use as EOD in place of the model's eos.

    Raises:
        UserError: missing or unreadable model file.
    """

    def __init__(
        self, path: str, name: str = SENTENCEPIECE_NAMES[0], eod: int | None = None
    ) -> None:
        import sentencepiece  # type: ignore[import-untyped, unused-ignore]

        if not Path(path).is_file():
            raise UserError(f"--tokenizer-model {path}: no such file")
        content = Path(path).read_bytes()
        self._model: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"--tokenizer-model {path}: not a SentencePiece model ({error})"
            ) from None
        ids = {
            "pad": self._model.pad_id(),
            "bos": self._model.bos_id(),
            "eod": self._model.eos_id() if eod is None else eod,
            "unk": self._model.unk_id(),
        }
        size = self._model.get_piece_size()
        if ids["eod"] >= size:
            raise UserError(f"EOD id {ids['eod']} is outside the vocabulary of {size} of {path}")
        super().__init__(
            name,
            size,
            {kind: i for kind, i in ids.items() if i >= 0},
            hashlib.sha256(content).hexdigest(),
        )
        self._mark_ids = self._find_mark_ids()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts; a literal space mark survives in models that are lossless otherwise."""
        encoded: list[list[int]] = self._model.encode(list(texts), out_type=int, num_threads=1)
        if self._mark_ids is not None:
            for i, text in enumerate(texts):
                if SPACE_MARK in text:
                    encoded[i] = self._encode_around_marks(text, self._mark_ids)
        if self.name == BOS_NAME:
            return [[self.bos, *ids] if ids else ids for ids in encoded]
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode([int(i) for i in ids])
        return text

    def _encode_around_marks(self, text: str, mark_ids: list[int]) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(text.split(SPACE_MARK)):
            ids += mark_ids if number else []
            ids += self._model.encode(part, out_type=int)
        return ids

    def _find_mark_ids(self) -> list[int] | None:
        """Byte-fallback ids of the space mark, for lossless models only.

        Models with a dummy prefix or normalisation (Llama 2) change text anyway: their ids
        stay exactly what SentencePiece gives.
        """
        pieces = [f"<0x{byte:02X}>" for byte in SPACE_MARK.encode()]
        ids = [self._model.piece_to_id(piece) for piece in pieces]
        if not all(self._model.is_byte(i) for i in ids):
            return None
        probe = "x  a\n\tb  "
        lossless = self._model.decode(self._model.encode(probe)) == probe
        first = self._model.encode("x", out_type=str)[:1]
        prefixed = bool(first) and first[0].startswith(SPACE_MARK)
        return ids if lossless and not prefixed else None


class ByteLevelTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255, EOD 256, pad 257; 512 ids, so every layout divides them."""

    def __init__(self) -> None:
        super().__init__("ByteLevelTokenizer", 512, {"eod": 256, "pad": 257})

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class NullTokenizer(Tokenizer):
    """Text that already is ids, as integers between spaces; EOD is the last id."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__("NullTokenizer", vocab_size, {"eod": vocab_size - 1})

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode_one(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def _encode_one(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise TextError(f"NullTokenizer reads integers between spaces: {error}") from None
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise TextError(
                    f"token id {token} is outside the vocabulary of {self.vocab_size} ids"
                )
        return ids


def build_tokenizer(config: TokenizerSettings, eod: int | None = None) -> Tokenizer:
    """Build the tokenizer that the configuration names.

    Args:
        config: `tokenizer_type`, `tokenizer_model` and `vocab_size`.
        eod: id to use as EOD for a SentencePiece model without one.

    Raises:
        UserError: unknown or unsupported type, missing model or vocabulary size.
    """
    name = config.tokenizer_type
    if name in SENTENCEPIECE_NAMES:
        if not config.tokenizer_model:
            raise UserError(f"--tokenizer-type {name} needs --tokenizer-model FILE.model")
        return SentencePieceTokenizer(config.tokenizer_model, name, eod)
    if name == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if name == "NullTokenizer":
        if config.vocab_size is None or config.vocab_size < 1:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size V (at least 1)")
        return NullTokenizer(config.vocab_size)
    legal = ", ".join(TOKENIZER_TYPES)
    if name is None:
        raise UserError(f"--tokenizer-type is required; supported: {legal}")
    raise UserError(
        f"--tokenizer-type {name} is not supported (only SentencePiece models, bytes and "
        f"integers are read so far); supported: {legal}"
    )
