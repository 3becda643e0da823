"""LSMR with several right-hand sides, preconditioners and rows in several processes; its status; real systems."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from lsmr_systems import assert_same, counted, put_all, system, unchecked
from scipy import sparse
from scipy.sparse.linalg import lsmr as scipy_lsmr

import rawops
from rawops import _lsmr_engine
from rawops._lsmr_engine import Engine, Settings
from rawops._lsmr_status import Status
from rawops.testing import has_gpu


@pytest.fixture
def device(device):
    yield from unchecked(device)


# --- several right-hand sides ---------------------------------------------------------------------------------------


def right_hand_sides(rng, a, columns):
    """Columns that stop at different iterations, two of them at once."""
    b = rng.standard_normal((a.shape[0], columns))
    b[:, 0] = a @ np.ones(a.shape[1])
    b[:, 1] = 0
    b[:, 2] = np.linalg.svd(a)[0][:, 0]
    return b


@pytest.mark.parametrize(
    ("kind", "patience"), [("dense", 0), ("dense", 1), ("sparse", 0), ("sparse", 9), ("operator", 0), ("operator", 9)]
)
def test_solve_many(device, rng, monkeypatch, kind, patience):
    """Columns that have stopped are dropped, at once or later or never: their results are those of single solves."""
    monkeypatch.setattr(_lsmr_engine, "_PATIENCE", patience)
    narrowed, narrow = [], Engine.narrow
    monkeypatch.setattr(Engine, "narrow", lambda self, kept: narrowed.append(kept) or narrow(self, kept))
    a, _ = system(rng, 24, 8, (1, 2, 3, 4))
    b, x0 = right_hand_sides(rng, a, 5), rng.standard_normal((8, 5))
    b[:, 4] = 0
    matrix = {
        "dense": lambda: device.put(a),
        "sparse": lambda: rawops.SparseMatrix.from_scipy(sparse.csr_array(a)),
        "operator": lambda: counted(device.put(a))[0],
    }[kind]()
    for options in ({"X0": device.put(x0)}, {}):
        solver = rawops.LSMR(matrix, damp=0.01)
        ours = solver.solve_many(device.put(b), history=True, **options)
        (engine,) = solver._engines.values()
        if device.is_emulated:  # on a GPU all columns stop within a chunk
            assert bool(narrowed) == (patience < 9) or options
        assert narrowed or device.get(engine._gate)[:2].tolist() == [0, 1]
        for j in range(5):
            expected = scipy_lsmr(a, b[:, j], damp=0.01, x0=x0[:, j] if options else None)
            column = [device.get(ours.x)[:, j], *(value[j] for value in ours[1:])]
            assert_same(device, rawops.LSMRResult(*column), expected)
            seen = ours.history["normr"][:, j]
            assert np.isnan(seen[expected[2] :]).all()
            assert (seen[: expected[2]][-1:] == ours.normr[j]).all()
            assert ours.status[j].converged


def test_solve_many_complex_and_one_column(device, rng):
    a, _ = system(rng, 12, 5, dtype="complex128")
    b = rng.standard_normal((12, 3)) + 1j
    for columns in (b, b[:, :1]):
        ours = rawops.LSMR(device.put(a)).solve_many(device.put(np.asfortranarray(columns)))
        np.testing.assert_allclose(device.get(ours.x), np.linalg.lstsq(a, columns)[0], rtol=1e-8)
        assert ours.x.shape == (5, columns.shape[1])


def test_solve_many_of_no_columns(device):
    solver = rawops.LSMR(device.put(np.ones((4, 3), np.float32)))
    ours = solver.solve_many(device.put(np.ones((4, 0), np.float32)), history=True)
    assert (ours.x.shape, str(ours.x.dtype)) == ((3, 0), "float32")
    assert [value.shape for value in ours[1:]] == [(0,)] * 7
    assert (ours.status, ours.history["normr"].shape) == ([], (0, 0))


@pytest.mark.parametrize("shape", [(4, 0), (0, 3), (0, 0)])
def test_solve_many_of_an_empty_matrix(device, shape):
    ours = rawops.LSMR(device.put(np.ones(shape))).solve_many(device.put(np.ones((shape[0], 2))))
    assert ours.x.shape == (shape[1], 2) and (device.get(ours.x) == 0).all()
    assert ours.istop.tolist() == ours.itn.tolist() == [0, 0]
    np.testing.assert_allclose(ours.normr, [shape[0] ** 0.5] * 2)


def test_solve_many_mistakes(device):
    solver = rawops.LSMR(device.put(np.ones((4, 3))))
    for options, message in (
        ({"B": np.ones(4)}, r"B must have shape \(4, any\), got shape \(4,\)"),
        ({"B": np.ones((3, 2))}, r"B must have shape \(4, 2\), got shape \(3, 2\)"),
        ({"B": np.ones((4, 2)), "X0": np.ones((3, 3))}, r"X0 must have shape \(3, 2\), got shape \(3, 3\)"),
        ({"B": np.ones((4, 65536))}, "B must have at most 65535 columns, got 65536. Solve in pieces"),
    ):
        with pytest.raises(ValueError, match=f"^LSMR: {message}"):
            solver.solve_many(**put_all(device, **options))
    solver = rawops.LSMR(device.put(np.ones((4, 3))), reorthogonalize=2)
    with pytest.raises(ValueError, match="reorthogonalize must be None for solve_many, got 2"):
        solver.solve_many(device.put(np.ones((4, 2))))


# --- preconditioners and reorthogonalisation ------------------------------------------------------------------------


class Diagonal:
    """N = diag(d), with a phase that tells solve from its adjoint."""

    def __init__(self, device, d) -> None:
        self.d = device.put(d)

    def solve(self, y):
        return y / self.d

    def rsolve(self, z):
        return z / self.d.conj()


@pytest.mark.parametrize("kind", ["dense", "sparse", "sparse view", "one format"])
def test_column_scaling(device, rng, kind):
    """Columns of orthogonal matrices times anything are orthonormal again, which takes one step."""
    q, b = system(rng, 20, 6, (1.0,))
    a = q * np.array([1e-3, 1, 1e3, 1, 7, 0])
    scipy_matrix = sparse.csr_array(a)
    matrix = {
        "dense": lambda: device.put(a),
        "sparse": lambda: rawops.SparseMatrix.from_scipy(scipy_matrix),
        "sparse view": lambda: rawops.SparseMatrix.from_scipy(scipy_matrix.T).T,
        "one format": lambda: rawops.SparseMatrix.from_scipy(scipy_matrix, dual=False),
    }[kind]()
    x0 = rng.standard_normal(6) * [1, 1, 1e-3, 1, 1, 0]
    for start in (None, device.put(x0)):
        ours = rawops.lsmr(matrix, device.put(b), x0=start, preconditioner="column", atol=1e-12, btol=1e-12)
        assert ours.itn <= 2
        np.testing.assert_allclose(device.get(ours.x), np.linalg.pinv(a) @ b, rtol=1e-8, atol=1e-12)
        assert ours.status.converged
        assert ours.status.normr == pytest.approx(ours.normr)


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex128"])
@pytest.mark.parametrize("dual", [True, False])
def test_column_scaling_of_duplicates(device, dtype, dual):
    """Entries of one place count as their sum, past 65504 on the way to it, and not as the root of their squares."""
    data = np.array([1, 1, 3, 40000, 40000, -65504]).astype(dtype) * (1j if dtype == "complex128" else 1)
    given = data.astype(dtype), np.array([0, 0, 1, 2, 2, 2]), np.array([0, 2, 3, 6])
    A = rawops.SparseMatrix.from_csr(*map(device.put, given), (3, 3), dual=dual)
    b = device.put(np.array([1, 2, 3], np.float32))
    for matrix in (A, A.T, A.H):
        ours = rawops.lsmr(matrix, b, preconditioner="column")
        assert ours.itn == 1 and ours.norma == pytest.approx(1) and ours.conda == pytest.approx(1)


@pytest.mark.parametrize("columns", [1, 3])
def test_column_scaling_reads_no_matrix_after_the_stop(device, rng, columns):
    a, _ = system(rng, 20, 6, (1, 2, 3))
    A = rawops.SparseMatrix.from_scipy(sparse.csr_array(a))
    solver = rawops.LSMR(A, preconditioner="column")
    ours = solver.solve_many(device.put(rng.standard_normal((20, columns))))
    x = device.get(ours.x).copy()
    (engine,) = solver._engines.values()
    A.update_values(device.put(np.full(A.nnz, np.nan)))
    engine._iterate()
    assert (device.get(engine.solution(None)).reshape(6, -1) == x).all() and np.isfinite(device.get(engine.v)).all()


@pytest.mark.parametrize("columns", [1, 3])
def test_b_of_zero_with_x0_and_a_preconditioner(device, rng, columns):
    """0 as without one, and not x0, which solves nothing; other columns keep theirs."""
    a, b = system(rng, 20, 6)
    B, X0 = np.stack([0 * b, b, b], 1)[:, :columns], rng.standard_normal((6, columns))
    solver = rawops.LSMR(device.put(a), damp=0.5, preconditioner="column")
    ours = solver.solve_many(device.put(B), device.put(X0))
    assert (device.get(ours.x)[:, 0] == 0).all() and ours.istop[0] == 0 and ours.status[0].normr == 0
    for i in range(columns):
        alone = solver.solve(device.put(B[:, i].copy()), device.put(X0[:, i].copy()))
        np.testing.assert_allclose(device.get(ours.x)[:, i], device.get(alone.x), rtol=1e-6, atol=1e-9)


def test_preconditioner_object(device, rng):
    d = np.exp(1j * np.arange(6)) * 10.0 ** np.arange(-3, 3)
    q, b = system(rng, 20, 6, (1.0, 2.0), dtype="complex128")
    ours = rawops.lsmr(
        device.put(q * d), device.put(b), preconditioner=Diagonal(device, d), damp=0.1, atol=1e-12, btol=1e-12
    )
    y = np.linalg.lstsq(np.vstack([q, 0.1 * np.eye(6)]), np.concatenate([b, np.zeros(6)]))[0]
    np.testing.assert_allclose(device.get(ours.x), y / d, rtol=1e-8)
    assert ours.normx == pytest.approx(np.linalg.norm(y))
    assert ours.itn <= 3


@pytest.mark.parametrize(
    ("preconditioner", "error", "message"),
    [
        ("row", ValueError, "preconditioner must be 'column' or have solve and rsolve, got 'row'"),
        (3, TypeError, "preconditioner must be 'column' or have solve and rsolve, got int"),
    ],
)
def test_preconditioner_mistakes(device, preconditioner, error, message):
    with pytest.raises(error, match=message):
        rawops.lsmr(device.put(np.eye(3)), device.put(np.ones(3)), preconditioner=preconditioner)
    with pytest.raises(error, match=message):
        rawops.LSMR(device.put(np.ones((0, 3))), preconditioner=preconditioner)
    operator, _ = counted(device.put(np.eye(3)))
    with pytest.raises(ValueError, match="not be 'column' for an operator"):
        rawops.lsmr(operator, device.put(np.ones(3)), preconditioner="column")


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_reorthogonalisation(device, rng, dtype):
    """Condition 4e6: v loses its orthogonality, and with it the solution, unless it is restored."""
    a = np.vander(np.linspace(0, 1, 20), 10).astype(dtype)
    _, b = system(rng, 20, 10, dtype=dtype)
    options = {"maxiter": 10, "atol": 0, "btol": 0, "conlim": 0}
    errors = {}
    for kept in (None, "full"):
        ours = rawops.lsmr(device.put(a), device.put(b), reorthogonalize=kept, **options)
        expected = np.linalg.lstsq(a, b)[0]
        errors[kept] = np.linalg.norm(device.get(ours.x) - expected) / np.linalg.norm(expected)
    assert errors["full"] < 1e-5 < 1e-3 < errors[None]
    assert ours.conda == pytest.approx(np.linalg.cond(a), rel=0.5)


def test_reorthogonalisation_in_a_ring(device, rng):
    """Against fewer vectors than there are iterations: the same solution of a system that needs none of it."""
    a, b = system(rng, 30, 10, np.linspace(1, 9, 5))
    for kept in (1, 3):
        ours = rawops.lsmr(device.put(a), device.put(b), reorthogonalize=kept)
        assert_same(device, ours, scipy_lsmr(a, b))


@pytest.mark.parametrize("kept", ["some", 0, -1, 1.5])
def test_reorthogonalisation_mistakes(device, kept):
    rule = "'full' or a number, got 'some'" if kept == "some" else ""
    with pytest.raises((TypeError, ValueError), match=f"^lsmr: reorthogonalize must be {rule}"):
        rawops.lsmr(device.put(np.eye(3)), device.put(np.ones(3)), reorthogonalize=kept)


# --- several processes ----------------------------------------------------------------------------------------------


class Threads:
    """A communicator over threads that stand in for processes."""

    def __init__(self, count: int) -> None:
        self.arrays, self._barrier = [None] * count, threading.Barrier(count, timeout=60)

    def of(self, rank: int):
        def all_reduce(source, target) -> None:
            self.arrays[rank] = source.copy()
            self._barrier.wait()
            total = sum(self.arrays)
            self._barrier.wait()
            target[...] = total

        return SimpleNamespace(all_reduce=all_reduce)


@pytest.mark.skipif(has_gpu(), reason="threads stand in for processes in the emulator alone")
@pytest.mark.parametrize("options", [{"damp": 0.3, "x0": True}, {"preconditioner": "column"}], ids=str)
def test_rows_in_blocks(rng, options):
    """Three processes, one without rows: everywhere the answer of the whole system."""
    a, b = system(rng, 30, 6, (1, 2))
    options = {**options, "x0": np.ones(6)} if "x0" in options else options
    bounds, everyone, results = [0, 13, 13, 30], Threads(3), [None] * 3

    def solve(rank: int) -> None:
        part = slice(*bounds[rank : rank + 2])
        with rawops.emulate(check=False):
            operator = rawops.DistributedOperator(a[part], everyone.of(rank))
            results[rank] = rawops.lsmr(operator, b[part], **options)

    workers = [threading.Thread(target=solve, args=(rank,)) for rank in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    with rawops.emulate(check=False):
        expected = rawops.lsmr(a, b, **options)
    for ours in results:
        assert (ours.istop, ours.itn) == (expected.istop, expected.itn)
        np.testing.assert_allclose(ours.x, expected.x, rtol=1e-8)
        np.testing.assert_allclose(ours[3:], expected[3:], rtol=1e-8, atol=1e-12)
        assert ours.status.normr == pytest.approx(expected.status.normr)
        assert (ours.x == results[0].x).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_one_process_with_nccl(device, rng, dtype):
    nccl = pytest.importorskip("cupy.cuda.nccl")
    if not nccl.available:
        pytest.skip("CuPy has no NCCL here")
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    a, b = system(rng, 30, 6, dtype=dtype)
    operator = rawops.DistributedOperator(device.put(a), communicator)
    ours, alone = (rawops.lsmr(x, device.put(b)) for x in (operator, device.put(a)))
    assert ours[1:3] == alone[1:3]
    np.testing.assert_allclose(device.get(ours.x), device.get(alone.x), rtol=1e-4)


def test_distributed_mistakes(device):
    with pytest.raises(TypeError, match=r"communicator must have all_reduce or be an NcclCommunicator, got int"):
        rawops.DistributedOperator(device.put(np.eye(3)), 3)
    alone = SimpleNamespace(all_reduce=lambda source, target: None)
    with pytest.raises(TypeError, match="DistributedOperator: A must be a matrix or an operator, got list"):
        rawops.DistributedOperator([[1.0]], alone)
    operator = rawops.LinearOperator((3, 3), lambda x: x, lambda x: x, "float64")
    with pytest.raises(ValueError, match="preconditioner must not be 'column' for an operator"):
        rawops.lsmr(rawops.DistributedOperator(operator, alone), device.put(np.ones(3)), preconditioner="column")


# --- the status -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("damp", "starts"), [(0.0, False), (0.7, False), (0.7, True)])
def test_status_holds_the_true_norms(device, rng, damp, starts):
    a, b = system(rng, 30, 8, np.linspace(1, 9, 8))
    x0 = rng.standard_normal(8) if starts else np.zeros(8)
    ours = rawops.lsmr(device.put(a), device.put(b), damp, maxiter=3, x0=device.put(x0) if starts else None)
    x = device.get(ours.x)
    r = b - a @ x
    assert ours.status.normr == pytest.approx(np.hypot(np.linalg.norm(r), damp * np.linalg.norm(x - x0)))
    assert ours.status.normar == pytest.approx(np.linalg.norm(a.T @ r - damp**2 * (x - x0)))
    assert ours.status.message == "maxiter reached"
    assert not ours.status.converged


@pytest.mark.parametrize(("dtype", "damp"), [("float32", 1e30), ("float64", 1e200)])
def test_status_with_a_damp_whose_square_overflows(device, dtype, damp):
    ours = rawops.lsmr(device.put(np.eye(3, dtype=dtype)), device.put(np.ones(3, dtype)), damp)
    assert not device.get(ours.x).any()  # 1e-60 and 1e-400: too small for it
    assert (ours.istop, ours.status.normr, ours.status.normar) == pytest.approx((2, 3**0.5, 3**0.5))


@pytest.mark.parametrize(
    ("istop", "residual", "gradient", "is_false"),
    [
        (1, 1e-5, 1.0, False),
        (1, 1e-4, 9e-7, False),
        (1, 1e-4, 2e-6, True),
        (1, np.nan, np.nan, True),
        (2, 0.5, 4e-6, False),
        (2, 0.5, 1e-3, True),
        (7, 1.0, 1.0, False),
    ],
)
def test_status_tells_false_convergence(istop, residual, gradient, is_false):
    report = {"norma": 10.0, "normx": 0.1, "normb": 1.0, "normar": 1e-7, "maxrbar": 5.0}
    squares = np.array([residual**2, gradient**2, 0])
    status = Status(istop, report, squares, Settings(0.0, 1e-6, 1e-6, 0.0, 100))
    assert (status.normr, status.normar) == pytest.approx((residual, gradient), nan_ok=True)
    assert status.is_false == is_false
    assert status.converged == (istop != 7 and not is_false)
    assert ("False convergence" in str(status)) == is_false


# --- the real systems -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_systems():
    import gzip
    import io
    from pathlib import Path

    from scipy.io import mmread

    found = {}
    for name in ("well1033", "illc1033"):
        files = (Path(__file__).parent / "data" / f"{name}{part}.mtx.gz" for part in ("", "_rhs1"))
        matrix, rhs = (mmread(io.BytesIO(gzip.decompress(file.read_bytes())), spmatrix=False) for file in files)
        found[name] = matrix.toarray(), np.asarray(rhs).ravel()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["well1033", "illc1033"])
@pytest.mark.parametrize("tolerance", [1e-6, 1e-12])
def test_well1033_and_illc1033(device, real_systems, name, tolerance):
    a, b = real_systems[name]
    conlim = 1e8 if tolerance == 1e-6 else 1e12
    options = {"atol": tolerance, "btol": tolerance, "conlim": conlim, "maxiter": 10000}
    expected = scipy_lsmr(a, b, **options)
    ours = rawops.lsmr(device.put(a), device.put(b), **options)
    assert ours.istop == expected[1] == 2
    assert ours.itn == pytest.approx(expected[2], rel=0.03)
    assert ours.normr == pytest.approx(expected[3], rel=2e-3)
    assert ours.status.converged
    if (name, tolerance) != ("illc1033", 1e-6):  # which stops far from the solution
        assert ours.normr == pytest.approx(0.7521579, rel=1e-6)


@pytest.mark.gpu
def test_full_reorthogonalisation_of_illc1033(device, real_systems):
    a, b = (device.put(x) for x in real_systems["illc1033"])
    ours = rawops.lsmr(a, b, reorthogonalize="full", maxiter=1000)
    assert ours.istop == 2
    assert 250 < ours.itn < 275


@pytest.mark.gpu
def test_false_convergence_in_float32_is_reported(device, real_systems):
    a, b = (device.put(x.astype(np.float32)) for x in real_systems["illc1033"])
    ours = rawops.lsmr(a, b, maxiter=10000)
    assert ours.status.normr == pytest.approx(0.79, rel=0.1)
    assert ours.status.is_false  # with istop 1: the residual seems to be within atol ||A|| ||x||
    assert not ours.status.converged
    mixed = rawops.lsmr(a, b, maxiter=10000, vectors="float64")
    assert mixed.istop == 2
    assert mixed.status.converged


@pytest.mark.gpu
def test_convergence_is_drawn_from_the_command_line(device, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    from rawops.__main__ import main

    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    picture = tmp_path / "convergence.png"
    with pytest.raises(SystemExit) as end:
        main(["bench", "lsmr", "--plot", str(picture)])
    assert end.value.code == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
