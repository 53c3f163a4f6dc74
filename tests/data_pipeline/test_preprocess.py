"""Preprocessing: what is a document, what is skipped, and that workers do not show."""

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.preprocess import PreprocessRequest, Summary, find_best_workers, preprocess
from megatron_lite.data.tokenizer import ByteLevelTokenizer, NullTokenizer
from megatron_lite.errors import DamagedError, UserError
from tests.data_pipeline.corpora import WordTokenizer, write_jsonl
from tests.data_pipeline.test_tokenizer import train_model

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"


def run(path: str, output: Path, **options: Any) -> Summary:
    options.setdefault("append_eod", True)
    request = PreprocessRequest(path, str(output), **options)
    return preprocess(request, ByteLevelTokenizer(), lambda _: None)


def documents(output: Path, key: str = "text") -> list[list[int]]:
    dataset = IndexedDataset(f"{output}_{key}_document")
    return [dataset.document(i).tolist() for i in range(dataset.num_documents)]


def texts(output: Path, key: str = "text") -> list[str]:
    return [ByteLevelTokenizer().decode(document) for document in documents(output, key)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_c001_an_empty_document_is_skipped_and_counted_anywhere(tmp_path: Path, place: int) -> None:
    records = [{"text": "hello world"}, {"text": "bye"}]
    records.insert(place, {"text": ""})
    summary = run(write_jsonl(tmp_path / "c.jsonl", records), tmp_path / "o")
    assert documents(tmp_path / "o") == [[*b"hello world", 256], [*b"bye", 256]]
    assert "empty documents skipped: 1" in summary.lines()


def test_c001_a_record_is_empty_exactly_when_it_gives_no_token(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "\n"}, {"text": ""}, {"text": "x"}])
    run(path, tmp_path / "o")
    assert documents(tmp_path / "o") == [[10, 256], [120, 256]]


BROKEN = '{"text": "one"}\n\n{"body":"x"}\n{"text": "a\n{"text": "two"}\n'


def test_c002_a_broken_line_stops_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(BROKEN)
    with pytest.raises(
        DamagedError, match=r"c\.jsonl, line 4: not JSON: Unterminated string.*column 10"
    ):
        run(str(tmp_path / "c.jsonl"), tmp_path / "o")
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


def test_c002_broken_lines_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(BROKEN)
    summary = run(str(tmp_path / "c.jsonl"), tmp_path / "o", skip_bad_records=True)
    assert texts(tmp_path / "o") == ["one", "two"]
    expected = {"empty": 0, "missing_key": 1, "malformed": 1, "blank": 1}
    assert {reason: summary.skipped["text"][reason] for reason in expected} == expected
    meta = json.loads((tmp_path / "o_text_document.meta.json").read_text())
    assert meta["skipped"] == expected
    assert (meta["documents"], meta["tokens"], meta["max_token_id"]) == (2, 8, 256)
    assert (meta["vocab_size"], meta["eod"]) == (512, 256)


@pytest.mark.parametrize("skip", [False, True])
def test_c002_a_key_that_no_record_has_names_those_that_exist(tmp_path: Path, skip: bool) -> None:
    (tmp_path / "c.jsonl").write_text(BROKEN)
    with pytest.raises(UserError, match=r"the key 'nokey'; keys found: 'body', 'text'"):
        run(str(tmp_path / "c.jsonl"), tmp_path / "o", json_keys=("nokey",), skip_bad_records=skip)
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "\xff"}', "not UTF-8 at byte 11"),
        (b'["text"]', "a JSON list, not an object"),
        (b'{"text": 5}', "the value of 'text' is int, not text"),
        (b'{"text": null}', "the value of 'text' is NoneType, not text"),
        (rb'{"text": "\ud800"}', "the value of 'text' has half of a surrogate pair"),
        (b'{"text": "x"} tail', "not JSON: Extra data"),
    ],
)
def test_c002_every_kind_of_bad_record_is_told(tmp_path: Path, line: bytes, reason: str) -> None:
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "ok"}\n' + line + b"\n")
    with pytest.raises(DamagedError, match=f"line 2: {reason}"):
        run(str(tmp_path / "c.jsonl"), tmp_path / "o")
    summary = run(str(tmp_path / "c.jsonl"), tmp_path / "o", skip_bad_records=True)
    assert summary.skipped["text"]["malformed"] == 1 and texts(tmp_path / "o") == ["ok"]


