"""scripts/gpu_check.sh: refuses early where nothing can be checked, tells what every stage did."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).resolve().parent


def check(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MLITE_") and k != "OUT"}
    return subprocess.run(
        ["bash", "scripts/gpu_check.sh", *arguments],
        cwd=checkout,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def fake_machine(tmp_path: Path, lacks: str = "", build: int = 0, tests: int = 0) -> Path:
    """An environment whose Python answers as one with an sm_90 device; stages only report."""
    write_program(
        tmp_path / "venv" / "bin" / "python",
        "#!/bin/bash\n"
        'case "$*" in\n'
        '"-c ") exit 0;;\n'
        '"-") text="$(cat)"; case "$text" in\n'
        f'  *find_spec*) echo "{lacks}";;\n'
        "  *get_device_capability*) echo 90;;\n"
        "  *) echo facts of a fake;;\n"
        "  esac;;\n"
        f'*load_native*) echo "built for $MLITE_CUDA_ARCHITECTURES"; exit {build};;\n'
        f'*"--deselect"*) echo "ran tests"; exit {tests};;\n'
        '*kernels.py*) while [ "$1" != --json ]; do shift; done; echo "{}" >"$2"\n'
        '  echo "| table |";;\n'
        '*test_sanitizer.py*) echo "ran sanitizer"; exit 0;;\n'
        '*) echo "unexpected: $*"; exit 7;;\n'
        "esac\n",
    )
    shutil.copytree(ROOT / "scripts", tmp_path / "checkout" / "scripts")
    return tmp_path / "checkout"


def test_a_machine_without_gpu_is_refused_with_one_message(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    environment = Path(os.environ.get("VIRTUAL_ENV", TORCH.parents[3]))
    if not (environment / "bin" / "python").is_file():
        pytest.skip("no environment to name")
    out = tmp_path / "out"
    result = check(ROOT, str(out), MLITE_VENV=str(environment))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "no CUDA device" in result.stderr and result.stdout == ""
    assert not out.exists()


def test_an_environment_that_lacks_a_package_is_named(tmp_path: Path) -> None:
    result = check(fake_machine(tmp_path, lacks="hypothesis"), MLITE_VENV=str(tmp_path / "venv"))
    assert result.returncode == 2
    assert "lacks: hypothesis" in result.stderr
    result = check(ROOT, MLITE_VENV=str(tmp_path / "nothing"))
    assert result.returncode == 2
    assert "no Python found" in result.stderr and "MLITE_VENV" in result.stderr


def test_stages_run_in_order_for_this_device_alone(tmp_path: Path) -> None:
    checkout, out = fake_machine(tmp_path), tmp_path / "out"
    result = check(checkout, OUT=str(out), MLITE_VENV=str(tmp_path / "venv"))
    assert result.returncode == 0, result.stdout + result.stderr
    summary = (out / "summary.txt").read_text().split("\n")
    stages = [line.split()[1] for line in summary if line.startswith("ok")]
    assert stages == ["facts", "build", "tests", "benchmark", "sanitizer"]
    assert "built for 90" in (out / "build.log").read_text()
    assert "| table |" in result.stdout
    assert json.loads((out / "bench.json").read_text()) == {}


def test_failed_tests_fail_the_check_but_not_the_benchmark(tmp_path: Path) -> None:
    checkout = fake_machine(tmp_path, tests=1)
    result = check(checkout, str(tmp_path / "out"), MLITE_VENV=str(tmp_path / "venv"))
    assert result.returncode == 1
    assert "FAILED   tests (exit 1" in result.stdout and "ok       benchmark" in result.stdout


def test_a_failed_build_leaves_the_rest_out(tmp_path: Path) -> None:
    checkout = fake_machine(tmp_path, build=3)
    result = check(checkout, str(tmp_path / "out"), MLITE_VENV=str(tmp_path / "venv"))
    assert result.returncode == 1
    assert "FAILED   build (exit 3" in result.stdout and "ran tests" not in result.stdout
    assert "NOT RUN  tests, benchmark, sanitizer" in result.stdout


def test_no_stage_starts_when_the_time_is_over(tmp_path: Path) -> None:
    checkout = fake_machine(tmp_path)
    result = check(checkout, MLITE_VENV=str(tmp_path / "venv"), MLITE_GPU_CHECK_SECONDS="3")
    assert result.returncode == 1
    assert "NOT RUN  facts (no time left)" in result.stdout
    assert (checkout / "runs" / "gpu_check" / "summary.txt").is_file()
