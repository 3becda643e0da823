"""Where the tests run: the `device` fixture, the `gpu` marker and the line that says what was left for the GPU."""

import gc
import weakref

import numpy as np
import pytest

import rawops
from rawops._runtime import cache, compiler, kernel
from rawops.testing import has_gpu

pytest_plugins = ("hopper_gemm",)
NO_GPU = "needs a GPU"
GUARD = 256  # entries on either side of a guarded array; a multiple of every vector width, so it keeps the alignment


class Device:
    """Where a test's arrays live: the GPU through CuPy, or the emulator with NumPy arrays.

    Attributes
    ----------
    xp : module
        cupy or numpy.
    is_emulated : bool
        Pick smaller shapes when it is set.
    """

    def __init__(self, xp) -> None:
        self.xp = xp
        self.is_emulated = xp is np
        self._guarded = []

    def put(self, array: np.ndarray):
        """A host array, on the device. Take views of the result: strides do not travel."""
        if array.dtype.name.startswith("float8"):  # which CuPy knows as views only
            return self.xp.asarray(array.view(np.uint8)).view(array.dtype)
        return self.xp.asarray(array)

    def get(self, array) -> np.ndarray:
        """A device array, on the host."""
        if self.is_emulated:
            return array
        if array.dtype.name.startswith("float8"):
            return self.xp.asnumpy(array.view(np.uint8)).view(array.dtype)
        return self.xp.asnumpy(array)

    def guarded(self, shape: tuple[int, ...], dtype):
        """An output array full of NaN, between guard bands that are checked when the test ends."""
        size = int(np.prod(shape))
        pattern = np.full(size + 2 * GUARD, np.nan).astype(dtype)
        pattern[:GUARD] = pattern[GUARD + size :] = 77
        whole = self.put(pattern)
        self._guarded.append((whole, size))
        return whole[GUARD : GUARD + size].reshape(shape)

    @staticmethod
    def between(array):
        """An array of this shape and dtype whose elements lie on no multiples of their size: a kernel would fault."""
        return array.reshape(-1).view("u1").repeat(2)[1 : 1 + array.nbytes].view(array.dtype).reshape(array.shape)

    def check_guards(self) -> None:
        for whole, size in self._guarded:
            host = self.get(whole)
            assert (host[:GUARD] == 77).all(), "the kernel wrote before its output"
            assert (host[GUARD + size :] == 77).all(), "the kernel wrote past its output"


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty folder for the compiled kernels of one test, and no kernels of other tests for `reload` to see."""
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(kernel.Instance, "_all", weakref.WeakSet())


@pytest.fixture
def compilations(monkeypatch):
    """The name expressions that NVRTC was run on."""
    ran, compile = [], compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *args: ran.append(args[2]) or compile(*args))
    return ran


@pytest.fixture
def device():
    """The GPU where there is one, else the emulator with all its checks on."""
    if has_gpu():
        import cupy

        found = Device(cupy)
        yield found
    else:
        found = Device(np)
        with rawops.emulate(check=True):
            yield found
    found.check_guards()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240613)


def pytest_collection_finish() -> None:
    """Look for garbage more seldom: decoded kernels are many objects that stay, and walking through them over and
    over took a fifth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def pytest_collection_modifyitems(items) -> None:
    if not has_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter) -> None:
    left = [report for report in terminalreporter.stats.get("skipped", []) if NO_GPU in str(report.longrepr)]
    if has_gpu():
        terminalreporter.write_line("kernels ran on the GPU")
    else:
        terminalreporter.write_line(f"kernels ran in the emulator; tests left for a GPU: {len(left)}")
