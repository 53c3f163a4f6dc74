"""From command line and file to a `Config`.

All faults of a command line are collected and told in one message. Abbreviations are
not accepted: `--seq` must never come to mean something else when a flag is added. A
value on the command line wins over the file's, the file's over the default. Megatron
flags outside the schema are recorded in the config as inert or refused; `rules` reports
the refused ones together with everything else that is wrong.
"""

from __future__ import annotations

import difflib
import math
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.config.files import read_config_file
from megatron_lite.config.help import format_help
from megatron_lite.config.options import Option, build_options
from megatron_lite.config.schema import Config, KnownFlag
from megatron_lite.errors import UserError

SWITCH_WORDS = {"true": True, "false": False}


@dataclass
class Arguments:
    """What was given so far: values by destination, the user's words, and all faults."""

    values: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def parse_config(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Parse a command line (without the program's name).

    `--help` prints the help on one rank and raises SystemExit(0).

    Raises:
        UserError: with every unknown flag, missing or wrong value and unknown key.
    """
    options = build_options()
    if "--help" in argv or "-h" in argv:
        if environ.get("RANK", "0") == "0":
            sys.stdout.write(format_help(options))
        raise SystemExit(0)
    command = parse_words(argv, options)
    given = Arguments()
    path = command.values.get("config_file")
    if path is not None:
        given = parse_file(path, options)
    given.values.update(command.values)
    given.texts.update(command.texts)
    errors = given.errors + command.errors
    inert, refused = rate_known_flags(given, options)
    if errors:
        errors += [f"{flag.text}: {flag.reason}" for flag in refused]
        raise UserError(format_faults(errors))
    values = {dest: value for dest, value in given.values.items() if options[dest].group}
    return Config(**values, inert_flags=inert, refused_flags=refused)


def format_faults(faults: Sequence[str]) -> str:
    """Form the one message that lists every fault."""
    head = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    return "\n".join([f"configuration refused, {head}:", *(f"  - {fault}" for fault in faults)])


def parse_words(argv: Sequence[str], options: Mapping[str, Option]) -> Arguments:
    """Read the words of a command line; the last of repeated flags wins."""
    by_name = {name: option for option in options.values() for name, _ in option.spellings}
    result = Arguments()
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("--"):
            result.errors.append(f"'{word}' stands alone: flags begin with --")
            continue
        name, equals, attached = word.partition("=")
        option = by_name.get(name)
        end = position
        while end < len(argv) and not argv[end].startswith("--"):
            end += 1
        if option is None:
            result.errors.append(unknown_flag(name, tuple(by_name)))
            position = end
            continue
        if equals:
            words = [attached]
        elif option.kind == "bool":
            words = []
        else:
            end = min(end, position + 1) if not option.nargs else end
            words = list(argv[position:end])
            position = end
        store(result, option, name, words)
    return result


def store(result: Arguments, option: Option, name: str, words: Sequence[str]) -> None:
    """Convert the words after one flag and keep the value, or the fault."""
    text = " ".join([name, *(word if word.strip() else repr(word) for word in words)])
    try:
        if option.kind == "bool":
            value: Any = switch_value(option, name, words)
        else:
            value = convert(option, list(words))
    except ValueError as fault:
        result.errors.append(f"{text}: {fault}")
        return
    result.values[option.dest] = value
    result.texts[option.dest] = text


def switch_value(option: Option, name: str, words: Sequence[str]) -> bool:
    """Return the value of a switch; `--flag=false` takes a file's switch back."""
    value = bool(dict(option.spellings)[name])
    if not words:
        return value
    if words[0].lower() not in SWITCH_WORDS:
        raise ValueError("a switch takes no value (or =true, =false)")
    return value if SWITCH_WORDS[words[0].lower()] else not value


def convert(option: Option, words: list[str]) -> Any:
    """Turn words into the option's type.

    Raises:
        ValueError: saying what was expected.
    """
    if option.join:
        if not words:
            raise ValueError("needs a value")
        return " ".join(words)
    if not option.nargs:
        if len(words) != 1:
            raise ValueError(f"needs a value ({describe_kind(option)})")
        return convert_word(option, words[0])
    joined = " ".join(words).strip()
    if joined.startswith("[") and joined.endswith("]"):
        # Launchers that read YAML pass a list as one bracketed word.
        words = joined[1:-1].replace(",", " ").split()
    if option.nargs == "+" and not words:
        raise ValueError(f"needs one or more values ({describe_kind(option)})")
    if option.nargs.isdigit() and len(words) != int(option.nargs):
        raise ValueError(f"needs {option.nargs} values, got {len(words)}")
    return tuple(convert_word(option, word) for word in words)


def convert_word(option: Option, word: str) -> Any:
    """Turn one word into the option's type."""
    value: Any = word
    if word in option.words:
        return word
    if option.kind == "str" and not word.strip() and option.default != "":
        # An unset variable of a launch script; taken as "not given" it would lose data.
        raise ValueError("needs a value, got empty text")
    if "\0" in word:
        raise ValueError("contains a NUL character")
    if option.kind == "int":
        try:
            value = int(word)
        except ValueError:
            words = "".join(f" or {word}" for word in option.words)
            raise ValueError(f"'{word}' is not an integer{words}") from None
        if value.bit_length() > 63:
            raise ValueError(f"'{word}' does not fit 64 bits")
    elif option.kind == "float":
        try:
            value = float(word)
        except ValueError:
            raise ValueError(f"'{word}' is not a number") from None
        if not math.isfinite(value):
            raise ValueError(f"'{word}' is not a finite number")
    if option.choices and str(value) not in option.choices:
        raise ValueError(f"'{word}' is not one of {', '.join(option.choices)}")
    return value


def describe_kind(option: Option) -> str:
    """Name the expected value."""
    if option.choices:
        return "one of " + ", ".join(option.choices)
    kind = {"int": "an integer", "float": "a number", "str": "text"}[option.kind]
    return " or ".join([kind, *option.words])


def unknown_flag(name: str, names: Sequence[str]) -> str:
    """Say that a flag is unknown and which known ones are close."""
    spelled = "--" + name[2:].replace("_", "-")
    if spelled in names:
        close = [spelled]
    else:
        # An abbreviation comes first; the most common one is short for few flags.
        longer = [known for known in names if known.startswith(spelled + "-")]
        close = longer if 1 <= len(longer) <= 3 else []
        close += [
            known
            for known in difflib.get_close_matches(spelled, names, n=3, cutoff=0.7)
            if known not in close
        ]
        close = close[:3]
    hint = f": did you mean {' or '.join(close)}?" if close else " (see --help)"
    return f"unknown flag {name}{hint}"


def parse_file(path: str, options: Mapping[str, Option]) -> Arguments:
    """Read a configuration file; keys are destinations."""
    result = Arguments()
    for raw_key, raw_value in read_config_file(path).items():
        key = str(raw_key).replace("-", "_")
        if key in result.values:
            result.errors.append(f"{path}: {key} is given twice, with - and with _")
            continue
        if key == "config_file":
            result.errors.append(f"{path}: {key}: a file cannot name another one")
            continue
        option = options.get(key)
        if option is None:
            close = difflib.get_close_matches(key, tuple(options), n=3, cutoff=0.7)
            hint = f": did you mean {' or '.join(close)}?" if close else ""
            result.errors.append(f"{path}: unknown key '{raw_key}'{hint}")
            continue
        try:
            value = convert_file_value(option, raw_value)
        except ValueError as fault:
            result.errors.append(f"{path}: {key}: {fault}")
            continue
        result.values[key] = value
        shown = raw_value if isinstance(raw_value, str) else show_value(raw_value)
        result.texts[key] = f"{key}: {shown} (in {path})"
    return result


def convert_file_value(option: Option, value: Any) -> Any:
    """Turn a value of a YAML or JSON file into the option's type."""
    if value is None:
        if option.default is not None:
            raise ValueError("null is not a value of this field")
        return None
    if option.kind == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"{show_value(value)} is not true or false")
        return value
    if isinstance(value, bool | dict):
        raise ValueError(f"{show_value(value)} is not {describe_kind(option)}")
    if not isinstance(value, list):
        # YAML 1.1 reads 1e-5 as text, so text is parsed as on the command line.
        return convert(option, [str(value)])
    if not option.nargs or option.join:
        raise ValueError(f"{show_value(value)} is a list; expected {describe_kind(option)}")
    if not value:
        return ()
    if any(isinstance(member, list | dict | bool | None) for member in value):
        raise ValueError(f"{show_value(value)}: expected a list of plain values")
    return convert(option, [str(word) for word in value])


def show_value(value: Any) -> str:
    """Write a value of a file in a few words: aliases make a short file a huge value."""
    short = reprlib.Repr()
    short.maxlevel, short.maxlist, short.maxdict, short.maxstring = 2, 4, 4, 80
    return short.repr(value)


def rate_known_flags(
    given: Arguments, options: Mapping[str, Option]
) -> tuple[tuple[KnownFlag, ...], tuple[KnownFlag, ...]]:
    """Split the given flags that do nothing here into inert and refused ones.

    A refused flag at its default asks for nothing and is accepted. Refused fields of the
    schema are left to the rules, which judge values however the config was made.
    """
    inert, refused = [], []
    for dest, value in given.values.items():
        option = options[dest]
        if option.status == "implemented":
            continue
        flag = KnownFlag(given.texts[dest], dest, option.reason)
        if option.status == "harmless":
            if not option.group or value != option.default:
                inert.append(flag)
        elif same_value(value, option.default):
            continue
        elif option.gate and not gate_is_open(option.gate, given, options):
            reason = f"no effect without {options[option.gate].name}"
            inert.append(KnownFlag(given.texts[dest], dest, reason))
        elif not option.group:
            refused.append(flag)
    return tuple(inert), tuple(refused)


def same_value(value: Any, default: Any) -> bool:
    """Compare a given value with a default; lists of one equal their only member."""
    if isinstance(value, tuple) and not isinstance(default, list | tuple):
        return value == (default,)
    if isinstance(default, list):
        return bool(value == tuple(default))
    return bool(value == default)


def gate_is_open(gate: str, given: Arguments, options: Mapping[str, Option]) -> bool:
    """Say whether the option that gives a flag its effect is in force."""
    default = options[gate].default
    return not same_value(given.values.get(gate, default), default)
