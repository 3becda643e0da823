"""Fused LoRA: O = activation(x @ c + scaling * (x @ a) @ b + bias) + residual for the price of x @ c.

The base weight c is multiplied as in `rawops.gemm`. The low-rank part lands on the same float32 accumulators before
the only write of O, and `select_config` decides where x @ a comes from:

- It rides: the columns of a go along the K loop of x @ c as a second, narrow tile. One launch reads x once. This is
  free where the memory is the limit, which it is for the few rows of decoding.
- It is read: a product of its own leaves x @ a in float32, and the main kernel takes it in, any rank 64 at a time. That
  is a launch more, but where the tensor cores are the limit it costs less than riding, which every tile repeats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops.gemm import (
    _CALL_FIELDS,
    _LAYOUT_CHOICES,
    _SHAPE_FIELDS,
    _TILES,
    ACTIVATIONS,
    DTYPES,
    Config,
    Problem,
    Product,
    Tile,
    _layout,
    _workspace,
)
from rawops.gemm import _call as _call_gemm
from rawops.gemm import select_config as select_gemm_config

_MIN_STAGES = 3
_MAX_ACCUMULATORS = 144  # a thread, which leaves it the other registers that a main loop needs
_OPS_PER_BYTE = 150  # tensor cores over memory, on an A100, H200 or L40 within a quarter
_LAUNCH_BYTES = 16 << 20  # what the memory could have moved during a launch and its ramps

# --- kernel ---------------------------------------------------------------------------------------------------------

_LOW_RANK_FIELDS = {
    **dict.fromkeys(("lora_a", "lora_b", "lora_y"), "pointer"),
    **dict.fromkeys(("lora_a_row", "lora_a_col", "lora_b_row", "lora_b_col", "lora_y_row"), "int64"),
    "rank": "int32",
    "scaling": "float32",
}
_LOW_RANK = ParamStruct("LoraOperands", **_LOW_RANK_FIELDS)
PARAMS = ParamStruct("LoraParams", **_CALL_FIELDS, **_SHAPE_FIELDS, **_LOW_RANK_FIELDS)

_LOW_RANK_CHOICES = {
    "rank_step": (16, 32, 64),  # ranks that the kernel holds at a time
    "rides": (True, False),
    "lora_a_k_major": (True, False),
    "lora_b_k_major": (True, False),
    "access_lora_a": (16, 8, 4, 2),
    "access_lora_b": (16, 8, 4, 2),
}
_WIDE, _NARROW = _TILES["16-bit"], _TILES["16-bit narrow"]


def _with_stages(tile: Tile) -> list[Tile]:
    """Return the tile as it is, and with fewer stages for where the low-rank part does not fit beside them."""
    return [replace(tile, stages=n) for n in range(tile.stages, _MIN_STAGES - 1, -1)]


def _rides_in(tile: Tile, rank_step: int) -> bool:
    """Tell whether a thread has the registers for both products: the warps along N share out the columns of a.

    A tile 256 columns wide is for products that the tensor cores limit, where riding does not pay.
    """
    columns = max(rank_step // tile.warps[1], 8) * tile.warps[1]
    return tile.block_n < 256 and tile.block_m * (tile.block_n + columns) <= _MAX_ACCUMULATORS * tile.threads


def _smoke(tile: Tile, rank_step: int, rides: bool, **changes) -> dict:
    values = {"dtype": "float16", "out_dtype": "float16", "tile": tile.cpp, "rank_step": rank_step, "rides": rides}
    values |= {"a_k_major": True, "b_k_major": False, "access_a": 16, "access_b": 16, "activation": 0}
    values |= {"lora_a_k_major": False, "lora_b_k_major": False, "access_lora_a": 16, "access_lora_b": 16}
    return values | changes


_TRANSPOSED = {"b_k_major": True, "lora_a_k_major": True, "lora_b_k_major": True}  # the layouts of PEFT

SM80 = KernelSpec(
    source="lora_sm80.cu",
    entry="rawops::lora_sm80",
    template=("dtype", "out_dtype", "tile", *_LAYOUT_CHOICES, *_LOW_RANK_CHOICES),
    choices={
        "dtype": ("float16", "bfloat16"),
        "out_dtype": ("float16", "bfloat16", "float32"),
        "tile": tuple(dict.fromkeys(t.cpp for tile in (*_WIDE, *_NARROW) for t in _with_stages(tile))),
        **_LAYOUT_CHOICES,
        **_LOW_RANK_CHOICES,
    },
    smoke=(
        *(_smoke(tile, step, True) for tile in _WIDE for step in (16, 64) if _rides_in(tile, step)),
        *(_smoke(tile, 64, False) for tile in _WIDE),
        *(_smoke(tile, 16, True, **_TRANSPOSED) for tile in _WIDE if _rides_in(tile, 16)),
        *(_smoke(tile, 16, True, access_lora_a=2, access_lora_b=2) for tile in _NARROW),
        _smoke(_WIDE[2], 16, True, dtype="bfloat16", out_dtype="bfloat16", activation=5),
    ),
    params=PARAMS,
)

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
    base = select_gemm_config(problem, sm_count, max_shared_bytes)
    itemsize, split = dtypes.itemsize(problem.dtype), (base.split_k, base.k_per_split)
    padded = next((step for step in _LOW_RANK_CHOICES["rank_step"] if step >= rank), None)
    if padded is not None and _rides_in(base.tile, padded) and _riding_pays(problem, padded / base.tile.block_n):
        found = _fit(base.tile, (padded,), True, itemsize, max_shared_bytes)
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


class _LowRankProduct(Product):
    """x @ c with the low-rank part beside it, for `gemm._call`."""

    def __init__(self, x, a, b, scaling: float) -> None:
        self.arrays = {"lora_a": a, "lora_b": b}
        self.x, self.scaling = x, scaling
        self.rank = a.shape[1]

    def configure(self, device, problem: Problem, split_k: int | None) -> LoraConfig:
        return select_config(problem, self.rank, device.sm_count, device.max_shared_bytes)

    def kernel(self, device, problem: Problem, config: LoraConfig, choices: dict, operands: dict):
        a, b = operands["lora_a"], operands["lora_b"]
        gated = choices["activation"] == ACTIVATIONS.index("swiglu")
        a_k_major, access_a = True, 16  # where a does not ride there is but one kernel
        if config.rides:
            a_k_major, access_a = _layout(a, self.rank, problem.K, a.col, a.row, 0)
        half = problem.N // 2 if gated else 0
        b_k_major, access_b = _layout(b, problem.N, self.rank, b.col, b.row, half)
        low_rank = {
            "rank_step": config.rank_step,
            "rides": config.rides,
            "lora_a_k_major": a_k_major,
            "lora_b_k_major": b_k_major,
            "access_lora_a": access_a,
            "access_lora_b": access_b,
        }
        itemsize = dtypes.itemsize(problem.dtype)
        memory = shared_bytes(config.tile, config.rank_step, config.rides, itemsize)
        strides = (a.row, a.col, b.row, b.col)
        return SM80.kernel(device, **choices, **low_rank), memory, (config.rides, strides)

    def parameters(self, device, launch, pointers: tuple, workspaces: dict) -> bytes:
        rides, strides = launch.kept
        y_pointer = y_row = 0
        if not rides:
            y_row = -(-self.rank // 4) * 4  # rows on 16-byte boundaries
            y = _workspace(device, (*self.x.shape[:-1], y_row), dtypes.numpy("float32"), workspaces)
            y_pointer = device.pointer(y)
            a = self.arrays["lora_a"]
            _product("lora_linear", self.x, a, out=y[..., : self.rank], workspaces=workspaces)
        return _LOW_RANK.pack(*pointers[6:], y_pointer, *strides, y_row, self.rank, self.scaling)


# --- calls ----------------------------------------------------------------------------------------------------------


def _product(function, a, b, c=None, *, alpha=1.0, bias=None, residual=None, activation=None, out=None, **keywords):
    options = (activation, None, None, None, None)
    beta = 0.0 if c is None else 1.0
    return _call_gemm(function, options, a, b, c, bias, residual, out, alpha, beta, **keywords)


def _check_weights(function: str, c, a, b) -> None:
    dtype = checks.dtype(function, "c", c, DTYPES)
    for name, x in (("c", c), ("a", a), ("b", b)):
        checks.dtype(function, name, x, (dtype,), "x, c, a and b have one dtype; convert one of them.")
        if x.ndim != 2:
            checks.fail(ValueError, function, name, "have 2 dimensions", f"shape {tuple(x.shape)}")
    (K, N), rank = c.shape, a.shape[1]
    checks.shape(function, "a", a, (K, rank), "a is (K, rank), c is (K, N): transpose it?")
    checks.shape(function, "b", b, (rank, N), "b is (rank, N) for a (K, rank) and c (K, N): transpose it?")


def _check_input(function: str, x, c, activation) -> None:
    checks.dtype(function, "x", x, (c.dtype.name,), "x, c, a and b have one dtype; convert one of them.")
    if x.ndim < 2 or x.shape[-1] != c.shape[0]:
        rule = f"have shape (..., M, {c.shape[0]}), as c has {c.shape[0]} rows"
        checks.fail(ValueError, function, "x", rule, f"shape {tuple(x.shape)}")
    if activation == "swiglu" and c.shape[1] % 2:
        checks.fail(ValueError, function, "c", "have an even number of columns for swiglu", c.shape[1])


def _call(function, x, c, a, b, scaling, epilogue: dict, workspaces: dict):
    """Run on arrays that are checked. `epilogue`: bias, residual, activation and out."""
    if a.shape[1] == 0 or scaling == 0:
        return _product(function, x, c, **epilogue, workspaces=workspaces)
    if c.dtype.itemsize > 2:  # no tensor core takes these without rounding: three products, the sum in their own type
        low = _product(function, x, a, workspaces=workspaces)
        base = _product(function, x, c, workspaces=workspaces)
        return _product(function, low, b, base, alpha=scaling, **epilogue, workspaces=workspaces)
    product = _LowRankProduct(x, a, b, scaling)
    return _product(function, x, c, **epilogue, workspaces=workspaces, product=product)


def lora_linear(x, c, a, b, *, scaling: float = 1.0, bias=None, residual=None, activation: str | None = None, out=None):
    """Compute ``activation(x @ c + scaling * (x @ a) @ b + bias) + residual`` in one pass over the result.

    Both products are added in one float32 accumulator before the only write of the result, and the intermediate
    ``x @ a`` is float32: 65504 is not its limit. The low-rank factors are those of LoRA (Hu et al., 2021,
    arXiv:2106.09685).

    Parameters
    ----------
    x : array (..., M, K)
        float16 or bfloat16 for the fused kernel; float32 and float64 run as three products.
    c : array (K, N)
        The base weight. All operands have one dtype and may have any strides; contiguous along either axis, with
        rows on 16-byte boundaries, is fastest.
    a : array (K, rank)
    b : array (rank, N)
        The low-rank factors, of any rank from 0 up. Nothing past the rank is read.
    scaling : float
        Usually ``lora_alpha / rank``. With 0, as with rank 0, `a` and `b` are not read.
    bias : array (N,), optional
        Added to every row before the activation.
    residual : array broadcastable to the result, optional
        Added after the activation. `bias` and `residual` have the inputs' dtype or float32.
    activation : {None, "relu", "gelu", "gelu_tanh", "silu", "swiglu"}
        As for `rawops.gemm`: "swiglu" returns N/2 columns.
    out : array, optional
        Where the result goes, of the inputs' dtype or float32. Where it overlaps an input, other than as `residual`
        itself, the result is computed aside and copied.

    Returns
    -------
    array (..., M, N), or (..., M, N/2) for swiglu

    Raises
    ------
    TypeError, ValueError
        For dtypes, shapes or layouts that do not fit, before anything is launched.

    Notes
    -----
    Up to rank 64 and where the memory is the limit (few rows), one kernel does it all; with many rows or a higher
    rank, ``x @ a`` is a launch of its own into a workspace (see `select_config`). Nothing synchronises, and the same
    call gives the same bits. To capture it in a CUDA graph, use `FusedLoRA` with ``out=``.
    """
    (x, c, a, b, bias, residual, out), give = arrays.take(
        "lora_linear", x=x, c=c, a=a, b=b, bias=bias, residual=residual, out=out
    )
    arrays.device_of("lora_linear", x=x, c=c, a=a, b=b, bias=bias, residual=residual, out=out)
    _check_weights("lora_linear", c, a, b)
    _check_input("lora_linear", x, c, activation)
    scaling = checks.number("lora_linear", "scaling", scaling)
    epilogue = {"bias": bias, "residual": residual, "activation": activation, "out": out}
    return give(_call("lora_linear", x, c, a, b, scaling, epilogue, {}))


class FusedLoRA:
    """A linear layer with one low-rank adapter, for repeated calls; see `lora_linear`.

    It keeps its workspaces, so after a first call a call of the same sizes with ``out=`` allocates nothing and can be
    captured in a CUDA graph. Calls of one object share the workspaces: they belong on one stream, or in an order that
    streams keep.

    Parameters
    ----------
    c : array (K, N)
    a : array (K, rank)
    b : array (rank, N)
    scaling : float
    bias : array (N,), optional
    activation : str, optional
        As for `lora_linear`. The arrays are kept, not copied: changes of their content show in the next call.
    """

    def __init__(self, c, a, b, scaling: float = 1.0, *, bias=None, activation: str | None = None) -> None:
        (self.c, self.a, self.b, self.bias), _ = arrays.take("FusedLoRA", c=c, a=a, b=b, bias=bias)
        arrays.device_of("FusedLoRA", c=self.c, a=self.a, b=self.b, bias=self.bias)
        _check_weights("FusedLoRA", self.c, self.a, self.b)
        self.activation = checks.choice("FusedLoRA", "activation", activation, ACTIVATIONS)
        self.scaling = checks.number("FusedLoRA", "scaling", scaling)
        self._workspaces: dict = {}

    @classmethod
    def from_peft(cls, weight, lora_a, lora_b, lora_alpha: float, *, use_rslora: bool = False, **keywords) -> FusedLoRA:
        """Make one from the matrices of a Hugging Face PEFT layer, as transposed views.

        Parameters
        ----------
        weight : array (out_features, in_features)
        lora_a : array (rank, in_features)
        lora_b : array (out_features, rank)
        lora_alpha : float
            The scaling is ``lora_alpha / rank``.
        use_rslora : bool
            Rank-stabilised LoRA (arXiv:2312.03732): ``lora_alpha / sqrt(rank)``.
        **keywords
            `bias` and `activation`.
        """
        named = {"weight": weight, "lora_a": lora_a, "lora_b": lora_b}
        matrices, _ = arrays.take("FusedLoRA.from_peft", **named)
        for name, x in zip(named, matrices, strict=True):
            if x.ndim != 2:
                checks.fail(ValueError, "FusedLoRA.from_peft", name, "have 2 dimensions", f"shape {tuple(x.shape)}")
        weight, lora_a, lora_b = matrices
        alpha, rank = checks.number("FusedLoRA.from_peft", "lora_alpha", lora_alpha), lora_a.shape[0]
        scaling = alpha / (math.sqrt(rank) if use_rslora else rank) if rank else 0.0
        return cls(weight.T, lora_a.T, lora_b.T, scaling, **keywords)

    def __call__(self, x, *, residual=None, out=None):
        """Run on x (..., M, K); returns (..., M, N), or N/2 columns for swiglu."""
        (x, residual, out), give = arrays.take("FusedLoRA", x=x, residual=residual, out=out)
        arrays.device_of("FusedLoRA", x=x, c=self.c, residual=residual, out=out)
        _check_input("FusedLoRA", x, self.c, self.activation)
        epilogue = {"bias": self.bias, "residual": residual, "activation": self.activation, "out": out}
        return give(_call("FusedLoRA", x, self.c, self.a, self.b, self.scaling, epilogue, self._workspaces))
