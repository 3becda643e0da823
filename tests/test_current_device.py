"""CuPy works where the current device is, not where its arrays are: an op makes the arrays' device the current one."""

import sys
from pathlib import Path

import numpy as np
import pytest
from device_calls import CALLS, CHECKED, Place

import rawops
from rawops import config
from rawops._runtime import arrays
from rawops._runtime import device as devices

_OWN = str(Path(rawops.__file__).parent)
_NOT_ITS_HOST_CODE = tuple(str(Path(_OWN) / name) for name in ("_emulator", "testing"))
_BETWEEN = (str(Path(np.__file__).parent), __file__)
_VIEWS = {np.broadcast_to, np.may_share_memory}
_WORK = ("astype", "copy", "fill", "tolist", "item", "ravel", "nonzero", "argsort", "sort", "conj", "searchsorted")


class Current:
    """The context of a device: how often it has been entered and not left."""

    depth = 0

    def __enter__(self) -> None:
        Current.depth += 1

    def __exit__(self, *error) -> None:
        Current.depth -= 1


def check(what: str) -> None:
    """Raise for work on an array that the library does outside of `Current`."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
        if frame is None:
            return
    name = frame.f_code.co_filename
    is_own = name.startswith(_OWN) and not name.startswith(_NOT_ITS_HOST_CODE)
    assert not is_own or Current.depth, f"{what} where the device is not the current one: {name}:{frame.f_lineno}"


class OnDevice(np.ndarray):
    """An array in the emulator on which the library works where `check` allows it: views alone are free, as CuPy's."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        check(ufunc.__name__)
        if out:
            options["out"] = tuple(map(plain, out))
        found = getattr(ufunc, method)(*map(plain, inputs), **options)
        return out[0] if out else placed(found)

    def __array_function__(self, function, types, args, options):
        if function not in _VIEWS:
            check(function.__name__)
        return placed(super().__array_function__(function, types, args, options))

    def __setitem__(self, key, value) -> None:
        check("an assignment")
        super().__setitem__(key, value)

    def __getitem__(self, key):
        return self._view_or_work(super().__getitem__(key))

    def reshape(self, *shape, **options):
        return self._view_or_work(super().reshape(*shape, **options))

    def _view_or_work(self, found):
        if not (isinstance(found, np.ndarray) and (found.size == 0 or np.shares_memory(plain(found), plain(self)))):
            check("a copy")
        return found


def _worked(name: str):
    def method(self, *args, **options):
        if not (name == "astype" and options.get("copy") is False and args[0] == self.dtype):
            check(name)
        return placed(getattr(super(OnDevice, self), name)(*args, **options))

    return method


for _name in _WORK:
    setattr(OnDevice, _name, _worked(_name))


def plain(x):
    return x.view(np.ndarray) if isinstance(x, OnDevice) else x


def placed(x):
    if isinstance(x, (tuple, list)):
        return type(x)(map(placed, x))
    return x.view(OnDevice) if isinstance(x, np.ndarray) else x


@pytest.fixture
def guarded(monkeypatch):
    """Arrays of the emulator that know whether their device is the current one."""
    of, empty, zero = devices.EmulatedDevice, devices.EmulatedDevice.empty, devices.EmulatedDevice.zero
    monkeypatch.setattr(of, "current", lambda self: Current())
    monkeypatch.setattr(of, "get_current", lambda self: 0 if Current.depth else 1)
    monkeypatch.setattr(of, "empty", lambda self, shape, dtype: placed(empty(self, shape, dtype)))

    def zero_within(self):
        with self.current():
            return zero(self)

    monkeypatch.setattr(of, "zero", zero_within)
    monkeypatch.setattr(arrays, "to_host", plain)
    monkeypatch.setattr(arrays, "current_of", lambda x: Current())
    with rawops.emulate(check=False):
        yield Place(placed, Current)


@pytest.mark.parametrize("call", CALLS)
def test_arrays_are_worked_on_where_their_device_is_the_current_one(guarded, call):
    made = CALLS[call](guarded)
    assert made and all(isinstance(x, OnDevice) for x in made)
    assert Current.depth == 0


@pytest.mark.parametrize("call", CHECKED)
def test_values_are_checked_where_their_device_is_the_current_one(guarded, call, monkeypatch):
    monkeypatch.setattr(config, "current", lambda: config.Config(check=True))
    assert CALLS[call](guarded)


def test_the_guard_sees_work_that_is_done_elsewhere(guarded, monkeypatch):
    """Without the context, the same calls fail: what these tests look at is there."""
    monkeypatch.setattr(devices.EmulatedDevice, "get_current", int)
    monkeypatch.setattr(Current, "__enter__", lambda self: None)
    monkeypatch.setattr(Current, "__exit__", lambda self, *error: None)
    for call in ("gemm_aside", "gemm_float8", "multi_lora", "paged", "paged_cache", "sparse", "blocks", "own_kernel"):
        with pytest.raises(AssertionError, match="not the current one"):
            CALLS[call](guarded)


# --- the context of a GPU, with a runtime that stands in for CUDA's ---------------------------------------------------


@pytest.fixture
def runtime():
    """Two devices of a machine without any: which is current, and how often that was set."""

    class Runtime:
        def __init__(self) -> None:
            self.current, self.sets = 0, []

        def device(self, ordinal: int) -> devices.CudaDevice:
            found = object.__new__(devices.CudaDevice)
            found.ordinal, found.get_current, found.set_current = ordinal, lambda: self.current, self.set
            return found

        def set(self, ordinal: int) -> None:
            self.current = ordinal
            self.sets.append(ordinal)

    return Runtime()


def test_the_current_device_is_what_it_was_after_a_context(runtime):
    one, two = runtime.device(0), runtime.device(1)
    with two.current():
        assert runtime.current == 1
        with one.current():
            assert runtime.current == 0
        with two.current(), pytest.raises(KeyError), one.current():
            raise KeyError
        assert runtime.current == 1
    assert runtime.current == 0


def test_the_current_device_is_not_set_again(runtime):
    one = runtime.device(0)
    with one.current(), one.current():
        pass
    assert not runtime.sets


def test_methods_run_on_the_device_of_their_object(runtime):
    class Owner:
        _device = runtime.device(1)

        @devices.on_own_device
        def add(self, a, *, b=1):
            """Add."""
            return runtime.current, a + b

    assert Owner().add(2, b=3) == (1, 5)
    assert runtime.current == 0
    assert Owner.add.__doc__ == "Add."
