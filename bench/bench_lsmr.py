"""LSMR beside cupyx.scipy.sparse.linalg.lsmr: wall time of whole solves of one problem with the same tolerances.

"ours" is `LSMR.solve` of a solver that has solved before, "lsmr()" the function, which sets everything up anew; CuPy
gets its quickest format, compressed columns, and a start of zeros in the vectors' type. "x SpMV" is the time of an
iteration over that of its two products alone. Residuals are computed from the solutions, in float64.
"""

from __future__ import annotations

import argparse
import gzip
import io
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import real_systems
from common import cupy, environment
from cupyx.scipy.sparse import csr_matrix
from cupyx.scipy.sparse.linalg import lsmr as cupy_lsmr

import rawops
from rawops.testing import matrices
from rawops.testing.tables import show
from rawops.testing.timing import graph_times

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
TOLERANCES = {"atol": 1e-6, "btol": 1e-6, "conlim": 1e8}
RUNS = 5
ENOUGH_S = 1.0  # of runs of one call
# Iterations of the two solves whose difference gives the time of one: early, before precision runs out; of small
# systems more, since one takes microseconds.
MEASURED, MEASURED_OF_SMALL, SMALL = (8, 24), (24, 152), 100_000


@dataclass(frozen=True)
class System:
    """A matrix of CuPy's and a right-hand side."""

    name: str
    matrix: csr_matrix
    b: cupy.ndarray
    maxiter: int
    columns: int = 0  # right-hand sides of a second measurement


def systems(quick: bool) -> Iterator[System]:
    """The rays of the LSMR article in float32; small real, larger generated and large real systems in float64."""
    yield noisy("rays 8kv", matrices.rays(cupy), "float32", columns=32)
    yield noisy("rays 11kv", matrices.rays(cupy, 936_063, 17.74, 21), "float32", columns=32)
    yield real("well1033")
    yield real("illc1033")
    if not quick:
        yield noisy("tomography", matrices.tomography(cupy), "float64")
        yield noisy("sls", matrices.hub_column(cupy), "float64")
        yield noisy("Ladybug-49", matrices.bundle(cupy), "float64")
        yield from of_packages()


def of_packages() -> Iterator[System]:
    """Those whose data is installed, see real_systems.py."""
    for name, make, package, file in (
        ("matpower SyntheticUSA", real_systems.power_grid, "matpower", "data/case_SyntheticUSA.m"),
        ("gtsam w10000", real_systems.pose_graph, "gtsam", "Data/w10000.graph"),
    ):
        path = real_systems.data_file(package, file)
        if path is None:
            print(f"{name} left out: package {package} is not installed", file=sys.stderr)
            continue
        a = make(path)
        yield noisy(name, matrices.Csr(*map(cupy.asarray, (a.data, a.indices, a.indptr)), a.shape), "float64")


def noisy(name: str, csr: matrices.Csr, dtype: str, columns: int = 0) -> System:
    """b = A x with uniform x, and noise of a third of its spread."""
    a = csr_matrix((csr.data.astype(dtype), csr.indices, csr.indptr), shape=csr.shape)
    random = cupy.random.RandomState(1)
    b = a @ random.uniform(size=a.shape[1]).astype(dtype)
    b += (0.3 * b.std() * random.standard_normal(b.size)).astype(dtype)
    return System(name, a, b, 1000, columns)


def real(name: str) -> System:
    """A system that comes with the tests."""
    from scipy.io import mmread

    files = (DATA / f"{name}{part}.mtx.gz" for part in ("", "_rhs1"))
    a, b = (mmread(io.BytesIO(gzip.decompress(file.read_bytes())), spmatrix=False) for file in files)
    return System(name, csr_matrix(a.tocsr()), cupy.asarray(np.asarray(b).ravel()), 5000)


def measure(system: System) -> dict[str, object]:
    """Solve with all, in turn, and compare."""
    a, b, dtype = system.matrix, system.b, system.b.dtype
    options = {**TOLERANCES, "maxiter": system.maxiter}
    ours, theirs = rawops.SparseMatrix.from_cupy(a), a.tocsc()
    solver, x0 = rawops.LSMR(ours, **options), cupy.zeros(a.shape[1], dtype)
    calls = {
        "ours": lambda: solver.solve(b),
        "lsmr()": lambda: rawops.lsmr(ours, b, **options),
        "CuPy": lambda: cupy_lsmr(theirs, b, x0=x0, **options),
    }
    times, results = alternate(calls)
    result, rival = results["ours"], results["CuPy"]
    iteration, products = iteration_us(ours, b), products_us(ours, dtype)
    x, y = result.x.astype("float64"), rival[0].astype("float64")
    return {
        "system": system.name,
        "shape": f"{a.shape[0]} x {a.shape[1]}",
        "nnz": int(a.nnz),
        "dtype": dtype.name,
        **{f"{name} ms": value for name, value in times.items()},
        "x CuPy": times["CuPy"] / times["ours"],
        "us / iteration": iteration,
        "x SpMV": iteration / products,
        "itn": result.itn,
        "CuPy itn": int(rival[2]),
        "istop": result.istop,
        "CuPy istop": int(rival[1]),
        "difference": float(cupy.linalg.norm(x - y) / cupy.linalg.norm(y)),
        "||r|| / ||b||": residual(a, b, x),
        "CuPy's": residual(a, b, y),
    }


