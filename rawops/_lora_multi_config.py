"""The kernels of a product with an adapter for each row: their parameters and instances, and the launch on Hopper."""

from __future__ import annotations

from dataclasses import replace

from rawops import _gemm_sm90
from rawops._gemm_config import CALL_FIELDS, LAYOUT_CHOICES, SHAPE_FIELDS, SWIGLU, TILES
from rawops._gemm_operands import Operand
from rawops._gemm_sm90_config import candidates, configure
from rawops._gemm_sm90_specs import DIRECT, PLAIN, STAGED, spec_of
from rawops._runtime.kernel import KernelSpec, ParamStruct

DTYPES = ("float16", "bfloat16")
RANK_STEP = 16  # a slot has room for a multiple of it
SHRINK_THREADS, THREADS = 512, 256  # of a block of the shrink kernel; of the others
GROUP_ROWS = 32  # whose places a block of the group kernel finds
MOST_GROUPED = 256  # rows that every block of the shrink kernel sorts by itself, which saves a launch
PLACES = 4  # that a block of the shrink kernel looks at where it need not sort

# Columns of a tile of 128 rows that leave the ranks registers, by whether b is K-major, and the parts of a gated tile.
_WIDEST = {(True, 1): 176, (True, 2): 160, (False, 1): 192, (False, 2): 128}
# The same where consumers take turns; a narrower tile is multiplied before the other consumer is done with its own.
_NARROWEST_IN_TURN, _WIDEST_IN_TURN = 144, 176
_IN_ORDER = 64  # rows at most
_BUFFERS = {64: 2, 128: 1}  # by the height of a tile: a warp's places for sixteen ranks of b of one adapter
_BUFFERS_IN_TURN = 3  # the same of a consumer that takes turns

# --- kernels --------------------------------------------------------------------------------------------------------

_ADAPTER_FIELDS = {
    **dict.fromkeys(("stack_b", "y", "ranks", "slices", "infos"), "pointer"),
    "sorted_row": "int64",
    **dict.fromkeys(("max_loras", "slice_count", "slot_rank", "capacity", "row_count", "column_count"), "int32"),
    **dict.fromkeys(("first_from", "first_to"), "int32"),
}
ADAPTERS = ParamStruct("Adapters", **_ADAPTER_FIELDS)
_SHRINK_POINTERS = ("x", "stack_a", "indices", "ranks", "non_finite", "scalings", "sorted", "y", "infos", "places")
SHRINK_PARAMS = ParamStruct(
    "ShrinkParams",
    **dict.fromkeys(_SHRINK_POINTERS, "pointer"),
    **dict.fromkeys(("x_row", "x_col", "a_row", "sorted_row", "index_stride"), "int64"),
    **dict.fromkeys(("M", "K", "max_loras", "slot_rank", "capacity"), "int32"),
)
GROUP = KernelSpec(
    source="lora_shrink.cu",
    entry="rawops::lora_group",
    template=(),
    choices={},
    smoke=({},),
    params=SHRINK_PARAMS,
)
SHRINK = KernelSpec(
    source="lora_shrink.cu",
    entry="rawops::lora_shrink",
    template=("dtype", "atoms", "is_aligned", "groups"),
    choices={"dtype": DTYPES, "atoms": (2, 4), "is_aligned": (True, False), "groups": (True, False)},
    smoke=[
        {"dtype": "float16", "atoms": atoms, "is_aligned": is_aligned, "groups": is_aligned}
        for atoms in (2, 4)
        for is_aligned in (True, False)
    ],
    params=SHRINK_PARAMS,
)


EXPAND = KernelSpec(
    source="lora_shrink.cu",
    entry="rawops::lora_expand",
    template=("dtype",),
    choices={"dtype": DTYPES},
    smoke=({"dtype": "bfloat16"},),
    params=ADAPTERS,
)


# The tiles of GEMM with 64 sums a thread at most: the ranks need registers, too.
LIGHT_TILES = {
    kind: tuple(tile for tile in TILES[kind] if tile.block_m * tile.block_n <= 64 * tile.threads)
    for kind in ("16-bit", "16-bit narrow")
}


