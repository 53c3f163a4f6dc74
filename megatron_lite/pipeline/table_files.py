"""Schedule tables as files: JSON with everything, CSV with one line of actions per rank.

A table may hold the computations only; transfers and the closing actions are then put in,
as for a generator. CSV also takes the spelling of torch.distributed.pipelining ("0F3" for
F0.3, empty cells for idle slots). A file is somebody else's input: it is bounded, checked
and verified here, and whatever is wrong is one `UserError` with the file's name.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lite.errors import UserError
from megatron_lite.pipeline.actions import (
    COMPUTE,
    HANDOVER,
    TRANSFER,
    Action,
    Kind,
    Schedule,
    parse_action,
    singles_of,
)
from megatron_lite.pipeline.passes import Rows, insert_closing, insert_transfers
from megatron_lite.pipeline.verify import check_placement, check_schedule

FORMAT = "megatron_lite schedule"
MAX_BYTES = 256 * 2**20
MAX_ACTIONS = 8 * 2**20
_KEYS = ("format", "name", "num_microbatches", "placement", "bounds", "forward_only", "ranks")
_REQUIRED = ("format", "num_microbatches", "placement", "ranks")
_TORCH = re.compile(r"([0-9]{1,9})(F|I|W|B)([0-9]{1,9})")
_CLOSING = (Kind.REDUCE, Kind.NORM, Kind.STEP)


def format_json(schedule: Schedule) -> str:
    """Return the JSON text of a table; `read_table` gives the same table back."""
    head = {
        "format": FORMAT,
        "name": schedule.name,
        "num_microbatches": schedule.num_microbatches,
        "placement": list(schedule.placement),
        "bounds": list(schedule.bounds),
        "forward_only": schedule.forward_only,
    }
    lines = [json.dumps([str(action) for action in row]) for row in schedule.ranks]
    ranks = ",\n  ".join(lines)
    return json.dumps(head, indent=1)[:-2] + f',\n "ranks": [\n  {ranks}\n ]\n}}\n'


def format_csv(schedule: Schedule) -> str:
    """Return the CSV text of a table: no header; bounds and name are not in it."""
    if schedule.forward_only:
        raise UserError(f"schedule {schedule.name} is forward only: CSV cannot say that, use JSON")
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.ranks)


def write_table(schedule: Schedule, path: Path) -> None:
    """Write a table as JSON or CSV, by the ending of the file's name."""
    text = format_csv(schedule) if _is_csv(path) else format_json(schedule)
    try:
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def read_table(path: Path) -> Schedule:
    """Read, complete and verify a table.

    Raises:
        UserError: the file cannot be read, is not a table, or the table is refused.
    """
    is_csv = _is_csv(path)
    try:
        if not path.is_file():
            raise UserError(f"cannot read {path}: no such file")
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: {path.stat().st_size} bytes, at most {MAX_BYTES} are read")
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not a schedule: {_brief(error)}") from error
    try:
        schedule = _parse_csv(text, path.stem) if is_csv else _parse_json(text, path.stem)
        _check_counts(schedule)
        check_placement(schedule)
        schedule = _complete(schedule)
        check_schedule(schedule)
    except (ValueError, RecursionError, csv.Error) as error:
        raise UserError(f"{path} is not a usable schedule: {_brief(error)}") from error
    return schedule


def _is_csv(path: Path) -> bool:
    ending = path.suffix.lower()
    if ending not in (".csv", ".json"):
        raise UserError(f"schedule file {path}: the name must end in .json or .csv")
    return ending == ".csv"


def _brief(error: BaseException) -> str:
    """One line of bounded length, whatever the file contains."""
    text = " ".join((str(error) or type(error).__name__).split())
    return text if len(text) <= 1000 else text[:997] + "..."


