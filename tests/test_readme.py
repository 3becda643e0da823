"""The examples of the README run as they stand: on the GPU, or in the emulator where they are about it."""

import re
from pathlib import Path

import numpy as np
import pytest

import rawops

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
CALL, PLAN, OBJECTS, KERNEL, EMULATOR = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SAXPY = """template <class T> __global__ void saxpy(int n, T a, const T* x, T* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}
"""


@pytest.mark.gpu
def test_ops_and_plan_under_a_graph():
    names = {}
    exec(CALL, names)
    exec(PLAN, names)
    cupy, x, w, y = names["cp"], names["x"], names["w"], names["y"]
    cupy.cuda.Device().synchronize()
    product = x.astype("f4") @ w.astype("f4")
    assert float(abs(y - product / (1 + cupy.exp(-product))).max()) < 0.5
    low = 2 * (x.astype("f4") @ names["a"].astype("f4")) @ names["b"].astype("f4")
    assert float(abs(names["o"] - product - low).max()) < 1


def test_objects(device):
    names = {"cp": device.xp, "rawops": rawops}
    exec(OBJECTS, names)
    x, c, rows = (device.get(names["half"](*shape)).astype(float) for shape in ((5, 64), (64, 96), (40, 2, 64)))
    a, b = (device.get(names["half"](*shape)).astype(float) for shape in ((64, 8), (8, 96)))
    want = x @ c
    want[::2] += 2 * x[::2] @ a @ b
    np.testing.assert_allclose(device.get(names["o"]).astype(float), want, rtol=2e-3, atol=1e-1)
    assert names["cache"].length(names["s"]) == len(rows)
    best = np.linalg.lstsq(names["A"].to_scipy().toarray(), np.ones(300), rcond=None)[0]
    np.testing.assert_allclose(device.get(names["x"]), best, atol=1e-4)
    assert names["istop"] in (1, 2)


@pytest.mark.usefixtures("own_cache")
def test_own_kernel_with_reload(device, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saxpy.cu").write_text(SAXPY)
    x, y = device.put(np.arange(1000, dtype=np.float32)), device.put(np.ones(1000, np.float32))
    edit = '(__import__("pathlib").Path("saxpy.cu")).write_text(source.replace("y[i] +=", "y[i] -="))\n'
    names = {"rawops": rawops, "n": 1000, "x": x, "y": y, "source": SAXPY}
    exec(KERNEL.replace("# ... edit saxpy.cu ...\n", edit), names)
    assert "saxpy<float>" in capsys.readouterr().out.splitlines()[-1]
    np.testing.assert_array_equal(device.get(y), 1 + 2 * np.arange(1000))
    names["k"](4, 256, (1000, 2.0, x, y))
    np.testing.assert_array_equal(device.get(y), np.ones(1000))


def test_emulator(capsys):
    exec(EMULATOR, {})
    assert "gemm_sm80" in capsys.readouterr().out
