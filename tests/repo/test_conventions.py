"""House rules that a reader relies on: names of modules, docstrings, lengths, decisions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for folder in ("megatron_lite", "tools", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 400
# One declaration per flag: a table, not a program.
TABLES = {"megatron_lite/config/schema.py"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def long_functions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.name} ({lines} lines)"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_module_has_one_subject_and_says_which(path: Path) -> None:
    assert path.stem not in ("utils", "util", "common", "helpers", "misc")
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    if tree.body:
        assert ast.get_docstring(tree), "the module does not say what it owns"
    assert not list(long_functions(tree))
    assert len(text.splitlines()) <= MAX_FILE_LINES or name_of(path) in TABLES


def test_decisions_are_numbered_without_gaps_and_dated() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"# {page.name[:4]}: ")
        assert re.search(r"^Status: \w+, \d{4}-\d\d-\d\d$", text, re.MULTILINE)
