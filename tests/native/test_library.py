"""The native library: what it is made of, and what happens where it cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.errors import UserError
from megatron_lite.native import build, load, sources

ROOT = Path(__file__).resolve().parents[2]


def copy_of_sources(target: Path) -> Path:
    """A small checkout: one operation of one face file."""
    (target / "csrc" / "cpu").mkdir(parents=True)
    (target / "csrc" / "cpu" / "isa.h").write_text("// marks a checkout\n")
    (target / "csrc" / "cpu" / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    return target


def test_every_source_belongs_to_exactly_one_list() -> None:
    units = sources.host_units(ROOT, cuda=True) + sources.cuda_units(ROOT, ("80",))
    listed = {unit.source for unit in units}
    elsewhere = {"index", "sim"}  # a pybind11 module; the simulation of the tests
    present = {
        path.relative_to(ROOT)
        for pattern in ("*.cpp", "*.cu")
        for path in (ROOT / "csrc").rglob(pattern)
        if path.relative_to(ROOT).parts[1] not in elsewhere
    }
    assert listed == present
    objects = [unit.object for unit in units]
    assert len(objects) == len(set(objects))


def test_kernels_are_compiled_without_torch_and_faces_with_it() -> None:
    for unit in sources.host_units(ROOT, cuda=False):
        face = unit.source.name in ("api.cpp", "bindings.cpp")
        assert unit.torch == face
        text = (ROOT / unit.source).read_text(encoding="utf-8")
        assert face or "torch/csrc" not in text


def test_architectures_come_from_the_switch_or_the_default() -> None:
    assert sources.cuda_architectures({}, {"80", "90"}) == ("80", "90")
    assert sources.cuda_architectures({}, ()) == sources.DEFAULT_CUDA_ARCHITECTURES
    switch = {"MLITE_CUDA_ARCHITECTURES": "8.6; 100"}
    assert sources.cuda_architectures(switch, {"80"}) == ("86", "100")
    flags = sources.cuda_units(ROOT, ("80", "100"))[0].flags
    assert "-gencode=arch=compute_100,code=sm_100" in flags


def test_fingerprint_follows_names_contents_and_facts(tmp_path: Path) -> None:
    root = copy_of_sources(tmp_path)
    first = sources.fingerprint(root, "g++")
    assert first == sources.fingerprint(root, "g++")
    assert first != sources.fingerprint(root, "clang++")
    (root / "csrc" / "cpu" / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert first != sources.fingerprint(root, "g++")


def test_library_is_built_once_and_again_after_a_change(tmp_path: Path) -> None:
    root = copy_of_sources(tmp_path)
    library = build.build_library(root, cuda=False)
    written = library.stat().st_mtime_ns
    assert build.build_library(root, cuda=False).stat().st_mtime_ns == written
    (root / "csrc" / "cpu" / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert build.build_library(root, cuda=False).stat().st_mtime_ns != written


def test_failed_build_names_the_error_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copy_of_sources(tmp_path)
    broken = root / "csrc" / "cpu" / "one.cpp"
    broken.write_text("int one() { return nothing; }\n")
    with pytest.raises(build.BuildError, match="nothing"):
        build.build_library(root, cuda=False)

    def unexpected(directory: Path, lock: int) -> None:
        raise AssertionError("built a second time")

    monkeypatch.setattr(build, "_run_ninja", unexpected)
    with pytest.raises(build.BuildError, match=r"nothing.*remembered for 600 s"):
        build.build_library(root, cuda=False)
    failure = build.build_directory(root, cuda=False) / "failed"
    os.utime(failure, (0, 0))
    with pytest.raises(AssertionError, match="second time"):
        build.build_library(root, cuda=False)
    monkeypatch.undo()
    broken.write_text('extern "C" int one() { return 1; }\n')
    assert build.build_library(root, cuda=False).is_file()


def test_ninja_keeps_the_lock_of_a_builder_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copy_of_sources(tmp_path)
    inherited = []

    def watched(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        inherited.extend(options["pass_fds"])
        (lock,) = options["pass_fds"]
        assert os.readlink(f"/proc/self/fd/{lock}").endswith("/lock")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(build.subprocess, "run", watched)
    build.build_library(root, cuda=False)
    assert inherited


def test_place_that_cannot_be_written_is_a_reason_not_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(root: Path, cuda: bool) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "build_library", full)
    assert "No space left" in load._find().reason


def test_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        build.build_library(copy_of_sources(tmp_path), cuda=False)


def test_cuda_without_nvcc_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    with pytest.raises(build.BuildError, match="nvcc"):
        build.build_library(copy_of_sources(tmp_path), cuda=True)


def test_missing_library_warns_once_or_fails_where_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = load.Native(None, reason="no C++ compiler (g++) on PATH")
    monkeypatch.delenv("MLITE_REQUIRE_NATIVE", raising=False)
    assert "no C++ compiler" in load.require_native(missing, "cpu", wanted_by_user=False)
    with pytest.raises(UserError, match="no C\\+\\+ compiler"):
        load.require_native(missing, "cpu", wanted_by_user=True)
    monkeypatch.setenv("MLITE_REQUIRE_NATIVE", "1")
    with pytest.raises(UserError, match="required"):
        load.require_native(missing, "cpu", wanted_by_user=False)
    present = load.Native(Path("x.so"), cuda=False)
    assert load.require_native(present, "cpu", wanted_by_user=True) == ""
    with pytest.raises(UserError, match="without kernels for cuda"):
        load.require_native(present, "cuda", wanted_by_user=True)


def test_operations_exist_without_the_library() -> None:
    program = (
        "import torch\n"
        "from megatron_lite.ops.norm import norm_forward\n"
        "out = norm_forward(torch.ones(2, 4), None, torch.ones(4), None, 0.0, False)[0]\n"
        "assert torch.equal(out, torch.ones(2, 4))\n"
        "assert not torch.ops.loaded_libraries\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_limit_of_instructions_is_taken_from_the_environment() -> None:
    native = load.load_native()
    if native.library is None:
        pytest.skip(f"no native library: {native.reason}")
    program = (
        "import ctypes, os\n"
        f"library = ctypes.CDLL({str(native.library)!r})\n"
        "most = library.ml_limit_isa(-1)\n"
        "print(most, library.ml_limit_isa(0), library.ml_limit_isa(99))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import torch\n{program}"], capture_output=True, text=True
    )
    most, lowest, lifted = map(int, done.stdout.split())
    assert lowest == 0
    assert lifted == most
