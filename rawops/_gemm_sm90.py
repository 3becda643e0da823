"""The host side of gemm_sm90.cu: what TMA can read, which tile, and the launch.

`rawops.gemm` asks `supports` and, if so, keeps what `plan` returns. Operands are its `_Operand`s: strides in elements,
`alignment` the address modulo 16, three batch axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from rawops._runtime import dtypes
from rawops._runtime.kernel import Function, KernelSpec
from rawops._runtime.tensormap import TensorMap

BLOCK_M, BLOCK_K = 128, 64
PLAIN, STAGED, DIRECT = range(3)  # Finish in gemm_sm90.cu
_SWIGLU = 5  # Activation in epilogue.cuh
THREADS = 384

_SPAN = 128  # bytes of a swizzled row in shared memory
_SLAB_BYTES = 8 * 16 * 32 * 4  # of the eight warps, for every finish but the plain one
_MAX_STAGES = 8
_RASTER_ROWS = 8

# Costs in units of one column of one K block: what the tensor cores take for 128 x 1 x 64, 4 cycles.
# Measured on an H200 at 4096 x 6144 x 4096 with tiles 128, 192 and 256 wide: a K block costs 31 columns more than it
# has, for the copies of A. A tile costs its epilogue and the start of its main loop.
_COST_OF_A = 32
_COST_OF_TILE = 300
_COST_OF_SPLIT = 1750  # the second launch and the partial sums of split-K, and
_SPLIT_SLOWNESS = 2  # how much longer the kernel that can do it takes for the same work

SM90 = KernelSpec(
    source="gemm_sm90.cu",
    entry="rawops::gemm_sm90",
    template=("dtype", "out_dtype", "block_n", "stages", "a_k_major", "b_k_major", "activation", "finish", "ping_pong"),
    choices={
        "dtype": ("float16", "bfloat16"),
        "out_dtype": ("float16", "bfloat16", "float32"),
        "block_n": tuple(range(16, 257, 16)),
        "stages": tuple(range(2, _MAX_STAGES + 1)),
        "a_k_major": (True, False),
        "b_k_major": (True, False),
        "activation": tuple(range(6)),
        "finish": (PLAIN, STAGED, DIRECT),
        "ping_pong": (False, True),
    },
    smoke=[
        dict(zip(("dtype", "out_dtype", "block_n", "stages", "a_k_major", "b_k_major"), values[:6], strict=True))
        | dict(zip(("activation", "finish", "ping_pong"), values[6:], strict=True))
        for values in (
            ("bfloat16", "bfloat16", 256, 3, True, True, 0, PLAIN, False),
            ("float16", "float16", 256, 3, True, False, 0, PLAIN, False),
            ("float16", "float16", 192, 4, False, True, 0, PLAIN, False),
            ("bfloat16", "bfloat16", 128, 5, False, False, 0, PLAIN, True),
            ("bfloat16", "bfloat16", 256, 3, True, True, 2, STAGED, False),
            ("bfloat16", "bfloat16", 256, 3, True, True, 5, STAGED, False),
            ("bfloat16", "float32", 208, 5, True, True, 0, DIRECT, False),
        )
    ],
    min_arch=90,
    max_arch=90,
)

# --- which tile -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What a configuration depends on. N counts columns of D; `parts` is 2 for swiglu, whose b is twice as wide."""

    M: int
    N: int
    K: int
    batches: int = 1
    a_k_major: bool = True
    b_k_major: bool = True
    finish: int = PLAIN
    parts: int = 1

    @property
    def k_blocks(self) -> int:
        return -(-self.K // BLOCK_K)


@dataclass(frozen=True)
class Config:
    """A tile `BLOCK_M` x `block_n` of a @ b and its ring, the order of tiles, and what that costs.

    Blocks that run at the same time work on `raster_rows` rows of tiles, to share operands in the L2.
    """

    block_n: int
    stages: int
    ping_pong: bool
    raster_rows: int
    blocks: int
    waves: int
    cost: int

    def shared_bytes(self, problem: Problem) -> int:
        return self.stages * _stage_bytes(self.block_n) + _finish_bytes(problem, self.block_n, self.ping_pong)


def select_config(problem: Problem, sm_count: int, max_shared_bytes: int) -> Config:
    """Choose the tile that finishes first; pure arithmetic.

    Every SM works off ``waves = ceil(tiles / sm_count)`` tiles. Two consumers that share a tile take
    ``waves * (k_blocks * (block_n + 32) + 300)``; if they take turns (`ping_pong`), the 300 of all tiles but the last
    hide behind main loops, but tiles are at most 128 wide.
    """
    widths = range(16, 257, 16)
    if not problem.b_k_major:  # boxes of 64 columns
        widths = range(64 * problem.parts, 257, 64 * problem.parts)
    elif problem.parts == 2:
        widths = range(32, 257, 32)
    candidates = [
        _config(problem, width, ping_pong, sm_count, max_shared_bytes)
        for ping_pong in (False, True)
        for width in widths
        if width <= 128 or not ping_pong
    ]
    return min(candidates, key=lambda c: (c.cost, c.ping_pong, -c.block_n))


def _config(problem: Problem, block_n: int, ping_pong: bool, sm_count: int, max_shared_bytes: int) -> Config:
    tiles_m, tiles_n = -(-problem.M // BLOCK_M), -(-problem.N * problem.parts // block_n)
    tiles = tiles_m * tiles_n * problem.batches
    waves = -(-tiles // sm_count)
    main_loop = problem.k_blocks * (block_n + _COST_OF_A)
    cost = waves * max(main_loop, _COST_OF_TILE) + _COST_OF_TILE if ping_pong else waves * (main_loop + _COST_OF_TILE)
    free = max_shared_bytes - _finish_bytes(problem, block_n, ping_pong)
    stages = min(free // _stage_bytes(block_n), _MAX_STAGES)
    bands = -(-tiles_m // _RASTER_ROWS)
    return Config(block_n, stages, ping_pong, -(-tiles_m // bands), min(tiles, sm_count), waves, cost)


def wants_split(problem: Problem, config: Config, sm_count: int) -> bool:
    """Tell whether so few SMs are busy that another kernel is faster, because it splits K over all of them."""
    work = problem.k_blocks * -(-problem.M // BLOCK_M) * problem.N * problem.parts * problem.batches
    return _SPLIT_SLOWNESS * work / sm_count + _COST_OF_SPLIT < config.cost


def _stage_bytes(block_n: int) -> int:
    """Shared memory of a stage: both operands, and the barriers `full` and `empty`."""
    return (BLOCK_M + block_n) * _SPAN + 16


def _finish_bytes(problem: Problem, block_n: int, ping_pong: bool) -> int:
    """Shared memory beside the ring: staging tiles of both consumers, slabs of all warps, the barriers of turns."""
    rows = 2 * BLOCK_M if ping_pong else BLOCK_M
    staging = 0 if problem.finish == DIRECT else rows * block_n // problem.parts * 2
    return staging + (0 if problem.finish == PLAIN else _SLAB_BYTES) + 16


# --- from operands to a launch --------------------------------------------------------------------------------------


def supports(device, operands: dict, M: int, N: int, K: int, extents: tuple, activation: int) -> bool:
    """Tell whether the kernel can run a product, and is the one to do so: Hopper, 16 bits, readable by TMA.

    Parameters
    ----------
    device : Device
    operands : dict
        "a", "b", "out" and those of "c", "bias", "residual" that there are.
    M, N, K : int
        N counts columns of b.
    extents : tuple of 3 int
        The batch axes.
    activation : int
        The kernels' number; 5 is swiglu.
    """
    if not SM90.exists_on(device.capability):
        return False
    problem = _problem(operands, M, N, K, extents, activation)
    if problem is None:
        return False
    config = select_config(problem, device.sm_count, device.max_shared_bytes)
    return not wants_split(problem, config, device.sm_count)


@dataclass(frozen=True)
class Plan:
    """A product ready to launch but for its pointers."""

    config: Config
    kernel: Function
    grid: tuple[int, int, int]
    shared_bytes: int
    maps: Callable[[int, int, int], bytes]  # from the addresses of a, b and out

    def run(self, a: int, b: int, out: int, params: bytes) -> None:
        """Launch; `params` is the GemmParams that all GEMM kernels take."""
        values = (self.maps(a, b, out), params, self.config.raster_rows)
        self.kernel.launch(self.grid, (THREADS, 1, 1), values, self.shared_bytes)


def plan(device, operands: dict, M: int, N: int, K: int, extents: tuple, activation: int) -> Plan:
    """Prepare a product that `supports` accepts; the same arguments."""
    a, b, out = operands["a"], operands["b"], operands["out"]
    problem = _problem(operands, M, N, K, extents, activation)
    config = select_config(problem, device.sm_count, device.max_shared_bytes)
    kernel = SM90.kernel(
        device,
        dtype=a.dtype,
        out_dtype=out.dtype,
        block_n=config.block_n,
        stages=config.stages,
        a_k_major=problem.a_k_major,
        b_k_major=problem.b_k_major,
        activation=activation,
        finish=problem.finish,
        ping_pong=config.ping_pong,
    )
    width = config.block_n // problem.parts
    box_cols = next(cols for cols in (64, 32, 16) if width % cols == 0)
    box_rows = BLOCK_M if config.ping_pong else BLOCK_M // 2
    describe = [
        _map_of(a, (M, a.row), (K, a.col), problem.a_k_major, BLOCK_M, extents),
        _map_of(b, (N, b.col), (K, b.row), problem.b_k_major, width, extents),
    ]
    if problem.finish != DIRECT:
        describe.append(_map_of(out, (M, out.row), (problem.N, out.col), True, box_rows, extents, box_cols))

    @functools.lru_cache(maxsize=64)
    def maps(*addresses: int) -> bytes:
        encode = TensorMap.encode_emulated if device.is_emulated else TensorMap.encode_driver
        encoded = [encode(d(address=address)) for d, address in zip(describe, addresses, strict=False)]
        return b"".join(encoded).ljust(3 * 128, b"\0")

    return Plan(config, kernel, (config.blocks, 1, 1), config.shared_bytes(problem), maps)


def _problem(operands: dict, M: int, N: int, K: int, extents: tuple, activation: int) -> Problem | None:
    """Describe a product, None where TMA cannot read it."""
    a, b, out = operands["a"], operands["b"], operands["out"]
    if K == 0 or a.dtype not in SM90.choices["dtype"]:
        return None
    a_k_major, b_k_major = _k_major(a, M, K, a.row, a.col), _k_major(b, N, K, b.col, b.row)
    if a_k_major is None or b_k_major is None:
        return None
    parts = 2 if activation == _SWIGLU else 1
    finish = DIRECT
    if out.itemsize == 2 and _movable(out, out.col, N // parts, out.row, M):
        finish = STAGED if activation or any(name in operands for name in ("c", "bias", "residual")) else PLAIN
    return Problem(M, N // parts, K, math.prod(extents), a_k_major, b_k_major, finish, parts)


def _k_major(x, mn: int, k: int, mn_stride: int, k_stride: int) -> bool | None:
    """Tell which axis of an operand is contiguous, K (True) or the other one; None where TMA cannot read it."""
    if _movable(x, k_stride, k, mn_stride, mn):
        return True
    return False if _movable(x, mn_stride, mn, k_stride, k) else None


def _movable(x, inner_stride: int, inner: int, outer_stride: int, outer: int) -> bool:
    """Tell whether TMA can move a matrix: contiguous along one axis, everything else on 16-byte boundaries."""
    steps = [*x.batch, outer_stride if outer > 1 else 0]
    return (
        (inner_stride == 1 or inner == 1)
        and x.alignment == 0
        and all(s >= 0 and s * x.itemsize % 16 == 0 for s in steps)
        and (outer == 1 or outer_stride > 0)
    )


def _map_of(x, rows: tuple, cols: tuple, cols_inner: bool, box_rows: int, extents: tuple, box_cols: int = BLOCK_K):
    """Return a function from an operand's address to its tensor map; rows and cols are (size, stride in elements).

    A box holds `box_rows` x `box_cols`, or 64 x 64 where rows are the contiguous axis.
    """
    outer, inner, box = (rows, cols, (box_rows, box_cols)) if cols_inner else (cols, rows, (BLOCK_K, 64))
    sizes = tuple(extent if stride else 1 for extent, stride in zip(extents, x.batch, strict=True))
    pitch = 16 // x.itemsize  # stands in for the stride of an axis of one entry
    strides = [*(s or pitch for s in x.batch), outer[1] if outer[0] > 1 else pitch]
    return functools.partial(
        TensorMap,
        dtype=dtypes.numpy(x.dtype),
        shape=(*sizes, outer[0], inner[0]),
        strides=(*(s * x.itemsize for s in strides), x.itemsize),
        box=(1, 1, 1, *box),
        swizzle=box[1] * x.itemsize,
    )
