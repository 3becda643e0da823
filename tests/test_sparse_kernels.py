"""Every kernel on rows that are hard for it: edges of tiles and segments, one long row, only empty rows."""

import weakref

import numpy as np
import pytest
from coordinates import Coordinates, integers, same

from rawops import SparseMatrix, _sparse_store
from rawops._runtime import device as devices
from rawops._sparse_memory import Answers
from rawops._sparse_profile import Choice, Limits, Profile, candidates, choose
from rawops._sparse_stream import ByStream

KERNELS = {
    **{f"rows {lanes}": Choice("rows", lanes) for lanes in (4, 32)},
    **{
        f"stream {lanes}, {longest}": Choice("stream", lanes, longest)
        for lanes, longest in ((1, 64), (4, 256), (32, 100), (1, 0))
    },
    "single": Choice("stream", 2, 256, walk="single"),
    "packed": Choice("packed", 1, 64),
    "packed, 4": Choice("packed", 4, 64),
    "packed as they are": Choice("packed", 2, 100, is_sorted=False),
    "packed, shared": Choice("packed", 1, 64, 40),
    "packed, shared blocks": Choice("packed", 8, 64, 16),
}
TILE, SEGMENT = 2048, 512
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
    if "blocks" in kernel:  # of columns, for rows whose columns rise
        made.indices = made.indices[np.lexsort((made.indices, made.row))]
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


@pytest.mark.gpu
def test_a_captured_graph_sees_new_values(device, rng, kernel):
    """In both directions, with x in place too."""
    import cupy

    made = Coordinates(rng, (300, 40), rng.integers(0, 90, 300), is_sorted=True)
    A, x, u = made.put(device), cupy.empty(40, "float32"), cupy.empty(300, "float32")
    y, g = cupy.empty(300, "float32"), cupy.empty(40, "float32")
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        A.matvec(x, out=y), A.rmatvec(u, out=g)
        stream.begin_capture()
        A.matvec(x, out=y), A.rmatvec(u, out=g)
        graph = stream.end_capture()
        for _ in range(2):
            made.data = integers(rng, made.data.size, "float32")
            of_x, of_u = integers(rng, 40, "float32"), integers(rng, 300, "float32")
            A.update_values(device.put(made.data))
            x.set(of_x), u.set(of_u)
            graph.launch()
            stream.synchronize()
            same(device, y, made.dense() @ of_x)
            same(device, g, made.dense().T @ of_u)


PACKED = {
    "one block": Choice("packed", 2, 64, 60),
    "blocks": Choice("packed", 1, 64, 12),
    "near": Choice("packed", 1, 64),
    "as they are": Choice("packed", 4, 64, is_sorted=False),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in PACKED),
        *zip(PACKED, ("float64", "complex64", "complex64", "complex128"), strict=True),
    ],
)
def test_packed(device, rng, monkeypatch, name, dtype):
    """Every type and wider vectors, new values, factors of zero; the adjoint of complex values."""
    monkeypatch.setattr(_sparse_store, "choose", lambda *found: PACKED[name])
    lengths = np.array([0, 3, 70, *([11] * 40), 0, 700, 2])
    made = Coordinates(rng, (lengths.size, 60), lengths, dtype, is_sorted=True)
    A = made.put(device, dual=False)
    for vector in (dtype, "float64", "complex128"):
        kind = np.result_type(dtype, vector)
        x, y = integers(rng, 60, vector), integers(rng, lengths.size, kind)
        want = 2 * (made.dense() @ x) - y
        out, partials = device.guarded((lengths.size,), kind), device.guarded((A._num_partials(False),), np.float64)
        out[...] = device.put(y)
        A._apply(False, device.put(x.astype(kind)), out, 2.0, -1.0, partials)
        same(device, out, want.astype(kind))
        assert device.get(partials).sum() == (abs(want) ** 2).sum().round()
    x = integers(rng, 60, dtype)
    same(device, A.H.T @ device.put(x), (made.dense().conj() @ x).astype(dtype))
    A.update_values(device.put(np.full(made.data.size, np.nan, dtype)))
    out = device.put(np.ones(lengths.size, dtype))
    same(device, A.matvec(device.put(np.full(60, np.nan, dtype)), 0, 3, out), np.full(lengths.size, 3.0, dtype))
    made.data = integers(rng, made.data.size, dtype)
    A.update_values(device.put(made.data))
    same(device, A @ device.put(x), (made.dense() @ x).astype(dtype))


@pytest.mark.parametrize("name", PACKED)
def test_what_is_not_there_does_not_touch_x(device, rng, monkeypatch, name):
    """Slices are filled up to their longest row: with inf and NaN in x, and in what lies behind it."""
    monkeypatch.setattr(_sparse_store, "choose", lambda *found: PACKED[name])
    lengths = rng.integers(0, 9, 300)
    made = Coordinates(rng, (300, 60), lengths, is_sorted=True)
    made.indices += made.indices == 11
    x = integers(rng, 60, "float32")
    x[11] = np.inf
    clean = np.where(np.isinf(x), 0, x)
    same(device, made.put(device, dual=False) @ device.put(x), made.dense() @ clean)


