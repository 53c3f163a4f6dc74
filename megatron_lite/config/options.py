"""Every option the command line knows: the schema's fields and Megatron's other flags.

Fields of the schema are options; `megatron_flags.tsv` lists all of Megatron-LM's with a
status: implemented, harmless (accepted with a warning because it cannot change the
result) or refused with a reason. A row with a gate has no effect while the option it
names is at its default. No option is defined twice: what the schema has, the table only
rates.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.config.schema import GROUPS, flag_fields

TABLE_PATH = Path(__file__).with_name("megatron_flags.tsv")


@dataclass(frozen=True)
class Option:
    """One option.

    Args:
        dest: destination, the key in configuration files.
        spellings: (flag, value it sets); the value is None for flags that take words.
        kind: "int", "float", "str" or "bool".
        nargs: "" one word, "+" one or more, "*" any number, "3" exactly three.
        words: accepted beside numbers.
        join: several words form one string.
        group: heading in the help; "" for flags outside the schema.
        status: "implemented", "harmless" or "refused".
        gate: destination without which the option has no effect.
        reason: why it is refused, or why it has no effect.
    """

    dest: str
    spellings: tuple[tuple[str, bool | None], ...]
    kind: str
    nargs: str
    default: Any
    choices: tuple[str, ...]
    words: tuple[str, ...] = ()
    doc: str = ""
    unit: str = ""
    join: bool = False
    group: str = ""
    status: str = "implemented"
    gate: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        """The first spelling."""
        return self.spellings[0][0]


@dataclass(frozen=True)
class KnownRow:
    """One row of the table of Megatron's flags."""

    names: tuple[str, ...]
    action: str
    kind: str
    nargs: str
    dest: str
    status: str
    gate: str
    default: Any
    choices: tuple[str, ...]
    reason: str


@functools.cache
def load_known_rows() -> tuple[KnownRow, ...]:
    """Read the committed table, in Megatron's order; its content never changes."""
    rows = []
    for line in TABLE_PATH.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        names, action, kind, nargs, dest, status, gate, default, choices, reason = line.split("\t")
        rows.append(
            KnownRow(
                names=tuple(names.split("|")),
                action=action,
                kind=kind,
                nargs=nargs,
                dest=dest,
                status=status,
                gate=gate,
                default=json.loads(default),
                choices=tuple(choices.split()),
                reason=reason,
            )
        )
    return tuple(rows)


def build_options() -> dict[str, Option]:
    """Return all options by destination: the schema's first, in the order of the help."""
    rows = load_known_rows()
    rated: dict[str, KnownRow] = {}
    for row in rows:
        rated.setdefault(row.dest, row)
    options = {}
    for group, group_type in GROUPS:
        for field in flag_fields(group_type):
            options[field.name] = schema_option(field, group, rated.get(field.name))
    for row in rows:
        spellings = tuple((name, spelled_value(row, name)) for name in row.names)
        if row.dest not in options:
            options[row.dest] = known_option(row, spellings)
        elif not options[row.dest].group:
            # A second row for one destination: the opposite spelling of a switch.
            first = options[row.dest]
            options[row.dest] = dataclasses.replace(first, spellings=first.spellings + spellings)
    return options


def spelled_value(row: KnownRow, name: str) -> bool | None:
    """Return what a switch sets, or None for flags that take words."""
    if row.action == "value":
        return None
    if row.action == "both":
        return not name.startswith("--no-")
    return row.action == "true"


def known_option(row: KnownRow, spellings: tuple[tuple[str, bool | None], ...]) -> Option:
    """Build the option of a flag outside the schema."""
    return Option(
        dest=row.dest,
        spellings=spellings,
        kind=row.kind,
        nargs=row.nargs,
        default=row.default,
        choices=row.choices,
        status=row.status,
        gate=row.gate,
        reason=row.reason,
    )


def schema_option(field: dataclasses.Field[Any], group: str, row: KnownRow | None) -> Option:
    """Build the option of a schema field, rated by its row where it has one."""
    meta = field.metadata
    type_name = str(field.type).removesuffix(" | None")
    if meta["words"]:
        type_name = type_name.removesuffix(" | str")
    kind = type_name.removeprefix("tuple[").split(",")[0]
    dashed = field.name.replace("_", "-")
    if meta["names"]:
        names = meta["names"]
    elif kind == "bool" and field.default:
        names = (f"--no-{dashed}", f"--disable-{dashed}")
    else:
        names = (f"--{dashed}",)
    sets = {f"--{dashed}": True} if kind == "bool" else {}
    value = None if kind != "bool" else not field.default
    return Option(
        dest=field.name,
        spellings=tuple((name, sets.get(name, value)) for name in names),
        kind=kind,
        nargs=meta["nargs"],
        default=field.default,
        choices=tuple(str(choice) for choice in meta["choices"]),
        words=meta["words"],
        doc=meta["doc"],
        unit=meta["unit"],
        join=meta["join"],
        group=group,
        status=row.status if row else "implemented",
        gate=row.gate if row else "",
        reason=row.reason if row else "",
    )
