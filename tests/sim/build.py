"""Build kernel sources for simulation on the CPU, load them, call their launchers.

A library is the given sources plus the runtime of csrc/sim, compiled by g++ in one of the
MODES, and kept under build/sim until a file that it was made from changes. Launchers are
`extern "C"` with pointers, int64_t, float or double arguments and a stream as the last one.
The invariant: a library that is handed out was made from the sources as they are now.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import math
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CACHE = ROOT / "build" / "sim"
RUNTIME = sorted((CSRC / "sim").glob("*.cpp"))

# No contraction: a multiply and an add round twice, at every level of optimisation.
CODE = ("-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-pthread")
COMMON = (*CODE, "-fno-gnu-unique", "-Wall", "-Wextra", "-Wno-unknown-pragmas")
MODES: dict[str, tuple[str, ...]] = {
    "plain": ("-O2", "-g1"),
    "asan": ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address"),
    "ubsan": ("-O1", "-g", "-fsanitize=undefined", "-fno-sanitize-recover=all"),
    "tsan": ("-O1", "-g", "-fsanitize=thread"),
}
# The runtime's own bookkeeping is not what the race check looks at.
RUNTIME_MODES = MODES | {"tsan": ("-O2", "-g1", "-DML_SIM_TSAN")}
PRELOADED = {"asan": "libasan.so", "tsan": "libtsan.so"}
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Memory is used again for other arrays: a second race there is news.
    "TSAN_OPTIONS": "report_thread_leaks=0:suppress_equal_addresses=0:exitcode=66",
}


class SimError(RuntimeError):
    """A launch that the simulation stopped; the text is its report."""


# ---- what this machine has -----------------------------------------------------------------
@cache
def compiler() -> str | None:
    """The host compiler, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


@cache
def nvcc() -> str | None:
    """CUDA's compiler, or None: kernels can be simulated without it."""
    home = os.environ.get("CUDA_HOME")
    beside = [Path(home) / "bin" / "nvcc"] if home else []
    found = [str(path) for path in beside if path.is_file()]
    return found[0] if found else shutil.which("nvcc")


@cache
def cuda_headers() -> tuple[Path, ...]:
    """Folders that together hold CUDA's headers: a toolkit's, or those of a Python wheel."""
    candidates = [
        Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
    ]
    program = nvcc()
    if program is not None:
        candidates.append(Path(program).resolve().parents[1])
    candidates += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"))]
    for home in candidates:
        if (home / "include" / "cuda_fp8.h").is_file():
            return (home / "include",)
    # The wheel that torch brings for its compiler has them too, but for one small header.
    for package in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        folder = package / "triton" / "backends" / "nvidia" / "include"
        if all((folder / name).is_file() for name in ("cuda_fp8.h", "crt/host_defines.h")):
            return (folder, CSRC / "sim" / "host_only")
    return ()


def why_not() -> str | None:
    """The reason why kernels cannot be simulated here, for a skip; None if they can."""
    if compiler() is None:
        return "no g++ on this machine"
    if not cuda_headers():
        return "no CUDA headers (cuda_fp8.h, crt/host_defines.h) on this machine"
    return None


# ---- compiling -----------------------------------------------------------------------------
def digest_of(parts: Sequence[str], files: Sequence[Path]) -> str:
    """A short hash of words and of files' contents: the name of what is made from them."""
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in files:
        digest.update(path.read_bytes() if path.is_file() else b"absent")
    return digest.hexdigest()[:20]


def _run(command: Sequence[str]) -> None:
    # Not under the sanitizer that this process may run under.
    variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    result = subprocess.run(command, capture_output=True, text=True, env=variables)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr[-8000:]}")
    if result.stderr.strip():
        print(result.stderr[-8000:], file=sys.stderr)


