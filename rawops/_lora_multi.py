"""Many LoRA adapters on one base weight, each row of a batch with its own: `MultiLoRA`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rawops import _gemm_sm90, _gemm_sm90_split, _lora_beside, config
from rawops._gemm_call import ONE, Launch, OnHopper
from rawops._gemm_config import Config, Problem
from rawops._gemm_operands import (
    MAX_SIZE,
    ROLES,
    Options,
    Request,
    Sizes,
    check_addend,
    check_bias,
    check_given,
    layout_of,
)
from rawops._gemm_repack import Repacked
from rawops._gemm_steps import OwnSteps
from rawops._lora_multi_config import (
    ADAPTERS,
    DTYPES,
    EXPAND,
    GROUP,
    GROUP_ROWS,
    LIGHT_TILES,
    MOST_GROUPED,
    PLACES,
    SHRINK,
    SHRINK_PARAMS,
    SHRINK_THREADS,
    SM80,
    THREADS,
    comes_in_order,
    padded_rank,
    plan,
    row_of_sorted,
)
from rawops._lora_product import Base, check_columns, check_input
from rawops._lora_slices import check_slices, take_factors
from rawops._runtime import arrays, checks, dtypes


@dataclass(frozen=True)
class _Stack:
    """The adapters on the device, slot by slot; strides in elements.

    Attributes
    ----------
    a : array (max_loras, slices, slot_rank, a_row)
        Transposed: a row for each rank, filled up to K and to the slice's rank.
    b : array (max_loras, N, slot_rank)
        Transposed as well; a column has the ranks of the slice that it is in.
    ranks : array (max_loras, slices) int32
    scalings : array (max_loras,) float32
    non_finite : array (max_loras,) int32
        Whether b has an infinity or a NaN.
    slices : array (slices, 2) int32
    counters : array (2,) int32
        Zero between calls, see _lora_beside.py.
    """

    a: object
    b: object
    ranks: object
    scalings: object
    non_finite: object
    slices: object
    counters: object
    first_slice: tuple[int, int]

    @classmethod
    def empty(cls, device, dtype, sizes: tuple, max_loras: int, max_rank: int, slices: tuple) -> _Stack:
        (K, N), slot_rank = sizes, padded_rank(max_rank)
        stack = cls(
            a=device.empty((max_loras, len(slices), slot_rank, -(-K // 8) * 8), dtype),
            b=device.empty((max_loras, N, slot_rank), dtype),
            ranks=device.empty((max_loras, len(slices)), np.dtype("int32")),
            scalings=device.empty((max_loras,), np.dtype("float32")),
            non_finite=device.empty((max_loras,), np.dtype("int32")),
            slices=device.empty((len(slices), 2), np.dtype("int32")),
            counters=device.empty((2,), np.dtype("int32")),
            first_slice=slices[0],
        )
        stack.ranks[...] = stack.counters[...] = 0
        for i, bounds in enumerate(slices):
            for j, bound in enumerate(bounds):
                stack.slices[i, j] = bound
        return stack

    def addresses(self, device) -> list[int]:
        return [device.pointer(x) for x in (self.a, self.b, self.ranks, self.scalings, self.non_finite, self.slices)]

    def beside(self, device) -> _lora_beside.Adapters | None:
        """Describe it for the kernel that makes x @ a beside x @ c, None where that cannot take it."""
        max_loras, N, slot_rank = self.b.shape
        if slot_rank > _lora_beside.RANKS or len(self.slices) > 1 or self.first_slice != (0, N) or max_loras == 0:
            return None
        *found, _ = self.addresses(device)
        return _lora_beside.Adapters(*found, device.pointer(self.counters), self.a.shape[-1], max_loras)


@dataclass(frozen=True)
class _Before:
    """What comes before a product.

    Attributes
    ----------
    sort : callable
        Launches it and returns the kernels' Adapters.
    beside : tuple
        For the kernel that needs nothing before: addresses of x and lora_indices, the stride of these, where y goes.
    """

    sort: Callable[[], bytes]
    beside: tuple[int, int, int, int]


_BY_ADDEND = object()  # steps: gemm has a kernel that no adapters ride on, and y @ b goes into it as an addend


def _is_streamed(described: dict, sizes: Sizes) -> bool:
    """Tell whether gemm would stream b past a single row of a, see Product."""
    a, b = described["a"], described["b"]
    _, access_a = layout_of(a, 1, sizes.K, a.row, a.col, 0)
    return access_a == 16 and layout_of(b, sizes.N, sizes.K, b.col, b.row, sizes.gate) == (True, 16)


def _capacity(M: int) -> int:
    """Return for how many rows workspaces are: few sizes for batches of any."""
    return 1 << max(M - 1, 15).bit_length()


class _SortedProduct(Base):
    """x @ c, on rows sorted or as they come, with the low-rank part beside it; the last operand is a `_Before`."""

    is_plain = False  # to the checks of Product
    stack: _Stack

    def _steps_of(self, device, request: Request, types, described: dict, further: dict, folded, sizes: Sizes):
        if sizes.M == 1 and _is_streamed(described, sizes):
            return _BY_ADDEND
        steps = super()._steps_of(device, request, types, described, further, folded, sizes)
        if not isinstance(steps, Repacked):
            return steps
        if steps.product is _BY_ADDEND:
            return _BY_ADDEND
        # x needs no copy but the sorted one.
        copies = {index: copy for index, copy in steps.copies.items() if index != ROLES.index("a")}
        if not copies:
            return steps.product
        product = steps.product
        if isinstance(product, OnHopper):  # what it may read before the launch before is complete is being copied
            product = replace(product, plan=replace(product.plan, early=False))
        return replace(steps, copies=copies, product=product)

    def configure(self, device, request: Request, problem: Problem) -> Config:
        """A smaller tile than gemm's where that leaves the ranks no registers: it gives the same bits."""
        config = super().configure(device, request, problem)
        tiles = LIGHT_TILES.get(problem.kind, (config.tile,))
        return config if config.tile in tiles else replace(config, tile=tiles[0])

    def hopper(self, request: Request, described: tuple, further: dict, shape: bytes) -> object:
        if _gemm_sm90_split.slices_of(*described) > 1:
            return _BY_ADDEND
        if not _gemm_sm90.supports(*described):
            return None
        device, inputs, M, _, K, _, _ = described
        x = inputs["a"]
        in_order = comes_in_order(device, M, K, x.alignment, x.row, x.col)
        adapters = self.stack.beside(device) if in_order else None
        beside = adapters and _lora_beside.plan(*described, adapters)
        if beside is not None:
            return OnHopper(beside, shape, lambda operands, _: (operands[-1].beside, None))
        return OnHopper(plan(*described, in_order), shape, lambda operands, _: ((operands[-1].sort(),), None))

    def kernel(self, device, request: Request, problem: Problem, config, choices: dict, further: dict):
        kernel = SM80[problem.kind].kernel(device, **{name: choices[name] for name in SM80[problem.kind].template})
        memory = config.tile.shared_bytes(dtypes.itemsize(problem.dtype))
        return kernel, memory, lambda operands, _: (operands[-1].sort(), None)


