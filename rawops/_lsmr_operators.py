"""What LSMR multiplies with: every kind of matrix as y = alpha op(A) x + beta y with scalars on the device.

A product here has ``shape``, ``dtype`` and ``device`` (None: any), and ``bind`` makes it ready for vectors of one kind.
What comes of that has ``is_captured`` (it may be recorded in a CUDA graph), ``num_partials``, and ``apply``, which
leaves the partial sums of |y|^2 behind. With alpha = 0 and beta = 1 there is nothing to do: the solver has stopped.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rawops import _sparse_operands as given
from rawops._lsmr_columns import SparseColumns
from rawops._lsmr_kernels import DTYPES, GEMV, THREADS, Pair, Vectors, real_and_parts
from rawops._runtime import arrays, checks
from rawops._runtime.checks import fail
from rawops._sparse_formats import added_up, module_of, value_dtype

_WARPS_WANTED = 2048  # in flight, for a product to run at the speed of memory


class LinearOperator:
    """A matrix known by its products alone.

    Parameters
    ----------
    shape : tuple of int
        (m, n)
    matvec, rmatvec : callable
        ``matvec(x)`` returns A @ x, shape (m,), for a device array x of shape (n,); ``rmatvec(u)`` returns A^H @ u.
        They may not change their argument.
    dtype : dtype
        Of the matrix: the solver's vectors have the common dtype of it and of b.

    Notes
    -----
    The solvers also take any object with these four attributes, such as those of SciPy and CuPy. Python functions run
    anew for every iteration, on CuPy's current stream; they should not synchronise. The solver may call them once or
    twice more than it has iterations, and ignores what they return then.
    """

    def __init__(self, shape, matvec: Callable, rmatvec: Callable, dtype) -> None:
        function = "LinearOperator"
        self.shape = _extents(function, "shape", shape)
        for name, product in (("matvec", matvec), ("rmatvec", rmatvec)):
            if not callable(product):
                fail(TypeError, function, name, "be a function of a vector", repr(product))
        self.dtype, self._products = np.dtype(dtype), {False: matvec, True: rmatvec}

    def matvec(self, x, alpha=1.0, beta=0.0, out=None):
        """Return alpha * A @ x + beta * out, in `out` if given, with the arguments of `SparseMatrix.matvec`.

        The result has the dtype that NumPy gives A and x, integers in A counting as float64. With the number 0 for
        `alpha`, the function is not called.
        """
        return self._multiply(False, "x", x, alpha, beta, out)

    def rmatvec(self, u, alpha=1.0, beta=0.0, out=None):
        """Return alpha * A^H @ u + beta * out, in `out` if given, as `matvec` does."""
        return self._multiply(True, "u", u, alpha, beta, out)

    def _multiply(self, transposed: bool, argument: str, x, alpha, beta, out):
        name, (rows, cols) = ("rmatvec", self.shape[::-1]) if transposed else ("matvec", self.shape)
        function = f"LinearOperator.{name}"
        x, out, give = given.operands(function, None, x, out, (cols,), argument)
        device = arrays.device_of(function, **{argument: x})
        dtype = given.promoted(function, argument, _floating(self.dtype), x.dtype)
        with device.current():
            alpha, beta = (given.factor(function, device, *f, dtype) for f in (("alpha", alpha), ("beta", beta)))
            if out is not None or not _is_zero(beta):
                out = given.target(function, device, out, (rows,), dtype, given.packed(beta, device.pointer))
            wide = np.result_type(dtype, np.float32)  # in which the terms of 16 bits add up
            total = None if _is_zero(beta) else _scaled(beta, out.astype(wide, copy=False))
            if not _is_zero(alpha) and 0 not in self.shape:
                y = self._products[transposed](x)
                y = _returned(function, "the operator", name, y, (rows,), wide, {argument: x})
                y = _scaled(alpha, y)
                total = y if total is None else total + y
            if total is None:
                total = device.empty((rows,), dtype)
                total.fill(0)
            total = total.astype(dtype, copy=False)
            if out is None:
                return give(total.copy() if arrays.overlap(total, x) else total)
            if total is not out:
                out[...] = total.copy() if arrays.overlap(total, out) else total
            return give(out)


def _is_zero(factor) -> bool:
    """Tell whether a factor is known to be 0: of an array only the device knows."""
    return isinstance(factor, complex) and factor == 0


def _scaled(factor, y):
    """Return factor * y, 0 where the factor is, whatever y holds."""
    if not isinstance(factor, complex):
        return factor * module_of(y).where(factor == 0, 0, y)
    factor = factor if y.dtype.kind == "c" else factor.real
    return y if factor == 1 else factor * y


class SparseProduct:
    """A `SparseMatrix`, whose own kernels take scalars from the device and leave partial sums."""

    def __init__(self, matrix) -> None:
        self.matrix, self.shape, self.dtype = matrix, matrix.shape, np.dtype(matrix.dtype)
        self.device = matrix._store.device
        self.nbytes = 2 * matrix.nnz * (self.dtype.itemsize + 4)  # that an iteration reads

    def bind(self, vectors: Vectors) -> BoundSparse | SparseColumns:
        return BoundSparse(self, vectors) if vectors.columns == 1 else SparseColumns(self, vectors)

    def column_squares(self):
        """Return the squared norms of the columns: a product with the squares of the entries, duplicates added up."""
        matrix, store = self.matrix, self.matrix._store
        has_columns = (not matrix._transposed) in store.rows
        rows = added_up("lsmr", store.device, store.rows[has_columns != matrix._transposed])
        data = abs(rows.data).astype("float64") ** 2
        squared = type(matrix).from_csr(data, rows.indices, rows.indptr, rows.shape, dual=False)
        ones = store.device.empty((matrix.shape[0],), data.dtype)
        ones.fill(1)
        return squared.matvec(ones) if has_columns else squared.rmatvec(ones)


class BoundSparse:
    """A `SparseMatrix` times one vector."""

    is_captured = True

    def __init__(self, product: SparseProduct, vectors: Vectors) -> None:
        self.matrix, self.nbytes, self._vectors = product.matrix, product.nbytes, vectors

    def num_partials(self, transposed: bool) -> int:
        return self.matrix._num_partials(transposed)

    def apply(self, transposed: bool, x, y, scalars: Pair, partials) -> None:
        early = self._vectors.early
        self.matrix._apply(transposed, x, y, scalars.alpha, scalars.beta, partials.reshape(-1), early)


class DenseProduct:
    """A dense array of any strides."""

    def __init__(self, matrix) -> None:
        self.matrix, self.shape, self.dtype = matrix, matrix.shape, matrix.dtype
        self.device = arrays.device_of("lsmr", A=matrix)

    def bind(self, vectors: Vectors) -> BoundDense:
        return BoundDense(self.matrix, vectors)

    def column_squares(self):
        """Return the squared norms of the columns."""
        return (abs(self.matrix).astype("float64") ** 2).sum(axis=0)


class BoundDense:
    """A dense array with the workspace for vectors of one dtype."""

    is_captured = True

    def __init__(self, matrix, vectors: Vectors) -> None:
        self.matrix, self.vectors, self.nbytes = matrix, vectors, 2 * matrix.nbytes
        self._plans = {transposed: self._plan(transposed) for transposed in (False, True)}
        size = max(outputs * slices for outputs, slices, *_ in self._plans.values())
        self._w = vectors.empty(size)

    def _plan(self, transposed: bool) -> tuple:
        matrix, vectors = self.matrix, self.vectors
        steps = [s // matrix.dtype.itemsize for s in matrix.strides]
        (outputs, length), (output_step, length_step) = matrix.shape, steps
        if transposed:
            outputs, length, output_step, length_step = length, outputs, length_step, output_step
        is_dot = abs(length_step) < abs(output_step) or outputs == 1
        lanes = 32 if is_dot else 1
        warps = -(-outputs * lanes // 32) * vectors.columns
        slices = max(1, min(_WARPS_WANTED // max(warps, 1), -(-length // (16 * lanes)), 64))
        real, parts = real_and_parts(matrix.dtype)
        choices = {"M": real, "MATRIX_PARTS": parts, "kDot": is_dot, "kConjugate": transposed and parts == 2}
        choices["R"], choices["PARTS"] = real_and_parts(vectors.dtype)
        kernel = GEMV.kernel(vectors.device, **choices)
        grid = (-(-outputs * lanes // THREADS), slices, vectors.columns)
        return outputs, slices, grid, kernel, (output_step, length_step), (outputs, length, -(-length // slices))

    def num_partials(self, transposed: bool) -> int:
        return self.vectors.blocks(self.matrix.shape[transposed])

    def apply(self, transposed: bool, x, y, scalars: Pair, partials) -> None:
        _, slices, grid, kernel, steps, sizes = self._plans[transposed]
        pointer = self.vectors.device.pointer
        alpha = pointer(scalars.alpha) if self.vectors.columns == 1 else 0
        values = (pointer(self.matrix), *steps, pointer(x), pointer(self._w), *sizes, alpha)
        kernel.launch(grid, (THREADS, 1, 1), values)
        self.vectors.combine(scalars, self._w, y, partials, slices)


class PythonProduct:
    """Any object with matvec and rmatvec, which are called anew for every product."""

    is_captured, device = False, None

    def __init__(self, function: str, operator) -> None:
        self.function, self.operator = function, operator
        for name in ("shape", "dtype"):
            if not hasattr(operator, name):
                rule, got = "have shape, dtype, matvec and rmatvec", f"{type(operator).__name__} without {name}"
                fail(TypeError, function, "A", rule, got)
        self.shape = _extents(function, "shape of A", operator.shape)
        dtype = np.dtype(operator.dtype)
        value_dtype(function, "A", dtype)
        self.dtype = _floating(dtype)

    def bind(self, vectors: Vectors) -> PythonProduct:
        bound = PythonProduct(self.function, self.operator)
        bound.vectors = vectors
        return bound

    def num_partials(self, transposed: bool) -> int:
        return self.vectors.blocks(self.shape[transposed])

    def apply(self, transposed: bool, x, y, scalars: Pair, partials) -> None:
        name = "rmatvec" if transposed else "matvec"
        operator = self.operator
        is_own = isinstance(operator, LinearOperator)  # whose function needs no checks of the solver's vectors
        product = operator._products[transposed] if is_own else getattr(operator, name)
        if self.vectors.columns == 1:
            w = _contiguous(self.function, "A", name, product(x), y)
        else:
            w = self.vectors.empty(y.shape[0])
            for column in range(self.vectors.columns):
                w[:, column] = _contiguous(self.function, "A", name, product(x[:, column]), y[:, column])
        self.vectors.combine(scalars, w, y, partials)


class ColumnScaling:
    """The preconditioner "column": every column of A at norm 1; `scale` (n,) holds one over the norms."""

    def __init__(self, scale) -> None:
        self.scale = scale


def column_scaling(function: str, product) -> ColumnScaling:
    """Return the scaling of a matrix whose entries are at hand. A column of zeros stays as it is."""
    if getattr(product, "column_squares", None) is None:
        hint = "Pass an object with solve and rsolve."
        fail(ValueError, function, "preconditioner", "not be 'column' for an operator", "'column'", hint)
    with product.device.current():
        squares = product.column_squares()
        squares[squares == 0] = 1
        return ColumnScaling(squares**-0.5)


class PreconditionedProduct:
    """A N^-1 for a preconditioner N: a `ColumnScaling`, or an object with ``solve`` and ``rsolve``."""

    def __init__(self, function: str, product, preconditioner) -> None:
        self.function, self.product, self.preconditioner = function, product, preconditioner
        self.shape, self.dtype, self.device = product.shape, product.dtype, product.device

    def bind(self, vectors: Vectors) -> BoundPreconditioned:
        return BoundPreconditioned(self, vectors)


class BoundPreconditioned:
    """A N^-1 with its workspace. The column scaling is a factor in a kernel; other preconditioners run in Python.

    Attributes
    ----------
    plain : product
        A itself.
    share : callable or None
        See _lsmr_distributed.py.
    """

    def __init__(self, product: PreconditionedProduct, vectors: Vectors) -> None:
        preconditioner, self.vectors, self._function = product.preconditioner, vectors, product.function
        self.plain, self._n = product.product.bind(vectors), product.shape[1]
        self.nbytes, self.share = getattr(self.plain, "nbytes", 0), getattr(self.plain, "share", None)
        self._w, self._partials = vectors.empty(self._n), vectors.partials(self.plain.num_partials(True))
        self._scale = None
        if isinstance(preconditioner, ColumnScaling):
            self._scale = preconditioner.scale.astype(real_and_parts(vectors.dtype)[0], copy=False)
        else:
            self._solve, self._rsolve = preconditioner.solve, preconditioner.rsolve
        self.is_captured = self.plain.is_captured and self._scale is not None

    def num_partials(self, transposed: bool) -> int:
        return self.vectors.blocks(self._n) if transposed else self.plain.num_partials(False)

    def apply(self, transposed: bool, x, y, scalars: Pair, partials) -> None:
        if transposed:
            alone = Pair(*scalars.gate, 0, scalars.gate) if scalars.gate else self.vectors.constants(1, 0)
            self.plain.apply(True, x, self._w, alone, self._partials)
            w = self._w if self._scale is not None else self._checked("rsolve", self._rsolve(self._w))
            self.vectors.combine(scalars, w, y, partials, scale=self._scale)
        else:
            self.plain.apply(False, self.solve(x), y, scalars, partials)

    def solve(self, y):
        """Return N^-1 y, in the workspace or of the preconditioner's own making."""
        if self._scale is None:
            return self._checked("solve", self._solve(y))
        self.vectors.combine(self.vectors.constants(1, 0), y, self._w, scale=self._scale)
        return self._w

    def _checked(self, name: str, x):
        return _contiguous(self._function, "preconditioner", name, x, self._w)