@pytest.mark.parametrize("workers", [1, 2])
def test_c003_only_newlines_end_records(tmp_path: Path, workers: int) -> None:
    first = "a\u2028b\u0085c\u2029\x0b\x0c"
    raw = json.dumps({"text": first}, ensure_ascii=False).encode() + b"\r\n"
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + raw + b'{"text": "d"}\r\n')
    assert "\u2028".encode() in raw and "\u0085".encode() in raw
    run(str(tmp_path / "c.jsonl"), tmp_path / "o", workers=workers)
    assert texts(tmp_path / "o") == [first, "d"]


def test_c004_lengths_count_the_end_of_document(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "a b"}, {"text": "c"}])
    request = PreprocessRequest(path, str(tmp_path / "o"), append_eod=True)
    preprocess(request, WordTokenizer(), lambda _: None)
    dataset = IndexedDataset(tmp_path / "o_text_document")
    assert dataset.lengths.tolist() == [3, 2]
    assert documents(tmp_path / "o") == [[5, 6, 0], [7, 0]]
    assert dataset.bin_bytes == 5 * dataset.dtype.itemsize


def test_c005_append_eod_without_an_eod_token_fails_before_reading(tmp_path: Path) -> None:
    model = train_model(tmp_path, eos_id=-1)
    flags = f"--input {tmp_path}/absent.jsonl --output-prefix {tmp_path}/o --workers 1"
    model_flags = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {model}"
    result = subprocess.run(
        [sys.executable, TOOL, "--append-eod", *flags.split(), *model_flags.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "has no EOD token" in result.stderr and "--eod-id" in result.stderr
    assert "Traceback" not in result.stderr and not list(tmp_path.glob("o*"))


def digests(prefix: Path) -> list[str]:
    paths = [Path(f"{prefix}_text_document{suffix}") for suffix in (".bin", ".idx", ".meta.json")]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def test_c007_output_does_not_depend_on_workers_or_partitions(tmp_path: Path) -> None:
    draw = random.Random(7)
    records = [{"text": "word " * draw.randrange(400), "id": i} for i in range(1000)]
    path = write_jsonl(tmp_path / "c.jsonl", records)
    for workers, partitions in ((1, 1), (2, 1), (4, 1), (3, 3)):
        output = tmp_path / f"o{workers}{partitions}"
        run(path, output, workers=workers, partitions=partitions)
    expected = digests(tmp_path / "o11")
    assert digests(tmp_path / "o21") == expected
    assert digests(tmp_path / "o41") == expected
    assert digests(tmp_path / "o33") == expected
    parts = [len(documents(Path(f"{tmp_path}/o33_{i}"))) for i in range(3)]
    assert min(parts) > 100 and sum(parts) == len(documents(tmp_path / "o11"))


def test_several_inputs_and_gz_are_read_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "b"}')
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(b'{"text": "a1"}\n{"text": "a2"}\n')
    run(str(tmp_path / "*.jsonl*"), tmp_path / "o")
    assert texts(tmp_path / "o") == ["a1", "a2", "b"]
    data = (tmp_path / "a.jsonl.gz").read_bytes()
    (tmp_path / "cut.gz").write_bytes(data[:-10])
    with pytest.raises(DamagedError, match=r"cannot read .*cut\.gz"):
        run(str(tmp_path / "cut.gz"), tmp_path / "cut")
    with pytest.raises(UserError, match="not a regular file"):
        run(str(tmp_path), tmp_path / "folder")


def test_each_key_has_its_own_dataset_and_counts(tmp_path: Path) -> None:
    records = [{"text": "t1", "title": "h1"}, {"text": "t2"}, {"text": "", "title": "h3"}]
    path = write_jsonl(tmp_path / "c.jsonl", records)
    summary = run(path, tmp_path / "o", json_keys=("text", "title"), append_eod=False)
    assert (texts(tmp_path / "o"), texts(tmp_path / "o", "title")) == (["t1", "t2"], ["h1", "h3"])
    assert summary.skipped["text"]["empty"] == 1 and summary.skipped["title"]["missing_key"] == 1


def test_without_append_eod_documents_are_the_text_alone(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "ab"}])
    run(path, tmp_path / "o", append_eod=False)
    assert documents(tmp_path / "o") == [[97, 98]]


