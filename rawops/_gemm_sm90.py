"""The host side of gemm_sm90.cu and its relatives: what TMA can read, and the launch.

Callers ask `supports` and, if so, keep what `plan` returns. Operands are `Operand`s of _gemm_operands.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rawops._gemm_maps import SPAN, bytes_fetched, k_major, movable, tensor_maps
from rawops._gemm_sm90_config import Config, Problem, TF32Problem, in_halves, select_config, wants_split
from rawops._gemm_sm90_low_rank import LowRank
from rawops._gemm_sm90_specs import (
    BIASED,
    BY_K,
    DIRECT,
    LORA,
    LORA_CLUSTER,
    PLAIN,
    RANKS,
    SM90,
    SM90_CLUSTER,
    SM90_PAIRS,
    SM90_SQUARES,
    STAGED,
)
from rawops._runtime.kernel import Function

_SWIGLU = 5  # Activation in epilogue.cuh


def supports(
    device, operands: dict, M: int, N: int, K: int, extents: tuple, activation: int, low_rank: LowRank | None = None
) -> bool:
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
    low_rank : LowRank, optional
    """
    if not SM90.exists_on(device.capability):
        return False
    problem = describe_problem(operands, M, N, K, extents, activation, low_rank)
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
    maps: Callable[..., bytes]  # from the addresses of a, b and out
    low_rank: Callable[..., bytes] | None  # from the scaling, the addresses of lora_a and lora_b, and x @ a
    early: bool = False  # it may begin while the launch before it still runs, for which the kernel waits
    ahead: int = 0  # stages of b that the L2 is asked for until then

    @property
    def order(self) -> int:
        """The kernel's number for the order of tiles: see Schedule in hopper_tile.cuh."""
        return self.config.raster_rows + self.ahead

    def run(self, a: int, b: int, out: int, params: bytes, *low_rank) -> None:
        """Launch; `params` is the GemmParams that all GEMM kernels take, `low_rank` what the function wants."""
        values = [self.maps(a, b, out), params, self.order]
        if self.low_rank is not None:
            values.insert(2, self.low_rank(*low_rank))
        self.kernel.launch(self.grid, (self.config.threads, 1, 1), tuple(values), self.shared_bytes, self.early)


def plan(
    device,
    operands: dict,
    M: int,
    N: int,
    K: int,
    extents: tuple,
    activation: int,
    low_rank: LowRank | None = None,
    *,
    config: Config | None = None,
    finish: int | None = None,
) -> Plan:
    """Prepare a product that `supports` accepts, or one of another `config` and way out; the same arguments."""
    problem = describe_problem(operands, M, N, K, extents, activation, low_rank)
    if finish is not None:
        problem = replace(problem, finish=finish)
    if config is None:
        limits = device.sm_count, device.max_shared_bytes
        config = in_halves(problem, select_config(problem, *limits), *limits)
    choices = {
        "dtype": "float32" if operands["a"].dtype == "tf32" else operands["a"].dtype,
        "out_dtype": operands["out"].dtype,
        "block_m": config.block_m,
        "block_n": config.block_n,
        "stages": config.stages,
        "a_k_major": problem.a_k_major,
        "b_k_major": problem.b_k_major,
        "activation": activation,
        "finish": problem.finish,
    }
    maps = tensor_maps(device, operands, problem, config, (M, N, K), extents)
    if config.cluster > 1:
        choices["cluster"] = config.cluster
    low_rank_call = None
    if low_rank is not None:
        step = config.rank_step(problem)
        choices |= {"rank": step, "rides": config.rides}
        choices["lora_a"] = low_rank.a_layout(K) if config.rides else BY_K
        choices["lora_b_k_major"] = low_rank.majors(N, K)[1]
        low_rank_call = low_rank.call(device, N, K, step, config.share(problem))
        spec = LORA if config.cluster == 1 else LORA_CLUSTER
        choices |= {"ping_pong": config.ping_pong} if config.cluster == 1 else {}
    elif config.cluster > 1:
        spec = SM90_CLUSTER
    elif config.squares:
        spec = SM90_SQUARES
    else:
        spec, choices["ping_pong"] = SM90_PAIRS if config.pairs else SM90, config.ping_pong
    kernel = spec.kernel(device, **choices)
    early = (low_rank is None or config.rides) and may_begin_early(config.blocks, device.sm_count)
    # A row-major b of few rows in two waves that overlapped: 1 x 28672 x 4096 took 5 us longer.
    early &= problem.b_k_major or config.block_m > 64 or config.waves == config.cluster == 1
    ahead = asked_ahead(problem, config) if early else 0
    return Plan(config, kernel, (config.blocks, 1, 1), config.shared_bytes(problem), maps, low_rank_call, early, ahead)


def may_begin_early(blocks: int, sm_count: int) -> bool:
    """Tell whether a launch is to come to its SMs while the one before still runs.

    Its blocks take the SMs that are idle then: all, or nearly none. In between they come to lie unevenly, which costs
    more (1 to 4 us on an H200) than an early start spares (0.7 us).
    """
    return 2 * blocks <= sm_count or 16 * blocks >= 15 * sm_count


def asked_ahead(problem: Problem, config: Config) -> int:
    """Return how many stages of b the L2 is asked for before the launch before is complete.

    Of few rows it is to have what the ring holds; where it fetches 256 bytes at a time, each stage brings the next one.
    """
    few = problem.M <= config.block_m == 64 and problem.batches == 1
    return config.stages * SPAN // bytes_fetched(problem, config) if few else 0


def describe_problem(
    operands: dict, M: int, N: int, K: int, extents: tuple, activation: int, low_rank: LowRank | None = None
) -> Problem | None:
    """Describe a product, None where the kernel cannot run it."""
    a, b, out = operands["a"], operands["b"], operands["out"]
    if K == 0 or (a.itemsize > 2 and a.dtype != "tf32"):
        return None
    parts = 2 if activation == _SWIGLU else 1
    majors = [k_major(a, M, K, a.row, a.col), k_major(b, N, K, b.col, b.row)]
    if low_rank is not None:
        majors += low_rank.majors(N, K)
    wide = [*majors[1:2], *majors[3:]]  # of b and lora_b: where columns are contiguous, up must start on 16 bytes too
    transposed = a.dtype == "tf32" and majors == [True, False] and parts == 1
    if None in majors or (parts == 2 and N // 2 % 8 and not all(wide)):
        return None
    if a.itemsize != 2 and not all(majors) and not transposed:
        return None
    rank, narrow = 0, 1
    if low_rank is not None:
        narrow = low_rank.narrow
        rank = next((step for step in RANKS if step >= low_rank.rank), -(-low_rank.rank // RANKS[-1]) * RANKS[-1])
    finish = DIRECT
    whole = N // parts % 8 == 0  # TMA stores whole chunks of 16 bytes, also those that reach out of the tensor
    if out.itemsize == 2 and whole and movable(out, out.col, N // parts, out.row, M):
        finish = BIASED if activation or "bias" in operands else PLAIN
        finish = STAGED if "c" in operands or "residual" in operands else finish
    kind = TF32Problem if a.dtype == "tf32" else Problem
    pitches = (a.row if majors[0] else a.col, b.col if majors[1] else b.row)
    row_bytes = math.gcd(SPAN, *(pitch * a.itemsize for pitch in pitches))
    if transposed:
        return kind(N, M, K, math.prod(extents), False, True, DIRECT, row_bytes=row_bytes)
    return kind(M, N // parts, K, math.prod(extents), *majors[:2], finish, parts, rank, narrow, row_bytes=row_bytes)
