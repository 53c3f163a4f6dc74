"""tests/data/kernel_bugs.json is complete: every reported fault has tests, every test exists.

A fault that CUDA kernels and CPU operations can share is tested in both, in simulation and by
the operation; where one side cannot have it, the row's note says why. `reported` names public
reports, and is empty for common faults of such kernels.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS: list[dict[str, Any]] = json.loads(
    (ROOT / "tests" / "data" / "kernel_bugs.json").read_text(encoding="utf-8")
)
FAMILIES = {path.name for path in (ROOT / "csrc").iterdir() if any(path.rglob("*api.cpp"))}


@cache
def functions(file: str) -> frozenset[str]:
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['family']}: {row['fault']}")
def test_fault_has_tests_that_exist(row: dict[str, Any]) -> None:
    assert row["operations"]
    assert row["kernels"] or row["note"]
    for node in row["kernels"] + row["operations"]:
        file, _, name = node.partition("::")
        assert name in functions(file), node
        assert name.startswith("test_")
    assert all(node.startswith("tests/kernels/") for node in row["kernels"])


def test_every_family_has_faults_and_none_is_named_twice() -> None:
    assert {row["family"] for row in ROWS} == FAMILIES
    named = [(row["family"], row["fault"]) for row in ROWS]
    assert len(set(named)) == len(named)


def test_every_family_keeps_its_offsets_64_bit() -> None:
    """In simulation and on the CPU; a product on CUDA is torch's own."""
    for family in FAMILIES:
        rows = [r for r in ROWS if r["family"] == family and "32 bits" in r["fault"]]
        assert any(row["operations"] for row in rows), family
        assert family == "matrix" or any(row["kernels"] for row in rows), family


def test_what_stands_in_the_file_of_reported_faults_is_in_the_table() -> None:
    nodes = {node for row in ROWS for node in row["kernels"] + row["operations"]}
    for file in ("tests/kernels/test_reported_bugs.py", "tests/ops/test_reported_bugs.py"):
        for name in functions(file):
            if name.startswith("test_"):
                assert f"{file}::{name}" in nodes
