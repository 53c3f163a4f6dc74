"""tools/bench/pipeline.py: whom a case is held against, what its ratios are, legal flags."""

import os

import pytest

from megatron_lite.config.flags import parse_config
from megatron_lite.config.rules import check_config
from megatron_lite.pipeline.schedules import SCHEDULES as GENERATORS
from tools.bench.pipeline import (
    ALONE,
    BATCH,
    MICRO,
    OURS,
    SCHEDULES,
    SIZE,
    against,
    flags_of,
    print_schedules,
    rivals_of,
)


def test_every_schedule_is_a_case_whose_flags_are_legal() -> None:
    assert set(SCHEDULES) == set(GENERATORS) - {"single"}
    for case in (*OURS, "ours-zbv-off", "ours-single"):
        config = parse_config(flags_of(case, "/nowhere", SIZE), os.environ)
        check_config(config, 1 if case in ALONE else 2)
        assert (config.native_ops == "off") == case.endswith("-off")
    assert BATCH // MICRO >= 2 * 2  # a steady phase in every schedule


@pytest.mark.parametrize(
    ("case", "rivals"),
    [
        ("ours-zbv", ("ours-1f1b", "torch-zbv", "ours-single")),
        ("ours-zbv-off", ("ours-1f1b-off", "torch-zbv", "ours-single-off")),
        ("torch-zbv", ("torch-1f1b", "", "plain-single")),
        ("ours-single", ("", "plain-single", "")),
        ("plain-single", ("", "", "")),
    ],
)
def test_a_case_is_held_against_its_kind(case: str, rivals: tuple[str, str, str]) -> None:
    assert rivals_of(case) == rivals


def test_ratios_are_of_rates(capsys: pytest.CaptureFixture[str]) -> None:
    """Half the seconds are twice the rate; first of the fastest rounds, then the median."""
    assert against([1.0, 2.0, 3.0], [2.0, 3.0, 9.0]) == "2.000 (2.000)"
    assert against([1.0], None) == ""
    print_schedules({"ours-1f1b": [1.0, 2.0], "torch-1f1b": [2.0, 2.0]}, tokens=2048)
    row = capsys.readouterr().out.splitlines()[2]
    assert row == "| ours-1f1b | 1536 [1024-2048] |  | 2.000 (1.500) |  |"
