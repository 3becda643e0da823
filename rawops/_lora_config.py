"""The fused LoRA kernel: its parameters and instances, and where a product takes x @ a from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rawops import _gemm_config
from rawops._gemm_config import CALL_FIELDS, LAYOUT_CHOICES, SHAPE_FIELDS, SWIGLU, TILES, Config, Problem, Tile
from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct

_MIN_STAGES = 3
# Accumulators of a thread that leave it the other registers of a main loop, of which narrow copies take more.
_MAX_ACCUMULATORS = {"16-bit": 144, "16-bit narrow": 72}
_OPS_PER_BYTE = 150  # tensor cores over memory, on an A100, H200 or L40 within a quarter
_LAUNCH_BYTES = 16 << 20  # what the memory could have moved during a launch and its ramps

# --- kernel ---------------------------------------------------------------------------------------------------------

_LOW_RANK_FIELDS = {
    **dict.fromkeys(("lora_a", "lora_b", "lora_y"), "pointer"),
    **dict.fromkeys(("lora_a_row", "lora_a_col", "lora_b_row", "lora_b_col", "lora_y_row"), "int64"),
    "rank": "int32",
    "scaling": "float32",
}
LOW_RANK = ParamStruct("LoraOperands", **_LOW_RANK_FIELDS)
PARAMS = ParamStruct("LoraParams", **CALL_FIELDS, **SHAPE_FIELDS, **_LOW_RANK_FIELDS)

_LOW_RANK_CHOICES = {
    "rank_step": (16, 32, 64),  # ranks that the kernel holds at a time
    "rides": (True, False),
    "lora_a_k_major": (True, False),
    "lora_b_k_major": (True, False),
    "access_lora_a": (16, 8, 4, 2),
    "access_lora_b": (16, 8, 4, 2),
}
_TRANSPOSED = {"b_k_major": True, "lora_a_k_major": True, "lora_b_k_major": True}  # the layouts of PEFT


def _with_stages(tile: Tile) -> list[Tile]:
    """Return the tile as it is, and with fewer stages for where the low-rank part does not fit beside them."""
    return [replace(tile, stages=n) for n in range(tile.stages, _MIN_STAGES - 1, -1)]


def _rides_in(tile: Tile, rank_step: int, kind: str) -> bool:
    """Tell whether a thread has the registers for both products: the warps along N share out the columns of a.

    The tile of 128 x 256 is for products that the tensor cores limit, where riding does not pay.
    """
    columns = max(rank_step // tile.warps[1], 8) * tile.warps[1]
    is_large = tile.block_m * tile.block_n >= 128 * 256
    return not is_large and tile.block_m * (tile.block_n + columns) <= _MAX_ACCUMULATORS[kind] * tile.threads


def _riding(tile: Tile, kind: str) -> Tile:
    """Return the tile for a product with a rider: narrow copies of more than 32 along K leave it no registers."""
    return replace(tile, block_k=32) if kind == "16-bit narrow" else tile


def _spec(kind: str, tiles: list[Tile], smoke: list[dict], **low_rank: tuple) -> KernelSpec:
    """Declare the kernel for tiles, accesses and choices of the low-rank part that go together."""
    accesses = (16, 8) if kind == "16-bit" else LAYOUT_CHOICES["access_a"]
    choices = {
        "dtype": ("float16", "bfloat16"),
        "out_dtype": ("float16", "bfloat16", "float32"),
        "tile": tuple(t.cpp for tile in tiles for t in _with_stages(tile)),
        **{**LAYOUT_CHOICES, "access_a": accesses, "access_b": accesses},
        **{**_LOW_RANK_CHOICES, **low_rank},
    }
    return KernelSpec(
        source="lora_sm80.cu",
        entry="rawops::lora_sm80",
        template=tuple(choices),
        choices=choices,
        smoke=smoke,
        params=PARAMS,
    )


def _smoke(tile: Tile, rank_step: int, rides: bool, access: int = 16, **changes) -> dict:
    values = {"dtype": "float16", "out_dtype": "float16", "tile": tile.cpp, "rank_step": rank_step, "rides": rides}
    values |= {"a_k_major": True, "b_k_major": False, "access_a": access, "access_b": access, "activation": 0}
    values |= {"lora_a_k_major": not rides, "lora_b_k_major": False, "access_lora_b": access}
    return values | {"access_lora_a": access if rides else 16} | changes


def _riding_spec(kind: str, rank_step: int) -> KernelSpec:
    tiles = [tile for tile in (_riding(t, kind) for t in TILES[kind]) if _rides_in(tile, rank_step, kind)]
    smoke = []
    if kind == "16-bit":
        smoke += [_smoke(tile, rank_step, True) for tile in tiles if rank_step != 32]
        smoke += [_smoke(tile, rank_step, True, **_TRANSPOSED) for tile in tiles if rank_step == 16]
    elif rank_step == 16:
        smoke += [_smoke(tile, rank_step, True, access=2) for tile in tiles]
        smoke += [_smoke(tile, rank_step, True, access=2, b_k_major=True, activation=SWIGLU) for tile in tiles]
    return _spec(kind, tiles, smoke, rides=(True,), rank_step=(rank_step,))


def _reading_spec(kind: str) -> KernelSpec:
    """Declare the kernel to which a is nothing, since x @ a has been made."""
    tiles = TILES[kind]
    smoke = [_smoke(tile, 64, False) for tile in tiles] if kind == "16-bit" else []
    return _spec(kind, tiles, smoke, rides=(False,), lora_a_k_major=(True,), access_lora_a=(16,))


KINDS = ("16-bit", "16-bit narrow")
RIDING = {(kind, step): _riding_spec(kind, step) for kind in KINDS for step in _LOW_RANK_CHOICES["rank_step"]}
READING = {kind: _reading_spec(kind) for kind in KINDS}

# --- where x @ a comes from -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoraConfig(Config):
    """A GEMM's configuration; `rides`: x @ a is made along the way; `rank_step`: ranks that the kernel holds."""

    rides: bool
    rank_step: int


