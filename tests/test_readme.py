"""The examples of the README and of the pages, except that on the emulator, run as they stand.

On the GPU, or in the emulator on NumPy arrays: there "import cupy as cp" imports NumPy, which is all that is changed,
and nothing is captured in a CUDA graph.
"""

import contextlib
import re
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from scipy import sparse
from scipy.sparse import linalg

import rawops
from rawops.testing import references

ROOT = Path(__file__).parent.parent


def blocks_of(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


CALL, PLAN, OBJECTS, KERNEL, EMULATOR = blocks_of("README.md")
(SAXPY,) = blocks_of("README.md", "cuda")


def run(device, *blocks: str, arch: str = "sm_80", **names) -> dict:
    """What the blocks leave, run one after the other; `arch` is the emulator's."""
    where = rawops.emulate(arch=arch, check=True) if device.is_emulated else contextlib.nullcontext()
    with where:
        for block in blocks:
            exec(block.replace("import cupy as cp", f"import {device.xp.__name__} as cp"), names)
    return names


def hosts(device, names: dict, *wanted: str) -> list[np.ndarray]:
    """Arrays by name, on the host in float64."""
    return [device.get(names[name]).astype(float) for name in wanted]


def near(device, array, want, atol=5e-2) -> None:
    np.testing.assert_allclose(device.get(array).astype(float), want, rtol=1e-2, atol=atol)


# --- README ---------------------------------------------------------------------------------------------------------


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
    edit = '(__import__("pathlib").Path("saxpy.cu")).write_text(source.replace("y[i] +=", "y[i] -="))\n'
    names = run(device, KERNEL.replace("# ... edit saxpy.cu ...\n", edit), source=SAXPY)
    assert "saxpy<float>" in capsys.readouterr().out.splitlines()[-1]
    n, x, y = (names[name] for name in "nxy")
    np.testing.assert_array_equal(device.get(y), 1 + 2 * np.arange(n))
    names["k"](4, 256, (2.0, x, y, n))
    np.testing.assert_array_equal(device.get(y), np.ones(n))


def test_emulator(capsys):
    exec(EMULATOR, {})
    assert "gemm_sm80" in capsys.readouterr().out


# --- the pages ------------------------------------------------------------------------------------------------------


def test_gemm(device):
    names = run(device, *blocks_of("docs/gemm.md"))
    a, b, w, bias, r, q, experts = hosts(device, names, "a", "b", "w", "bias", "r", "q", "experts")
    near(device, names["d"], references.gemm(a, b, bias=bias, activation="relu"))
    near(device, names["e"], 0.5 * a @ w.T + 2 * references.gemm(a, b, bias=bias, activation="gelu", residual=r))
    near(device, names["h"], references.gemm(a, b, activation="swiglu"))
    near(device, names["g"], np.concatenate([a[:40] @ experts[0], a[40:] @ experts[2]]))
    scale, zero = (x.repeat(32, 0) for x in hosts(device, names, "scale", "zero"))
    near(device, names["u"], a @ ((q - zero) * scale))
    near(device, names["s"], a @ ((q - 8) * scale))


def test_gemm_8bit(device):
    names = run(device, *blocks_of("docs/gemm_8bit.md"), arch="sm_90a")
    a, b, i, j, scale_a, scale_b = hosts(device, names, "a", "b", "i", "j", "scale_a", "scale_b")
    near(device, names["d"], a @ b, 0.3)
    assert names["whole"].dtype.name == names["scaled"].dtype.name == "bfloat16"
    scale_b = scale_b.repeat(128, 0).repeat(128, 1)[:, : b.shape[1]]
    near(device, names["blocks"], (a * scale_a.repeat(128, 1)) @ (b * scale_b), 0.2)
    near(device, names["small"], 0.25 * a @ b, 0.6)
    np.testing.assert_array_equal(device.get(names["exact"]), i @ j.T)


def test_lora(device):
    names = run(device, *blocks_of("docs/lora.md"))
    x, c, a, b = hosts(device, names, "x", "c", "a", "b")
    near(device, names["o"], references.lora_linear(x, c, a, b, scaling=2.0), 0.2)
    near(device, names["p"], x @ device.get(names["op"].c).astype(float), 0.2)  # which is merged by now
    assert names["op"].merged
    want = x @ c
    for a_of, b_of, columns in zip(names["a_of"], names["b_of"], names["sliced"].slices, strict=True):
        if a_of is not None:
            a_of, b_of = (device.get(factor).astype(float) for factor in (a_of, b_of))
            want[:, slice(*columns)] += 2 * x @ a_of @ b_of
    near(device, names["s"], want, 0.2)
    near(device, names["m"][1:4], x[1:4] @ c + [[0], [2], [0]] * (x[1:4] @ a @ b), 0.2)


def test_attention(device):
    one, many = blocks_of("docs/attention.md")
    names = run(device, one)
    q, k, v, dout = hosts(device, names, "q", "k", "v", "dout")
    near(device, names["near"], references.attention(q, k, v, window=(32, 0), softcap=30.0)[0])
    near(device, names["out"], references.attention(q, k, v, causal=True)[0])  # which the plan has written
    for found, want in zip("qkv", references.attention_backward(dout, q, k, v, causal=True), strict=True):
        near(device, names[f"d{found}"], want)
    wanted = references.attention_backward(dout, q, k, v, **names["drop"])
    for found, want in zip(names["gradients"], wanted, strict=True):
        near(device, found, want)

    names = run(device, many, **names)
    q, k, v = (x[None] for x in hosts(device, names, "q", "k", "v"))
    bounds = (0, 20, 0, 20), (20, 60, 20, 70)  # queries from and to, keys from and to
    parts = [references.attention(q[:, i:j], k[:, m:n], v[:, m:n], causal=True)[0] for i, j, m, n in bounds]
    near(device, names["packed"], np.concatenate(parts, 1)[0])


def test_paged_kv(device):
    *eager, graph = blocks_of("docs/paged_kv.md")
    names = run(device, *eager)
    k, v, k1, v1, q1 = hosts(device, names, "k", "v", "k1", "v1", "q1")
    for i in range(2):
        keys, values = (np.concatenate([x, one[i : i + 1]])[None] for x, one in ((k, k1), (v, v1)))
        near(device, names["out"][i : i + 1], references.attention(q1[None, i : i + 1], keys, values)[0][0])
    near(device, names["out8"], references.attention(q1[None, :1], k[None], v[None])[0][0])
    small = device.get(names["small"].pages)
    assert abs(small[small != 0]).max() == 127

    if device.is_emulated:  # the calls run, and nothing is captured
        names["cp"] = MagicMock(wraps=np, cuda=MagicMock())
    names = run(device, graph, **names)
    assert names["cache"].length(names["s"]) == len(k) + 1 + 21
    if not device.is_emulated:
        device.xp.cuda.Device().synchronize()
        near(device, names["out"], device.get(names["cache"].decode(names["q1"], names["sequences"])).astype(float))


def test_sparse(device):
    (block,) = blocks_of("docs/sparse.md")
    names = run(device, block)
    data, indices, indptr, x = (device.get(names[name]) for name in ("data", "indices", "indptr", "x"))
    a = sparse.csr_array((data, indices, indptr), names["A"].shape).toarray()
    for found, want in ((names["y"], 2 * a @ x), (names["g"], a.T @ (a @ x))):
        np.testing.assert_allclose(device.get(found), want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(names["A"].to_scipy().toarray(), a / 2, rtol=1e-15)  # of the new values


def test_spmm(device, capsys):
    (block,) = blocks_of("docs/spmm.md")
    names = run(device, block)
    assert f"print(B)  # {capsys.readouterr().out}" in block
    X, data = hosts(device, names, "X", "data")
    a = names["A"].to_scipy().toarray().astype(float)
    assert a.any()
    near(device, names["Y"], 2 * a @ X)
    near(device, names["Z"], a @ X)
    parts = (data, device.get(names["indices"]), device.get(names["indptr"]))
    near(device, names["W"], sparse.bsr_array(parts, names["C"].shape) @ X)


def test_lsmr(device):
    names = run(device, *blocks_of("docs/lsmr.md"))
    a, result, many = names["matrix"].toarray(), names["result"], names["many"]
    b, B = hosts(device, names, "b", "B")
    want = np.linalg.lstsq(a, b, rcond=None)[0]
    np.testing.assert_allclose(device.get(names["x"]), want, rtol=1e-6, atol=1e-7)
    scipys = linalg.lsmr(a, b, atol=1e-8, btol=1e-8)
    assert names["istop"] == scipys[1] == 2
    assert abs(names["itn"] - scipys[2]) <= 1
    for name, norm in (("normr", np.linalg.norm(b - a @ want)), ("normx", np.linalg.norm(want))):
        np.testing.assert_allclose(names[name], norm, rtol=1e-6)

    damped = np.concatenate([a, 0.1 * np.eye(20)])
    for found, right in ((result, b), (many, B)):
        padded = np.concatenate([right, np.zeros((20, *right.shape[1:]))])
        want = np.linalg.lstsq(damped, padded, rcond=None)[0]
        np.testing.assert_allclose(device.get(found.x), want, rtol=1e-4, atol=1e-5)
        assert (found.istop == np.full(right.shape[1:], 2)).all()
    assert len(result.history["normr"]) == result.itn
    assert not result.status.is_false


def test_rowwise(device):
    (block,) = blocks_of("docs/rowwise.md")
    given = run(device, block.partition("y = ")[0])  # as they are before r, q and k are written to
    x, r, weight, bias, scores, gate_up, qkv = hosts(
        device, given, "x", "r", "weight", "bias", "scores", "gate_up", "qkv"
    )
    names = run(device, block)
    near(device, names["r"], x + r)
    near(device, names["y"], (x + r) / np.sqrt(((x + r) ** 2).mean(-1, keepdims=True)) * weight)
    near(device, names["z"], (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) * weight + bias)
    powers = np.exp(scores)
    near(device, names["p"], powers / powers.sum(-1, keepdims=True), 1e-4)
    near(device, names["h"], references.swiglu(gate_up))
    near(device, names["s"], x.sum(-1), 1e-4)
    assert names["s"].dtype == np.float32
    angles = np.arange(6)[:, None, None] * 10000.0 ** (-np.arange(32) / 32)
    turned = (qkv[:, :6, :32] + 1j * qkv[:, :6, 32:]) * np.exp(1j * angles)
    near(device, names["qkv"], np.concatenate([np.concatenate([turned.real, turned.imag], -1), qkv[:, 6:]], 1), 1e-2)
    assert device.xp.shares_memory(names["k"], names["qkv"])
