"""LSMR: least squares and linear systems by iteration, without leaving the GPU.

The method is that of D. C.-L. Fong and M. Saunders, "LSMR: An iterative algorithm for sparse least-squares problems"
(SIAM J. Sci. Comput. 33, 2011), with SciPy's meaning of every argument and result. The iteration is in
_lsmr_engine.py, what it multiplies with in _lsmr_operators.py.
"""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rawops._lsmr_distributed import DistributedOperator, DistributedProduct
from rawops._lsmr_engine import HISTORY, Engine, Settings
from rawops._lsmr_kernels import MOST_COLUMNS
from rawops._lsmr_many import solve_columns
from rawops._lsmr_operators import (
    ColumnScaling,
    EmptyProduct,
    LinearOperator,
    PreconditionedProduct,
    SparseProduct,
    column_scaling,
    product_of,
)
from rawops._lsmr_status import Progress, Status
from rawops._runtime import arrays, checks
from rawops._runtime import device as devices
from rawops._runtime.checks import fail
from rawops._runtime.copies import NotCopied
from rawops._sparse_formats import value_dtype
from rawops._sparse_operands import on_device
from rawops.sparse import SparseMatrix

__all__ = ["LSMR", "DistributedOperator", "LSMRResult", "LinearOperator", "lsmr"]


def _product(function: str, A):
    """Return the product with a matrix or operator of any kind."""
    if isinstance(A, DistributedOperator):
        return DistributedProduct(A, _product(function, A.A))
    is_foreign = hasattr(A, "tocsr") and not isinstance(A, SparseMatrix)
    return product_of(function, _sparse_matrix(function, A) if is_foreign else A)


def _sparse_matrix(function: str, A):
    """Return a SparseMatrix of CuPy's sparse matrix, or under emulation of SciPy's; of integers in float64."""
    is_cupys = type(A).__module__.partition(".")[0] == "cupyx"
    if not is_cupys and devices.emulated() is None:
        hint = "Move it with rawops.SparseMatrix.from_scipy(A), once for all solves."
        fail(TypeError, function, "A", "be on the GPU", f"SciPy's {type(A).__name__}", hint)
    if A.dtype.kind in "biu":
        with arrays.current_of(A):
            A = A.astype("float64")
    return (SparseMatrix.from_cupy if is_cupys else SparseMatrix.from_scipy)(A)


class LSMRResult(namedtuple("LSMRResult", "x istop itn normr normar norma conda normx")):
    """What a solve returns: SciPy's eight values, to unpack or by name, and more as attributes.

    Attributes
    ----------
    x : array (n,)
        The solution, on the device.
    istop : int
        0: x = x0 (or 0) is the solution. 1: A x = b to the tolerances. 2: the least-squares solution to the tolerance.
        3: the condition estimate passed `conlim`. 4, 5, 6: as 1, 2, 3, to the precision of float64. 7: `maxiter`.
    itn : int
    normr, normar, norma, conda, normx : float
        Norms of r = b - A x (with damping, of the residual of the damped system), of A^H r - damp^2 (x - x0), of A and
        its condition, and of x: estimates of the recurrences, but for the norm of x.
    history : dict of array (itn,), or None
        The same five by iteration, if asked for.
    status : Status
        The true norms at the end, and whether they bear out `istop`.
    """

    def __new__(cls, *values, history=None, status=None):
        result = super().__new__(cls, *values)
        result.history, result.status = history, status
        return result


class _Problem(NamedTuple):
    """A right-hand side as the engine takes it."""

    device: object
    dtype: np.dtype
    b: object
    x0: object
    give: Callable


