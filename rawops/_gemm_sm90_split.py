"""Split-K on Hopper's kernel: the slices of K are a batch of products into a workspace, which gemm_reduce adds up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rawops import _gemm_sm90
from rawops._gemm_maps import SPAN
from rawops._gemm_operands import Operand, pack_shape
from rawops._gemm_sm90_config import BLOCK_K, Config, Problem, configure, select_config, tiles_at_a_time
from rawops._gemm_sm90_specs import DIRECT

_TILES = (64, 64), (64, 128), (128, 64), (128, 128)
_MIN_BLOCKS = 2  # of K in a slice

# In the units of _gemm_sm90_config.py. Fitted to 562 timings of 65 products with few tiles, in slices and not, on an
# H200, which they tell to 5 per cent near the fastest. Their choice takes 0.4 per cent longer than that one, 7 at most.
_START = 620  # of a launch, until the first stage is there
_LATENCY = 352  # of a stage under way
_L2_BYTES, _MEMORY_BYTES = 48000, 10500  # that all SMs take in
_SECOND_START, _CROWDED = 490, 80  # of the second launch, and more where the first takes more than half of the SMs
_SUMS_BYTES, _TILE_BYTES = 7200, 240  # of partial sums: that all SMs write and read again, that one writes
_CLUSTER = 350  # of two blocks, and twice as much of eight


@dataclass(frozen=True)
class Slices:
    """Over how many slices to split K, and the configuration of their products, whose cost is that of all launches."""

    count: int
    config: Config


def slices_of(device, operands: dict, M: int, N: int, K: int, extents: tuple, activation: int) -> Slices | None:
    """Return the slices of a product on Hopper's kernel; None if it is not split, or runs elsewhere."""
    if not _gemm_sm90.SM90.exists_on(device.capability) or operands["a"].itemsize != 2:
        return None
    problem = _gemm_sm90.describe_problem(operands, M, N, K, extents, activation)
    return None if problem is None else select_slices(problem, device.sm_count, device.max_shared_bytes)


def select_slices(problem: Problem, sm_count: int, max_shared_bytes: int) -> Slices | None:
    """Choose slices of K, None where none pays; pure arithmetic, see `predict`.

    An epilogue changes nothing: the sums have the same bits with any.
    """
    found = candidates(problem, sm_count, max_shared_bytes)
    if not found:
        return None
    return found[0] if found[0].config.cost < cost_without(problem, sm_count, max_shared_bytes) else None


def cost_without(problem: Problem, sm_count: int, max_shared_bytes: int) -> int:
    """Return what slices have to cost less than: the product as it is, without an epilogue."""
    whole = select_config(replace(problem, finish=DIRECT), sm_count, max_shared_bytes)
    cost = predict(problem, whole, 1, sm_count)
    if 16 * whole.blocks >= 15 * sm_count and min(problem.M, problem.N * problem.parts) <= 128:
        cost -= cost // 16  # all SMs wait for the memory as it is: partial sums are more to wait for than it seems
    return cost


def candidates(problem: Problem, sm_count: int, max_shared_bytes: int) -> list[Slices]:
    """Return all slices that leave no tile to a second round, the cheapest first.

    They are alike: whole blocks of K.
    """
    if problem.batches > 1 or problem.K % BLOCK_K:
        return []
    columns, found = problem.N * problem.parts, []
    for block_m, block_n in _TILES:
        if (block_m > 64 and problem.M <= 64) or (block_n > 64 and columns <= 64):
            continue
        tiles = -(-problem.M // block_m) * -(-columns // block_n)
        for count in range(2, min(problem.k_blocks // _MIN_BLOCKS, sm_count // tiles) + 1):
            if problem.k_blocks % count == 0:
                config = configure(partial(problem, count), sm_count, max_shared_bytes, block_m, block_n)
                cost = predict(problem, config, count, sm_count)
                found.append(Slices(count, replace(config, cost=cost)))
    return sorted(found, key=lambda s: (s.config.cost, s.count))


def predict(problem: Problem, config: Config, count: int, sm_count: int) -> int:
    """Predict the time of a product with few tiles, in `count` slices of K or, 1, as it is.

    Multiplying, what the L2 gives and what the memory gives are under way together, none of them evenly: the main loop
    takes the root of the sum of their squares. An operand that several tiles read comes a fifth slower.
    """
    columns, cluster = problem.N * problem.parts, config.cluster
    tiles_m, tiles_n = -(-problem.M // config.block_m), -(-columns // config.block_n)
    blocks = tiles_m * tiles_n * count * cluster
    rounds = -(-blocks // (tiles_at_a_time(cluster, sm_count) * cluster))
    k_blocks = -(-problem.k_blocks // (count * cluster))
    rows = min(config.block_m, -(-problem.M // 8) * 8) if problem.a_k_major else config.block_m
    k_block = max((config.block_n + 4) * config.block_m * 17 // 2048, _LATENCY // config.stages)
    multiplying = rounds * k_blocks * k_block
    from_l2 = blocks * k_blocks * (rows + config.block_n) * SPAN // _L2_BYTES
    from_memory = problem.M * (6 if tiles_n > 1 else 5) + columns * (6 if tiles_m > 1 else 5)
    from_memory = from_memory * problem.K * problem.itemsize // (5 * _MEMORY_BYTES)
    main_loop = math.isqrt(multiplying**2 + from_l2**2 + from_memory**2)
    cost = _START + main_loop
    if cluster > 1:
        cost += rounds * _CLUSTER
    if cluster > 2:  # many parts are on their way from other SMs at a time
        cost += rounds * _CLUSTER + main_loop // 4
    if count > 1:
        cost += _SECOND_START + (_CROWDED if 2 * blocks > sm_count else 0)
        cost += config.block_m * config.block_n * 4 // _TILE_BYTES
        cost += count * problem.M * columns * 4 // _SUMS_BYTES
    return cost


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
