"""Tokenizer files go along, and our own tokenizers open with AutoTokenizer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lite.checkpoint.convert.hf_read import read_hf
from megatron_lite.checkpoint.convert.hf_write import write_hf
from megatron_lite.checkpoint.convert.native import read_native, write_native
from megatron_lite.checkpoint.convert.sentencepiece_file import read_sentencepiece
from megatron_lite.checkpoint.convert.tokenizer_files import asset_bytes, sentencepiece_assets
from megatron_lite.checkpoint.direct import write_directly
from megatron_lite.checkpoint.state import converted_state
from megatron_lite.checkpoint.strict_json import plain_json
from megatron_lite.config.resolve import resolved_values
from megatron_lite.data.tokenizer import SentencePieceTokenizer
from megatron_lite.data.train_tokenizer import train_tokenizer
from megatron_lite.errors import UserError
from tests.checkpoint.convert.peers import save_peer, transformers
from tests.checkpoint.convert.test_hf_cases import LLAMA, random_bundle
from tools.convert_checkpoint import main
from tools.generate import main as generate

CARRIED = {
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"tokenizer_class": "X"}',
    "special_tokens_map.json": b"{}",
    "vocab.json": b"{}",
    "merges.txt": b"#version: 0.2\n",
    "chat_template.jinja": b"{{ messages }}",
    "generation_config.json": b'{"eos_token_id": [7, 8], "temperature": 0.6}',
}
TEXTS = (
    "Hello world",
    "  leading and trailing  ",
    "def f(x):\n        return x + 1\n\n\n",
    "tabs\t\tand    runs of    spaces",
    "aaaaaaaaaaa bbbbbbb",
    "numbers 1234567890",
    "h\u00e9llo \u65e5\u672c\u8a9e \U0001f389 \u20ac",
    "\n",
    " ",
)


def train(folder: Path, kind: str) -> Path:
    """A lossless SentencePiece model of ours, trained on this project's own sources."""
    corpus = folder / "corpus.jsonl"
    root = Path(__file__).resolve().parents[3] / "megatron_lite"
    sources = sorted((root / "config").glob("*.py")) + sorted((root / "mesh").glob("*.py"))
    corpus.write_text("".join(json.dumps({"text": p.read_text()}) + "\n" for p in sources))
    train_tokenizer(str(corpus), str(folder / kind), 600, model_type=kind)
    return folder / f"{kind}.model"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {kind: train(folder, kind) for kind in ("bpe", "unigram")}


def test_files_of_the_source_come_back_as_they_were(tmp_path: Path) -> None:
    source, native, back = (tmp_path / name for name in ("hf", "native", "back"))
    save_peer(source, "qwen2")
    for name, content in CARRIED.items():
        (source / name).write_bytes(content)
    write_native(read_hf(source), native)
    assert {p.name for p in (native / "tokenizer").iterdir()} == CARRIED.keys()
    write_hf(read_native(native), back)
    assert {name: (back / name).read_bytes() for name in CARRIED} == CARRIED
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == [7, 8]


@pytest.mark.parametrize("name", ["SentencePieceTokenizer", "Llama2Tokenizer"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_auto_tokenizer_encodes_and_decodes_like_ours(
    tmp_path: Path, models: dict[str, Path], kind: str, name: str
) -> None:
    for file, asset in sentencepiece_assets(models[kind], name).items():
        (tmp_path / file).write_bytes(asset_bytes(asset))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = SentencePieceTokenizer(str(models[kind]), name)
    assert len(theirs) == ours.vocab_size
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos, ours.eod)
    whole = Path(__file__).read_text()
    for text in (*TEXTS, whole):
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode(text)
        assert theirs.decode(ids, skip_special_tokens=True) == text


def test_a_model_trained_with_our_tokenizer_opens_whole(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    native, target = tmp_path / "native", tmp_path / "hf"
    chosen = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(models["bpe"])}
    bundle = random_bundle(LLAMA)
    config = replace(bundle.config, **chosen)
    write_native(replace(bundle, config=config), native)
    line = f"--from native --to hf --load-dir {native} --save-dir {target}"
    assert main(line.split()) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(target).config.eos_token_id == 2
    theirs = transformers.AutoTokenizer.from_pretrained(target)
    ours = SentencePieceTokenizer(str(models["bpe"]))
    assert all(theirs(text)["input_ids"] == ours.encode(text) for text in TEXTS)


def test_a_tokenizer_that_has_changed_since_the_run_does_not_go_along(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    model = tmp_path / "tok.model"
    model.write_bytes(models["bpe"].read_bytes())
    chosen = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(model)}
    bundle = random_bundle(replace(LLAMA, **chosen, micro_batch_size=1, train_iters=1))
    config = plain_json(resolved_values(bundle.config, 1))
    state = converted_state(config, bundle.model, "x")
    state["facts"]["tokenizer_type"] = SentencePieceTokenizer(str(model)).fingerprint()
    write_directly(tmp_path / "run", 5, bundle.tensors.values(), plain_json(state))
    assert read_native(tmp_path / "run").assets.keys() >= {"tokenizer.model", "tokenizer.json"}
    model.write_bytes(models["unigram"].read_bytes())
    found = read_native(tmp_path / "run")
    assert not found.assets and "is not the tokenizer of the run" in found.notes[-1]


def test_a_sentencepiece_model_of_the_source_serves_the_converted_checkpoint(
    tmp_path: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, native = tmp_path / "hf", tmp_path / "native"
    save_peer(source, "llama", vocab_size=600)
    (source / "tokenizer.model").write_bytes(models["bpe"].read_bytes())
    write_native(read_hf(source), native)
    config = read_native(native).config
    assert config.tokenizer_type == "SentencePieceTokenizer"
    assert config.tokenizer_model == str(native / "tokenizer" / "tokenizer.model")
    line = f"--load {native} --greedy --max-new-tokens 4 --device cpu --prompt import"
    assert generate(line.split()) == 0
    assert "import" in capsys.readouterr().out


def test_a_directory_of_tokenizer_files_can_be_named(
    tmp_path: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, folder = (tmp_path / name for name in ("hf", "out", "tok"))
    save_peer(source, "llama")
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(models["bpe"].read_bytes())
    line = f"--from hf --to hf --load-dir {source} --save-dir {target} --tokenizer-dir {folder}"
    assert main(line.split()) == 0
    assert (target / "tokenizer.json").is_file()
    assert "has 600 pieces, the model 100" in capsys.readouterr().err


def test_the_model_file_is_read_as_sentencepiece_reads_it(models: dict[str, Path]) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    for path in models.values():
        found, model = read_sentencepiece(path), sentencepiece.SentencePieceProcessor()
        model.Load(str(path))
        assert len(found.pieces) == model.get_piece_size()
        ids = (model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id())
        assert (found.unk, found.bos, found.eos, found.pad) == ids
        for number, piece in enumerate(found.pieces):
            assert piece.text == model.id_to_piece(number)
            assert piece.score == pytest.approx(model.get_score(number))
        assert (found.charsmap, found.dummy_prefix, found.remove_extra_spaces) == (
            b"",
            False,
            False,
        )


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, b"\x0a\x7fshort", b"{}", b"\x00" * 9])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a SentencePiece model"):
        read_sentencepiece(path)
