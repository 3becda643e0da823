"""Operands off the 16-byte boundaries, copied before a large product: every layout, batches, gates, and when."""

import itertools

import numpy as np
import pytest
from conftest import Device

import rawops
from rawops import _gemm_repack
from rawops.gemm import Gemm, gemm
from rawops.testing import has_gpu, references

FLOAT16 = np.dtype("float16")


@pytest.fixture
def always(monkeypatch):
    """Copy however small the product is."""
    monkeypatch.setattr(_gemm_repack, "pays", lambda *_: True)


@pytest.fixture(params=["any GPU", "Hopper"])
def device(request):
    """Both families of kernels that take the copies."""
    return request.getfixturevalue("hopper" if request.param == "Hopper" else "plain")


@pytest.fixture
def plain():
    if has_gpu():
        pytest.skip("runs as Hopper there")
    with rawops.emulate(arch="sm_80", check=True) as emu:
        found = Device(np)
        found.report = emu.report
        yield found
    found.check_guards()


LAYOUTS = {
    "odd rows": lambda xp, x: embedded(xp, x, 1)[..., 1:],
    "odd columns": lambda xp, x: embedded(xp, x.swapaxes(-1, -2), 1)[..., 1:].swapaxes(-1, -2),
    "both strided": lambda xp, x: embedded(xp, np.repeat(x, 2, -1), 3)[..., 3::2],
    "reversed": lambda xp, x: embedded(xp, x[..., ::-1, ::-1], 1)[..., 1:][..., ::-1, ::-1],
}


def embedded(xp, x: np.ndarray, pad: int):
    """x behind `pad` columns of NaN, with rows of an odd length."""
    room = np.full((*x.shape[:-1], x.shape[-1] + pad), np.nan, x.dtype)
    room[..., pad:] = x
    return xp.asarray(room)


def integers(rng, *shape: int) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(FLOAT16)


def copies(device) -> list[str]:
    return [launch.kernel for launch in device.report if "repack" in launch.kernel]


@pytest.mark.parametrize("layouts", [*itertools.product(LAYOUTS, repeat=2)], ids=" @ ".join)
def test_layouts(device, always, rng, layouts):
    a, b = integers(rng, 67, 71), integers(rng, 71, 93)
    out = device.guarded((67, 93), FLOAT16)
    gemm(*(LAYOUTS[name](device.xp, x) for name, x in zip(layouts, (a, b), strict=True)), out=out)
    np.testing.assert_array_equal(device.get(out), (a.astype(int) @ b.astype(int)).astype(FLOAT16))
    assert device.xp is not np or len(copies(device)) == 2


def test_one_operand(device, always, rng):
    """What is aligned is taken as it is."""
    a, b = integers(rng, 66, 64), integers(rng, 64, 93)
    out = device.guarded((66, 93), FLOAT16)
    gemm(device.put(a), device.put(b), out=out)
    np.testing.assert_array_equal(device.get(out), (a.astype(int) @ b.astype(int)).astype(FLOAT16))
    assert device.xp is not np or copies(device) == ["rawops::gemm_repack<2>"]


def test_batches(device, always, rng):
    """Axes that repeat are copied once; the others keep their order."""
    a, b = integers(rng, 2, 3, 9, 17), integers(rng, 3, 17, 11)
    out = device.guarded((2, 3, 9, 11), FLOAT16)
    gemm(LAYOUTS["odd rows"](device.xp, a), LAYOUTS["both strided"](device.xp, b), out=out)
    np.testing.assert_array_equal(device.get(out), (a.astype(int) @ b.astype(int)).astype(FLOAT16))


def test_gate(device, always, rng):
    """swiglu with a half that is no multiple of 8 wide: b is transposed on the way, as TMA wants `up` aligned, too."""
    a, b = rng.standard_normal((65, 40)).astype(FLOAT16), rng.standard_normal((40, 2 * 37)).astype(FLOAT16)
    out = gemm(device.put(a), device.put(b), activation="swiglu")
    want = references.gemm(a.astype(float), b.astype(float), activation="swiglu")
    np.testing.assert_allclose(device.get(out).astype(float), want, rtol=2e-3, atol=2e-2)
    assert device.xp is not np or "rawops::gemm_repack_transposed<2>" in copies(device)


def test_plan_and_epilogue(device, always, rng):
    """A plan keeps its copies' memory; alpha, beta and bias come after."""
    a, b, c = integers(rng, 65, 33), integers(rng, 33, 65), integers(rng, 65, 65)
    bias = integers(rng, 65)
    op = Gemm(65, 65, 33, "float16", alpha=2.0, beta=-1.0)
    for shift in (0, 1):
        got = op(device.put(a + FLOAT16.type(shift)), device.put(b), device.put(c), bias=device.put(bias))
        want = 2 * ((a + shift).astype(int) @ b.astype(int)) - c + bias
        np.testing.assert_array_equal(device.get(got), want.astype(FLOAT16))


@pytest.mark.parametrize("layouts, count", [("nn", 1), ("nt", 2), ("tt", 1), ("tn", 0)])
@pytest.mark.parametrize("activation, K", [(None, 37), (None, 76), ("swiglu", 37)])
def test_float32_is_laid_across_k(hopper, always, rng, layouts, count, activation, K):
    """Of a gated b, only where both halves begin on 16 bytes."""
    M, N = 67, 92 if activation is None else 180
    a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((2, M, K), (K, N)))
    stored = [
        hopper.put(x) if layout == "n" else hopper.put(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2)
        for x, layout in zip((a, b), layouts, strict=True)
    ]
    before = len(copies(hopper)) if hopper.xp is np else 0
    kernel = "rawops::gemm_repack_words" if K % 4 == 0 else "rawops::gemm_repack_transposed<4>"
    got = hopper.get(gemm(*stored, activation=activation))
    want = references.gemm(a.astype(float), b.astype(float), activation=activation)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)
    fewer = activation is not None and layouts[1] == "t"
    assert hopper.xp is not np or copies(hopper)[before:] == [kernel] * (count - fewer)


def test_when_float32_pays():
    assert _gemm_repack.pays(2 * 4096**3, 16, 2 * 4 * 4096**2, "float32")
    assert not _gemm_repack.pays(2 * 2048**3, 16, 2 * 4 * 2048**2, "float32")


@pytest.mark.parametrize(
    "size, access, expected",
    [
        ((8191, 4095, 4097), 2, True),
        ((4096, 256, 4096), 8, False),
        ((16, 4095, 4097), 2, False),  # the copy of b alone takes longer
        ((8192, 8192, 8196), 8, True),
        ((200, 200, 200), 2, False),
    ],
)
def test_when_it_pays(size, access, expected):
    M, N, K = size
    assert _gemm_repack.pays(2 * M * N * K, access, 2 * (M + N) * K) is expected
