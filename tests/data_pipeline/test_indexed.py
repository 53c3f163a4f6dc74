"""The indexed format: bytes, boundaries, integer widths, and every kind of damage told."""

import errno
import io
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.indexed import IndexedDataset, sequence_pointers, token_dtype
from megatron_lite.data.inspection import first_difference, verify_tokens
from megatron_lite.data.writer import DatasetWriter, merge_datasets
from megatron_lite.errors import DamagedError, UserError
from tests.data_pipeline.corpora import write_dataset


def test_header_and_size_of_a_53_document_dataset_are_the_measured_ones(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[i] * (i % 7 + 1) for i in range(53)])
    index = Path(f"{prefix}.idx").read_bytes()
    expected = "4d4d49444944580000 0100000000000000 08 3500000000000000 3600000000000000"
    assert index[:34].hex() == expected.replace(" ", "")
    assert len(index) == 34 + 53 * 4 + 53 * 8 + 54 * 8 == 1102


def test_idx_bytes_follow_the_format_table(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[1, 2, 3], [4], [5, 6]])
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    expected += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8)
    expected += struct.pack("<4q", 0, 1, 2, 3)
    assert Path(f"{prefix}.idx").read_bytes() == expected
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize("use_mmap", [True, False])
def test_reads_return_what_was_written(tmp_path: Path, use_mmap: bool) -> None:
    with DatasetWriter(tmp_path / "x", np.int32) as writer:
        writer.add_document([1, 2, 3, 4, 5], lengths=[2, 3])
        writer.add_documents(np.array([7, 8, 9]), np.array([1, 2]))
        writer.finalize()
    dataset = IndexedDataset(tmp_path / "x", use_mmap=use_mmap)
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (4, 3, 8)
    assert dataset.read(1).tolist() == [3, 4, 5]
    assert dataset.read(1, 1, 1).tolist() == [4]
    assert dataset.document(0).tolist() == [1, 2, 3, 4, 5]
    assert dataset.document(2).tolist() == [8, 9]
    with pytest.raises(IndexError):
        dataset.read(0, 1, 2)


@pytest.mark.parametrize("use_mmap", [True, False])
def test_long_and_unaligned_pieces_read_exactly(tmp_path: Path, use_mmap: bool) -> None:
    ids = np.arange(100_001) % 60_000
    prefix = write_dataset(tmp_path / "x", [[1], ids.tolist()], 65536)
    dataset = IndexedDataset(prefix, use_mmap=use_mmap)
    for offset, length in ((0, 100_001), (77_777, 22_224), (4097, 50_000), (100_001, 0)):
        piece = dataset.read(1, offset, length)
        np.testing.assert_array_equal(piece, ids[offset : offset + length])


@pytest.mark.parametrize(
    ("vocab_size", "ids", "itemsize"),
    [(65536, [0, 65499, 65500, 65535], 2), (119547, [0, 65535, 65536, 119546], 4)],
)
def test_c006_token_type_changes_exactly_above_65536_ids(
    tmp_path: Path, vocab_size: int, ids: list[int], itemsize: int
) -> None:
    prefix = write_dataset(tmp_path / "x", [ids], vocab_size)
    assert IndexedDataset(prefix).read(0).tolist() == ids
    assert Path(f"{prefix}.bin").stat().st_size == itemsize * len(ids)


def test_c006_an_id_that_does_not_fit_raises_and_writes_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(DamagedError, match=r"65536 does not fit uint16 \(at most 65535\)"),
        DatasetWriter(tmp_path / "x", token_dtype(65536)) as writer,
    ):
        writer.add_document([65536])
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("error")
def test_c009_pointers_beyond_32_bits_do_not_wrap() -> None:
    pointers = sequence_pointers(np.array([1.5e9, 1.5e9, 1], dtype=np.int32), 4)
    assert pointers.dtype == np.int64
    assert pointers.tolist() == [0, 6_000_000_000, 12_000_000_000]


def test_c010_merging_keeps_boundaries_and_does_not_depend_on_grouping(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", [[1, 2, 3], [4, 5]], recorded_vocab_size=256)
    b = write_dataset(tmp_path / "b", [[6, 7, 8, 9]], recorded_vocab_size=256)
    c = write_dataset(tmp_path / "c", [[10], [11]], recorded_vocab_size=256)
    everything = write_dataset(tmp_path / "all", [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10], [11]])
    meta = merge_datasets([a, b, c], str(tmp_path / "abc"))
    assert meta is not None and (meta.documents, meta.tokens, meta.max_token_id) == (5, 11, 11)
    merge_datasets([a, b], str(tmp_path / "ab"))
    merge_datasets([str(tmp_path / "ab"), c], str(tmp_path / "ab_c"))
    merged = IndexedDataset(tmp_path / "abc")
    assert merged.lengths.tolist() == [3, 2, 4, 1, 1]
    assert merged.document_indices.tolist() == [0, 1, 2, 3, 4, 5]
    for suffix in (".bin", ".idx"):
        content = Path(f"{everything}{suffix}").read_bytes()
        assert (tmp_path / f"abc{suffix}").read_bytes() == content
        assert (tmp_path / f"ab_c{suffix}").read_bytes() == content


