"""LSMR from iteration to iteration: what a solver keeps, graphs, history and progress, callbacks, interruptions."""

import contextlib
import re

import numpy as np
import pytest
from lsmr_systems import NORMS, assert_same, scattered, system, unchecked
from scipy import sparse
from scipy.sparse.linalg import lsmr as scipy_lsmr

import rawops
from rawops import _lsmr_small, _sparse_store
from rawops._lsmr_engine import Engine, _Reader
from rawops._sparse_stream import ByStream
from rawops.testing import has_gpu


@pytest.fixture
def device(device):
    yield from unchecked(device)


@pytest.mark.parametrize("chunk", [2, 5])
@pytest.mark.parametrize("maxiter", [3, 50])
def test_iterations_past_the_stop_change_nothing(device, rng, monkeypatch, chunk, maxiter):
    """The same bits with a look at the state after every iteration and after several."""
    a, b = system(rng, 20, 6, (1, 2, 3, 4))
    results = []
    for size in (1, chunk):
        monkeypatch.setattr(Engine, "_chunk", lambda self, size=size: size)
        results.append(rawops.lsmr(device.put(a), device.put(b), maxiter=maxiter, history=True))
    first, second = results
    assert first[1:] == second[1:]
    assert (device.get(first.x) == device.get(second.x)).all()
    for name in NORMS:
        assert (first.history[name] == second.history[name]).all()


def test_history_and_callback(device, rng):
    a, b = system(rng, 20, 6, (1, 2, 3, 4))
    seen = []
    ours = rawops.lsmr(device.put(a), device.put(b), history=True, callback=seen.append)
    assert [iteration.itn for iteration in seen] == list(range(1, ours.itn + 1))
    for name in NORMS:
        assert ours.history[name].tolist() == [getattr(iteration, name) for iteration in seen]
        assert ours.history[name][-1] == getattr(ours, name)
    for itn in (1, 2):
        _, _, _, *norms = scipy_lsmr(a, b, maxiter=itn)
        np.testing.assert_allclose([ours.history[name][itn - 1] for name in NORMS], norms, rtol=1e-8)


def test_solver_is_used_again(device, rng):
    a, b = system(rng, 20, 6)
    solver = rawops.LSMR(device.put(a), damp=0.3)
    first = solver.solve(device.put(b))
    kept = device.get(first.x).copy()
    other = solver.solve(device.put(b + 1), device.put(np.ones(6)))
    assert_same(device, other, scipy_lsmr(a, b + 1, damp=0.3, x0=np.ones(6)))
    assert (device.get(first.x) == kept).all()
    again = solver.solve(device.put(b))
    assert again[1:] == first[1:]
    assert (device.get(again.x) == kept).all()


def test_solver_whose_matrix_is_tuned_takes_the_new_kernels(device, rng, monkeypatch):
    """They leave fewer partial sums, and a graph would read memory of the old ones that is gone."""
    monkeypatch.setattr(_lsmr_small, "_MOST_BYTES", 0)
    a = sparse.coo_array((rng.standard_normal(1800), np.divmod(np.arange(1800) * 5 % 7200, 24)), (300, 24)).tocsr()
    b = rng.standard_normal(300)
    A = rawops.SparseMatrix.from_scipy(a)
    solver = rawops.LSMR(A, maxiter=2)
    expected = scipy_lsmr(a, b, maxiter=2)
    assert_same(device, solver.solve(device.put(b)), expected)
    count = A._num_partials(False)
    monkeypatch.setattr(_sparse_store, "_elapsed", lambda device, call: 2.0 - isinstance(call.func.__self__, ByStream))
    assert A.tune().matvec.kernel == "stream" and A._num_partials(False) < count
    assert_same(device, solver.solve(device.put(b)), expected)


@pytest.mark.parametrize("first", ["other values", "infinity"])
def test_column_norms_are_those_of_the_values_now(device, rng, first):
    """A solver whose matrix was given other values solves as a new one does: by three iterations, before any stop."""
    a = sparse.csr_array(rng.standard_normal((40, 12)))
    b, values = device.put(rng.standard_normal(40)), a.data * np.resize(10.0 ** np.arange(-4, 4), a.nnz)
    A = rawops.SparseMatrix.from_scipy(a)
    if first == "infinity":
        A.update_values(device.put(np.where(np.arange(a.nnz) == 7, np.inf, a.data)))
    solver = rawops.LSMR(A, preconditioner="column", maxiter=3)
    solver.solve(b)
    A.T.update_values(device.put(values))
    for solve in (lambda s: s.solve(b), lambda s: s.solve_many(device.xp.stack([b, 2 * b], 1))):
        got, want = solve(solver), solve(rawops.LSMR(A, preconditioner="column", maxiter=3))
        np.testing.assert_array_equal(device.get(got.x), device.get(want.x))
        np.testing.assert_array_equal(got.itn, want.itn)
        assert np.isfinite(device.get(got.x)).all()


def test_column_norms_of_a_dense_array_stay_those_of_the_start(device, rng):
    """The array changed in place is solved as it is, with the scaling that the solver was made with."""
    a, b = rng.standard_normal((12, 4)), rng.standard_normal(12)
    A = device.put(a)
    solver = rawops.LSMR(A, preconditioner="column", atol=1e-12, btol=1e-12, maxiter=60)
    first = solver.solve(device.put(b))
    np.testing.assert_allclose(device.get(first.x), np.linalg.lstsq(a, b, rcond=None)[0], rtol=1e-9)
    a = a * 8.0 ** np.arange(-2, 2)
    A[...] = device.put(a)
    stale, fresh = (s.solve(device.put(b)) for s in (solver, rawops.LSMR(A, preconditioner="column", atol=1e-12)))
    np.testing.assert_allclose(device.get(stale.x), np.linalg.lstsq(a, b, rcond=None)[0], rtol=1e-9)
    assert stale.itn > fresh.itn