def measure_many(system: System) -> dict[str, object]:
    """All columns at once, and one after the other."""
    columns, b = system.columns, system.b
    random = cupy.random.RandomState(2)
    noise = random.standard_normal((b.size, columns)).astype(b.dtype)
    many = cupy.ascontiguousarray(b[:, None] + noise * b.std() * b.dtype.type(0.3))
    solver = rawops.LSMR(rawops.SparseMatrix.from_cupy(system.matrix), **TOLERANCES, maxiter=system.maxiter)
    times, results = alternate(
        {
            "solve_many": lambda: solver.solve_many(many),
            "one by one": lambda: [solver.solve(many[:, j]) for j in range(columns)],
        }
    )
    alone = [result.itn for result in results["one by one"]]
    together = results["solve_many"].itn
    return {
        "system": system.name,
        "columns": columns,
        **{f"{name} ms": value for name, value in times.items()},
        "x one by one": times["one by one"] / times["solve_many"],
        "itn": f"{min(together)} to {max(together)}",
        "alone": f"{min(alone)} to {max(alone)}",
    }


def alternate(calls: dict[str, Callable]) -> tuple[dict[str, float], dict]:
    """Milliseconds of wall time of each call, medians of runs in turn, after one to warm up; and what they return."""
    samples, results = {name: [] for name in calls}, {}
    for run in range(RUNS + 1):
        for name, call in calls.items():
            cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            results[name] = call()
            cupy.cuda.Device().synchronize()
            if run:
                samples[name].append((time.perf_counter() - start) * 1e3)
        if run and max(map(sum, samples.values())) > ENOUGH_S * 1e3:
            break
    return {name: float(np.median(found)) for name, found in samples.items()}, results


def iteration_us(a, b) -> float:
    """The time of an iteration: a longer solve that nothing stops, less a shorter one; NaN if one stopped."""
    none = {"atol": 0, "btol": 0, "conlim": 0}
    short, long = MEASURED_OF_SMALL if a.nnz < SMALL else MEASURED
    solvers = {n: rawops.LSMR(a, maxiter=n, **none) for n in (short, long)}
    for _ in range(4):  # the fourth runs from the graph
        for solver in solvers.values():
            solver.solve(b)
    times, results = alternate({n: lambda s=solver: s.solve(b) for n, solver in solvers.items()})
    if any(result.itn != n for n, result in results.items()):
        return float("nan")
    return (times[long] - times[short]) * 1e3 / (long - short)


def products_us(a, dtype) -> float:
    """The time of A v and A^H u, from a graph in which they alternate, as in an iteration: neither finds its matrix in
    the L2."""
    u, v = (cupy.zeros(size, dtype) for size in a.shape)

    def both() -> None:
        a.matvec(v, out=u)
        a.rmatvec(u, out=v)

    return graph_times({"both": both}, [()])["both"].median


def residual(a, b, x) -> float:
    """||b - A x|| / ||b||."""
    return float(cupy.linalg.norm(b - a.astype("float64") @ x) / cupy.linalg.norm(b))


def plot(path: str) -> None:
    """Draw how the norms of r and A^H r fall on the small real systems, in float64, float32 and mixed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, name in zip(axes, ("well1033", "illc1033"), strict=True):
        system = real(name)
        for label, dtype, vectors in (
            ("float64", "float64", None),
            ("float32", "float32", None),
            ("float32, float64 vectors", "float32", "float64"),
        ):
            a = rawops.SparseMatrix.from_cupy(system.matrix.astype(dtype))
            b = system.b.astype(dtype)
            found = rawops.lsmr(a, b, **TOLERANCES, maxiter=5000, vectors=vectors, history=True)
            relative = found.history["normar"] / (found.history["norma"] * found.history["normr"])
            axis.semilogy(range(1, found.itn + 1), relative, label=f"{label}, istop {found.istop}", linewidth=0.9)
        axis.set(title=name, xlabel="iteration")
        axis.legend(fontsize=8)
    axes[0].set_ylabel("||A^H r|| / (||A|| ||r||), estimated")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> int:
    """Measure, and fail where the answers of ours and CuPy's are not those of one problem."""
    parser = argparse.ArgumentParser(prog="bench lsmr", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="without the larger float64 systems")
    parser.add_argument("--json", action="store_true", help="one JSON line a system instead of tables")
    parser.add_argument("--plot", metavar="PNG", help="draw convergence into this file instead")
    options = parser.parse_args()
    if options.plot:
        plot(options.plot)
        return 0
    rows, many, machine = [], [], environment()
    for system in systems(options.quick):
        rows.append(measure(system))
        many += [measure_many(system)] if system.columns else []
        if options.json:
            show("lsmr", [{**rows[-1], **machine}], as_json=True)
    note = ", ".join(f"{key} {value}" for key, value in machine.items())
    if not options.json:
        show("lsmr: wall time of a solve, medians", rows)
    show("solve_many: wall time, medians", many, as_json=options.json, note=note)
    same = all(abs(row["||r|| / ||b||"] - row["CuPy's"]) < 1e-2 * row["CuPy's"] for row in rows)
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
