"""The host side of paged_append.cu: its instances and what one launch is told."""

from __future__ import annotations

from dataclasses import dataclass

from rawops import config
from rawops._paged_kv_call import Op, Plan, check_vector, in_order, keep_apart, to_host
from rawops._paged_kv_pool import DTYPES, POOL_FIELDS, describe
from rawops._runtime import arrays, checks
from rawops._runtime.kernel import KernelSpec, ParamStruct

_THREADS = 128
_ROW_FIELDS = ("rows", "token_stride", "head_stride", "dim_stride")

PARAMS = ParamStruct(
    "AppendParams",
    **{f"{x}_{name}": "pointer" if name == "rows" else "int64" for x in "kv" for name in _ROW_FIELDS},
    **POOL_FIELDS,
    **dict.fromkeys(("positions", "sequence_ids"), "pointer"),
    **dict.fromkeys(("tokens", "heads", "batch"), "int32"),
)

_CHOICES = {"dtype": DTYPES, "access": (16, 2)}
KERNEL = KernelSpec(
    source="paged_append.cu",
    entry="rawops::paged_append",
    template=tuple(_CHOICES),
    choices=_CHOICES,
    smoke=[{"dtype": "float16", "access": access} for access in (16, 2)],
    params=PARAMS,
)


@dataclass(frozen=True)
class Launch:
    """An append whose shapes and strides are known: all but the addresses."""

    function: object
    grid: tuple[int, int, int]
    k_strides: tuple
    v_strides: tuple
    pool: tuple
    sizes: tuple

    def run(self, k: int, v: int, pages: int, table: int, positions: int, sequence_ids: int) -> None:
        """Launch with these addresses."""
        packed = PARAMS.pack(
            *(k, *self.k_strides, v, *self.v_strides, pages, table, *self.pool, positions, sequence_ids, *self.sizes)
        )
        self.function.launch(self.grid, (_THREADS, 1, 1), (packed,))


def prepare(function: str, operands: tuple, addresses: list, options: tuple) -> Plan:
    """Check an append and plan its launch."""
    k, v, pages, block_table, positions, sequence_ids = operands
    (layout,) = options
    device = arrays.device_of(function, pages=pages)
    pool = describe(function, pages, block_table, layout, DTYPES, addresses[2])
    for name, x in (("k", k), ("v", v)):
        checks.dtype(function, name, x, (pool.dtype,), "k, v and the pool have one dtype; convert one of them.")
        if x.ndim != 3 or x.shape[1:] != (pool.num_heads, pool.head_dim):
            rule = f"have shape (tokens, {pool.num_heads}, {pool.head_dim}), as the pool's heads"
            checks.fail(ValueError, function, name, rule, tuple(x.shape))
    tokens = k.shape[0]
    checks.shape(function, "v", v, k.shape, "k and v have one shape.")
    check_vector(function, "positions", positions, tokens, "int32")
    batch = pool.batch
    if sequence_ids is not None:
        check_vector(function, "sequence_ids", sequence_ids, tokens, "int32")
    elif tokens != batch and block_table.ndim == 2:
        hint = "Give sequence_ids where sequences have other numbers of tokens than one."
        checks.fail(ValueError, function, "k", f"have {batch} rows, one a sequence", tokens, hint)
    apart = keep_apart(operands, 2, (0, 1, 3, 4, 5))
    if 0 in k.shape:
        return Plan(device, None, pool.page_size, apart)
    itemsize = k.dtype.itemsize
    strides = [tuple(s // itemsize for s in x.strides) for x in (k, v)]
    wide = pool.access == 16 and all(
        address % 16 == 0
        and (own[2] == 1 or pool.head_dim == 1)
        and own[0] * itemsize % 16 == own[1] * itemsize % 16 == 0
        for own, address in zip(strides, addresses, strict=False)
    )
    access = 16 if wide else itemsize
    kernel = KERNEL.kernel(device, dtype=pool.dtype, access=access)
    threads = tokens * pool.num_heads * -(-pool.head_dim * itemsize // access)
    if block_table.ndim == 1:  # a row that is every sequence's
        batch = tokens
    launch = Launch(kernel, (-(-threads // _THREADS), 1, 1), *strides, pool.numbers, (tokens, pool.num_heads, batch))
    return Plan(device, launch, pool.page_size, apart)


OP = Op(("k", "v", "pages", "block_table", "positions", "sequence_ids"), 5, prepare)


def append(function: str, operands: tuple, layout: str) -> None:
    """Run an append on arrays of any kind."""
    plan, operands, addresses, _ = OP.resolve(function, operands, (layout,))
    if plan.launch is None:
        return
    if config.current().check:
        _check_values(function, operands, plan.page_size)
    small = [in_order(x) for x in operands[3:]]
    plan.launch.run(*addresses[:3], *map(plan.device.pointer, small))


def _check_values(function: str, operands: tuple, page_size: int) -> None:
    """Raise for tokens that the kernel would skip, other than those with a negative position."""
    _, _, pages, block_table, positions, sequence_ids = operands
    table, places = to_host(block_table), to_host(positions)
    table = table if table.ndim == 2 else table[None]
    rows = range(len(places)) if sequence_ids is None else to_host(sequence_ids)
    for i, (position, row) in enumerate(zip(places, rows, strict=True)):
        row = 0 if len(table) == 1 and sequence_ids is None else row
        if position < 0:
            continue
        if not 0 <= row < len(table):
            rule = f"be between 0 and {len(table) - 1}, a row of block_table"
            checks.fail(ValueError, function, f"sequence_ids[{i}]", rule, int(row))
        if position >= table.shape[1] * page_size:
            rule = f"be below {table.shape[1] * page_size} (max_pages * page_size)"
            checks.fail(ValueError, function, f"positions[{i}]", rule, int(position))
        page = table[row, position // page_size]
        if not 0 <= page < pages.shape[0]:
            rule = f"hold page ids from 0 to {pages.shape[0] - 1}"
            checks.fail(ValueError, function, f"block_table[{row}]", rule, int(page))
