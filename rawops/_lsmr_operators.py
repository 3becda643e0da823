"""What LSMR multiplies with: every kind of matrix as y = alpha op(A) x + beta y with scalars on the device.

A product here has ``shape``, ``dtype`` and ``device`` (None: any), and ``bind`` makes it ready for vectors of one kind.
What comes of that has ``is_captured`` (it may be recorded in a CUDA graph), ``num_partials``, and ``apply``, which
leaves the partial sums of |y|^2 behind. With alpha = 0 and beta = 1 there is nothing to do: the solver has stopped.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rawops._lsmr_kernels import DTYPES, GEMV, THREADS, Pair, Vectors, real_and_parts
from rawops._runtime import arrays, checks
from rawops._runtime.checks import fail

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
        self.shape, self.dtype = tuple(int(extent) for extent in shape), np.dtype(dtype)
        self._products = {False: matvec, True: rmatvec}

    def matvec(self, x, alpha=1.0, beta=0.0, out=None):
        """Return alpha * A @ x + beta * out, in `out` if given."""
        return self._multiply(False, x, alpha, beta, out)

    def rmatvec(self, u, alpha=1.0, beta=0.0, out=None):
        """Return alpha * A^H @ u + beta * out, in `out` if given."""
        return self._multiply(True, u, alpha, beta, out)

    def _multiply(self, transposed: bool, x, alpha, beta, out):
        y = self._products[transposed](x)
        if alpha != 1:
            y = alpha * y
        if out is None:
            return y
        out[...] = y if beta == 0 else y + beta * out
        return out


class SparseProduct:
    """A `SparseMatrix`, whose own kernels take scalars from the device and leave partial sums."""

    is_captured = True

    def __init__(self, matrix) -> None:
        self.matrix, self.shape, self.dtype = matrix, matrix.shape, np.dtype(matrix.dtype)
        self.device = matrix._store.device
        self.nbytes = 2 * matrix.nnz * (self.dtype.itemsize + 4)  # that an iteration reads

    def bind(self, vectors: Vectors) -> SparseProduct:
        return self

    def num_partials(self, transposed: bool) -> int:
        return self.matrix._num_partials(transposed)

    def apply(self, transposed: bool, x, y, scalars: Pair, partials) -> None:
        self.matrix._apply(transposed, x, y, scalars.alpha, scalars.beta, partials.reshape(-1))


class DenseProduct:
    """A dense array of any strides."""

    def __init__(self, matrix) -> None:
        self.matrix, self.shape, self.dtype = matrix, matrix.shape, matrix.dtype
        self.device = arrays.device_of("lsmr", A=matrix)

    def bind(self, vectors: Vectors) -> BoundDense:
        return BoundDense(self.matrix, vectors)


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
        self.shape, self.dtype = tuple(operator.shape), np.dtype(operator.dtype)

    def bind(self, vectors: Vectors) -> PythonProduct:
        bound = PythonProduct(self.function, self.operator)
        bound.vectors = vectors
        return bound

    def num_partials(self, transposed: bool) -> int:
        return self.vectors.blocks(self.shape[transposed])

    def apply(self, transposed: bool, x, y, scalars: Pair, partials) -> None:
        product = self.operator.rmatvec if transposed else self.operator.matvec
        if self.vectors.columns == 1:
            w = self._checked(transposed, product(x), y.shape)
        else:
            w = self.vectors.empty(y.shape[0])
            for column in range(self.vectors.columns):
                w[:, column] = self._checked(transposed, product(x[:, column]), y.shape[:1])
        self.vectors.combine(scalars, w, y, partials)

    def _checked(self, transposed: bool, w, shape: tuple):
        name = "rmatvec" if transposed else "matvec"
        if getattr(w, "shape", None) != shape:
            rule = f"return an array of shape {shape} from {name}"
            fail(ValueError, self.function, "A", rule, getattr(w, "shape", type(w).__name__))
        w = w.astype(self.vectors.dtype, copy=False)
        return w if w.strides == (w.itemsize,) else w.copy()


class EmptyProduct:
    """A matrix without rows or without columns."""

    is_captured, device = True, None

    def __init__(self, shape: tuple[int, int], dtype) -> None:
        self.shape, self.dtype, self.nbytes = shape, np.dtype(dtype), 0

    def bind(self, vectors: Vectors) -> EmptyProduct:
        return self

    def num_partials(self, transposed: bool) -> int:
        return 1

    def apply(self, transposed: bool, x, y, scalars: Pair, partials) -> None:
        y.fill(0)
        partials.fill(0)


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
    return EmptyProduct(product.shape, product.dtype) if 0 in product.shape else product


def _dense(function: str, A):
    """Return a dense array as the kernels read it: integers become float64, which is a copy."""
    if not (hasattr(A, "__dlpack__") or hasattr(A, "__cuda_array_interface__")):
        hint = "Pass a SparseMatrix, a GPU array, or an object with shape, dtype, matvec and rmatvec."
        fail(TypeError, function, "A", "be a matrix or an operator", type(A).__name__, hint)
    (A,), _ = arrays.take(function, A=A)
    if A.dtype.name not in DTYPES:
        if A.dtype.kind not in "biuf":
            checks.dtype(function, "A", A, DTYPES)
        A = A.astype("float32" if A.dtype.itemsize == 2 and A.dtype.kind == "f" else "float64")
    return A
