"""Split-K on Hopper's kernel: the slices of K are a batch of products into a workspace, which gemm_reduce adds up."""

from __future__ import annotations

from dataclasses import replace

from rawops import _gemm_sm90
from rawops._gemm_operands import Operand, pack_shape
from rawops._gemm_sm90_config import BLOCK_K, Problem
from rawops._gemm_sm90_specs import DIRECT

_MIN_BLOCKS = 4  # of K in a slice
# In the units of _gemm_sm90_config.py: the second launch, and the bytes of partial sums that are written and read.
_COST_OF_REDUCE = 900
_L2_BYTES = 6000


def slices_of(device, operands: dict, M: int, N: int, K: int, extents: tuple, activation: int) -> int:
    """Return over how many slices of K a product runs on Hopper's kernel: 1 if it is not split, or runs elsewhere."""
    if not _gemm_sm90.SM90.exists_on(device.capability) or operands["a"].itemsize != 2:
        return 1
    problem = _gemm_sm90.describe_problem(operands, M, N, K, extents, activation)
    if problem is None:
        return 1
    limits = device.sm_count, device.max_shared_bytes
    return slices(problem, _gemm_sm90.select_config(problem, *limits).cost, *limits)


def slices(problem: Problem, cost: int, sm_count: int, max_shared_bytes: int) -> int:
    """Return over how many slices of K to split a product that costs `cost` as it is: 1 if none pays; pure arithmetic.

    The slices are alike, whole blocks of K, and at most one for each SM.
    """
    if problem.batches > 1 or problem.K % BLOCK_K:
        return 1
    best, count = cost, 1
    for n in range(2, min(problem.k_blocks // _MIN_BLOCKS, sm_count) + 1):
        if problem.k_blocks % n == 0:
            config = _gemm_sm90.select_config(partial(problem, n), sm_count, max_shared_bytes)
            bytes_of_sums = 2 * n * problem.M * problem.N * problem.parts * 4
            found = config.cost + _COST_OF_REDUCE + bytes_of_sums // _L2_BYTES
            if found < best:
                best, count = found, n
    return count


def partial(problem: Problem, count: int) -> Problem:
    """Return the products of the slices; swiglu waits for the sum."""
    columns = problem.N * problem.parts
    return replace(problem, N=columns, K=problem.K // count, batches=count, finish=DIRECT, parts=1)


def describe(described: dict, count: int, M: int, N: int, K: int) -> tuple[dict, tuple, tuple[int, int, int], bytes]:
    """Describe the products of the slices.

    Returns
    -------
    dict of Operand
        a, b and the workspace as "out".
    tuple of 3 int
        The batch axes.
    tuple of 3 int
        The workspace: slices, rows, row stride.
    bytes
        GemmShape.
    """
    a, b = described["a"], described["b"]
    step, row_stride = K // count, -(-N // 4) * 4
    operands = {
        "a": replace(a, batch=[step * a.col, 0, 0]),
        "b": replace(b, batch=[step * b.row, 0, 0]),
        "out": Operand("float32", 4, 0, row_stride, 1, [M * row_stride, 0, 0]),
    }
    extents = (count, 1, 1)
    shape = pack_shape(operands, (M, N, step, N), extents, step, 0, M * row_stride)
    return operands, extents, (count, M, row_stride), shape
