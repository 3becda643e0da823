"""The fused LoRA product, which `lora_linear` and `FusedLoRA` share: its kernels' operands, and the checks."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rawops import _gemm_sm90
from rawops._gemm_call import ONE, Launch, OnHopper, Product
from rawops._gemm_config import DTYPES, SWIGLU, Problem
from rawops._gemm_operands import ROLES, Options, Request, layout_of
from rawops._gemm_sm90_low_rank import LowRank
from rawops._gemm_steps import OwnSteps
from rawops._lora_config import LOW_RANK, READING, RIDING, LoraConfig, select_config, shared_bytes
from rawops._lora_sm90 import NarrowProduct
from rawops._runtime import checks, dtypes

NOTHING = (None,) * (len(ROLES) - 2)  # in the place of out and all of an epilogue


class Base(Product):
    """x @ c with its epilogue. There is no addend, but its name must not be that of another operand."""

    names: ClassVar = {"a": "x", "b": "c", "c": "addend", "lora_a": "a", "lora_b": "b"}

    def prepare(self, device, operands: tuple, addresses: list) -> Launch:
        check_input(self.function, *operands[:2])
        return super().prepare(device, operands, addresses)


class LowRankProduct(Base):
    """x @ c with the low-rank part beside it."""

    roles = (*ROLES, "lora_a", "lora_b")

    def __init__(self, function: str, activation: str | None, scaling: float, workspaces: dict | None = None) -> None:
        options = Options(activation)
        super().__init__(function, options, workspaces)
        self.scaling = checks.number(function, "scaling", scaling)
        self._scaling_of_16_bits = dtypes.as_float32(self.scaling)
        self.base = Base(function, options, workspaces)
        self._step = Product(function, Options(), workspaces)

    def prepare(self, device, operands: tuple, addresses: list) -> Launch:
        _, c, *_, a, b = operands
        check_weights(self.function, c, a, b)
        check_columns(self.function, c, self.options.activation)
        is_plain, is_wide = a.shape[1] == 0 or self.scaling == 0, c.dtype.itemsize > 2
        if not is_plain and not is_wide:
            return super().prepare(device, operands, addresses)
        count = len(ROLES)
        launch = self.base.prepare(device, operands[:count], addresses[:count])
        # No tensor core takes wide types without rounding: three products, the sum in their own type.
        return launch if is_plain else replace(launch, overlaps=(), steps=OwnSteps(self._run_apart))

    def _run_apart(self, operands: tuple, *_) -> None:
        x, c, out, _, bias, residual, a, b = operands
        low, base = self._step((x, a, *NOTHING), (0, self.scaling, 0)), self._step((x, c, *NOTHING))
        self.base((low, b, out, base, bias, residual), ONE, ONE)

    def hopper(self, request: Request, described: tuple, further: dict, shape: bytes) -> OnHopper | None:
        a, rank = further["lora_a"], request.arrays["lora_a"].shape[1]
        low_rank = LowRank(a, further["lora_b"], rank, self.products_beside(rank))
        if not _gemm_sm90.supports(*described, low_rank):
            return None
        plan, count = _gemm_sm90.plan(*described, low_rank), len(ROLES)
        if plan.config.rides:
            return OnHopper(plan, shape, lambda _, addresses: ((self._scaling_of_16_bits, *addresses[count:]), None))
        (device, inputs, M, _, K, extents, _), y_row = described, row_of_y(rank)
        y_shape, blocks = (*request.arrays["a"].shape[:-1], y_row), plan.config.beside
        step = NarrowProduct(device, inputs["a"], a, M, K, rank, extents, y_row, blocks)

        def tail(_, addresses: list) -> tuple[tuple, object]:
            y, y_address = self.y_workspace(device, y_shape)
            parts = self.parts_of_y(device, y, rank)
            step.run(addresses[0], addresses[count], y_address, self.launch_beside(blocks), parts)
            return (self._scaling_of_16_bits, *addresses[count:], y_address, y_row), y

        return OnHopper(replace(plan, early=True), shape, tail)

    def products_beside(self, rank: int) -> int:
        """Return how many products are made beside that with c, x @ a among them."""
        return 1

    def y_workspace(self, device, shape: tuple) -> tuple:
        """Return where x @ a goes, and its address."""
        return self.workspace(device, shape, dtypes.numpy("float32"))

    def parts_of_y(self, device, y, rank: int) -> int:
        """Return where y = x @ a is to go once more, as `_lora_sm90.row_of_parts` has it; 0 for nowhere."""
        return 0

    def launch_beside(self, blocks: int) -> bool:
        """Launch what is to run beside x @ a, on as many blocks, and tell whether there is such a thing."""
        return False

    def configure(self, device, request: Request, problem: Problem) -> LoraConfig:
        rank = request.arrays["lora_a"].shape[1]
        return select_config(problem, rank, device.sm_count, device.max_shared_bytes)

    def kernel(self, device, request: Request, problem: Problem, config: LoraConfig, choices: dict, further: dict):
        a, b, rank = further["lora_a"], further["lora_b"], request.arrays["lora_a"].shape[1]
        half = problem.N // 2 if choices["activation"] == SWIGLU else 0
        b_k_major, access_b = layout_of(b, problem.N, rank, b.col, b.row, half)
        choices = {**choices, "rank_step": config.rank_step, "rides": config.rides}
        choices |= {"lora_b_k_major": b_k_major, "access_lora_b": access_b}
        strides = (a.row, a.col, b.row, b.col)
        if config.rides:
            a_k_major, access_a = layout_of(a, rank, problem.K, a.col, a.row, 0)
            choices |= {"lora_a_k_major": a_k_major, "access_lora_a": access_a}
            kernel = RIDING[problem.kind, config.rank_step].kernel(device, **choices)

            def tail(operands: tuple, addresses: list) -> tuple[bytes, None]:
                return LOW_RANK.pack(*addresses[len(ROLES) :], 0, *strides, 0, rank, self._scaling_of_16_bits), None

        else:
            kernel = READING[problem.kind].kernel(device, **choices, lora_a_k_major=True, access_lora_a=16)
            y_row = row_of_y(rank)
            y_shape = (*request.arrays["a"].shape[:-1], y_row)

            def tail(operands: tuple, addresses: list) -> tuple[bytes, object]:
                y, y_address = self.y_workspace(device, y_shape)
                self._step((operands[0], operands[len(ROLES)], y[..., :rank], *NOTHING[1:]))
                numbers = (y_address, *strides, y_row, rank, self._scaling_of_16_bits)
                return LOW_RANK.pack(*addresses[len(ROLES) :], *numbers), y

        memory = shared_bytes(config.tile, config.rank_step, config.rides, dtypes.itemsize(problem.dtype))
        return kernel, memory, tail


def row_of_y(rank: int) -> int:
    """The row stride of x @ a in float32: on 16-byte boundaries."""
    return -(-rank // 4) * 4


def check_weights(function: str, c, a, b) -> None:
    dtype = checks.dtype(function, "c", c, DTYPES)
    for name, x in (("c", c), ("a", a), ("b", b)):
        checks.dtype(function, name, x, (dtype,), "x, c, a and b have one dtype; convert one of them.")
        if x.ndim != 2:
            checks.fail(ValueError, function, name, "have 2 dimensions", f"shape {tuple(x.shape)}")
    (K, N), rank = c.shape, a.shape[1]
    checks.shape(function, "a", a, (K, rank), "a is (K, rank), c is (K, N): transpose it?")
    checks.shape(function, "b", b, (rank, N), "b is (rank, N) for a (K, rank) and c (K, N): transpose it?")


def check_columns(function: str, c, activation: str | None) -> None:
    if activation == "swiglu" and c.shape[1] % 2:
        checks.fail(ValueError, function, "c", "have an even number of columns for swiglu", c.shape[1])


def check_input(function: str, x, c) -> None:
    checks.dtype(function, "x", x, (c.dtype.name,), "x, c, a and b have one dtype; convert one of them.")
    if x.ndim < 2 or x.shape[-1] != c.shape[0]:
        rule = f"have shape (..., M, {c.shape[0]}), as c has {c.shape[0]} rows"
        checks.fail(ValueError, function, "x", rule, f"shape {tuple(x.shape)}")
