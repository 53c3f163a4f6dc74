"""tools/show_schedule.py: figures, pictures, files, refusals."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.costs import equal_costs
from megatron_lite.pipeline.draw import Played, draw_svg, draw_text
from megatron_lite.pipeline.schedules import SCHEDULES
from megatron_lite.pipeline.simulate import simulate
from tools.show_schedule import main

SIZE = ["--pipeline-size", "4", "--microbatches", "8"]
SVG = "{http://www.w3.org/2000/svg}"


def test_json_has_the_figures_of_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["all", *SIZE, "--json"]) == 0
    found = {item["schedule"]: item for item in json.loads(capsys.readouterr().out)["schedules"]}
    assert set(found) == set(SCHEDULES) - {"single", "auto"}
    assert found["1f1b"]["makespan"] == 33
    assert found["zbv"]["span_bubble"] == 0
    assert found["zb-h1"]["peak_activations"] == [4, 4, 4, 4]


def test_text_shows_each_action_in_its_column(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zb-h1", *SIZE, "--width", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "rank 3   ...FIFIFIFIWFIWFIWFIWFIWWWW" in lines
    assert any(line.split()[:3] == ["zb-h1", "4", "27"] for line in lines)


def test_text_fits_the_width() -> None:
    schedule = SCHEDULES["zbv"](4, 2, 40)
    played = Played(schedule, *simulate(schedule, equal_costs(8, 2)))
    assert max(map(len, draw_text(played, 80).splitlines())) <= 80


def test_svg_draws_every_action_message_and_reduction_once(tmp_path: Path) -> None:
    path = tmp_path / "s.svg"
    flags = ["--comm", "0.25", "--reduce", "1", "--costs", "1,1.2,0.8", "--no-timeline"]
    assert main(["1f1b", "zbv", *SIZE, *flags, "--svg", str(path)]) == 0
    root = ET.parse(path).getroot()
    tips = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert sum(tip.startswith("F") for tip in tips) == 4 * 8 + 8 * 8
    assert sum(tip.startswith("W") for tip in tips) == 8 * 8
    assert sum(tip.startswith("SEND_F") for tip in tips) == 3 * 8 + 6 * 8
    assert sum(tip.startswith("REDUCE") for tip in tips) == 4 + 8
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"F forward", "W weight gradient", "message under way", "idle"} <= set(texts)
    assert "activations alive (microbatches of a whole rank)" in texts
    assert len(list(root.iter(f"{SVG}polyline"))) == 4 + 4


def test_svg_escapes_a_files_name() -> None:
    schedule = SCHEDULES["1f1b"](2, 1, 2)
    hostile = type(schedule)('<script>"&', 2, schedule.placement, schedule.ranks)
    text = draw_svg([Played(hostile, *simulate(hostile, equal_costs(2)))])
    assert "<script>" not in text
    ET.fromstring(text)


def test_memory_curve_reaches_the_peak() -> None:
    schedule = SCHEDULES["1f1b"](4, 1, 8)
    root = ET.fromstring(draw_svg([Played(schedule, *simulate(schedule, equal_costs(4)))]))
    heights = [
        {float(point.split(",")[1]) for point in line.attrib["points"].split()}
        for line in root.iter(f"{SVG}polyline")
    ]
    # Rank r keeps 4 - r microbatches; rank 3's only one is replaced at once, then it is empty.
    assert [len(levels) for levels in heights] == [5, 4, 3, 2]
    assert min(heights[0]) < min(heights[1]) < min(heights[2]) < min(heights[3])


def test_export_is_read_back_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    assert main(["zb-h2", *SIZE, "--export", str(path), "--no-timeline"]) == 0
    assert main([f"file:{path}", "--json"]) == 0
    item = json.loads(capsys.readouterr().out.splitlines()[-1])["schedules"][0]
    assert (item["ranks"], item["microbatches"], item["span_bubble"]) == (4, 8, 0)


def test_auto_takes_costs_and_a_memory_limit(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--virtual", "2", "--memory-limit", "3", "--costs", "4,5,3", "--json"]
    assert main(["auto", *SIZE, *flags]) == 0
    item = json.loads(capsys.readouterr().out)["schedules"][0]
    assert max(item["peak_activations"]) <= 3


def test_costs_of_single_stages(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--pipeline-size", "2", "--microbatches", "4", "--costs", "1,1,1/3,3,3", "--json"]
    assert main(["gpipe", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["schedules"][0]["makespan"] == 1 + 36 + 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nope", *SIZE], "schedule nope is unknown; legal: 1f1b, auto"),
        (["1f1b"], "needs --pipeline-size and --microbatches"),
        (["zbv", *SIZE, "--virtual", "3"], "zbv: 3 stages per rank; 2 is legal"),
        (["1f1b", "--pipeline-size", "0", "--microbatches", "1"], "each at least 1"),
        (["1f1b", "--pipeline-size", "4", "--microbatches", "10000000"], "at most 1000000"),
        (["interleaved", *SIZE, "--virtual", "-1"], "at least 1"),
        (["interleaved", *SIZE, "--group-size", "2"], "4, the number of ranks"),
        (["1f1b", *SIZE, "--costs", "1,2"], "F,I,W once"),
        (["1f1b", *SIZE, "--costs", "a,b,c"], "separated by commas"),
        (["1f1b", *SIZE, "--costs", "1,1e-9999999,1"], "separated by commas"),
        (["1f1b", *SIZE, "--comm", "-1"], "not negative"),
        (["auto", *SIZE, "--memory-limit", "0"], "positive number"),
        (["all", *SIZE, "--export", "x.json"], "name one schedule"),
        (["file:missing.json"], "no such file"),
        (["file:x"], "must end in .json or .csv"),
        (["1f1b", *SIZE, "--svg", "no/such/folder/x.svg", "--json"], "cannot write"),
    ],
)
def test_refusals_are_one_line_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert told in message and message.count("\n") == 1


def test_an_invalid_table_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    rows = [list(row) for row in SCHEDULES["zb-h1"](2, 1, 3).ranks]
    rows[1].remove(Action(Kind.F, 1, 0))
    path.write_text("\n".join(",".join(map(str, row)) for row in rows))
    assert main([f"file:{path}"]) == 2
    assert "F1.0 is missing" in capsys.readouterr().err
