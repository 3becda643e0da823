"""The host side of products of float8 and int8: their dtypes, their scales, and the copies that some operands need.

The tensor cores take 8-bit operands with K contiguous only, and on Hopper TMA wants rows on 16-byte boundaries. What
lies otherwise is copied into such a place first, which costs as much as reading and writing it once. Scales of whole
operands go into alpha, those of rows of a and columns of b into the epilogue, and those of blocks into the sum over K.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from rawops import _gemm_8bit_config, _gemm_config, _gemm_repack, _gemm_sm90
from rawops._gemm_8bit_config import BYTES, SCALES, SM80, SM90, SM90_CLUSTER, BytesProblem
from rawops._gemm_call import Launch, Product, Slices
from rawops._gemm_config import ACTIVATIONS, BLOCK_SCALED, COLUMN_SCALED, FLOAT8, IN_PLACE, PROMOTED, Problem
from rawops._gemm_maps import k_major
from rawops._gemm_operands import (
    ROLES,
    Operand,
    Options,
    Request,
    Sizes,
    Types,
    check,
    describe,
    fold_batch,
    pack_shape,
    result_dtype,
)
from rawops._gemm_sm90_config import Config
from rawops._gemm_steps import pack_call
from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.kernel import Function

DTYPES = (*FLOAT8, "int8")
ALL_DTYPES = (*_gemm_config.DTYPES, *DTYPES)  # of `gemm`, which tells the products apart by the size of an element
SCALES_OF = ("scale_a", "scale_b", "scale_d")

_BLOCK = 128  # that a scale is for, along K and of columns of b
_RESULTS = ("bfloat16", "float16", "float32")
_MAX_GRID_Z = 65535
_MAX_FACTOR = 2**24  # of a product of integers: what float32 counts to

# --- what goes together ---------------------------------------------------------------------------------------------


class _Types(Types):
    def __init__(self, has_scales: bool) -> None:
        super().__init__(ALL_DTYPES)
        self.has_scales = has_scales

    def of_operands(self, request: Request) -> str:
        a, b = request.arrays["a"], request.arrays["b"]
        dtype = checks.dtype(request.function, "a", a, self.operands)
        checks.dtype(request.function, "b", b, FLOAT8 if dtype in FLOAT8 else (dtype,), f"a has dtype {dtype}.")
        return dtype

    def of_result(self, dtype: str) -> tuple[str, ...]:
        if dtype in FLOAT8:
            return (*_RESULTS, *FLOAT8)
        return (*_RESULTS, "int32") if self.has_scales else ("int32", *_RESULTS)

    def of_addends(self, dtype: str, out_dtype: str | None = None) -> tuple[str, ...]:
        if out_dtype == "int32":
            return ("int32",)
        return (*_RESULTS, "int32") if out_dtype is None and dtype == "int8" else _RESULTS


def _check_result(function: str, out_dtype: str, activation: str | None, scales: dict) -> None:
    """Check that a result of this dtype goes with an activation and with scales by role, arrays or numbers."""
    given = [role for role, x in scales.items() if x is not None]
    if activation is not None:
        given.append("activation")
    if out_dtype == "int32" and given:
        _fail_integer_result(function, f"{given[0]} is given")
    scale = scales["scale_d"]
    if scale is not None and out_dtype not in FLOAT8:
        got = scale if isinstance(scale, float) else "one"
        checks.fail(ValueError, function, "scale_d", f"be None for a {out_dtype} result", got, "It is for float8.")


def _check_whole(function: str, **factors: tuple) -> None:
    """Check that what a product of integers is multiplied with are integers that float32 holds."""
    for name, (address, value, _) in factors.items():
        if address or not float(value).is_integer() or abs(value) > _MAX_FACTOR:
            rule = "an array" if address else f"{value}, which is no whole number up to 2^24"
            _fail_integer_result(function, f"{name} (with the scales) is {rule}")


def _fail_integer_result(function: str, why: str) -> None:
    hint = "int32 results come from integers alone."
    checks.fail(ValueError, function, "out_dtype", f"be {', '.join(_RESULTS)} where {why}", "int32", hint)


# --- scales ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scales:
    """How the scales of a product take part: those of whole operands, and the strides of others by role."""

    whole: tuple[str, ...]
    others: dict[str, Operand]
    promotion: int
    count: int  # of those of b along N

    @property
    def has_vectors(self) -> bool:
        """Whether finished sums have scales of rows or columns."""
        return bool(self.others) and self.promotion < BLOCK_SCALED

    def pack(self, addresses: dict[str, int]) -> bytes:
        whole = [addresses[role] if role in self.whole else 0 for role in SCALES_OF]
        found = [addresses[role] if role in self.others else 0 for role in SCALES_OF[:2]]
        strides = []
        for role in SCALES_OF[:2]:
            x = self.others.get(role)
            strides += [x.row, x.col, *x.batch] if x else [0] * 5
        return SCALES.pack(*whole, *found, *strides, self.count)


def as_matrix(role: str, x):
    """Return an array of scales with the axes of its operand; scales along one axis are those of rows or columns."""
    if x is None or x.ndim >= 2:
        return x
    if x.ndim == 0:
        return x.reshape(1, 1)
    return x[:, None] if role == "scale_a" else x[None, :]


def _check_scales(function: str, scales: dict, sizes: tuple[int, int, int], dtype: str) -> None:
    """Check scales by role, arrays or numbers, but for their batch axes."""
    M, N, K = sizes
    blocks_k, blocks_n = -(-K // _BLOCK), -(-N // _BLOCK)
    fits = {
        "scale_a": ((1, M), (1, blocks_k), f"({M},) for rows or (..., {M}, {blocks_k}) for blocks"),
        "scale_b": (
            (1, blocks_k),
            (1, N, blocks_n),
            f"({N},) for columns or (..., {blocks_k}, {blocks_n} or {N}) for blocks",
        ),
        "scale_d": ((1,), (1,), ""),
    }
    for role, (rows, cols, rule) in fits.items():
        given = scales[role]
        if given is None or isinstance(given, float):
            continue
        x = as_matrix(role, given)
        checks.dtype(function, role, x, ("float32",))
        rule = f"have one entry or shape {rule}" if rule else "have one entry"
        if x.size != 1 and not (x.ndim >= 2 and x.shape[-2] in rows and x.shape[-1] in cols):
            checks.fail(ValueError, function, role, rule, f"shape {tuple(given.shape)}")
        if dtype == "int8" and _is_blocked(role, x, blocks_n):
            rule, hint = "have one entry or one for each row or column", "Scales of blocks are for float8."
            checks.fail(ValueError, function, role, rule, f"shape {x.shape}", hint)


def _check_batches(function: str, scales: dict, batch: tuple[int, ...]) -> None:
    """Check the batch axes of scales by role."""
    for role, given in scales.items():
        x = as_matrix(role, given)
        if x is not None and x.size != 1 and not _broadcasts(x.shape[:-2], batch):
            checks.fail(ValueError, function, role, f"have batch axes that broadcast to {batch}", f"shape {x.shape}")


def _broadcasts(shape: tuple, target: tuple) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(have in (1, want) for have, want in pairs)


def _is_blocked(role: str, x, blocks_n: int) -> bool:
    """Tell whether scales change along K or are for blocks of columns."""
    if x.size == 1 or role == "scale_d":
        return False
    if role == "scale_a":
        return x.shape[-1] > 1
    return x.shape[-2] > 1 or x.shape[-1] == blocks_n > 1


def _scales_of(request: Request, described: dict, sizes: Sizes, has_sums: bool) -> _Scales:
    """Take the scales out of `described` and tell how they take part. has_sums: float8, whose sums are promoted."""
    blocks_n = -(-sizes.N // _BLOCK)
    given = {role: x for role in SCALES_OF if (x := request.arrays[role]) is not None}
    others = {role: x for role in SCALES_OF if (x := described.pop(role, None)) is not None and given[role].size > 1}
    for role, x in others.items():
        x.col = x.col if given[role].shape[-1] > 1 else 0
    whole = tuple(role for role, x in given.items() if x.size == 1)
    promotion, count = PROMOTED if has_sums else IN_PLACE, sizes.N
    if any(_is_blocked(role, x, blocks_n) for role, x in given.items()):
        each_column = "scale_b" in others and given["scale_b"].shape[-1] == sizes.N > blocks_n
        promotion, count = (COLUMN_SCALED, sizes.N) if each_column else (BLOCK_SCALED, blocks_n)
    return _Scales(whole, others, promotion, count)


# --- products -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Steps:
    """A product in one launch, which takes the addresses of a, b and out, and the kernel's parameters."""

    shape: bytes
    scales: _Scales
    launch: Callable

    def run(self, operands: tuple, addresses: list, alpha: tuple, beta: tuple) -> None:
        self.bind(addresses, alpha, beta)()

    def bind(self, addresses: list, alpha: tuple, beta: tuple) -> Callable[[], None]:
        params = pack_call(addresses, alpha, beta, self.shape)
        params += self.scales.pack(dict(zip(SCALES_OF, addresses[len(ROLES) :], strict=True)))
        return functools.partial(self.launch, *addresses[:3], params)


