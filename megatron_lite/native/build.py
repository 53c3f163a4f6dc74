"""Build the native library with ninja: incrementally, in parallel, once per machine.

The result is one shared object without Python in it. It lies in `build/native/<toolchain>/`
of the checkout (or in the user's cache where that cannot be written), beside its key, the
hash of everything that went into it. Processes that want it at the same time wait for one
builder behind a file lock; a failure is remembered for ten minutes under the same key.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lite.native import sources

LIBRARY = "mlite_ops.so"
_FAILURE_LASTS_S = 600
CUDA_MARK = "with_cuda"  # lies beside a library that was installed with CUDA kernels


class BuildError(Exception):
    """The library cannot be built; the text says why and where the whole output lies."""


def find_compiler() -> str:
    """The C++ compiler: $CXX, else g++, c++ or clang++ on PATH."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler ({wanted or 'g++, c++, clang++'}) on PATH")


def find_nvcc() -> str | None:
    """nvcc of $CUDA_HOME, of PATH or of the usual place."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(str(Path(home) / "bin" / "nvcc"))


def find_cudart(nvcc: str) -> Path:
    """The CUDA runtime of nvcc's toolkit (nvcc may be a wrapper), else the one torch brings."""
    said = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True
    ).stderr
    homes = [Path(line.partition("TOP=")[2]) for line in said.splitlines() if "TOP=" in line]
    homes += [Path(nvcc).resolve().parent.parent]
    patterns = ("lib64/libcudart.so", "lib/libcudart.so", "targets/*/lib/libcudart.so")
    found = [path for home in homes for pattern in patterns for path in home.glob(pattern)]
    import torch

    packages = Path(torch.__file__).parent.parent / "nvidia"
    found += sorted(packages.glob("*/lib/libcudart.so*"))
    if not found:
        raise BuildError(f"no libcudart.so in the toolkit of {nvcc} or among torch's packages")
    return found[0].absolute()


def cuda_architectures() -> tuple[str, ...]:
    """What this machine's nvcc builds for: the switch, else the default list as far as it knows."""
    nvcc, known = find_nvcc(), []
    if nvcc is not None:
        listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
        known = [word.removeprefix("compute_") for word in listed.split()]
    return sources.cuda_architectures(os.environ, known)


def wants_cuda() -> bool:
    """Whether CUDA kernels go in: MLITE_CUDA=1 or 0, else where a device and nvcc are there."""
    wish = os.environ.get("MLITE_CUDA", "")
    if wish in ("0", "1"):
        return wish == "1"
    if not Path("/dev/nvidia0").exists() or find_nvcc() is None:
        return False
    import torch

    return torch.version.cuda is not None


def _quote(text: str) -> str:
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def torch_flags() -> list[str]:
    """What a face that sees torch is compiled with."""
    import torch

    home = Path(torch.__file__).parent
    headers = (home / "include", home / "include" / "torch" / "csrc" / "api" / "include")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    return [*(part for path in headers for part in ("-isystem", _quote(str(path)))), abi]