class EmptyProduct:
    """A matrix without rows or without columns."""

    is_captured = True

    def __init__(self, product) -> None:
        self.shape, self.dtype, self.device, self.nbytes = product.shape, product.dtype, product.device, 0
        self.column_squares = getattr(product, "column_squares", None)

    def bind(self, vectors: Vectors) -> EmptyProduct:
        return self

    def num_partials(self, transposed: bool) -> int:
        return 1

    def apply(self, transposed: bool, x, y, scalars: Pair, partials) -> None:
        y.fill(0)
        partials.fill(0)


def _contiguous(function: str, argument: str, name: str, x, like):
    """Return what a user's function gave as a contiguous array of the shape and dtype of `like`."""
    x = _returned(function, argument, name, x, like.shape, like.dtype, {"the solver's vectors": like})
    return x if x.flags.c_contiguous else x.copy()


def _returned(function: str, argument: str, name: str, x, shape: tuple, dtype: np.dtype, taken: dict):
    """Return what a user's function made of what it has taken, checked, as an array of this dtype."""
    if getattr(x, "shape", None) != shape:
        rule = f"return an array of shape {shape} from {name}"
        fail(ValueError, function, argument, rule, getattr(x, "shape", type(x).__name__))
    arrays.device_of(function, **taken, **{f"what {name} of {argument} returns": x})
    if x.dtype.kind == "c" and dtype.kind != "c":
        hint = "Give the operator a complex dtype."
        fail(TypeError, function, argument, f"return real numbers from {name}, as its dtype says", x.dtype, hint)
    return x.astype(dtype, copy=False)


