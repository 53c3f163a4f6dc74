"""Collected corpora: filters, duplicates, order, limits; and the small tools end to end."""

import hashlib
import json
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.corpus import CorpusFilter, collect_corpus
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.inspection import verify_tokens
from megatron_lite.data.writer import DatasetWriter
from megatron_lite.errors import DamagedError, UserError
from tests.data_pipeline.corpora import write_dataset

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def tool(name: str) -> Callable[[list[str]], int]:
    main: Callable[[list[str]], int] = runpy.run_path(str(TOOLS / f"{name}.py"))["main"]
    return main


def fill(folder: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(folder)


def read(path: Path) -> list[dict[str, str]]:
    lines = path.read_bytes().decode().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def text(letter: str, size: int = 100) -> bytes:
    return (letter * size).encode()


def test_files_are_filtered_deduplicated_and_ordered_by_hash(tmp_path: Path) -> None:
    folder = fill(
        tmp_path / "src",
        {
            "a.py": text("a"),
            "sub/copy_of_a.py": text("a"),
            "sub/b.md": text("b"),
            "c.rst": "naïve \u2028 ".encode() * 20,
            "small.txt": b"x" * 63,
            "limit.txt": b"y" * 64,
            "large.py": text("l", (1 << 20) + 1),
            "latin.txt": b"caf\xe9 " * 20,
            "image.png": text("p"),
            "__pycache__/d.py": text("d"),
            ".git/e.py": text("e"),
            "site-packages/f.py": text("f"),
        },
    )
    report = collect_corpus([folder], str(tmp_path / "c.jsonl"), CorpusFilter())
    records = read(tmp_path / "c.jsonl")
    assert {r["path"] for r in records} == {"a.py", "sub/b.md", "c.rst", "limit.txt"}
    hashes = [hashlib.sha256(r["text"].encode()).hexdigest() for r in records]
    assert hashes == sorted(hashes)
    assert report.skipped == {"duplicate": 1, "size": 2, "not UTF-8": 1}
    assert report.documents == 4


def test_limit_prefers_earlier_folders(tmp_path: Path) -> None:
    first = fill(tmp_path / "one", {f"{i}.py": text(str(i)) for i in range(5)})
    second = fill(tmp_path / "two", {f"{c}.py": text(c) for c in "abcde"})
    collect_corpus([first, second], str(tmp_path / "c.jsonl"), CorpusFilter(), max_bytes=750)
    paths = [r["path"] for r in read(tmp_path / "c.jsonl")]
    assert len(paths) == 7
    assert {f"{i}.py" for i in range(5)} < set(paths)


def test_nothing_to_collect_is_refused(tmp_path: Path) -> None:
    empty = fill(tmp_path / "src", {"a.png": text("a")})
    with pytest.raises(UserError, match="no text found"):
        collect_corpus([empty], str(tmp_path / "c.jsonl"), CorpusFilter())
    with pytest.raises(UserError, match="no such folder"):
        collect_corpus([str(tmp_path / "absent")], str(tmp_path / "c.jsonl"), CorpusFilter())


def test_collect_tool_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fill(tmp_path / "src", {"a.py": text("a"), "b.tex": text("b")})
    output = str(tmp_path / "c.jsonl")
    collect = tool("collect_corpus")
    assert collect([folder, "--output", output, "--suffixes", "tex", ".py"]) == 0
    assert "2 documents, 200 bytes" in capsys.readouterr().out
    assert collect([str(tmp_path / "absent"), "--output", output]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_merge_tool_takes_a_folder_in_sorted_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    write_dataset(folder / "b", [[2]])
    write_dataset(folder / "a", [[1]])
    merge = tool("merge_datasets")
    assert merge(["--input", str(folder), "--output-prefix", str(tmp_path / "m")]) == 0
    merged = IndexedDataset(tmp_path / "m")
    assert [merged.document(i).tolist() for i in range(2)] == [[1], [2]]
    (folder / "c.idx").write_bytes(b"")
    assert merge(["--input", str(folder), "--output-prefix", str(tmp_path / "m")]) == 2
    assert "no .bin and .idx pair" in capsys.readouterr().err


def test_inspect_tool_prints_verifies_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_dataset(tmp_path / "a", [[1, 2, 3], [4]], recorded_vocab_size=256)
    b = write_dataset(tmp_path / "b", [[1, 2, 3], [5]])
    inspect = tool("inspect_dataset")
    assert inspect([a, "--verify", "--documents", "0", "1"]) == 0
    out = capsys.readouterr().out
    assert "document 0: 1 2 3" in out and "documents  2" in out and "verified" in out
    assert inspect([a, "--compare", a]) == 0
    assert inspect([a, "--compare", b]) == 1
    assert "token 3 (sequence 1): 4 and 5" in capsys.readouterr().out
    assert inspect([a, "--verify", "--vocab-size", "4"]) == 3
    assert inspect([str(tmp_path / "absent")]) == 2
    Path(f"{b}.bin").write_bytes(b"\0")
    assert inspect([b]) == 3
    assert capsys.readouterr().err.count("error: ") == 3


def test_train_tool_writes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fill(
        tmp_path / "src", {f"{i}.py": f"def f{i}(): return {i}\n".encode() * 9 for i in range(9)}
    )
    corpus = str(tmp_path / "c.jsonl")
    assert tool("collect_corpus")([folder, "--output", corpus]) == 0
    arguments = ["--input", corpus, "--vocab-size", "290", "--output-prefix", str(tmp_path / "t")]
    assert tool("train_tokenizer")(arguments) == 0
    assert (tmp_path / "t.model").is_file()
    assert "290 ids" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("preprocess_data", "--input c --tokenizer-type ByteLevelTokenizer --workers 1"),
        ("train_tokenizer", "--input c --vocab-size 300"),
        ("merge_datasets", "--input c"),
    ],
)
def test_an_empty_output_prefix_is_refused(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c").write_text('{"text": "x"}')
    arguments = [str(tmp_path / "c") if word == "c" else word for word in words.split()]
    assert tool(name)([*arguments, "--output-prefix", ""]) == 2
    assert "--output-prefix is empty" in capsys.readouterr().err


def test_no_workers_are_not_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c").write_text('{"text": "x"}')
    words = f"--input {tmp_path}/c --output-prefix {tmp_path}/o --tokenizer-type ByteLevelTokenizer"
    assert tool("preprocess_data")([*words.split(), "--workers", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err


def test_a_merge_never_replaces_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset("a", [[1, 2]])
    write_dataset("b", [[3]])
    assert tool("merge_datasets")(["--input", "./a", "b", "--output-prefix", "a"]) == 2
    assert "also an input" in capsys.readouterr().err


def test_verified_words_of_empty_and_negative_data(tmp_path: Path) -> None:
    assert "no tokens" in verify_tokens(IndexedDataset(write_dataset(tmp_path / "e", [])), None)
    with DatasetWriter(tmp_path / "n", np.int32) as writer:
        writer.add_document([-1])
        writer.finalize()
    with pytest.raises(DamagedError, match="is id -1, below 0"):
        verify_tokens(IndexedDataset(tmp_path / "n"), None)
