"""Attention on a GPU: long sequences, and arrays of more elements than 32 bits count."""

import numpy as np
import pytest

from rawops.attention import flash_attention, flash_attention_backward, flash_attention_varlen
from rawops.testing import references
from rawops.testing.tolerances import assert_close

FLOAT16 = np.dtype("float16")


pytestmark = pytest.mark.gpu


@pytest.fixture
def fill():
    """Makes random arrays that repeat after a prime number of elements: no offset off by a power of two is right."""
    import cupy

    kernel = cupy.ElementwiseKernel(
        "raw T period", "T x", "x = period[(unsigned long long)(i) % 1000003ull]", "repeat_period"
    )

    def make(shape: tuple[int, ...], seed: int):
        period = cupy.random.default_rng(seed).standard_normal(1_000_003, dtype=np.float32).astype(FLOAT16)
        return kernel(period, cupy.empty(shape, FLOAT16))

    yield make
    cupy.get_default_memory_pool().free_all_blocks()


def check_rows(out, q, k, v, rows, window: int | None) -> None:
    """Compare some rows of some heads, causal, with the reference of the keys that they see."""
    for row in rows:
        first = 0 if window is None else max(row - window, 0)
        for head in {0, q.shape[2] - 1}:
            one = (x[:, a : row + 1, head : head + 1].get() for x, a in ((q, row), (k, first), (v, first)))
            want, _ = references.attention(*one, causal=True)
            got = out[:, row : row + 1, head : head + 1].get()
            assert_close(got, want, FLOAT16, k=2**13, magnitude=4.0)


@pytest.mark.parametrize("D", [64, 128, 60])
def test_one_head_of_131072_queries(fill, D):
    """Hopper's kernel, and with rows of 120 bytes the one of sm_80."""
    q, k, v = (fill((1, 1 << 17, 1, D), seed) for seed in range(3))
    out = flash_attention(q, k, v, causal=True)
    check_rows(out, q, k, v, (0, 1, 63, 64, 12345, 65535, 65536, (1 << 17) - 1), None)


@pytest.mark.parametrize("D", [128, 100])
def test_arrays_of_more_than_2_to_31_elements(fill, D):
    """A window keeps it short; the last row of the last head lies beyond 2^31 in every array."""
    q, k, v = (fill((1, (1 << 31) // (D * 128) + 100, 128, D), seed) for seed in range(3))
    assert q.size > 1 << 31
    out = flash_attention(q, k, v, causal=True, window=(63, None))
    last = q.shape[1] - 1
    check_rows(out, q, k, v, (0, 70, last // 2, last - 1, last), 63)


def test_packed_rows_of_more_than_2_to_31_elements(fill):
    """A short sequence at the very end of long storage."""
    import cupy

    q, k, v = (fill(((1 << 31) // (128 * 128) + 100, 128, 128), seed) for seed in range(3))
    total = q.shape[0]
    bounds = cupy.asarray(np.array([0, 50, total - 90, total], np.int32))
    out = flash_attention_varlen(q, k, v, bounds, bounds, total, total, causal=True, window=(63, None))
    tail = (x[None, total - 90 :, -1:].get() for x in (q, k, v))
    want, _ = references.attention(*tail, causal=True, window=(63, None))
    assert_close(out[total - 90 :, -1:].get(), want[0], FLOAT16, k=2**13, magnitude=4.0)


@pytest.mark.parametrize("D", [64, 60])
@pytest.mark.parametrize("layout", ["sequences", "heads", "packed"])
def test_more_sequences_or_heads_than_a_grid_is_high(fill, D, layout):
    """70000 rows with a key each: the value comes out, and the gradient goes to it alone."""
    import cupy

    shape = {"sequences": (70000, 1, 1, D), "heads": (1, 1, 70000, D), "packed": (70000, 1, D)}[layout]
    q, k, v, dout = (fill(shape, seed) for seed in range(4))
    varlen = {}
    if layout == "packed":
        bounds = cupy.arange(70001, dtype=np.int32)
        varlen = {f"{name}_{x}": value for x in "qk" for name, value in (("cu_seqlens", bounds), ("max_seqlen", 1))}
        out, lse = flash_attention_varlen(q, k, v, **varlen, return_lse=True)
    else:
        out, lse = flash_attention(q, k, v, return_lse=True)
    assert (out == v).all()
    dq, dk, dv = flash_attention_backward(dout, q, k, v, out, lse, **varlen)
    assert (dv == dout).all()
    assert max(float(abs(x).max()) for x in (dq, dk)) < 1e-2
