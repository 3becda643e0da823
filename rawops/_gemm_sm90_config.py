"""Which tile the kernels of gemm_sm90.cu take for a product, and what that costs; pure arithmetic."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

from rawops._gemm_maps import SPAN
from rawops._gemm_sm90_specs import BIASED, CLUSTERS, DIRECT, MAX_STAGES, NARROW_ROWS, PARTIAL, PLAIN, RANKS, STAGED

BLOCK_K = 64
BOX_COLS = 64  # of a row-major b

_SLAB_BYTES = 4 * 16 * 32 * 4  # of a consumer's warps, for every finish but the plain one
_MIN_STAGES = 3
# Nobody uses it, but an SM that sets it aside as shared memory has room for blocks of the launch that adds up slices:
# it has what the block beside them wants, rounded up, and 64 x 64 x 8 stages would leave them too little (1 us).
_ROOM_BYTES = 8192
_RASTER_ROWS = 8, 16  # of up to 4096 rows, of more

# Costs in units of one column of one K block: what the tensor cores take for 128 rows of it, 4 cycles. Fitted to tiles
# 128 to 256 wide of six large products on an H200, which they tell to one per cent: a K block costs 4 columns more than
# it has. A tile costs its epilogue and the start of its main loop.
_COST_OF_A = 4
_COST_OF_TILE = {PLAIN: 350, BIASED: 1150, STAGED: 3000, DIRECT: 900, PARTIAL: 900}
_RING_BYTES = 248  # that an SM takes in for a tile of 128 rows
_SECTOR = 32
_STRADDLING_BYTES = 15000, 23000  # all SMs, where rows begin inside sectors, inside lines of 128 bytes
_MEMORY_BYTES = 9800  # that all SMs together take in from the memory, however b lies there, and
_SM_BYTES = 180  # one from the L2, twice as much where most others are idle, or half of them, where each has its own b
_LATENCY = 550  # of a stage under way
_COST_OF_CLUSTER = 250  # its barrier, and the way of the partial sums to other SMs, at
_CLUSTER_BYTES = 80
_COST_OF_RIDING = 10  # of lora_a's columns, beyond their number
_COST_OF_READING = 700  # of a launch more, which makes x @ a and
_COST_OF_NARROW, _COST_OF_NARROW_RANK = 83, 18  # takes for 256 rows of a K block, and for sixteen ranks more
_COST_OF_SLICE = 40  # of sixteen ranks, beyond their products; where consumers take turns, which hides them,
_COST_OF_SLICE_IN_TURN = 1000
_COLUMNS_IN_TURN = 3500  # of all tiles of a block, at least, where they do; twice as many if many make x @ a
_COST_OF_SPLIT = 4400  # the second launch and the partial sums of split-K, and
_SPLIT_SLOWNESS = 2  # how much longer the kernel that can do it takes for the same work


@dataclass(frozen=True)
class Problem:
    """What a configuration depends on.

    N counts columns of D; `parts` is 2 for swiglu, whose b is twice as wide. `rank` is that of a low-rank part, padded.
    `narrow`: products such as x @ a that are made at the same time. `grouped`: each of `batches` groups has M rows on
    average. `row_bytes`: on whose multiples rows of the operands begin, up to 128: inside lines of 128 bytes, where a
    row of a box lies in two, or inside sectors of 32.
    _gemm_8bit_config.py derives that of 8-bit operands.
    """

    itemsize: ClassVar[int] = 2
    M: int
    N: int
    K: int
    batches: int = 1
    a_k_major: bool = True
    b_k_major: bool = True
    finish: int = PLAIN
    parts: int = 1
    rank: int = 0
    narrow: int = 1
    grouped: bool = False
    row_bytes: int = SPAN
    transposed: ClassVar[bool] = False

    @property
    def cost_of_tile(self) -> int:
        return _COST_OF_TILE[self.finish]

    @property
    def k_blocks(self) -> int:
        return -(-self.K * self.itemsize // SPAN)

    @property
    def pairs(self) -> tuple[bool, ...]:
        """Whether two blocks may load b once for both: it pays where rows begin inside sectors, for there the L2 is the
        limit."""
        alone = self.grouped or self.rank or self.parts == 2 or self.itemsize != 2
        return (False,) if alone or self.row_bytes >= _SECTOR else (False, True)

    @property
    def clusters(self) -> tuple[int, ...]:
        """Sizes of the clusters that may share a tile."""
        return CLUSTERS

    def scale_bytes(self, block_m: int, block_n: int) -> int:
        """Shared memory of a stage's scales."""
        return 0

    def by_columns(self, block_m: int, cluster: int) -> bool:
        """Whether the consumers share out the columns of a tile."""
        return False

    def widths(self, step: int, block_m: int, cluster: int, ping_pong: bool) -> list[int]:
        """Columns of a tile for which a consumer has registers, multiples of `step`."""
        wide = block_m == 64 or not (ping_pong or cluster > 1)
        beside_bias = 176 if self.rank else 192
        in_turn = {PLAIN: 192, BIASED: beside_bias}.get(self.finish, 128)
        widest = 256 if wide else in_turn if ping_pong else 192
        return list(range(step, widest + 1, step))

    def row_tiles(self, block_m: int) -> int:
        """Rows of tiles of all batches; of groups, as many as to expect, for the last tile of each is half empty."""
        if self.grouped:
            return max(self.batches, self.batches * (2 * self.M + block_m) // (2 * block_m))
        return self.batches * -(-self.M // block_m)


class TF32Problem(Problem):
    """One of float32 operands that TMA rounds: half as many fill a block of K, which takes as long.

    An a that is not contiguous along K is a row-major b: the product is that of the transposes, M and N as it has them.
    """

    itemsize: ClassVar[int] = 4

    @property
    def transposed(self) -> bool:
        return not self.a_k_major


@dataclass(frozen=True)
class Config:
    """A tile `block_m` x `block_n` of a @ b and its ring, the order of tiles, and what that costs.

    The blocks of a cluster share a tile, each a slice of K. `pairs`: two blocks take tiles below each other and load b
    once for both. `rides`: the columns of lora_a go along the K loop; otherwise `beside` blocks of another launch make
    x @ a, if wanted. `halved`: see `in_halves`. `by_columns`: the consumers share out the columns of a tile, not its
    rows. `squares`: four blocks take two by two tiles, and load each half of a tile's a and b once for two of them.
    Blocks that run at the same time work on `raster_rows` rows of tiles, to share operands in the L2.
    """

    block_m: int
    block_n: int
    stages: int
    cluster: int
    ping_pong: bool
    rides: bool
    raster_rows: int
    blocks: int
    waves: int
    cost: int
    pairs: bool = False
    beside: int = 0
    halved: bool = False
    by_columns: bool = False
    squares: bool = False

    @property
    def consumers(self) -> int:
        return 2 if self.ping_pong or self.block_m == 128 else 1

    @property
    def rows(self) -> int:
        """Rows of a consumer."""
        return self.block_m if self.ping_pong or self.by_columns else 64

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    def share(self, problem: Problem) -> int:
        """Columns of D that a consumer finishes."""
        return self.block_n // problem.parts // self.cluster // (2 if self.by_columns else 1)

    def pass_cols(self, problem: Problem) -> int:
        """Columns of D that a consumer stages at a time."""
        return min(self.share(problem), 32) if self.ping_pong else self.share(problem)

    def rank_step(self, problem: Problem) -> int:
        """Ranks of a low-rank part that a consumer adds at a time."""
        return RANKS[0] if self.ping_pong else min(problem.rank, RANKS[-1])

    def stage_bytes(self, problem: Problem) -> int:
        """Shared memory of a stage: operands, scales, and the barriers `full` and `empty`."""
        rows = self.block_m + self.block_n + self.rides * problem.rank
        return rows * SPAN + problem.scale_bytes(self.block_m, self.block_n) + 16

    def other_bytes(self, problem: Problem) -> int:
        """Shared memory beside the ring: lora_b, staging tiles and slabs of the consumers, further barriers."""
        share = self.share(problem)
        staging = 0 if problem.finish in (DIRECT, PARTIAL) else self.rows * self.pass_cols(problem) * 2
        if self.ping_pong and problem.rank:  # lora_b comes to the same place
            staging = max(staging, self.rank_step(problem) * share * problem.parts * 2)
        bias = 4 * share * problem.parts
        slabs = {PLAIN: 0, PARTIAL: 0, BIASED: bias}.get(problem.finish, _SLAB_BYTES)
        lora_b = problem.rank * share * problem.parts * 2 if self.cluster > 1 else 0  # which goes through the ring else
        room = _ROOM_BYTES if problem.finish == PARTIAL and self.consumers == 1 else 0
        return lora_b + self.consumers * (staging + slabs) + room + 32

    def tiles(self, problem: Problem) -> int:
        return problem.row_tiles(self.block_m) * -(-problem.N * problem.parts // self.block_n)

    def shares_boxes(self, problem: Problem) -> bool:
        """Whether there are more blocks than tiles: see `_sharing_blocks`."""
        return not problem.grouped and self.blocks > self.tiles(problem) * self.cluster

    def with_whole_tiles(self, problem: Problem) -> Config:
        """Return the same for a kernel whose blocks do not share out the boxes of b."""
        return replace(self, blocks=min(self.blocks, self.tiles(problem) * self.cluster))

    def shared_bytes(self, problem: Problem) -> int:
        return self.stages * self.stage_bytes(problem) + self.other_bytes(problem)


def select_config(problem: Problem, sm_count: int, max_shared_bytes: int) -> Config:
    """Choose the tile that finishes first; pure arithmetic, see `_cost`."""
    return candidates(problem, sm_count, max_shared_bytes)[0]


def candidates(problem: Problem, sm_count: int, max_shared_bytes: int) -> list[Config]:
    """Return the configurations that fit, the cheapest first."""
    step = 32 if problem.parts == 2 else 16
    if not problem.b_k_major:  # boxes of 64 columns
        step = 64 * problem.parts
    if problem.grouped or problem.rank > RANKS[-1]:
        ways = [(1, False, False), (1, True, False)]
    elif problem.rank:
        ways = [(cluster, False, rides) for cluster in (1, *CLUSTERS) for rides in (True, False)] + [(1, True, False)]
    else:
        turns = [] if problem.transposed else [(1, True, False)]
        ways = [(1, False, False), *turns, *((cluster, False, False) for cluster in problem.clusters)]
    ragged = 2 if problem.grouped else 1  # the last tile of a group is half empty on average
    heights = (64,) if problem.M <= 64 else (64, 128) if 128 * ragged >= problem.M else (128,)
    found = []
    for block_m, (cluster, ping_pong, rides), pairs in itertools.product(heights, ways, problem.pairs):
        if pairs and (cluster > 1 or block_m == 64):
            continue
        if cluster <= problem.k_blocks and (block_m == 64 or not rides):  # riding pays where the memory is the limit
            wide = 64 if problem.b_k_major else 128  # halves of b are whole boxes; narrow boxes of D take too long
            unit = math.lcm(step, wide if pairs else 16 * problem.parts * cluster)
            unit *= 2 if problem.by_columns(block_m, cluster) else 1
            found += [
                configure(problem, sm_count, max_shared_bytes, block_m, width, cluster, ping_pong, rides, pairs)
                for width in problem.widths(unit, block_m, cluster, ping_pong)
                if width < problem.N * problem.parts + unit
            ]
    fitting = [c for c in found if c.stages >= _MIN_STAGES and _may_take_turns(problem, c)]
    return sorted(fitting, key=lambda c: (c.cost, c.ping_pong, c.cluster, c.pairs, -c.block_n))


def _may_take_turns(problem: Problem, config: Config) -> bool:
    """Tell whether consumers may take turns with a low-rank part; they always may without one.

    What makes x @ a beside them takes two or three times as long as alone. The blocks that wait for its SMs have a tile
    less to do, but a narrow one: of K = 4096 they are through 10 to 30 us late, which few columns do not make up for.
    """
    if not (config.ping_pong and problem.rank):
        return True
    needed = _COLUMNS_IN_TURN * (1 if config.beside <= 8 else 2)
    return config.block_m == 128 and config.waves * config.block_n >= needed


_HALVED_ROWS, _HALVED_COLUMNS = 16, 224  # at most, at least


def in_halves(problem: Problem, config: Config, sm_count: int, max_shared_bytes: int) -> Config:
    """Return a configuration with two tiles of half the width for each one, where few rows make that faster.

    The L2 then fetches 128 bytes at a time instead of 256: 16 rows of N = 28672 take 1.5 per cent less, 2 rows 3; of 64
    both take longer. The bits are the same.
    """
    plain = type(problem) is Problem and problem.b_k_major and problem.parts == 1 and not problem.rank
    few = problem.M <= _HALVED_ROWS and problem.batches == 1 and not problem.grouped
    fits = config.waves == 1 and config.cluster == 1 and config.block_m == 64 and config.block_n % 32 == 0
    if not (plain and few and fits and config.block_n >= _HALVED_COLUMNS):
        return config
    return replace(configure(problem, sm_count, max_shared_bytes, 64, config.block_n // 2), halved=True)


def configure(
    problem: Problem,
    sm_count: int,
    max_shared_bytes: int,
    block_m: int,
    block_n: int,
    cluster: int = 1,
    ping_pong: bool = False,
    rides: bool = False,
    pairs: bool = False,
    squares: bool = False,
) -> Config:
    """Complete a configuration with as many stages as fit, the order of tiles, and its cost."""
    together, across = 2 if pairs or squares else 1, 2 if squares else 1  # rows and columns of tiles
    tiles_m, tiles_n = -(-problem.M // block_m), -(-problem.N * problem.parts // (block_n * across)) * across
    tiles = problem.row_tiles(block_m * together) * together * tiles_n
    at_a_time = tiles_at_a_time(cluster, sm_count)
    waves = -(-tiles // at_a_time)
    bands = -(-tiles_m // _RASTER_ROWS[problem.M > 4096])
    blocks = tiles * cluster if cluster > 1 else sm_count if problem.grouped else min(tiles, sm_count)
    rows = -(-tiles_m // (bands * together)) * together
    blocks -= blocks % (together * across)
    config = Config(block_m, block_n, 0, cluster, ping_pong, rides, rows, blocks, waves, 0, pairs, squares=squares)
    config = replace(config, by_columns=problem.by_columns(block_m, cluster))
    config = replace(config, blocks=_sharing_blocks(problem, config, sm_count))
    stages = (max_shared_bytes - config.other_bytes(problem)) // config.stage_bytes(problem)
    config = replace(config, stages=max(min(stages, MAX_STAGES), 0))
    config = replace(config, cost=_cost(problem, config, sm_count, tiles, at_a_time))
    return config if rides or not problem.rank else _with_blocks_beside(problem, config, sm_count, tiles)


def _sharing_blocks(problem: Problem, config: Config, sm_count: int) -> int:
    """Return the blocks of a configuration: a row-major b of few rows is shared out among all SMs, box by box.

    Some of them have a box less than the tile is wide. With whole tiles, 112 of 256 columns for example, the GPCs whose
    SMs are all busy would take longer than those with an idle one.
    """
    few = problem.M <= config.block_m == 64 and problem.batches == problem.parts == 1 and not problem.grouped
    alone = config.cluster == 1 and not config.ping_pong and (config.rides or not problem.rank)
    boxes = -(-problem.N // BOX_COLS)
    if problem.b_k_major or problem.itemsize != 2 or problem.finish == DIRECT or not (few and alone):
        return config.blocks
    widest = -(-boxes // sm_count) * BOX_COLS
    return max(config.blocks, min(sm_count, boxes)) if config.block_n == widest else config.blocks


def _with_blocks_beside(problem: Problem, config: Config, sm_count: int, tiles: int) -> Config:
    """Choose the blocks that make x @ a, and add what they delay the others by.

    SMs that have a tile less than others lose nothing by that, as long as x @ a is there when the first tiles end.
    """
    rows = problem.batches * -(-problem.M // NARROW_ROWS)
    takes = problem.k_blocks * (_COST_OF_NARROW + problem.rank * _COST_OF_NARROW_RANK // 16)
    spare, tile = config.waves * sm_count - tiles * config.cluster, config.cost // config.waves
    counts = {min(rows, n // problem.narrow) for n in (spare, sm_count)} - {0}
    delays = {n: -(-rows // n) * takes - (tile if n * problem.narrow <= spare else 0) for n in counts}
    beside = min(delays, key=lambda n: (max(delays[n], 0), n))
    return replace(config, cost=config.cost + _COST_OF_READING + max(delays[beside], 0), beside=beside)


def tiles_at_a_time(cluster: int, sm_count: int) -> int:
    # The SMs that a larger cluster can be placed on together are not all a multiple of it.
    return max(1, (sm_count if cluster <= 2 else sm_count * 9 // 10) // cluster)


def _cost(problem: Problem, config: Config, sm_count: int, tiles: int, at_a_time: int) -> int:
    """Predict the time of a configuration.

    A wave is as many tiles as there is room for at a time. It takes its main loop, but no less than the memory needs
    for its share of b: up to a quarter more the more SMs are idle, in the last wave too, and rows of a that are read
    again from the L2 count a quarter. A K block of 128 rows takes ``block_n + 4`` or what its operands take to arrive,
    one of 64 rows the latter. A tile takes 350 more, or what its epilogue takes, and what its part in a cluster and its
    low-rank part take; that hides behind the main loop of the next if consumers take turns, but for what a longer
    epilogue than the plain one takes away from it: the more the narrower the tile is, whose main loop needs more of the
    shared memory. Of a low-rank part the products remain.
    """
    cluster, rows = config.cluster, min(problem.M, config.block_m)
    columns = config.block_n + (problem.rank + _COST_OF_RIDING if config.rides else 0)
    if config.block_m == 128:
        taken_in = (columns + config.block_m) * SPAN
        k_block = max(columns + _COST_OF_A, taken_in // _RING_BYTES)
        if problem.row_bytes < SPAN:
            given = taken_in - columns * SPAN // 2 if config.pairs else taken_in
            k_block = max(k_block, config.blocks * given // _STRADDLING_BYTES[problem.row_bytes >= _SECTOR])
    else:
        few = sm_count // (8 if problem.batches == 1 else 2)
        sm_bytes = _SM_BYTES if config.blocks > few else 2 * _SM_BYTES
        k_block = max((columns + config.block_m) * SPAN // sm_bytes, _LATENCY // max(config.stages, 1))
    main_loop = -(-problem.k_blocks // cluster) * k_block
    slices = problem.rank // 16
    finish = problem.cost_of_tile + slices * (config.block_n // cluster * config.block_m // 200 + _COST_OF_SLICE)
    if cluster > 1:
        finish += _COST_OF_CLUSTER + config.block_m * columns * 4 // _CLUSTER_BYTES
    if config.ping_pong:
        finish, ranks = problem.cost_of_tile, slices * _COST_OF_SLICE_IN_TURN
        main_loop += slices * config.block_n * config.block_m // 200
        more = max(0, finish - _COST_OF_TILE[PLAIN]) * (256 - config.block_n) // 256
        main_loop, finish = max(main_loop, finish + ranks) + more, finish // config.waves
    memory = (problem.batches * problem.N * problem.parts + tiles * rows // 4) * problem.K
    memory = memory * problem.itemsize // _MEMORY_BYTES
    memory += memory * (sm_count - config.blocks) // (4 * sm_count) if config.blocks < sm_count else 0
    last = tiles - (config.waves - 1) * at_a_time

    def wave(share: int, is_first: bool) -> int:
        needed = memory * share // tiles
        if not is_first and config.block_m == 64 and cluster <= 2 and not problem.grouped:
            needed += needed * (at_a_time - share) // (4 * at_a_time)
        return max(main_loop, needed)

    full = (config.waves - 1) * wave(at_a_time, True)  # all alike: there may be millions of them
    return config.waves * finish + full + wave(last, config.waves == 1)


def wants_split(problem: Problem, config: Config, sm_count: int) -> bool:
    """Tell whether another kernel is faster, because it splits K over all SMs or has tiles for the few rows of a."""
    columns = problem.N * problem.parts * problem.batches
    work = problem.k_blocks * -(-problem.M // 128) * columns
    memory = (problem.M * problem.batches + columns) * problem.K * 2 // _MEMORY_BYTES
    return _COST_OF_SPLIT + max(_SPLIT_SLOWNESS * work // sm_count, memory) < config.cost
