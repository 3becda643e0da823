"""Attention over pages: page sizes, layouts, head sizes, scores, what must not be read, the checks."""

import numpy as np
import pytest
from paged_pool import DTYPES, NO_PAGE, Paged, attend, close, decode_reference, queries, run

import rawops
from rawops import config
from rawops._paged_kv_attention import options_of
from rawops._runtime import arrays
from rawops._runtime.workspace import Workspace
from rawops.config import Config
from rawops.testing.tolerances import assert_close

LENS = [33, 1, 16, 0]


# --- decoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_page_sizes(device, rng, page_size, layout):
    """Every slot past a length is NaN, and every table entry past the last page is no page."""
    dtype = "bfloat16" if page_size in (2, 32) else "float16"
    p = Paged(rng, LENS, 2, 64, page_size, dtype, layout)
    q = queries(rng, len(LENS), 4, 64, dtype)
    close(*run(device, p, q), *decode_reference(q, p), dtype, max(LENS))


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_equals_attention_of_gathered_keys(device, rng, page_size):
    """Dense attention of what the tables gather: lengths round those of pages, decode and prefill."""
    lens = [n for n in (0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size + 3, 40) if n >= 0]
    offsets = lambda counts: device.put(np.cumsum([0, *counts]).astype(np.int32))  # noqa: E731
    for counts in ([1] * len(lens), [3, 0, *[5] * (len(lens) - 2)]):
        p = Paged(rng, lens, 1, 64, page_size)
        q = queries(rng, sum(counts), 4, 64)
        out, lse = run(device, p, q, cu_seqlens_q=None if max(counts) == 1 else offsets(counts))
        keys = [device.put(np.concatenate(x)) for x in (p.k, p.v)]
        options = {"causal": True, "return_lse": True, "max_seqlen_q": max(counts), "max_seqlen_k": max(lens)}
        want = rawops.flash_attention_varlen(device.put(q), *keys, offsets(counts), offsets(lens), **options)
        close(out, lse, *map(device.get, want), "float16", 2 * max(lens))


@pytest.mark.parametrize("head_dim", [7, 40, 64, 80, 96, 100, 128, 192, 256])
def test_head_dims(device, rng, head_dim):
    """Those between the kernel's own are padded inside, and the default scale is that of the true one."""
    p = Paged(rng, [19], 1, head_dim, 16)
    q = queries(rng, 1, 2, head_dim)
    close(*run(device, p, q), *decode_reference(q, p), "float16", 19)