class ScaledProduct(Product):
    """``activation(alpha * (scale_a * a) @ (scale_b * b) + ...)`` of operands of 8 bits, in the order of `roles`.

    Parameters
    ----------
    function : str
        For messages.
    options : Options
    has_scales : bool
        Whether a or b has scales, also such that are part of alpha.
    workspaces : dict, optional
        As for `Product`.
    """

    roles: ClassVar = (*ROLES, *SCALES_OF)
    optional: ClassVar = (*Product.optional, *SCALES_OF)

    def __init__(self, function: str, options: Options, has_scales: bool, workspaces: dict | None = None) -> None:
        self.types = _Types(has_scales)
        super().__init__(function, options, workspaces)
        if options.split_k is not None:
            hint = "Clusters share out K where that is faster."
            checks.fail(ValueError, function, "split_k", "be None for 8-bit operands", options.split_k, hint)

    def _run(self, launch: Launch, operands: tuple, addresses: list, alpha: tuple, beta: tuple):
        if launch.out_dtype == np.int32:
            _check_whole(self.function, alpha=alpha, beta=beta)
        return super()._run(launch, operands, addresses, alpha, beta)

    def check(self, request: Request) -> tuple[str, str, Sizes]:
        dtype, out_dtype, sizes = check(request, self.types)
        scales = {role: request.arrays[role] for role in SCALES_OF}
        _check_scales(self.function, scales, (sizes.M, sizes.N, sizes.K), dtype)
        _check_batches(self.function, scales, sizes.batch)
        _check_result(self.function, out_dtype, self.options.activation, scales)
        if len(addends := self._addends(request)) > 1:
            rule = "share one 16-bit dtype, or be float32"
            checks.fail(TypeError, request.function, "c, bias and residual", rule, " and ".join(sorted(addends)))
        return dtype, out_dtype, sizes

    def check_plan(self, given: ScaleArguments, alpha, beta) -> None:
        """Check what a plan has, beside its options, that no call changes. alpha and beta are floats or arrays."""
        scales = dict(zip(SCALES_OF, given.arrays, strict=True))
        found = {role: x for role, x in scales.items() if not isinstance(x, float)}
        scales |= zip(found, arrays.take(self.function, **found)[0], strict=True)
        *sizes, dtype = self.options.sizes
        _check_scales(self.function, scales, sizes, dtype)
        if self.options.out_dtype is None:  # the result may have that of an out
            return
        out_dtype = dtypes.name(self.options.out_dtype)
        _check_result(self.function, out_dtype, self.options.activation, scales)
        if out_dtype == "int32":
            alpha, beta = ((0, x, 0) if isinstance(x, float) else (1, 1.0, 0) for x in (alpha, beta))
            _check_whole(self.function, alpha=given.applied_to(alpha), beta=beta)

    def check_numbers(self, a, out, scales: dict) -> None:
        """Check that scales by role, of which some may be numbers, go with the result of a call, before all else."""
        request = Request(self.function, self.options, {"a": a, "out": out}, [], self.names)
        plan = self.options.sizes
        dtype = checks.dtype(self.function, "a", a, self.types.operands if plan is None else plan[-1:])
        _check_result(self.function, result_dtype(request, dtype, self.types), self.options.activation, scales)

    @staticmethod
    def _addends(request: Request) -> set[str]:
        """Return the dtypes of c, bias and residual that are not float32."""
        given = (request.arrays[role] for role in ("c", "bias", "residual"))
        return {x.dtype.name for x in given if x is not None} - {"float32"}

    def _steps(self, device, request: Request, dtype: str, out_dtype: str, sizes: Sizes):
        matrices = {role: as_matrix(role, request.arrays[role]) for role in SCALES_OF}
        request = replace(request, arrays=request.arrays | matrices)
        described = describe(request, sizes, out_dtype)
        folded = fold_batch(described, sizes)
        if folded is None:
            return Slices(self, sizes.batch)
        M, extents = folded
        N, K = sizes.N, sizes.K
        has_sums = dtype in FLOAT8 and self.options.precision != "fast"
        scales = _scales_of(request, described, sizes, has_sums)
        problem = Problem(dtype, M, N, K, math.prod(extents), promoted=scales.promotion != IN_PLACE)
        copies, described = repacked(device, described, problem, extents)
        product = self._product(device, request, (out_dtype, sizes), described, scales, problem, extents)
        if not copies:
            return product
        size = sum(copy.size for copy in copies.values())
        workspace = functools.partial(self.workspace, device, (size,), np.dtype("uint8"))
        return _gemm_repack.Repacked(copies, product, workspace)

    def _product(self, device, request, result: tuple, described: dict, scales: _Scales, problem: Problem, extents):
        (out_dtype, sizes), (M, N, K) = result, (problem.M, problem.N, problem.K)
        addend = "int32" if out_dtype == "int32" else next(iter(self._addends(request)), "bfloat16")
        operands = BYTES[problem.dtype, described["b"].dtype]
        activation = ACTIVATIONS.index(self.options.activation)
        config = _gemm_config.select_config(problem, device.sm_count, device.max_shared_bytes, 1)
        shape = pack_shape(described, (M, N, K, sizes.cols), extents, config.k_per_split, sizes.gate)
        choices = {"operands": operands, "out_dtype": out_dtype, "addend": addend, "activation": activation}
        choices |= {"promotion": scales.promotion, "has_vectors": scales.has_vectors}
        plan = _hopper_plan(device, described, (M, N, K), extents, scales, choices)
        if plan is not None:
            return _Steps(shape, scales, plan.run)
        kernel = SM80.kernel(device, **choices, tile=config.tile.cpp)
        return _Steps(shape, scales, _launch_of(kernel, problem, config))


def repacked(device, described: dict, problem: Problem, extents: tuple) -> tuple[dict, dict]:
    """Plan copies of the operands that are not K-major with rows on 16-byte boundaries."""
    a, b, K = described["a"], described["b"], problem.K
    fits = {
        "a": k_major(a, problem.M, K, a.row, a.col),
        "b": k_major(b, problem.N, K, b.col, b.row),
    }
    majors = {role: True for role, fit in fits.items() if not fit and K > 0}
    return _gemm_repack.copies_of(device, majors, described, problem, extents)


def _hopper_plan(device, described: dict, sizes: tuple, extents: tuple, scales: _Scales, choices: dict):
    """Return the _gemm_sm90.Plan of a product, None where Hopper's kernel cannot run it."""
    if not SM90.exists_on(device.capability):
        return None
    problem = _gemm_sm90.describe_problem(described, *sizes, extents, choices["activation"])
    if problem is None:
        return None
    problem = BytesProblem(**vars(problem), promotion=scales.promotion, is_int8=described["a"].dtype == "int8")
    config = _gemm_8bit_config.select_config(problem, device.sm_count, device.max_shared_bytes)
    spec = SM90 if config.cluster == 1 else SM90_CLUSTER
    names = ("block_m", "block_n", "stages", "cluster", "ping_pong")
    kernel = spec.kernel(device, **choices, finish=problem.finish, **{name: getattr(config, name) for name in names})
    maps = _gemm_sm90.tensor_maps(device, described, problem, config, sizes, extents)
    early = _gemm_sm90.may_begin_early(config.blocks, device.sm_count)
    ahead = asked_ahead_of_bytes(problem, config) if early else 0
    return _gemm_sm90.Plan(
        config, kernel, (config.blocks, 1, 1), config.shared_bytes(problem), maps, None, early, ahead
    )


def asked_ahead_of_bytes(problem: BytesProblem, config: Config) -> int:
    """Return how many stages of b the L2 is asked for before the launch before is complete.

    Of few rows it is to have what the ring holds, but no more than an eighth of what a block reads.
    """
    if not problem.M <= config.block_m == 64 or problem.batches > 1:
        return 0
    return min(config.stages, config.waves * problem.k_blocks // config.cluster // 8)


def _launch_of(kernel: Function, problem: Problem, config: _gemm_config.Config) -> Callable:
    tile = config.tile
    tiles = -(-problem.M // tile.block_m) * -(-problem.N // tile.block_n)
    grid = (tiles, 1, min(problem.batches, _MAX_GRID_Z))
    shared_bytes = max(tile.shared_bytes(1), tile.staging_bytes(problem.accumulator))

    def launch(a: int, b: int, out: int, params: bytes) -> None:
        kernel.launch(grid, (tile.threads, 1, 1), (params,), shared_bytes)

    return launch


# --- the arguments of gemm ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleArguments:
    """scale_a, scale_b and scale_d of a call: numbers of the first two in `factor`, the rest as arrays or None."""

    factor: float
    arrays: tuple

    @classmethod
    def of(cls, function: str, a, b, d) -> ScaleArguments:
        factor, found = 1.0, []
        for role, x in zip(SCALES_OF, (a, b, d), strict=True):
            is_array = hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")
            if x is None or is_array:
                found.append(x)
            elif role == "scale_d":
                found.append(checks.number(function, role, x))
            else:
                factor *= checks.number(function, role, x)
                found.append(None)
        return cls(factor, tuple(found))

    def applied_to(self, alpha: tuple) -> tuple:
        """Return alpha, packed, times the numbers; 0 stays 0, whatever they are."""
        return (alpha[0], alpha[1] * self.factor, alpha[2]) if alpha[1] != 0 else alpha

    def on_device(self, product: ScaledProduct, a, out) -> ScaleArguments:
        """Return them with an array in the place of a number for the result, if that is one that takes it."""
        *others, d = self.arrays
        if not isinstance(d, float):
            return self
        checks.arrays_given(product.function, a=a)
        (a, out), _ = arrays.take(product.function, a=a, out=out)
        product.check_numbers(a, out, dict(zip(SCALES_OF, self.arrays, strict=True)))
        device = arrays.device_of(product.function, a=a)
        with device.current():
            x = device.empty((1,), np.dtype("float32"))
            x[...] = d
        return replace(self, arrays=(*others, x))