def _parse_json(text: str, name: str) -> Schedule:
    value = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError(f'not an object with "format": "{FORMAT}"')
    unknown = [key for key in value if key not in _KEYS]
    missing = [key for key in _REQUIRED if key not in value]
    if unknown or missing:
        raise ValueError(
            f"missing keys: {', '.join(missing) or 'none'}; unknown keys: "
            f"{', '.join(repr(key)[:40] for key in unknown) or 'none'}"
        )
    rows = value["ranks"]
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError('"ranks" is not a list of lists')
    if sum(map(len, rows)) > MAX_ACTIONS:
        raise ValueError(f"more than {MAX_ACTIONS} actions")
    given = value.get("name", name)
    flag = value.get("forward_only", False)
    if not isinstance(given, str) or not isinstance(flag, bool):
        raise ValueError('"name" must be a text and "forward_only" true or false')
    return Schedule(
        given[:100],
        _integers([value["num_microbatches"]], "num_microbatches")[0],
        _integers(value["placement"], "placement"),
        tuple(tuple(_cell(cell) for cell in row) for row in rows),
        _integers(value.get("bounds", []), "bounds"),
        flag,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _integers(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31 for item in value
    ):
        raise ValueError(f'"{name}" must hold integers from 0 to 2^31 - 1')
    return tuple(value)


def _cell(cell: Any) -> Action:
    if not isinstance(cell, str):
        raise ValueError(f"{repr(cell)[:64]} is not an action")
    return parse_action(cell)


def _parse_csv(text: str, name: str) -> Schedule:
    rows: list[tuple[Action, ...]] = []
    total = 0
    for number, line in enumerate(csv.reader(io.StringIO(text), strict=True), 1):
        cells = [cell.strip() for cell in line if cell.strip()]
        total += len(cells)
        if total > MAX_ACTIONS:
            raise ValueError(f"more than {MAX_ACTIONS} actions")
        try:
            rows.append(tuple(_csv_cell(cell) for cell in cells))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    while rows and not rows[-1]:
        rows.pop()
    return Schedule(name, _count_microbatches(rows), _derive_placement(rows), tuple(rows))


def _csv_cell(cell: str) -> Action:
    torch = _TORCH.fullmatch(cell)
    if torch is None:
        return parse_action(cell)
    stage, kind, microbatch = torch.groups()
    return Action(Kind(kind), int(stage), int(microbatch))


def _count_microbatches(rows: Sequence[Sequence[Action]]) -> int:
    return 1 + max(
        (a.microbatch for row in rows for a in singles_of(row) if a.microbatch is not None),
        default=-1,
    )


def _derive_placement(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Each stage is on the rank whose line computes it."""
    holders: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in singles_of(row):
            stage = action.stage
            if action.kind not in COMPUTE or stage is None:
                continue
            if holders.setdefault(stage, rank) != rank:
                raise ValueError(f"stage {stage} is computed on ranks {holders[stage]} and {rank}")
    if sorted(holders) != list(range(len(holders))):
        missing = next(stage for stage in range(len(holders)) if stage not in holders)
        raise ValueError(f"no rank computes stage {missing} of {max(holders) + 1}")
    return tuple(holders[stage] for stage in range(len(holders)))


def _check_counts(schedule: Schedule) -> None:
    """Refuse sizes that the actions cannot fill before anything grows with the sizes."""
    actions = sum(len(singles_of(row)) for row in schedule.ranks)
    needed = schedule.num_microbatches * schedule.num_stages
    if not needed or actions < needed:
        raise ValueError(
            f"{actions} actions are not those of {schedule.num_microbatches} microbatches on "
            f"{schedule.num_stages} stages"
        )


def _complete(schedule: Schedule) -> Schedule:
    """Put in transfers, and closing actions, where the file has none of them."""
    kinds = {action.kind for row in schedule.ranks for action in row}
    rows: Rows = [list(row) for row in schedule.ranks]
    several = len(schedule.placement) > 1
    if several and kinds.isdisjoint((*TRANSFER, *HANDOVER)):
        closing = [[a for a in singles_of(row) if a.kind not in COMPUTE] for row in rows]
        if any(closing):
            raise ValueError("transfers are missing; leave them out together with REDUCE to STEP")
        rows = insert_transfers(rows, schedule.placement)
    if not schedule.forward_only and kinds.isdisjoint(_CLOSING):
        rows = insert_closing(rows, schedule.placement)
    return replace(schedule, ranks=tuple(map(tuple, rows)))
