"""cuBLAS as a rival: `cublasGemmEx` on CuPy arrays.

It is the call behind `cupy.matmul` and `torch.mm`, made directly because CuPy refuses its own cuBLAS in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools

# cudaDataType and cublasComputeType_t by dtype.
_TYPES = {"float16": (2, 68), "bfloat16": (14, 68), "float32": (0, 68), "float64": (1, 70)}
_COMPUTE_TF32 = 77
_WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper


def gemm(a, b, out, *, tf32: bool = False):
    """out = a @ b for (M, K), (K, N), (M, N) of one dtype; `a` and `b` row- or column-major, `out` row-major."""
    (m, k), n = a.shape, b.shape[1]
    kind, compute = _TYPES[out.dtype.name]
    scalar = ctypes.c_double if out.dtype.name == "float64" else ctypes.c_float
    # cuBLAS is column-major, where the same memory holds the transposes: out^T = b^T a^T.
    b_operation, ldb = _layout(b)
    a_operation, lda = _layout(a)
    _cublas().call(
        "cublasGemmEx",
        *(b_operation, a_operation, n, m, k),
        *(ctypes.byref(scalar(1.0)), ctypes.c_void_p(b.data.ptr), kind, ldb),
        *(ctypes.c_void_p(a.data.ptr), kind, lda),
        *(ctypes.byref(scalar(0.0)), ctypes.c_void_p(out.data.ptr), kind, n),
        *(_COMPUTE_TF32 if tf32 else compute, -1),
    )
    return out


class _CuBLAS:
    """A handle with a workspace of its own, so that nothing is allocated during a capture."""

    def __init__(self) -> None:
        import cupy
        from cuda import pathfinder

        self._cupy = cupy
        self._library = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cublas").abs_path)
        self._workspace = cupy.empty(_WORKSPACE_BYTES, "uint8")
        self._handle = ctypes.c_void_p()
        self._checked("cublasCreate_v2", ctypes.byref(self._handle))

    def call(self, name: str, *arguments) -> None:
        """Call a function of the library on CuPy's current stream."""
        stream = self._cupy.cuda.get_current_stream().ptr
        self._checked("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream))  # drops the workspace as well
        workspace = ctypes.c_void_p(self._workspace.data.ptr)
        self._checked("cublasSetWorkspace_v2", self._handle, workspace, ctypes.c_size_t(_WORKSPACE_BYTES))
        self._checked(name, self._handle, *arguments)

    def _checked(self, name: str, *arguments) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with status {status}")


@functools.cache
def _cublas() -> _CuBLAS:
    """The one handle: benchmarks run on one device, from one thread."""
    return _CuBLAS()


def _layout(x) -> tuple[int, int]:
    """cublasOperation_t that makes the transpose of `x` of its memory, and the leading dimension in elements."""
    rows, columns = (stride // x.itemsize for stride in x.strides)
    return (0, max(rows, x.shape[1])) if columns == 1 else (1, max(columns, x.shape[0]))
