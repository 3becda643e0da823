"""The host side of paged_append.cu: its instances and what one launch is told."""

from __future__ import annotations

from dataclasses import dataclass

from rawops import config
from rawops._paged_kv_call import Plan, check_vector, contiguous, has_unit_stride, in_order
from rawops._paged_kv_pool import DTYPES, KV_DTYPES, POOL_FIELDS, Pool, describe, scale_strides
from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.call import Op, keep_apart
from rawops._runtime.kernel import KernelSpec, ParamStruct

_THREADS = 128
_ROW_FIELDS = ("rows", "token_stride", "head_stride", "dim_stride")
_NO_ROWS = (0, 0, 0)  # strides of q and q_out where there are none

PARAMS = ParamStruct(
    "AppendParams",
    **{
        f"{x}_{name}": "pointer" if name == "rows" else "int64"
        for x in ("k", "v", "q", "q_out")
        for name in _ROW_FIELDS
    },
    **POOL_FIELDS,
    **dict.fromkeys(("cos", "sin"), "pointer"),
    rotation_stride="int64",
    **dict.fromkeys(("rotation_positions", "half", "interleaved", "q_heads"), "int32"),
    **dict.fromkeys(("positions", "sequence_ids"), "pointer"),
    **dict.fromkeys(("tokens", "heads", "batch"), "int32"),
)

_CHOICES = {"dtype": DTYPES, "kv_dtype": KV_DTYPES, "access": (16, 2), "rotated": (False, True)}
KERNEL = KernelSpec(
    source="paged_append.cu",
    entry="rawops::paged_append",
    template=tuple(_CHOICES),
    choices=_CHOICES,
    smoke=[
        {"dtype": dtype, "kv_dtype": kv_dtype, "access": access, "rotated": rotated}
        for dtype, kv_dtype, access, rotated in (
            ("float16", "float16", 16, False),
            ("float16", "float16", 2, False),
            ("bfloat16", "bfloat16", 16, True),
            ("float16", "float8_e4m3fn", 16, True),
            ("bfloat16", "int8", 2, True),
        )
    ],
    params=PARAMS,
)


@dataclass(frozen=True)
class Launch:
    """An append whose shapes and strides are known: all but the addresses."""

    function: object
    grid: tuple[int, int, int]
    strides: tuple[tuple, ...]  # of k, v, q and q_out
    pool: tuple
    rotation: tuple
    sizes: tuple

    def run(self, addresses: list) -> None:
        """Launch with the addresses of the arrays in the order of `OP`."""
        k, v, pages, table, positions, sequence_ids, k_scale, v_scale, cos, sin, q, q_out = addresses
        of_k, of_v, of_q, of_q_out = self.strides
        packed = PARAMS.pack(
            *(k, *of_k, v, *of_v, q, *of_q, q_out, *of_q_out, pages, table, k_scale, v_scale, *self.pool),
            *(cos, sin, *self.rotation, positions, sequence_ids, *self.sizes),
        )
        self.function.launch(self.grid, (_THREADS, 1, 1), (packed,))


def _check_rows(function: str, operands: tuple, pool: Pool) -> str:
    """Check k, v, positions, sequence_ids and block_table against each other; return k's dtype."""
    k, v, _, block_table, positions, sequence_ids, *_ = operands
    allowed = (pool.dtype,) if pool.dtype in DTYPES else DTYPES
    dtype = checks.dtype(function, "k", k, allowed, "k and v have the dtype of a 16-bit pool.")
    checks.dtype(function, "v", v, (dtype,), "k and v have one dtype; convert one of them.")
    if k.ndim != 3 or k.shape[1:] != (pool.num_heads, pool.head_dim):
        rule = f"have shape (tokens, {pool.num_heads}, {pool.head_dim}), as the pool's heads"
        checks.fail(ValueError, function, "k", rule, tuple(k.shape))
    checks.shape(function, "v", v, k.shape, "k and v have one shape.")
    check_vector(function, "positions", positions, k.shape[0], "int32")
    if sequence_ids is not None:
        check_vector(function, "sequence_ids", sequence_ids, k.shape[0], "int32")
    elif k.shape[0] != pool.batch and block_table.ndim == 2:
        hint = "Give sequence_ids where sequences have other numbers of tokens than one."
        checks.fail(ValueError, function, "k", f"have {pool.batch} rows, one a sequence", k.shape[0], hint)
    return dtype


def _check_rotation(function: str, operands: tuple, pool: Pool, interleaved: bool) -> tuple[int, int, int, int]:
    """Check cos, sin, q and q_out; return positions, half, interleaved and q's heads."""
    k, *_, cos, sin, q, q_out = operands
    if cos is None and sin is None:
        for name, x in (("q", q), ("q_out", q_out)):
            if x is not None:
                checks.fail(ValueError, function, name, "be None without cos and sin", "an array")
        return 0, 0, 0, 0
    for name, x in (("cos", cos), ("sin", sin)):
        if x is None:
            checks.fail(TypeError, function, name, "be an array", "None", "RoPE takes both cos and sin.")
        checks.dtype(function, name, x, ("float32",))
    if cos.ndim != 2 or not 1 <= cos.shape[1] <= pool.head_dim // 2:
        rule = f"have shape (positions, rotary_dim / 2), rotary_dim at most {pool.head_dim}"
        checks.fail(ValueError, function, "cos", rule, tuple(cos.shape))
    checks.shape(function, "sin", sin, cos.shape, "cos and sin have one shape.")
    if (q is None) != (q_out is None):
        checks.fail(ValueError, function, "q_out", "be given with q, and only then", "one without the other")
    if q is None:
        return *cos.shape, int(interleaved), 0
    checks.dtype(function, "q", q, (dtypes.name(k.dtype),), "q has k's dtype.")
    if q.ndim != 3 or (q.shape[0], q.shape[2]) != (k.shape[0], pool.head_dim):
        rule = f"have shape ({k.shape[0]}, num_heads, {pool.head_dim})"
        checks.fail(ValueError, function, "q", rule, tuple(q.shape))
    checks.dtype(function, "q_out", q_out, (dtypes.name(k.dtype),))
    checks.shape(function, "q_out", q_out, q.shape)
    checks.output(function, "q_out", q_out)
    return *cos.shape, int(interleaved), q.shape[1]


