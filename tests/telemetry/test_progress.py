"""The live line: only on a terminal, never mixed with other output."""

from __future__ import annotations

import io

import pytest

from megatron_lite.telemetry.facade import Telemetry
from megatron_lite.telemetry.options import TelemetryOptions
from megatron_lite.telemetry.progress import (
    ERASE_LINE,
    ProgressLine,
    format_duration,
    format_rate,
)
from tests.telemetry.shapes import tiny_plan
from tests.telemetry.test_facade import row


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_stream_that_is_no_terminal_stays_clean() -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream, 10)
    progress.update(1, 5.0, 100.0, 2560.0)
    progress.clear()
    progress.close()
    assert stream.getvalue() == ""


def test_the_line_shows_rate_eta_and_loss() -> None:
    stream = Terminal()
    ProgressLine(stream, 400).update(100, 5.4321, 210.0, 12345.0)
    assert stream.getvalue() == (
        f"{ERASE_LINE}100/400 25% | loss 5.4321 | 12.3k tokens/s | 210 ms | ETA 0:01:03"
    )


def test_it_is_redrawn_at_most_ten_times_a_second_and_after_the_last_iteration() -> None:
    stream = Terminal()
    now = [0.0]
    progress = ProgressLine(stream, 4, lambda: now[0])
    for iteration, at in ((1, 0.0), (2, 0.05), (3, 0.11), (4, 0.12)):
        now[0] = at
        progress.update(iteration, 1.0, 50.0, None)
    drawn = [text.split("/")[0] for text in stream.getvalue().split(ERASE_LINE)[1:]]
    assert drawn == ["1", "3", "4"]


def test_a_log_line_starts_on_an_empty_line() -> None:
    terminal = Terminal()
    telemetry = Telemetry(
        TelemetryOptions(log_interval=2),
        tiny_plan(),
        True,
        stream=terminal,
        progress_stream=terminal,
    )
    telemetry.train(row(1))
    telemetry.say("saved")
    telemetry.close()
    text = terminal.getvalue()
    live = text.index("1/20 5%")
    assert text.index(ERASE_LINE + "saved\n") > live


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00:00"), (61, "0:01:01"), (3600, "1:00:00"), (90061, "1d 1:01:01"), (-3, "0:00:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(123.4, "123 tokens/s"), (4567.0, "4.57k tokens/s"), (2.5e6, "2.5M tokens/s")],
)
def test_rates(rate: float, text: str) -> None:
    assert format_rate(rate) == text
