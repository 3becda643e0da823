"""Matrix products with a fused epilogue: D = activation(alpha * (a @ b) + beta * c + bias) + residual.

A call turns its arrays into a key of shapes, strides, alignments and dtypes. The first call with a key checks the
arguments, chooses a kernel and packs what stays the same (`_prepare`); later ones only fill in pointers and launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rawops import _gemm_sm90
from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.kernel import Function, KernelSpec, ParamStruct

DTYPES = ("float16", "bfloat16", "float32", "float64")
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu", "swiglu")  # the index is the kernels' number
SCALAR_TYPES = ("float32", "float64", "float16", "bfloat16")  # of alpha and beta arrays; likewise

_MAX_SIZE = 2**31 - 2**16  # leaves the kernels' int arithmetic room for a tile
_MAX_BATCH_AXES = 3
_MAX_GRID_Z = 65535
_MAX_SPLITS = 32
_ALIGNED, _FLOAT32 = 1, 2  # OperandFlags in epilogue.cuh

# --- kernels --------------------------------------------------------------------------------------------------------


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
        return self.stages * (self.block_m + self.block_n) * self.block_k * itemsize


# Tiles by kind of product, largest first. All fit the 99 KB of shared memory that every supported card has, and keep
# at least 40 KB on its way into an SM, which is what hides the latency of the memory.
_TILES = {
    "16-bit": (
        Tile(128, 256, 32, 4, (2, 4)),
        Tile(128, 128, 32, 4, (2, 2)),
        Tile(64, 128, 64, 4, (2, 2)),
        Tile(64, 64, 64, 4, (2, 2)),
        Tile(32, 128, 64, 4, (1, 4)),
        Tile(16, 128, 64, 5, (1, 4)),
    ),
    "16-bit narrow": (
        Tile(128, 128, 32, 3, (2, 4)),
        Tile(64, 64, 64, 3, (2, 2)),
        Tile(16, 128, 32, 4, (1, 4)),
    ),
    "tf32": (
        Tile(128, 128, 32, 3, (2, 4)),
        Tile(64, 64, 32, 4, (2, 2)),
        Tile(16, 128, 32, 5, (1, 4)),
    ),
    "float64": (
        Tile(128, 64, 16, 3, (2, 2)),
        Tile(64, 64, 16, 4, (2, 2)),
        Tile(16, 64, 16, 5, (1, 4)),
    ),
    "float32": (
        Tile(128, 128, 16, 3, (2, 4)),
        Tile(64, 64, 16, 3, (2, 2)),
        Tile(32, 128, 16, 3, (1, 4)),
    ),
}


def _strides(name: str) -> dict[str, str]:
    return {f"{name}_{axis}": "int64" for axis in ("row", "col", "batch0", "batch1", "batch2")}


def _scalar_fields(name: str) -> dict[str, str]:
    return {name: "pointer", f"{name}_value": "float64", f"{name}_type": "int64"}


_CALL_FIELDS = {
    **{"a": "pointer", "b": "pointer"},
    **_scalar_fields("alpha"),
    **dict.fromkeys(("out", "c", "bias", "residual"), "pointer"),
    **_scalar_fields("beta"),
}
_SHAPE_FIELDS = {
    **{key: kind for name in ("a", "b", "out", "c", "residual") for key, kind in _strides(name).items()},
    "bias_stride": "int64",
    **dict.fromkeys(("rows", "cols", "out_flags", "c_flags", "bias_flags", "residual_flags"), "int32"),
    "partial_stride": "int64",
    **dict.fromkeys(("M", "N", "K", "k_per_split", "batches", "extent0", "extent1", "extent2"), "int32"),
}
_CALL = ParamStruct("GemmCall", **_CALL_FIELDS)
_SHAPE = ParamStruct("GemmShape", **_SHAPE_FIELDS)
PARAMS = ParamStruct("GemmParams", **_CALL_FIELDS, **_SHAPE_FIELDS)  # one after the other, both of 8-byte alignment

_LAYOUT_CHOICES = {
    "a_k_major": (True, False),
    "b_k_major": (True, False),
    "access_a": (16, 8, 4, 2),
    "access_b": (16, 8, 4, 2),
    "activation": tuple(range(len(ACTIVATIONS))),
}


def _tile_choices(*kinds: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tile.cpp for kind in kinds for tile in _TILES[kind]))


def _smoke(dtype: str, kind: str, layouts=((True, False), (True, True)), access=16, activation=0) -> list[dict]:
    shared = {"dtype": dtype, "out_dtype": dtype, "access_a": access, "access_b": access, "activation": activation}
    return [{**shared, "tile": tile.cpp, "a_k_major": a, "b_k_major": b} for tile in _TILES[kind] for a, b in layouts]


SM80 = KernelSpec(
    source="gemm_sm80.cu",
    entry="rawops::gemm_sm80",
    template=("dtype", "out_dtype", "tile", *_LAYOUT_CHOICES),
    choices={
        "dtype": DTYPES,
        "out_dtype": DTYPES,
        "tile": _tile_choices("16-bit", "16-bit narrow", "tf32", "float64"),
        **_LAYOUT_CHOICES,
    },
    smoke=(
        *_smoke("float16", "16-bit"),
        *_smoke("bfloat16", "16-bit", ((True, False),), activation=5),
        *_smoke("float16", "16-bit narrow", ((True, False),), access=2),
        *_smoke("float32", "tf32"),
        *_smoke("float64", "float64"),
    ),
    params=PARAMS,
)
SIMT = KernelSpec(
    source="gemm_simt.cu",
    entry="rawops::gemm_simt",
    template=("tile", *_LAYOUT_CHOICES),
    choices={"tile": _tile_choices("float32"), **_LAYOUT_CHOICES, "access_a": (16, 8, 4), "access_b": (16, 8, 4)},
    smoke=_smoke("float32", "float32"),
    params=PARAMS,
)
REDUCE = KernelSpec(
    source="gemm_reduce.cu",
    entry="rawops::gemm_reduce",
    template=("dtype", "out_dtype", "activation"),
    choices={"dtype": DTYPES, "out_dtype": DTYPES, "activation": _LAYOUT_CHOICES["activation"]},
    smoke=({"dtype": "float16", "out_dtype": "float16", "activation": 0},),
    params=PARAMS,
)

# --- which kernel, which tile ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What a configuration depends on. N counts columns of b; `access` is the narrower access to a and b in bytes."""

    dtype: str
    M: int
    N: int
    K: int
    batches: int = 1
    tf32: bool = False
    access: int = 16

    @property
    def kind(self) -> str:
        if self.dtype == "float32":
            return "tf32" if self.tf32 else "float32"
        if self.dtype == "float64":
            return "float64"
        return "16-bit" if self.access >= 8 else "16-bit narrow"  # narrow copies take more registers