def _sm80(kind: str, accesses: tuple[int, ...]) -> KernelSpec:
    """Declare the main kernel with the tiles of one kind of GEMM, of which it must give the bits."""
    choices = {
        "dtype": DTYPES,
        "out_dtype": (*DTYPES, "float32"),
        "tile": tuple(tile.cpp for tile in LIGHT_TILES[kind]),
        "b_k_major": (True, False),
        "access_b": accesses,
        "activation": LAYOUT_CHOICES["activation"],
    }
    smoke = [
        dict(zip(choices, ("float16", "float16", tile.cpp, tile.block_m == 64, accesses[0], activation), strict=True))
        for tile in LIGHT_TILES[kind]
        for activation in ((0, SWIGLU) if tile.block_m == 64 else (0,))
    ]
    return KernelSpec(
        source="lora_multi_sm80.cu",
        entry="rawops::lora_multi_sm80",
        template=tuple(choices),
        choices=choices,
        smoke=smoke if kind == "16-bit" else smoke[-1:],
        params=ParamStruct("MultiParams", **CALL_FIELDS, **SHAPE_FIELDS, **_ADAPTER_FIELDS),
    )


SM80 = {"16-bit": _sm80("16-bit", (16, 8)), "16-bit narrow": _sm80("16-bit narrow", (16, 8, 4, 2))}


def _sm90(entry: str, further: dict, *smoke: tuple) -> KernelSpec:
    choices = {
        "dtype": DTYPES,
        "out_dtype": (*DTYPES, "float32"),
        "block_m": (64, 128),
        "block_n": tuple(range(16, 257, 16)),
        "stages": tuple(range(2, 9)),
        **{name: values for name, values in further.items() if name == "cluster"},
        "b_k_major": (True, False),
        "activation": LAYOUT_CHOICES["activation"],
        "finish": (PLAIN, DIRECT),
        "buffers": (1, 2, 3),
        "in_order": (False, True),
        **{name: values for name, values in further.items() if name == "ping_pong"},
    }
    return spec_of("lora_multi_sm90.cu", entry, choices, *smoke)


SM90 = _sm90(
    "lora_multi_sm90",
    {"ping_pong": (False, True)},
    ("bfloat16", "bfloat16", 64, 224, 4, True, 0, PLAIN, 2, True, False),
    ("float16", "float16", 64, 256, 3, False, 0, PLAIN, 2, True, False),
    ("float16", "float16", 64, 256, 3, False, 0, PLAIN, 2, False, False),
    ("bfloat16", "bfloat16", 128, 176, 4, True, 0, PLAIN, 1, False, False),
    ("bfloat16", "bfloat16", 128, 176, 5, True, 0, PLAIN, 3, False, True),
    ("float16", "float16", 128, 176, 5, True, 0, PLAIN, 3, False, True),
    ("float16", "float16", 128, 128, 4, False, SWIGLU, DIRECT, 1, False, False),
)
SM90_CLUSTER = _sm90(
    "lora_multi_sm90_cluster", {"cluster": (2, 8)}, ("bfloat16", "bfloat16", 64, 128, 7, 2, True, 0, PLAIN, 2, True)
)

# --- sizes ----------------------------------------------------------------------------------------------------------


