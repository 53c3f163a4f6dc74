"""Pictures of schedules: lines of text for a terminal, SVG for documents.

Time runs to the right, one row per rank; what a rank does has a colour by kind and, for
its later chunks, a lighter shade; of a pair both halves, one above the other. Below the
rows the activations that each rank keeps.
Everything drawn comes from the simulator's timeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megatron_lite.pipeline.actions import COMPUTE, Action, Kind, Schedule, singles_of
from megatron_lite.pipeline.costs import Time
from megatron_lite.pipeline.simulate import Report, Slot, Timeline, live_counts

_COLOURS = {
    Kind.F: ("#3b6fb6", "#8db4e2"),
    Kind.I: ("#d9822b", "#f2bb7e"),
    Kind.W: ("#3f8f4f", "#97cf9f"),
    Kind.B: ("#8a6d3b", "#c9b283"),
}
_MESSAGE, _REDUCTION, _IDLE, _INK = "#c0392b", "#7d3cb5", "#eceff1", "#263238"
_NAMES = {
    Kind.F: "forward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.B: "backward, undivided",
}


@dataclass(frozen=True)
class Played:
    """A schedule with its timeline and figures."""

    schedule: Schedule
    timeline: Timeline
    report: Report


def format_number(value: Time, digits: int = 2) -> str:
    """Write a time or a share: whole numbers without a point."""
    return f"{float(value):.{digits}f}".rstrip("0").rstrip(".") or "0"


def _compute_slots(played: Played, rank: int) -> list[Slot]:
    return [
        slot
        for slot in played.timeline.slots
        if slot.rank == rank and _is_computed(slot.action) and slot.end > slot.start
    ]


def _is_computed(action: Action) -> bool:
    return action.singles[0].kind in COMPUTE


def _chunk(schedule: Schedule, action: Action, rank: int) -> int:
    assert action.stage is not None
    return schedule.stages_of(rank).index(action.stage)


def draw_text(played: Played, width: int) -> str:
    """Draw the timeline in at most `width` columns.

    Each rank has a line of kinds (F, I, W, B; small letters on later chunks, a point when
    idle) and under it the last digit of the microbatch where an action begins. Where a rank
    has pairs, two more lines show their backward halves, the first two their forward ones.
    """
    schedule, makespan = played.schedule, played.report.makespan
    columns = max(1, width - 9)
    shortest = min(
        (slot.end - slot.start for rank in range(len(schedule.ranks))
         for slot in _compute_slots(played, rank)),
        default=1,
    )  # fmt: skip
    step = max(float(shortest) / 2, float(makespan) / columns)
    if float(makespan) / float(shortest) <= columns:
        step = float(shortest)
    lines = []
    for rank in range(len(schedule.ranks)):
        slots = _compute_slots(played, rank)
        for half in range(max((len(slot.action.singles) for slot in slots), default=1)):
            kinds = [" " if half else "."] * round(float(makespan) / step)
            numbers = [" "] * len(kinds)
            for slot in slots:
                if half >= len(slot.action.singles):
                    continue
                action = slot.action.singles[half]
                first = round(float(slot.start) / step)
                end = max(first + 1, round(float(slot.end) / step))
                letter = action.kind.value
                letter = letter.lower() if _chunk(schedule, action, rank) else letter
                for column in range(first, min(end, len(kinds))):
                    kinds[column] = letter
                if first < len(numbers):
                    numbers[first] = str((action.microbatch or 0) % 10)
            name = f"     & {'':<2}" if half else f"rank {rank:<3} "
            lines.append(f"{name}{''.join(kinds)}".rstrip())
            lines.append(f"{'':9}{''.join(numbers)}".rstrip())
    return "\n".join(lines)


class _Canvas:
    """Collects SVG elements."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, tip: str) -> None:
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.elements.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" '
            f'height="{height:.2f}" fill="{fill}">{title}</rect>'
        )

    def text(self, x: float, y: float, text: str, size: float, anchor: str = "start",
             fill: str = _INK, weight: str = "normal") -> None:  # fmt: skip
        self.elements.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{fill}" font-weight="{weight}">{escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, dash: str = "") -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.elements.append(
            f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{stroke}" '
            f'stroke-width="1"{dashed}/>'
        )

    def path(self, points: Sequence[tuple[float, float]], stroke: str) -> None:
        joined = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self.elements.append(
            f'<polyline points="{joined}" fill="none" stroke="{stroke}" stroke-width="1.6"/>'
        )


_WIDTH, _LEFT, _RIGHT = 1240.0, 62.0, 92.0
_ROW, _GAP, _LANE = 22.0, 7.0, 4.0
_MEMORY = 96.0


