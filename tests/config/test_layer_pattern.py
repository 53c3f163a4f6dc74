"""Patterns of layers: what they mean, and that nothing is executed."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.layer_pattern import expand_pattern


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1", [1, 1, 1, 1, 1, 1]),
        ("2", [1, 0, 1, 0, 1, 0]),
        ("9", [1, 0, 0, 0, 0, 0]),
        ("[0,1,1,1,1,1]", [0, 1, 1, 1, 1, 1]),
        ("([0]*1+[1]*5)", [0, 1, 1, 1, 1, 1]),
        ("[0, 1] * 3", [0, 1, 0, 1, 0, 1]),
        ("3*[0,1]", [0, 1, 0, 1, 0, 1]),
    ],
)
def test_patterns_say_which_layers(text: str, wanted: list[int]) -> None:
    assert list(expand_pattern(text, 6)) == [bool(flag) for flag in wanted]


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "",
        "[]",
        "[1]",
        "[2]*6",
        "[True]*6",
        "1.5",
        "-1",
        "6*6",
        "[1]*-6",
        "[1]*(10**9)",
        "[1]*999999999",
        "__import__('os')",
        "[1]*6;1",
        "[x]*6",
        "(" * 300,
        "[[1]]*6",
        "1\n2",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        expand_pattern(text, 6)


@given(st.text(alphabet="[]()01*+, 9", max_size=20))
def test_any_text_is_a_pattern_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert len(expand_pattern(text, 6)) == 6