def padded_rank(max_rank: int) -> int:
    """Return the ranks that a slot has room for."""
    return max(-(-max_rank // RANK_STEP), 1) * RANK_STEP


def row_of_sorted(K: int) -> int:
    """Return the stride of x's rows once they are sorted: on 16-byte boundaries."""
    return max(-(-K // 8), 1) * 8


def comes_in_order(device, M: int, K: int, alignment: int, row: int, col: int) -> bool:
    """Tell whether the main kernel takes the rows of x as they come, because one tile on Hopper has them all.

    Its warps then have more adapters each, but the product need not wait for x to be sorted.
    """
    aligned = alignment == 0 and col == 1 and K % 8 == 0 and (M == 1 or (row > 0 and row % 8 == 0))
    return aligned and M <= _IN_ORDER and SM90.exists_on(device.capability)


# --- the main kernel on Hopper --------------------------------------------------------------------------------------


def _with_buffers(config, problem, max_shared_bytes: int) -> tuple:
    """Return a configuration that gives up stages for the buffers of b, and its shared memory.

    The buffers take the place of the staging tile, if there is one, and what more they need.
    """
    share = config.share(problem)
    staging = 0 if problem.finish == DIRECT else config.rows * config.pass_cols(problem) * 2
    column_bytes = _BUFFERS_IN_TURN * 32 if config.ping_pong else _BUFFERS[config.block_m] * 4 * 32
    buffers = column_bytes * share * problem.parts  # of a consumer
    more = config.consumers * (max(buffers, staging) - staging)
    stages = (max_shared_bytes - config.other_bytes(problem) - more) // config.stage_bytes(problem)
    config = replace(config, stages=min(stages, config.stages))
    return config, config.shared_bytes(problem) + more


def _configure(problem, device):
    """Return the configuration of `gemm`, or, where that is not for adapters, the cheapest that is.

    Both add up K in the same order. What adapters take at the end of a tile counts as a longer epilogue.
    """
    limits = device.sm_count, device.max_shared_bytes
    config = _gemm_sm90.select_config(problem, *limits)
    if not _takes_adapters(problem, config):
        longer = replace(problem, finish=STAGED)

        def cost(c) -> int:
            return configure(longer, *limits, c.block_m, c.block_n, c.cluster, c.ping_pong).cost

        others = (c for c in candidates(problem, *limits) if c.cluster == config.cluster)
        config = min((c for c in others if _takes_adapters(problem, c)), key=cost)
    return config.with_whole_tiles(problem)


def _takes_adapters(problem, config) -> bool:
    """Tell whether a tile leaves the ranks registers, and consumers that take turns have time for them."""
    if config.pairs:
        return False
    if config.ping_pong:
        fits = config.block_m == 128 and problem.b_k_major and problem.finish == PLAIN
        return fits and _NARROWEST_IN_TURN <= config.block_n <= _WIDEST_IN_TURN
    return config.block_m == 64 or config.block_n <= _WIDEST[problem.b_k_major, problem.parts]


def plan(device, operands: dict, M: int, N: int, K: int, extents: tuple, activation: int, in_order: bool):
    """Prepare a product that `_gemm_sm90.supports` accepts, on x sorted or, `in_order`, as it is.

    The configuration adds up K as that of `gemm` for x as it comes does: rows without an adapter get the same bits.
    """
    problem = _gemm_sm90.describe_problem(operands, M, N, K, extents, activation)
    config = _configure(problem, device)
    b, out = operands["b"], operands["out"]
    problem = replace(problem, finish=PLAIN if problem.finish == PLAIN else DIRECT)
    config, shared_bytes = _with_buffers(config, problem, device.max_shared_bytes)
    choices = {
        "dtype": b.dtype,
        "out_dtype": out.dtype,
        "block_m": config.block_m,
        "block_n": config.block_n,
        "stages": config.stages,
        "b_k_major": problem.b_k_major,
        "activation": activation,
        "finish": problem.finish,
        "buffers": _BUFFERS_IN_TURN if config.ping_pong else _BUFFERS[config.block_m],
        "in_order": in_order,
    }
    if config.cluster > 1:
        choices["cluster"] = config.cluster
    else:
        choices["ping_pong"] = config.ping_pong
    x = operands["a"] if in_order else Operand(b.dtype, b.itemsize, 0, row_of_sorted(K), 1, [0, 0, 0])
    maps = _gemm_sm90.tensor_maps(
        device, {**operands, "a": x}, replace(problem, a_k_major=True), config, (M, N, K), extents
    )
    kernel = (SM90 if config.cluster == 1 else SM90_CLUSTER).kernel(device, **choices)
    return _gemm_sm90.Plan(config, kernel, (config.blocks, 1, 1), shared_bytes, maps, lambda adapters: adapters, True)