def _object(source: Path, flags: tuple[str, ...]) -> Path:
    """Compile one file, or find what it was compiled to: its name has the hash of its inputs."""
    name = f"{source.stem}-{digest_of((str(source), compiler() or '', *flags), ())}"
    listing = CACHE / f"{name}.json"
    with locked(listing):
        if listing.is_file():
            inputs = [Path(path) for path in json.loads(listing.read_text())]
            ready = CACHE / f"{name}-{digest_of((), inputs)}.o"
            if ready.is_file():
                return ready
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            made, deps = Path(scratch) / "out.o", Path(scratch) / "out.d"
            command = [str(compiler()), *flags, "-MMD", "-MF", str(deps), "-x", "c++"]
            _run([*command, "-c", str(source), "-o", str(made)])
            words = deps.read_text().replace("\\\n", " ").split(":", 1)[1].split()
            inputs = [Path(word).resolve() for word in words]
            ready = CACHE / f"{name}-{digest_of((), inputs)}.o"
            made.replace(ready)
            listing.write_text(json.dumps([str(path) for path in inputs]))
        return ready


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time make the file at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.with_suffix(".lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(
    sources: Sequence[Path | str], mode: str | None = None, defines: Sequence[str] = ()
) -> Path:
    """Compile sources and runtime into a shared library.

    Args:
        sources: .cu or .cpp files, absolute or relative to the repository.
        mode: one of MODES; by default that of the process, MLITE_SIM_MODE or "plain".
        defines: macros, "NAME" or "NAME=VALUE".
    """
    mode = mode or default_mode()
    reason = why_not()
    if reason is not None:
        raise RuntimeError(f"kernels cannot be simulated: {reason}")
    paths = [ROOT / source for source in sources]
    folders = [f"-I{CSRC}", *(part for f in cuda_headers() for part in ("-isystem", str(f)))]
    macros = [f"-D{define}" for define in defines]
    tasks = [(path, (*COMMON, *MODES[mode], *folders, *macros)) for path in paths]
    tasks += [(path, (*COMMON, *RUNTIME_MODES[mode], *folders)) for path in RUNTIME]
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(lambda task: _object(*task), tasks))
    stem = "_".join(path.stem for path in paths)[:60]
    library = CACHE / f"{stem}-{mode}-{digest_of([path.name for path in objects], ())}.so"
    with locked(library):
        if not library.is_file():
            made = library.with_suffix(".new")
            sanitizer = [flag for flag in MODES[mode] if flag.startswith("-fsanitize")]
            # Undefined symbols are an error here, not at the first call.
            link = [str(compiler()), "-shared", "-pthread", *sanitizer, "-Wl,-Bsymbolic"]
            defs = [] if sanitizer else ["-Wl,-z,defs"]
            _run([*link, *defs, *map(str, objects), "-o", str(made)])
            made.replace(library)
    return library


def default_mode() -> str:
    """The mode of this process: a suite runs as a whole in one mode, see `environment`."""
    return os.environ.get("MLITE_SIM_MODE", "plain")


