"""Split-K on Hopper's kernel: the slices of K are a batch of products into a workspace, which gemm_reduce adds up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rawops import _gemm_sm90
from rawops._gemm_maps import SPAN
from rawops._gemm_operands import Operand, pack_shape
from rawops._gemm_sm90_config import BLOCK_K, Config, Problem, configure, select_config, tiles_at_a_time
from rawops._gemm_sm90_specs import DIRECT, PARTIAL

_ALONE, _PAIRS, _SQUARES = {}, {"pairs": True}, {"squares": True}
_WAYS = (  # tiles, and whether blocks share what they load
    ((64, 64), _ALONE),
    ((64, 64), _SQUARES),
    ((64, 128), _ALONE),
    ((64, 128), _PAIRS),
    ((64, 128), _SQUARES),
    ((128, 64), _ALONE),
    ((128, 128), _ALONE),
    ((128, 128), _PAIRS),
    ((128, 128), _SQUARES),
)
_MIN_BLOCKS = 2  # of K in a slice
_AHEAD = 4  # blocks of K that the L2 is asked for early, where blocks come early: to SMs that are idle, and
_SQUARES_AHEAD = 5  # by squares, whose launch leaves few SMs idle: they come when the products before have ended

# In the units of _gemm_sm90_config.py. Fitted to 380 timings of 33 products with few tiles, in slices and not, on an
# H200, and those of squares and of the second launch to 140 of 45 later ones, which they tell to 5 per cent near the
# fastest. Their choice takes 1 per cent longer than that, 10 at most.
_START = 700  # of a launch, until the first stage is there
_LATENCY = 300  # of a stage under way
_L2_BYTES, _MEMORY_BYTES = 32000, 10200  # that all SMs take in
_SECOND_START, _EARLY = 215, 30  # of the second launch, and what comes early is spared
_SUMS_BYTES, _TILE_BYTES = 8200, 120  # of partial sums: that all SMs write and read again, that one writes
_CLUSTER = 350  # of two blocks, and twice as much of eight
_SQUARES_START, _SQUARES_BYTES = 200, 480  # of four blocks; that one takes in


@dataclass(frozen=True)
class Slices:
    """Over how many slices to split K, and the configuration of their products, whose cost is that of all launches.

    A block asks the L2 for its first `ahead` blocks of K while it waits for the launch before.
    """

    count: int
    config: Config
    ahead: int = 0


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
        cost -= cost // 14  # all SMs wait for the memory as it is: partial sums are more to wait for than it seems
    return cost


def candidates(problem: Problem, sm_count: int, max_shared_bytes: int) -> list[Slices]:
    """Return all slices that leave no tile to a second round, the cheapest first.

    They are alike, whole blocks of K, but for the last one, which may be shorter.
    """
    if problem.batches > 1 or (problem.parts == 2 and problem.N % 8):  # sums lie by eight columns
        return []
    columns, found = problem.N * problem.parts, []
    for (block_m, block_n), sharing in _WAYS:
        tiles_m, tiles_n = -(-problem.M // block_m), -(-columns // block_n)
        squares = sharing is _SQUARES
        if (sharing and tiles_m % 2) or (squares and tiles_n % 2):
            continue
        places = tiles_at_a_time(4, sm_count) * 4 if squares else sm_count
        most = min(problem.k_blocks // _MIN_BLOCKS, places // (tiles_m * tiles_n))
        wasted = max(block_m, block_n) > 64 >= problem.M or block_n > 64 >= columns  # of few rows, more SMs share b
        if most < 2 or wasted:
            continue
        config = configure(partial(problem, most), sm_count, max_shared_bytes, block_m, block_n, **sharing)
        for count in range(2, most + 1):
            if step_of(problem.K, count) * (count - 1) < problem.K:  # the last slice has something
                config = replace(config, blocks=tiles_m * tiles_n * count)
                cost = predict(problem, config, count, sm_count)
                ahead = _SQUARES_AHEAD if squares else _AHEAD if 2 * config.blocks <= sm_count else 0
                found.append(Slices(count, replace(config, cost=cost), ahead))
    return sorted(found, key=lambda s: (s.config.cost, s.count))


def predict(problem: Problem, config: Config, count: int, sm_count: int) -> int:
    """Predict the time of a product with few tiles, in `count` slices of K or, 1, as it is.

    Multiplying, what the L2 gives and what the memory gives are under way together, none of them evenly: the main loop
    takes the root of the sum of their squares.
    """
    columns, cluster = problem.N * problem.parts, config.cluster
    tiles_m, tiles_n = -(-problem.M // config.block_m), -(-columns // config.block_n)
    blocks = tiles_m * tiles_n * count * cluster
    rounds = -(-blocks // (tiles_at_a_time(cluster, sm_count) * cluster))
    k_blocks = -(-problem.k_blocks // (count * cluster))
    k_block = max((config.block_n + 4) * config.block_m // 160, _LATENCY // config.stages)
    multiplying = rounds * k_blocks * k_block
    from_l2, from_memory = _traffic(problem, config, (tiles_m, tiles_n), blocks, k_blocks)
    main_loop = math.isqrt(multiplying**2 + from_l2**2 + from_memory**2)
    cost = _START + main_loop + (_SQUARES_START if config.squares else 0)
    if cluster > 1:
        cost += rounds * _CLUSTER
    if cluster > 2:  # many parts are on their way from other SMs at a time
        cost += rounds * _CLUSTER + main_loop // 4
    if count > 1:
        cost += _SECOND_START - (_EARLY if 2 * blocks <= sm_count or config.squares else 0)
        cost += config.block_m * config.block_n * 4 // _TILE_BYTES
        cost += count * problem.M * columns * 4 // _SUMS_BYTES
    return cost


def _traffic(problem: Problem, config: Config, tiles: tuple[int, int], blocks: int, k_blocks: int) -> tuple[int, int]:
    """Return how long the L2 and the memory take for a and b.

    An operand that several tiles read comes a seventh slower, but not where two blocks share it: of the b of a pair,
    the L2 gives three fifths as much. Of squares the limit is what one SM takes in, with what lies outside, and the
    memory has a sixth of it ready.
    """
    (tiles_m, tiles_n), (block_m, block_n) = tiles, (config.block_m, config.block_n)
    rows, columns = problem.M, problem.N * problem.parts
    down, across = 2 if config.pairs or config.squares else 1, 2 if config.squares else 1  # tiles that share b, and a
    if config.squares:
        rows, columns = tiles_m * block_m, tiles_n * block_n
        from_l2 = k_blocks * (block_m + block_n) * SPAN // _SQUARES_BYTES
    else:
        read = min(block_m, -(-problem.M // 8) * 8) if problem.a_k_major else block_m
        taken_in = read + (block_n * 3 // 5 if config.pairs else block_n)
        from_l2 = blocks * k_blocks * taken_in * SPAN // _L2_BYTES
    lines = rows * (8 if tiles_n > across else 7) + columns * (8 if tiles_m > down else 7)
    from_memory = lines * problem.K * problem.itemsize // (7 * _MEMORY_BYTES)
    return from_l2, from_memory * 5 // 6 if config.squares else from_memory


def partial(problem: Problem, count: int) -> Problem:
    """Return the products of the slices; swiglu waits for the sum."""
    columns = problem.N * problem.parts
    return replace(problem, N=columns, K=step_of(problem.K, count), batches=count, finish=PARTIAL, parts=1)


def step_of(K: int, count: int) -> int:
    """Return how much of K a slice has, whole blocks; the last one may have less."""
    return -(-K // (BLOCK_K * count)) * BLOCK_K


def describe(described: dict, slices: Slices, M: int, N: int, K: int) -> tuple[dict, tuple, tuple, bytes]:
    """Describe the products of the slices.

    Returns
    -------
    dict of Operand
        a, b and the workspace as "out".
    tuple of 3 int
        The batch axes.
    tuple of 3 int
        The workspace: slices, rows, row stride; in each slice, 16 rows x 8 columns after each other.
    bytes
        GemmShape.
    """
    a, b = described["a"], described["b"]
    count, step, rows, row_stride = slices.count, step_of(K, slices.count), -(-M // 16) * 16, -(-N // 8) * 8
    operands = {
        "a": replace(a, batch=[0, 0, 0]),
        "b": replace(b, batch=[0, 0, 0]),
        "out": Operand("float32", 4, 0, row_stride, 16, [rows * row_stride, 0, 0]),
    }
    extents = (count, 1, 1)
    shape = pack_shape(operands, (M, N, step, N), extents, slices.ahead * BLOCK_K, 0, rows * row_stride)
    return operands, extents, (count, rows, row_stride), shape
