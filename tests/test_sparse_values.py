"""SparseMatrix: other values, second formats, the profile and what is chosen by it, tuning."""

import ml_dtypes
import numpy as np
import pytest
from coordinates import Coordinates, integers, same

import rawops
from rawops import SparseMatrix, _sparse_formats, _sparse_store
from rawops._sparse_spmv import ByRows

NAN = float("nan")


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_update_values(device, rng, form):
    made = Coordinates(rng, (14, 9), 6)
    A = made.put(device, form)
    for _ in range(2):
        made.data = integers(rng, made.data.size, "float32")
        given = made.data[np.argsort(made.indices, kind="stable")] if form == "csc" else made.data
        A.update_values(device.put(given))
        x, u = integers(rng, 9, "float32"), integers(rng, 14, "float32")
        same(device, A @ device.put(x), made.dense() @ x)
        same(device, A.T @ device.put(u), made.dense().T @ u)


@pytest.mark.parametrize(("step", "good"), [("column_order", 0), ("gather", 0), ("gather", 1)])
def test_update_values_that_fails_changes_neither_direction(device, rng, monkeypatch, step, good):
    """The order by column, which the first call makes, or the values in it may not fit into memory."""
    made = Coordinates(rng, (14, 9), 6)
    A = made.put(device, "coo")
    real, calls = getattr(_sparse_formats, step), []

    def fail(*arguments):
        calls.append(1)
        if len(calls) > good:
            raise MemoryError
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(_sparse_formats, step, fail)
        with pytest.raises(MemoryError):
            A.update_values(device.put(2 * made.data))
    x, u = integers(rng, 9, "float32"), integers(rng, 14, "float32")
    same(device, A @ device.put(x), made.dense() @ x)
    same(device, A.T @ device.put(u), made.dense().T @ u)


@pytest.mark.parametrize("form", ["csr", "csc"])
def test_update_values_of_arrays_with_a_tail(device, rng, form):
    """Entries past the last row, which constructors take and do not read, are among those given."""
    made = Coordinates(rng, (14, 9), 6)
    made.data, made.indices = np.append(made.data, NAN), np.append(made.indices, 99)
    make, shape = (SparseMatrix.from_csr, (14, 9)) if form == "csr" else (SparseMatrix.from_csc, (9, 14))
    A = make(*map(device.put, (made.data, made.indices, made.indptr)), shape)
    A.update_values(device.put(2 * made.data))
    x = integers(rng, 9, "float32")
    made.data, made.indices = made.data[:-1], made.indices[:-1]
    same(device, A @ device.put(x) if form == "csr" else A.T @ device.put(x), 2 * made.dense() @ x)


def test_to_and_from_scipy(device, rng):
    sparse = pytest.importorskip("scipy.sparse")
    made = Coordinates(rng, (12, 8), 3, "complex64")
    matrix = sparse.csr_array((made.data, made.indices, made.indptr), shape=made.shape)
    for kind in ("csr", "csc", "coo", "lil"):
        A = SparseMatrix.from_scipy(matrix.copy().asformat(kind))
        for view, want in ((A, made.dense()), (A.T, made.dense().T), (A.H, made.dense().conj().T)):
            back = view.to_scipy()
            assert back.shape == want.shape
            np.testing.assert_array_equal(back.toarray(), want.astype(np.complex64))
    with pytest.raises(TypeError, match=r"^SparseMatrix\.from_scipy: shape must be \(rows, columns\), got \(3,\)"):
        SparseMatrix.from_scipy(sparse.coo_array(np.ones(3)))
    for dtype in ("float16", ml_dtypes.bfloat16):
        made = Coordinates(rng, (12, 8), 3, dtype)
        back = made.put(device).to_scipy()
        assert back.dtype == np.float32
        np.testing.assert_array_equal(back.toarray(), made.dense())


