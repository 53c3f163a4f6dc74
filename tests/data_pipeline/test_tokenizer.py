"""Tokenizers: special tokens never lie, texts round-trip, unusable ones are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.data.tokenizer import (
    MissingTokenError,
    SentencePieceTokenizer,
    TextError,
    Tokenizer,
    build_tokenizer,
)
from megatron_lite.data.train_tokenizer import train_tokenizer
from megatron_lite.errors import UserError
from tests.data_pipeline.corpora import Settings, write_jsonl

TEXTS = [
    "def f(x):\n    return x  # a comment\n",
    "\tTabs and  two spaces\r\n\r\n",
    "  leading and trailing  ",
    "naïve — “quotes” 北京 \U0001f600 \u2028 \x00 \ufeff",
    "a literal \u2581 space mark\u2581\u2581",
    "</s> <unk> <0x41> 1234567890",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of the default options, trained on Python sources."""
    folder = tmp_path_factory.mktemp("tokenizer")
    source = Path(json.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in sorted(source.glob("*.py"))]
    corpus = write_jsonl(folder / "c.jsonl", [{"text": text} for text in texts])
    assert train_tokenizer(corpus, str(folder / "tok"), 600) == 600
    return str(folder / "tok.model")


def train_model(folder: Path, **options: Any) -> str:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one two three four", "five six seven eight"] * 10),
        model_prefix=str(folder / "m"),
        vocab_size=40,
        model_type="bpe",
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return str(folder / "m.model")


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_round_trips_with_the_default_training(trained: str, text: str) -> None:
    tokenizer = SentencePieceTokenizer(trained)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "x"])[0] == ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.eod not in ids


def test_sources_round_trip_and_the_tokenizer_compresses(trained: str) -> None:
    tokenizer = SentencePieceTokenizer(trained)
    text = Path(json.__file__).read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < 0.6 * len(text)


def test_c012_sentencepiece_special_tokens_are_the_models_own(tmp_path: Path) -> None:
    path = train_model(tmp_path, pad_id=0, bos_id=1, eos_id=2, unk_id=3)
    tokenizer = SentencePieceTokenizer(path)
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eod, tokenizer.unk) == (0, 1, 2, 3)


def test_c012_a_missing_special_token_is_a_named_error() -> None:
    tokenizer = Tokenizer("OnlyEnd", 10, {"eod": 7})
    assert tokenizer.eod == 7
    for kind in ("bos", "pad", "unk"):
        with pytest.raises(MissingTokenError, match=f"OnlyEnd has no {kind} token"):
            getattr(tokenizer, kind)
    assert tokenizer.find_special("bos") is None


def test_eod_can_be_named_for_a_model_without_end_token(tmp_path: Path) -> None:
    path = train_model(tmp_path, eos_id=-1)
    assert SentencePieceTokenizer(path).find_special("eod") is None
    assert SentencePieceTokenizer(path, eod=5).eod == 5
    with pytest.raises(UserError, match="outside the vocabulary"):
        SentencePieceTokenizer(path, eod=5000)


def test_a_model_with_dummy_prefix_keeps_sentencepieces_own_ids(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(train_model(tmp_path, byte_fallback=False))
    model: Any = tokenizer._model
    for text in ("one two", "one\u2581two"):
        assert tokenizer.encode(text) == model.encode(text)


@pytest.mark.parametrize(
    "name", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"]
)
def test_megatrons_names_of_sentencepiece_models_are_served(trained: str, name: str) -> None:
    tokenizer = build_tokenizer(Settings(tokenizer_type=name, tokenizer_model=trained))
    assert tokenizer.name == name
    plain = SentencePieceTokenizer(trained).encode("def f")
    bos = [tokenizer.bos] if name == "Llama2Tokenizer" else []
    assert tokenizer.encode("def f") == bos + plain
    assert tokenizer.encode("") == []
    assert tokenizer.decode(bos + plain) == "def f"
    facts = tokenizer.fingerprint()
    assert json.loads(json.dumps(facts)) == facts and len(facts["model_sha256"]) == 64


def test_byte_level_ids_are_bytes() -> None:
    tokenizer = build_tokenizer(Settings(tokenizer_type="ByteLevelTokenizer"))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (512, 256, 257)
    for text in TEXTS:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod]) == text


def test_null_tokenizer_reads_integers_of_exactly_its_vocabulary() -> None:
    tokenizer = build_tokenizer(Settings(tokenizer_type="NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.encode("5 0  99\n") == [5, 0, 99]
    assert tokenizer.decode([5, 0, 99]) == "5 0 99"
    for text in ("100", "-1", "1 x"):
        with pytest.raises(TextError):
            tokenizer.encode(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(), "--tokenizer-type is required"),
        (Settings(tokenizer_type="HuggingFaceTokenizer"), "not supported"),
        (Settings(tokenizer_type="GPT2BPETokenizer"), "supported: SentencePieceTokenizer"),
        (Settings(tokenizer_type="SentencePieceTokenizer"), "needs --tokenizer-model"),
        (Settings(tokenizer_type="NullTokenizer"), "needs --vocab-size"),
        (
            Settings(tokenizer_type="Llama2Tokenizer", tokenizer_model="absent.model"),
            "absent.model: no such file",
        ),
        (
            Settings(tokenizer_type="Llama2Tokenizer", tokenizer_model=__file__),
            "not a SentencePiece model",
        ),
    ],
)
def test_an_unusable_tokenizer_is_refused(settings: Settings, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build_tokenizer(settings)
    assert caught.value.exit_code == 2


def test_an_impossible_vocabulary_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": "too little text"}])
    with pytest.raises(UserError, match="--vocab-size 8000"):
        train_tokenizer(corpus, str(tmp_path / "tok"), 8000)
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]
