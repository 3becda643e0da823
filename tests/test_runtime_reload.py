"""Edited sources: `reload`, and launches before and after it. On the GPU or in the emulator."""

from pathlib import Path

import numpy as np
import pytest

import rawops
from rawops._runtime import compiler

KERNELS = Path(__file__).parent / "kernels"
SAXPY = (KERNELS / "saxpy.cu").read_text()
STEP = (KERNELS / "step.cuh").read_text()
pytestmark = pytest.mark.usefixtures("own_cache")


def saxpy_of(device, kernel, n=5, a=2) -> np.ndarray:
    """y = a x + y with x = 0, 1, ... and y = 100."""
    x, y = device.put(np.arange(n, dtype=np.float32)), device.put(np.full(n, 100, np.float32))
    kernel(1, 32, (a, x, y, n))
    return device.get(y)


@pytest.fixture
def editable(tmp_path):
    """Write the kernel or its header anew."""

    def edit(file: str, old: str = "", new: str = "") -> None:
        text = {"saxpy.cu": SAXPY, "step.cuh": STEP}[file]
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new))

    edit("saxpy.cu")
    edit("step.cuh")
    return edit


def test_an_edit_is_in_use_after_reload_and_not_before(device, tmp_path, editable):
    kernel = rawops.Kernel(tmp_path / "saxpy.cu", "saxpy<float>")
    assert saxpy_of(device, kernel).tolist() == [100, 102, 104, 106, 108]
    editable("step.cuh", "a * x + y", "a * x - y")
    assert saxpy_of(device, kernel)[4] == 108
    (entry,) = rawops.reload()
    assert entry.kernel == "saxpy<float>" and entry.after is None
    assert saxpy_of(device, kernel)[4] == -92
    editable("saxpy.cu", "if (i < n)", "if (i < n && i > 0)")
    assert rawops.reload(compile=True)[0].after == kernel.resources
    assert saxpy_of(device, kernel).tolist() == [100, -98, -96, -94, -92]
    assert rawops.reload() == []


@pytest.mark.parametrize("compile", [False, True])
def test_the_last_good_kernel_runs_on_after_a_broken_edit(device, tmp_path, editable, compile):
    kernel = rawops.Kernel(tmp_path / "saxpy.cu", "saxpy<float>")
    assert saxpy_of(device, kernel)[4] == 108
    editable("saxpy.cu", "if (i < n)", "if (i < )")
    (entry,) = rawops.reload(compile=compile)
    if compile:
        assert isinstance(entry.error, rawops.CompileError)
    else:
        with pytest.raises(rawops.CompileError, match="expected an expression"):
            saxpy_of(device, kernel)
    assert saxpy_of(device, kernel)[4] == 108
    editable("saxpy.cu", "step(a, x[i], y[i])", "step(a, x[i], T(0))")
    assert len(rawops.reload()) == 1
    assert saxpy_of(device, kernel)[4] == 8


def test_the_last_good_kernel_runs_on_without_its_file(device, tmp_path, editable):
    kernel = rawops.Kernel(tmp_path / "saxpy.cu", "saxpy<float>")
    assert saxpy_of(device, kernel)[4] == 108
    (tmp_path / "saxpy.cu").unlink()
    rawops.reload()
    with pytest.raises(rawops.CompileError, match=r"^saxpy<float> for sm_\w+ does not compile\n.*saxpy\.cu'") as raised:
        saxpy_of(device, kernel)
    assert raised.value.instance.startswith("saxpy<float> for sm_")
    assert saxpy_of(device, kernel)[4] == 108
    editable("saxpy.cu", "step(a, x[i], y[i])", "step(a, x[i], T(0))")
    rawops.reload()
    assert saxpy_of(device, kernel)[4] == 8


@pytest.mark.parametrize("compile", [False, True])
def test_an_interrupted_compilation_is_made_up_for(device, tmp_path, editable, monkeypatch, compile):
    """After a Ctrl-C in the compilation of an edit the next launch compiles it: it does not run the old code."""
    kernel = rawops.Kernel(tmp_path / "saxpy.cu", "saxpy<float>")
    assert saxpy_of(device, kernel)[4] == 108
    editable("saxpy.cu", "step(a, x[i], y[i])", "step(a, x[i], T(0))")
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile_instance", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            rawops.reload(compile=compile)
            saxpy_of(device, kernel)
    assert saxpy_of(device, kernel)[4] == 8


