"""`docs/cases.md` is complete: every case has tests, every test that it names exists."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (C\d{3}) \| ([A-Z]+) \| ([^|]+) \| (.+) \|$")
# What training with tensor, sequence, pipeline and data parallelism, checkpoints and conversion
# keep out.
CASES = (
    "C001 C002 C003 C004 C005 C006 C007 C011 C014 C015 C021 C022 C023 C024 C025 C026 C027 C028 "
    "C029 C030 C031 C032 C033 C034 C036 C037 C038 C039 C040 C041 C042 C044 C048 C049 C050 C051 "
    "C052 C053 C054 C055 C056 C057 C058 C059 C060 C061 C062 C063 C064 C065 C066 C072 C073 C074 "
    "C075 C080 C081 C082 C083 C084 C085 C086 C089 C091 C092"
)


def table() -> dict[str, tuple[str, list[str]]]:
    """Case -> kind and node ids."""
    lines = (REPOSITORY / "docs" / "cases.md").read_text(encoding="utf-8").splitlines()
    rows = [match.groups() for line in lines if (match := ROW.match(line))]
    assert len({case for case, *_ in rows}) == len(rows)
    return {case: (kind, re.findall(r"`([^`]+)`", nodes)) for case, kind, _, nodes in rows}


def functions(path: Path) -> set[str]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("case", CASES.split())
def test_case_has_tests_that_exist(case: str) -> None:
    assert case in table()
    _, nodes = table()[case]
    assert nodes
    for node in nodes:
        file, _, name = node.partition("::")
        assert name in functions(REPOSITORY / file), node


def test_tests_that_name_a_case_stand_in_its_row() -> None:
    rows = table()
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        for name in functions(path):
            for number in re.findall(r"(?<=_)c(\d{3})(?=_)", name):
                if f"C{number}" in rows:
                    node = f"{path.relative_to(REPOSITORY).as_posix()}::{name}"
                    assert node in rows[f"C{number}"][1], node


def test_cases_of_a_kind_have_a_file_of_its_kind() -> None:
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        kinds = {kind.lower() for kind, _ in table().values()}
        # A long kind may go on in further files, KIND_subject.
        assert path.stem.removeprefix("test_").partition("_")[0] in {*kinds, "table"}
