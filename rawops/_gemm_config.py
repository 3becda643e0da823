"""The GEMM kernels of every GPU from sm_80 on: their tiles, parameters and instances, and which one a product takes."""

from __future__ import annotations

from dataclasses import dataclass

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct

DTYPES = ("float16", "bfloat16", "float32", "float64")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
IN_PLACE, PROMOTED, BLOCK_SCALED, COLUMN_SCALED = range(4)  # Promotion in scaling.cuh
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu", "swiglu")  # the index is the kernels' number
SWIGLU = ACTIVATIONS.index("swiglu")
SCALAR_TYPES = ("float32", "float64", "float16", "bfloat16")  # of alpha and beta arrays; likewise

_MAX_SPLITS = 32

# --- tiles ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """What one block computes, and how: TileShape in ring.cuh. `warps` is (along M, along N)."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: tuple[int, int]

    @property
    def cpp(self) -> str:
        sizes = (self.block_m, self.block_n, self.block_k, self.stages, *self.warps)
        return f"rawops::TileShape<{', '.join(map(str, sizes))}>"

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of the ring of stages."""
        return self.stages * (self.block_m + self.block_n) * self.block_k * itemsize

    def staging_bytes(self, accumulator: str) -> int:
        """Shared memory that finish_tile takes over from the ring: 16 rows a warp."""
        return self.warps[0] * 16 * self.block_n * dtypes.itemsize(accumulator)


# Tiles by kind of product, largest first; the last one of each height fits the 99 KB of shared memory that every
# supported card has. For 16 bits at least 40 KB are on their way into an SM, which hides the latency of the memory.
TILES = {
    "16-bit": (
        Tile(128, 256, 32, 4, (2, 4)),
        Tile(128, 128, 32, 4, (2, 2)),
        Tile(64, 128, 64, 3, (2, 2)),
        Tile(64, 64, 64, 4, (2, 2)),
        Tile(32, 128, 64, 4, (1, 4)),
        Tile(16, 256, 64, 4, (1, 4)),
        Tile(16, 128, 64, 5, (1, 4)),
    ),
    "16-bit narrow": (
        Tile(128, 128, 32, 3, (2, 4)),
        Tile(64, 64, 32, 4, (2, 2)),
        Tile(16, 128, 32, 4, (1, 4)),
    ),
    "tf32": (
        Tile(128, 256, 16, 4, (2, 4)),
        Tile(128, 128, 16, 4, (2, 2)),
        Tile(64, 64, 32, 4, (2, 2)),
        Tile(16, 128, 32, 5, (1, 4)),
    ),
    "float64": (
        Tile(128, 128, 16, 3, (4, 2)),
        Tile(64, 64, 16, 4, (2, 2)),
        Tile(16, 64, 16, 5, (1, 4)),
    ),
    "8-bit": (
        Tile(128, 128, 128, 3, (2, 4)),
        Tile(64, 64, 128, 4, (2, 2)),
        Tile(16, 128, 128, 4, (1, 4)),
    ),
    "8-bit promoted": (  # with a second set of accumulators
        Tile(64, 128, 128, 4, (2, 4)),
        Tile(64, 64, 128, 4, (2, 2)),
        Tile(16, 128, 128, 4, (1, 4)),
    ),
    "float32": (
        Tile(256, 128, 8, 3, (4, 2)),
        Tile(128, 128, 8, 3, (2, 2)),
        Tile(64, 64, 16, 3, (2, 2)),
        Tile(32, 128, 16, 3, (1, 4)),
    ),
    "float32 across K": (
        Tile(256, 128, 32, 3, (4, 2)),
        Tile(256, 128, 16, 3, (4, 2)),
        Tile(128, 128, 16, 3, (2, 2)),
        Tile(64, 64, 16, 3, (2, 2)),
        Tile(32, 128, 16, 3, (1, 4)),
    ),
}

# --- parameters -----------------------------------------------------------------------------------------------------


def strides_of(name: str) -> dict[str, str]:
    return {f"{name}_{axis}": "int64" for axis in ("row", "col", "batch0", "batch1", "batch2")}


def _scalar(name: str) -> dict[str, str]:
    return {name: "pointer", f"{name}_value": "float64", f"{name}_type": "int64"}


CALL_FIELDS = {
    **{"a": "pointer", "b": "pointer"},
    **_scalar("alpha"),
    **dict.fromkeys(("out", "c", "bias", "residual"), "pointer"),
    **_scalar("beta"),
}
SHAPE_FIELDS = {
    **{key: kind for name in ("a", "b", "out", "c", "residual") for key, kind in strides_of(name).items()},
    "bias_stride": "int64",
    "bias_batch": "int64",
    **dict.fromkeys(("rows", "cols", "out_flags", "c_flags", "bias_flags", "residual_flags"), "int32"),
    "partial_stride": "int64",
    **dict.fromkeys(("M", "N", "K", "k_per_split", "batches", "extent0", "extent1", "extent2"), "int32"),
}
CALL = ParamStruct("GemmCall", **CALL_FIELDS)
SHAPE = ParamStruct("GemmShape", **SHAPE_FIELDS)
PARAMS = ParamStruct("GemmParams", **CALL_FIELDS, **SHAPE_FIELDS)  # one after the other, both of 8-byte alignment

# --- kernels --------------------------------------------------------------------------------------------------------

LAYOUT_CHOICES = {
    "a_k_major": (True, False),
    "b_k_major": (True, False),
    "access_a": (16, 8, 4, 2),
    "access_b": (16, 8, 4, 2),
    "activation": tuple(range(len(ACTIVATIONS))),
}


def _spec(kind: str, types: dict, accesses: tuple[int, ...], smoke: list[dict]) -> KernelSpec:
    """Declare the kernel of one kind of product, for the dtypes, tiles and accesses that go together."""
    name = "gemm_simt" if kind.startswith("float32") else "gemm_sm80"
    tiles = tuple(tile.cpp for tile in TILES[kind])
    choices = {**types, "tile": tiles, **LAYOUT_CHOICES, "access_a": accesses, "access_b": accesses}
    return KernelSpec(
        source=f"{name}.cu",
        entry=f"rawops::{name}",
        template=tuple(choices),
        choices=choices,
        smoke=smoke,
        params=PARAMS,
    )


def _smoke(kind: str, dtype: str | None, layouts=((True, False), (True, True)), access=16, activation=0) -> list[dict]:
    types = {"dtype": dtype, "out_dtype": dtype} if dtype else {}
    shared = {**types, "access_a": access, "access_b": access, "activation": activation}
    return [{**shared, "tile": tile.cpp, "a_k_major": a, "b_k_major": b} for tile in TILES[kind] for a, b in layouts]


_ROWS = ((True, False),)  # row-major a and b
_HALVES = {"dtype": ("float16", "bfloat16"), "out_dtype": ("float16", "bfloat16", "float32")}
_SINGLE = {"dtype": ("float32",), "out_dtype": ("float32",)}
_DOUBLE = {"dtype": ("float64",), "out_dtype": ("float64", "float32")}

KERNELS = {
    "16-bit": _spec(
        "16-bit",
        _HALVES,
        (16, 8),
        [*_smoke("16-bit", "float16"), *_smoke("16-bit", "bfloat16", _ROWS, activation=SWIGLU)],
    ),
    "16-bit narrow": _spec(
        "16-bit narrow", _HALVES, LAYOUT_CHOICES["access_a"], _smoke("16-bit narrow", "float16", _ROWS, access=2)
    ),
    "tf32": _spec("tf32", _SINGLE, (16, 8, 4), _smoke("tf32", "float32")),
    "float64": _spec("float64", _DOUBLE, (16, 8), _smoke("float64", "float64")),
    "float32": _spec("float32", {}, (16, 8, 4), _smoke("float32", None)),
    "float32 across K": _spec("float32 across K", {}, (16, 8, 4), _smoke("float32 across K", None, ((False, False),))),
}
REDUCE_THREADS = 128
REDUCE = KernelSpec(
    source="gemm_reduce.cu",
    entry="rawops::gemm_reduce",
    template=("dtype", "out_dtype", "lanes", "activation", "fragments"),
    choices={
        "dtype": DTYPES,
        "out_dtype": DTYPES,
        "lanes": (1, 2, 4, 8, 16),  # threads that share the slices of a group of columns
        "activation": LAYOUT_CHOICES["activation"],
        "fragments": (False, True),  # the layout that slices on Hopper come in
    },
    smoke=[
        {"dtype": "float16", "out_dtype": "float16", "lanes": lanes, "activation": 0, "fragments": lanes in (1, 8)}
        for lanes in (1, 2, 4, 8, 16)
    ],
    params=PARAMS,
)

# --- which kernel, which tile ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What a configuration depends on.

    N counts columns of b; `access` is the narrower access to a and b in bytes. `promoted`: sums of parts of K are added
    up beside the tensor cores. `across_k`: neither a nor b is contiguous along K.
    """

    dtype: str
    M: int
    N: int
    K: int
    batches: int = 1
    tf32: bool = False
    access: int = 16
    promoted: bool = False
    across_k: bool = False

    @property
    def kind(self) -> str:
        if dtypes.itemsize(self.dtype) == 1:
            return "8-bit promoted" if self.promoted else "8-bit"
        if self.dtype == "float32":
            return "tf32" if self.tf32 else "float32 across K" if self.across_k else "float32"
        if self.dtype == "float64":
            return "float64"
        return "16-bit" if self.access >= 8 else "16-bit narrow"  # narrow copies take more registers

    @property
    def accumulator(self) -> str:
        return {"float64": "float64", "int8": "int32"}.get(self.dtype, "float32")

    def tiles(self, tile: Tile) -> int:
        return -(-self.M // tile.block_m) * -(-self.N // tile.block_n) * self.batches


@dataclass(frozen=True)
class Config:
    """A tile, and over how many slices of K its product is split."""

    tile: Tile
    split_k: int
    k_per_split: int


def candidates(problem: Problem, max_shared_bytes: int) -> list[Tile]:
    """Return the tiles that come into question, the largest first."""
    tiles = fitting(problem, max_shared_bytes)
    tallest = next((t.block_m for t in reversed(tiles) if t.block_m >= problem.M), tiles[0].block_m)
    shortest = min(tallest, 64)  # below 64 rows a tile reads b more often than it needs to
    return [t for t in tiles if shortest <= t.block_m <= tallest]


def fitting(problem: Problem, max_shared_bytes: int) -> list[Tile]:
    """Return the tiles of a kind of problem that a block has shared memory for."""
    return [t for t in TILES[problem.kind] if t.shared_bytes(dtypes.itemsize(problem.dtype)) <= max_shared_bytes]


def select_config(problem: Problem, sm_count: int, max_shared_bytes: int, split_k: int | None = None) -> Config:
    """Choose tile and split for a problem; pure arithmetic.

    The tile is the largest that still gives five SMs of six one, among those not much taller than M.
    """
    tiles = candidates(problem, max_shared_bytes)
    tile = next((t for t in tiles if 6 * problem.tiles(t) >= 5 * sm_count), tiles[-1])
    return configure(problem, tile, sm_count, max_shared_bytes, split_k)


def configure(problem: Problem, tile: Tile, sm_count: int, max_shared_bytes: int, split_k: int | None = None) -> Config:
    """Choose the split for a tile.

    Where its tiles leave SMs idle, K is split until they are busy, as long as a slice keeps at least 512 bytes a row.
    """
    itemsize = dtypes.itemsize(problem.dtype)
    k_blocks = max(1, -(-problem.K // tile.block_k))
    if split_k is None:
        resident = sm_count * (2 if 2 * tile.shared_bytes(itemsize) <= max_shared_bytes and tile.threads <= 128 else 1)
        blocks_per_slice = max(1, 512 // (tile.block_k * itemsize))
        split_k = max(1, min(resident // max(1, problem.tiles(tile)), k_blocks // blocks_per_slice, _MAX_SPLITS))
    k_per_split = -(-k_blocks // min(split_k, k_blocks)) * tile.block_k
    return Config(tile, max(1, -(-problem.K // k_per_split)), k_per_split)
