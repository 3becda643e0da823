#!/usr/bin/env bash
# Run the test suite: on the GPU where there is one, else with every kernel in the emulator. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
exec .venv/bin/python -m pytest -n 2 "$@"
