"""Every option of Megatron-LM is known by name, and real launch lines parse."""

import json
from pathlib import Path

import pytest

from megatron_lite.config.flags import parse_config
from megatron_lite.config.options import build_options, load_known_rows
from megatron_lite.config.rules import violations
from megatron_lite.config.schema import flag_fields

LAUNCH = json.loads((Path(__file__).parents[1] / "data" / "launch_flags.json").read_text())
ROWS = load_known_rows()
# Defaults that are ours on purpose; the interface lists them.
# Two switches of Megatron set one value, which its model takes to be true.
OWN_DEFAULTS = {"data_parallel_sharding_strategy", "yarn_correction_range_round_to_int"}


def test_table_holds_all_838_options_of_megatron():
    assert sum(not row.dest.startswith("export_") for row in ROWS) == 838


def test_no_spelling_is_defined_twice():
    names = [name for option in build_options().values() for name, _ in option.spellings]
    assert len(names) == len(set(names))


def test_every_option_is_implemented_or_carries_a_reason():
    for row in ROWS:
        assert row.status in ("implemented", "harmless", "refused"), row.names
        assert (row.status == "implemented") == (row.reason == ""), row.names


def test_every_gate_names_an_option():
    options = build_options()
    assert all(row.gate in options for row in ROWS if row.gate)


def test_implemented_options_are_fields():
    fields = {field.name for field in flag_fields()}
    assert {row.dest for row in ROWS if row.status == "implemented"} <= fields


def test_fields_keep_megatrons_spellings_types_and_defaults():
    options = build_options()
    fields = {field.name for field in flag_fields()}
    for row in ROWS:
        if row.dest not in fields:
            continue
        option = options[row.dest]
        assert set(row.names) <= {name for name, _ in option.spellings}, row.names
        assert option.kind == row.kind, row.names
        if row.dest in OWN_DEFAULTS:
            continue
        default = option.default[0] if option.nargs == "+" and option.default else option.default
        assert default == row.default or (not default and not row.default), row.names


def test_every_field_has_a_help_text():
    for field in flag_fields():
        assert field.metadata["doc"].endswith((".", ")")), field.name


@pytest.mark.parametrize("name", LAUNCH["lines"])
def test_public_launch_line_parses(name):
    words = [word for index in LAUNCH["lines"][name] for word in LAUNCH["words"][index]]
    config = parse_config(words, {})
    for rule, message in violations(config, 64):
        assert "unknown" not in message, (rule, message)


def test_dense_launch_line_is_legal():
    indices = LAUNCH["lines"]["gpt/gpt3_15b_8t_release"]
    words = [word for index in indices for word in LAUNCH["words"][index]]
    assert violations(parse_config(words, {}), 64) == []
