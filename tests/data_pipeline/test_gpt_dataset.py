"""Samples: exact contents, masks, vocabulary checks, splits, path flags, mock data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.build import Datasets, build_datasets
from megatron_lite.data.gpt_dataset import GPTDataset, MockSource
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.sample_index import SampleIndex
from megatron_lite.data.splits import (
    parse_data_path,
    parse_split,
    read_data_args,
    split_slice,
)
from megatron_lite.errors import DamagedError, UserError
from tests.data_pipeline.corpora import Settings, write_dataset


def build(settings: Settings, samples: tuple[int, int, int], **options: Any) -> Datasets:
    options = {"vocab_size": 256, "eod": None, **options}
    train, valid, test = samples
    return build_datasets(
        settings, train_samples=train, valid_samples=valid, test_samples=test, **options
    )


def unshuffled(prefix: str, rows: list[list[int]], **options: Any) -> GPTDataset:
    """Samples of 4 tokens in file order."""
    source = IndexedDataset(prefix)
    index = SampleIndex(
        np.arange(len(source), dtype=np.int32),
        np.array(rows, dtype=np.int32),
        np.arange(len(rows) - 1, dtype=np.uint32),
    )
    return GPTDataset(source, index, sequence_length=4, vocab_size=256, **options)


def test_c014_samples_overlap_by_one_token_and_know_their_documents(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [range(5), range(5, 8), range(8, 15)])
    dataset = unshuffled(prefix, [[0, 0], [0, 4], [2, 0], [2, 4]])
    assert len(dataset) == 3
    for i, (start, boundaries) in enumerate(((0, (0,)), (4, (1,)), (8, (0,)))):
        sample = dataset[i]
        assert sample.tokens.tolist() == list(range(start, start + 4))
        assert sample.labels.tolist() == list(range(start + 1, start + 5))
        assert sample.boundaries == boundaries
        assert (sample.tokens.dtype, sample.loss_mask.tolist()) == (np.int64, [1.0] * 4)
    for outside in (-1, 3):
        with pytest.raises(IndexError):
            dataset[outside]


def test_eod_masks_the_position_whose_input_is_eod(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[1, 9], [2, 9], [3]])
    sample = unshuffled(prefix, [[0, 0], [2, 0]], eod_mask=9)[0]
    assert sample.tokens.tolist() == [1, 9, 2, 9]
    assert sample.loss_mask.tolist() == [1, 0, 1, 0]


def test_padding_is_not_learned_and_reads_as_zero(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[1, 2, 3, 7, 7]])
    sample = unshuffled(prefix, [[0, 0], [0, 4]], pad=7)[0]
    assert sample.tokens.tolist() == [1, 2, 3, 0]
    assert sample.labels.tolist() == [2, 3, 0, 0]
    assert sample.loss_mask.tolist() == [1, 1, 0, 0]


def test_stored_data_is_never_changed_by_padding(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[1, 2, 3, 7, 7]])
    dataset = unshuffled(prefix, [[0, 0], [0, 4]], pad=7)
    assert dataset[0].labels.tolist() == dataset[0].labels.tolist()
    assert IndexedDataset(prefix).read(0).tolist() == [1, 2, 3, 7, 7]


def test_c011_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[1, 2, 3, 4, 300]], vocab_size=1000)
    dataset = build(Settings(data_path=(prefix,)), (1, 0, 0)).train
    assert dataset is not None
    with pytest.raises(DamagedError) as caught:
        dataset[0]
    message = str(caught.value)
    assert caught.value.exit_code == 3
    for part in ("token id 300", "vocabulary of 256", f"dataset {prefix}", "sample 0"):
        assert part in message


def test_c011_a_negative_token_is_named(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[1, -5, 3, 4, 5]], vocab_size=100_000)
    with pytest.raises(DamagedError, match="token id -5"):
        unshuffled(prefix, [[0, 0], [0, 4]])[0]


def test_c011_a_larger_recorded_vocabulary_is_refused_at_start(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[1] * 50], recorded_vocab_size=1000)
    with pytest.raises(UserError, match=r"vocabulary of 1000.*model's has 256") as caught:
        build(Settings(data_path=(prefix,)), (1, 0, 0))
    assert caught.value.exit_code == 2
    assert build(Settings(data_path=(prefix,)), (1, 0, 0), vocab_size=1000).train is not None


def test_eod_of_another_tokenizer_is_refused_when_it_matters(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[1] * 50], recorded_vocab_size=200, eod=9)
    build(Settings(data_path=(prefix,)), (1, 0, 0), eod=8)
    with pytest.raises(UserError, match=r"id 9.*EOD is 8"):
        build(Settings(data_path=(prefix,), eod_mask_loss=True), (1, 0, 0), eod=8)
    masked = build(Settings(data_path=(prefix,), eod_mask_loss=True), (1, 0, 0)).train
    assert masked is not None  # the recorded EOD serves a tokenizer without one


def test_splits_slice_unshuffled_sequences_with_bankers_rounding() -> None:
    bounds = parse_split("98,2,0")
    assert [split_slice(b, 100) for b in bounds] == [(0, 98), (98, 100), (100, 100)]
    assert [split_slice(b, 5) for b in parse_split("50,50")] == [(0, 2), (2, 5), (5, 5)]
    assert [split_slice(b, 7) for b in parse_split("1")] == [(0, 7), (7, 7), (7, 7)]
    default = [split_slice(b, 1000) for b in parse_split("969, 30, 1")]
    assert default == [(0, 969), (969, 999), (999, 1000)]
    for text in ("", "0,0,0", "1,2,3,4", "-1,2", "1.2.3"):
        with pytest.raises(UserError, match="--split"):
            parse_split(text)


def test_data_path_tells_prefixes_from_pairs() -> None:
    assert parse_data_path(["a"]).prefixes == ("a",)
    assert parse_data_path(["a", "b"]).weights is None
    pairs = parse_data_path(["0.3", "a", "7", "b"])
    assert (pairs.prefixes, pairs.weights) == (("a", "b"), (0.3, 7.0))
    for words in (["0.3", "a", "b", "c"], []):
        with pytest.raises(UserError):
            parse_data_path(words)


def test_parts_of_a_split_share_no_document(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[i] * 10 for i in range(100)])
    built = build(Settings(data_path=(prefix,), split="80,15,5"), (40, 10, 5))
    seen = []
    for dataset in (built.train, built.valid, built.test):
        assert dataset is not None
        seen.append({int(t) for k in range(len(dataset)) for t in dataset[k].tokens})
    assert seen[0] <= set(range(80))
    assert seen[1] <= set(range(80, 95)) and seen[2] <= set(range(95, 100))


def test_a_part_without_share_or_request_is_none(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[i] * 10 for i in range(10)])
    built = build(Settings(data_path=(prefix,), split="98,2,0"), (4, 4, 4))
    assert built.train is not None and built.valid is None and built.test is None
    assert build(Settings(data_path=(prefix,)), (4, 0, 0)).valid is None
    with pytest.raises(UserError, match="train part"):
        build(Settings(data_path=(prefix,), split="0,100,0"), (4, 4, 4))


def test_default_split_is_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_dataset(tmp_path / "x", [[i % 250] * 10 for i in range(1000)])
    for speaks in (True, False):
        build(Settings(data_path=(prefix,), split=None), (4, 4, 0), is_builder=speaks)
    assert capsys.readouterr().err.count("969, 30, 1") == 1


def test_per_split_paths_use_whole_datasets(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", [[1] * 30])
    b = write_dataset(tmp_path / "b", [[2] * 30])
    settings = Settings(split=None, train_data_path=(a,), valid_data_path=(b,))
    built = build(settings, (4, 4, 4))
    assert built.train is not None and built.valid is not None and built.test is None
    assert set(built.train[0].tokens.tolist()) == {1}
    assert set(built.valid[0].tokens.tolist()) == {2}
    with pytest.raises(UserError, match="exclude"):
        build(Settings(split="1,1,1", train_data_path=(a,)), (4, 4, 4))


def test_data_args_file_is_read_like_the_flag(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", [[1] * 30])
    b = write_dataset(tmp_path / "b", [[2] * 30])
    (tmp_path / "paths").write_text(f"0.5 {a}\n0.5 {b}\n")
    by_file = build(Settings(data_args_path=str(tmp_path / "paths")), (8, 0, 0))
    by_flag = build(Settings(data_path=("0.5", a, "0.5", b)), (8, 0, 0))
    assert by_file.fingerprint() == by_flag.fingerprint()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(), "no data"),
        (Settings(data_path=("a",), mock_data=True), "--mock-data excludes"),
        (Settings(data_path=("absent/x",)), r"absent/x.idx does not exist"),
        (Settings(data_args_path="absent"), "--data-args-path absent"),
    ],
)
def test_contradicting_or_missing_data_is_refused(settings: Settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(settings, (4, 0, 0))


def test_float_data_is_not_tokens(tmp_path: Path) -> None:
    from megatron_lite.data.writer import DatasetWriter

    with DatasetWriter(tmp_path / "x", np.float32) as writer:
        writer.add_document([0.5] * 30)
        writer.finalize()
    with pytest.raises(UserError, match="float32 values, not token ids"):
        build(Settings(data_path=(str(tmp_path / "x"),)), (4, 0, 0))


def test_mock_data_counts_and_ends_documents_with_eod() -> None:
    built = build(
        Settings(mock_data=True, seq_length=512, split="969,30,1"),
        (8, 2, 2),
        vocab_size=100,
        eod=99,
    )
    assert built.train is not None and built.valid is not None and built.test is not None
    lengths = np.random.default_rng(0).integers(1, 4096, 100_000, dtype=np.int32)
    source = built.train.source if isinstance(built.train, GPTDataset) else None
    assert source is not None
    np.testing.assert_array_equal(source.lengths, lengths)
    for document in range(20):
        tokens = np.empty(lengths[document], dtype=np.int64)
        source.read_into(tokens, document, 0)
        expected = (np.arange(lengths[document]) + 1) % 100
        expected[-1] = 99
        np.testing.assert_array_equal(tokens, expected)
        tail = np.empty(1, dtype=np.int64)
        source.read_into(tail, document, int(lengths[document]) - 1)
        assert tail[0] == 99
    with pytest.raises(UserError, match="EOD"):
        build(Settings(mock_data=True), (8, 0, 0))


def test_mock_data_of_short_samples_is_indexed_in_moments() -> None:
    long = MockSource(100, 99, 13)
    assert len(long.lengths) == MockSource.NUM_DOCUMENTS
    for length in (1, 2, 12):
        short = MockSource(100, 99, length)
        np.testing.assert_array_equal(short.lengths, long.lengths[: len(short.lengths)])
        samples = int(short.lengths.sum(dtype=np.int64)) // length
        assert 16_000_000 < samples < 18_000_000
    settings = Settings(mock_data=True, seq_length=1, split="1,0,0")
    built = build(settings, (8, 0, 0), vocab_size=100, eod=99)
    assert built.train is not None
    sample = built.train[7]
    assert sample.tokens.shape == sample.labels.shape == (1,)


def test_fingerprint_names_what_fixes_the_order_and_nothing_else(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[i] * 10 for i in range(100)])
    base = build(Settings(data_path=(prefix,)), (100, 0, 0)).fingerprint()
    assert json.loads(json.dumps(base)) == base
    assert str(tmp_path) not in json.dumps(base)
    longer = build(Settings(data_path=(prefix,)), (200, 0, 0)).fingerprint()
    assert longer == base  # both within one epoch: the same order
    for other in (
        build(Settings(data_path=(prefix,), seed=5), (100, 0, 0)),
        build(Settings(data_path=(prefix,), seq_length=8), (100, 0, 0)),
        build(Settings(data_path=(prefix,), split="9,1,0"), (100, 0, 0)),
        build(Settings(data_path=(prefix,)), (1000, 0, 0)),
    ):
        assert other.fingerprint() != base
    with Path(f"{prefix}.bin").open("r+b") as file:
        file.write(b"\x07")
    assert build(Settings(data_path=(prefix,)), (100, 0, 0)).fingerprint() != base


@pytest.mark.parametrize("text", ["1e5,1", "nan,1", "9" * 400 + ",1", "-1,2"])
def test_a_split_of_anything_but_plain_numbers_is_told(text: str) -> None:
    with pytest.raises(UserError, match="give one to three numbers"):
        parse_split(text)


def test_a_file_of_data_arguments_that_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "args").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not a text file"):
        read_data_args(str(tmp_path / "args"))