@pytest.mark.gpu
def test_a_solve_that_is_cut_short_leaves_later_uploads_alone(device, rng):
    """A chunk is under way, and then the copy of its state, when the solver and its pinned memory are let go."""
    import cupy

    a, b = cupy.ones((20000, 2000), "float32"), cupy.asarray(rng.standard_normal(20000), "float32")
    a[cupy.arange(2000), cupy.arange(2000)] += cupy.arange(2000, dtype="float32")

    def stop(iteration):
        raise KeyboardInterrupt

    for _ in range(3):
        with contextlib.suppress(KeyboardInterrupt):
            rawops.lsmr(a, b, atol=0, btol=0, conlim=0, callback=stop)
        uploaded = [cupy.asarray(np.full(100, 7.0)) for _ in range(4)]
        assert all((x.get() == 7).all() for x in uploaded)


@pytest.mark.gpu
def test_a_capture_that_is_cut_short_leaves_no_graph(device, rng, monkeypatch):
    """A Ctrl-C while iterations are recorded: the next solve has whole ones."""
    a, b = system(rng, 200, 80, np.linspace(1, 9, 80))
    solver, b = rawops.LSMR(device.put(a), maxiter=300, atol=0, btol=0, conlim=0), device.put(b)
    expected = solver.solve(b)
    cut, iterate = rawops.LSMR(device.put(a), maxiter=300, atol=0, btol=0, conlim=0), Engine._iterate

    def interrupted(engine):
        if engine.vectors.early:
            raise KeyboardInterrupt
        iterate(engine)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Engine, "_iterate", interrupted)
        for _ in range(40):
            cut.solve(b)
    found = cut.solve(b)
    assert found.itn == expected.itn and (found.x == expected.x).all()


def test_show(device, rng, capsys):
    a, b = system(rng, 20, 6)
    rawops.lsmr(device.put(a), device.put(b), show=True)
    shown = capsys.readouterr().out
    assert "istop 2: the least-squares solution to the tolerance atol" in shown
    assert re.search(r"\|\|A\^H r\|\| \d\.\d{3}e[+-]\d\d  cond \d\.\de[+-]\d\d ", shown)  # all digits in 80 columns


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "sparse", "sparse in one block"])
def test_iterations_neither_wait_nor_allocate(device, rng, monkeypatch, kind):
    """Ten times the iterations: no allocation more, a look at the state a chunk, and all of it in a graph."""
    import cupy

    class Count(cupy.cuda.MemoryHook):
        name, allocations = "count", 0

        def malloc_preprocess(self, **keywords):
            self.allocations += 1

    if kind == "sparse":
        monkeypatch.setattr(_lsmr_small, "_MOST_BYTES", 0)
    a, b = system(rng, 200, 80, np.linspace(1, 9, 80))
    a = device.put(a) if kind == "dense" else rawops.SparseMatrix.from_scipy(sparse.csr_array(a))
    b, waits, allocations = device.put(b), [], []
    wait = _Reader.wait
    monkeypatch.setattr(_Reader, "wait", lambda self, ticket: waits.append(1) or wait(self, ticket))
    for maxiter in (100, 1000):
        solver = rawops.LSMR(a, maxiter=maxiter, atol=0, btol=0, conlim=0, damp=1e-300)
        monkeypatch.setattr(solver, "_settings", solver._settings._replace(atol=-1.0, btol=-1.0, ctol=-1.0))
        solver.solve(b)
        solver.solve(b)
        waits.clear()
        with Count() as count:
            ours = solver.solve(b)
        allocations.append(count.allocations)
        engine = next(iter(solver._engines.values()))
        assert len(waits) <= ours.itn / engine.chunk + 3
        assert kind == "sparse in one block" or engine._graph is not None
    assert allocations[0] == allocations[1] <= 3


@pytest.mark.skipif(has_gpu(), reason="the emulator counts launches")
def test_an_iteration_is_four_kernels(device, rng, monkeypatch):
    """And a test of x after each chunk of them."""
    monkeypatch.setattr(_lsmr_small, "_MOST_BYTES", 0)
    monkeypatch.setattr(Engine, "_chunk", lambda self: 4)
    A, b = rawops.SparseMatrix.from_scipy(scattered(rng, 90, 30)), device.put(rng.standard_normal(90))
    report, counts = A._store.device.report, []
    for maxiter in (4, 8):
        before = len(report)
        rawops.lsmr(A, b, maxiter=maxiter, atol=0, btol=0, conlim=0)
        counts.append(len(report) - before)
    assert counts[1] - counts[0] == 4 * 4 + 1


@pytest.mark.parametrize("kind", ["sparse", "sparse in one block"])
def test_memory(device, rng, monkeypatch, kind):
    """Besides A and b: m + 4 n elements, x among them, and a bounded number of sums."""
    if kind == "sparse":
        monkeypatch.setattr(_lsmr_small, "_MOST_BYTES", 0)
    m, n = 1700, 300
    A, b = rawops.SparseMatrix.from_scipy(scattered(rng, m, n)), device.put(rng.standard_normal(m))
    kind, sizes = type(A._store.device), []
    empty = kind.empty

    def counted_empty(self, shape, dtype):
        found = empty(self, shape, dtype)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(kind, "empty", counted_empty)
    rawops.lsmr(A, b, maxiter=1)
    vectors = sorted(size for size in sizes if size in (8 * m, 8 * n))
    assert vectors == [8 * n] * 4 + [8 * m]
    assert sum(sizes) - sum(vectors) < 20_000
