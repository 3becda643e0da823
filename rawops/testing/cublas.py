"""cuBLAS as a rival: `cublasGemmEx` on CuPy arrays.

It is the call behind `cupy.matmul` and `torch.mm`, made directly because CuPy refuses its own cuBLAS inside a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools

# cudaDataType and cublasComputeType_t by dtype.
_TYPES = {"float16": (2, 68), "bfloat16": (14, 68), "float32": (0, 68), "float64": (1, 70)}
_COMPUTE_TF32 = 77
_WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper


class _CuBLAS:
    """A handle with a workspace of its own, so that nothing is allocated during a capture."""

    def __init__(self) -> None:
        import cupy
        from cuda import pathfinder

        self._library = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cublas").abs_path)
        self._workspace = cupy.empty(_WORKSPACE_BYTES, "uint8")
        self._handle = ctypes.c_void_p()
        self.call("cublasCreate_v2", ctypes.byref(self._handle), handle=False)

    def call(self, name: str, *arguments, handle: bool = True) -> None:
        if handle:
            arguments = (self._handle, *arguments)
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with status {status}")

    def use(self, stream: int) -> None:
        self.call("cublasSetStream_v2", ctypes.c_void_p(stream))  # which resets the workspace as well
        workspace = ctypes.c_void_p(self._workspace.data.ptr)
        self.call("cublasSetWorkspace_v2", workspace, ctypes.c_size_t(_WORKSPACE_BYTES))


_cublas = functools.cache(_CuBLAS)  # one handle: the rivals run on one device, from one thread


def gemm(a, b, out, *, tf32: bool = False):
    """out = a @ b for (M, K), (K, N), (M, N) of one dtype; `a` and `b` row- or column-major, `out` row-major."""
    import cupy

    (m, k), n = a.shape, b.shape[1]
    kind, compute = _TYPES[out.dtype.name]
    scalar = ctypes.c_double if compute == 70 else ctypes.c_float
    # cuBLAS is column-major: compute the transpose of everything, out^T = b^T a^T.
    b_transposed, ldb = _layout(b)
    a_transposed, lda = _layout(a)
    cublas = _cublas()
    cublas.use(cupy.cuda.get_current_stream().ptr)
    cublas.call(
        "cublasGemmEx",
        *(b_transposed, a_transposed, n, m, k),
        *(ctypes.byref(scalar(1.0)), ctypes.c_void_p(b.data.ptr), kind, ldb),
        *(ctypes.c_void_p(a.data.ptr), kind, lda),
        *(ctypes.byref(scalar(0.0)), ctypes.c_void_p(out.data.ptr), kind, out.strides[0] // out.itemsize),
        *(_COMPUTE_TF32 if tf32 else compute, -1),
    )
    return out


def _layout(x) -> tuple[bool, int]:
    """Whether cuBLAS has to transpose the row-major `x` back, and its leading dimension in elements."""
    rows, columns = (stride // x.itemsize for stride in x.strides)
    if columns == 1:
        return False, max(rows, x.shape[1])
    return True, max(columns, x.shape[0])
