"""Importing rawops: cheap, without a GPU or CuPy, before a fork, in any locale."""

import pytest
from processes import python

TEXT = "__global__ void f(int* x) { *x = 1; }\n"


def test_import_is_fast_and_touches_nothing(tmp_path):
    child = """
import sys, time
import numpy, ml_dtypes
start = time.process_time()
import rawops
seconds = time.process_time() - start
slow = {"cupy", "torch", "cuda", "rich", "scipy", "platformdirs", "rawops._emulator"} & set(sys.modules)
assert not slow, slow
print(seconds)
"""
    cache = tmp_path / "cache"
    bytecode = {
        "PYTHONDONTWRITEBYTECODE": None,
        "PYTHONPYCACHEPREFIX": tmp_path / "bytecode",
    }  # as an installed package
    seconds = min(float(python(child, cache=cache, cwd=tmp_path, **bytecode).stdout) for _ in range(3))
    assert seconds < 0.5
    assert not cache.exists()


def test_without_cupy_numpy_arrays_get_an_answer_that_helps(tmp_path):
    child = f"""
import sys
sys.modules["cupy"] = None
import numpy as np, rawops
kernel = rawops.Kernel({TEXT!r}, "f")
assert kernel.compile("sm_90a").cubin
for call in (lambda: kernel(1, 1, (np.zeros(1, np.int32),)), lambda: kernel(1, 1, (0,)), lambda: rawops.precompile()):
    try:
        call()
    except ImportError as error:
        assert 'pip install "rawops[cu13]"' in str(error) and "rawops.emulate()" in str(error), error
    else:
        raise SystemExit("no error")
"""
    python(child, cache=tmp_path / "cache", cwd=tmp_path)


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_forked_child_compiles(tmp_path, compiled_before):
    child = f"""
import os, sys, warnings, rawops
warnings.simplefilter("ignore")
if {compiled_before}:
    rawops.Kernel({TEXT!r}, "f").compile("sm_80")
pid = os.fork()
if pid == 0:
    compiled = rawops.Kernel({TEXT!r}, "f").compile("sm_90a")
    os._exit(0 if compiled.cubin and not compiled.from_cache else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert rawops.Kernel({TEXT!r}, "f").compile("sm_90a").from_cache
"""
    python(child, cache=tmp_path / "cache", cwd=tmp_path)


LOCALES = {
    "C": {"LC_ALL": "C"},
    "ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "UTF-8": {"LC_ALL": "C.UTF-8"},
}


@pytest.mark.parametrize("name", LOCALES)
def test_a_compilation_leaves_the_locale_alone(tmp_path, name):
    folder = tmp_path / "ÄÖ 测试"
    folder.mkdir()
    (folder / "häder.cuh").write_text("#define V 1\n", encoding="utf-8")
    source = folder / "kérnel.cu"
    source.write_text('#include "häder.cuh"  // ÄÖ\n__global__ void f(int* x) { *x = V; }\n', encoding="utf-8")
    child = """
import locale, sys, rawops
locale.setlocale(locale.LC_ALL, "")

def state():
    with open("/dev/null") as file:
        return locale.getpreferredencoding(), file.encoding, locale.setlocale(locale.LC_ALL)

before = state()
compiled = rawops.Kernel(sys.argv[1], "f").compile("sm_80")
assert compiled.cubin and not compiled.from_cache
assert state() == before, (before, state())
try:
    rawops.Kernel(sys.argv[1], "g").compile("sm_80")
except rawops.CompileError as error:
    assert "the name of the kernel" in str(error)
"""
    python(child, source, cache=tmp_path / "cache", cwd=tmp_path, **LOCALES[name])
