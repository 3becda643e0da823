"""Sparse matrices that multiply in both directions: A @ x and A.T @ u at the speed of memory, whatever the rows are.

`SparseMatrix` keeps the compressed rows of A and, with ``dual=True``, those of its transpose (which are A's compressed
columns). Either direction is then a sum over neighbouring entries, without atomics, on the kernel that suits its own
row lengths: `choose` of _sparse_profile.py is the rule table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rawops import _sparse_formats as formats
from rawops import _sparse_operands as given
from rawops._runtime import arrays, checks
from rawops._runtime import device as devices
from rawops._runtime.copies import NotCopied
from rawops._runtime.device import on_own_device
from rawops._sparse_bsr import BSRMatrix, from_rows
from rawops._sparse_profile import Choice, Profile
from rawops._sparse_store import Store, check_dual, is_dual
from rawops._sparse_transpose import transposed


@dataclass(frozen=True)
class Plan:
    """How a matrix multiplies.

    Attributes
    ----------
    matvec, rmatvec : Choice
        The kernel of A @ x and of A.H @ u, and why.
    dual : bool
        Whether both formats are kept.
    nbytes : int
        Device memory of the formats and of what the kernels keep.
    """

    matvec: Choice
    rmatvec: Choice
    dual: bool
    nbytes: int

    def __str__(self) -> str:
        formats_kept = "both formats" if self.dual else "one format"
        return f"A @ x: {self.matvec}\nA.H @ u: {self.rmatvec}\n{formats_kept}, {self.nbytes / 1e6:.1f} MB"


class SparseMatrix(NotCopied, instead="Copy or pickle to_scipy(), and make a new one by from_scipy()."):
    """A sparse matrix on the GPU, for repeated products in both directions.

    Make one with `from_csr`, `from_csc`, `from_coo`, `from_scipy` or `from_cupy`. `A.T` and `A.H` are views.

    Values are float16, bfloat16, float32, float64, complex64 or complex128; integers and bool become the float type
    that NumPy gives them with float32. Sums are in float32 for 16-bit values, else in the type of the result, which is
    NumPy's `result_type` of matrix and vector. Entries may come in any order, those of one place add up; a stored zero
    multiplies (0 * NaN is NaN), an absent entry does not. Rows and columns: below 2^31 - 1024; entries: any number.

    Construction copies the arrays, checks all indices and measures the matrix, so it synchronises; products do not.

    With ``dual=True`` both compressed rows and compressed columns are kept, which doubles the memory, and every product
    gives the same bits again. With ``dual=False`` only the given format is, and the other direction is several times
    slower and uses atomic additions: its last bits change from run to run. ``dual="auto"`` keeps both where the
    device's free memory allows it.

    Products of one matrix share workspaces: they belong on one stream, or in an order that streams keep. Some kernels
    keep the entries once more in an order of their own; `plan` says what all of it takes.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    nnz : int
        Stored entries, zeros included.
    """

    ndim = 2
    __array_priority__ = 1000  # x @ A comes to __rmatmul__, also from NumPy
    __array_ufunc__ = None

    def __init__(self, store: Store, transposed: bool = False, conjugated: bool = False) -> None:
        if not isinstance(store, Store):
            rule = "come from from_csr, from_csc, from_coo, from_scipy or from_cupy"
            checks.fail(TypeError, "SparseMatrix", "store", rule, type(store).__name__)
        self._store, self._transposed, self._conjugated = store, transposed, conjugated

    # --- construction -----------------------------------------------------------------------------------------------

    @classmethod
    def from_csr(cls, data, indices, indptr, shape, *, dual=True) -> SparseMatrix:
        """Make a matrix from compressed rows.

        Parameters
        ----------
        data : array (nnz,)
        indices : array (nnz,), integer
            The column of each entry.
        indptr : array (rows + 1,), integer
            Row i has the entries indptr[i] to indptr[i + 1].
        shape : (rows, columns)
        dual : {True, False, "auto"}
        """
        return cls._from_compressed("SparseMatrix.from_csr", data, indices, indptr, shape, dual, False)

    @classmethod
    def from_csc(cls, data, indices, indptr, shape, *, dual=True) -> SparseMatrix:
        """Make a matrix from compressed columns: as `from_csr`, with rows and columns in each other's place."""
        return cls._from_compressed("SparseMatrix.from_csc", data, indices, indptr, shape, dual, True)

    @classmethod
    def from_coo(cls, data, row, col, shape, *, dual=True) -> SparseMatrix:
        """Make a matrix from coordinates in any order; entries of one place are added, in the order given.

        Parameters
        ----------
        data, row, col : array (entries,)
        shape : (rows, columns)
        dual : {True, False, "auto"}
        """
        return cls._from_coordinates("SparseMatrix.from_coo", data, row, col, shape, dual)

    @classmethod
    def from_scipy(cls, matrix, *, dual=True) -> SparseMatrix:
        """Copy a SciPy sparse matrix or array, of any format, to the current device."""
        function = "SparseMatrix.from_scipy"
        device = arrays.current_device(function)
        move = np.asarray if device.is_emulated else arrays.cupy_or_raise(function).asarray
        return cls._from_foreign(function, matrix, move, dual)

    @classmethod
    def from_cupy(cls, matrix, *, dual=True) -> SparseMatrix:
        """Make a matrix from one of cupyx.scipy.sparse; in the emulator, whose arrays are NumPy's, from SciPy's."""
        function = "SparseMatrix.from_cupy"
        is_scipys = type(matrix).__module__.startswith("scipy.sparse")
        if is_scipys and devices.emulated() is None:
            hint = "SparseMatrix.from_scipy copies it there."
            checks.fail(TypeError, function, "matrix", "be on the GPU", f"SciPy's {type(matrix).__name__}", hint)
        return cls._from_foreign(function, matrix, lambda x: x, dual)

    @classmethod
    def _from_foreign(cls, function: str, matrix, move, dual) -> SparseMatrix:
        kind = getattr(matrix, "format", None)
        if not isinstance(kind, str) or not hasattr(matrix, "tocsr"):
            checks.fail(TypeError, function, "matrix", "be a sparse matrix", type(matrix).__name__)
        if kind == "coo":
            found = map(move, (matrix.data, matrix.row, matrix.col))
            return cls._from_coordinates(function, *found, matrix.shape, dual)
        if kind not in ("csr", "csc"):
            with arrays.current_of(matrix):
                matrix = matrix.tocsr()
        found = map(move, (matrix.data, matrix.indices, matrix.indptr))
        return cls._from_compressed(function, *found, matrix.shape, dual, kind == "csc")

    @classmethod
    def _from_coordinates(cls, function: str, data, row, col, shape, dual) -> SparseMatrix:
        check_dual(function, dual)
        shape = formats.check_shape(function, shape)
        device, (data, row, col) = given.taken(function, data=data, row=row, col=col)
        with device.current():
            rows, order, starts = formats.from_coordinates(function, device, data, row, col, shape)
            return cls(Store(device, False, rows, is_dual(device, rows, dual), data.size, order, starts))

    @classmethod
    def _from_compressed(cls, function, data, indices, indptr, shape, dual, is_csc: bool) -> SparseMatrix:
        check_dual(function, dual)
        shape = formats.check_shape(function, shape)
        device, taken = given.taken(function, data=data, indices=indices, indptr=indptr)
        order = shape[::-1] if is_csc else shape
        with device.current():
            rows = formats.from_compressed(function, device, *taken, order, "column" if is_csc else "row")
            return cls(Store(device, is_csc, rows, is_dual(device, rows, dual), taken[0].size))

    # --- what it is -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        rows, cols = self.shape
        return f"SparseMatrix {rows} x {cols} {self.dtype}: {self.nnz} entries"

    @property
    def _device(self):
        return self._store.device

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self._store.values.shape
        return (cols, rows) if self._store.given != self._transposed else (rows, cols)

    @property
    def dtype(self) -> np.dtype:
        return self._store.values.data.dtype

    @property
    def nnz(self) -> int:
        return self._store.values.nnz

    @property
    def T(self) -> SparseMatrix:
        """The transpose, a view."""
        return SparseMatrix(self._store, not self._transposed, self._conjugated)

    @property
    def H(self) -> SparseMatrix:
        """The conjugate transpose, a view."""
        return SparseMatrix(self._store, not self._transposed, not self._conjugated)

    @property
    @on_own_device
    def profile(self) -> Profile:
        """The rows of this matrix; ``A.T.profile`` has its columns."""
        return self._store.profile_of(self._transposed)

    @property
    def plan(self) -> Plan:
        """The kernel of each direction, and the memory it all takes."""
        store = self._store
        ways = (self._transposed, not self._transposed)
        kept = sum(rows.nbytes for rows in store.rows.values())
        kept += sum(x.nbytes for x in (store.order, store.starts, store.derived_order) if x is not None)
        products = *store.products.values(), *store.dense.values()
        kept += sum(x.nbytes for product in products for x in product.kept)
        return Plan(*(store.choices[way] for way in ways), len(store.rows) == 2, kept)

    @on_own_device
    def to_scipy(self):
        """Copy to a SciPy array on the host, CSR or CSC, with entries in the order that is kept. It synchronises.

        Values of 16 bits, with which SciPy does not compute, become float32.
        """
        try:
            from scipy import sparse
        except ImportError as error:
            raise ImportError("SparseMatrix.to_scipy: needs SciPy: pip install scipy") from error
        store = self._store
        rows, is_csc = store.values, store.given != self._transposed
        xp = formats.module_of(rows.data)
        host = [x.copy() if xp is np else xp.asnumpy(x) for x in (rows.data, rows.indices, rows.indptr)]
        if self.dtype.itemsize == 2:
            host[0] = host[0].astype(np.float32)
        if self._conjugated:
            host[0] = host[0].conj()
        return (sparse.csc_array if is_csc else sparse.csr_array)(tuple(host), shape=self.shape)

    @on_own_device
    def to_bsr(self, block: int) -> BSRMatrix:
        """Copy to a matrix of dense blocks, for products with dense matrices. It synchronises.

        Parameters
        ----------
        block : {4, 8, 16, 32}
            Rows and columns of a block. ``fill`` of the result is the share of the blocks' entries that this matrix
            has: near 1, the blocks are its own; near 1 / block, entries lie alone.
        """
        store, function = self._store, "SparseMatrix.to_bsr"
        rows = store.rows.get(self._transposed)
        if rows is None:
            rows = transposed(store.device, store.values)
        return from_rows(function, store.device, rows, block, self._conjugated)

    @on_own_device
    def tune(self) -> Plan:
        """Time a few kernels for each direction that has its own format, keep the fastest, and return the plan.

        It synchronises, takes some milliseconds for each 10^7 entries, and changes the last bits of results (another
        kernel adds in another order). Capture CUDA graphs after it, not before.
        """
        self._store.tune()
        return self.plan

    @on_own_device
    def update_values(self, data) -> None:
        """Replace the values, in the order in which they were given at construction, and keep all else.

        In place, so captured CUDA graphs multiply with the new values. The first call of a dual matrix sorts the
        entries by column and keeps the order (8 bytes an entry). Through a conjugated view, the matrix takes the
        conjugated values.

        Parameters
        ----------
        data : array (entries given,)
            Of the matrix's dtype, or one that NumPy promotes to it. Entries past ``indptr[-1]`` count as given, too.
        """
        function = "SparseMatrix.update_values"
        device, (data,) = given.taken(function, data=data)
        checks.shape(function, "data", data, (self._store.data_size,))
        given.on_device(function, self._store.device, device, "data")
        if given.promoted(function, "data", self.dtype, data.dtype) != self.dtype:
            checks.fail(TypeError, function, "data", f"have a dtype that {self.dtype} holds", data.dtype)
        data = formats.module_of(data).ascontiguousarray(data, self.dtype)
        self._store.update(data.conj() if self._conjugated else data)

    # --- products ---------------------------------------------------------------------------------------------------

    def matvec(self, x, alpha=1.0, beta=0.0, out=None):
        """Compute ``out = alpha * A @ x + beta * out`` in one pass.

        Parameters
        ----------
        x : array (columns,)
            A vector that is not contiguous, or narrower than the result, is copied first.
        alpha, beta : number or 0-d float64 array
            Arrays are read on the device. With beta 0 `out` is not read, with alpha 0 neither are A and x.
        out : array (rows,), optional
            Of the result's dtype. Where it overlaps x, the result is computed aside and copied.

        Returns
        -------
        array (rows,)

        Notes
        -----
        Nothing synchronises. After a first call, one with contiguous `x` and `out` of the result's dtype allocates
        nothing and can be captured in a CUDA graph.
        """
        return self._multiply("SparseMatrix.matvec", self._transposed, self._conjugated, x, alpha, beta, out)

    def rmatvec(self, x, alpha=1.0, beta=0.0, out=None):
        """Compute ``out = alpha * A.H @ x + beta * out``: `matvec` of the conjugate transpose."""
        way, conjugated = not self._transposed, not self._conjugated
        return self._multiply("SparseMatrix.rmatvec", way, conjugated, x, alpha, beta, out)

    @on_own_device
    def matmat(self, x, alpha=1.0, beta=0.0, out=None):
        """Compute ``out = alpha * A @ x + beta * out`` for a dense matrix x (columns, any) in one pass.

        Parameters
        ----------
        x : array (columns, any)
            One whose columns do not lie side by side, or narrower than the result, is copied first.
        alpha, beta : number or 0-d float64 array
            As in `matvec`.
        out : array (rows, any), optional
            Of the result's dtype and any strides; row-major is fastest. Where it overlaps x, the result is computed
            aside and copied.

        Returns
        -------
        array (rows, any)

        Notes
        -----
        The first call, and the first with another layout of columns, synchronise; later ones do not, and with `out`
        and an x that needs no copy they allocate nothing and can be captured in a CUDA graph. A transposed view of a
        matrix that keeps one format multiplies column by column.
        """
        function = "SparseMatrix.matmat"
        x, out, give = given.operands(function, self._store.device, x, out, (self.shape[1], None))
        result_dtype = given.promoted(function, "x", self.dtype, x.dtype)
        *factors, _kept = given.scalars(function, self._store.device, result_dtype, alpha, beta, out)
        target = given.target(function, self._store.device, out, (self.shape[0], x.shape[1]), result_dtype, factors[1])
        aside = target if out is None or not arrays.overlap(out, x) else target.copy()
        x = x.astype(result_dtype, copy=False)
        dense = self._store.dense.get(self._transposed)
        if dense is not None:
            for piece in given.pieces(x, aside):
                dense.run(*piece, *factors, self._conjugated)
        else:
            for column in range(x.shape[1]):
                x_column = formats.module_of(x).ascontiguousarray(x[:, column])
                y_column = aside[:, column].copy()
                self._run(self._transposed, self._conjugated, x_column, y_column, *factors, None)
                aside[:, column] = y_column
        if aside is not target:
            target[...] = aside
        return give(target)

    def __matmul__(self, x):
        if getattr(x, "ndim", None) == 2 and not isinstance(x, SparseMatrix):
            return self.matmat(x)
        return self.matvec(x)

    def __rmatmul__(self, x):
        return self.T.matmat(x.T).T if getattr(x, "ndim", None) == 2 else self.T.matvec(x)

    def _multiply(self, function: str, way: bool, conjugated: bool, x, alpha, beta, out):
        known = self._known(way, x, alpha, beta, out)
        if known is not None and given.are_apart(known, self._store.ready.get(known[0])):
            self._run(way, conjugated, x, out, (alpha, 0.0, 0), (beta, 0.0, 0), None)
            return out
        device = self._store.device
        if device.get_current() != device.ordinal:
            with device.current():
                return self._multiply(function, way, conjugated, x, alpha, beta, out)
        rows, cols = self.shape if way == self._transposed else self.shape[::-1]
        x, out, give = given.operands(function, self._store.device, x, out, (cols,))
        result_dtype = given.promoted(function, "x", self.dtype, x.dtype)
        *factors, _kept = given.scalars(function, self._store.device, result_dtype, alpha, beta, out)
        target = given.target(function, self._store.device, out, (rows,), result_dtype, factors[1])
        xp = formats.module_of(x)
        aside = target
        if not target.flags.c_contiguous or (out is not None and arrays.overlap(out, x)):
            aside = xp.ascontiguousarray(target).copy()
        x_taken = xp.ascontiguousarray(x, result_dtype)
        self._run(way, conjugated, x_taken, aside, *factors, None)
        if aside is not target:
            target[...] = aside
        elif known is not None and x_taken is x:
            self._store.ready[known[0]] = x.nbytes, out.nbytes
        return give(target)

    def _known(self, way: bool, x, alpha, beta, out) -> tuple | None:
        """Return what decides whether a call needs checks, and the addresses; None where it always does."""
        if out is None or not type(alpha) is type(beta) is float:
            return None
        found = arrays.signature((x, out))
        return found and ((way, *found[0]), found[1])

    def _apply(self, transposed: bool, x, y, alpha, beta, partials=None, early: bool = False) -> None:
        """Compute y = alpha * op(A) x + beta * y, op(A) being A or its conjugate transpose; for the solvers.

        x and y are contiguous arrays of the result's dtype on the matrix's device that do not overlap: nothing is
        checked. alpha and beta are numbers or 0-d float64 device arrays. With `partials`, a float64 array of at least
        `_num_partials(transposed)` entries, those entries receive parts of the sum of |y|^2, always the same ones. With
        alpha 0 and beta 1 nothing is done, and `partials` may stay as they are. With `early` launches are early ones.
        After one call it allocates nothing and can be captured.
        """
        way, conjugated = self._transposed != transposed, self._conjugated != transposed
        pointer = self._store.device.pointer
        alpha = (alpha, 0.0, 0) if type(alpha) is float else given.packed(alpha, pointer)
        beta = (beta, 0.0, 0) if type(beta) is float else given.packed(beta, pointer)
        self._run(way, conjugated, x, y, alpha, beta, partials, early)

    def _dense(self, transposed: bool) -> tuple:
        """Return what multiplies matrices by A or its conjugate transpose, for the solvers, and whether to conjugate.

        It is None where that format is not kept.
        """
        return self._store.dense.get(self._transposed != transposed), self._conjugated != transposed

    def _num_partials(self, transposed: bool) -> int:
        """How many entries of `partials` a product writes; 0 where it has no rows."""
        return self._store.products[self._transposed != transposed].num_partials

    def _run(self, way: bool, conjugated: bool, x, y, alpha: tuple, beta: tuple, partials, early=False) -> None:
        if y.size:
            self._store.products[way].run(x, y, alpha, beta, partials, conjugated, early)