def test_x_too_wide_for_shared_memory(device, rng, monkeypatch):
    """The blocks that float32 is cut into fit no complex128: x comes through the L1."""
    monkeypatch.setattr(_sparse_store, "choose", lambda *found: Choice("packed", 1, 64, 30_000))
    made = Coordinates(rng, (40, 50_000), rng.integers(0, 40, 40), is_sorted=True)
    A = made.put(device, dual=False)
    x = integers(rng, 50_000, "complex128")
    same(
        device,
        A @ device.put(x),
        np.bincount(made.row, made.data * x.real[made.indices], 40)
        + 1j * np.bincount(made.row, made.data * x.imag[made.indices], 40),
    )


@pytest.mark.parametrize("spread", [2**16 - 2, 2**16 - 1])
def test_columns_too_far_apart_for_16_bits(device, rng, monkeypatch, spread):
    monkeypatch.setattr(_sparse_store, "choose", lambda *found: Choice("packed", 1, 64))
    data, indptr = np.array([1, 2, 3], np.float32), np.array([0, 1, 3])
    indices = np.array([5, 5 + spread, 70_000])
    A = SparseMatrix.from_csr(*map(device.put, (data, indices, indptr)), (2, 70_001), dual=False)
    assert A._store.products[False].packed.kind == ("near" if spread < 2**16 - 1 else "far")
    x = np.zeros(70_001, np.float32)
    x[indices] = 1, 10, 100
    same(device, A @ device.put(x), np.array([1.0, 320.0]))


@pytest.mark.parametrize("cols", [200, 70_001])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_long_rows_beside_many_short_ones(device, rng, monkeypatch, is_sorted, cols):
    """The profile bounds the size of the copy: one wait, at the end, and one more for columns far apart."""
    waits, wait = [], Answers.wait
    monkeypatch.setattr(Answers, "wait", lambda self, count: waits.append(count) or wait(self, count))
    monkeypatch.setattr(
        _sparse_store, "choose", lambda *found: waits.clear() or Choice("packed", 1, 33, 0, "", is_sorted)
    )
    lengths = np.full(3000, 12)
    lengths[[5, 1030, 1031, 2999]] = 1100, 1500, 34, 41
    made = Coordinates(rng, (3000, cols), lengths)
    A = made.put(device, dual=False)
    packed = A._store.products[False].packed
    is_far = cols > 200 and np.ptp(made.indices) >= 2**16
    assert waits == ([2, 2] if is_far else [2]) and packed.kind == ("far" if is_far else "near")
    assert packed.piece_count == packed.cut == 3 + 3 + 1 + 1
    for _ in range(2):
        x = integers(rng, cols, "float32")
        want = np.bincount(made.row, made.data.astype(float) * x[made.indices], 3000)
        same(device, A @ device.put(x), want)
        made.data = integers(rng, made.data.size, "float32")
        A.update_values(device.put(made.data))


@pytest.mark.parametrize(
    ("kernel", "width", "changes"),
    [
        ("packed", 0, {}),
        ("stream", 0, {"cv": 4.0, "max": 5000, "p99": 50}),
        ("stream", 0, {"mean": 500.0, "max": 700, "cv": 0.6, "scatter": 0.2}),
        ("rows", 0, {"max": 9, "nnz": 2**19}),
        ("packed", 28_000, {"mean": 850.0, "scatter": 0.99}),
        ("stream", 0, {"mean": 850.0, "scatter": 0.99, "rises": False}),
        ("stream", 0, {"mean": 850.0, "scatter": 0.3}),
        ("packed", 4000, {"mean": 850.0, "cols": 4000}),
        ("packed", 0, {"cv": 100.0, "max": 10**6}),
    ],
)
def test_rules(kernel, width, changes):
    usual = {"rows": 10**6, "cols": 10**5, "nnz": 10**7, "mean": 10.0, "p95": 11, "p99": 12, "max": 20, "cv": 0.1}
    found = Profile(**usual | {"empty": 0, "scatter": 0.7, "rises": True} | changes)
    choice = choose(found, Limits)
    assert (choice.kernel, choice.width) == (kernel, width)
    assert candidates(found, Limits())[0] == choice and len({str(c) for c in candidates(found, Limits())}) >= 3
    assert all(c.kernel != "packed" for c in candidates(found, Limits(may_pack=False)))


