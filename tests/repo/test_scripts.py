"""The scripts: order of the checks, words for what a user can repair, no work done twice."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"])
PYTEST_LINE = "====== 3 passed in 0.01s ======"


def run_script(
    *command: str | Path, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    cleared = {k: v for k, v in os.environ.items() if not k.startswith(("MLITE_", "QUICKSTART_"))}
    return subprocess.run(
        ["bash", *map(str, command)],
        cwd=cwd,
        env={**cleared, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def copy_checkout(tmp_path: Path) -> Path:
    """Copy what the scripts need to decide, without the code that they would run."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", checkout / "scripts")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout / name)
    return checkout


def fake_environment(tmp_path: Path, failing: Sequence[str] = ()) -> Path:
    """Make an environment whose tools only report that they ran, or fail."""
    tools = tmp_path / "venv" / "bin"
    status = {name: int(name in failing) for name in ("ruff", "mypy", "lint-imports", "pytest")}
    for name in ("ruff", "lint-imports"):
        write_program(tools / name, f'#!/bin/sh\necho "ran {name} $1"\nexit {status[name]}\n')
    write_program(
        tools / "python",
        "#!/bin/sh\n"
        'case "$*" in\n'
        f'"-m pytest"*) echo "ran pytest $*"; echo "{PYTEST_LINE}"; exit {status["pytest"]};;\n'
        f'"-m mypy"*) echo "ran mypy"; exit {status["mypy"]};;\n'
        "esac\n"
        'case "$1" in -|-c|setup.py) echo key;; esac\n',
    )
    return tmp_path / "venv"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_is_executable(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert script.stat().st_mode & stat.S_IXUSR, f"{script} is not executable"
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")


def test_ci_runs_the_test_script_with_native_helpers_demanded() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "MLITE_REQUIRE_NATIVE=1" in text
    assert text.rstrip().endswith("exec ./scripts/test.sh")


def test_all_stages_run_in_order_and_the_test_runner_speaks_last(tmp_path: Path) -> None:
    checkout, venv = copy_checkout(tmp_path), fake_environment(tmp_path)
    result = run_script("scripts/test.sh", "-k", "grid", cwd=checkout, MLITE_VENV=str(venv))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    ran = [line.split()[1] for line in lines if line.startswith("ran ")]
    assert ran == ["ruff", "ruff", "mypy", "lint-imports", "pytest"]
    assert "-k grid" in next(line for line in lines if line.startswith("ran pytest"))
    assert lines[-1] == PYTEST_LINE


@pytest.mark.parametrize("failing", ["ruff", "mypy", "lint-imports"])
def test_failing_check_stops_the_run_and_is_named(tmp_path: Path, failing: str) -> None:
    checkout, venv = copy_checkout(tmp_path), fake_environment(tmp_path, [failing])
    result = run_script("scripts/test.sh", cwd=checkout, MLITE_VENV=str(venv))
    assert result.returncode == 1
    assert "ran pytest" not in result.stdout
    assert "FAILED" in result.stderr and "later stages not run" in result.stderr


def test_failing_tests_fail_the_script(tmp_path: Path) -> None:
    checkout, venv = copy_checkout(tmp_path), fake_environment(tmp_path, ["pytest"])
    result = run_script("scripts/test.sh", cwd=checkout, MLITE_VENV=str(venv))
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == PYTEST_LINE


def test_second_setup_in_an_existing_environment_builds_nothing(tmp_path: Path) -> None:
    checkout, venv = copy_checkout(tmp_path), fake_environment(tmp_path)
    first = run_script("scripts/setup.sh", "test", cwd=checkout, MLITE_VENV=str(venv))
    assert "building native operations" in first.stdout, first.stderr
    second = run_script("scripts/setup.sh", "test", cwd=checkout, MLITE_VENV=str(venv))
    assert second.returncode == 0
    assert "setup:" not in second.stdout + second.stderr


def test_native_build_that_failed_is_told_and_tried_again(tmp_path: Path) -> None:
    checkout, venv = copy_checkout(tmp_path), fake_environment(tmp_path)
    write_program(
        venv / "bin" / "python",
        "#!/bin/sh\n"
        'case "$1" in setup.py) echo "warning: native helpers not built (no compiler)";;'
        " -|-c) echo key;; esac\n",
    )
    for _ in range(2):
        result = run_script("scripts/setup.sh", "test", cwd=checkout, MLITE_VENV=str(venv))
        assert result.returncode == 0
        assert "setup: warning: native helpers not built (no compiler)" in result.stderr


def test_environment_that_lacks_a_package_is_told_how_to_get_it(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(empty)], check=True)
    result = run_script("scripts/setup.sh", "train", MLITE_VENV=str(empty))
    assert result.returncode == 2
    assert "lacks torch" in result.stderr and "pip install -e '.[train]'" in result.stderr


def test_unfit_python_is_refused_with_the_versions_that_fit(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path)
    write_program(tmp_path / "bin" / "old", "#!/bin/sh\nexit 1\n")
    result = run_script(
        "scripts/setup.sh", "train", cwd=checkout, MLITE_PYTHON=str(tmp_path / "bin" / "old")
    )
    assert result.returncode == 2
    assert "Python 3.11 or 3.12 is needed" in result.stderr
    assert not (checkout / ".venv").exists()


def test_python_without_venv_module_is_told_what_to_install(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path)
    write_program(
        tmp_path / "bin" / "bare",
        '#!/bin/sh\ncase "$*" in *platform*) echo 3.11.2; exit 0;; "-m venv"*) exit 1;; esac\n',
    )
    result = run_script(
        "scripts/setup.sh", "train", cwd=checkout, MLITE_PYTHON=str(tmp_path / "bin" / "bare")
    )
    assert result.returncode == 2
    assert "apt-get install python3.11-venv" in result.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--steps", "many"], "not a positive whole number"),
        (["--steps", "0"], "not a positive whole number"),
        (["--steps"], "--steps needs a number"),
        (["--corpus", "/nonexistent"], "no such folder"),
    ],
)
def test_quickstart_refuses_a_wrong_argument_before_any_work(
    tmp_path: Path, arguments: list[str], told: str
) -> None:
    result = run_script("scripts/quickstart.sh", *arguments, QUICKSTART_DIR=str(tmp_path / "run"))
    assert result.returncode == 2
    assert told in result.stderr
    assert not (tmp_path / "run").exists()


def test_too_small_a_corpus_is_refused_and_says_what_to_pass(tmp_path: Path) -> None:
    checkout, venv = copy_checkout(tmp_path), fake_environment(tmp_path)
    write_program(
        venv / "bin" / "python",
        "#!/bin/sh\n"
        'case "$1" in\n'
        'tools/collect_corpus.py) while [ "$1" != --output ]; do shift; done; echo text >"$2";;\n'
        "*) echo word;;\n"
        "esac\n",
    )
    runs = tmp_path / "run"
    result = run_script(
        "scripts/quickstart.sh", cwd=checkout, MLITE_VENV=str(venv), QUICKSTART_DIR=str(runs)
    )
    assert result.returncode == 2
    assert "--corpus DIR" in result.stderr and "20,000,000" in result.stderr
    assert not (runs / "corpus.jsonl.stamp").exists(), "a refused corpus is not reused"


def test_quickstart_help_describes_each_option() -> None:
    result = run_script("scripts/quickstart.sh", "--help")
    assert result.returncode == 0
    for word in ("--steps N", "--corpus DIR", "QUICKSTART_DIR", "MLITE_VENV"):
        assert word in result.stdout
