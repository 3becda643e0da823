#!/usr/bin/env bash
# Make .venv if it is missing and install rawops with what this machine can use. Further extras are the arguments.
set -euo pipefail
cd "$(dirname "$0")/.."

# Driver 580 is the first of CUDA 13, 525 the first of CUDA 12.
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d . -f 1) || true
case $driver in
'' | *[!0-9]*) extra=cpu ;;
*) if ((driver >= 580)); then extra=cu13; elif ((driver >= 525)); then extra=cu12; else extra=cpu; fi ;;
esac
extras=$(IFS=,; echo "$extra${*:+,$*}")

python=${PYTHON:-python3}
if [ ! -x .venv/bin/pip ]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "rawops needs Python 3.10 or later, and $python is older or missing: set PYTHON to one." >&2
        exit 1
    fi
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv .venv
fi

# The stamp holds what was installed from, so that a second run starts at once and an edit of pyproject.toml counts.
stamp=.venv/.rawops-$extras
wanted=$(sha256sum <pyproject.toml)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing rawops[$extras] into .venv"
    .venv/bin/pip install --disable-pip-version-check --quiet --editable ".[$extras]"
    echo "$wanted" >"$stamp"
fi
