"""A product of a single row with a b that is contiguous along K: a kernel that does nothing but stream b."""

from __future__ import annotations

from rawops._gemm_config import DTYPES, LAYOUT_CHOICES, PARAMS, SWIGLU
from rawops._runtime import dtypes
from rawops._runtime.kernel import Function, KernelSpec

THREADS = 256  # of a block
_WARPS_PER_SM = 12  # that keep enough loads on the way
_LONG = 16384  # bytes of a column

GEMV = KernelSpec(
    source="gemv.cu",
    entry="rawops::gemv",
    template=("dtype", "out_dtype", "split", "unroll", "activation"),
    choices={
        "dtype": DTYPES,
        "out_dtype": DTYPES,
        "split": (2, 4, 8),  # warps that share the K of a group of columns
        "unroll": (1, 2),  # steps of K whose loads a warp has on the way
        "activation": LAYOUT_CHOICES["activation"],
    },
    smoke=[
        {"dtype": dtype, "out_dtype": dtype, "split": split, "unroll": unroll, "activation": activation}
        for dtype, split, unroll, activation in (
            ("bfloat16", 2, 2, 0),
            ("float16", 4, 1, SWIGLU),
            ("float32", 8, 2, 0),
            ("float64", 2, 2, 0),
        )
    ],
    params=PARAMS,
)


def plan(device, dtype: str, out_dtype: str, activation: int, cols: int, K: int) -> tuple[Function, int]:
    """Choose the instance: among how many warps K is shared.

    Parameters
    ----------
    device : Device
    dtype, out_dtype : str
    activation : int
        The kernels' number.
    cols, K : int
        Columns of the result, rows of b.

    Returns
    -------
    Function
    int
        Its number of blocks.
    """
    groups = -(-cols * max(dtypes.itemsize(dtype), 4) // 16)  # of as many accumulators as 16 bytes hold
    split = _split(groups, K * dtypes.itemsize(dtype), device.sm_count, activation == SWIGLU)
    unroll = 1 if activation == SWIGLU else 2  # twice the columns
    choices = {"dtype": dtype, "out_dtype": out_dtype, "split": split, "unroll": unroll, "activation": activation}
    return GEMV.kernel(device, **choices), -(-groups * split // (THREADS // 32))


def _split(groups: int, bytes_of_k: int, sm_count: int, gated: bool) -> int:
    """Return the warps that share a group; as measured on an H200.

    A block of eight has one group and registers for two others beside it on its SM. Two or four do where columns are
    many enough to keep all SMs busy in one round, and better if groups are long: rounds of eight end raggedly.
    """
    fewest = next((n for n in (2, 4) if groups * n >= _WARPS_PER_SM * sm_count), 8)
    rounds = groups / (3 * sm_count)
    return fewest if gated or (bytes_of_k > _LONG and rounds < 8) else 8
