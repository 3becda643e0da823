#!/usr/bin/env bash
# Run the test suite: on the GPU where there is one, else with every kernel in the emulator. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
# Each of two workers has half of the cores: threads of NumPy's products beyond them wait for each other in loops.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + 1) / 2))}
exec .venv/bin/python -m pytest -n 2 "$@"
