"""Corpus preprocessing (PREP) as its users run it; single rules stand in tests/data_pipeline."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.indexed import IndexedDataset, token_dtype
from megatron_lite.data.preprocess import PreprocessRequest, preprocess
from megatron_lite.data.records import read_chunks
from megatron_lite.data.tokenizer import ByteLevelTokenizer
from megatron_lite.data.writer import DatasetWriter, merge_datasets
from megatron_lite.errors import DamagedError
from tests.data_pipeline.corpora import write_jsonl
from tests.data_pipeline.test_tokenizer import train_model
from tests.pool import REPOSITORY

BROKEN = '{"text": "one"}\n\n{"body":"x"}\n{"text": "a\n{"text": "two"}\n'
BYTES = "--tokenizer-type ByteLevelTokenizer --append-eod"


def run_tool(source: Path, output: Path, text: str) -> "subprocess.CompletedProcess[str]":
    tool = REPOSITORY / "tools" / "preprocess_data.py"
    words = ["--input", str(source), "--output-prefix", str(output), *text.split()]
    return subprocess.run(
        [sys.executable, tool, *words], capture_output=True, text=True, check=False, timeout=60
    )


def documents(prefix: Path | str) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(i).tolist() for i in range(dataset.num_documents)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_c001_the_tool_skips_an_empty_document_wherever_it_stands(
    tmp_path: Path, place: int
) -> None:
    records = [{"text": "hello world"}, {"text": "bye"}]
    records.insert(place, {"text": ""})
    source = Path(write_jsonl(tmp_path / "c.jsonl", records))
    done = run_tool(source, tmp_path / "o", f"{BYTES} --workers {1 + place % 2}")
    assert done.returncode == 0, done.stderr
    assert "empty documents skipped: 1" in done.stdout
    assert documents(tmp_path / "o_text_document") == [[*b"hello world", 256], [*b"bye", 256]]


@pytest.mark.parametrize("workers", [1, 2])
def test_c002_a_broken_line_is_named_and_nothing_is_left(tmp_path: Path, workers: int) -> None:
    source = tmp_path / "c.jsonl"
    source.write_text(BROKEN)
    done = run_tool(source, tmp_path / "o", f"{BYTES} --workers {workers}")
    assert done.returncode == 3
    assert f"{source}, line 4: not JSON" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


@pytest.mark.parametrize("workers", [1, 2])
def test_c002_bad_records_are_skipped_on_demand_and_counted(tmp_path: Path, workers: int) -> None:
    source = tmp_path / "c.jsonl"
    source.write_text(BROKEN)
    done = run_tool(source, tmp_path / "o", f"{BYTES} --skip-bad-records --workers {workers}")
    assert done.returncode == 0, done.stderr
    assert len(documents(tmp_path / "o_text_document")) == 2
    counted = json.loads((tmp_path / "o_text_document.meta.json").read_text())["skipped"]
    assert counted == {"empty": 0, "missing_key": 1, "malformed": 1, "blank": 1}


def test_c002_an_unknown_key_is_told_with_the_keys_that_exist(tmp_path: Path) -> None:
    source = tmp_path / "c.jsonl"
    source.write_text(BROKEN)
    for more, code in (("", 3), ("--skip-bad-records", 2)):
        done = run_tool(source, tmp_path / "o", f"{BYTES} --workers 1 --json-keys nokey {more}")
        assert done.returncode == code
        assert "'nokey'; keys found: 'body', 'text'" in done.stderr
        assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("o*"))


def test_c004_lengths_times_item_size_are_the_bin_bytes_of_every_dataset(tmp_path: Path) -> None:
    records = [{"text": "ab" * i, "title": "t" * (i % 3)} for i in range(40)]
    source = write_jsonl(tmp_path / "c.jsonl", records)
    for number, (workers, partitions, eod) in enumerate(
        ((1, 1, True), (2, 1, True), (3, 3, True), (1, 1, False))
    ):
        request = PreprocessRequest(
            source,
            str(tmp_path / f"o{number}"),
            json_keys=("text", "title"),
            append_eod=eod,
            workers=workers,
            partitions=partitions,
        )
        preprocess(request, ByteLevelTokenizer(), lambda _: None)
    merge_datasets(
        [str(tmp_path / f"o{n}_text_document") for n in (0, 1)], str(tmp_path / "merged")
    )
    written = sorted(tmp_path.glob("*.idx"))
    assert len(written) == 2 * 4 + 3 * 2 + 1
    for path in written:
        dataset = IndexedDataset(path.with_suffix(""))
        tokens = int(dataset.lengths.sum())
        assert path.with_suffix(".bin").stat().st_size == tokens * dataset.dtype.itemsize, path
        if "o3" not in path.name:
            assert all(document[-1] == 256 for document in documents(path.with_suffix("")))


def test_c005_an_eod_that_the_model_lacks_can_be_named(tmp_path: Path) -> None:
    model = train_model(tmp_path, eos_id=-1)
    source = Path(write_jsonl(tmp_path / "c.jsonl", [{"text": "one two"}] * 10))
    flags = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {model} --workers 1"
    refused = run_tool(source, tmp_path / "o", f"{flags} --append-eod")
    assert refused.returncode == 2 and "--eod-id" in refused.stderr
    assert not list(tmp_path.glob("o*"))
    done = run_tool(source, tmp_path / "o", f"{flags} --append-eod --eod-id 3")
    assert done.returncode == 0, done.stderr
    assert all(document[-1] == 3 for document in documents(tmp_path / "o_text_document"))


@pytest.mark.parametrize(
    ("vocab_size", "itemsize"), [(1, 2), (65_500, 2), (65_536, 2), (65_537, 4), (119_547, 4)]
)
def test_c006_every_id_of_a_vocabulary_fits_its_token_type(
    tmp_path: Path, vocab_size: int, itemsize: int
) -> None:
    ids = sorted({0, vocab_size // 2, min(65_500, vocab_size - 1), vocab_size - 1})
    with DatasetWriter(tmp_path / "x", token_dtype(vocab_size)) as writer:
        writer.add_document(np.array(ids))
        writer.finalize()
    assert documents(tmp_path / "x") == [ids]
    assert (tmp_path / "x.bin").stat().st_size == itemsize * len(ids)


@pytest.mark.parametrize("bad", [65_536, 119_546, -1])
@pytest.mark.parametrize("many", [False, True])
def test_c006_no_way_of_writing_wraps_an_id(tmp_path: Path, bad: int, many: bool) -> None:
    with (
        pytest.raises(DamagedError, match=rf"{bad} does not fit uint16 \(at most 65535\)"),
        DatasetWriter(tmp_path / "x", np.uint16) as writer,
    ):
        if many:
            writer.add_documents(np.array([1, bad, 2]), np.array([1, 2]))
        else:
            writer.add_document(np.array([1, bad, 2]))
    assert not list(tmp_path.iterdir())


class UnevenTokenizer(ByteLevelTokenizer):
    """Takes longest for the chunks that others wait for."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        time.sleep(0.002 * (len(texts[0]) % 3))
        return super().encode_batch(texts)


def test_c007_many_chunks_keep_their_order_whichever_worker_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "megatron_lite.data.preprocess.read_chunks", partial(read_chunks, chunk_bytes=200)
    )
    source = write_jsonl(tmp_path / "c.jsonl", [{"text": "w" * (i % 37)} for i in range(1000)])
    digests = set()
    for workers, partitions in ((1, 1), (2, 1), (4, 1), (3, 3)):
        output = tmp_path / f"o{workers}{partitions}"
        request = PreprocessRequest(
            source, str(output), append_eod=True, workers=workers, partitions=partitions
        )
        preprocess(request, UnevenTokenizer(), lambda _: None)
        paths = [Path(f"{output}_text_document{suffix}") for suffix in (".bin", ".idx")]
        digests.add(tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths))
    assert len(digests) == 1
