"""The disk cache of compiled kernels: one checked file an entry, and never a reason to fail."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import struct
import threading
import warnings
from pathlib import Path

from rawops import config

_MAGIC = b"rawops-kernel-1\n"
_HEAD = struct.Struct("<32sQ")  # sha256 of what follows it, bytes of the JSON part
_SUFFIX = ".kernel"


@functools.cache
def folder() -> Path | None:
    """Return the folder of the cache, or None when the machine offers no place for one."""
    if config.current().cache_dir:
        return config.current().cache_dir
    import platformdirs

    try:
        path = Path(platformdirs.user_cache_dir("rawops", appauthor=False))
    except (RuntimeError, OSError, KeyError):
        return None
    # Without a home the path is relative or under a folder that does not exist: not ours to make.
    return path if path.is_absolute() and path.parent.parent.is_dir() else None


def load(key: str) -> tuple[dict, list[bytes]] | None:
    """Return an entry's metadata and blobs, or None where it is missing, truncated or damaged."""
    base = folder()
    if base is None:
        return None
    try:
        raw = (base / (key + _SUFFIX)).read_bytes()
        start = len(_MAGIC) + _HEAD.size
        checksum, length = _HEAD.unpack(raw[len(_MAGIC) : start])
        if raw[: len(_MAGIC)] != _MAGIC or hashlib.sha256(raw[start:]).digest() != checksum:
            return None
        meta = json.loads(raw[start : start + length])
        blobs, at = [], start + length
        for size in meta["blobs"]:
            blobs.append(raw[at : at + size])
            at += size
        return (meta, blobs) if meta["key"] == key else None
    except (OSError, struct.error, ValueError, KeyError):
        return None


def store(key: str, meta: dict, blobs: list[bytes]) -> None:
    """Write an entry; a folder that cannot be written costs one warning a process and nothing else."""
    base = folder()
    if base is None:
        _warn_once("no user cache folder was found")
        return
    head = json.dumps({**meta, "key": key, "blobs": [len(b) for b in blobs]}).encode()
    body = b"".join([head, *blobs])
    data = _MAGIC + _HEAD.pack(hashlib.sha256(body).digest(), len(head)) + body
    write(base / (key + _SUFFIX), data)


def write(path: Path, data: bytes) -> None:
    """Write a file of the folder, as a whole or not at all; the same for a folder that cannot be written."""
    staged = path.parent / f".{path.stem[:16]}-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.write_bytes(data)
        os.replace(staged, path)
    except OSError as error:
        _warn_once(f"{path.parent}: {error.strerror or error}")
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)


def entries() -> list[tuple[Path, int]]:
    """Return the path and size of every entry and of files that an interrupted process left behind."""
    base = folder()
    if base is None or not base.is_dir():
        return []
    found = []
    for path in sorted([*base.glob("*" + _SUFFIX), *base.glob(".*.tmp")]):
        with contextlib.suppress(FileNotFoundError):  # another process has just finished it
            if path.is_file():
                found.append((path, path.stat().st_size))
    return found


def clear() -> int:
    """Delete every entry and return how many there were."""
    found = entries()
    for path, _ in found:
        path.unlink(missing_ok=True)
    return len(found)


_unwarned = threading.Lock()  # taken once and for all by the first thread that warns


def _warn_once(reason: str) -> None:
    if not _unwarned.acquire(blocking=False):
        return
    warnings.warn(
        f"rawops: compiled kernels and tuned choices are not kept ({reason}); point RAWOPS_CACHE_DIR to a folder",
        RuntimeWarning,
        stacklevel=2,
    )