def link_flags(cuda: bool) -> list[str]:
    """What the library is linked with; a symbol that nothing defines is an error.

    Raises:
        BuildError: CUDA is wanted, but there is no nvcc or a torch without CUDA.
    """
    import torch

    folders, libraries = [Path(torch.__file__).parent / "lib"], ["-ltorch_cpu", "-lc10"]
    if cuda:
        nvcc = find_nvcc()
        if nvcc is None:
            raise BuildError("MLITE_CUDA=1, but nvcc is neither on PATH nor in $CUDA_HOME/bin")
        if torch.version.cuda is None:
            raise BuildError(f"MLITE_CUDA=1, but torch {torch.__version__} is built without CUDA")
        runtime = find_cudart(nvcc)
        folders.append(runtime.parent)
        libraries += [_quote(str(runtime)), "-ltorch_cuda"]
    places = [flag for path in folders for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    return [*map(_quote, places), *libraries, "-Wl,-z,defs"]


def _ninja_file(root: Path, compiler: str, cuda: bool) -> str:
    link = " ".join(link_flags(cuda))
    include = f"-I{_quote(str(root / 'csrc'))}"
    lines = [
        "ninja_required_version = 1.5",
        "rule cxx",
        f"  command = {_quote(compiler)} -MMD -MF $out.d $flags {include} -c $in -o $out",
        "  depfile = $out.d\n  deps = gcc",
        "rule nvcc",
        f"  command = {_quote(find_nvcc() or 'nvcc')} -MD -MF $out.d $flags {include}"
        " -c $in -o $out",
        "  depfile = $out.d\n  deps = gcc",
        "rule link",
        f"  command = {_quote(compiler)} -shared -o $out.new $in {link} && mv -f $out.new $out",
    ]
    objects = []
    for unit in sources.host_units(root, cuda):
        lines.append(f"build {unit.object}: cxx {_quote(str(root / unit.source))}")
        extra = torch_flags() if unit.torch else []
        lines.append(f"  flags = {' '.join([*unit.flags, *extra])}")
        objects.append(unit.object)
    for unit in sources.cuda_units(root, cuda_architectures()) if cuda else []:
        lines.append(f"build {unit.object}: nvcc {_quote(str(root / unit.source))}")
        lines.append(f"  flags = {' '.join(unit.flags)}")
        objects.append(unit.object)
    lines += [f"build {LIBRARY}: link {' '.join(objects)}", f"default {LIBRARY}", ""]
    return "\n".join(lines)


def _toolchain(cuda: bool) -> str:
    import torch

    version = torch.__version__.split("+")[0]
    return f"torch-{version}-{'cuda' if cuda else 'cpu'}"


def build_directory(root: Path, cuda: bool) -> Path:
    """Where this checkout's library is built; the user's cache where `build/` is read-only."""
    place = root / "build" / "native"
    try:
        place.mkdir(parents=True, exist_ok=True)
        writable = os.access(place, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
        place = cache / "megatron_lite" / sources.fingerprint(root)
    return place / _toolchain(cuda)


@contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Hold the directory; yields the lock's descriptor."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle.fileno()


def _run_ninja(directory: Path, lock: int) -> None:
    ninja = Path(sys.executable).parent / "ninja"
    command = [str(ninja) if ninja.exists() else shutil.which("ninja") or "ninja"]
    if jobs := os.environ.get("MAX_JOBS"):
        command += ["-j", jobs]
    log = directory / "build.log"
    with open(log, "w", encoding="utf-8") as output:
        try:
            # ninja inherits the lock: where we are killed, the next builder waits for it.
            done = subprocess.run(
                command,
                cwd=directory,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(lock,),
            )
        except FileNotFoundError:
            raise BuildError("ninja is not installed (pip install ninja)") from None
    if done.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        telling = (
            line
            for line in lines
            if re.search(r"error|undefined reference|cannot find", line, re.I)
        )
        first = next(telling, "no error line")
        raise BuildError(f"{first.strip()} (whole output: {log})")


def build_library(root: Path, cuda: bool) -> Path:
    """The library of these sources, built now unless it is there already.

    Args:
        root: of the checkout.
        cuda: with the CUDA kernels.

    Raises:
        BuildError: no compiler, no ninja, or a compilation failed (now or, with the same
            sources, earlier).
    """
    compiler = find_compiler()
    architectures = cuda_architectures() if cuda else ()
    key = sources.fingerprint(root, compiler, _toolchain(cuda), *architectures)
    directory = build_directory(root, cuda)
    library, stamp, failure = (directory / n for n in (LIBRARY, f"{LIBRARY}.key", "failed"))
    with _locked(directory) as lock:
        if library.is_file() and stamp.is_file() and stamp.read_text() == key:
            return library
        _refuse_to_repeat(failure, key)
        (directory / "build.ninja").write_text(_ninja_file(root, compiler, cuda), encoding="utf-8")
        # Minutes of silence would look like a hang.
        print(f"building the native operations, once per change: {directory}", file=sys.stderr)
        try:
            _run_ninja(directory, lock)
        except BuildError as error:
            failure.write_text(f"{key}\n{error}", encoding="utf-8")
            raise
        failure.unlink(missing_ok=True)
        stamp.write_text(key)
        return library


def _refuse_to_repeat(failure: Path, key: str) -> None:
    """Do not let every rank of a job, one after the other, fail for minutes."""
    try:
        text, age_s = failure.read_text(encoding="utf-8"), time.time() - failure.stat().st_mtime
    except FileNotFoundError:
        return
    if text.startswith(key) and age_s < _FAILURE_LASTS_S:
        raise BuildError(f"{text[len(key) + 1 :]}; failed {age_s:.0f} s ago, remembered for "
                         f"{_FAILURE_LASTS_S} s")  # fmt: skip