def draw_svg(played: Sequence[Played]) -> str:
    """Draw schedules below one another on one time axis; at least one."""
    canvas = _Canvas()
    longest = max(float(item.report.makespan) for item in played) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    y = _draw_legend(canvas, played)
    for item in played:
        y = _draw_schedule(canvas, item, y, scale, longest)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:g}" height="{y:g}" '
        f'viewBox="0 0 {_WIDTH:g} {y:g}" font-family="Helvetica, Arial, sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n'
    )
    return head + "\n".join(canvas.elements) + "\n</svg>\n"


def _draw_legend(canvas: _Canvas, played: Sequence[Played]) -> float:
    """One entry per colour that occurs; returns where the schedules begin."""
    kinds = {a.kind for item in played for row in item.schedule.ranks for a in singles_of(row)}
    chunked = any(item.schedule.num_stages > len(item.schedule.ranks) for item in played)
    entries = [
        (_COLOURS[kind], f"{kind.value} {_NAMES[kind]}") for kind in _COLOURS if kind in kinds
    ]
    if any(m.end > m.start for item in played for m in item.timeline.messages):
        entries.append(((_MESSAGE, _MESSAGE), "message under way"))
    if any(_reductions(item) for item in played):
        entries.append(((_REDUCTION, _REDUCTION), "reduction or gathering"))
    entries.append(((_IDLE, _IDLE), "idle"))
    x = _LEFT
    for (dark, light), name in entries:
        two = chunked and dark != light
        canvas.rect(x, 12, 13, 13, dark, "")
        if two:
            canvas.rect(x + 13, 12, 13, 13, light, "")
        x += 32 if two else 19
        canvas.text(x, 23, name, 12)
        x += 6.2 * len(name) + 22
    if chunked:
        canvas.text(x, 23, "(light: later chunks)", 12)
    return 40.0


def _reductions(item: Played) -> list[Slot]:
    return [
        slot
        for slot in item.timeline.slots
        if slot.action.kind in (Kind.REDUCE, Kind.UNSHARD) and slot.end > slot.start
    ]


def _draw_schedule(canvas: _Canvas, item: Played, y: float, scale: float, longest: float) -> float:
    """Title, rows, axis and memory of one schedule; returns where the next may begin."""
    schedule, report = item.schedule, item.report
    ranks = len(schedule.ranks)
    canvas.text(_LEFT, y + 14, _title(item), 14, weight="bold")
    canvas.text(
        _LEFT,
        y + 31,
        f"makespan {format_number(report.makespan)}, idle "
        f"{format_number(100 * report.bubble_fraction, 1)} % of all slots, at most "
        f"{format_number(max(report.peak_activations))} microbatches alive on a rank",
        12,
    )
    y += 40
    messages = any(m.end > m.start for m in item.timeline.messages) or bool(_reductions(item))
    pitch = _ROW + _GAP + (_LANE if messages else 0)
    for rank in range(ranks):
        _draw_rank(canvas, item, rank, y + rank * pitch, scale)
    y += ranks * pitch
    y = _draw_axis(canvas, y, scale, longest)
    return _draw_memory(canvas, item, y + 10, scale) + 26


def _title(item: Played) -> str:
    schedule = item.schedule
    chunks = schedule.num_stages // len(schedule.ranks)
    return (
        f"{schedule.name}: {len(schedule.ranks)} ranks, {chunks} stage{'s' * (chunks > 1)} each, "
        f"{schedule.num_microbatches} microbatches"
    )


def _draw_rank(canvas: _Canvas, item: Played, rank: int, y: float, scale: float) -> None:
    makespan = float(item.report.makespan)
    canvas.text(_LEFT - 8, y + _ROW * 0.68, f"rank {rank}", 12, "end")
    canvas.rect(_LEFT, y, makespan * scale, _ROW, _IDLE, "")
    for slot in _compute_slots(item, rank):
        singles = slot.action.singles
        for half, action in enumerate(singles):
            height = _ROW / len(singles)
            _draw_action(canvas, item, slot, action, y + half * height, height, scale)
    lane = y + _ROW + 1
    for message in item.timeline.messages:
        if message.source == rank and message.end > message.start:
            x, width = float(message.start) * scale, float(message.end - message.start) * scale
            tip = f"{message.action} to rank {message.destination}"
            canvas.rect(_LEFT + x, lane, width - 0.5, _LANE - 1, _MESSAGE, tip)
    for slot in _reductions(item):
        if slot.rank == rank:
            x, width = float(slot.start) * scale, float(slot.end - slot.start) * scale
            canvas.rect(_LEFT + x, lane + _LANE - 1, width, _LANE, _REDUCTION, str(slot.action))