def test_a_text_that_the_tokenizer_refuses_is_a_bad_record(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "1 2"}, {"text": "1 300"}])
    request = PreprocessRequest(path, str(tmp_path / "o"))
    with pytest.raises(DamagedError, match="line 2: token id 300 is outside the vocabulary"):
        preprocess(request, NullTokenizer(256), lambda _: None)


def test_an_error_in_a_worker_process_reaches_the_caller(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "a"}, {"text": "unknown"}])
    request = PreprocessRequest(path, str(tmp_path / "o"), workers=2)
    with pytest.raises(KeyError, match="unknown"):
        preprocess(request, WordTokenizer(), lambda _: None)


class DyingTokenizer(WordTokenizer):
    def encode_batch(self, texts: Any) -> list[list[int]]:
        os._exit(9)


def test_a_killed_worker_is_told_and_does_not_hang(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "a"}])
    request = PreprocessRequest(path, str(tmp_path / "o"), workers=2)
    with pytest.raises(RuntimeError, match=r"worker died \(exit code 9\)"):
        preprocess(request, DyingTokenizer(), lambda _: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 3, "partitions": 2}, "multiple of --partitions"),
        ({"workers": 0}, "at least 1"),
        ({"json_keys": ("../../etc",)}, "cannot be empty or contain '/'"),
        ({"json_keys": ("text", "")}, "cannot be empty"),
    ],
)
def test_impossible_requests_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "a"}])
    with pytest.raises(UserError, match=message):
        run(path, tmp_path / "o", **options)


def test_a_corpus_without_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text("\n")
    with pytest.raises(UserError, match="nothing to write"):
        run(str(tmp_path / "c.jsonl"), tmp_path / "o")


def test_progress_and_best_workers_are_said(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "a b"}] * 30)
    said: list[str] = []
    request = PreprocessRequest(path, str(tmp_path / "o"), log_interval=10)
    preprocess(request, WordTokenizer(), said.append)
    assert said and said[0].startswith("Processed 30 documents (")
    assert find_best_workers(request, WordTokenizer(), [1, 2], 10, said.append) in (1, 2)


def test_the_tool_runs_without_torch_and_prints_its_counts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "hello"}, {"text": ""}])
    code = (
        "import runpy, sys; sys.argv[1:] = sys.argv[2:]\n"
        "try: runpy.run_path(sys.argv.pop(0) or '', run_name='__main__')\n"
        "except SystemExit as error: assert error.code == 0, error.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    flags = f"--input {path} --output-prefix {tmp_path}/o --workers 1 --append-eod"
    command = f"--tokenizer-type ByteLevelTokenizer {flags}".split()
    script = code.replace("sys.argv.pop(0) or ''", repr(str(TOOL)))
    result = subprocess.run(
        [sys.executable, "-c", script, "tool", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "empty documents skipped: 1" in result.stdout
    assert texts(tmp_path / "o") == ["hello"]


SLOW_JOB = """
import sys, time
from tests.data_pipeline.corpora import WordTokenizer
from megatron_lite.data.preprocess import PreprocessRequest, preprocess
class Slow(WordTokenizer):
    def encode_batch(self, texts):
        print("working", flush=True)
        time.sleep(600)
preprocess(PreprocessRequest(sys.argv[1], sys.argv[2], workers=2), Slow())
"""


def test_workers_do_not_outlive_a_killed_job(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "a"}])
    job = subprocess.Popen(
        [sys.executable, "-c", SLOW_JOB, path, str(tmp_path / "o")],
        cwd=TOOL.parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    job.stdout.readline()
    workers = children_of(job.pid)
    job.kill()
    job.wait()
    idle = [pid for pid in workers if not is_gone(pid, seconds=10)]
    # The one inside its tokenizer ends with its text; only the idle one must notice.
    assert len(workers) == 2 and len(idle) == 1
    os.kill(idle[0], signal.SIGKILL)
    job.stdout.close()


def children_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def is_gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.1)
    return False