class _MultiProduct(Base):
    """The product of a `MultiLoRA`, whose last operand is lora_indices."""

    roles = (*ROLES, "lora_indices")

    stack: _Stack

    def __init__(self, function: str, activation: str | None) -> None:
        super().__init__(function, Options(activation), {})
        self._sorted = _SortedProduct(function, self.options, self.workspaces)
        self._base = Base(function, self.options, self.workspaces)

    def use(self, stack: _Stack) -> None:
        self.stack = self._sorted.stack = stack

    def prepare(self, device, operands: tuple, addresses: list) -> Launch:
        x, c, *_, indices = operands
        check_input(self.function, x, c)
        checks.dtype(self.function, "lora_indices", indices, ("int32",))
        checks.shape(self.function, "lora_indices", indices, (x.shape[0],), "One index a row of x.")
        if addresses[-1] % 4 or indices.strides[0] % 4:
            checks.fail(ValueError, self.function, "lora_indices", "lie on whole elements", "an array between them")
        count = len(ROLES)
        launch = self._sorted.prepare(device, operands[:count], addresses[:count])
        if launch.steps is None:
            return launch
        x_row, x_col = (s // x.dtype.itemsize for s in x.strides)
        in_order = comes_in_order(device, *x.shape, addresses[0] % 16, x_row, x_col)
        if launch.steps is _BY_ADDEND:
            product, in_order = self._with_addend(device, x.dtype, len(x)), True
        else:
            product = launch.steps.run
        if not in_order:  # x is copied before out is written
            launch = replace(launch, overlaps=tuple(overlap for overlap in launch.overlaps if overlap[0] != 0))
        return replace(launch, steps=OwnSteps(self._steps_before(device, operands, addresses, product, in_order)))

    def _with_addend(self, device, dtype, M: int) -> Callable:
        """Return a function that makes y @ b in float32, and gives it to gemm as an addend."""
        N, expand = self.stack.b.shape[1], EXPAND.kernel(device, dtype=dtypes.name(dtype))

        def run(operands: tuple, addresses: list, alpha: tuple, beta: tuple) -> None:
            addend, address = self.workspace(device, (_capacity(M), N), np.dtype("float32"))
            expand.launch((-(-N // THREADS), M, 1), (THREADS, 1, 1), (operands[-1].sort(), address))
            x, c, out, _, bias, residual, _ = operands
            self._base((x, c, out, addend[:M], bias, residual), alpha, ONE)

        return run

    def _steps_before(self, device, operands: tuple, addresses: list, run, in_order: bool):
        """Return a function that groups the rows by adapter, makes y, and then runs the product."""
        x, indices, stack = operands[0], operands[-1], self.stack
        (M, K), dtype, (max_loras, slices, slot_rank, a_row) = x.shape, x.dtype, stack.a.shape
        capacity = _capacity(M)
        x_row, x_col = (s // dtype.itemsize for s in x.strides)
        is_aligned = addresses[0] % 16 == 0 and x_col == 1 and K % 8 == 0 and x_row % 8 == 0
        choices = {"dtype": dtypes.name(dtype), "is_aligned": is_aligned, "groups": M <= MOST_GROUPED}
        shrink = SHRINK.kernel(device, atoms=2 if slot_rank <= 16 else 4, **choices)
        group = None if M <= MOST_GROUPED else GROUP.kernel(device)
        sorted_row, index_stride = row_of_sorted(K), indices.strides[0] // 4
        of_shrink = (x_row, x_col, a_row, sorted_row, index_stride, M, K, max_loras, slot_rank, capacity)
        of_adapters = (
            x_row if in_order else sorted_row,
            max_loras,
            slices,
            slot_rank,
            capacity,
            M,
            stack.b.shape[1],
            *stack.first_slice,
        )
        workspaces = functools.partial(self._workspaces, device, dtype, capacity, 0 if in_order else sorted_row)
        a, b, ranks, scalings, non_finite, columns = stack.addresses(device)
        grid = (M if group is None else -(-M // PLACES), slices, 1)

        def steps(operands: tuple, addresses: list, alpha: tuple, beta: tuple) -> None:
            _kept, (sorted_x, y, infos) = workspaces()
            x, sorted_x = (addresses[0], 0) if in_order else (sorted_x, sorted_x)

            def sort() -> bytes:
                pointers = (addresses[0], a, addresses[-1], ranks, non_finite, scalings, sorted_x, y)
                params = SHRINK_PARAMS.pack(*pointers, infos, infos + 16 * capacity, *of_shrink)
                if group is not None:
                    group.launch((-(-M // GROUP_ROWS), 1, 1), (THREADS, 1, 1), (params,))
                shrink.launch(grid, (SHRINK_THREADS, 1, 1), (params,))
                return ADAPTERS.pack(b, y, ranks, columns, infos, *of_adapters)

            before = _Before(sort, (addresses[0], addresses[-1], index_stride, y))
            run((*operands[: len(ROLES)], before), [x, *addresses[1 : len(ROLES)]], alpha, beta)

        return steps

    def _workspaces(self, device, dtype, capacity: int, sorted_row: int) -> tuple[list, list]:
        """Return x sorted, y, and what is known of its rows: arrays, addresses."""
        _, slices, slot_rank, _ = self.stack.a.shape
        found = [
            self.workspace(device, (capacity, sorted_row), dtype),
            self.workspace(device, (slices, capacity, slot_rank), np.dtype("float32")),
            self.workspace(device, (2, capacity, 4), np.dtype("int32")),
        ]
        return [x for x, _ in found], [address for _, address in found]


class MultiLoRA:
    """A linear layer with a stack of LoRA adapters, of which each row of x has its own or none.

    Row i of the result is ``activation(x[i] @ c + scaling * (x[i] @ a) @ b + bias) + residual[i]`` with the adapter in
    slot ``lora_indices[i]``. Both products are added in one float32 accumulator before the only write of the result,
    and the intermediate ``x @ a`` is float32. Rows without an adapter have the bits of `rawops.gemm`, as it is
    configured without tuning.

    One launch sorts the rows by adapter and makes ``x @ a`` on tensor cores (two launches for more than 256 rows; up to
    64 rows stay as they are on Hopper, where the GEMM does not wait for it, or makes ``x @ a`` itself, if adapters and
    ranks are few). The next is the GEMM, whose tiles take in ``b`` once for all their rows of an adapter: segments of
    rows as in Punica's SGMV (arXiv:2310.18547), where a row alone is a segment of one. Nothing synchronises, and the
    grid does not depend on lora_indices: a captured call may be replayed with others.

    Parameters
    ----------
    c : array (K, N)
        The base weight, float16 or bfloat16; kept, not copied.
    max_loras : int
        Slots; with none all rows are base rows. Their memory is allocated here: ``(K * slices + N) * max_rank`` entries
        each, with max_rank rounded up to a multiple of 16.
    max_rank : int
        The largest rank that a slot takes; smaller ones cost no more time than they need.
    slices : sequence of (start, stop), optional
        Ranges of the N columns, each with an ``a`` and ``b`` of its own, as the query, key and value columns of one
        fused weight. They must not overlap; columns outside of all have no adapter. One slice with all columns if left
        out.
    bias : array (N,), optional
    activation : str, optional
        As for `rawops.gemm`.

    Raises
    ------
    TypeError, ValueError
        For what does not fit, before anything is allocated.

    Notes
    -----
    After a first call, a call of the same sizes with ``out=`` allocates nothing and can be captured in a CUDA graph.
    Calls of one object share workspaces: they belong on one stream, or in an order that streams keep. The same call
    gives the same bits.
    """

    _function, _load_function = "MultiLoRA", "MultiLoRA.load"

    def __init__(
        self, c, max_loras: int, max_rank: int, *, slices=None, bias=None, activation: str | None = None
    ) -> None:
        function = self._function
        check_given(function, c=c)
        (self.c, self.bias), _ = arrays.take(function, c=c, bias=bias)
        device = arrays.device_of(function, c=self.c, bias=self.bias)
        dtype = checks.dtype(function, "c", self.c, DTYPES)
        if self.c.ndim != 2:
            checks.fail(ValueError, function, "c", "have 2 dimensions", f"shape {tuple(self.c.shape)}")
        self.max_loras = checks.int_range(function, "max_loras", max_loras, 0, MAX_SIZE)
        self.max_rank = checks.int_range(function, "max_rank", max_rank, 0, MAX_SIZE)
        self.slices = check_slices(function, slices, self.c.shape[1])
        self._product = _MultiProduct(function, activation)
        if self.bias is not None:
            check_bias(function, self.bias, self._product.types.of_addends(dtype), self.c.shape[1])
        check_columns(function, self.c, activation)
        self._device, self._current = device, _current_of(device)
        with self._current():
            stack = _Stack.empty(device, self.c.dtype, self.c.shape, self.max_loras, self.max_rank, self.slices)
        self._product.use(stack)
        self._stack, self._loaded = stack, set()

    def load(self, slot: int, a, b, scaling: float = 1.0) -> None:
        """Copy an adapter into a slot, in the place of what was there.

        The copies are queued on the current stream: calls queued before see the slot as it was, those after as it is.

        Parameters
        ----------
        slot : int
        a : array (K, rank)
        b : array (rank, N)
            Of c's dtype, any strides, any rank up to max_rank. With `slices`, sequences of arrays, one for each: a
            of (K, rank), b of (rank, stop - start), or None for both where the slice has no low-rank part.
        scaling : float
            Usually ``lora_alpha / rank``; an infinity or a NaN reaches the rows of this adapter and no others.
        """
        function = self._load_function
        if self.max_loras == 0:
            checks.fail(ValueError, function, "slot", "be one of 0 slots", slot)
        slot = checks.int_range(function, "slot", slot, 0, self.max_loras - 1)
        scaling = checks.number(function, "scaling", scaling)
        pairs = take_factors(function, self.c, a, b, self.slices, self.max_rank)
        stack, K = self._stack, self.c.shape[0]
        with self._current():
            stack.non_finite[slot] = 0
            for i, (pair, (start, stop)) in enumerate(zip(pairs, self.slices, strict=True)):
                rank = 0 if pair is None else pair[0].shape[1]
                if rank:
                    stack.a[slot, i, :rank, :K] = pair[0].T
                    stack.b[slot, start:stop, :rank] = pair[1].T
                    stack.b[slot, start:stop, rank:] = 0
                    stack.non_finite[slot] |= _has_non_finite(pair[1])
                stack.ranks[slot, i] = rank
            stack.scalings[slot] = scaling
        self._loaded.add(slot)

    def unload(self, slot: int) -> None:
        """Empty a slot, in stream order as `load`; rows with its index then have no adapter."""
        slot = checks.int_range("MultiLoRA.unload", "slot", slot, 0, self.max_loras - 1)
        with self._current():
            self._stack.ranks[slot] = 0
        self._loaded.discard(slot)

    def __call__(self, x, lora_indices, *, residual=None, out=None):
        """Run on x (..., K) with the adapters in the slots lora_indices (...), int32 on the device, in any order.

        -1, any other number that is no slot, and that of an empty slot stand for no adapter; with RAWOPS_CHECK=1 the
        latter two raise ValueError, for which the indices are read on the host.

        Returns
        -------
        array (..., N), or (..., N/2) for swiglu
        """
        if config.current().check:
            self._check_indices(lora_indices)
        if getattr(x, "ndim", 2) == 2:
            return self._product((x, self.c, out, None, self.bias, residual, lora_indices))
        return self._call_flat(x, lora_indices, residual, out)

    def _call_flat(self, x, lora_indices, residual, out):
        """Run on x with batch axes, as rows."""
        function = self._function
        named = {"x": x, "lora_indices": lora_indices, "residual": residual, "out": out}
        check_given(function, x=x, lora_indices=lora_indices)
        (x, indices, residual, out), give = arrays.take(function, **named)
        check_input(function, x, self.c)
        checks.shape(function, "lora_indices", indices, x.shape[:-1], "One index a row of x.")
        shape = (*x.shape[:-1], self.c.shape[1] // (2 if self._product.options.activation == "swiglu" else 1))
        if residual is not None:
            check_addend(function, "residual", residual, self._product.types.of_addends(self.c.dtype.name), shape)
            residual = np.broadcast_to(residual, shape).reshape(-1, shape[-1])
        if out is not None:
            checks.shape(function, "out", out, shape)
        rows = (x.reshape(-1, x.shape[-1]), self.c, None, None, self.bias, residual, indices.reshape(-1))
        with self._current():
            result = self._product(rows).reshape(shape)
            if out is not None:
                out[...] = result
        return give(result if out is None else out)

    def _check_indices(self, lora_indices) -> None:
        check_given("MultiLoRA", lora_indices=lora_indices)
        (indices,), _ = arrays.take("MultiLoRA", lora_indices=lora_indices)
        checks.dtype("MultiLoRA", "lora_indices", indices, ("int32",))
        for index in sorted({*indices.ravel().tolist()} - {-1}):
            if not 0 <= index < self.max_loras:
                rule = f"be -1 or between 0 and {self.max_loras - 1}"
                checks.fail(ValueError, "MultiLoRA", "lora_indices", rule, index)
            if index not in self._loaded:
                checks.fail(ValueError, "MultiLoRA", "lora_indices", "name slots with an adapter", f"empty {index}")


class SlicedLoRA(MultiLoRA):
    """A linear layer with one adapter that has a part for each of some ranges of columns: a stack of one slot."""

    def __init__(self, function: str, c, a, b, scaling: float, slices, bias, activation: str | None) -> None:
        self._function = self._load_function = function
        check_given(function, c=c, a=a, b=b)
        ranks = [x.shape[1] for x in a if getattr(x, "ndim", 0) == 2] if isinstance(a, Sequence) else []
        super().__init__(c, 1, max(ranks, default=0), slices=slices, bias=bias, activation=activation)
        self.load(0, a, b, scaling)
        self._index = self._device.empty((1,), np.dtype("int32"))
        with self._current():
            self._index[...] = 0

    def __call__(self, x, *, residual=None, out=None):
        check_given(self._function, x=x)
        (taken,), _ = arrays.take(self._function, x=x)
        check_input(self._function, taken, self.c)
        return super().__call__(x, np.broadcast_to(self._index, taken.shape[:-1]), residual=residual, out=out)


def _has_non_finite(x):
    """Tell on the device whether a 16-bit array has an infinity or a NaN."""
    exponent = 0x7C00 if x.dtype.name == "float16" else 0x7F80
    return ((x.view("uint16") & exponent) == exponent).any()


def _current_of(device):
    """Return a context manager in which CuPy works on a device."""
    if device.is_emulated:
        return contextlib.nullcontext
    return functools.partial(arrays.cupy_or_raise("MultiLoRA").cuda.Device, device.ordinal)
