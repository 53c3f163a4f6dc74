#!/usr/bin/env bash
# Set everything up and run all checks: formatting, types, imports, tests.
#
#   ./scripts/test.sh [PYTEST ARGUMENTS]     e.g. ./scripts/test.sh tests/mesh -k grid
#   ./scripts/test.sh --lint                 the checks without the tests
#
# Stops at the first stage that fails, with its exit status. Environment: see scripts/setup.sh;
# MLITE_TEST_WORKERS=N runs N tests at a time (default 2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

./scripts/setup.sh test
venv="${MLITE_VENV:-$PWD/.venv}"
export PATH="$venv/bin:$PATH"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

summary=()

stage() {
    local name="$1" started=$SECONDS status=0
    shift
    echo "== $name"
    "$@" || status=$?
    if [ "$status" -ne 0 ]; then
        summary+=("FAILED  $name (exit $status, $((SECONDS - started)) s); later stages not run")
        printf '%s\n' "" "${summary[@]}" >&2
        exit "$status"
    fi
    summary+=("ok      $name ($((SECONDS - started)) s)")
}

stage "ruff check" ruff check --quiet .
stage "ruff format" ruff format --check --quiet .
stage "mypy" python -m mypy
stage "import contracts" lint-imports --no-logo
printf '%s\n' "" "${summary[@]}" ""
if [ "${1:-}" = "--lint" ]; then exit 0; fi

# Last, so that pytest's closing line is the last line of the output.
exec python -m pytest -n "${MLITE_TEST_WORKERS:-2}" -m "not slow" "$@"
