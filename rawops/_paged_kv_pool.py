"""The page pool as the kernels see it: its layouts, checks, and the fields they all begin with."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from rawops._paged_kv_call import has_unit_stride
from rawops._runtime import arrays, checks

DTYPES = ("float16", "bfloat16")
KV_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
LAYOUTS = ("NHD", "HND")
PAGE_SIZES = tuple(1 << i for i in range(9))
MAX_HEAD_DIM = 256

# PagePool in cuda_src/common/paged_pool.cuh
POOL_FIELDS = {
    "pages": "pointer",
    "block_table": "pointer",
    **dict.fromkeys(("k_scale", "v_scale"), "pointer"),
    **dict.fromkeys(("scale_page", "scale_head"), "int64"),
    **dict.fromkeys(
        ("page_stride", "value_offset", "token_stride", "head_stride", "dim_stride", "table_stride"), "int64"
    ),
    **dict.fromkeys(("num_pages", "max_pages", "page_shift", "head_dim"), "int32"),
}


@dataclass(frozen=True)
class Pool:
    """Sizes and strides, in elements, of a page pool and its block table."""

    dtype: str
    batch: int
    page_size: int
    num_heads: int
    head_dim: int
    numbers: tuple  # the values of POOL_FIELDS behind the scales' strides
    access: int  # bytes that one load may take: 16, or those of an element

    @property
    def capacity(self) -> int:
        """Tokens that a row of the block table can name."""
        return self.numbers[-3] * self.page_size

    @property
    def has_neighbours(self) -> bool:
        """Whether the heads of a token lie side by side."""
        return self.access == 16 and self.numbers[3] == self.head_dim


def describe(function: str, pages, block_table, layout: str, address: int) -> Pool:
    """Check a pool and its block table, (batch, max_pages) or one row that all share, and describe them."""
    checks.choice(function, "layout", layout, LAYOUTS)
    dtype = checks.dtype(function, "pages", pages, KV_DTYPES)
    shape, strides = pages.shape, [s // pages.dtype.itemsize for s in pages.strides]
    order = "page_size, num_kv_heads" if layout == "NHD" else "num_kv_heads, page_size"
    if pages.ndim != 5 or shape[1] != 2:
        rule = f"have shape (num_pages, 2, {order}, head_dim)"
        checks.fail(ValueError, function, "pages", rule, tuple(shape))
    token, head = (2, 3) if layout == "NHD" else (3, 2)
    page_size, num_heads, head_dim = shape[token], shape[head], shape[4]
    if page_size not in PAGE_SIZES:
        hint = f"Shape {tuple(shape)} in layout {layout!r} is (num_pages, 2, {order}, head_dim)."
        checks.fail(ValueError, function, "page_size", "be a power of two from 1 to 256", page_size, hint)
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        checks.fail(ValueError, function, "head_dim", f"be between 1 and {MAX_HEAD_DIM}", head_dim)
    checks.dtype(function, "block_table", block_table, ("int32",))
    if block_table.ndim not in (1, 2):
        rule = "have shape (batch_size, max_pages), or (max_pages,) for one sequence"
        checks.fail(ValueError, function, "block_table", rule, tuple(block_table.shape))
    itemsize, max_pages = pages.dtype.itemsize, block_table.shape[-1]
    if max_pages * page_size >= 2**30:
        rule = "name fewer than 2**30 tokens a sequence"
        checks.fail(ValueError, function, "block_table", rule, f"{max_pages} pages of {page_size}")
    wide = strides[4] == 1 or head_dim == 1
    wide = wide and address % 16 == 0 and all(s * itemsize % 16 == 0 for s in strides[:4])
    numbers = (strides[0], strides[1], strides[token], strides[head], strides[4])
    table_stride = 0
    if block_table.ndim == 2:  # of the contiguous copy that `in_order` makes, if it makes one
        table_stride = block_table.strides[0] // 4 if has_unit_stride(block_table) else max_pages
    numbers += (table_stride,)
    numbers += (shape[0], max_pages, page_size.bit_length() - 1, head_dim)
    batch = block_table.shape[0] if block_table.ndim == 2 else 1
    return Pool(dtype, batch, page_size, num_heads, head_dim, numbers, 16 if wide else itemsize)


def scale_strides(function: str, pool: Pool, num_pages: int, k_scale, v_scale) -> tuple[int, int]:
    """Check the scales of an 8-bit pool, (num_kv_heads,) or (num_pages, num_kv_heads); return page and head stride."""
    given = {name: x for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None}
    shapes = ((pool.num_heads,), (num_pages, pool.num_heads))
    for name, x in given.items():
        if pool.dtype in DTYPES:
            hint = "Only 8-bit pools have scales."
            checks.fail(ValueError, function, name, f"be None for a pool of {pool.dtype}", "an array", hint)
        checks.dtype(function, name, x, ("float32",))
        if tuple(x.shape) not in shapes:
            rule = f"have shape {shapes[0]} or {shapes[1]}, a scale a head or a page and head"
            checks.fail(ValueError, function, name, rule, tuple(x.shape))
    if len(given) == 2:
        checks.shape(function, "v_scale", v_scale, tuple(k_scale.shape), "k_scale and v_scale have one shape.")
    by_page = any(x.ndim == 2 for x in given.values())
    return pool.num_heads if by_page else 0, 1


def check_pages(
    function: str, pages, block_table, seq_lens, cu_seqlens_q, page_size: int, window_left: int, skipped: int = 0
) -> None:
    """With RAWOPS_CHECK=1: raise for lengths past the table and for ids of pages that are used and do not exist.

    Pages are used from the first key on that the window shows to the first query, and none without queries. The first
    `skipped` keys of each sequence are not in the table.
    """
    lengths, table = arrays.to_host(seq_lens) - skipped, arrays.to_host(block_table)
    queries = [1] * len(lengths) if cu_seqlens_q is None else np.diff(arrays.to_host(cu_seqlens_q))
    table = table if table.ndim == 2 else table[None]
    for b, length in enumerate(lengths):
        if not 0 <= length <= table.shape[1] * page_size:
            rule = f"be between 0 and {table.shape[1] * page_size} (max_pages * page_size)"
            checks.fail(ValueError, function, f"seq_lens[{b}]", rule, int(length))
        first = max(int(length) - int(queries[b]) - window_left, 0)
        used = table[b, first // page_size : -(-int(length) // page_size) if queries[b] else 0]
        bad = used[(used < 0) | (used >= pages.shape[0])]
        if bad.size:
            rule = f"hold page ids {checks.places(pages.shape[0], 'pages')}"
            checks.fail(ValueError, function, f"block_table[{b}]", rule, int(bad[0]))


def check_rows(function: str, cu_seqlens_q, total_q: int) -> None:
    """Raise for offsets of queries that do not rise from 0 to rows of q: offsets on the host, or RAWOPS_CHECK=1."""
    offsets = [int(x) for x in arrays.to_host(cu_seqlens_q)]
    falls = any(end < begin for begin, end in itertools.pairwise(offsets))
    if not offsets or offsets[0] != 0 or falls or offsets[-1] > total_q:
        checks.fail(ValueError, function, "cu_seqlens_q", f"rise from 0 to at most {total_q}, the rows of q", offsets)
