"""Python in a process of its own, for what a running interpreter cannot show: cold caches, locales, forks, imports."""

import os
import subprocess
import sys
from pathlib import Path

import rawops

INSTALLED = Path(rawops.__file__).resolve().parent.parent


def environment(cache: Path, **changes) -> dict:
    """The environment of a child with its own cache folder; None removes a variable."""
    merged = {**os.environ, "PYTHONPATH": str(INSTALLED), "RAWOPS_CACHE_DIR": str(cache), **changes}
    return {name: str(value) for name, value in merged.items() if value is not None}


def python(code: str, *arguments, cache: Path, cwd: Path, **changes) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter, with every warning shown; it must succeed."""
    command = [sys.executable, "-W", "always::RuntimeWarning", "-c", code, *map(os.fsencode, arguments)]
    done = subprocess.run(command, env=environment(cache, **changes), cwd=cwd, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done
