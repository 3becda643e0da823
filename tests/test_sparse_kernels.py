"""Every kernel on rows that are hard for it: edges of tiles and segments, one long row, only empty rows."""

import numpy as np
import pytest
from test_sparse import Coordinates, integers, same

from rawops import _sparse_store
from rawops._sparse_profile import Choice, Profile, candidates, choose
from rawops._sparse_stream import ByStream

KERNELS = {
    **{f"rows {lanes}": Choice("rows", lanes) for lanes in (4, 32)},
    **{
        f"stream {lanes}, {longest}": Choice("stream", lanes, longest)
        for lanes, longest in ((1, 64), (4, 256), (32, 100), (1, 0))
    },
    "single": Choice("stream", 2, 256, walk="single"),
    "slices": Choice("slices", 2, 64, 16, "neighbours"),
}
TILE = 2048
LENGTHS = {
    "even": np.full(600, 7),
    "tile edges": np.array([64] * 31 + [48, 1, 63, 64, 64, 0, 1, 2, 3, 4, 5] + [32] * 40),
    "powers of two": np.repeat([1, 2, 4, 8, 16, 32, 64, 128, 256], 9),
    "long at the ends": np.array([2500, 1, 2, 0, 0, 3, 2049, 2048, 257, 4097]),
    "one long": np.array([0, 0, 3, 4500, *([1, 2] * 60)]),
    "empty": np.array([0] * 8200 + [3] + [0] * 50),
    "alternating": np.array([0, 300] * 12),
}


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    monkeypatch.setattr(_sparse_store, "choose", lambda *found: KERNELS[request.param])
    return request.param


@pytest.mark.parametrize("rows", LENGTHS)
def test_exact_sums_and_norms(device, rng, kernel, rows):
    """Small integers: every product, its norm, with beta, and nothing but the entries read."""
    lengths = LENGTHS[rows]
    if device.is_emulated and rows == "empty" and kernel not in ("stream 1, 64", "stream 1, 0"):
        lengths = lengths[7500:]
    made = Coordinates(rng, (lengths.size, 40), lengths)
    made.indices += made.indices == 17  # no entry is in column 17
    A = made.put(device, dual=False)
    x, y = integers(rng, 40, "float32"), integers(rng, lengths.size, "float32")
    product = np.bincount(made.row, made.data.astype(float) * x[made.indices], lengths.size)
    x[17] = np.nan
    for beta in (0, -2):
        out, count = device.guarded((lengths.size,), np.float32), A._num_partials(False)
        if beta:
            out[...] = device.put(y)
        partials = device.guarded((count,), np.float64)
        A._apply(False, device.put(x), out, 2.0, float(beta), partials)
        want = 2 * product + beta * y
        same(device, out, want)
        assert device.get(partials).sum() == (want**2).sum()