def _prepare(function: str, operands: tuple, addresses: list, options: tuple) -> Plan:
    """Check an append and plan its launch."""
    k, _, pages, block_table, _, sequence_ids, k_scale, v_scale, cos, _, q, q_out = operands
    layout, interleaved = options
    device = arrays.device_of(function, pages=pages)
    checks.output(function, "pages", pages)
    pool = describe(function, pages, block_table, layout, addresses[2])
    dtype = _check_rows(function, operands, pool)
    scales = scale_strides(function, pool, pages.shape[0], k_scale, v_scale)
    rotation = _check_rotation(function, operands, pool, interleaved)
    apart = keep_apart(operands, 2, (0, 1, *range(3, 12)))
    apart += keep_apart(operands, 11, (0, 1, *range(3, 11)))
    if 0 in k.shape:
        return Plan(device, None, pool.page_size, apart)
    itemsize, half = k.dtype.itemsize, rotation[1]
    strides = [_NO_ROWS if x is None else tuple(s // itemsize for s in x.strides) for x in (*operands[:2], q, q_out)]
    placed = (addresses[0], addresses[1], addresses[10], addresses[11])
    wide = pool.access == 16 and all(
        address % 16 == 0 and has_unit_stride(x) and own[0] % 8 == own[1] % 8 == 0
        for x, own, address in zip((*operands[:2], q, q_out), strides, placed, strict=True)
        if x is not None
    )
    plain = dtype == pool.dtype and cos is None  # the only kind with a tail
    if not plain:
        wide = wide and pool.head_dim % 8 == 0 and half % (4 if interleaved else 8) == 0
    access = 16 if wide else itemsize
    choices = {"dtype": dtype, "kv_dtype": pool.dtype, "access": access, "rotated": cos is not None}
    threads = k.shape[0] * (pool.num_heads + rotation[3]) * -(-pool.head_dim * itemsize // access)
    launch = Launch(
        KERNEL.kernel(device, **choices),
        (-(-threads // _THREADS), 1, 1),
        tuple(strides),
        (*scales, *pool.numbers),
        (half, *rotation),
        (k.shape[0], pool.num_heads, k.shape[0] if block_table.ndim == 1 and sequence_ids is None else pool.batch),
    )
    copies = any(in_order(x) is not x for x in operands[3:6]) or any(contiguous(x) is not x for x in operands[6:10])
    return Plan(device, launch, pool.page_size, apart, copies)


OP = Op(
    (
        *("k", "v", "pages", "block_table", "positions", "sequence_ids", "k_scale", "v_scale"),
        *("cos", "sin", "q", "q_out"),
    ),
    5,
    _prepare,
    ("pages", "q_out"),
)


def append(function: str, operands: tuple, layout: str, interleaved: bool = False) -> None:
    """Run an append on arrays of any kind, in the order of `OP`."""
    found = OP.resolve(function, operands, (layout, interleaved))
    if found is None:
        taken, _, device = OP.take(function, operands)
        with device.current():
            return append(function, taken, layout, interleaved)
    plan, addresses = found
    if plan.launch is None:
        return None
    if config.current().check:
        _check_values(function, (*operands[2:6], operands[8]), plan.page_size)
    if plan.copies:
        small = (*map(in_order, operands[3:6]), *map(contiguous, operands[6:10]))
        addresses = [*addresses[:3], *map(plan.device.pointer, small), *addresses[10:]]
    return plan.launch.run(addresses)


def _check_values(function: str, operands: tuple, page_size: int) -> None:
    """Raise for tokens without a page or angles, other than those with a negative position, which are skipped."""
    pages, block_table, positions, sequence_ids, cos = operands
    table, places = arrays.to_host(block_table), arrays.to_host(positions)
    table = table if table.ndim == 2 else table[None]
    rows = range(len(places)) if sequence_ids is None else arrays.to_host(sequence_ids)
    for i, (position, row) in enumerate(zip(places, rows, strict=True)):
        row = 0 if len(table) == 1 and sequence_ids is None else row
        if position < 0:
            continue
        if not 0 <= row < len(table):
            rule = f"be {checks.places(len(table), 'rows')}, a row of block_table"
            checks.fail(ValueError, function, f"sequence_ids[{i}]", rule, int(row))
        if position >= table.shape[1] * page_size:
            rule = f"be below {table.shape[1] * page_size} (max_pages * page_size)"
            checks.fail(ValueError, function, f"positions[{i}]", rule, int(position))
        page = table[row, position // page_size]
        if not 0 <= page < pages.shape[0]:
            rule = f"hold page ids {checks.places(pages.shape[0], 'pages')}"
            checks.fail(ValueError, function, f"block_table[{row}]", rule, int(page))
        if cos is not None and position >= len(cos):
            rule = f"be {checks.places(len(cos), 'rows')}, a row of cos"
            checks.fail(ValueError, function, f"positions[{i}]", rule, int(position))