def test_profile_of_a_band(device):
    """Sorted rows near the diagonal, and jumps from one 32-byte sector of x to another."""
    col = np.concatenate([[i, i + 1, i + 9] for i in range(50)])
    arrays = np.ones(150, np.float32), col, np.arange(0, 151, 3)
    found = SparseMatrix.from_csr(*map(device.put, arrays), (50, 59)).profile
    assert (found.bandwidth, found.padding, found.rises) == (9, 1.28, True)
    assert found.scatter == (np.diff(col // 8) != 0).mean()
    assert (found.p95, found.cv) == (3, 0.0)


@pytest.mark.parametrize("long", [0, 1, 4, 60])
def test_percentiles_and_padding_beside_long_rows(device, rng, long):
    """Rows of 1023 entries and more are not in the histogram."""
    lengths = np.concatenate([rng.integers(0, 30, 60 - long), rng.integers(1022, 1400, long)])
    lengths[-1] = 1022
    made = Coordinates(rng, (60, 9), rng.permutation(lengths))
    found, lengths = made.put(device, dual=False).profile, np.diff(made.indptr)
    assert (found.p95, found.p99) == (np.sort(lengths)[57], np.sort(lengths)[59])
    short = np.where(lengths < 1023, lengths, 0)
    padded = 32 * sum(short[i : i + 32].max() for i in (0, 32))
    assert found.padding == (padded / short.sum())
    assert found.longer == tuple((lengths > limit).sum() for limit in (32, 64, 128, 256, 512, 1022))
    assert found.held == short.sum()


@pytest.mark.parametrize("longest", [1023, 1024, 66_000])
def test_percentiles_of_long_rows(device, rng, longest):
    """Most rows are not in the histogram: their lengths have up to three digits of eight bits, many are the same."""
    lengths = np.repeat([3, 1023, 1024, 1279, longest], [3, 30, 40, 26, 1])
    made = Coordinates(rng, (100, 9), rng.permutation(lengths))
    found, ordered = made.put(device, dual=False).profile, np.sort(np.diff(made.indptr))
    assert (found.p95, found.p99, found.max) == (ordered[95], ordered[99], ordered[-1])


def test_profiles_one_after_another(device, rng):
    """What a launch counts in is left as it was found, also by row pointers that are wrong."""
    mades = [Coordinates(rng, (rows, 9), rng.integers(0, 1100, rows)) for rows in (5, 70, 2)]
    profiles = [made.put(device, dual=False).profile for made in mades]
    wrong = np.array([0, 9000, 3, 9000, 1, 9000], np.int32)
    with pytest.raises(ValueError, match="with a fall"):
        SparseMatrix.from_csr(*map(device.put, (np.ones(9000, np.float32), np.zeros(9000, np.int32), wrong)), (5, 1))
    for made, found in zip(mades, profiles, strict=True):
        assert made.put(device, dual=False).profile == found
        assert (found.nnz, found.max) == (made.data.size, np.diff(made.indptr).max())


@pytest.mark.parametrize("cols", [1, 40, 70_000])
def test_second_format(device, rng, cols):
    """A stable sort by column, in one to three passes: unsorted rows, duplicates, empty rows, ragged tiles."""
    lengths = rng.integers(0, 60, 290)
    lengths[100:110] = 0
    made = Coordinates(rng, (290, cols), lengths)
    made.data = rng.standard_normal(made.data.size).astype(np.float32)
    columns = made.put(device)._store.rows[True]
    order = np.argsort(made.indices, kind="stable")
    same(device, columns.data, made.data[order])
    same(device, columns.indices, made.row[order])
    same(device, columns.indptr, np.searchsorted(made.indices[order], np.arange(cols + 1)))


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
    product = ByStream(A._store.device, A._store.values, Choice("stream", 1, longest), A.profile)
    kinds = [("entry", "i8"), ("row", "i4"), ("rows", "u2"), ("entries", "u2")]
    tiles = device.get(product.tiles).view(np.dtype(kinds)).ravel()
    kinds = [("begin", "i8"), ("stop", "i8"), ("row", "i4"), ("first", "i4"), ("count", "i4"), ("unused", "i4")]
    segments = device.get(product.segments).view(np.dtype(kinds)).ravel()
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    rows_of_tiles = np.concatenate([t["row"] + np.arange(t["rows"]) for t in tiles] or [[]]).astype(int)
    assert sorted([*rows_of_tiles, *np.unique(segments["row"])]) == list(range(lengths.size))
    assert (lengths[rows_of_tiles] <= longest).all() and (lengths[segments["row"]] > longest).all()
    for entry, row, count, entries in tiles.tolist():
        if not count:
            assert not entries
            continue
        assert entry == indptr[row] & ~3 and entry + entries == indptr[row + count]
        assert entries <= TILE and count <= 4 * TILE
    for i, (begin, stop, row, first, count, _) in enumerate(segments.tolist()):
        assert first <= i < first + count and count == -(-lengths[row] // SEGMENT)
        assert begin == indptr[row] + (i - first) * SEGMENT and stop == min(begin + SEGMENT, indptr[row + 1])
    assert (segments["stop"] - segments["begin"]).sum() == lengths[lengths > longest].sum()


def test_what_an_error_leaves_half_done_keeps_its_memory(device):
    answers = Answers(devices.emulated() or devices.cuda(0))
    with pytest.raises(MemoryError), answers:
        before, counts = answers.address(3), answers.zeros(3)
        numbers = weakref.ref(answers._numbers)
        raise MemoryError
    with answers:
        assert numbers() is not None  # a kernel may still write there
        assert before != answers.address(3) and counts != answers.zeros(3)