class LSMR(NotCopied, instead="Make a new one of A."):
    """A least-squares solver for one matrix, which keeps its workspace and its CUDA graph from solve to solve.

    Parameters
    ----------
    A : SparseMatrix, array, sparse matrix or operator
        As for `lsmr`.
    damp, atol, btol, conlim, maxiter, preconditioner, reorthogonalize, vectors
        As for `lsmr`.

    Notes
    -----
    A `SparseMatrix` may be given other values between solves, by `update_values`: the preconditioner "column" then
    takes the norms of its columns anew. Those of a dense array are taken once, when the solver is made: changed in
    place, the array is solved as it is now, but scaled by its old norms, which may cost iterations.

    One solver belongs on one stream at a time. Workspace besides A and b: u of m elements and v, x, h and hbar of n,
    some thousand float64 numbers for sums, and the result.
    """

    _function = "LSMR"

    def __init__(
        self,
        A,
        *,
        damp=0.0,
        atol=1e-6,
        btol=1e-6,
        conlim=1e8,
        maxiter=None,
        preconditioner=None,
        reorthogonalize=None,
        vectors=None,
    ) -> None:
        self._product = _product(self._function, A)
        self.shape = self._product.shape
        numbers = {"damp": damp, "atol": atol, "btol": btol, "conlim": conlim}
        damp, atol, btol, conlim = (_number(self._function, name, value) for name, value in numbers.items())
        if math.isinf(damp):
            fail(ValueError, self._function, "damp", "be finite", damp)
        if maxiter is None:
            maxiter = min(self._total_rows(), self.shape[1])
        maxiter = checks.int_range(self._function, "maxiter", maxiter, -(2**53), 2**53)
        self._settings = Settings(damp, atol, btol, 1 / conlim if conlim > 0 else 0.0, maxiter)
        self._capacity = self._kept_vectors(reorthogonalize)
        if preconditioner is not None:
            self._product = self._preconditioned(preconditioner)
        self._vectors = checks.choice(self._function, "vectors", vectors, (None, "float64"))
        self._engines: dict[tuple, Engine] = {}
        self._tunings, self._updates = _changes_of(self._product)

    def _total_rows(self) -> int:
        product = self._product
        if not isinstance(product, DistributedProduct):
            return self.shape[0]
        device = product.device or arrays.current_device(self._function)
        with device.current():
            return product.total_rows(device)

    def _kept_vectors(self, reorthogonalize) -> int:
        most = max(min(self.shape[1], self._settings.maxiter), 0)
        if reorthogonalize is None:
            return 0
        if isinstance(reorthogonalize, str):
            if reorthogonalize != "full":
                fail(ValueError, self._function, "reorthogonalize", "be 'full' or a number", repr(reorthogonalize))
            return most
        return min(checks.int_range(self._function, "reorthogonalize", reorthogonalize, 1, 2**31 - 1), most)

    def _preconditioned(self, preconditioner):
        function, rule = self._function, "be 'column' or have solve and rsolve"
        if isinstance(preconditioner, str):
            if preconditioner != "column":
                fail(ValueError, function, "preconditioner", rule, repr(preconditioner))
            preconditioner = column_scaling(function, self._product)
        elif not (hasattr(preconditioner, "solve") and hasattr(preconditioner, "rsolve")):
            fail(TypeError, function, "preconditioner", rule, type(preconditioner).__name__)
        if isinstance(self._product, EmptyProduct):
            return self._product
        return PreconditionedProduct(function, self._product, preconditioner)

    def solve(self, b, x0=None, *, callback: Callable | None = None, history: bool = False, show: bool = False):
        """Solve for one right-hand side.

        Parameters
        ----------
        b : array (m,) or (m, 1), or sparse matrix (m, 1)
        x0 : array (n,) or (n, 1), optional
        callback, history, show
            As for `lsmr`.

        Returns
        -------
        LSMRResult
        """
        return self._solve(b, x0, callback, history, show, keep=True)

    def _solve(self, b, x0, callback, history: bool, show: bool, keep: bool) -> LSMRResult:
        if callback is not None and not callable(callback):
            fail(TypeError, self._function, "callback", "be a function of an iteration", repr(callback))
        problem = self._problem(b, x0)
        engine = self._engine(problem, 1)
        progress = Progress(self._settings, self.shape, callback, history, show)
        with problem.device.current(), progress:
            engine.start(problem.b, problem.x0, self._settings)
            report = engine.run(self._settings.maxiter, progress.add if progress.is_wanted else None)[0]
            x0 = engine.start_of([report], problem.x0)
            squares = engine.residuals(problem.b, x0, self._settings.damp)
            x = engine.solution(x0)
            x = x.copy() if keep and x is engine.x else x
        istop, itn = int(report["istop"]), int(report["itn"])
        status = Status(istop, report, squares[:, 0], self._settings)
        progress.finish(status)
        values = (report[name] for name in HISTORY)
        return LSMRResult(problem.give(x), istop, itn, *values, history=progress.history(), status=status)

    def solve_many(self, B, X0=None, *, history: bool = False) -> LSMRResult:
        """Solve for several right-hand sides at once, which reads A once for all of them.

        Each column has its own scalars and its own stop, as if it were solved alone, but for the order of sums. Columns
        that have stopped drop out whenever half of them have.

        Parameters
        ----------
        B : array (m, r), r up to 65535
        X0 : array (n, r), optional
        history : bool
            Keep the norms of every iteration, arrays (iterations, r) with NaN after a column's stop.

        Returns
        -------
        LSMRResult
            x (n, r); the others are NumPy arrays (r,), and status is a list.
        """
        if self._capacity:
            hint = "Solve column by column."
            fail(ValueError, self._function, "reorthogonalize", "be None for solve_many", self._capacity, hint)
        problem = self._problem(B, X0, names=("B", "X0"))
        if problem.b.shape[1] == 0:
            return self._of_no_columns(problem, history)
        if problem.b.shape[1] > MOST_COLUMNS:
            got, hint = problem.b.shape[1], "Solve in pieces."
            fail(ValueError, self._function, "B", f"have at most {MOST_COLUMNS} columns", got, hint)
        engine = self._engine(problem, problem.b.shape[1])
        b, x0 = problem.b, problem.x0
        if engine.columns == 1:
            b, x0 = b[:, 0], None if x0 is None else x0[:, 0]
        with problem.device.current():
            reports, kept = solve_columns(engine, b, x0, self._settings, history)
            x0 = engine.start_of(reports, x0)
            squares = engine.residuals(b, x0, self._settings.damp)
            x = engine.solution(x0)
            x = (x.copy() if x is engine.x else x).reshape(self.shape[1], problem.b.shape[1])
        status = [Status(int(r["istop"]), r, squares[:, i], self._settings) for i, r in enumerate(reports)]
        istop, itn, *norms = (np.array([r[name] for r in reports]) for name in ("istop", "itn", *HISTORY))
        return LSMRResult(problem.give(x), istop.astype(int), itn.astype(int), *norms, history=kept, status=status)

    def _of_no_columns(self, problem: _Problem, history: bool) -> LSMRResult:
        x = problem.give(problem.device.empty((self.shape[1], 0), problem.dtype))
        codes, norms = np.zeros(0, dtype=int), np.zeros(0)
        kept = {name: np.zeros((0, 0)) for name in HISTORY} if history else None
        return LSMRResult(x, codes, codes.copy(), *(norms.copy() for _ in HISTORY), history=kept, status=[])

    def _engine(self, problem: _Problem, columns: int) -> Engine:
        key, (tunings, updates) = (problem.device, problem.dtype, columns), _changes_of(self._product)
        if tunings != self._tunings:  # graphs and workspaces are those of the kernels before
            self._engines, self._tunings = {}, tunings
        if updates != self._updates:
            self._engines, self._updates = self._of_new_values(), updates
        if key not in self._engines:
            with problem.device.current():
                self._engines[key] = Engine(problem.device, self._product, problem.dtype, columns, self._capacity)
        return self._engines[key]

    def _of_new_values(self) -> dict:
        """Take the norms of the columns anew, where the preconditioner has them; return the engines that stay."""
        product = self._product
        if not (isinstance(product, PreconditionedProduct) and isinstance(product.preconditioner, ColumnScaling)):
            return self._engines
        scaling = column_scaling(self._function, product.product)
        self._product = PreconditionedProduct(self._function, product.product, scaling)
        return {}

    def _problem(self, b, x0, names=("b", "x0")) -> _Problem:
        function, (m, n) = self._function, self.shape
        if hasattr(b, "toarray"):
            with arrays.current_of(b):
                b = b.toarray()
        checks.arrays_given(function, **{names[0]: b})
        given = dict(zip(names, (b, x0), strict=True))
        (b, x0), give = arrays.take(function, **given)
        device = arrays.device_of(function, **dict(zip(names, (b, x0), strict=True)))
        if self._product.device is not None:
            on_device(function, self._product.device, device, names[0])
        shape = _vector if names[0] == "b" else functools.partial(_columns, columns=b.shape[1:])
        b, x0 = shape(function, names[0], b, m), None if x0 is None else shape(function, names[1], x0, n)
        inexact = [x.dtype for x in (self._product, b, x0) if x is not None and x.dtype.kind not in "biu"]
        wide = (np.result_type(own, "float32") for own in inexact)  # no type has both kinds of 16 bits
        dtype = np.result_type(*wide, self._vectors or "float32")
        with device.current():
            b, x0 = (x if x is None else x.astype(dtype, copy=False) for x in (b, x0))
        return _Problem(device, dtype, b, x0, give)


