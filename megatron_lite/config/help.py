"""The text of `--help`: what each flag does, its unit and default, by group."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from megatron_lite.config.options import Option

INDENT = 6
WIDTH = 98
HEAD = """usage: pretrain.py --num-layers N --hidden-size H --num-attention-heads N ... [FLAGS]

Trains a language model. Names, types and defaults are Megatron-LM's. Several processes
are started by torchrun, srun or mpirun; plain python is one process. Flags may also be
written to a YAML or JSON file by field name (--config-file); --print-config shows one."""


def format_help(options: Mapping[str, Option]) -> str:
    """Form the help text of all options of the schema."""
    lines = [HEAD]
    group = ""
    for option in options.values():
        if not option.group:
            continue
        if option.group != group:
            group = option.group
            lines += ["", f"{group}:"]
        lines += format_option(option)
    outside = sum(1 for option in options.values() if not option.group)
    lines.append("")
    lines += textwrap.wrap(
        f"{outside} further flags of Megatron-LM are known by name: each is accepted with a "
        "warning where it cannot change the result, or refused with the reason.",
        WIDTH,
    )
    return "\n".join(lines) + "\n"


def format_option(option: Option) -> list[str]:
    """Form the lines of one option: spellings and value, then meaning and default."""
    head = "  " + ", ".join(name for name, _ in option.spellings) + value_text(option)
    notes = []
    if option.unit:
        notes.append(f"unit: {option.unit}")
    if option.kind == "bool":
        notes.append("default: off")
    elif option.default is not None:
        notes.append(f"default: {default_text(option.default)}")
    text = f"{option.doc} [{'; '.join(notes)}]" if notes else option.doc
    if option.status == "refused":
        text += f" ({option.reason})"
    elif option.status == "harmless":
        text += " (accepted, no effect yet)"
    pad = " " * INDENT
    return [head, *textwrap.wrap(text, WIDTH, initial_indent=pad, subsequent_indent=pad)]


def value_text(option: Option) -> str:
    """Show what follows the flag."""
    if option.kind == "bool":
        return ""
    word = {"int": "N", "float": "X", "str": "TEXT"}[option.kind]
    if option.choices:
        word = "{" + ",".join(option.choices) + "}"
    count = {"": "", "+": " ...", "*": " ...", "3": f" {word} {word}"}[option.nargs]
    return f" {word}{count}"


def default_text(default: Any) -> str:
    """Show a default as it would be typed."""
    if isinstance(default, tuple):
        return " ".join(str(item) for item in default) or "none"
    return str(default)
