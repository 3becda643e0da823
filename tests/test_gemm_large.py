"""Operands past 2^31 elements, each in turn, on the kernels of Hopper and of all cards: some rows, exactly."""

import numpy as np
import pytest

from rawops.gemm import gemm, grouped_gemm

pytestmark = pytest.mark.gpu

PAST = 1 << 31
KERNELS = {"hopper where there is one": {}, "all cards": {"split_k": 1}}


@pytest.fixture
def fill(device):
    """Makes an array of small integers that do not repeat along either axis; memory goes back after the test."""
    kernel = device.xp.ElementwiseKernel(
        "", "T x", "x = T(float(int((unsigned long long)(i) * 2654435761ull >> 16 & 0xffff) % 5 - 2))", "small_integers"
    )

    def make(*shape, dtype="float16"):
        return kernel(device.xp.empty(shape, dtype))

    yield make
    device.xp.get_default_memory_pool().free_all_blocks()


def some(size: int) -> np.ndarray:
    """Indices at both ends and in between, among them those of tiles and warps' edges."""
    middle = size // 2
    return np.unique([0, 1, 63, 64, 130, middle - 1, middle, middle + 77, size - 129, size - 65, size - 2, size - 1])


def check(device, out, a, b, c=None) -> None:
    """Compare some rows of out, at some columns."""
    rows, cols = some(out.shape[0]), some(out.shape[1])
    get = device.get
    want = get(a[rows]).astype(np.int64) @ get(b[:, cols]).astype(np.int64)
    if c is not None:
        want = want + 2 * get(c[rows][:, cols]).astype(np.int64)
    np.testing.assert_array_equal(get(out[rows][:, cols]), want.astype(np.float64).astype(out.dtype))


@pytest.mark.parametrize("options", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("order", ["row", "col"])
def test_a(device, fill, options, order):
    M, N, K = PAST // 2048 + 200, 16, 2048
    a = fill(M, K) if order == "row" else fill(K, M).T
    b = fill(K, N)
    assert a.size > PAST
    check(device, gemm(a, b, **options), a, b)


@pytest.mark.parametrize("options", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("order", ["row", "col"])
def test_b(device, fill, options, order):
    M, N, K = 200, PAST // 2048 + 200, 2048
    b = fill(K, N) if order == "row" else fill(N, K).T
    a = fill(M, K)
    assert b.size > PAST
    check(device, gemm(a, b, **options), a, b)


@pytest.mark.parametrize("options", KERNELS.values(), ids=KERNELS)
def test_out_and_c(device, fill, options):
    M, N, K = PAST // 32768 + 200, 32768 + 8, 64
    a, b, c = fill(M, K), fill(K, N), fill(M, N)
    assert c.size > PAST
    out = gemm(a, b, **options)
    check(device, out, a, b)
    check(device, gemm(a, b, c, beta=2.0, out=out, **options), a, b, c)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_types(device, fill, dtype):
    M, N, K = PAST // 2048 + 200, 24, 2048
    a, b = fill(M, K, dtype=dtype), fill(K, N, dtype=dtype)
    check(device, gemm(a, b), a, b)
    del a
    a, b = fill(PAST // 32768 + 200, 16, dtype=dtype), fill(16, 32768 + 8, dtype=dtype)
    check(device, gemm(a, b), a, b)


def test_a_batch(device, fill):
    a, b = fill(40, 8192, 8192), fill(8192, 72)
    assert a.size > PAST
    out = gemm(a, b)
    for i in (0, 20, 39):
        check(device, out[i], a[i], b)


@pytest.mark.parametrize("order", ["row", "col"])
def test_groups(device, fill, order):
    groups, N, K = 33, 8192, 8192
    b = fill(groups, K, N) if order == "row" else fill(groups, N, K).swapaxes(1, 2)
    assert b.size > PAST
    a, offsets = fill(groups * 200, K), device.put(np.arange(0, (groups + 1) * 200, 200))
    out = grouped_gemm(a, b, offsets)
    for g in (0, 16, 31, 32):
        rows = slice(200 * g, 200 * g + 200)
        check(device, out[rows], a[rows], b[g])
