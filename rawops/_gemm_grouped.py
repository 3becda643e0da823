"""Grouped products: rows of a in groups that offsets on the device describe, a matrix b for each group.

The kernels are those of `gemm`; groups.cuh tells them which tile is whose. The host knows how many rows and groups
there are and no more, so a grid has room for the tiles of any offsets.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from rawops import _gemm_sm90
from rawops import config as settings
from rawops._gemm_call import Launch, OneKernel, OnHopper, Product
from rawops._gemm_config import (
    ACTIVATIONS,
    CALL_FIELDS,
    DTYPES,
    KERNELS,
    SHAPE_FIELDS,
    Config,
    Problem,
    select_config,
)
from rawops._gemm_operands import (
    MAX_SIZE,
    ROLES,
    Request,
    Sizes,
    check_epilogue,
    check_precision,
    describe,
    layout_of,
    pack_shape,
    result_dtype,
)
from rawops._runtime import checks, dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct

MAX_GROUPS = 1024  # their table fits beside the smallest tiles

_FIELDS = {"offsets": "pointer", "stride": "int64", "count": "int32", "is_64_bit": "int32"}
_OFFSETS = ParamStruct("GroupOffsets", **_FIELDS)
_PARAMS = ParamStruct("GroupedParams", **CALL_FIELDS, **SHAPE_FIELDS, **_FIELDS)


def _grouped(spec: KernelSpec) -> KernelSpec:
    """Declare the grouped kernel beside another one, with the same template."""
    return KernelSpec(
        source=spec.source,
        entry=spec.entry.replace("gemm_", "gemm_grouped_"),
        template=spec.template,
        choices=spec.choices,
        smoke=(spec.smoke[0], spec.smoke[-1]),
        params=_PARAMS,
        spills=spec.spills,
    )


GROUPED = {kind: _grouped(spec) for kind, spec in KERNELS.items()}
_SM90_CHOICES = {name: v for name, v in _gemm_sm90.SM90.choices.items() if name != "a_k_major"}
GROUPED_SM90 = KernelSpec(
    source="gemm_grouped_sm90.cu",
    entry="rawops::gemm_grouped_sm90",
    template=tuple(_SM90_CHOICES),
    choices=_SM90_CHOICES,
    smoke=[
        dict(zip(_SM90_CHOICES, values, strict=True))
        for values in (
            ("bfloat16", "bfloat16", 128, 256, 3, False, 0, _gemm_sm90.PLAIN, False),
            ("float16", "float16", 64, 256, 5, True, 5, _gemm_sm90.STAGED, False),
            ("bfloat16", "bfloat16", 64, 256, 4, False, 0, _gemm_sm90.PLAIN, True),
        )
    ],
    min_arch=90,
    max_arch=90,
)


def table_bytes(groups: int) -> int:
    """Shared memory of a block's GroupTable."""
    return -(-(groups + 1) * 8 // 128) * 128


def most_tiles(rows: int, groups: int, block_m: int) -> int:
    """Row tiles at the worst offsets: every group has one of its last tile's rows."""
    return max(1, min(rows, (rows + groups * (block_m - 1)) // block_m))


class GroupedProduct(Product):
    """``activation(alpha * (a @ b[group of the row]) + ...)`` with the arrays in the order of `roles`."""

    roles = (*ROLES, "group_offsets")

    def check(self, request: Request) -> tuple[str, str, Sizes]:
        dtype = _check_operands(request)
        (M, K), (G, _, N) = request.arrays["a"].shape, request.arrays["b"].shape
        sizes = Sizes(M, N, K, N // 2 if self.options.activation == "swiglu" else N, ())
        out_dtype = result_dtype(request, dtype, self.types)
        check_epilogue(request, self.types.of_addends(dtype), sizes, G)
        return dtype, out_dtype, sizes

    def _run(self, launch: Launch, operands: tuple, addresses: list, alpha: tuple, beta: tuple):
        if settings.current().check:
            self._check_values(operands[0].shape[0], operands[-1].tolist())
        return super()._run(launch, operands, addresses, alpha, beta)

    def aside(self, launch: Launch, out):
        return out.copy()  # with the rows in no group, which are not written

    def _check_values(self, rows: int, offsets: list) -> None:
        falls = any(end < begin for begin, end in itertools.pairwise(offsets))
        if falls or offsets[0] < 0 or offsets[-1] > rows:
            checks.fail(ValueError, self.function, "group_offsets", f"rise from 0 or more to at most {rows}", offsets)

    def _steps(self, device, request: Request, dtype: str, out_dtype: str, sizes: Sizes):
        M, N, K, gate = sizes.M, sizes.N, sizes.K, sizes.gate
        described = self._describe(request, sizes, out_dtype)
        a, b = described["a"], described["b"]
        a_k_major, access_a = layout_of(a, M, K, a.row, a.col, 0)
        b_k_major, access_b = layout_of(b, N, K, b.col, b.row, gate)
        if not a_k_major:
            access_a = a.itemsize  # groups begin at any row
        groups = request.arrays["b"].shape[0]
        problem = Problem(
            dtype, -(-M // groups), N, K, groups, self.options.precision == "tf32", min(access_a, access_b)
        )
        config = select_config(problem, device.sm_count, device.max_shared_bytes - table_bytes(groups), split_k=1)
        activation = ACTIVATIONS.index(self.options.activation)
        shape = pack_shape(described, (M, N, K, sizes.cols), (1, 1, groups), config.k_per_split, gate)
        offsets = request.arrays["group_offsets"]
        further = offsets.strides[0] // offsets.itemsize, groups, int(offsets.itemsize == 8)

        def pack_offsets(operands: tuple, addresses: list) -> bytes:
            return _OFFSETS.pack(addresses[-1], *further)

        plan = _hopper_plan(device, described, (M, N, K), groups, activation)
        if plan is not None:
            return OnHopper(plan, shape, lambda *call: ((pack_offsets(*call),), None))
        choices = {"dtype": dtype, "out_dtype": out_dtype, "activation": activation, "tile": config.tile.cpp}
        choices |= {"a_k_major": a_k_major, "b_k_major": b_k_major, "access_a": access_a, "access_b": access_b}
        return OneKernel(
            GROUPED[problem.kind].kernel(device, **choices),
            (most_tiles(M, groups, config.tile.block_m) * -(-N // config.tile.block_n), 1, 1),
            (config.tile.threads, 1, 1),
            _shared_bytes(config, problem) + table_bytes(groups),
            shape,
            lambda *call: (pack_offsets(*call), None),
        )

    @staticmethod
    def _describe(request: Request, sizes: Sizes, out_dtype: str) -> dict:
        """Describe all operands but the offsets; b and the bias have the groups for a batch axis."""
        arrays = {role: request.arrays[role] for role in ROLES}
        described = describe(replace(request, arrays=arrays, addresses=request.addresses[:-1]), sizes, out_dtype)
        for x in described.values():
            x.batch = [0, 0, *(x.batch or [0])]
        return described


def _hopper_plan(device, described: dict, sizes: tuple, groups: int, activation: int) -> _gemm_sm90.Plan | None:
    """Return the product on Hopper's kernel, None where that cannot run it."""
    if not GROUPED_SM90.exists_on(device.capability):
        return None
    M, N, K = sizes
    extents = (1, 1, groups)
    problem = _gemm_sm90.describe_problem(described, M, N, K, extents, activation)
    if problem is None or not problem.a_k_major:
        return None
    average = replace(problem, M=-(-M // groups), grouped=True)
    config = _gemm_sm90.select_config(average, device.sm_count, device.max_shared_bytes - table_bytes(groups))
    tiles = most_tiles(M, groups, config.block_m) * -(-N // config.block_n)
    config = replace(config, blocks=min(tiles, config.blocks))
    kernel = GROUPED_SM90.kernel(
        device,
        dtype=described["a"].dtype,
        out_dtype=described["out"].dtype,
        block_m=config.block_m,
        block_n=config.block_n,
        stages=config.stages,
        b_k_major=problem.b_k_major,
        activation=activation,
        finish=problem.finish,
        ping_pong=config.ping_pong,
    )
    maps = _gemm_sm90.tensor_maps(device, described, problem, config, sizes, extents)
    shared_bytes = config.shared_bytes(problem) + table_bytes(groups)
    return _gemm_sm90.Plan(config, kernel, (config.blocks, 1, 1), shared_bytes, maps, lambda offsets: offsets)


def _shared_bytes(config: Config, problem: Problem) -> int:
    tile = config.tile
    return max(tile.shared_bytes(dtypes.itemsize(problem.dtype)), tile.staging_bytes(problem.accumulator))


def _check_operands(request: Request) -> str:
    """Check a, b and the offsets; return the dtype of a."""
    function, arrays = request.function, request.arrays
    a, b, offsets = arrays["a"], arrays["b"], arrays["group_offsets"]
    dtype = checks.dtype(function, "a", a, DTYPES)
    checks.dtype(function, "b", b, (dtype,), "a and b have one dtype; convert one of them.")
    checks.dtype(function, "group_offsets", offsets, ("int32", "int64"))
    for role, x, rule in (("a", a, "(total_M, K)"), ("b", b, "(groups, K, N)")):
        if x.ndim != rule.count(",") + 1:
            request.fail(ValueError, role, f"have shape {rule}", f"shape {tuple(x.shape)}")
        if max(x.shape) > MAX_SIZE:
            request.fail(ValueError, role, f"have at most {MAX_SIZE} rows and columns", tuple(x.shape))
    G, K, N = b.shape
    if G > MAX_GROUPS:
        hint = "Make several calls, each with a slice of the offsets."
        request.fail(ValueError, "b", f"have at most {MAX_GROUPS} groups", G, hint)
    if a.shape[1] != K:
        rule = f"have {a.shape[1]} rows a group, as a has columns"
        request.fail(ValueError, "b", rule, f"shapes {tuple(a.shape)} @ {tuple(b.shape)}", "Transpose it?")
    checks.shape(function, "group_offsets", offsets, (G + 1,), "One offset more than there are groups, from 0 on.")
    if request.options.activation == "swiglu" and N % 2:
        request.fail(ValueError, "b", "have an even number of columns for swiglu", N)
    check_precision(function, request.options.precision, dtype)
    return dtype