def _changes_of(product) -> tuple[int, int]:
    """Return how often the `SparseMatrix` of a product has been tuned, and given other values; of others 0."""
    while hasattr(product, "product"):
        product = product.product
    store = product.matrix._store if isinstance(product, SparseProduct) else None
    return (store.tunings, store.updates) if store else (0, 0)


def _number(function: str, name: str, value) -> float:
    number = checks.number(function, name, value)
    if number != number:
        fail(ValueError, function, name, "be a number", number)
    return number


def _vector(function: str, name: str, x, size: int):
    """Return a vector given as (size,) or (size, 1), as the former."""
    if x.ndim == 0:
        x = x.reshape(1)
    if x.shape not in ((size,), (size, 1)):
        fail(ValueError, function, name, f"have shape ({size},) or ({size}, 1)", f"shape {tuple(x.shape)}")
    value_dtype(function, name, x.dtype)
    return x if x.ndim == 1 else x[:, 0]


def _columns(function: str, name: str, x, size: int, columns: tuple):
    """Return a matrix of columns; a single one as a vector, as the engine has it."""
    if x.ndim != 2 or x.shape != (size, *columns):
        rule = f"have shape ({size}, {columns[0] if columns else 'any'})"
        fail(ValueError, function, name, rule, f"shape {tuple(x.shape)}")
    value_dtype(function, name, x.dtype)
    return x


