"""What the tests of `MultiLoRA` share: adapters, the reference, and checks that every kernel must pass."""

import itertools

import ml_dtypes
import numpy as np

from rawops.lora import MultiLoRA
from rawops.testing import references
from rawops.testing.tolerances import assert_close

DTYPES = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def integers(rng, shape, dtype="float16") -> np.ndarray:
    return rng.integers(-1, 2, shape).astype(DTYPES[dtype])


def adapter(rng, K, N, rank, scaling=0.5, dtype="float16") -> tuple:
    return integers(rng, (K, rank), dtype), integers(rng, (rank, N), dtype), scaling


def load(device, op, adapters: dict) -> None:
    for slot, (a, b, scaling) in adapters.items():
        op.load(slot, device.put(a), device.put(b), scaling)


def reference(x, c, adapters: dict, indices, **epilogue) -> np.ndarray:
    """Row by row, in float64, with the adapter that the row has."""
    rows = []
    for i, index in enumerate(indices):
        a, b, scaling = adapters.get(int(index), (np.zeros((c.shape[0], 0)), np.zeros((0, c.shape[1])), 0))
        with np.errstate(invalid="ignore"):
            rows.append(references.lora_linear(x[i : i + 1], c, a, b, scaling=scaling, **epilogue)[0])
    return np.array(rows)


def bits(device, x) -> np.ndarray:
    return np.ascontiguousarray(device.get(x)).view(np.uint16)


def same(device, got, want) -> None:
    dtype = device.get(got).dtype
    np.testing.assert_array_equal(device.get(got).astype(np.float64), want.astype(dtype).astype(np.float64))


def poison(op) -> None:
    """Fill the stack with NaN, as memory may hold that was not allocated for the first time."""
    stack = op._product.stack
    stack.a[...] = stack.b[...] = stack.scalings[...] = float("nan")


def check_intermediate_past_65504(device, dtype):
    """x @ a of 64 * 64 * K beside one of 1: no limit for the one, no loss for the other."""
    K = 512 if device.is_emulated else 4096
    x, c = np.full((3, K), 64, DTYPES[dtype]), np.zeros((K, 40), DTYPES[dtype])
    op = MultiLoRA(device.put(c.T.copy()).T, 1, 16)
    a, b = np.full((K, 16), 64, DTYPES[dtype]), np.full((16, 40), 2.0**-14, DTYPES[dtype])
    load(device, op, {0: (a, b, 1.0)})
    for _ in range(2):
        same(device, op(device.put(x), device.put(np.zeros(3, np.int32))), np.full((3, 40), 16.0 * 64 * 64 * K / 2**14))


def check_intermediate_is_float32(device, rng, dtype):
    """In a float32 result, where a rounding of x @ a to 16 bits would show."""
    M, N, K, rank = 20, 40, 96, 24
    x = (rng.standard_normal((M, K)) * 200).astype(DTYPES[dtype])
    op = MultiLoRA(device.put(np.zeros((N, K), DTYPES[dtype])).T, 1, rank)
    a, b = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in ((K, rank), (rank, N)))
    a = (a.astype(np.float32) * 200).astype(DTYPES[dtype])
    load(device, op, {0: (a, b, 1.7)})
    out = device.guarded((M, N), np.float32)
    op(device.put(x), device.put(np.zeros(M, np.int32)), out=out)
    low = references.gemm_magnitude(x, a)
    assert low.max() > 65504
    want = references.lora_linear(x, np.zeros((K, N)), a, b, scaling=1.7)
    magnitude = 1.7 * references.gemm_magnitude(low, b)
    assert_close(device.get(out), want, "float32", k=40, magnitude=magnitude)


