#!/usr/bin/env bash
# Prepare the Python environment that the other scripts use: setup.sh {train|test}
#
# Creates .venv in the repository root, installs torch and this package with the extras of
# the profile, and builds the native helpers. Finished parts carry stamps (hash of setup.py,
# pyproject.toml, csrc/), so a second call returns at once.
#
#   MLITE_VENV=DIR     use an existing environment as it is; nothing is installed into it
#   MLITE_PYTHON=EXE   the interpreter for a new .venv (default: python3.11, python3.12, python3)
#   MLITE_TORCH=REQ    the torch to install (default: torch==2.14.1, the tested one)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="$PWD"

profile="${1:-train}"
case "$profile" in
    train) extras="train" ;;
    test) extras="dev,train,convert" ;;
    *) echo "setup: unknown profile '$profile', legal: train, test" >&2; exit 2 ;;
esac
torch_requirement="${MLITE_TORCH:-torch==2.14.1}"

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 2; }

# Hash of the named files and folders (sorted) and of the further arguments after '--'.
fingerprint() {
    "$venv/bin/python" - "$@" <<'PY'
import hashlib, pathlib, sys
cut = sys.argv.index("--")
digest = hashlib.sha256()
for name in sys.argv[1:cut]:
    path = pathlib.Path(name)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(f"{file}\0".encode() + file.read_bytes() + b"\0")
for word in sys.argv[cut + 1:]:
    digest.update(word.encode() + b"\0")
digest.update(sys.version.encode())
print(digest.hexdigest())
PY
}

usable_python() {
    "$1" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
        >/dev/null 2>&1
}

find_python() {
    local name
    for name in ${MLITE_PYTHON:-python3.11 python3.12 python3}; do
        if usable_python "$name"; then echo "$name"; return; fi
    done
    fail "Python 3.11 or 3.12 is needed and was not found on PATH" \
        "(tried: ${MLITE_PYTHON:-python3.11 python3.12 python3})." \
        "Install one, or name it: MLITE_PYTHON=/path/to/python3.11"
}

create_venv() {
    local python version
    python="$(find_python)"
    version="$("$python" -c 'import platform; print(platform.python_version())')"
    say "creating .venv with Python $version"
    if ! "$python" -m venv --clear "$venv" >"$venv.log" 2>&1; then
        tail -n 5 "$venv.log" >&2
        rm -rf "$venv" "$venv.log"
        fail "'$python -m venv' failed: its venv or ensurepip module is missing." \
            "On Debian or Ubuntu: apt-get install python${version%.*}-venv python${version%.*}-dev"
    fi
    rm -f "$venv.log"
}

# Run a command with its output in the log; on failure show the end of it.
logged() {
    if ! "$@" >>"$log" 2>&1; then
        tail -n 15 "$log" >&2
        fail "failed: $*  (whole output: $log)"
    fi
}

install_packages() {
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input)
    logged "${pip[@]}" install "setuptools>=70" wheel "pybind11>=2.12" "ninja>=1.11"
    if ! "$venv/bin/python" - <<'PY'
import importlib.metadata as metadata
try:
    parts = metadata.version("torch").split(".")
except metadata.PackageNotFoundError:
    raise SystemExit(1)
raise SystemExit(not (2, 11) <= (int(parts[0]), int(parts[1])) < (2, 16))
PY
    then
        say "installing $torch_requirement (large: some minutes)"
        logged "${pip[@]}" install "$torch_requirement"
    fi
    say "installing megatron_lite[$extras] and building its native operations (some minutes)"
    logged "${pip[@]}" install --no-build-isolation -e ".[$extras]"
}

# Build, and stamp what was built; what could not be built is told, and tried again next time.
build_native() {
    local started warning
    touch "$log"
    started="$(wc -l <"$log")"
    logged "$venv/bin/python" setup.py build_ext --inplace
    warning="$(tail -n "+$((started + 1))" "$log" | grep '^warning: native helpers' || true)"
    if [ -n "$warning" ]; then
        echo "setup: $warning" >&2
    else
        fingerprint "${native_inputs[@]}" -- "$root" >"$native_stamp"
    fi
}

# The environment of somebody else: say what it lacks instead of changing it.
check_foreign() {
    [ -x "$venv/bin/python" ] || fail "MLITE_VENV=$venv has no bin/python"
    usable_python "$venv/bin/python" || fail "MLITE_VENV=$venv: Python 3.11 or 3.12 is needed"
    "$venv/bin/python" - "$extras" <<'PY' || exit 2
import importlib.util, sys
needed = ["torch", "numpy", "ninja", "safetensors", "sentencepiece", "yaml"]
if "dev" in sys.argv[1]:
    needed += ["pytest", "xdist", "pytest_timeout", "hypothesis", "mypy", "importlinter"]
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    print(f"setup: {sys.prefix} lacks {', '.join(missing)}; install with: "
          f"{sys.executable} -m pip install -e '.[{sys.argv[1]}]'", file=sys.stderr)
    raise SystemExit(1)
PY
}

native_inputs=(setup.py megatron_lite/native/sources.py megatron_lite/native/build.py)
if [ -d csrc ]; then native_inputs+=(csrc); fi

# Naming the checkout's own .venv is no different from naming none.
if [ -n "${MLITE_VENV:-}" ] && ! [ "$MLITE_VENV" -ef "$root/.venv" ]; then
    venv="$MLITE_VENV"
    check_foreign
    # The environment is not ours to write to: log and stamp lie in the ignored build/.
    mkdir -p build || fail "the folder $root/build cannot be made"
    log="$root/build/setup.log"
    native_stamp="build/native-$("$venv/bin/python" -c \
        'import sysconfig; print(sysconfig.get_config_var("SOABI"))').stamp"
else
    venv="$root/.venv"
    log="$venv/setup.log"
    native_stamp="$venv/native.stamp"
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then create_venv; fi
    # Stamps bind the environment to this checkout: a moved one is installed again.
    packages_key="$(fingerprint setup.py pyproject.toml -- "$root" "$torch_requirement")"
    found=""
    for name in "$profile" test; do
        stamp="$venv/packages-$name.stamp"
        if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$packages_key" ]; then found=yes; fi
    done
    if [ -z "$found" ]; then
        started=$SECONDS
        rm -f "$native_stamp"
        install_packages
        echo "$packages_key" >"$venv/packages-$profile.stamp"
        build_native
        say "environment ready in $((SECONDS - started)) s"
    fi
fi

native_key="$(fingerprint "${native_inputs[@]}" -- "$root")"
if [ ! -f "$native_stamp" ] || [ "$(cat "$native_stamp")" != "$native_key" ]; then
    say "building native operations (some minutes)"
    build_native
fi
