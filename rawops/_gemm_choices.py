"""Configurations that `gemm.tune` has measured: what there is to try, and the file that keeps what was fastest.

The file lies in the folder of compiled kernels. Its keys name the GPU, the kernels by a hash of their sources, and all
that a choice depends on, so that nothing is ever taken for another problem, another card or an edited kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import threading
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from rawops import _gemm_config, _gemm_sm90_config
from rawops._runtime import cache, sources

MOST = 8  # candidates

_OF_HOPPER = 5  # of them
_KERNELS = ("gemm_sm90.cu", "gemm_sm80.cu", "gemm_simt.cu", "gemm_reduce.cu")
_RULE = {"kernel": "as chosen without tuning"}

_Choice = _gemm_config.Config | _gemm_sm90_config.Config


@dataclasses.dataclass(frozen=True)
class Question:
    """A problem on a device, as each kernel family sees it; `hopper` is None where that kernel cannot run it."""

    device: object
    problem: _gemm_config.Problem
    hopper: _gemm_sm90_config.Problem | None

    @property
    def key(self) -> str:
        card = f"{self.device.name}, {self.device.sm_count} SMs"
        return f"{card}, kernels {_kernels()}: {self.problem}, {self.hopper}"

    def candidates(self) -> list[_Choice | None]:
        """Return what is worth a try, None for what is chosen without tuning first."""
        device, problem = self.device, self.problem
        default = _gemm_config.select_config(problem, device.sm_count, device.max_shared_bytes)
        found: list = [None]
        if self.hopper is not None:
            best = _gemm_sm90_config.candidates(self.hopper, device.sm_count, device.max_shared_bytes)[: _OF_HOPPER + 1]
            if not _gemm_sm90_config.wants_split(self.hopper, best[0], device.sm_count):
                halved = _gemm_sm90_config.in_halves(self.hopper, best[0], device.sm_count, device.max_shared_bytes)
                best, default = best[halved == best[0] :], None  # without the one that is chosen anyway
            found += best[:_OF_HOPPER]
        likely = _gemm_config.candidates(problem, device.max_shared_bytes)
        tiles = dict.fromkeys([*reversed(likely), *_gemm_config.fitting(problem, device.max_shared_bytes)])
        for split_k in (None, 1):
            limits = device.sm_count, device.max_shared_bytes, split_k
            found += [_gemm_config.configure(problem, tile, *limits) for tile in tiles]
        return [c for c in dict.fromkeys(found) if c is None or c != default][:MOST]

    def read(self, kept: dict) -> _Choice | None:
        """Return the choice that `describe` made `kept` of. What is no candidate any more counts as None."""
        return next((c for c in self.candidates() if c is not None and describe(c) == kept), None)


def describe(choice: _Choice | None) -> dict:
    """Return a choice as the file has it."""
    if choice is None:
        return _RULE
    if isinstance(choice, _gemm_sm90_config.Config):
        names = ("block_m", "block_n", "stages", "cluster", "ping_pong", "pairs")
        return {"kernel": "sm90", **{name: getattr(choice, name) for name in names}}
    return {"kernel": "sm80", "tile": choice.tile.cpp, "split_k": choice.split_k}


# --- while candidates are tried -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Trial:
    """What `find` answers in the meantime, and what it was asked first."""

    choice: _Choice | None = None
    question: Question | None = None


_trial: ContextVar[Trial | None] = ContextVar("rawops_gemm_trial", default=None)


@contextlib.contextmanager
def trying() -> Iterator[Trial]:
    token = _trial.set(Trial())
    try:
        yield _trial.get()
    finally:
        _trial.reset(token)


def find(device, problem: _gemm_config.Problem, hopper: _gemm_sm90_config.Problem | None) -> _Choice | None:
    """Return what was fastest when it was measured, None where nothing was."""
    question = Question(device, problem, hopper)
    trial = _trial.get()
    if trial is not None:
        trial.question = trial.question or question
        return trial.choice if trial.question == question else None
    choices = _kept()
    kept = choices.get(question.key) if choices else None
    return question.read(kept) if kept else None


# --- the file -------------------------------------------------------------------------------------------------------

_lock = threading.Lock()


def path() -> Path | None:
    base = cache.folder()
    return base and base / "gemm_choices.json"


@functools.cache
def _kept() -> dict:
    """Return the choices of the file by key; it is read once."""
    return _load(warn=True)


@functools.cache
def _kernels() -> str:
    """Return a hash of the sources of the kernels."""
    digests = [sources.digest(sources.library_source(name).closure(())) for name in _KERNELS]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def _load(warn: bool) -> dict:
    file = path()
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file else {}
        if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
            raise ValueError("not a table of choices")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        if warn:
            warnings.warn(
                f"rawops: what gemm.tune has kept in {file} is ignored ({error})", RuntimeWarning, stacklevel=2
            )
        return {}


def keep(question: Question, choice: _Choice | None) -> None:
    """Remember a choice, in this process and in the file, beside those that other processes keep there."""
    with _lock:
        _kept()[question.key] = describe(choice)
        file = path()
        if file is not None:
            cache.write(file, json.dumps(_load(warn=False) | _kept(), indent=1).encode())
