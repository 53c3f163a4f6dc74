"""Tables as files: they come back as they were, and nobody's file can do more than be refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.errors import UserError
from megatron_lite.pipeline.actions import Schedule
from megatron_lite.pipeline.schedules import FIXED_CHUNKS, SCHEDULES, build_schedule, forward_only
from megatron_lite.pipeline.table_files import FORMAT, format_json, read_table, write_table
from megatron_lite.pipeline.verify import check_schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_json_gives_the_same_table_back(name: str, tmp_path: Path) -> None:
    schedule = SCHEDULES[name](1 if name == "single" else 3, FIXED_CHUNKS.get(name, 2), 5)
    write_table(schedule, tmp_path / "t.json")
    assert read_table(tmp_path / "t.json") == schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_gives_the_same_actions_back(name: str, tmp_path: Path) -> None:
    schedule = SCHEDULES[name](1 if name == "single" else 3, FIXED_CHUNKS.get(name, 2), 5)
    write_table(schedule, tmp_path / "t.csv")
    back = read_table(tmp_path / "t.csv")
    assert (back.ranks, back.placement, back.num_microbatches) == (
        schedule.ranks, schedule.placement, schedule.num_microbatches,
    )  # fmt: skip


def test_evaluation_tables_go_to_json_only(tmp_path: Path) -> None:
    schedule = forward_only((0, 1, 1, 0), 3)
    write_table(schedule, tmp_path / "t.json")
    assert read_table(tmp_path / "t.json") == schedule
    with pytest.raises(UserError, match="use JSON"):
        write_table(schedule, tmp_path / "t.csv")


def test_computations_alone_are_completed(tmp_path: Path) -> None:
    complete = SCHEDULES["zb-h1"](3, 1, 5)
    lines = [",".join(str(a) for a in row if a.kind.value in "FIW") for row in complete.ranks]
    (tmp_path / "bare.csv").write_text("\n".join(lines))
    assert read_table(tmp_path / "bare.csv").ranks == complete.ranks


def test_spelling_and_idle_cells_of_torch_are_understood(tmp_path: Path) -> None:
    (tmp_path / "torch.csv").write_text("0F0,0F1,,,0B0,,0B1\n,1F0,1I0,1W0,1F1,1B1\n\n")
    schedule = read_table(tmp_path / "torch.csv")
    check_schedule(schedule)
    assert (schedule.num_stages, schedule.num_microbatches) == (2, 2)


def test_file_is_a_schedule_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_table(SCHEDULES["1f1b"](2, 1, 4), path)
    assert build_schedule(f"file:{path}", 2, 1, 4).ranks == SCHEDULES["1f1b"](2, 1, 4).ranks
    with pytest.raises(UserError, match="a table of 2 ranks, 2 stages and 4 microbatches; 4 ranks"):
        build_schedule(f"file:{path}", 4, 1, 4)


GOOD: dict[str, Any] = json.loads(format_json(SCHEDULES["1f1b"](2, 1, 2)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "other"}, "not an object with"),
        ({"extra": 1}, "unknown keys: 'extra'"),
        ({"num_microbatches": -1}, "integers from 0"),
        ({"num_microbatches": True}, "integers from 0"),
        ({"num_microbatches": 2**31 - 1}, "actions are not those of 2147483647"),
        ({"num_microbatches": 1e9}, "integers from 0"),
        ({"placement": [0] * 10_000}, "actions are not those of"),
        ({"placement": [0, 7]}, "stage 1 is placed on rank 7 of 2"),
        ({"placement": "01"}, "integers from 0"),
        ({"placement": []}, "actions are not those of"),
        ({"bounds": [1]}, "bounds of 1 ranks for 2"),
        ({"bounds": [1, 1]}, "2 activations alive at once"),
        ({"ranks": {}}, "not a list of lists"),
        ({"ranks": [["F0.0"], 3]}, "not a list of lists"),
        ({"ranks": [[1], []]}, "1 is not an action"),
        ({"ranks": [["F0.0" * 10_000], []]}, "is not an action"),
        ({"ranks": [["F0.99999999999999999999"] * 4, []]}, "of 2 microbatches"),
        ({"ranks": [["F99999999999.0"] * 4, []]}, "of a stage"),
        ({"name": 3}, '"name" must be a text'),
        ({"forward_only": 1}, '"forward_only" true or false'),
    ],
)
def test_hostile_json_is_one_message(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(UserError) as caught:
        read_table(path)
    message = str(caught.value)
    assert told in message
    assert message.startswith(str(path))
    assert "\n" not in message and len(message) < 1500


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b""),
        ("a.json", b"[" * 100_000),
        ("a.json", b"\xff\xfe"),
        ("a.json", b'{"format": "x", "format": "y"}'),
        ("a.json", b"9" * 10_000),
        ("a.json", b'{"format": NaN}'),
        ("a.csv", b""),
        ("a.csv", b"F0.0,Q1.1"),
        ("a.csv", b"F0.0,F0.1\nF0.0"),
        ("a.csv", b"F5.0"),
        ("a.csv", b'"F0.0'),
        ("a.csv", b"F0.0,SEND_F0.0,B0.0"),
        ("a.csv", b"F0.999999999,B0.999999999"),
        ("a.csv", b"\x00,\x00"),
        ("a.csv", b"999999999F0"),
        ("a.csv", b"F0.0,F1.0,B1.0,B0.0,NORM"),
        ("a.txt", b"F0.0"),
    ],
)
def test_hostile_bytes_are_one_message(name: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_table(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_files_and_directories_are_one_message(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        target = path if path.suffix else path / "sub.json"
        if path is tmp_path:
            target.mkdir()
        with pytest.raises(UserError, match="no such file"):
            read_table(target)
    with pytest.raises(UserError, match="cannot write"):
        write_table(SCHEDULES["single"](1, 1, 1), tmp_path / "no" / "t.json")


WORDS = st.sampled_from(
    ["F0.0", "B0.0", "F1.0", "B1.0", "SEND_F0.0", "RECV_F1.0", "SEND_B1.0", "RECV_B0.0", "I1.0",
     "W1.0", "REDUCE0", "REDUCE1", "NORM", "STEP0", "STEP1", "LOCAL_F0.0", "UNSHARD0", "F0.1"]
)  # fmt: skip


@settings(max_examples=200)
@given(
    rows=st.lists(st.lists(WORDS, max_size=8), max_size=3), head=st.sampled_from([(0, 1), (0, 0)])
)
def test_random_tables_are_valid_or_refused_but_never_fail(
    rows: list[list[str]], head: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.json"
    value = {"format": FORMAT, "num_microbatches": 1, "placement": list(head), "ranks": rows}
    path.write_text(json.dumps(value))
    try:
        schedule = read_table(path)
    except UserError:
        return
    assert isinstance(schedule, Schedule)
    check_schedule(schedule)