# Parameters, then how the kernel is called and what it writes.
SIGNATURES = [
    ("float* out, int n", (7,), 7),
    ("float* out, int n, int more", (7, 8), 7),  # added
    ("float* out", (), -1),  # removed
    ("float* out, float n", (0.5,), 0.5),  # retyped
    ("float* out, unsigned char n", (255,), 255),
    ("float* out, const float* x, float n", (None, 2.5), 2.5),
    ("float* out, float n, const float* x", (1.5, None), 1.5),  # swapped
    ("float* out, struct Pair n", (np.array([1, 2], np.float32).tobytes(),), 2),
    ("float* out, int n", (9,), 9),
]


def with_signature(parameters: str) -> str:
    value = "n.second" if "Pair n" in parameters else "n" if " n" in parameters else "-1"
    return f"struct Pair {{ float first, second; }};\n__global__ void f({parameters}) {{ out[0] = {value}; }}\n"


@pytest.mark.parametrize("compile", [False, True])
def test_a_new_signature_is_in_use_after_reload(device, tmp_path, compile):
    path, out = tmp_path / "f.cu", device.put(np.zeros(1, np.float32))
    kernel, before = None, None
    for parameters, args, written in SIGNATURES:
        path.write_text(with_signature(parameters))
        kernel = kernel or rawops.Kernel(path, "f")
        rawops.reload(compile=compile)
        args = (out, *(out if arg is None else arg for arg in args))
        if before is not None and len(before) != len(args):
            with pytest.raises(TypeError, match=f"f: args must have {len(args)} entries, got {len(before)}"):
                kernel(1, 1, before)
        for _ in range(2):
            out[...] = 0
            kernel(1, 1, args)
            assert device.get(out)[0] == written
        before = args


@pytest.mark.parametrize("compile", [False, True])
def test_a_broken_source_keeps_the_signature_too(device, tmp_path, compile):
    path, out = tmp_path / "f.cu", device.put(np.zeros(1, np.float32))
    path.write_text(with_signature("float* out, int n"))
    kernel = rawops.Kernel(path, "f")
    kernel(1, 1, (out, 3))
    path.write_text(with_signature("float* out, float n, nonsense"))
    rawops.reload(compile=compile)
    if not compile:
        with pytest.raises(rawops.CompileError):
            kernel(1, 1, (out, 4))
        assert device.get(out)[0] == 3
    with pytest.raises(TypeError, match=r"args\[1\] must be an integer"):
        kernel(1, 1, (out, 1.5))
    kernel(1, 1, (out, 5))
    assert device.get(out)[0] == 5


def test_a_new_emulator_after_reload_runs_the_edited_kernel(tmp_path, editable):
    kernel = rawops.Kernel(tmp_path / "saxpy.cu", "saxpy<float>")
    results = []
    for y in ("y[i]", "T(0)"):
        editable("saxpy.cu", "step(a, x[i], y[i])", f"step(a, x[i], {y})")
        rawops.reload()
        with rawops.emulate():
            x, out = np.ones(1, np.float32), np.full(1, 7, np.float32)
            kernel(1, 1, (2, x, out, 1))
        results.append(out[0])
    assert results == [9, 2]


def test_a_broken_source_is_raised_where_the_call_is(tmp_path, editable):
    kernel, x = rawops.Kernel(tmp_path / "saxpy.cu", "saxpy<float>"), np.ones(1, np.float32)
    emulators = [rawops.emulate(arch=arch) for arch in ("sm_80", "sm_90a")]
    for emulator in emulators:
        with emulator:
            kernel(1, 1, (0, x, x, 1))
    editable("saxpy.cu", "if (i < n)", "if (i < )")
    rawops.reload()
    for emulator, arch in zip(emulators, ("sm_80", "sm_90a"), strict=True):
        with emulator:
            with pytest.raises(rawops.CompileError, match=f"saxpy<float> for {arch} does not compile"):
                kernel(1, 1, (0, x, x, 1))
            kernel(1, 1, (0, x, x, 1))


def test_a_kernel_that_nobody_holds_is_not_listed(device, tmp_path, editable):
    kernel = rawops.Kernel(tmp_path / "saxpy.cu", "saxpy<float>")
    saxpy_of(device, kernel)
    del kernel
    editable("step.cuh", "a * x + y", "a * x - y")
    assert rawops.reload() == []
