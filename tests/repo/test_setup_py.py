"""The package installs with and without a compiler; a demanded native helper is an error."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTENSION = "_index" + str(sysconfig.get_config_var("EXT_SUFFIX"))


def build_native(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("pybind11")
    command = ["setup.py", "build_ext", "--force"]
    command += ["--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path / "lib")]
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "MLITE_REQUIRE_NATIVE": "0", **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_native_helper_builds_with_a_compiler(tmp_path: Path) -> None:
    result = build_native(tmp_path, MLITE_REQUIRE_NATIVE="1")
    assert result.returncode == 0, result.stderr[-2000:]
    assert (tmp_path / "lib" / "megatron_lite" / "data" / EXTENSION).is_file()


def test_missing_compiler_warns_once_and_the_installation_goes_on(tmp_path: Path) -> None:
    result = build_native(tmp_path, CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stderr.count("warning: native helpers not built") == 1
    assert "Python twins run" in result.stderr
    assert not (tmp_path / "lib" / "megatron_lite" / "data" / EXTENSION).exists()


def test_missing_compiler_is_an_error_where_native_helpers_are_demanded(tmp_path: Path) -> None:
    result = build_native(
        tmp_path, CC="/nonexistent/cc", CXX="/nonexistent/c++", MLITE_REQUIRE_NATIVE="1"
    )
    assert result.returncode != 0
    assert "MLITE_REQUIRE_NATIVE" in result.stderr
