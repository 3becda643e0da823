"""Paged decode and append: beside FlashInfer if it is installed, and in the tables of the two articles behind the op.

The paths compared there are what one writes without paging: grouped heads expanded into contiguous keys and values for
torch's scaled-dot-product attention, and two indexed stores for an append. Without FlashInfer its figures of another
day on an H200 are shown; they are to be read beside the copy bandwidth of theirs, 4.23 TB/s, and of this run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import ml_dtypes
import numpy as np
from common import cupy, environment

import rawops
from rawops.testing.tables import show
from rawops.testing.timing import graph_times, host_cost, rotations

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
# (batch, context): FlashInfer 0.6.12's best of CUDA cores and tensor cores, microseconds
DECODE = {
    (8, 1024): 18.87,
    (32, 512): 27.52,
    (8, 4096): 43.24,
    (8, 8192): 73.4,
    (8, 16384): 135.5,
    (8, 32768): 255.5,
    (64, 4096): 258.0,
    (128, 2048): 263.9,
    (1, 32768): 42.53,
    (1, 131072): 135.6,
}
PAGES = [(1, "NHD"), (8, "NHD"), (16, "HND"), (64, "NHD"), (256, "NHD")]
FORMATS = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}
ARTICLE = (1024, 4096, 8192, 16384, 32768)  # contexts of the article's tables, 8 sequences
REPLAYS = 12


def arrays(batch: int, context: int, page: int = PAGE, layout: str = "NHD", dtype="float16") -> tuple:
    """q, a pool whose pages are in random order, its table, lengths and an output."""
    per_sequence = -(-context // page)
    inner = (page, KV_HEADS) if layout == "NHD" else (KV_HEADS, page)
    pages = noise((batch * per_sequence, 2, *inner, DIM), dtype)
    table = cupy.random.permutation(batch * per_sequence).astype("int32").reshape(batch, -1)
    q = noise((batch, HEADS, DIM), "float16")
    return q, pages, table, cupy.full(batch, context, "int32"), cupy.empty_like(q)


def noise(shape: tuple, dtype) -> cupy.ndarray:
    """Random values: of a block that is repeated, since making gigabytes takes longer than using them."""
    size = int(np.prod(shape))
    dtype = np.dtype(dtype)
    if dtype.itemsize == 1:  # bytes that are no NaN in any format
        block = cupy.random.randint(0, 120, min(size, 1 << 24), dtype="uint8")
    else:
        block = cupy.random.standard_normal(min(size, 1 << 24), dtype="float32").astype(dtype)
    flat = cupy.empty(size, block.dtype)
    for start in range(0, size, block.size):
        flat[start : start + block.size] = block[: size - start]
    return flat.view(dtype).reshape(shape)


def decode(q, pages, table, lens, out, **options) -> None:
    """One call of ours."""
    rawops.paged_attention(q, pages, table, lens, out=out, **options)


def timed(calls: dict[str, Callable], *shape, **kind) -> tuple[dict, float]:
    """Median microseconds by name, and the bytes of keys and values."""
    size = 2 * shape[0] * shape[1] * KV_HEADS * DIM * np.dtype(kind.get("dtype", "float16")).itemsize
    inputs = [arrays(*shape, **kind) for _ in range(min(rotations(size), 8))]
    found = {name: t.median for name, t in graph_times(calls, inputs, REPLAYS).items()}
    del inputs
    cupy.get_default_memory_pool().free_all_blocks()
    return found, size


def copy_bandwidth() -> float:
    """TB/s of a kernel that copies, reads and writes."""
    code = """__global__ void copy(const float4* x, float4* y) {
        const int i = blockIdx.x * 256 + threadIdx.x;
        y[i] = x[i];
    }"""
    x = noise((1 << 29,), "float16")
    y, kernel = cupy.empty_like(x), rawops.Kernel(code, "copy")
    call = lambda a, b: kernel(a.nbytes // 4096, 256, (a, b))  # noqa: E731
    return 2 * x.nbytes / graph_times({"copy": call}, [(x, y)], REPLAYS)["copy"].median * 1e-6


# --- tables ---------------------------------------------------------------------------------------------------------


def decode_rows() -> list[dict]:
    """Batches and contexts, float16."""
    rows = []
    for (batch, context), theirs in DECODE.items():
        found, size = timed({"ours": decode}, batch, context)
        rows.append(
            {
                "batch x context": f"{batch} x {context}",
                "us": found["ours"],
                "TB/s": size / found["ours"] * 1e-6,
                "FlashInfer us, another day": theirs,
                "x FlashInfer": theirs / found["ours"],
            }
        )
    return rows


def layout_rows() -> list[dict]:
    """Page sizes, layouts and 8-bit pools against float16 pages of 16."""
    base = timed({"ours": decode}, 8, 8192)[0]["ours"]
    rows = [{"8 x 8192": "float16, page 16, NHD", "us": base, "of that": 1.0}]
    for page, layout in PAGES:
        call = {"ours": lambda *a, layout=layout: decode(*a, layout=layout)}
        us = timed(call, 8, 8192, page=page, layout=layout)[0]["ours"]
        rows.append({"8 x 8192": f"float16, page {page}, {layout}", "us": us, "of that": us / base})
    long = timed({"ours": decode}, 8, 32768)[0]["ours"]
    for name, dtype in FORMATS.items():
        us = timed({"ours": decode}, 8, 32768, dtype=dtype)[0]["ours"]
        rows.append({"8 x 8192": f"8 x 32768, {name} (float16: {long:.4g} us)", "us": us, "of that": us / long})
    return rows


def append_rows() -> list[dict]:
    """Eight tokens, one a sequence: our launch, and two indexed stores."""
    _, pages, table, lens, _ = arrays(8, 8192)
    k, v = noise((8, KV_HEADS, DIM), "float16"), noise((8, KV_HEADS, DIM), "float16")
    positions = lens - 1
    rows_of = table[cupy.arange(8), positions // PAGE]
    slots = positions % PAGE

    def ours() -> None:
        rawops.append_paged_kv(k, v, pages, table, positions)

    def stores() -> None:
        pages[rows_of, 0, slots] = k
        pages[rows_of, 1, slots] = v

    graph = graph_times({"ours": ours, "two indexed stores": stores}, [()], REPLAYS)
    return [
        {"append of 8 tokens": name, "us in a graph": graph[name].median, "us of the host": host_cost(call).median}
        for name, call in (("ours", ours), ("two indexed stores", stores))
    ]


def cascade_rows() -> list[dict]:
    """64 sequences with a common prefix of 8192 tokens and 256 of their own, through the cache."""
    count, common, own = 64, 8192, 256
    cache = rawops.PagedKVCache((common + count * own) // PAGE, PAGE, KV_HEADS, DIM, max_length=common + own)
    first = cache.add_sequence()
    k, v = (noise((common, KV_HEADS, DIM), "float16") for _ in "kv")
    cache.append(k, v, [first], [common])
    sequences = [first, *(cache.fork(first) for _ in range(count - 1))]
    k, v = (noise((count * own, KV_HEADS, DIM), "float16") for _ in "kv")
    cache.append(k, v, sequences, [own] * count)
    inputs = [(noise((count, HEADS, DIM), "float16"),) for _ in range(2)]
    calls = {
        "cascade": lambda q: cache.decode(q, sequences, cascade=True),
        "plain": lambda q: cache.decode(q, sequences, cascade=False),
    }
    found = graph_times(calls, inputs, REPLAYS)
    plain = found["plain"].median
    return [{f"{count} x ({common} + {own})": n, "us": t.median, "x plain": plain / t.median} for n, t in found.items()]


def prefill_rows() -> list[dict]:
    """A chunk of 512 queries on 8192 cached tokens, beside our attention on contiguous keys and values."""
    chunk, cached = 512, 8192
    total = cached + chunk
    _, pages, table, lens, _ = arrays(1, total)
    q, cu = noise((chunk, HEADS, DIM), "float16"), cupy.array([0, chunk], "int32")
    k, v = (pages[table[0], i].reshape(1, total, KV_HEADS, DIM) for i in range(2))
    out, dense = cupy.empty_like(q), cupy.empty_like(q)
    calls = {
        "paged": lambda: rawops.paged_attention(q, pages, table, lens, cu_seqlens_q=cu, out=out),
        "contiguous": lambda: rawops.flash_attention(q[None], k, v, causal=True, out=dense[None]),
    }
    found = graph_times(calls, [()], REPLAYS)
    flops = 4.0 * HEADS * DIM * chunk * (cached + chunk / 2)
    right = float(abs(out - dense).max()) < 2e-3
    return [
        {f"{chunk} queries on {cached}": n, "us": t.median, "TFLOP/s": flops / t.median * 1e-6, "right": right}
        for n, t in found.items()
    ]


def article_rows() -> list[dict]:
    """Paged grouped heads against expanded contiguous keys and values in torch's attention, 8 sequences."""
    try:
        import torch
    except ImportError:
        return []
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def expanded(q, pages, table, lens, out):
        kv = pages[table].transpose(0, 2, 1, 3, 4, 5)  # (batch, 2, pages, page, heads, dim)
        kv = kv.reshape(len(table), 2, -1, KV_HEADS, DIM).transpose(1, 0, 3, 2, 4)
        return [torch.from_dlpack(cupy.repeat(x, HEADS // KV_HEADS, axis=1)) for x in kv]

    rows = []
    for context in ARTICLE:
        inputs = arrays(8, context)
        k, v = expanded(*inputs)
        query = torch.from_dlpack(inputs[0])[:, :, None]

        def theirs(k=k, v=v, query=query):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(query, k, v)

        decode(*inputs)
        wrong = float(abs(cupy.from_dlpack(theirs()[:, :, 0].contiguous()) - inputs[4]).max())
        ours = timed({"ours": decode}, 8, context)[0]["ours"]
        us = torch_time(torch, theirs)
        size = 2 * 8 * context * KV_HEADS * DIM * 2
        rows.append(
            {
                "context": context,
                "paged us": ours,
                "expanded SDPA us": us,
                "x": us / ours,
                "cache MiB": size / 2**20,
                "expanded MiB": 4 * size / 2**20,
                "right": wrong < 2e-3,
            }
        )
        del k, v, query, inputs, theirs
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
    return rows


def torch_time(torch, call: Callable) -> float:
    """Median microseconds of a call on torch's stream."""
    samples = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3)
    return float(np.median(samples))


TABLES: dict[str, Callable[[], list[dict]]] = {
    "decode": decode_rows,
    "append": append_rows,
    "layouts": layout_rows,
    "cascade": cascade_rows,
    "prefill": prefill_rows,
    "article": article_rows,
}


def main() -> int:
    """Show the tables; 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(prog="bench paged_kv", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="decode and append alone")
    parser.add_argument("--tables", nargs="*", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    machine = ", ".join(f"{key} {value}" for key, value in environment().items())
    note = f"Hq {HEADS}, Hkv {KV_HEADS}, D {DIM}, float16, page {PAGE} unless said; {machine}"
    wrong = False
    for name in ("decode", "append") if options.quick else options.tables:
        rows = TABLES[name]()
        show(f"paged_kv: {name}", rows, as_json=options.json)
        wrong |= not all(row.get("right", True) for row in rows)
    show("copy on the device", [{"TB/s": copy_bandwidth()}], as_json=options.json, note=note)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
