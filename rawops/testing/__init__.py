"""What tests, benchmarks and the demo share: float64 references, tolerances, timing. It imports no kernel code."""

from __future__ import annotations


def has_gpu() -> bool:
    """Whether CuPy is installed and sees a CUDA device."""
    try:
        import cupy
    except ImportError:
        return False
    return cupy.cuda.is_available()
