"""Every ``RAWOPS_*`` environment variable, parsed once."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FALSE = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Config:
    """What the environment asks for.

    Attributes
    ----------
    cache_dir : Path or None
        ``RAWOPS_CACHE_DIR``: where compiled kernels are kept; None means the user cache folder.
    emulate : bool
        ``RAWOPS_EMULATE``: run every op on NumPy arrays in the emulator, as inside ``rawops.emulate()``.
    emulate_arch : str
        ``RAWOPS_EMULATE_ARCH``: the architecture the emulator stands for when none is given.
    check : bool
        ``RAWOPS_CHECK``: look at values of device arrays, such as indices, too, which waits for the device.
    """

    cache_dir: Path | None = None
    emulate: bool = False
    emulate_arch: str = "sm_80"
    check: bool = False


def parse(environ: Mapping[str, str]) -> Config:
    """Read a `Config` out of an environment; unknown ``RAWOPS_*`` names are ignored."""

    def flag(name: str) -> bool:
        return environ.get(name, "").strip().lower() not in _FALSE

    return Config(
        cache_dir=_folder(environ.get("RAWOPS_CACHE_DIR")),
        emulate=flag("RAWOPS_EMULATE"),
        emulate_arch=environ.get("RAWOPS_EMULATE_ARCH") or Config.emulate_arch,
        check=flag("RAWOPS_CHECK"),
    )


def _folder(name: str | None) -> Path | None:
    """Return the place that a name has now: it stays there when the program changes its working directory."""
    if not name:
        return None
    return Path(os.path.expanduser(name)).absolute()  # "~" comes as it is where no shell has read it


@functools.cache
def current() -> Config:
    """Return the process's configuration, read from the environment on first use."""
    return parse(os.environ)