def _floating(dtype: np.dtype) -> np.dtype:
    """Return the dtype that an operator of this one counts as."""
    return np.dtype("float64") if dtype.kind in "biu" else dtype


def product_of(function: str, A):
    """Return the product with a `SparseMatrix`, a dense array or an operator."""
    if hasattr(A, "_apply"):
        product = SparseProduct(A)
    elif hasattr(A, "rmatvec") and hasattr(A, "matvec"):
        product = PythonProduct(function, A)
    else:
        product = DenseProduct(_dense(function, A))
    if len(product.shape) != 2:
        fail(ValueError, function, "A", "have 2 dimensions", f"shape {tuple(product.shape)}")
    return EmptyProduct(product) if 0 in product.shape else product


def _dense(function: str, A):
    """Return a dense array as the kernels read it: integers become float64, which is a copy."""
    if not (hasattr(A, "__dlpack__") or hasattr(A, "__cuda_array_interface__")):
        hint = "Pass a SparseMatrix, a GPU array, or an object with shape, dtype, matvec and rmatvec."
        fail(TypeError, function, "A", "be a matrix or an operator", type(A).__name__, hint)
    (A,), _ = arrays.take(function, A=A)
    value_dtype(function, "A", A.dtype)
    if A.dtype.name not in DTYPES:
        with arrays.device_of(function, A=A).current():
            A = A.astype("float32" if A.dtype.name in ("float16", "bfloat16") else "float64")
    return A


def _extents(function: str, argument: str, shape) -> tuple:
    """Return the shape of an operator as a tuple of two ints."""
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        fail(TypeError, function, argument, "be (m, n)", repr(shape))
    return tuple(checks.int_range(function, argument, extent, 0, 2**63 - 1) for extent in shape)
