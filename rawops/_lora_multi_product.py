"""What a call of a `MultiLoRA` launches: which kernels make x @ a, sort the rows and add y @ b to x @ c."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rawops import _gemm_sm90, _gemm_sm90_split, _lora_beside
from rawops._gemm_call import ONE, Launch, OnHopper
from rawops._gemm_config import Config, Problem
from rawops._gemm_operands import ROLES, Options, Request, Sizes, layout_of
from rawops._gemm_repack import Repacked
from rawops._gemm_steps import OwnSteps, overlaps
from rawops._lora_multi_config import (
    ADAPTERS,
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
    plan,
    row_of_sorted,
)
from rawops._lora_product import Base, check_input
from rawops._lora_stack import Stack
from rawops._runtime import checks, dtypes


@dataclass(frozen=True)
class _Before:
    """What comes before a product.

    Attributes
    ----------
    sort : callable
        Launches it and returns the kernels' Adapters.
    beside : tuple
        For the kernel that needs nothing before: addresses of x and lora_indices, the stride of these, where the parts
        of y go.
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
    stack: Stack

    def _steps_of(self, device, request: Request, types, described: dict, further: dict, folded, sizes: Sizes):
        if sizes.M == 1 and sizes.K > 0 and _is_streamed(described, sizes):
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
        if _gemm_sm90_split.slices_of(*described) is not None:
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


class MultiProduct(Base):
    """The product of a `MultiLoRA`, whose last operand is lora_indices."""

    roles = (*ROLES, "lora_indices")

    stack: Stack

    def __init__(self, function: str, activation: str | None) -> None:
        super().__init__(function, Options(activation), {})
        self._sorted = _SortedProduct(function, self.options, self.workspaces)
        self._base = Base(function, self.options, self.workspaces)

    def use(self, stack: Stack) -> None:
        self.stack = self._sorted.stack = stack

    def prepare(self, device, operands: tuple, addresses: list) -> Launch:
        x, c, *_, indices = operands
        check_input(self.function, x, c)
        checks.dtype(self.function, "lora_indices", indices, ("int32",))
        checks.shape(self.function, "lora_indices", indices, (x.shape[0],), "One index a row of x.")
        count = len(ROLES)
        launch = self._sorted.prepare(device, operands[:count], addresses[:count])
        if launch.steps is None:
            return launch
        named = dict(zip(self.roles, operands, strict=True))  # with lora_indices, which `_sorted` does not know
        launch = replace(launch, overlaps=overlaps(Request(self.function, self.options, named, addresses, self.names)))
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
        grid = (M if group is None else -(-M // 16) * (16 // PLACES), slices, 1)

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
        _, slices, slot_rank, a_row = self.stack.a.shape
        parts = _lora_beside.parts_size(a_row) if capacity <= _lora_beside.ROWS else 0
        found = [
            self.workspace(device, (capacity, sorted_row), dtype),
            self.workspace(device, (max(slices * capacity * slot_rank, parts),), np.dtype("float32")),
            self.workspace(device, (2, capacity, 4), np.dtype("int32")),
        ]
        return [x for x, _ in found], [address for _, address in found]
