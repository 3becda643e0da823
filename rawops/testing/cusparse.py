"""cuSPARSE as a rival: `cusparseSpMV` on CuPy arrays.

It is the call behind `cupyx.cusparse.spmv`, made directly because CuPy refuses its own cuSPARSE in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools

_TYPES = {"float32": (0, ctypes.c_float), "float64": (1, ctypes.c_double)}  # cudaDataType
_INDEX_32I, _BASE_ZERO, _DEFAULT = 2, 0, 0


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
        matrix, vectors = ctypes.c_void_p(), (ctypes.c_void_p(), ctypes.c_void_p())
        sizes = [ctypes.c_int64(size) for size in (*shape, data.size)]
        pointers = [ctypes.c_void_p(a.data.ptr) for a in (indptr, indices, data)]
        checked("cusparseCreateCsr", ctypes.byref(matrix), *sizes, *pointers, _INDEX_32I, _INDEX_32I, _BASE_ZERO, kind)
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
