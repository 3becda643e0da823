"""The host side of gemm_w4.cu: products with packed 4-bit weights, their kernel and its configurations.

A weight is ``w = q * scale`` or ``(q - zero) * scale`` with q of four bits and one scale for each group of 32, 64 or
128 along K and each column. The product multiplies a with q - zero, which is exact, adds up each group in float32 and
scales the sum in float32. So weights are never rounded, and the error is that of a float32 sum of K + K / group terms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rawops import _gemm_w4_gemv, _gemm_w4_sm90, _gemm_w4_wide
from rawops._gemm_call import Product, reduction, slices_of
from rawops._gemm_config import CALL_FIELDS, LAYOUT_CHOICES, SHAPE_FIELDS, SWIGLU, Config, Problem
from rawops._gemm_maps import k_major
from rawops._gemm_operands import (
    ROLES,
    Operand,
    Options,
    Request,
    Sizes,
    check,
    pack_shape,
)
from rawops._gemm_steps import SplitK, pack_call
from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.kernel import Function, KernelSpec, ParamStruct

FORMATS = ("int4", "uint4", "float4_e2m1fn")  # the index is the kernel's number
GROUPS = (32, 64, 128)

_DTYPES = ("float16", "bfloat16")
_SCALE_DTYPES = (*_DTYPES, "float32")
_MAX_SPLITS = 32

# --- kernel ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """What one block computes: W4Shape in gemm_w4.cu. A warp has 32 columns; `warps` is (along M, along K)."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: tuple[int, int]

    @property
    def cpp(self) -> str:
        sizes = (self.block_m, self.block_n, self.block_k, self.stages, *self.warps)
        return f"rawops::W4Shape<{', '.join(map(str, sizes))}>"

    @property
    def threads(self) -> int:
        return self.warps[0] * self.warps[1] * self.block_n

    def stage_bytes(self, group: int, scale_bytes: int, zero_bytes: int) -> int:
        """Shared memory of a stage: 16-bit tokens, packed weights, scales and zero points."""
        weights = self.block_n * self.block_k // 2
        groups = self.block_n * self.block_k // group * (scale_bytes + zero_bytes)
        return -(-(self.block_m * self.block_k * 2 + weights + groups) // 128) * 128

    def staging_bytes(self, accumulator: str) -> int:
        """Shared memory of the sums of all parts of K, which takes over the ring's."""
        return self.warps[1] * self.block_m * self.block_n * dtypes.itemsize(accumulator)

    def shortened(self) -> list[Tile]:
        """Return the tile as it is, and with fewer stages for where it does not fit."""
        return [replace(self, stages=n) for n in range(self.stages, 1, -1)]


# For few tokens a block of 8 warps shares out the K of a stage and not the tokens, so that each weight is dequantised
# once. All fit the 99 KB of shared memory that every supported card has, with groups of 128 and 16-bit scales.
TILES = (
    Tile(64, 128, 128, 4, (2, 1)),
    Tile(32, 128, 256, 3, (1, 2)),
    Tile(16, 64, 512, 3, (1, 4)),
    Tile(16, 32, 512, 3, (1, 8)),
    Tile(8, 64, 512, 4, (1, 4)),
    Tile(8, 32, 512, 4, (1, 8)),
)

_GROUP_FIELDS = {
    **dict.fromkeys(("scale", "zero"), "pointer"),
    **dict.fromkeys(("scale_row", "scale_col", "zero_row", "zero_col"), "int64"),
    "zero_sign": "int32",
}
_GROUP_PARAMS = ParamStruct("GroupParams", **_GROUP_FIELDS)
_PARAMS = ParamStruct("W4Params", **CALL_FIELDS, **SHAPE_FIELDS, **_GROUP_FIELDS)
_TYPES = {  # of a, D and scales, and how weights are packed: of every kernel
    "dtype": _DTYPES,
    "out_dtype": _SCALE_DTYPES,
    "scale_dtype": _SCALE_DTYPES,
    "format": tuple(range(len(FORMATS))),
    "has_zeros": (False, True),
}
_CHOICES = {
    **_TYPES,
    "group": GROUPS,
    "tile": tuple(t.cpp for tile in TILES for t in tile.shortened()),
    "a_k_major": (True, False),
    "b_k_major": (True, False),
    "access_a": (16, 8, 4, 2),
    "access_b": (16, 8, 4, 1),
    "access_scale": (16, 8, 4, 2),
    "access_zero": (16, 8, 4, 1),
    "activation": LAYOUT_CHOICES["activation"],
}


def _smoke(tile: Tile, dtype: str = "bfloat16", number_format: int = 0, **changes) -> dict:
    values = {"dtype": dtype, "out_dtype": dtype, "scale_dtype": dtype, "format": number_format, "has_zeros": False}
    values |= {"group": 128, "tile": tile.cpp, "a_k_major": True, "b_k_major": True, "activation": 0}
    return values | {f"access_{name}": 16 for name in ("a", "b", "scale", "zero")} | changes


W4 = KernelSpec(
    source="gemm_w4.cu",
    entry="rawops::gemm_w4",
    template=tuple(_CHOICES),
    choices=_CHOICES,
    smoke=(
        *(_smoke(tile, b_k_major=k_major) for tile in TILES for k_major in (True, False)),
        *(_smoke(tile, "float16", 1, has_zeros=True, group=32, scale_dtype="float32") for tile in TILES),
        *(_smoke(tile, "float16", 2, group=32, activation=SWIGLU) for tile in TILES),
        _smoke(TILES[0], number_format=1, has_zeros=True, access_b=1, access_scale=2, access_zero=1, activation=SWIGLU),
        _smoke(TILES[0], number_format=2, a_k_major=False, b_k_major=False, access_a=2, access_b=1, access_scale=2),
    ),
    params=_PARAMS,
)
W4_GEMV = _gemm_w4_gemv.spec_of(_PARAMS, _TYPES)
W4_SM90 = _gemm_w4_sm90.spec_of(_PARAMS, _TYPES)
W4_WIDE, W4_WIDE_PAIRS = _gemm_w4_wide.specs_of(_PARAMS, _TYPES, GROUPS)

# --- which tile -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """What a configuration depends on beside the `Problem`: the size of a group, bytes of its scale and zero point."""

    size: int
    scale_bytes: int
    zero_bytes: int

    def ring_bytes(self, tile: Tile) -> int:
        return tile.stages * tile.stage_bytes(self.size, self.scale_bytes, self.zero_bytes)


def select_config(
    problem: Problem, groups: Groups, sm_count: int, max_shared_bytes: int, split_k: int | None = None
) -> Config:
    """Choose tile and split; pure arithmetic.

    A tile is as high as M needs, at most 64: packed weights take so little that a higher one would not move much less.
    It is the widest that gives five SMs of six one. If even the narrowest leaves SMs idle, K is split until they are
    busy, as long as a slice keeps 1024 of K.
    """
    tiles = TILES if problem.access >= 8 else TILES[:1]  # whose threads have registers left for narrow copies
    height = next((t.block_m for t in reversed(tiles) if t.block_m >= problem.M), tiles[0].block_m)
    candidates = [t for t in tiles if t.block_m == height]

    def count(tile: Tile) -> int:
        return -(-problem.M // tile.block_m) * -(-problem.N // tile.block_n) * problem.batches

    widest = next((t for t in candidates if 6 * count(t) >= 5 * sm_count), candidates[-1])
    tile = next(t for t in widest.shortened() if groups.ring_bytes(t) <= max_shared_bytes)
    k_blocks = max(1, -(-problem.K // tile.block_k))
    if split_k is None:
        split_k = max(1, min(sm_count // max(1, count(tile)), problem.K // 1024, _MAX_SPLITS))
    k_per_split = -(-k_blocks // min(split_k, k_blocks)) * tile.block_k
    return Config(tile, max(1, -(-problem.K // k_per_split)), k_per_split)


# --- from arrays to a launch ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Unpacked:
    """Stands for the weights in the checks that all products share."""

    shape: tuple[int, int]
    dtype: object
    ndim: int = 2


class WeightProduct(Product):
    """``activation(alpha * (a @ dequantised(b)) + ...)`` with the arrays in the order of `roles`.

    Parameters
    ----------
    function : str
        For messages.
    options : Options
    b_dtype : str
        One of `FORMATS`.
    has_zeros : bool
        Whether zero points are given, which is the last role.
    workspaces : dict, optional
        As for `Product`.
    """

    def __init__(
        self, function: str, options: Options, b_dtype: str, has_zeros: bool, workspaces: dict | None = None
    ) -> None:
        super().__init__(function, options, workspaces)
        self.roles = (*ROLES, "scale_b", "zero_b") if has_zeros else (*ROLES, "scale_b")
        self.b_dtype = checks.choice(function, "b_dtype", b_dtype, FORMATS)
        if options.sizes is not None:
            checks.named_dtype(function, "dtype", dtypes.shown(options.sizes[-1]), _DTYPES, " with b_dtype")

    def check_plan(self, scale, zero=None) -> None:
        """Check what a plan has, beside its options, that no call changes."""
        _, N, K, _ = self.options.sizes
        (scale, zero), _ = arrays.take(self.function, scale_b=scale, zero_b=zero)
        _check_groups(self.function, self.b_dtype, K, N, scale, zero)

    def check(self, request: Request) -> tuple[str, str, Sizes]:
        _check_weights(request, self.b_dtype)
        a, b = request.arrays["a"], request.arrays["b"]
        unpacked = _Unpacked((b.shape[0] * 2, b.shape[1]), a.dtype)
        return check(replace(request, arrays={**request.arrays, "b": unpacked}), self.types)

    def configure(self, device, request: Request, problem: Problem) -> Config:
        sizes = device.sm_count, device.max_shared_bytes
        return select_config(problem, _groups_of(request), *sizes, self.options.split_k)

    def hopper(self, request: Request, described: tuple, further: dict, shape: bytes) -> _OnHopper | SplitK | None:
        device, operands, M, N, K, extents, _ = described
        groups = _groups_of(request)
        fits = W4_SM90.exists_on(device.capability) and extents == (1, 1, 1) and M > 0 and K > 0
        fits = fits and k_major(operands["a"], M, K, operands["a"].row, operands["a"].col) is True
        fits = fits and all(_movable(x, K // groups.size) for x in further.values())
        if not fits or self.options.split_k is not None:
            return None
        b_k_major = _gemm_w4_wide.is_k_major(operands["b"], N, K)
        cols = N // 2 if described[-1] == SWIGLU else N
        if _gemm_w4_gemv.takes(M, K, cols, N // cols, groups.size, b_k_major):
            return self._direct(described, further, shape)
        # Copies of what belongs to up begin at its first column, on 16 bytes too.
        moved = [*further.values()] if b_k_major else [operands["b"], *further.values()]
        if cols < N and any(cols * x.itemsize % 16 for x in moved):
            return None
        if _gemm_w4_sm90.takes(M, K, groups.size, b_k_major):
            return self._streamed(described, further, groups, shape)
        # Up to eight tokens the other kernel takes as long as for one, which is less than here.
        return None if b_k_major is None or M <= 8 else self._wide(described, further, groups, b_k_major)

    def _direct(self, described: tuple, further: dict, shape: bytes) -> _OnHopper:
        """Return a product of up to eight tokens."""
        device, operands, _, N, K, _, activation = described
        config = _gemm_w4_gemv.select_config(N, K, device.sm_count)
        choices = {"dtype": operands["a"].dtype, "out_dtype": operands["out"].dtype, **self._groups(further)}
        kernel = W4_GEMV.kernel(device, **choices, split=config.split, asks=config.asks, activation=activation)
        return _OnHopper(kernel, (config.blocks, 1, 1), config, None, shape, _tail(further))

    def _streamed(self, described: tuple, further: dict, groups: Groups, shape: bytes) -> _OnHopper:
        """Return a product of up to sixteen tokens."""
        device, operands, M, N, K, _, activation = described
        cols = N // 2 if activation == SWIGLU else N
        limits, group_bytes = (device.sm_count, device.max_shared_bytes), (groups.scale_bytes, groups.zero_bytes)
        config = _gemm_w4_sm90.select_config(N, K, N // cols, group_bytes, *limits)
        choices = {"dtype": operands["a"].dtype, "out_dtype": operands["out"].dtype, **self._groups(further)}
        kernel = W4_SM90.kernel(device, **choices, paired=config.paired, activation=activation)
        maps = _gemm_w4_sm90.tensor_maps(device, operands, further, config, (M, N, K, cols))
        return _OnHopper(kernel, (config.blocks, 1, 1), config, maps, shape, _tail(further))

    def _wide(self, described: tuple, further: dict, groups: Groups, b_k_major: bool) -> _OnHopper | SplitK:
        """Return a product of many tokens, in slices of K where these keep more SMs busy."""
        device, operands, M, N, K, extents, activation = described
        cols = N // 2 if activation == SWIGLU else N
        out, parts = operands["out"], N // cols
        storable = parts == 1 and out.itemsize == 2 and N % 8 == 0 and not {"c", "residual"} & operands.keys()
        storable = storable and k_major(out, M, N, out.row, out.col) is True
        problem = _gemm_w4_wide.Problem(M, N, K, parts, storable, groups.size, groups.scale_bytes, groups.zero_bytes)
        config = _gemm_w4_wide.select_config(problem, device.sm_count, device.max_shared_bytes)
        choices = {"dtype": operands["a"].dtype, "group": groups.size, "b_k_major": b_k_major, **self._groups(further)}
        choices |= {name: getattr(config, name) for name in ("tokens", "units", "slices", "stages")}
        maps = _gemm_w4_wide.tensor_maps(device, operands, further, config, groups.size, (M, N, K))

        def launch(out_dtype: str, activation: int, shape: bytes) -> _OnHopper:
            ends = {"out_dtype": out_dtype, "activation": activation}
            if config.cluster > 1:
                kernel = W4_WIDE_PAIRS.kernel(device, **choices, **ends)
            else:
                kernel = W4_WIDE.kernel(device, **choices, **ends, finish=config.finish)
            return _OnHopper(kernel, (config.blocks, 1, 1), config, maps, shape, _tail(further))

        out_dtype, gate = out.dtype, N - cols
        shape = pack_shape(operands, (M, N, K, cols), extents, config.k_per_split, gate)
        if config.split_k == 1:
            return launch(out_dtype, activation, shape)
        dtype = operands["a"].dtype
        sums, partial_shape = slices_of(Problem(dtype, M, N, K), config, operands, extents)
        return SplitK(
            partial=launch("float32", 0, partial_shape),
            **reduction(device, dtype, out_dtype, activation, -(-cols // 4) * M, config.split_k),
            shape=shape,
            slices=sums,
            workspace=functools.partial(self.workspace, device, sums, dtypes.numpy("float32")),
        )

    def kernel(self, device, request: Request, problem: Problem, config: Config, choices: dict, further: dict):
        groups, scale, zero = _groups_of(request), further["scale_b"], further.get("zero_b")
        gate = problem.N // 2 if choices["activation"] == SWIGLU else 0
        choices = {
            **choices,
            **self._groups(further),
            "group": groups.size,
            "access_b": choices["access_b"] if choices["access_b"] != 2 else 1,
            "access_scale": _access(scale, gate),
            "access_zero": 16 if zero is None else _access(zero, gate),
        }
        return W4.kernel(device, **choices), groups.ring_bytes(config.tile), _tail(further)

    def _groups(self, further: dict) -> dict:
        """Return what both kernels are told of the weights."""
        scale, has_zeros = further["scale_b"], "zero_b" in further
        return {"scale_dtype": scale.dtype, "format": FORMATS.index(self.b_dtype), "has_zeros": has_zeros}


def _tail(further: dict) -> Callable[[tuple, list], tuple[bytes, None]]:
    """Return what packs the GroupParams of a call."""
    scale, zero = further["scale_b"], further.get("zero_b")
    strides = (scale.row, scale.col, zero.row if zero else 0, zero.col if zero else 0)
    sign = 128 if zero is not None and zero.dtype == "int8" else 0

    def tail(operands: tuple, addresses: list) -> tuple[bytes, None]:
        scale_address, zero_address = (*addresses[len(ROLES) :], 0)[:2]
        return _GROUP_PARAMS.pack(scale_address, zero_address, *strides, sign), None

    return tail


def _movable(x, rows: int) -> bool:
    """Tell whether TMA can move scales or zero points."""
    steps = (x.row if rows > 1 else 0,)
    return x.col == 1 and x.alignment == 0 and all(s >= 0 and s * x.itemsize % 16 == 0 for s in steps)


@dataclass(frozen=True)
class _OnHopper:
    """A product in one launch of gemv_w4.cu, or of gemm_w4_sm90.cu or gemm_w4_wide_sm90.cu, which take tensor maps."""

    kernel: Function
    grid: tuple[int, int, int]
    config: _gemm_w4_gemv.Config | _gemm_w4_sm90.Config | _gemm_w4_wide.Config
    maps: Callable[..., bytes] | None
    shape: bytes
    tail: Callable[[tuple, list], tuple[bytes, None]]

    def run(self, operands: tuple, addresses: list, alpha: tuple, beta: tuple) -> None:
        self.bind(addresses, alpha, beta)()

    def bind(self, addresses: list, alpha: tuple, beta: tuple) -> Callable[[], None]:
        params = pack_call(addresses, alpha, beta, self.shape) + self.tail((), addresses)[0]
        values = (params,)
        if self.maps is not None:
            values = self.maps(*addresses[:3], *addresses[len(ROLES) :]), params, self.config.packed
        block, shared_bytes = (self.config.threads, 1, 1), self.config.shared_bytes
        return lambda: self.kernel.launch(self.grid, block, values, shared_bytes, early=True)


def _groups_of(request: Request) -> Groups:
    b, scale = request.arrays["b"], request.arrays["scale_b"]
    size = b.shape[0] * 2 // scale.shape[0] if scale.shape[0] else GROUPS[-1]
    return Groups(size, scale.dtype.itemsize, int("zero_b" in request.arrays))


def _access(x: Operand, gate: int) -> int:
    """Return the widest access along the columns of scales or zero points, one element where they are apart."""
    if x.col != 1:
        return x.itemsize
    access = math.gcd(16, x.alignment, x.row * x.itemsize, gate * x.itemsize)
    return access if access >= 4 else x.itemsize


def _check_weights(request: Request, b_dtype: str) -> None:
    """Check the arrays that other products do not have."""
    function, arrays = request.function, request.arrays
    a, b = arrays["a"], arrays["b"]
    checks.dtype(function, "a", a, _DTYPES)
    checks.dtype(function, "b", b, ("uint8",), f"{b_dtype} weights come packed, two a byte: rawops.pack_int4.")
    if b.ndim != 2:
        request.fail(ValueError, "b", "have 2 dimensions", f"shape {tuple(b.shape)}")
    K, N = b.shape[0] * 2, b.shape[1]
    if a.ndim and a.shape[-1] != K:
        rule = f"have a row for every two of a's {a.shape[-1]} columns"
        hint = "Values that have a byte each are packed by rawops.pack_int4."
        request.fail(ValueError, "b", rule, f"shape {tuple(b.shape)}", hint)
    _check_groups(function, b_dtype, K, N, arrays["scale_b"], arrays.get("zero_b"))


def _check_groups(function: str, b_dtype: str, K: int, N: int, scale, zero) -> None:
    """Check scales and zero points of weights of these sizes."""
    checks.dtype(function, "scale_b", scale, _SCALE_DTYPES)
    if scale.ndim != 2:
        checks.fail(ValueError, function, "scale_b", "have 2 dimensions", f"shape {tuple(scale.shape)}")
    rows = scale.shape[0]
    if K not in [rows * group for group in GROUPS]:
        rule = f"have a row for each {', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]} of K = {K}"
        checks.fail(ValueError, function, "scale_b", rule, f"shape {tuple(scale.shape)}")
    checks.shape(function, "scale_b", scale, (rows, N))
    if zero is not None:
        if b_dtype != "uint4":
            rule = f"be None for {b_dtype} weights"
            checks.fail(ValueError, function, "zero_b", rule, f"shape {tuple(zero.shape)}")
        checks.dtype(function, "zero_b", zero, ("uint8", "int8"), "One zero point an entry, not packed.")
        checks.shape(function, "zero_b", zero, (rows, N))


def pack_int4(q):
    """Pack 4-bit values along the first axis, two a byte, as `gemm` takes weights with `b_dtype`.

    Parameters
    ----------
    q : array (K, N) of int
        NumPy or CuPy, K even; int4 and uint4 of ml_dtypes too. -8..7 for "int4", 0..15 for "uint4" and the codes of
        "float4_e2m1fn"; of other values the low four bits are taken.

    Returns
    -------
    array (K // 2, N) uint8
        Byte (i, n) has q[2i, n] in its low half and q[2i + 1, n] in its high half. For K-contiguous storage, pack
        the transpose's copy: ``pack_int4(q).T.copy().T``.
    """
    if not isinstance(getattr(q, "dtype", None), np.dtype):
        checks.fail(TypeError, "pack_int4", "q", "be a NumPy or CuPy array", type(q).__name__)
    if q.ndim != 2 or q.shape[0] % 2:
        checks.fail(ValueError, "pack_int4", "q", "have shape (K, N) with K even", tuple(q.shape))
    if q.dtype.name in ("int4", "uint4"):
        q = q.astype(np.int8)
    if q.dtype.kind not in "iu":
        checks.fail(TypeError, "pack_int4", "q", "have an integer dtype", q.dtype)
    with arrays.current_of(q):
        return ((q[0::2] & 15) | ((q[1::2] & 15) << 4)).astype("uint8")