def check_non_finite_values(device, rng, dtype):
    """Infinity and NaN in one adapter or row of x reach what IEEE arithmetic says, and no other row or column."""
    M, N, K = 12, 40, 24
    x, c = integers(rng, (M, K), dtype), integers(rng, (K, N), dtype)
    op = MultiLoRA(device.put(c.T.copy()).T, 3, 8, slices=[(0, 20), (20, 37)])
    parts = [adapter(rng, K, w, 8, 1.0, dtype) for w in (20, 17, 20, 17)]
    parts[0][0][:, 0], parts[0][1][0, 3], parts[0][1][0, 5] = 1, np.inf, np.nan
    parts[3][0][2, 1] = np.inf
    x[:, 0] += x.sum(axis=1) == 0
    x[4, 7] = np.nan
    for slot in (0, 1):
        first, second = parts[2 * slot : 2 * slot + 2]
        op.load(slot, [device.put(first[0]), device.put(second[0])], [device.put(first[1]), device.put(second[1])], 1.0)
    indices = np.resize([0, 1, -1], M).astype(np.int32)
    got = device.get(op(device.put(x), device.put(indices))).astype(np.float64)
    want = references.gemm(x, c)
    with np.errstate(invalid="ignore", over="ignore"):
        for slot, (part, columns) in itertools.product((0, 1), ((0, slice(0, 20)), (1, slice(20, 37)))):
            a, b, _ = parts[2 * slot + part]
            rows = indices == slot
            want[rows, columns] += references.gemm(references.gemm(x[rows], a), b)
    np.testing.assert_array_equal(got, want.astype(DTYPES[dtype]).astype(np.float64))
    assert np.isinf(got[indices == 0][:, 3]).any() and np.isfinite(got[indices == -1]).sum() >= N * 3


def check_non_finite_scaling(device, rng, dtype, K=24):
    """It reaches the rows of its adapter; the others are as without it, bit for bit."""
    M, N = 12, 40
    x, c = integers(rng, (M, K), dtype), integers(rng, (K, N), dtype)
    op, usual = (MultiLoRA(device.put(c.T.copy()).T, 3, 8) for _ in range(2))
    (a, b, _), other = adapter(rng, K, N, 8, 1.0, dtype), adapter(rng, K, N, 5, 2.0, dtype)
    b[:, 7] = 0
    indices = np.resize([0, 1, -1], M).astype(np.int32)
    for scaling, factor in ((np.nan, np.nan), (np.inf, np.inf), (1e39, np.inf)):
        load(device, op, {0: (a, b, scaling), 1: other})
        load(device, usual, {0: (a, b, 1.0), 1: other})
        got, finite = (device.get(one(device.put(x), device.put(indices))) for one in (op, usual))
        np.testing.assert_array_equal(bits(device, got)[indices != 0], bits(device, finite)[indices != 0])
        with np.errstate(invalid="ignore"):
            want = references.gemm(x, c) + (factor * references.gemm(x, a)) @ b.astype(np.float64)
        np.testing.assert_array_equal(got[indices == 0].astype(np.float64), want[indices == 0])
        assert np.isnan(want[:, 7]).all()


def sliced(rng, K, slices, ranks, dtype="float16") -> list:
    """Factors of each slice, None where the rank is."""
    return [
        (None, None) if rank is None else adapter(rng, K, stop - start, rank, dtype=dtype)[:2]
        for (start, stop), rank in zip(slices, ranks, strict=True)
    ]


def block_matrices(K, N, slices, pairs) -> tuple[np.ndarray, np.ndarray]:
    """One a and b that do the same: the factors side by side, and block by block."""
    a, b = np.zeros((K, 0)), np.zeros((0, N))
    for (start, stop), (pair_a, pair_b) in zip(slices, pairs, strict=True):
        if pair_a is not None:
            block = np.zeros((pair_b.shape[0], N))
            block[:, start:stop] = pair_b
            a, b = np.hstack([a, pair_a]), np.vstack([b, block])
    return a, b


def load_sliced(device, rng, op, ranks) -> dict:
    """Load the first slots, of each slot its ranks slice by slice; return adapters that do the same in one piece."""
    (K, N), adapters = op.c.shape, {}
    for slot, of_slot in enumerate(ranks):
        pairs = sliced(rng, K, op.slices, of_slot)
        a, b = ([None if x is None else device.put(x) for x in side] for side in zip(*pairs, strict=True))
        op.load(slot, a, b, 0.5)
        adapters[slot] = (*block_matrices(K, N, op.slices, pairs), 0.5)
    return adapters
