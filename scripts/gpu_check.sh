#!/usr/bin/env bash
# Check and measure the native operations on a machine with a GPU, within 8 minutes.
#
#   ./scripts/gpu_check.sh [FOLDER]     results go to FOLDER, $OUT, or runs/gpu_check
#
# Stages, each with a time limit: facts of the machine; build for this device's architecture
# only; the `gpu` tests against float64; benchmark table (also bench.json); compute-sanitizer
# where present. Exit 0: all passed; 1: a stage failed; 2: nothing can be checked here.
# Installs nothing, needs no network.
#
#   MLITE_VENV=DIR              the environment to use (default: .venv, else python3 on PATH)
#   MLITE_GPU_CHECK_SECONDS=N   all stages together (default 460)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "gpu_check: $*" >&2; exit 2; }

if [ -n "${MLITE_VENV:-}" ]; then
    python="$MLITE_VENV/bin/python"
elif [ -x .venv/bin/python ]; then
    python="$PWD/.venv/bin/python"
else
    python="$(command -v python3 || true)"
fi
if [ -z "$python" ] || ! "$python" -c '' 2>/dev/null; then
    fail "no Python found (tried: ${python:-python3 on PATH}); name one by MLITE_VENV=DIR"
fi
missing="$("$python" - <<'PY'
import shutil
from importlib.util import find_spec
needed = ["torch", "numpy", "pytest", "pytest_timeout", "hypothesis"]
needed += [] if shutil.which("ninja") else ["ninja"]
print(" ".join(name for name in needed if find_spec(name) is None))
PY
)"
[ -z "$missing" ] || fail "the environment of $python lacks: $missing (./scripts/setup.sh test installs them)"
if ! capability="$("$python" - 2>/dev/null <<'PY'
import torch
major, minor = torch.cuda.get_device_capability(0)
print(f"{major}{minor}")
PY
)"; then
    fail "no CUDA device: torch of $python sees none, and these checks need one"
fi

out="${1:-${OUT:-runs/gpu_check}}"
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export MLITE_CUDA=1 MLITE_REQUIRE_NATIVE=1
export MLITE_CUDA_ARCHITECTURES="${MLITE_CUDA_ARCHITECTURES:-$capability}"
deadline=$((SECONDS + ${MLITE_GPU_CHECK_SECONDS:-460}))
summary=()
failed=0

# stage NAME LIMIT COMMAND...: output to the terminal and to NAME.log.
stage() {
    local name="$1" limit="$2" started=$SECONDS status=0 left=$((deadline - SECONDS))
    shift 2
    if [ "$left" -lt 5 ]; then
        summary+=("NOT RUN  $name (no time left)")
        failed=1
        return
    fi
    echo "== $name"
    timeout --signal=INT --kill-after=10 "$((limit < left ? limit : left))" "$@" 2>&1 |
        tee "$out/$name.log" || status=${PIPESTATUS[0]}
    case "$status" in
        0) summary+=("ok       $name ($((SECONDS - started)) s)") ;;
        124 | 137) summary+=("TIMEOUT  $name ($((SECONDS - started)) s)"); failed=1 ;;
        *) summary+=("FAILED   $name (exit $status, $((SECONDS - started)) s)"); failed=1 ;;
    esac
}

facts() {
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv || true
    "$python" - <<'PY'
import platform

import torch

from megatron_lite.native.build import find_nvcc

print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}")
for index in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(index))
print(f"nvcc: {find_nvcc()}")
PY
    echo "architectures: $MLITE_CUDA_ARCHITECTURES"
}
export -f facts
export python

build='
from megatron_lite.native.load import load_native
native = load_native()
assert native.cuda, native.reason
print(native.library)
'
stage facts 30 bash -c facts
stage build 240 "$python" -c "$build"
if [ "$failed" -eq 0 ]; then
    stage tests 200 "$python" -m pytest -q -m gpu tests/gpu --deselect tests/gpu/test_sanitizer.py
    stage benchmark 100 "$python" tools/bench/kernels.py --device cuda --rounds 5 \
        --json "$out/bench.json"
    stage sanitizer 150 "$python" -m pytest -q -m gpu tests/gpu/test_sanitizer.py
else
    summary+=("NOT RUN  tests, benchmark, sanitizer")
fi

printf '%s\n' "" "${summary[@]}" | tee "$out/summary.txt"
exit "$failed"
