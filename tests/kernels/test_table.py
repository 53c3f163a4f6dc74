"""docs/kernels.md is complete: every kernel source has its row, every test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and "`" in line]
# Kernels, not the declarations and faces around them; the index is a module of its own.
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*/*.cu", "*/cpu/*.cpp")
    for path in (ROOT / "csrc").glob(pattern)
)


@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_source_has_a_row(source: str) -> None:
    path = Path(source)
    family = path.parts[1]
    # A row names its source whole, or by its file after a row of the same folder.
    named = [row for row in ROWS if f"`{source}`" in row]
    short = [row for row in ROWS if path.suffix == ".cu" and f"`{path.name}`" in row]
    assert named or short, source
    assert any(f"csrc/{family}/" in row for row in ROWS)


def test_rows_of_a_table_have_its_columns() -> None:
    for block in re.split(r"\n\n", TEXT):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) <= 1


def test_sources_and_tests_that_are_named_exist() -> None:
    named = set(re.findall(r"`((?:csrc|tests|megatron_lite)/[\w/.]+)`", TEXT))
    assert named
    for path in named:
        assert (ROOT / path).exists(), path