@dataclass(frozen=True)
class Config:
    """A tile, and over how many slices of K its product is split."""

    tile: Tile
    split_k: int
    k_per_split: int


def select_config(problem: Problem, sm_count: int, max_shared_bytes: int, split_k: int | None = None) -> Config:
    """Choose tile and split for a problem; pure arithmetic.

    The tile is the largest that still gives every SM one, among those not much taller than M. If even the smallest
    leaves SMs idle, K is split until they are busy, as long as a slice keeps at least 256 bytes a row.
    """
    itemsize = dtypes.itemsize(problem.dtype)
    candidates = [t for t in _TILES[problem.kind] if t.shared_bytes(itemsize) <= max_shared_bytes]
    tallest = next((t.block_m for t in reversed(candidates) if t.block_m >= problem.M), candidates[0].block_m)
    shortest = min(tallest, 64)  # below 64 rows a tile reads b more often than it needs to
    candidates = [t for t in candidates if shortest <= t.block_m <= tallest]

    def tiles(tile: Tile) -> int:
        return -(-problem.M // tile.block_m) * -(-problem.N // tile.block_n) * problem.batches

    tile = next((t for t in candidates if tiles(t) >= sm_count), candidates[-1])
    k_blocks = max(1, -(-problem.K // tile.block_k))
    if split_k is None:
        resident = sm_count * (2 if 2 * tile.shared_bytes(itemsize) <= max_shared_bytes and tile.threads <= 128 else 1)
        blocks_per_slice = max(1, 512 // (tile.block_k * itemsize))
        split_k = max(1, min(resident // max(1, tiles(tile)), k_blocks // blocks_per_slice, _MAX_SPLITS))
    k_per_split = -(-k_blocks // min(split_k, k_blocks)) * tile.block_k
    return Config(tile, max(1, -(-problem.K // k_per_split)), k_per_split)


# --- from arrays to a launch ----------------------------------------------------------------------------------------


@dataclass
class _Operand:
    """An array as the kernels see it: strides in elements, batch axes as in the result."""

    dtype: str
    itemsize: int
    alignment: int  # the address modulo 16
    row: int
    col: int
    batch: list[int]


@dataclass(frozen=True)
class _Launch:
    """Everything about a call that does not change while its key stays the same."""

    out_shape: tuple[int, ...]
    out_dtype: np.dtype
    empty: bool
    spans: tuple  # of the operands: first and last byte from the pointer
    in_place: tuple[bool, bool]  # out may be c, out may be residual, entry for entry
    kernel: Function | None = None
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    shared_bytes: int = 0
    shape: bytes = b""
    split: _Split | None = None
    hopper: _gemm_sm90.Plan | None = None
    kept: Any = None  # what Product.parameters wants to know

    def collides(self, pointers: tuple) -> bool:
        """Tell whether the result would overwrite what is still to be read."""
        out, (low, high) = pointers[5], self.spans[5]
        low, high = out + low, out + high
        for i, (pointer, span) in enumerate(zip(pointers, self.spans, strict=True)):
            if i != 5 and pointer and pointer + span[0] < high and low < pointer + span[1]:
                exact = pointer == out and ((i == 2 and self.in_place[0]) or (i == 4 and self.in_place[1]))
                if not exact:
                    return True
        return False

    def run(self, pointers: tuple, alpha: tuple, beta: tuple, workspace: int, further: bytes) -> None:
        """Launch; the pointers start with those of a, b, c, bias, residual, out."""
        a, b, c, bias, residual, out = pointers[:6]
        call = _CALL.pack(a, b, *alpha, out, c, bias, residual, *beta)
        if self.hopper is not None:
            self.hopper.run(a, b, out, call + self.shape)
            return
        if self.split is None:
            self.kernel.launch(self.grid, self.block, (call + self.shape + further,), self.shared_bytes)
            return
        partial = _CALL.pack(a, b, *alpha, workspace, 0, 0, 0, *_ZERO)
        self.kernel.launch(self.grid, self.block, (partial + self.split.shape + further,), self.shared_bytes)
        values = (call + self.shape, workspace, self.split.workspace_shape[0], self.split.workspace_shape[2])
        self.split.kernel.launch(self.split.grid, (128, 1, 1), values)


@dataclass(frozen=True)
class _Split:
    """The reduction that follows a product split along K."""

    kernel: Function
    grid: tuple[int, int, int]
    shape: bytes  # of the partial products
    workspace_shape: tuple[int, int, int]  # splits, batches * M, row stride
    workspace_dtype: np.dtype


_ZERO = (0, 0.0, 0)  # a scalar as the kernels take it


class Product:
    """The plain product of `gemm`. lora.py derives one that adds a low-rank part in the same kernel.

    Attributes
    ----------
    arrays : dict
        Operands beyond those of `gemm`, by name.
    """

    arrays: ClassVar[dict] = {}

    def configure(self, device, problem: Problem, split_k: int | None) -> Config:
        """Choose tile and split."""
        return select_config(problem, device.sm_count, device.max_shared_bytes, split_k)

    def kernel(self, device, problem: Problem, config: Config, choices: dict, operands: dict):
        """Return the kernel, its shared memory, and what `parameters` wants to know of this launch."""
        itemsize = dtypes.itemsize(problem.dtype)
        spec = SIMT if problem.kind == "float32" else SM80
        return spec.kernel(device, **choices), config.tile.shared_bytes(itemsize), None

    def parameters(self, device, launch: _Launch, pointers: tuple, workspaces: dict | None) -> bytes:
        """Pack what the kernel takes behind GemmParams, for one call."""
        return b""


_PLAIN = Product()


def _prepare(function, device, options, named: dict, pointers: tuple, product: Product) -> _Launch:
    """Check the arguments, choose the kernel and pack what does not change."""
    activation, out_dtype, precision, split_k, plan = options
    a, b, out = named["a"], named["b"], named["out"]
    if plan is not None:
        _check_plan(function, a, b, plan)
    dtype = _check_operands(function, a, b, activation, precision)
    if split_k is not None:
        checks.int_range(function, "split_k", split_k, 1, 1024)
    M, K, N = a.shape[-2], a.shape[-1], b.shape[-1]
    cols = N // 2 if activation == "swiglu" else N
    batch_shape = _broadcast_batch(function, a, b)
    shape = (*batch_shape, M, cols)
    out_dtype = _out_dtype(function, dtype, out_dtype, out)
    _check_epilogue(function, dtype, named, shape, (*batch_shape, M, N))

    spans = tuple((0, 0) if x is None else _span(x) for x in named.values())
    same = [out is not None and x is not None and _same_entries(x, out) for x in (named["c"], named["residual"])]
    frame = {"out_shape": shape, "out_dtype": dtypes.numpy(out_dtype), "spans": spans, "in_place": tuple(same)}
    if math.prod(shape) == 0:
        return _Launch(empty=True, **frame)

    operands = _operands(function, named, pointers, batch_shape, shape, N, out_dtype)
    further = {name: operands.pop(name) for name in product.arrays}
    M, extents = _fold_batch(function, operands, batch_shape, M)
    a_k_major, access_a = _layout(operands["a"], M, K, operands["a"].row, operands["a"].col, 0)
    gate = cols if activation == "swiglu" else 0
    b_k_major, access_b = _layout(operands["b"], N, K, operands["b"].col, operands["b"].row, gate)
    problem = Problem(dtype, M, N, K, math.prod(extents), precision == "tf32", min(access_a, access_b))
    config = product.configure(device, problem, split_k)
    layout = {"a_k_major": a_k_major, "b_k_major": b_k_major, "access_a": access_a, "access_b": access_b}
    sizes = (M, N, K, cols)
    number = ACTIVATIONS.index(activation)

    hopper = (device, operands, M, N, K, extents, number)
    if not product.arrays and split_k is None and _gemm_sm90.supports(*hopper):
        shape = _pack_shape(operands, sizes, extents, config, gate)
        return _Launch(empty=False, shape=shape, hopper=_gemm_sm90.plan(*hopper), **frame)
    split = None
    if config.split_k > 1:
        split = _prepare_split(device, problem, config, operands, sizes, extents, out_dtype, number)
        number, cols, out_dtype = 0, N, dtypes.name(split.workspace_dtype)
    tile = config.tile
    choices = {"dtype": dtype, "out_dtype": out_dtype, "tile": tile.cpp, **layout, "activation": number}
    kernel, shared_bytes, kept = product.kernel(device, problem, config, choices, further)
    tile_cols = tile.block_n // (2 if number == ACTIVATIONS.index("swiglu") else 1)
    return _Launch(
        empty=False,
        kernel=kernel,
        grid=(-(-M // tile.block_m) * -(-cols // tile_cols), config.split_k, min(problem.batches, _MAX_GRID_Z)),
        block=(tile.threads, 1, 1),
        shared_bytes=max(shared_bytes, _staging_bytes(tile, dtype)),
        shape=_pack_shape(operands, sizes, extents, config, gate),
        split=split,
        kept=kept,
        **frame,
    )


def _prepare_split(device, problem, config, operands, sizes, extents, out_dtype, activation) -> _Split:
    """Prepare the partial products as a plain GEMM into a workspace, and the kernel that adds them."""
    M, N, K, cols = sizes
    accumulator = "float64" if problem.dtype == "float64" else "float32"
    width = 16 // dtypes.itemsize(accumulator)
    row_stride = -(-N // width) * width
    strides, step = [], M * row_stride
    for extent in reversed(extents):
        strides.insert(0, step)
        step *= extent
    itemsize = dtypes.itemsize(accumulator)
    plain = {name: operands[name] for name in ("a", "b")}
    plain["out"] = _Operand(accumulator, itemsize, 0, row_stride, 1, strides)
    groups = -(-cols // width) * M * problem.batches
    return _Split(
        kernel=REDUCE.kernel(device, dtype=problem.dtype, out_dtype=out_dtype, activation=activation),
        grid=(-(-groups // 128), 1, 1),
        shape=_pack_shape(plain, (M, N, K, N), extents, config, 0, partial_stride=step),
        workspace_shape=(config.split_k, problem.batches * M, row_stride),
        workspace_dtype=dtypes.numpy(accumulator),
    )


def _staging_bytes(tile: Tile, dtype: str) -> int:
    """Shared memory that finish_tile takes over from the ring: 16 rows a warp."""
    accumulator = 8 if dtype == "float64" else 4
    return tile.warps[0] * 16 * tile.block_n * accumulator


def _pack_shape(operands, sizes, extents, config, gate, partial_stride=0) -> bytes:
    M, N, K, cols = sizes
    width = 2 if operands["a"].dtype == "float64" else 4  # columns that a thread finishes together
    strides, flags = [], {}
    for name in ("a", "b", "out", "c", "residual"):
        x = operands.get(name)
        strides += [0] * 5 if x is None else [x.row, x.col, *x.batch]
    for name in ("out", "c", "bias", "residual"):
        x = operands.get(name)
        flags[name] = 0
        if x is not None:
            halves = gate if name in ("c", "bias") else 0
            whole = math.gcd(x.alignment, *(s * x.itemsize for s in (x.row, *x.batch, halves)))
            flags[name] |= _ALIGNED if x.col == 1 and whole % (width * x.itemsize) == 0 else 0
            flags[name] |= _FLOAT32 if x.dtype == "float32" else 0
    bias = operands.get("bias")
    return _SHAPE.pack(
        *strides,
        bias.col if bias else 0,
        *(M, cols, *flags.values()),
        partial_stride,
        *(M, N, K, config.k_per_split, math.prod(extents), *extents),
    )


def _layout(x: _Operand, mn: int, k: int, mn_stride: int, k_stride: int, gate: int) -> tuple[bool, int]:
    """Choose the contiguous axis of an operand and the widest access along it that is always aligned.

    Returns whether that axis is K, and the access in bytes: one element if neither axis is contiguous. An axis of one
    entry is contiguous whatever its stride.
    """

    def access(extent, stride, slow_extent, slow_stride, halves):
        if stride != 1 and extent > 1:
            return 0
        steps = (*x.batch, halves, slow_stride if slow_extent > 1 else 0)
        return math.gcd(16, x.alignment, *(s * x.itemsize for s in steps))

    along_k = access(k, k_stride, mn, mn_stride, 0)
    along_mn = access(mn, mn_stride, k, k_stride, gate)
    if not along_k and not along_mn:
        return abs(k_stride) <= abs(mn_stride), x.itemsize
    return along_k >= along_mn, max(along_k, along_mn)


def _operands(function, named, pointers, batch_shape, shape, N, out_dtype) -> dict[str, _Operand]:
    """Describe every array that is present, with batch strides of the result's batch shape."""
    targets = {"c": (*batch_shape, shape[-2], N), "residual": shape, "out": shape}
    found = {}
    for (name, x), pointer in zip(named.items(), pointers, strict=True):
        if x is None:
            if name == "out":
                found[name] = _contiguous(shape, out_dtype)
            continue
        itemsize = x.dtype.itemsize
        if pointer % itemsize or any(s % itemsize for s in x.strides):
            address = f"address {pointer}, strides {tuple(x.strides)} bytes"
            checks.fail(ValueError, function, name, "lie on whole elements", address, "Copy it first.")
        strides = [s // itemsize for s in x.strides]
        if name == "bias":
            found[name] = _Operand(dtypes.name(x.dtype), itemsize, pointer % 16, 0, strides[0], [0])
            continue
        target = targets.get(name, (*batch_shape, *x.shape[-2:]))
        strides = [0] * (len(target) - x.ndim) + [
            s if extent != 1 else 0 for s, extent in zip(strides, x.shape, strict=True)
        ]
        *batch, row, col = strides
        if col == 0 and target[-1] == 1:
            col = 1  # so that one column counts as contiguous
        found[name] = _Operand(dtypes.name(x.dtype), itemsize, pointer % 16, row, col, batch)
    return found


def _contiguous(shape, dtype: str) -> _Operand:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    *batch, row, col = strides
    return _Operand(dtype, dtypes.itemsize(dtype), 0, row, col, batch)


def _fold_batch(function, operands, batch_shape, M) -> tuple[int, tuple[int, int, int]]:
    """Merge batch axes that every operand steps through evenly, and those that only stack rows of a into M."""
    stacked = [x for name, x in operands.items() if name != "bias"]
    axes = [(extent, [x.batch[i] for x in stacked]) for i, extent in enumerate(batch_shape) if extent != 1]
    merged: list[tuple[int, list[int]]] = []
    for extent, strides in reversed(axes):
        if merged and all(s == t * merged[0][0] for s, t in zip(strides, merged[0][1], strict=True)):
            merged[0] = (merged[0][0] * extent, merged[0][1])
        else:
            merged.insert(0, (extent, strides))
    if merged:
        extent, strides = merged[-1]
        step = dict(zip((id(x) for x in stacked), strides, strict=True))
        rows = [x for x in stacked if x is not operands["b"]]
        even = all(M == 1 or step[id(x)] == M * x.row for x in rows)
        if step[id(operands["b"])] == 0 and even and M * extent <= _MAX_SIZE:
            for x in rows:
                x.row = step[id(x)] if M == 1 else x.row
            M *= extent
            merged.pop()
    if len(merged) > _MAX_BATCH_AXES:
        extents = tuple(extent for extent, _ in merged)
        hint = "Copy the operands into contiguous arrays, or loop over the first axis."
        rule = f"have at most {_MAX_BATCH_AXES} batch axes that cannot be merged"
        checks.fail(ValueError, function, "a and b", rule, f"axes of {extents}", hint)
    merged = [(1, [0] * len(stacked))] * (_MAX_BATCH_AXES - len(merged)) + merged
    for i, x in enumerate(stacked):
        x.batch = [strides[i] for _, strides in merged]
    if "bias" in operands:
        operands["bias"].batch = [0] * _MAX_BATCH_AXES
    return M, tuple(extent for extent, _ in merged)


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_operands(function, a, b, activation, precision) -> str:
    dtype = checks.dtype(function, "a", a, DTYPES)
    checks.dtype(function, "b", b, (dtype,), "a and b have one dtype; convert one of them.")
    for name, x in (("a", a), ("b", b)):
        if x.ndim < 2:
            hint = "Make a vector a matrix with x[None, :] or x[:, None]."
            checks.fail(ValueError, function, name, "have at least 2 dimensions", f"shape {tuple(x.shape)}", hint)
        if max(x.shape[-2:]) > _MAX_SIZE:
            checks.fail(ValueError, function, name, f"have at most {_MAX_SIZE} rows and columns", tuple(x.shape))
    if a.shape[-1] != b.shape[-2]:
        rule = f"have {a.shape[-1]} rows, as a has columns"
        checks.fail(ValueError, function, "b", rule, f"shapes {tuple(a.shape)} @ {tuple(b.shape)}", "Transpose it?")
    checks.choice(function, "activation", activation, ACTIVATIONS)
    if activation == "swiglu" and b.shape[-1] % 2:
        checks.fail(ValueError, function, "b", "have an even number of columns for swiglu", b.shape[-1])
    checks.choice(function, "precision", precision, (None, "tf32"))
    if precision == "tf32" and dtype != "float32":
        checks.fail(ValueError, function, "precision", f"be None for {dtype}", repr(precision), "TF32 rounds float32.")
    return dtype


def _check_plan(function, a, b, plan: tuple) -> None:
    M, N, K, dtype = plan
    for name, x, shape in (("a", a, (M, K)), ("b", b, (K, N))):
        if x.shape[-2:] != shape:
            checks.fail(ValueError, function, name, f"have shape (..., {shape[0]}, {shape[1]})", tuple(x.shape))
        checks.dtype(function, name, x, (dtype,))


def _broadcast_batch(function, a, b) -> tuple[int, ...]:
    try:
        batch = np.broadcast_shapes(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    except ValueError:
        shapes = f"shapes {tuple(a.shape)} @ {tuple(b.shape)}"
        return checks.fail(ValueError, function, "b", "have batch axes that broadcast with those of a", shapes)
    if math.prod(batch) > _MAX_SIZE:
        checks.fail(ValueError, function, "a and b", f"have at most {_MAX_SIZE} matrices", math.prod(batch))
    return batch


def _out_dtype(function, dtype: str, out_dtype, out) -> str:
    given = out_dtype if out_dtype is not None else out.dtype if out is not None else dtype
    try:
        name = dtypes.name(given)
    except (TypeError, AttributeError):
        name = repr(given)
    allowed = tuple(dict.fromkeys((dtype, "float32")))
    if name not in allowed:
        argument = "out_dtype" if out_dtype is not None else "out"
        checks.fail(TypeError, function, argument, f"be {' or '.join(allowed)} for {dtype} inputs", name)
    if out is not None:
        checks.dtype(function, "out", out, (name,), "out and out_dtype name the same type.")
    return name


def _check_epilogue(function, dtype, named, shape, full_shape) -> None:
    allowed = tuple(dict.fromkeys((dtype, "float32"))) if dtype != "float64" else (dtype,)
    for name, target in (("c", full_shape), ("residual", shape)):
        x = named[name]
        if x is not None:
            checks.dtype(function, name, x, allowed)
            trailing = target[len(target) - x.ndim :] if x.ndim <= len(target) else None
            fits = trailing and all(have in (1, want) for have, want in zip(x.shape, trailing, strict=True))
            if x.ndim < 2 or not fits:
                checks.fail(ValueError, function, name, f"broadcast to shape {target}", f"shape {tuple(x.shape)}")
    if named["bias"] is not None:
        checks.dtype(function, "bias", named["bias"], allowed)
        checks.shape(function, "bias", named["bias"], (full_shape[-1],))
    out = named["out"]
    if out is not None:
        checks.shape(function, "out", out, shape)
        if any(s == 0 and extent > 1 for s, extent in zip(out.strides, out.shape, strict=True)):
            checks.fail(ValueError, function, "out", "have entries of its own", f"strides {tuple(out.strides)}")


def _scalar(function: str, name: str, value) -> tuple[int, float, int]:
    """Return a number, or a 0-d array on the device, as the kernels take it: pointer, value, type of the array."""
    if type(value) is float or type(value) is int:
        return 0, float(value), 0
    if not hasattr(value, "__dlpack__") and not hasattr(value, "__cuda_array_interface__"):
        return 0, checks.number(function, name, value), 0
    if isinstance(value, np.generic):
        return 0, float(value), 0
    (x,), _ = arrays.take(function, **{name: value})
    if x.ndim != 0:
        checks.fail(ValueError, function, name, "be a number or a 0-d array", f"shape {tuple(x.shape)}")
    kind = SCALAR_TYPES.index(checks.dtype(function, name, x, SCALAR_TYPES))
    return arrays.device_of(function, **{name: x}).pointer(x), 0.0, kind


def _span(x) -> tuple[int, int]:
    """First byte of an array and the one past its last, from its pointer."""
    steps = [(extent - 1) * s for extent, s in zip(x.shape, x.strides, strict=True)]
    return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + x.dtype.itemsize


def _same_entries(x, out) -> bool:
    """Tell whether equal addresses mean equal entries, so that each is read just before it is overwritten."""
    return x.shape == out.shape and x.strides == out.strides and x.dtype == out.dtype


# --- calls ----------------------------------------------------------------------------------------------------------


def _launch_of(function, device, options, named: dict, pointers: tuple, product: Product) -> _Launch:
    pairs = zip(named.values(), pointers, strict=True)
    key = (options, *[None if x is None else (x.shape, x.strides, x.dtype, p & 15) for x, p in pairs])
    launch = device.functions.get(key)
    if launch is None:
        launch = device.functions[key] = _prepare(function, device, options, named, pointers, product)
    return launch


def _call(function, options, a, b, c, bias, residual, out, alpha, beta, workspaces=None, product=_PLAIN):
    """Run one product; `workspaces` is a dict that keeps a plan's workspaces from call to call."""
    alpha, beta = _scalar(function, "alpha", alpha), _scalar(function, "beta", beta)
    if beta == _ZERO:
        c = None  # never read
    elif c is None:
        checks.fail(ValueError, function, "c", "be given where beta is not 0", "None")
    named = {"a": a, "b": b, "c": c, "bias": bias, "residual": residual, "out": out, **product.arrays}
    device = arrays.device_of(function, **named)
    pointers = tuple([device.pointer(x) for x in named.values()])
    launch = _launch_of(function, device, options, named, pointers, product)
    result = out
    if out is not None and launch.collides(pointers):  # compute aside, copy at the end
        activation, _, *rest = options
        named["out"] = result = None
        launch = _launch_of(function, device, (activation, launch.out_dtype, *rest), named, pointers, product)
    if result is None:
        result = device.empty(launch.out_shape, launch.out_dtype)
        pointers = (*pointers[:5], device.pointer(result), *pointers[6:])
    if not launch.empty:
        further = product.parameters(device, launch, pointers, workspaces)
        split, buffer = launch.split, None
        if split is not None:
            buffer = _workspace(device, split.workspace_shape, split.workspace_dtype, workspaces)
        launch.run(pointers, alpha, beta, device.pointer(buffer), further)
    if out is not None and result is not out:
        out[...] = result
        return out
    return result


def _workspace(device, shape: tuple, dtype, kept: dict | None):
    if kept is None:
        return device.empty(shape, dtype)
    key = (device, shape, dtype)
    if key not in kept:
        kept[key] = device.empty(shape, dtype)
    return kept[key]


def gemm(
    a,
    b,
    c=None,
    *,
    alpha=1.0,
    beta=0.0,
    bias=None,
    residual=None,
    activation: str | None = None,
    out=None,
    out_dtype=None,
    precision: str | None = None,
    split_k: int | None = None,
    deterministic: bool = False,
):
    """Compute ``activation(alpha * (a @ b) + beta * c + bias) + residual`` in one pass over the result.

    Parameters
    ----------
    a : array (..., M, K)
        float16, bfloat16, float32 or float64. Batch axes broadcast with those of `b`.
    b : array (..., K, N)
        Same dtype. Both operands may have any strides; contiguous along either axis, with rows on 16-byte
        boundaries, is fastest.
    c : array broadcastable to (..., M, N), optional
        Not read when `beta` is 0.
    alpha, beta : float or 0-d array
        Arrays are read on the device, without synchronising. With `alpha` 0, `a` and `b` are not read.
    bias : array (N,), optional
        Added to every row before the activation.
    residual : array broadcastable to the result, optional
        Added after the activation. `c`, `bias` and `residual` have the inputs' dtype or float32.
    activation : {None, "relu", "gelu", "gelu_tanh", "silu", "swiglu"}
        "swiglu" takes an even N, gate in the first half of the columns and up in the second, and returns N/2 columns
        of ``silu(gate) * up``. At -inf, gelu and silu take their limit, 0; NaN stays NaN.
    out : array, optional
        Where the result goes. It may be `c` or `residual` itself; where it overlaps an input otherwise, the result
        is computed aside and copied.
    out_dtype : dtype, optional
        The inputs' dtype (default) or float32. A float16 result past 65504 is inf.
    precision : {None, "tf32"}
        "tf32" rounds float32 inputs to TF32 for the tensor cores; without it float32 is exact to its own rounding.
    split_k : int, optional
        Over how many slices of K to share the work; chosen when left out. Partial sums stay in the accumulator's
        type and are added in a fixed order.
    deterministic : bool
        Nothing here uses atomics: the same call gives the same bits either way.

    Returns
    -------
    array (..., M, N), or (..., M, N/2) for swiglu
        Accumulated in float32 (float64 for float64), rounded once.
    """
    (a, b, c, bias, residual, out), give = arrays.take("gemm", a=a, b=b, c=c, bias=bias, residual=residual, out=out)
    options = (activation, out_dtype, precision, split_k, None)
    return give(_call("gemm", options, a, b, c, bias, residual, out, alpha, beta))


class Gemm:
    """A GEMM of fixed sizes, for repeated calls: it keeps its workspace, so a call with ``out=`` allocates nothing.

    Calls of one plan share that workspace: they belong on one stream, or in an order that streams keep.

    Parameters
    ----------
    M, N, K : int
    dtype : dtype
        Of `a` and `b`.
    alpha, beta, bias, residual, activation, out_dtype, precision, split_k, deterministic
        As for `gemm`.
    """

    def __init__(
        self,
        M: int,
        N: int,
        K: int,
        dtype,
        *,
        alpha=1.0,
        beta=0.0,
        bias=None,
        residual=None,
        activation: str | None = None,
        out_dtype=None,
        precision: str | None = None,
        split_k: int | None = None,
        deterministic: bool = False,
    ) -> None:
        sizes = (checks.int_range("Gemm", n, v, 0, _MAX_SIZE) for n, v in (("M", M), ("N", N), ("K", K)))
        plan = (*sizes, checks.choice("Gemm", "dtype", dtypes.name(dtype), DTYPES))
        self._options = (activation, out_dtype, precision, split_k, plan)
        self._alpha, self._beta, self._bias, self._residual = alpha, beta, bias, residual
        self._workspaces: dict = {}

    def __call__(self, a, b, c=None, *, bias=None, residual=None, out=None):
        """Run the plan; `bias` and `residual` given here stand in for those of the plan."""
        bias = self._bias if bias is None else bias
        residual = self._residual if residual is None else residual
        (a, b, c, bias, residual, out), give = arrays.take("Gemm", a=a, b=b, c=c, bias=bias, residual=residual, out=out)
        arguments = (self._options, a, b, c, bias, residual, out, self._alpha, self._beta)
        return give(_call("Gemm", *arguments, self._workspaces))
