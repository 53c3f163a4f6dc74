"""The import contracts hold, catch what they are for, and hold at run time."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def contracts() -> dict[str, dict[str, list[str]]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {entry["id"]: entry for entry in settings["tool"]["importlinter"]["contracts"]}


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "lint-imports"
    if not program.exists():
        pytest.skip("import-linter is not installed")
    return subprocess.run(
        [str(program), "--no-logo", "--no-cache"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "megatron_lite", tmp_path / "megatron_lite", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_contracts_are_kept(checkout: Path) -> None:
    result = lint_imports(checkout)
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("config/plan.py", "import torch", "torch-free"),
        ("mesh/grid.py", "import megatron_lite.microbatch", "torch-free"),
        ("spec/params.py", "from megatron_lite.mesh import groups", "torch-free"),
        ("mesh/planted.py", "import megatron_lite.spec", "layers"),
        ("tensor/planted.py", "import megatron_lite.model", "layers"),
        ("optim/planted.py", "import megatron_lite.model", "no-model"),
        ("data/planted.py", "def late():\n    import megatron_lite.tensor", "no-model"),
    ],
)
def test_planted_import_breaks_its_contract(
    checkout: Path, module: str, line: str, contract: str
) -> None:
    path = checkout / "megatron_lite" / module
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(f"{before}\n{line}\n", encoding="utf-8")
    result = lint_imports(checkout)
    assert result.returncode == 1
    assert f"{contracts()[contract]['name']} BROKEN" in result.stdout


def test_torch_free_modules_load_without_torch() -> None:
    modules = [str(name) for name in contracts()["torch-free"]["source_modules"]]
    script = f"import sys, {', '.join(modules)}\nprint([m for m in sys.modules if m == 'torch'])"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "[]"
