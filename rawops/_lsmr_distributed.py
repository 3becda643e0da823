"""A matrix whose rows lie in blocks on several GPUs, one process each: u is split, v is everywhere the same."""

from __future__ import annotations

import numpy as np

from rawops._lsmr_kernels import Pair, Vectors
from rawops._runtime.checks import fail


class DistributedOperator:
    """The block of rows of a matrix that this process has.

    Every process makes one from its own block and calls the solver with its own part of b; all get the same x, stop
    code and norms. A product with A^H is summed over the processes, and so are norms of vectors of m entries: an
    iteration sends n numbers and one. Iterations are launched without a CUDA graph.

    Parameters
    ----------
    A : SparseMatrix, array (rows here, n) or operator
        This process's rows; there may be none.
    communicator : cupyx.distributed.NCCLBackend, or an object with its ``all_reduce(in_array, out_array)``
        Sums arrays over all processes, on CuPy's current stream. A `cupy.cuda.nccl.NcclCommunicator` will do too.

    Attributes
    ----------
    shape : tuple of int
        Of the block.
    dtype : numpy.dtype
    """

    def __init__(self, A, communicator) -> None:
        if not (hasattr(communicator, "all_reduce") or hasattr(communicator, "allReduce")):
            rule, got = "have all_reduce or be an NcclCommunicator", type(communicator).__name__
            fail(TypeError, "DistributedOperator", "communicator", rule, got)
        if not (hasattr(A, "shape") and hasattr(A, "dtype")):
            fail(TypeError, "DistributedOperator", "A", "be a matrix or an operator", type(A).__name__)
        self.A, self.communicator = A, communicator
        self.shape, self.dtype = tuple(A.shape), np.dtype(A.dtype)

    def all_reduce(self, x) -> None:
        """Replace a contiguous array by its sum over all processes."""
        if hasattr(self.communicator, "all_reduce"):
            self.communicator.all_reduce(x, x)
            return
        from cupy.cuda import get_current_stream, nccl

        reals = x.view(x.real.dtype)
        kind = nccl.NCCL_FLOAT32 if reals.itemsize == 4 else nccl.NCCL_FLOAT64
        pointer, stream = reals.data.ptr, get_current_stream().ptr
        self.communicator.allReduce(pointer, pointer, reals.size, kind, nccl.NCCL_SUM, stream)


class DistributedProduct:
    """The product with a `DistributedOperator`; `product` is that with the block."""

    def __init__(self, operator: DistributedOperator, product) -> None:
        self.operator, self.product = operator, product
        self.shape, self.dtype, self.device = product.shape, product.dtype, product.device
        has_entries = getattr(product, "column_squares", None) is not None
        self.column_squares = self._column_squares if has_entries else None

    def bind(self, vectors: Vectors) -> BoundDistributed:
        return BoundDistributed(self.operator, self.product, vectors)

    def total_rows(self, device) -> int:
        """Return the number of rows on all processes. It synchronises."""
        rows = device.empty((1,), np.dtype("float64"))
        rows.fill(self.shape[0])
        self.operator.all_reduce(rows)
        return int(rows[0])

    def _column_squares(self):
        """Return the squared norms of the whole columns."""
        squares = self.product.column_squares()
        self.operator.all_reduce(squares)
        return squares


class BoundDistributed:
    """The product with its workspace."""

    is_captured = False

    def __init__(self, operator: DistributedOperator, product, vectors: Vectors) -> None:
        self.vectors, self._all_reduce, self._block = vectors, operator.all_reduce, product.bind(vectors)
        self._n = product.shape[1]
        self._w = vectors.empty(self._n)
        self._partials = {t: vectors.partials(self._block.num_partials(t)) for t in (False, True)}

    def num_partials(self, transposed: bool) -> int:
        return self.vectors.blocks(self._n) if transposed else 1

    def apply(self, transposed: bool, x, y, scalars: Pair, partials) -> None:
        own = self._partials[transposed]
        if transposed:
            self._block.apply(True, x, self._w, self.vectors.constants(1, 0), own)
            self._all_reduce(self._w)
            self.vectors.combine(scalars, self._w, y, partials)
        else:
            self._block.apply(False, x, y, scalars, own)
            self.vectors.shorten(own, partials)
            self._all_reduce(partials)

    def share(self, partials):
        """Return the sum over all processes of what are partial sums of one here."""
        total = self.vectors.partials(1)
        self.vectors.shorten(partials, total)
        self._all_reduce(total)
        return total