def select_config(problem: Problem, rank: int, sm_count: int, max_shared_bytes: int) -> LoraConfig:
    """Choose how a product with a low-rank part runs; pure arithmetic.

    Tile and split are the plain product's. Riding costs ``rank / block_n`` more on the tensor cores, which is nothing
    while the memory takes longer; reading costs a launch and another pass over x. A tile gives up stages where the
    low-rank part does not fit beside them, and rather those than the second block on an SM.
    """
    base = _gemm_config.select_config(problem, sm_count, max_shared_bytes)
    itemsize, split = dtypes.itemsize(problem.dtype), (base.split_k, base.k_per_split)
    padded = next((step for step in _LOW_RANK_CHOICES["rank_step"] if step >= rank), None)
    tile = _riding(base.tile, problem.kind)
    if padded is not None and _rides_in(tile, padded, problem.kind) and _riding_pays(problem, padded / tile.block_n):
        found = _fit(tile, (padded,), True, itemsize, max_shared_bytes)
        if found is not None:
            return LoraConfig(found[0], *split, True, padded)
    steps = (32, 16) if rank <= 32 else (64, 32, 16)
    tile, step = _fit(base.tile, steps, False, itemsize, max_shared_bytes)
    return LoraConfig(tile, *split, False, step)


def _riding_pays(problem: Problem, more_ops: float) -> bool:
    """Compare the times of both ways, in bytes that the memory could move meanwhile."""
    itemsize, rows = dtypes.itemsize(problem.dtype), problem.batches * problem.M
    x_bytes = rows * problem.K * itemsize
    moved = x_bytes + (problem.K + rows) * problem.N * itemsize
    multiplied = 2 * rows * problem.N * problem.K / _OPS_PER_BYTE
    riding = max(moved, multiplied * (1 + more_ops))
    reading = max(moved, multiplied) + x_bytes + _LAUNCH_BYTES
    return riding <= reading


def shared_bytes(tile: Tile, rank_step: int, rides: bool, itemsize: int) -> int:
    """Return the shared memory of a block: the ring, with a's columns if they ride; b; x @ a if it is read."""
    rider = tile.stages * tile.block_k * itemsize if rides else tile.block_m * 4
    return tile.shared_bytes(itemsize) + rank_step * (rider + tile.block_n * itemsize)


def _fit(tile, steps, rides, itemsize, max_shared_bytes) -> tuple[Tile, int] | None:
    """Return the tile with as many stages, and as many ranks at a time, as the memory allows."""
    blocks = 2 if 2 * tile.shared_bytes(itemsize) <= max_shared_bytes and tile.threads <= 128 else 1  # on an SM
    for budget in (max_shared_bytes // blocks, max_shared_bytes):
        for candidate in _with_stages(tile):
            for step in steps:
                if shared_bytes(candidate, step, rides, itemsize) <= budget:
                    return candidate, step
    return None