@pytest.mark.parametrize("heads", [(28, 4), (24, 4), (15, 5), (48, 2), (40, 2), (17, 1), (3, 3)], ids=str)
def test_groups(device, heads, rng):
    """Constant scores and the KV head's number as its values: the answer is exact."""
    num_heads, num_kv_heads = heads
    p = Paged(
        rng, [18], num_kv_heads, 64, 8, make=lambda shape: np.broadcast_to(np.arange(num_kv_heads)[:, None], shape)
    )
    out, lse = run(device, p, np.zeros((1, num_heads, 64), np.float16))
    want = np.broadcast_to((np.arange(num_heads) // (num_heads // num_kv_heads))[:, None], (num_heads, 64))
    np.testing.assert_array_equal(out[0], want)
    np.testing.assert_allclose(lse, np.log(18), rtol=1e-6)


def test_uniform_weights_spell_out_the_keys(device, rng):
    """q = 0 and V[j] = j: the mean of what was seen, with windows, at every split."""
    positions = lambda shape: np.broadcast_to(np.arange(shape[0])[:, None, None], shape)  # noqa: E731
    p = Paged(rng, [6, 50, 1], 1, 64, 4, make=positions)
    q = np.zeros((3, 1, 64), np.float16)
    for left in (None, 0, 1, 17, 48, 49, 2**31 - 1):
        for splits in (None, 3):
            out, lse = run(device, p, q, window=(left, None), num_splits=splits)
            first = [max(0, n - 1 - (n if left is None else left)) for n in p.lens]
            want = [(n - 1 + f) / 2 for n, f in zip(p.lens, first, strict=True)]
            np.testing.assert_array_equal(out[:, 0, 0], want)
            np.testing.assert_allclose(lse[0], np.log(p.lens - first), rtol=1e-6, atol=1e-7)


def test_one_key_is_its_value(device, rng):
    p = Paged(rng, [1, 1], 2, 64, 16)
    out, _ = run(device, p, 100 * queries(rng, 2, 6, 64))
    np.testing.assert_array_equal(out, np.repeat(np.stack([v[0] for v in p.v]), 3, axis=1))


@pytest.mark.parametrize("level", [-2e5, -200.0, 2e5])
def test_scores_of_any_size(device, rng, level):
    """Equal keys: uniform weights wherever the scores lie."""
    p = Paged(rng, [37], 1, 64, 16)
    p.k[0][...] = 1
    p.fill(0)
    out, lse = run(device, p, np.ones((1, 2, 64), np.float16), softmax_scale=level / 64)
    want = p.v[0].astype(np.float64).mean(axis=0)
    assert_close(out[0], np.repeat(want, 2, axis=0), np.float16, k=64)
    np.testing.assert_allclose(lse, level + np.log(37), rtol=1e-6)


@pytest.mark.parametrize("softmax_scale", [None, 0.0, 1e-50, -0.5, 0.3])
def test_scales(device, rng, softmax_scale):
    p = Paged(rng, [70, 5], 1, 40, 16)
    q = queries(rng, 2, 3, 40)
    close(*run(device, p, q, softmax_scale=softmax_scale), *decode_reference(q, p, scale=softmax_scale), "float16", 70)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap_and_alibi(device, rng, dtype):
    p = Paged(rng, [70, 5, 31], 2, 64, 16, dtype)
    q = 3 * queries(rng, 3, 8, 64, dtype)
    slopes = (2.0 ** -np.arange(1, 9)).astype(np.float32)
    for softcap, alibi in ((2.0, None), (0.0, slopes), (5.0, slopes)):
        options = {"softcap": softcap, "window": (40, None)}
        got = run(device, p, q, **options, alibi_slopes=None if alibi is None else device.put(alibi))
        close(*got, *decode_reference(q, p, **options, slopes=alibi), dtype, 41)


# --- what is read ---------------------------------------------------------------------------------------------------


def test_unread_slots_change_nothing(device, rng):
    """NaN, inf and zeros in slots past the lengths and before the windows: the same bits."""
    p = Paged(rng, [1, 15, 16, 17, 33], 1, 64, 16)
    q = queries(rng, 5, 2, 64)
    for options in ({}, {"window": (9, None)}, {"num_splits": 2}):
        results = []
        for poison in (np.nan, np.inf, 0):
            pages = np.full_like(p.pages, poison)
            table = np.full_like(p.table, NO_PAGE)
            for b, n in enumerate(p.lens):
                first = max(0, n - 10) if "window" in options else 0
                for t, (to, of) in enumerate(zip(p.tokens(pages, b), p.tokens(p.pages, b), strict=True)):
                    if t >= first:
                        to[...] = of
                table[b, first // 16 : -(-n // 16)] = p.table[b, first // 16 : -(-n // 16)]
            args = (device.put(x) for x in (q, pages, table, p.lens))
            results.append(device.get(rawops.paged_attention(*args, **options)))
        assert np.isfinite(results[0]).all()
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])


def test_visible_nan_shows(device, rng):
    p = Paged(rng, [20, 20], 1, 64, 16)
    p.v[0][3, 0, 5] = np.nan
    p.k[1][19, 0, 0] = np.nan
    p.fill(0), p.fill(1)
    out, lse = run(device, p, queries(rng, 2, 2, 64))
    assert np.isnan(out[0, :, 5]).all() and np.isnan(out[0]).sum() == 2
    assert np.isnan(out[1]).all() and np.isnan(lse[:, 1]).all() and np.isfinite(lse[:, 0]).all()


@pytest.mark.parametrize("count", [40, 150])
def test_nan_in_all_keys_of_a_share(device, rng, count):
    """Such a share has no largest score, but its result is not that of no keys."""
    p = Paged(rng, [150, 20], 2, 64, 16)
    p.k[0][:count] = np.nan
    p.fill(0)
    q = queries(rng, 2, 8, 64)
    for splits in (None, 1, 2, 5):
        out, lse = run(device, p, q, num_splits=splits)
        assert np.isnan(out[0]).all() and np.isnan(lse[:, 0]).all(), splits
        close(out[1:], lse[:, 1:], *attend(q[1:], p.k[1], p.v[1]), "float16", 20)


@pytest.mark.parametrize("ids", [[1, 99, 2], [1, -1, 2], [-(2**31), 2**31 - 1, 0]])
def test_pages_that_do_not_exist(device, rng, ids):
    """Their keys and values count as zeros, and nothing outside the pool is read."""
    pages = rng.standard_normal((3, 2, 16, 1, 64)).astype(np.float16)
    q = queries(rng, 1, 2, 64)
    table = np.array([ids], np.int32)
    got = device.get(rawops.paged_attention(*map(device.put, (q, pages, table, np.array([40], np.int32)))))
    safe = np.concatenate([pages, np.zeros_like(pages[:1])])
    kv = np.concatenate([safe[i if 0 <= i < 3 else 3] for i in ids], axis=1)[:, :40]
    want, _ = attend(q, *kv)
    assert_close(got, want, np.float16, k=40 * 2**13, magnitude=1.0)


def test_lengths_past_the_table(device, rng):
    """All of the table, and no more; a negative length is none."""
    p = Paged(rng, [48, 48], 1, 64, 16)
    q = queries(rng, 2, 2, 64)
    table = np.ascontiguousarray(p.table[:, :3])
    args = [device.put(x) for x in (q, p.pages, table)]
    got = device.get(rawops.paged_attention(*args, device.put(np.array([49, -5], np.int32))))
    want, _ = attend(q[:1], p.k[0], p.v[0])
    assert_close(got[:1], want, np.float16, k=48 * 2**13, magnitude=1.0)
    np.testing.assert_array_equal(got[1], 0)


def test_values_are_checked_on_request(device, rng, monkeypatch):
    p = Paged(rng, [40, 20], 1, 64, 16)
    monkeypatch.setattr(config, "current", lambda: Config(check=True))
    q, pages, lens = (device.put(x) for x in (queries(rng, 2, 1, 64), p.pages, p.lens))
    rawops.paged_attention(q, pages, device.put(p.table), lens)
    for b, column, value in ((0, 2, len(p.pages)), (1, 1, -1)):
        table = p.table.copy()
        table[b, column] = value
        with pytest.raises(ValueError, match=rf"block_table\[{b}\] must hold page ids .* got {value}"):
            rawops.paged_attention(q, pages, device.put(table), lens)
    table = p.table.copy()
    table[:, 0] = -1  # gone, before what the window shows
    rawops.paged_attention(q, pages, device.put(table), lens, window=(2, 0))
    with pytest.raises(ValueError, match=r"block_table\[0\] must hold page ids"):
        rawops.paged_attention(q, pages, device.put(table), lens, window=(24, 0))
    with pytest.raises(ValueError, match=r"seq_lens\[1\] must be between 0 and"):
        rawops.paged_attention(q, pages, device.put(p.table), device.put(np.array([1, 10**6], np.int32)))
    table = p.table.copy()
    table[0] = -1  # of a sequence without queries
    rawops.paged_attention(q, pages, device.put(table), lens, cu_seqlens_q=device.put(np.array([0, 0, 1], np.int32)))
    for offsets in ([1, 1, 2], [0, 2, 1], [0, 1, 3]):
        cu = device.put(np.array(offsets, np.int32))
        with pytest.raises(ValueError, match="cu_seqlens_q must rise from 0 to at most 2, the rows of q"):
            rawops.paged_attention(q, pages, device.put(p.table), lens, cu_seqlens_q=cu)


def test_shared_pages(device, rng):
    """Three sequences with two pages in common, one of them page 0."""
    p = Paged(rng, [40, 45, 33], 2, 64, 16)
    for b in (1, 2):
        p.table[b, :2] = p.table[0, :2]
        p.k[b][:32], p.v[b][:32] = p.k[0][:32], p.v[0][:32]
    swap = {int(p.table[0, 0]): 0, 0: int(p.table[0, 0])}
    p.pages[list(swap)] = p.pages[list(swap.values())]
    p.table = np.vectorize(lambda i: swap.get(i, i))(p.table).astype(np.int32)
    q = queries(rng, 3, 4, 64)
    close(*run(device, p, q), *decode_reference(q, p), "float16", 45)


# --- layouts of the arrays ------------------------------------------------------------------------------------------


def test_strided_arrays(device, rng):
    """q sliced from a packed QKV, a pool with keys and values of other layers between, tables and lengths strided."""
    p = Paged(rng, LENS, 2, 64, 16)
    batch, (heads, dim) = len(LENS), (4, 64)
    q = queries(rng, batch, heads, dim)
    want = run(device, p, q)[0]
    packed = np.full((batch, heads + 4, dim), np.nan, np.float16)
    packed[:, 1 : 1 + heads] = q
    layers = np.full((*p.pages.shape[:2], 16, 3, 2, dim), np.nan, np.float16)
    layers[:, :, :, 1] = p.pages
    table, lens = np.full((batch, 2 * p.table.shape[1]), 7, np.int32), np.full(2 * batch, 9, np.int32)
    table[:, ::2], lens[::2] = p.table, p.lens
    views = {
        "q": device.put(packed)[:, 1 : 1 + heads],
        "pages": device.put(layers)[:, :, :, 1],
        "block_table": device.put(table)[:, ::2],
        "seq_lens": device.put(lens)[::2],
    }
    plain = {"q": q, "pages": p.pages, "block_table": p.table, "seq_lens": p.lens}
    for name in views:
        args = {n: views[n] if n == name else device.put(x) for n, x in plain.items()}
        np.testing.assert_array_equal(device.get(rawops.paged_attention(**args)), want)
    np.testing.assert_array_equal(device.get(rawops.paged_attention(**views)), want)


def test_misaligned_and_odd_arrays(device, rng):
    """Contiguous but off the 16-byte boundary, every other element, reversed: for each array in turn."""
    p = Paged(rng, [33, 16], 2, 64, 16)
    q = queries(rng, 2, 4, 64)
    want = run(device, p, q)[0]
    plain = {"q": q, "pages": p.pages, "out": np.full_like(q, np.nan)}
    small = {"block_table": device.put(p.table), "seq_lens": device.put(p.lens)}
    for odd in plain:
        for kind in ("shifted", "every other", "reversed"):
            arrays = {n: odd_view(device, x, kind) if n == odd else device.put(x) for n, x in plain.items()}
            rawops.paged_attention(**arrays, **small)
            np.testing.assert_array_equal(device.get(arrays["out"]), want)


def odd_view(device, x, kind: str):
    """The values of x, laid out awkwardly."""
    if kind == "shifted":
        buffer = device.put(np.concatenate([np.zeros(1, x.dtype), x.reshape(-1)]))
        return buffer[1:].reshape(x.shape)
    if kind == "every other":
        return device.put(np.repeat(x, 2, axis=-1))[..., ::2]
    return device.put(np.ascontiguousarray(x[..., ::-1]))[..., ::-1]


def test_output_over_the_queries(device, rng):
    """out may be q itself; any other overlap raises."""
    p = Paged(rng, [33, 50], 1, 64, 16)
    q = queries(rng, 2, 4, 64)
    want = run(device, p, q)[0]
    pages, table, lens = (device.put(x) for x in (p.pages, p.table, p.lens))
    buffer = device.put(np.concatenate([q, q]))
    rawops.paged_attention(buffer[:2], pages, table, lens, out=buffer[:2])
    np.testing.assert_array_equal(device.get(buffer[:2]), want)
    with pytest.raises(ValueError, match="out must not overlap q"):
        rawops.paged_attention(buffer[:2], pages, table, lens, out=buffer[1:3])


# --- checks ---------------------------------------------------------------------------------------------------------


def test_empty_sizes(device, rng):
    p = Paged(rng, [5, 20], 2, 64, 16)
    q, pages, table, lens = (device.put(x) for x in (queries(rng, 2, 4, 64), p.pages, p.table, p.lens))
    out, lse = rawops.paged_attention(q[:0], pages, table[:0], lens[:0], return_lse=True)
    assert out.shape == (0, 4, 64) and lse.shape == (4, 0)
    for emptied in ({"pages": pages[:0]}, {"block_table": table[:, :0]}):
        args = {"pages": pages, "block_table": table, "seq_lens": lens * 0, **emptied}
        out, lse = rawops.paged_attention(q, **args, return_lse=True)
        assert (device.get(out) == 0).all() and np.isneginf(device.get(lse)).all()


MISTAKES = {
    "q must have dtype": ({"q": lambda a: a["q"].astype(np.float32)}, TypeError),
    "q must have shape": ({"q": lambda a: a["q"][0]}, ValueError),
    "q must have the pool's head_dim 64": ({"q": lambda a: a["q"][..., :32]}, ValueError),
    "q must have a multiple of the pool's 2 KV heads, got 3 heads": ({"q": lambda a: a["q"][:, :3]}, ValueError),
    "q must have 2 rows, one a sequence, got 1": ({"q": lambda a: a["q"][:1]}, ValueError),
    "pages must have shape": ({"pages": lambda a: a["pages"][0]}, ValueError),
    "page_size must be a power of two from 1 to 256, got 12": ({"pages": lambda a: a["pages"][:, :, :12]}, ValueError),
    "block_table must have dtype int32": ({"block_table": lambda a: a["block_table"].astype(np.int64)}, TypeError),
    "seq_lens must have shape": ({"seq_lens": lambda a: a["seq_lens"][:1]}, ValueError),
    "out must have shape": ({"out": lambda a: a["q"][:, :2]}, ValueError),
    "layout must be": ({"layout": lambda a: "NDH"}, ValueError),
    r"window\[0\] must be between 0": ({"window": lambda a: (-3, None)}, ValueError),
    "softcap must be finite": ({"softcap": lambda a: -1.0}, ValueError),
    "softmax_scale must be finite": ({"softmax_scale": lambda a: np.nan}, ValueError),
    "softmax_scale must fit float32": ({"softmax_scale": lambda a: 1e39}, ValueError),
    "causal must be True or False": ({"causal": lambda a: "no"}, TypeError),
    "return_lse must be True or False": ({"return_lse": lambda a: "no"}, TypeError),
    "num_splits must be between 1": ({"num_splits": lambda a: 0}, ValueError),
    "alibi_slopes must have shape": ({"alibi_slopes": lambda a: a["seq_lens"].astype(np.float32)}, ValueError),
    "block_table must be an array": ({"block_table": lambda a: None}, TypeError),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(device, rng, message):
    changes, kind = MISTAKES[message]
    p = Paged(rng, [5, 20], 2, 64, 16)
    arrays = {"q": queries(rng, 2, 4, 64), "pages": p.pages, "block_table": p.table, "seq_lens": p.lens}
    arrays = {n: device.put(x) for n, x in arrays.items()}
    with pytest.raises(kind, match="paged_attention: " + message):
        rawops.paged_attention(**arrays | {name: change(arrays) for name, change in changes.items()})


def test_a_window_that_equals_a_right_one_is_still_wrong():
    options = {"causal": True, "softmax_scale": None, "softcap": 0.0, "num_splits": None}
    options_of("paged_attention", window=(9, 1), **options)
    with pytest.raises(TypeError, match=r"paged_attention: window\[0\] must be an integer, got 9\.0"):
        options_of("paged_attention", window=(9.0, 1), **options)
    with pytest.raises(TypeError, match=r"paged_attention: window\[1\] must be an integer, got True"):
        options_of("paged_attention", window=(9, True), **options)


@pytest.mark.parametrize("name", ["q", "pages", "block_table", "seq_lens"])
def test_arrays_between_elements_are_refused(device, rng, name):
    p = Paged(rng, [5, 20], 2, 64, 16)
    arrays = {"q": queries(rng, 2, 4, 64), "pages": p.pages, "block_table": p.table, "seq_lens": p.lens}
    arrays = {n: device.put(x) for n, x in arrays.items()}
    arrays[name] = device.between(arrays[name])
    with pytest.raises(ValueError, match=f"paged_attention: {name} must lie on whole elements, got address"):
        rawops.paged_attention(**arrays)


@pytest.mark.gpu
def test_graph_follows_the_lengths(rng):
    """One captured launch, replayed with lengths from 1 to the table's end."""
    import cupy

    p = Paged(rng, [3000, 2500], 2, 128, 16)
    q = queries(rng, 2, 8, 128)
    lens = cupy.zeros(2, np.int32)
    args = [cupy.asarray(x) for x in (q, p.pages, p.table)]
    out, stream = cupy.empty(q.shape, q.dtype), cupy.cuda.Stream(non_blocking=True)
    with stream:
        rawops.paged_attention(*args, lens, out=out)
        stream.begin_capture()
        rawops.paged_attention(*args, lens, out=out)
        graph = stream.end_capture()
        for pair in ((1, 0), (17, 300), (3000, 2500), (0, 1), (777, 2499)):
            lens.set(np.array(pair, np.int32))
            graph.launch()
            replayed = out.copy()
            np.testing.assert_array_equal(replayed.get(), rawops.paged_attention(*args, lens).get())
            for b, n in enumerate(pair):
                want, _ = attend(q[b : b + 1], p.k[b][:n], p.v[b][:n])
                assert_close(replayed[b : b + 1].get(), want, np.float16, k=2**18, magnitude=1.0)


_LATE = """
__global__ void late(const int* from, int* to, int count, long long cycles) {
    asm volatile("griddepcontrol.launch_dependents;");
    for (const long long begin = clock64(); clock64() - begin < cycles;) {}
    if (threadIdx.x < count) to[threadIdx.x] = from[threadIdx.x];
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("changed", ["lengths", "pages"])
def test_what_the_launch_before_writes_late(rng, changed):
    """The launch before lets ours begin, and long after that writes what ours has planned with."""
    import cupy

    if int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("launches do not overlap there")
    p = Paged(rng, [700, 20, 333], 2, 128, 16)
    q = queries(rng, 3, 8, 128)
    other = {"lengths": np.array([5, 699, 0], np.int32), "pages": np.full_like(p.table, -1)}[changed]
    args = [cupy.asarray(x) for x in (q, p.pages, p.table, p.lens)]
    late, kept = args[3 if changed == "lengths" else 2], cupy.asarray(p.lens if changed == "lengths" else p.table)
    want = rawops.paged_attention(*args)
    kernel = rawops.Kernel(_LATE, "late")
    for _ in range(3):
        late.set(other)
        kernel(1, 256, (kept, late, late.size, 200_000))
        np.testing.assert_array_equal(rawops.paged_attention(*args).get(), want.get())


@pytest.mark.gpu
def test_a_workspace_is_no_memory_in_use():
    """Memory that was freed while a launch has yet to write to it."""
    import cupy

    given, ones = cupy.zeros(1 << 16, np.int32), cupy.ones(256, np.int32)
    rawops.Kernel(_LATE, "late")(1, 256, (ones, given, 256, 2_000_000))
    size, device = given.size, arrays.device_of("test", x=given)
    del given
    workspace = Workspace()
    workspace.zeros(device, size)
    cupy.cuda.Device().synchronize()
    assert not workspace._arrays["zeros"][0].any()
