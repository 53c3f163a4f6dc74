#!/usr/bin/env bash
# Run the whole product of the parity matrix: every model, precision and layout against one
# process: 2,344 rows of tensor, sequence and data parallelism, 3,560 of pipelines, 7,744 of
# sharding, on up to 8 ranks. Two calm cores do 20 to 30 rows a minute, so choose with -k.
#
#   ./scripts/parity_full.sh [PYTEST ARGUMENTS]     e.g. ./scripts/parity_full.sh -k qwen3
#
# Its result is recorded in docs/log.md when an axis lands. Environment: see scripts/setup.sh;
# MLITE_TEST_WORKERS=N runs N tests at a time (default 2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

./scripts/setup.sh test
venv="${MLITE_VENV:-$PWD/.venv}"
export PATH="$venv/bin:$PATH"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export MLITE_PARITY_FULL=1

exec python -m pytest -n "${MLITE_TEST_WORKERS:-2}" tests/parity "$@"