def _draw_action(
    canvas: _Canvas, item: Played, slot: Slot, action: Action, y: float, height: float, scale: float
) -> None:
    """A computation, or half of a pair, whose slot it fills."""
    shade = min(1, _chunk(item.schedule, action, slot.rank))
    x, width = _LEFT + float(slot.start) * scale, float(slot.end - slot.start) * scale
    tip = f"{action}: {format_number(slot.start)} to {format_number(slot.end)}"
    inset = 0.5 if width > 3 else 0.1
    canvas.rect(x, y, width - inset, height, _COLOURS[action.kind][shade], tip)
    number = str(action.microbatch)
    size = min(height / 2, (width - 1.5) / (0.6 * len(number)))
    if size >= 5.5 or (height < _ROW and size >= 4.5):
        fill = _INK if shade else "white"
        canvas.text(x + width / 2, y + height / 2 + size * 0.36, number, size, "middle", fill)


def _tick_step(longest: float, most: int = 12) -> float:
    step = 1.0
    while longest / step > most:
        for factor in (2.0, 2.5, 2.0):
            step *= factor
            if longest / step <= most:
                break
    return step


def _draw_axis(canvas: _Canvas, y: float, scale: float, longest: float) -> float:
    canvas.line(_LEFT, y, _LEFT + longest * scale, y, _INK)
    step, at = _tick_step(longest), 0.0
    while at <= longest + 1e-9:
        x = _LEFT + at * scale
        canvas.line(x, y, x, y + 4, _INK)
        canvas.text(x, y + 15, format_number(at), 10, "middle")
        at += step
    canvas.text(_LEFT + longest * scale + 10, y + 15, "time", 10)
    return y + 20


def _draw_memory(canvas: _Canvas, item: Played, y: float, scale: float) -> float:
    """Activations alive per rank, in microbatches of a whole rank."""
    schedule, report = item.schedule, item.report
    top = max(1.0, float(max(report.peak_activations)))
    canvas.text(_LEFT, y + 8, "activations alive (microbatches of a whole rank)", 11)
    y += 14
    step = _tick_step(top, 5)
    level = 0.0
    while level <= top + 1e-9:
        height = y + _MEMORY * (1 - level / top)
        canvas.line(_LEFT, height, _LEFT + float(report.makespan) * scale, height, "#cfd8dc", "2 3")
        canvas.text(_LEFT - 8, height + 4, format_number(level), 10, "end")
        level += step
    ranks = len(schedule.ranks)
    for rank in range(ranks):
        colour = _rank_colour(rank, ranks)
        canvas.path(_memory_points(item, rank, y, top, scale), colour)
        spacing = min(13.0, _MEMORY / ranks)
        canvas.text(_WIDTH - _RIGHT + 12, y + 8 + rank * spacing, f"rank {rank}",
                    min(11.0, spacing), fill=colour)  # fmt: skip
    return y + _MEMORY


def _memory_points(
    item: Played, rank: int, y: float, top: float, scale: float
) -> list[tuple[float, float]]:
    """Steps: up when an F begins, down when a W or B ends."""
    row = [action for action in item.schedule.ranks[rank] if _is_computed(action)]
    chunks = max(1, len(item.schedule.stages_of(rank)))
    slots = [s for s in item.timeline.slots if s.rank == rank and _is_computed(s.action)]
    level: dict[Time, int] = {0: 0}  # from a time on; a W and an F at one instant cancel out
    for action, slot, counts in zip(row, slots, live_counts(row), strict=True):
        level[slot.start] = counts[0]
        ends = action.singles[-1].kind in (Kind.W, Kind.B)
        level[slot.end] = counts[0] - ends
    points: list[tuple[float, float]] = []
    for time in sorted(level):
        x = _LEFT + float(time) * scale
        if points:
            points.append((x, points[-1][1]))
        points.append((x, y + _MEMORY * (1 - level[time] / chunks / top)))
    points.append((_LEFT + float(item.report.makespan) * scale, points[-1][1]))
    return points


def _rank_colour(rank: int, ranks: int) -> str:
    """From dark blue on the first rank to orange on the last."""
    share = rank / max(1, ranks - 1)
    ends = ((38, 70, 140), (230, 120, 30))
    parts = [round(a + (b - a) * share) for a, b in zip(*ends, strict=True)]
    return "#" + "".join(f"{part:02x}" for part in parts)