@pytest.mark.parametrize("dtype", ["float16", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("walk", ["dealt", "single"])
def test_types(device, rng, monkeypatch, dtype, walk):
    monkeypatch.setattr(_sparse_store, "choose", lambda *found: Choice("stream", 2, 64, walk=walk))
    lengths = np.array([2100, 0, 1, 40, 64, 65, *([3, 7] * 30)])
    made = Coordinates(rng, (lengths.size, 60), lengths, dtype)
    A, x = made.put(device, dual=False), integers(rng, 60, dtype)
    wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    want = np.zeros(lengths.size, wide)
    np.add.at(want, made.row, made.data.astype(wide) * x[made.indices].astype(wide))
    same(device, A @ device.put(x), want.astype(dtype))
    if wide is np.complex128:
        want = np.zeros(lengths.size, wide)
        np.add.at(want, made.row, made.data.conj().astype(wide) * x[made.indices])
        same(device, A.H.T @ device.put(x), want.astype(dtype))


@pytest.mark.parametrize("width", [13, 64])
def test_slices(device, rng, monkeypatch, width):
    """One slice and many: wider vectors, new values, factors of zero, tiles of several slices in one block."""
    monkeypatch.setattr(_sparse_store, "choose", lambda *found: Choice("slices", 1, 64, width, "neighbours"))
    lengths = np.array([0, 3, 70, *([11] * 500), 0, 2])
    made = Coordinates(rng, (lengths.size, 60), lengths)
    made.indices += made.indices == 17
    A = made.put(device, dual=False)
    for dtype in ("float32", "float64", "complex128"):
        x, y = integers(rng, 60, dtype), integers(rng, lengths.size, dtype)
        want = 2 * (made.dense() @ x) - y
        x[17] = np.nan
        out, partials = device.guarded((lengths.size,), dtype), device.guarded((A._num_partials(False),), np.float64)
        out[...] = device.put(y)
        A._apply(False, device.put(x), out, 2.0, -1.0, partials)
        same(device, out, want)
        assert device.get(partials).sum() == (abs(want) ** 2).sum().round()
    A.update_values(device.put(np.full(made.data.size, np.nan, np.float32)))
    out = device.put(np.ones(lengths.size, np.float32))
    same(device, A.matvec(device.put(np.full(60, np.nan, np.float32)), 0, 3, out), np.full(lengths.size, 3.0))
    made.data = integers(rng, made.data.size, "float32")
    A.update_values(device.put(made.data))
    x = integers(rng, 60, "float32")
    same(device, A @ device.put(x), made.dense() @ x)


@pytest.mark.parametrize(
    ("kernel", "walk", "changes"),
    [
        ("stream", "dealt", {}),
        ("stream", "single", {"cv": 4.0, "max": 5000}),
        ("stream", "single", {"mean": 500.0, "max": 700}),
        ("rows", "dealt", {"max": 9, "nnz": 2**19}),
        ("slices", "neighbours", {"mean": 850.0, "scatter": 0.99}),
        ("stream", "single", {"mean": 850.0, "scatter": 0.5}),
        ("stream", "single", {"mean": 850.0, "scatter": 0.99, "cols": 4000}),
        ("stream", "dealt", {"mean": 15.0, "scatter": 0.99}),
    ],
)
def test_rules(kernel, walk, changes):
    usual = {"rows": 10**6, "cols": 10**5, "nnz": 10**7, "mean": 10.0, "p95": 11, "p99": 12, "max": 20, "cv": 0.1}
    found = Profile(**usual | {"empty": 0, "scatter": 0.7} | changes)
    choice = choose(found)
    assert (choice.kernel, choice.walk) == (kernel, walk)
    assert candidates(found)[0] == choice and len({str(c) for c in candidates(found)}) >= 3
    assert all(c.kernel != "slices" for c in candidates(found, may_slice=False))


def test_16_bit_values_are_not_cut_into_slices(device, rng):
    """Rows so long and scattered that float32 would be."""
    made = Coordinates(rng, (3, 20_000), [500, 200, 300], "float16")
    x = integers(rng, 20_000, "float16")
    A = made.put(device, dual=False)
    assert A.plan.matvec.kernel == "stream"
    same(device, A @ device.put(x), (made.dense() @ x).astype(np.float16))
    made.data = made.data.astype(np.float32)
    A = made.put(device, dual=False)
    assert A.plan.matvec.kernel == "slices"
    same(device, A @ device.put(x.astype(np.float32)), made.dense() @ x)


def test_the_end_of_the_entries(device, rng):
    """Vector loads stop with the last entry, which may stand anywhere in its group of four."""
    for last in range(1, 9):
        made = Coordinates(rng, (4, 30), [2, 0, 5, last])
        x = integers(rng, 30, "float32")
        same(device, made.put(device) @ device.put(x), made.dense() @ x)


def test_the_same_bits_again(device, rng):
    """Also where several warps share a row and any of them may be the last."""
    lengths = np.array([4500, 1, 40, 0, 2100, *([6] * 40)])
    made = Coordinates(rng, (lengths.size, 50), lengths)
    made.data = rng.standard_normal(made.data.size).astype(np.float32)
    A, x = made.put(device, dual=False), device.put(rng.standard_normal(50).astype(np.float32))
    count = A._num_partials(False)
    results = []
    for _ in range(2 if device.is_emulated else 20):
        out, partials = device.guarded((lengths.size,), np.float32), device.guarded((count,), np.float64)
        A._apply(False, x, out, 1.0, 0.0, partials)
        results.append((device.get(out).tobytes(), device.get(partials).tobytes()))
    assert len(set(results)) == 1


@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize("longest", [0, 64, 256])
def test_shares_cover_all_rows_once(device, rows, longest):
    lengths = LENGTHS[rows]
    made = Coordinates(np.random.default_rng(0), (lengths.size, 3), lengths)
    A = made.put(device, dual=False)
    product = ByStream(A._store.device, A._store.values, Choice("stream", 1, longest))
    tiles, segments, splits = map(device.get, (product.tiles, product.segments, product.splits))
    kind = np.dtype([("entry", "i8"), ("row", "i4"), ("rows", "u2"), ("entries", "u2")])
    tiles = tiles.view(kind).ravel()
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    rows_of_tiles = np.concatenate([t["row"] + np.arange(t["rows"]) for t in tiles] or [[]]).astype(int)
    assert sorted([*rows_of_tiles, *np.unique(segments[:, 2])]) == list(range(lengths.size))
    assert (lengths[rows_of_tiles] <= longest).all() and (lengths[segments[:, 2]] > longest).all()
    for entry, row, count, entries in tiles.tolist():
        assert entry == indptr[row] & ~3 and entry + entries == indptr[row + count]
        assert entries <= TILE and 0 < count <= 4 * TILE
    for begin, stop, row, split in segments:
        assert indptr[row] <= begin < stop <= indptr[row + 1]
        assert (split >= 0) == (lengths[row] > TILE)
    assert (segments[:, 1] - segments[:, 0]).sum() == lengths[lengths > longest].sum()
    for split, (first, count) in enumerate(splits):
        own = segments[segments[:, 3] == split]
        assert len(own) == count and (segments[first : first + count] == own).all()
        assert (own[1:, 0] == own[:-1, 1]).all()