# ---- calling -------------------------------------------------------------------------------
class Kernels:
    """The launchers of one library, with the simulation's options, reports and counters."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.ml_sim_error.restype = ctypes.c_char_p
        self.library.ml_sim_counter_names.restype = ctypes.c_char_p
        self._names = self.library.ml_sim_counter_names().decode().split()
        self.set(failure="record")

    def set(self, **options: str | int) -> None:
        """Set options until they are set again.

        order: "fwd", "rev" or "rand:SEED", of blocks, warps and lanes; cp_async: "late" or
        "early"; threads: OS threads, 0 for all cores; count: 1 groups accessors' addresses by
        warp (sectors and bank conflicts); blocks: "FIRST:COUNT" runs only these, or "all";
        failure: "record" (`call` raises) or "abort".
        """
        for name, value in options.items():
            if self.library.ml_sim_set(name.encode(), str(value).encode()) != 0:
                raise ValueError(f"the simulation has no option {name}={value}")

    @contextlib.contextmanager
    def options(self, **options: str | int) -> Iterator[None]:
        """Set options for a block of calls; afterwards they have their defaults."""
        defaults: dict[str, str | int] = {
            "order": "fwd",
            "cp_async": "late",
            "threads": 0,
            "count": 0,
            "blocks": "all",
        }
        self.set(**options)
        try:
            yield
        finally:
            self.set(**{name: defaults[name] for name in options})

    def call(self, launcher: str, *arguments: Any) -> None:
        """Call a launcher; a null stream is added as the last argument.

        Arrays become pointers, None a null pointer, int int64_t, float float, np.float64
        double. Raises SimError with the report when the simulation stopped the launch.
        """
        converted = [_argument(value) for value in arguments]
        code = getattr(self.library, launcher)(*converted, ctypes.c_void_p(None))
        report = self.library.ml_sim_error(1).decode()
        if report:
            raise SimError(report)
        if code != 0:
            raise SimError(f"{launcher} returned {code}")

    def count(self, launcher: str, *arguments: Any) -> dict[str, int]:
        """Call a launcher with count=1; what was counted during the call."""
        self.library.ml_sim_reset_counters()
        with self.options(count=1):
            self.call(launcher, *arguments)
        values = (ctypes.c_uint64 * len(self._names))()
        self.library.ml_sim_counters(values)
        return dict(zip(self._names, map(int, values), strict=True))


def _argument(value: Any) -> Any:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, np.float64):
        return ctypes.c_double(value)
    if isinstance(value, float | np.float32):
        return ctypes.c_float(float(value))
    if isinstance(value, int | np.integer):
        return ctypes.c_int64(int(value))
    raise TypeError(f"no launcher takes a {type(value).__name__}")


def load(
    sources: Sequence[Path | str], mode: str | None = None, defines: Sequence[str] = ()
) -> Kernels:
    """Build (see `build`) and load. Modes asan and tsan need a process under `environment`."""
    return Kernels(build(sources, mode, defines))


def poisoned(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An output of 0xff bytes: NaN in the floating types, -1 in the signed integers.

    Aligned to 256 bytes as device memory is, and of exactly the size asked for, so that
    AddressSanitizer sees the first byte beyond.
    """
    sizes = (shape,) if isinstance(shape, int) else shape
    num_bytes = math.prod(sizes) * np.dtype(dtype).itemsize
    libc, address = ctypes.CDLL(None), ctypes.c_void_p()
    if libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(256), ctypes.c_size_t(num_bytes)):
        raise MemoryError(f"{num_bytes} bytes")
    memory = (ctypes.c_ubyte * num_bytes).from_address(address.value or 0)
    weakref.finalize(memory, libc.free, address)
    ctypes.memset(address, 0xFF, num_bytes)
    return np.ndarray(sizes, dtype, buffer=memoryview(memory))


def placed(values: NDArray[Any]) -> NDArray[Any]:
    """A copy of an input in memory like that of `poisoned`."""
    copy = poisoned(values.shape, values.dtype)
    copy[...] = values
    return copy


def sparse(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Zeros of any size in pages that take memory only once written: for sizes over 2^31."""
    sizes = (shape,) if isinstance(shape, int) else shape
    num_bytes = math.prod(sizes) * np.dtype(dtype).itemsize
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return np.frombuffer(pages, dtype=dtype).reshape(sizes)


# ---- sanitized processes -------------------------------------------------------------------
def environment(mode: str) -> dict[str, str]:
    """The environment in which Python loads libraries of `mode` (a sanitizer comes first)."""
    variables = dict(os.environ) | {"MLITE_SIM_MODE": mode, "OPENBLAS_NUM_THREADS": "1"}
    for name, value in SANITIZER_OPTIONS.items():
        variables[name] = value
    if mode in PRELOADED:
        query = [str(compiler()), f"-print-file-name={PRELOADED[mode]}"]
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        variables["LD_PRELOAD"] = str(Path(found).resolve())
    return variables


def run_python(mode: str, arguments: Sequence[str], timeout: float = 250) -> tuple[int, str]:
    """Run `python ARGUMENTS` from the repository under `environment(mode)`: exit code, output."""
    command = [sys.executable, *arguments]
    variables = environment(mode)
    result = _captured(command, variables, timeout)
    if "unexpected memory mapping" in result[1] and shutil.which("setarch"):
        # ThreadSanitizer cannot place its shadow where addresses are spread very widely.
        result = _captured(["setarch", "-R", *command], variables, timeout)
    return result


def _captured(command: Sequence[str], variables: dict[str, str], timeout: float) -> tuple[int, str]:
    done = subprocess.run(
        command, cwd=ROOT, env=variables, text=True, timeout=timeout,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout
