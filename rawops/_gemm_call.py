"""From arrays to a launch: what `gemm`, `Gemm` and the fused LoRA calls have in common.

A `Product` describes the arrays of a call by a key. The first call with a key checks the arguments, chooses a kernel
and packs what stays the same; later ones only fill in addresses and launch.
"""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from rawops import _gemm_choices, _gemm_config, _gemm_gemv, _gemm_repack, _gemm_sm90, _gemm_sm90_split
from rawops._gemm_config import (
    ACTIVATIONS,
    KERNELS,
    REDUCE,
    REDUCE_THREADS,
    SCALAR_TYPES,
    Config,
    Problem,
)
from rawops._gemm_operands import (
    ROLES,
    Operand,
    Options,
    Request,
    Sizes,
    Types,
    check,
    check_options,
    describe,
    fold_batch,
    layout_of,
    pack_shape,
)
from rawops._gemm_sm90_specs import PARTIAL
from rawops._gemm_steps import ONE, ZERO, Launch, OneKernel, OnHopper, OwnSteps, Repeat, SplitK, overlaps
from rawops._runtime import arrays, checks, dtypes

_OUT = ROLES.index("out")
_FEW_GROUPS = 2**15  # of columns to add up: with a thread for each, fewer would not fill the SMs
_MAX_GRID_Z = 65535
_MAX_LAUNCHES = 4096  # of one product
_MAX_BOUND = 256  # calls of a launch, by their addresses

# --- scalars --------------------------------------------------------------------------------------------------------


def scalars(function: str, alpha, beta, c, a) -> tuple[tuple, tuple]:
    """Return alpha and beta as the kernels take them; without beta, c is not read.

    Of arrays these are the addresses: the caller holds on to alpha and beta until the launch is queued.
    """
    alpha = (0, alpha, 0) if type(alpha) is float else _address(function, "alpha", alpha, a)
    beta = (0, beta, 0) if type(beta) is float else _address(function, "beta", beta, a)
    if c is None and beta != ZERO:
        checks.fail(ValueError, function, "c", "be given where beta is not 0", "None")
    return alpha, beta


def _address(function: str, name: str, value, a) -> tuple[int, float, int]:
    value = scalar(function, name, value)
    if type(value) is float:
        return 0, value, 0
    (a,), _ = arrays.take(function, a=a)
    device = arrays.device_of(function, a=a, **{name: value})
    return device.pointer(value), 1.0, SCALAR_TYPES.index(dtypes.name(value.dtype))


def scalar(function: str, name: str, value):
    """Return a number as a float, and a 0-d array as an array of its device."""
    if not (hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")):
        return checks.number(function, name, value)
    (x,), _ = arrays.take(function, **{name: value})
    if x.ndim != 0:
        checks.fail(ValueError, function, name, "be a number or a 0-d array", f"shape {tuple(x.shape)}")
    checks.dtype(function, name, x, SCALAR_TYPES)
    return x


# --- products -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slices:
    """More batch axes than a kernel has: a product for each entry of the outermost one, with a key of its own."""

    product: Product
    batch: tuple[int, ...]

    def run(self, operands: tuple, addresses: list, alpha: tuple, beta: tuple) -> None:
        ndim = len(self.batch) + 2
        for i in range(self.batch[0]):
            entries = [
                x if x is None or x.ndim < ndim else x[i if x.shape[0] > 1 else 0]
                for x in operands[: len(self.product.roles)]
            ]
            self.product(tuple(entries), alpha, beta)


class Product:
    """A product with fixed options, called with arrays in the order of `roles`.

    _lora_product.py derives one that adds a low-rank part in the same kernel: see `hopper`, `configure` and `kernel`.

    Parameters
    ----------
    function : str
        For messages.
    options : Options
    workspaces : dict, optional
        Keeps workspaces from call to call; without, each call allocates its own.
    """

    roles: ClassVar[tuple[str, ...]] = ROLES
    names: ClassVar[dict[str, str]] = {}  # what the user calls an operand, where that is not its role
    _all: ClassVar[weakref.WeakSet[Product]] = weakref.WeakSet()
    optional: ClassVar[tuple[str, ...]] = ("out", "c", "bias", "residual")
    types: ClassVar[Types] = Types()

    def __init__(self, function: str, options: Options, workspaces: dict | None = None) -> None:
        check_options(function, options, self.types)
        self.function, self.options, self.workspaces = function, options, workspaces
        self._launches: dict[tuple, Launch] = {}
        self._last: tuple = (None, None)
        self._repeat: Repeat | None = None
        self._call: tuple = ()
        Product._all.add(self)

    @classmethod
    def prepare_anew(cls) -> None:
        """Have all products choose their kernels again."""
        for product in list(cls._all):
            product._launches, product._last, product._repeat = {}, (None, None), None

    def __call__(self, operands: tuple, alpha: tuple = ONE, beta: tuple = ZERO):
        """Run on arrays of any kind; alpha and beta as `scalars` returns them."""
        repeat = self._repeat
        if repeat is not None and repeat.is_of(operands, alpha, beta):
            repeat.launch()
            return operands[_OUT]
        found = arrays.signature(operands)
        if found is None:
            return self._call_converted(operands, alpha, beta)
        # The fast path: CuPy arrays of one device. Everything that a launch depends on is in the key.
        key, addresses = found
        last, launch = self._last
        if key != last:
            launch = self._launch_of(key, operands, addresses)
        out = operands[_OUT]
        if out is None or launch.bind is None:
            return self._run(launch, operands, addresses, alpha, beta)
        call = (*addresses, alpha, beta)
        again = launch.bound.get(call)
        if again is None:
            self._note(launch, call, addresses)
            return self._run(launch, operands, addresses, alpha, beta)
        again()
        if call == self._call:
            self._repeat = Repeat(operands, alpha, beta, again)
        self._call = call
        return out

    @staticmethod
    def _note(launch: Launch, call: tuple, addresses: list) -> None:
        """Remember a call, and the second time what it comes down to: most never come again."""
        bound = launch.bound
        if call not in bound:
            if len(bound) >= _MAX_BOUND:
                bound.clear()
            bound[call] = None
        elif not launch.collides(addresses, *call[-2:]):
            bound[call] = launch.bind(addresses, *call[-2:])

    def _call_converted(self, operands: tuple, alpha: tuple, beta: tuple):
        """Run on arrays that need conversion or another device, or in the emulator, which is too slow for a cache."""
        names = self._names()
        self._check_given(operands)
        converted, give = arrays.take(self.function, **dict(zip(names, operands, strict=True)))
        device = arrays.device_of(self.function, **dict(zip(names, converted, strict=True)))
        operands = tuple(converted)
        with device.current():
            if not device.is_emulated:
                return give(self(operands, alpha, beta))
            addresses = [device.pointer(x) for x in operands]
            launch = self.prepare(device, operands, addresses)
            return give(self._run(launch, operands, addresses, alpha, beta))

    def _launch_of(self, key: list, operands: tuple, addresses: list) -> Launch:
        frozen = tuple(key)
        launch = self._launches.get(frozen)
        if launch is None:
            self._check_given(operands)
            checks.all_on_elements(self.function, self._names(), operands, addresses)
            device = arrays.device_of(self.function, a=operands[0])
            launch = self.prepare(device, operands, addresses)
            if len(self._launches) >= _MAX_LAUNCHES:
                self._launches.clear()
            self._launches[frozen] = launch
        self._last = key, launch
        return launch

    def _names(self) -> list[str]:
        """Return what the user calls the operands."""
        return [self.names.get(role, role) for role in self.roles]

    def _check_given(self, operands: tuple) -> None:
        named = zip(self.roles, self._names(), operands, strict=True)
        checks.arrays_given(self.function, **{name: x for role, name, x in named if role not in self.optional})

    def _run(self, launch: Launch, operands: tuple, addresses: list, alpha: tuple, beta: tuple):
        out = operands[_OUT]
        if out is None:
            out = launch.device.empty(launch.out_shape, launch.out_dtype)
            addresses[_OUT] = launch.device.pointer(out)
            operands = (*operands[:_OUT], out, *operands[_OUT + 1 :])
        elif launch.collides(addresses, alpha, beta):
            aside = self.aside(launch, out)
            result = self((*operands[:_OUT], aside, *operands[_OUT + 1 :]), alpha, beta)
            if out.itemsize == 1:  # CuPy copies no float8
                out.view("uint8")[...] = result.view("uint8")
            else:
                out[...] = result
            return out
        if launch.steps is not None:
            launch.steps.run(operands, addresses, alpha, beta)
        return out

    def aside(self, launch: Launch, out):
        """Return where the result goes before it is copied to an out that overlaps an input."""
        return launch.device.empty(launch.out_shape, launch.out_dtype)

    def workspace(self, device, shape: tuple, dtype) -> tuple:
        """Return an array and its address; a kept one, if workspaces are kept."""
        if self.workspaces is None:
            x = device.empty(shape, dtype)
        else:
            key = (device, shape, dtype)
            if key not in self.workspaces:
                self.workspaces[key] = device.empty(shape, dtype)
            x = self.workspaces[key]
        return x, device.pointer(x)

    def prepare(self, device, operands: tuple, addresses: list) -> Launch:
        """Check the arguments, choose the kernel and pack what does not change."""
        named = dict(zip(self.roles, operands, strict=True))
        request = Request(self.function, self.options, named, addresses, self.names)
        dtype, out_dtype, sizes = self.check(request)
        empty = 0 in (*sizes.result, *named["b"].shape[:-2])
        steps = None if empty else self._steps(device, request, dtype, out_dtype, sizes)
        if steps is not None and sizes.K == 0:
            steps = OwnSteps(functools.partial(_run_without_product, steps))
        span = arrays.span(named["out"]) if named["out"] is not None else (0, 0)
        return Launch(device, sizes.result, dtypes.numpy(out_dtype), overlaps(request), steps, span)

    # What a derived product changes. `further` are the operands beyond `ROLES`.

    def check(self, request: Request) -> tuple[str, str, Sizes]:
        """Check everything that the user can get wrong; return the dtypes of a and out, and the sizes."""
        return check(request, self.types)

    def hopper(self, request: Request, described: tuple, further: dict, shape: bytes) -> OnHopper | SplitK | None:
        """Return the product on Hopper's own kernel, None where another one is to take it."""
        if self.options.split_k is not None:
            return None
        split = self._split_on_hopper(described, shape)
        if split is None and _gemm_sm90.supports(*described):
            return OnHopper(_gemm_sm90.plan(*described), shape)
        return split

    def _split_on_hopper(self, described: tuple, shape: bytes) -> SplitK | None:
        """Return the product in slices of K, where they make it faster."""
        slices = _gemm_sm90_split.slices_of(*described)
        if slices is None:
            return None
        count = slices.count
        device, operands, M, N, K, _, activation = described
        cols = N // 2 if self.options.activation == "swiglu" else N
        groups = -(-cols // 8) * -(-M // 16) * 32
        parts, extents, sums, parts_shape = _gemm_sm90_split.describe(operands, slices, M, N, K)
        partial = _gemm_sm90.plan(device, parts, M, N, K, extents, 0, config=slices.config, finish=PARTIAL)
        # The launch before is most often one that adds up, whose blocks leave the SMs to any number of others.
        partial = replace(partial, early=True)
        dtype = operands["a"].dtype
        return SplitK(
            partial=OnHopper(partial, parts_shape),
            **reduction(device, dtype, operands["out"].dtype, activation, groups, count, fragments=True),
            shape=shape,
            slices=sums,
            workspace=functools.partial(self.workspace, device, sums, dtypes.numpy("float32")),
        )

    def configure(self, device, request: Request, problem: Problem) -> Config:
        """Choose tile and split."""
        split_k = self.options.split_k
        return _gemm_config.select_config(problem, device.sm_count, device.max_shared_bytes, split_k)

    def kernel(self, device, request: Request, problem: Problem, config: Config, choices: dict, further: dict):
        """Return the kernel, its shared memory, and the `tail` of OneKernel."""
        itemsize = dtypes.itemsize(problem.dtype)
        return KERNELS[problem.kind].kernel(device, **choices), config.tile.shared_bytes(itemsize), None

    # How a product is prepared.

    @property
    def is_plain(self) -> bool:
        """Nothing goes into the product but a and b, and how to split K is not prescribed."""
        return len(self.roles) == len(ROLES) and self.options.split_k is None

    def _tuned(self, device, problem: Problem, arguments: tuple) -> Config | _gemm_sm90.Config | None:
        """Return the configuration that `gemm.tune` found to be fastest; None where it was not asked."""
        if not self.is_plain:
            return None
        on_hopper = _gemm_sm90.SM90.exists_on(device.capability)
        return _gemm_choices.find(device, problem, _gemm_sm90.describe_problem(*arguments[1:]) if on_hopper else None)

    def _steps(self, device, request: Request, dtype: str, out_dtype: str, sizes: Sizes):
        described = describe(request, sizes, out_dtype)
        further = {role: described.pop(role) for role in self.roles[len(ROLES) :]}
        folded = fold_batch(described, sizes)
        if folded is None:
            return Slices(self, sizes.batch)
        return self._steps_of(device, request, (dtype, out_dtype), described, further, folded, sizes)

    def _steps_of(self, device, request: Request, types: tuple, described: dict, further: dict, folded, sizes: Sizes):
        (dtype, out_dtype), (M, extents) = types, folded
        N, K, gate = sizes.N, sizes.K, sizes.gate
        a, b = described["a"], described["b"]
        a_k_major, access_a = layout_of(a, M, K, a.row, a.col, 0)
        b_k_major, access_b = layout_of(b, N, K, b.col, b.row, gate)
        tf32 = self.options.precision == "tf32"
        is_base = len(self.roles) == len(ROLES)
        across_k = is_base and not a_k_major and not b_k_major
        problem = Problem(dtype, M, N, K, math.prod(extents), tf32, min(access_a, access_b), across_k=across_k)
        activation = ACTIVATIONS.index(self.options.activation)
        arguments = (device, described, M, N, K, extents, activation)
        tuned = self._tuned(device, problem, arguments)
        if isinstance(tuned, _gemm_sm90.Config):
            shape = pack_shape(described, (M, N, K, sizes.cols), extents, K, gate)
            return OnHopper(_gemm_sm90.plan(*arguments, config=tuned), shape)
        config = self.configure(device, request, problem) if tuned is None else tuned
        shape = pack_shape(described, (M, N, K, sizes.cols), extents, config.k_per_split, gate)
        if tuned is None:
            if self.is_plain and M == 1 and not tf32 and b_k_major and access_a == access_b == 16:
                kernel, blocks = _gemm_gemv.plan(device, dtype, out_dtype, activation, sizes.cols, K)
                grid = (blocks, 1, min(problem.batches, _MAX_GRID_Z))
                return OneKernel(kernel, grid, (_gemm_gemv.THREADS, 1, 1), 0, shape, None, early=True)
            on_hopper = self.hopper(request, arguments, further, shape)
            if on_hopper is not None:
                return on_hopper
            layouts = {"a": (a_k_major, access_a, 0), "b": (b_k_major, access_b, gate)}
            copies = {}
            if is_base or problem.kind != "float32":
                copies, replaced = _gemm_repack.plan(device, problem, described, layouts, extents)
            if copies:
                product = self._steps_of(device, request, types, replaced, further, folded, sizes)
                size = sum(copy.size for copy in copies.values())
                workspace = functools.partial(self.workspace, device, (size,), np.dtype("uint8"))
                return _gemm_repack.Repacked(copies, product, workspace)
        choices = {"dtype": dtype, "a_k_major": a_k_major, "b_k_major": b_k_major}
        choices |= {"access_a": access_a, "access_b": access_b}
        one_kernel = functools.partial(self._one_kernel, device, request, problem, config, further)
        if config.split_k == 1:
            return one_kernel({**choices, "out_dtype": out_dtype, "activation": activation}, shape)
        slices, partial_shape = slices_of(problem, config, described, extents)
        groups = -(-sizes.cols // (16 // dtypes.itemsize(problem.accumulator))) * M * problem.batches
        return SplitK(
            partial=one_kernel({**choices, "out_dtype": problem.accumulator, "activation": 0}, partial_shape),
            **reduction(device, dtype, out_dtype, activation, groups, config.split_k),
            shape=shape,
            slices=slices,
            workspace=functools.partial(self.workspace, device, slices, dtypes.numpy(problem.accumulator)),
        )

    def _one_kernel(self, device, request, problem, config, further: dict, choices: dict, shape: bytes) -> OneKernel:
        tile = config.tile
        choices = {**choices, "tile": tile.cpp}
        kernel, shared_bytes, tail = self.kernel(device, request, problem, config, choices, further)
        tiles = -(-problem.M // tile.block_m) * -(-problem.N // tile.block_n)
        grid = (tiles, config.split_k, min(problem.batches, _MAX_GRID_Z))
        shared_bytes = max(shared_bytes, tile.staging_bytes(problem.accumulator))
        return OneKernel(kernel, grid, (tile.threads, 1, 1), shared_bytes, shape, tail)


def reduction(
    device, dtype: str, out_dtype: str, activation: int, groups: int, splits: int, fragments: bool = False
) -> dict:
    """Return kernel and grid of the launch that adds up slices, by the names that SplitK has for them.

    `groups` are of as many columns as 16 bytes of accumulators hold; `fragments`: as slices on Hopper write them.
    """
    # Four loads each, all at a time. Sharing slices costs threads more than it spares them, but for few groups.
    fewest = 4 if groups < _FEW_GROUPS else 1
    lanes = next((lanes for lanes in (1, 2, 4, 8) if lanes >= fewest and splits <= 4 * lanes), 16)
    choices = {"dtype": dtype, "out_dtype": out_dtype, "lanes": lanes, "activation": activation}
    kernel = REDUCE.kernel(device, **choices, fragments=fragments)
    return {"reduce": kernel, "grid": (-(-groups * lanes // REDUCE_THREADS), 1, 1)}


def slices_of(problem: Problem, config: Config, described: dict, extents: tuple) -> tuple[tuple[int, int, int], bytes]:
    """Describe the partial products: splits, batches * M and row stride, and their GemmShape."""
    M, N, K = problem.M, problem.N, problem.K
    itemsize = dtypes.itemsize(problem.accumulator)
    width = 16 // itemsize
    row_stride = -(-N // width) * width
    strides, step = [], M * row_stride
    for extent in reversed(extents):
        strides.insert(0, step)
        step *= extent
    plain = {role: described[role] for role in ("a", "b")}
    plain["out"] = Operand(problem.accumulator, itemsize, 0, row_stride, 1, strides)
    shape = pack_shape(plain, (M, N, K, N), extents, config.k_per_split, 0, partial_stride=step)
    return (config.split_k, problem.batches * M, row_stride), shape


def _run_without_product(steps, operands: tuple, addresses: list, alpha: tuple, beta: tuple) -> None:
    """A sum of no products is 0, whatever alpha is: NaN times 0 would not be."""
    steps.run(operands, addresses, ZERO, beta)
