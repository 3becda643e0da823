"""cuSPARSE as a rival: `cusparseSpMV` and `cusparseSpMM` on CuPy arrays.

They are the calls behind `cupyx.cusparse`, made directly because CuPy refuses its own cuSPARSE in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools

_TYPES = {"float32": (0, ctypes.c_float), "float64": (1, ctypes.c_double), "float16": (2, ctypes.c_float)}
_INDEX_32I, _BASE_ZERO, _DEFAULT = 2, 0, 0
_COLUMN_MAJOR, _ROW_MAJOR = 1, 2
_ALGORITHMS = {"default": 0, "CSR_ALG1": 4, "CSR_ALG2": 6, "CSR_ALG3": 12, "BLOCKED_ELL_ALG1": 13}


class Spmv:
    """y = A x, or A^T x, on descriptors and a buffer that are made once.

    Parameters
    ----------
    data, indices, indptr : CuPy array
        Compressed rows, float32 or float64 with int32 indices and pointers.
    shape : tuple of int
    x, y : CuPy array
    transposed : bool
    preprocessed : bool
        Have cuSPARSE analyse the matrix first, which `cupyx.cusparse.spmv` does not.
    """

    def __init__(self, data, indices, indptr, shape, x, y, *, transposed=False, preprocessed=False) -> None:
        import cupy

        self._arrays = data, indices, indptr, x, y
        kind, scalar = _TYPES[data.dtype.name]
        self._one, self._zero = scalar(1), scalar(0)
        matrix, vectors = csr(data, indices, indptr, shape), (ctypes.c_void_p(), ctypes.c_void_p())
        for vector, a in zip(vectors, (x, y), strict=True):
            pointer = ctypes.c_void_p(a.data.ptr)
            checked("cusparseCreateDnVec", ctypes.byref(vector), ctypes.c_int64(a.size), pointer, kind)
        one, zero = ctypes.byref(self._one), ctypes.byref(self._zero)
        self._arguments = [int(transposed), one, matrix, vectors[0], zero, vectors[1], kind, _DEFAULT]
        size = ctypes.c_size_t()
        checked("cusparseSpMV_bufferSize", handle(), *self._arguments, ctypes.byref(size))
        self._buffer = cupy.empty(max(size.value, 1), "uint8")
        self._arguments.append(ctypes.c_void_p(self._buffer.data.ptr))
        if preprocessed:
            checked("cusparseSpMV_preprocess", handle(), *self._arguments)

    def __call__(self) -> None:
        """Launch on CuPy's current stream."""
        checked("cusparseSpMV", handle(), *self._arguments)


class Spmm:
    """y = A x for dense x and y, on descriptors and a buffer that are made once.

    Parameters
    ----------
    a : ctypes.c_void_p
        The matrix, of `csr` or `blocked_ell`.
    x, y : CuPy array
        Row-major both, or column-major both; float32, float64 or float16 (with float32 sums).
    algorithm : str
        "default", "CSR_ALG1", "CSR_ALG2", "CSR_ALG3" or "BLOCKED_ELL_ALG1".
    preprocessed : bool
        Have cuSPARSE analyse the matrix first.
    """

    def __init__(self, a, x, y, *, algorithm="default", preprocessed=False) -> None:
        import cupy

        self._arrays = x, y
        kind, scalar = _TYPES[x.dtype.name]
        self._one, self._zero = scalar(1), scalar(0)
        dense = ctypes.c_void_p(), ctypes.c_void_p()
        for matrix, array in zip(dense, (x, y), strict=True):
            is_row_major = array.flags.c_contiguous
            sizes = [ctypes.c_int64(size) for size in (*array.shape, array.shape[1 if is_row_major else 0])]
            order = _ROW_MAJOR if is_row_major else _COLUMN_MAJOR
            checked("cusparseCreateDnMat", ctypes.byref(matrix), *sizes, ctypes.c_void_p(array.data.ptr), kind, order)
        compute = _TYPES["float32" if kind == _TYPES["float16"][0] else x.dtype.name][0]
        one, zero = ctypes.byref(self._one), ctypes.byref(self._zero)
        self._arguments = [0, 0, one, a, dense[0], zero, dense[1], compute, _ALGORITHMS[algorithm]]
        size = ctypes.c_size_t()
        checked("cusparseSpMM_bufferSize", handle(), *self._arguments, ctypes.byref(size))
        self._buffer = cupy.empty(max(size.value, 1), "uint8")
        self._arguments.append(ctypes.c_void_p(self._buffer.data.ptr))
        if preprocessed:
            checked("cusparseSpMM_preprocess", handle(), *self._arguments)

    def __call__(self) -> None:
        """Launch on CuPy's current stream."""
        checked("cusparseSpMM", handle(), *self._arguments)


def csr(data, indices, indptr, shape):
    """Return a descriptor of compressed rows; the caller keeps the arrays."""
    matrix, (kind, _) = ctypes.c_void_p(), _TYPES[data.dtype.name]
    sizes = [ctypes.c_int64(size) for size in (*shape, data.size)]
    pointers = [ctypes.c_void_p(a.data.ptr) for a in (indptr, indices, data)]
    checked("cusparseCreateCsr", ctypes.byref(matrix), *sizes, *pointers, _INDEX_32I, _INDEX_32I, _BASE_ZERO, kind)
    return matrix


def blocked_ell(data, indices, shape):
    """Return a descriptor of Blocked-ELL, data (rows, width) and block columns; the caller keeps the arrays."""
    matrix, (kind, _) = ctypes.c_void_p(), _TYPES[data.dtype.name]
    block = shape[0] // indices.shape[0]
    sizes = [ctypes.c_int64(size) for size in (*shape, block, data.shape[1])]
    pointers = [ctypes.c_void_p(a.data.ptr) for a in (indices, data)]
    checked("cusparseCreateBlockedEll", ctypes.byref(matrix), *sizes, *pointers, _INDEX_32I, _BASE_ZERO, kind)
    return matrix


@functools.cache
def _library():
    from cuda import pathfinder

    return ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cusparse").abs_path)


@functools.cache
def _handle():
    found = ctypes.c_void_p()
    checked("cusparseCreate", ctypes.byref(found))
    return found


def handle():
    """The one handle, on CuPy's current stream."""
    import cupy

    checked("cusparseSetStream", _handle(), ctypes.c_void_p(cupy.cuda.get_current_stream().ptr))
    return _handle()


def checked(name: str, *arguments) -> None:
    """Call a function of the library; RuntimeError if it fails."""
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with status {status}")