def test_from_cupy_takes_what_is_on_the_device(device, rng):
    """In the emulator that is SciPy's; outside, SciPy's is refused by name, not by the first of its arrays."""
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.csr_array(np.eye(3, dtype=np.float32))
    if device.is_emulated:
        same(device, SparseMatrix.from_cupy(matrix) @ np.arange(3, dtype=np.float32), np.arange(3.0))
    else:
        with pytest.raises(TypeError, match=r"from_cupy: matrix must be on the GPU, got SciPy's .*from_scipy"):
            SparseMatrix.from_cupy(matrix)


def test_profile_and_plan(device):
    lengths = np.concatenate([np.zeros(10, int), np.full(80, 2), np.full(9, 7), [30]])
    made = Coordinates(np.random.default_rng(2), (100, 40), lengths)
    A = made.put(device)
    found = A.profile
    assert (found.rows, found.cols, found.nnz, found.empty, found.max) == (100, 40, 253, 10, 30)
    assert (found.p95, found.p99) == (7, 30)
    assert found.mean == 2.53 and abs(found.cv - lengths.std() / 2.53) < 1e-12
    assert found.padding == 32 * sum(lengths[i : i + 32].max() for i in range(0, 100, 32)) / 253
    assert not found.rises and A.T.profile.rises
    columns = np.bincount(made.indices, minlength=40)
    one = made.put(device, dual=False)
    for transposed in (A.T.profile, one.T.profile):
        assert (transposed.rows, transposed.max, transposed.empty) == (40, columns.max(), (columns == 0).sum())
    assert one.T.profile.bandwidth == one.profile.bandwidth == A.profile.bandwidth
    assert A.plan.dual and not one.plan.dual and one.plan.rmatvec.kernel == "scatter"
    formats = 253 * 8 + 101 * 4, 253 * 8 + 41 * 4
    tiles = 16  # one tile of A; the columns need none
    assert one.plan.nbytes == formats[0] + tiles and A.plan.nbytes == sum(formats) + tiles
    assert (A.plan.matvec.kernel, A.plan.rmatvec.kernel) == ("stream", "rows")
    one.rmatvec(device.put(np.ones(100, np.float32)))
    assert one.plan.nbytes == formats[0] + tiles + 40 * 4  # the workspace of the first product
    assert A.T.plan.matvec == A.plan.rmatvec
    assert "stream, dealt, " in str(A.plan) and "under 2^20 entries" in str(A.plan) and "scatter" in str(one.plan)


def test_auto_keeps_one_format_where_memory_is_short(device, rng, monkeypatch):
    made = Coordinates(rng, (12, 8), 3)
    assert made.put(device, dual="auto").plan.dual
    monkeypatch.setattr(_sparse_store, "_free_bytes", lambda device: 1000)
    assert not made.put(device, dual="auto").plan.dual


def test_tuning_keeps_the_fastest(device, rng, monkeypatch):
    made = Coordinates(rng, (40, 25), 4)
    A, x = made.put(device), integers(rng, 25, "float32")
    if device.is_emulated:
        with pytest.raises(rawops.UnsupportedError, match=r"SparseMatrix\.tune: needs a GPU, found emulated"):
            A.tune()

    def slow_but_for_rows(device, call):
        call()
        return 0.5 if isinstance(call.func.__self__, ByRows) else 2.0

    monkeypatch.setattr(_sparse_store, "_elapsed", slow_but_for_rows)
    plan = A.tune()
    for choice in (plan.matvec, plan.rmatvec):
        assert choice.kernel == "rows" and "fastest of" in choice.why and "0.5 ms" in choice.why
    same(device, A @ device.put(x), made.dense() @ x)


def test_tuning_that_fails_leaves_the_kernels_as_they_were(device, rng, monkeypatch):
    A = Coordinates(rng, (40, 25), 4).put(device)
    plan, products, timed = A.plan, dict(A._store.products), []

    def short_of_memory(device, call):
        timed.append(call)
        if len(timed) == 2:
            raise MemoryError
        return 1.0

    monkeypatch.setattr(_sparse_store, "_elapsed", short_of_memory)
    with pytest.raises(MemoryError):
        A.tune()
    assert A.plan == plan and A._store.products == products