def test_merging_different_token_types_or_tokenizers_is_refused(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", [[1]], recorded_vocab_size=256)
    wide = write_dataset(tmp_path / "w", [[1]], vocab_size=70000)
    other = write_dataset(tmp_path / "o", [[1]], recorded_vocab_size=512)
    with pytest.raises(UserError, match="int32"):
        merge_datasets([a, wide], str(tmp_path / "m"))
    with pytest.raises(UserError, match="different tokenizers"):
        merge_datasets([a, other], str(tmp_path / "m"))
    assert not list(tmp_path.glob("m*"))


def test_c008_two_million_documents_need_no_lists(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "x", np.uint16) as writer:
        tokens = np.arange(2_000_000) % 60000
        writer.add_documents(tokens, np.ones(2_000_000, dtype=np.int32))
        writer.finalize()
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.read(1_999_999).tolist() == [1_999_999 % 60000]
    assert dataset.document(1_999_999).tolist() == [1_999_999 % 60000]


def corrupt(path: Path, offset: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("suffix", "offset", "content", "message"),
    [
        (".idx", 0, b"X", "no MMIDIDX header"),
        (".idx", 9, b"\x02", "version 2"),
        (".idx", 17, b"\x09", "unknown dtype code 9"),
        (".idx", 18, b"\x04", "truncated or damaged"),
        (".idx", 34, struct.pack("<i", -3), "negative sequence length"),
        (".idx", 34, struct.pack("<i", 2), "promises 5 tokens"),
        (".idx", 34 + 12 + 8, struct.pack("<q", 4), "pointers do not follow"),
        (".idx", 34 + 12 + 24 + 8, struct.pack("<q", 9), "document indices"),
        (".idx", 17, b"\x01", "promises 6 tokens of uint8"),
    ],
)
def test_a_damaged_field_is_told(
    tmp_path: Path, suffix: str, offset: int, content: bytes, message: str
) -> None:
    prefix = write_dataset(tmp_path / "x", [[1, 2, 3], [4], [5, 6]])
    corrupt(Path(f"{prefix}{suffix}"), offset, content)
    with pytest.raises(DamagedError, match=message) as caught:
        IndexedDataset(prefix)
    assert prefix in str(caught.value) and caught.value.exit_code == 3


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_truncation_is_told(tmp_path: Path, suffix: str) -> None:
    prefix = write_dataset(tmp_path / "x", [[1, 2, 3], [4], [5, 6]])
    path = Path(f"{prefix}{suffix}")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DamagedError, match="bytes"):
        IndexedDataset(prefix)


def test_another_projects_dtype_code_is_named(tmp_path: Path) -> None:
    # DeepSpeed's dialect: code 6 means uint16, and pointers in units of its 2 bytes.
    lengths, ends = [3, 2], [0, 1, 2]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 6, 2, 3)
    index += struct.pack("<2i", *lengths) + struct.pack("<2q", 0, 6) + struct.pack("<3q", *ends)
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(struct.pack("<5H", 1, 2, 3, 4, 5))
    with pytest.raises(DamagedError, match=r"uint16.*DeepSpeed"):
        IndexedDataset(tmp_path / "x")


def test_missing_files_are_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing.idx does not exist") as caught:
        IndexedDataset(tmp_path / "nothing")
    assert caught.value.exit_code == 2


def test_a_failed_rewrite_leaves_the_old_dataset(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[1, 2]])
    with pytest.raises(RuntimeError), DatasetWriter(prefix, np.uint16) as writer:
        writer.add_document([9])
        raise RuntimeError
    assert IndexedDataset(prefix).read(0).tolist() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_verify_finds_a_flipped_token_and_compare_names_it(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", [[1, 2, 3], [4, 5]], recorded_vocab_size=256)
    b = write_dataset(tmp_path / "b", [[1, 2, 3], [4, 5]], recorded_vocab_size=256)
    assert first_difference(IndexedDataset(a), IndexedDataset(b)) is None
    assert "ids 0 to 5" in verify_tokens(IndexedDataset(b), None)
    corrupt(Path(f"{b}.bin"), 6, b"\x01")
    difference = first_difference(IndexedDataset(a), IndexedDataset(b))
    assert difference == "token 3 (sequence 1): 4 and 1"
    with pytest.raises(DamagedError, match="not the one that was recorded"):
        verify_tokens(IndexedDataset(b), None)
    with pytest.raises(DamagedError, match="token 4 is id 5"):
        verify_tokens(IndexedDataset(a), 5)


def test_a_record_that_is_no_record_is_told(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[1]])
    Path(f"{prefix}.meta.json").write_text("{")
    with pytest.raises(DamagedError, match=r"meta\.json"):
        IndexedDataset(prefix)


class FullDisk(io.BytesIO):
    def write(self, _: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_no_space_left_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(DamagedError, match="no space left while writing"),
        DatasetWriter(tmp_path / "x", np.uint16) as writer,
    ):
        monkeypatch.setattr(writer, "_bin", FullDisk())
        writer.add_document([1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        ('"vocab_size": 256', '"vocab_size": "256"'),
        ('"vocab_size": 256', '"vocab_size": -1'),
        ('"tokens": 3', '"tokens": null'),
        ('"eod": null', '"eod": "end"'),
        ("{", "[" * 100_000),
    ],
)
def test_a_record_with_wrong_values_is_told(tmp_path: Path, change: tuple[str, str]) -> None:
    prefix = write_dataset(tmp_path / "x", [[1, 2, 3]], recorded_vocab_size=256)
    path = Path(f"{prefix}.meta.json")
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change, 1))
    with pytest.raises(DamagedError, match="not a dataset record"):
        IndexedDataset(prefix)


def test_a_folder_in_the_place_of_the_record_is_told(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[1, 2, 3]])
    Path(f"{prefix}.meta.json").mkdir()
    with pytest.raises(DamagedError, match="delete it to do without"):
        IndexedDataset(prefix)