def lsmr(
    A,
    b,
    damp=0.0,
    atol=1e-6,
    btol=1e-6,
    conlim=1e8,
    maxiter=None,
    show=False,
    x0=None,
    *,
    preconditioner=None,
    reorthogonalize: str | int | None = None,
    callback: Callable | None = None,
    history: bool = False,
    vectors: str | None = None,
) -> LSMRResult:
    """Solve A x = b, or minimise ||b - A x||^2 + damp^2 ||x - x0||^2, by LSMR on the GPU.

    Parameters
    ----------
    A : SparseMatrix, array (m, n), sparse matrix or operator
        Any of: a `rawops.SparseMatrix`; a dense array of any strides; CuPy's sparse matrices, which are converted (make
        a `SparseMatrix` once, where there are several solves); an object with ``shape``, ``dtype``, ``matvec`` and
        ``rmatvec``, such as a `LinearOperator`. Integers in it count as float64, floats of 16 bits as float32.
    b : array (m,) or (m, 1), or sparse matrix (m, 1)
    damp : float
        Damping of x - x0.
    atol, btol : float
        Stop where ||r|| <= btol ||b|| + atol ||A|| ||x||, or ||A^H r|| <= atol ||A|| ||r||, as the recurrences estimate
        them. 0 stands for the precision of float64.
    conlim : float
        Stop where the estimate of the condition of A passes it; 0 is no limit.
    maxiter : int, optional
        min(m, n) if left out, as SciPy has it. With 0 or less, as there, no iteration is made.
    show : bool
        Show the progress, and how it ended.
    x0 : array (n,) or (n, 1), optional
        Where to start; zeros if left out.
    preconditioner : {None, "column"} or object, optional
        Solve for y in A N^-1 y = b, with x = x0 + N^-1 y: "column" scales the columns of a sparse or dense A to norm 1;
        an object gives ``solve(y)`` = N^-1 y and ``rsolve(z)`` = N^-H z, device arrays of shape (n,), and may not
        change its argument. Then `damp`, `normar`, `norma`, `conda` and `normx` are about A N^-1 and y.
    reorthogonalize : {None, "full"} or int, optional
        Orthogonalise each v against all earlier ones, or the last k: fewer iterations on ill-conditioned systems, for
        k n elements of memory ("full": as many vectors as iterations, at most min(m, n, maxiter)) and two passes over
        them an iteration. A few of them do nothing: only "full" brings illc1033 from 1949 iterations to 261.
    callback : callable, optional
        ``callback(iteration)`` with an `Iteration` for every iteration, in order. They come in chunks, up to two chunks
        behind the device, which does not wait.
    history : bool
        Keep the norms of every iteration in ``.history`` of the result.
    vectors : {None, "float64"}
        "float64" keeps vectors in float64 (complex128) where A and b are float32 (complex64). Otherwise vectors have
        the common type of A, b and x0, at least float32; integers in b and x0 take the type that the others have.

    Returns
    -------
    LSMRResult
        Unpacks as SciPy's ``x, istop, itn, normr, normar, norma, conda, normx``.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit, before anything is launched. None of the arguments is changed.

    Notes
    -----
    All scalars, sums of squares and stopping tests are float64 and stay on the device, so that with float64 vectors
    stop code and iteration count are SciPy's but for rounding: sums in another order may stop an iteration earlier or
    later. In float32 a few per cent more iterations are usual, and the estimates may drift from the truth on an
    ill-conditioned system: the true norms are computed once at the end, and ``.status`` says where they contradict the
    stop code. As with SciPy, ||A|| is over-estimated and the condition under-estimated severalfold, so that `conlim`
    rarely stops anything. NaN and infinities in A or b run to `maxiter`: istop 7. Squares must be numbers of float64,
    too: what is below 1e-154 counts as 0 in a norm, what is above 1e154 as infinite.

    The host reads the state every few iterations, one chunk behind; no iteration waits for it. Use `LSMR` to solve with
    one A repeatedly. Workspace besides A and b: m + 4 n elements, x among them, and some thousand float64 numbers.
    """
    solver = _OneSolve(
        A,
        damp=damp,
        atol=atol,
        btol=btol,
        conlim=conlim,
        maxiter=maxiter,
        preconditioner=preconditioner,
        reorthogonalize=reorthogonalize,
        vectors=vectors,
    )
    return solver._solve(b, x0, callback, history, show, keep=False)


class _OneSolve(LSMR):
    _function = "lsmr"
