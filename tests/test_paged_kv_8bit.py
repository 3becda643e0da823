"""8-bit pools and rotated keys: every byte, rounding, scales, and attention over what is stored."""

import ml_dtypes
import numpy as np
import pytest
from paged_pool import DTYPES, NO_PAGE, attend, forget_plans

import rawops
from rawops import _paged_kv_kernel
from rawops.testing.tolerances import assert_close

FORMATS = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
QUERIES = [("float16", 64, 16), ("bfloat16", 128, 64), ("float16", 80, 4)]  # dtype, head_dim, page_size
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


@pytest.fixture
def device(device):
    """Emulated, a card that converts float8 itself: sm_80 takes a minute for it."""
    if device.is_emulated:
        with rawops.emulate(arch="sm_89"):
            yield device
    else:
        yield device


def nearest(x, kind: str) -> np.ndarray:
    """The bytes of x: of all 256 values the nearest, the even one of two, saturated."""
    dtype = FORMATS[kind]
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    known = np.isfinite(values) & ~((values == 0) & np.signbit(values))
    order = np.argsort(values[known], kind="stable")
    codes, values = np.arange(256)[known][order], values[known][order]
    x = np.asarray(x, np.float64)
    distance = np.abs(np.clip(x, values[0], values[-1])[..., None] - values)
    best = distance.min(axis=-1, keepdims=True)
    even = codes % 2 == 0
    pick = np.argmin(np.where(distance == best, np.where(even, 0, 1), 2), axis=-1)
    bits = codes[pick].astype(np.uint8)
    if kind != "int8":
        bits = np.where((bits == 0) & np.signbit(x), 128, bits).astype(np.uint8)
    return bits


def append_one(device, k, v, kind, **scales):
    """One token into a pool of one page: the bytes of its key and value."""
    pages = device.put(np.zeros((1, 2, 1, *k.shape[1:]), np.uint8)).view(FORMATS[kind])
    table, positions = (device.put(np.zeros(shape, np.int32)) for shape in ((1, 1), 1))
    arrays = (device.put(k), device.put(v), pages, table, positions)
    rawops.append_paged_kv(*arrays, **{name: device.put(np.asarray(x, np.float32)) for name, x in scales.items()})
    return device.get(pages.view(np.uint8))[0, :, 0]


# --- storing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_stored_bytes(device, kind):
    """Saturation, ties, signed zeros, subnormals, infinities; other scales for keys and values."""
    big = LARGEST[kind]
    x = [big, 1.03 * big, 1.05 * big, 6e4, -6e4, np.inf, -np.inf, 2.0**-9, 2.0**-10, 3 * 2.0**-10, -0.0, 0.0, 0.5, 1.5]
    x += [2.5, -2.5, 17.0, 18.0, 19.0, 2.0**-16, 2.0**-17, 1.0625, 1.1875, 100.5]
    k = np.array(x, np.float16).reshape(1, 1, -1)
    with np.errstate(over="ignore"):
        for dtype in DTYPES.values():
            cast = k.astype(dtype)
            exact = cast.astype(np.float64)
            got = append_one(device, cast, cast, kind, k_scale=[2.0], v_scale=[0.5])
            np.testing.assert_array_equal(got[0], nearest(exact / 2, kind)[0])
            np.testing.assert_array_equal(got[1], nearest(exact / 0.5, kind)[0])
            np.testing.assert_array_equal(append_one(device, cast, cast, kind)[0], nearest(exact, kind)[0])


@pytest.mark.parametrize("kind", FORMATS)
def test_nan_and_scales_of_zero(device, kind):
    k = np.array([[[np.nan, 1.0, 0.0, -3.0, np.inf, 2.0, 4.0, 8.0]]], np.float16)
    got = append_one(device, k, k, kind, k_scale=[1.0], v_scale=[0.0])
    assert np.isnan(got[0].view(FORMATS[kind]).astype(np.float32)[0, 0]) if kind != "int8" else got[0][0, 0] == 0
    assert (got[1][0, 1:] == 0).all() and got[1][0, 0] == 0


def test_scales_by_head_and_by_page(device, rng):
    """Pages 2 and 0 of two heads, each with its own scale; what was there stays."""
    k, v = (rng.standard_normal((3, 2, 24)).astype(np.float16) for _ in "kv")
    for shape in ((2,), (3, 2)):
        k_scale, v_scale = (rng.uniform(0.01, 0.1, shape).astype(np.float32) for _ in "kv")
        pages = device.put(np.full((3, 2, 2, 2, 24), 55, np.int8))
        rawops.append_paged_kv(
            *(device.put(x) for x in (k, v)),
            pages,
            *(device.put(np.array(x, np.int32)) for x in ([2, 0], [1, 2, 3])),
            k_scale=device.put(k_scale),
            v_scale=device.put(v_scale),
        )
        want = np.full((3, 2, 2, 2, 24), 55, np.uint8)
        for i, (page, slot) in enumerate([(2, 1), (0, 0), (0, 1)]):
            for kind, (x, scale) in enumerate(((k, k_scale), (v, v_scale))):
                unit = scale if len(shape) == 1 else scale[page]
                want[page, kind, slot] = nearest((x[i].astype(np.float32) / unit[:, None]), "int8")
        np.testing.assert_array_equal(device.get(pages).view(np.uint8), want)


# --- attention ------------------------------------------------------------------------------------------------------


def quantised(rng, lens, heads, head_dim, page_size, kind, scale_shape=None):
    """A pool of random bytes, NaN bytes where nothing is to be read, and what it stands for."""
    counts = [-(-n // page_size) for n in lens]
    ids = rng.permutation(sum(counts))
    table = np.full((len(lens), max(counts) + 1), NO_PAGE, np.int32)
    pages = np.full((sum(counts) + 1, 2, page_size, heads, head_dim), 0x7F, np.uint8)
    shape = (heads,) if scale_shape == "head" else (len(pages), heads)
    scales = [np.full(shape, np.nan, np.float32) for _ in "kv"]
    if scale_shape == "head":
        scales = [rng.uniform(0.5, 2, shape).astype(np.float32) for _ in "kv"]
    sequences, start = [], 0
    for b, (n, count) in enumerate(zip(lens, counts, strict=True)):
        table[b, :count] = own = ids[start : start + count]
        start += count
        kv = np.zeros((2, n, heads, head_dim))
        for i, page in enumerate(own):
            used = min(page_size, n - i * page_size)
            values = rng.standard_normal((2, used, heads, head_dim)) * (40 if kind == "int8" else 1)
            stored = np.rint(values).astype(np.int8) if kind == "int8" else values.astype(FORMATS[kind])
            pages[page, :, :used] = stored.view(np.uint8)
            for which in range(2):
                if scale_shape == "page":
                    scales[which][page] = rng.uniform(0.01, 3, heads) if kind == "int8" else rng.uniform(0.1, 9, heads)
                unit = (
                    np.ones(heads)
                    if scale_shape is None
                    else scales[which]
                    if shape == (heads,)
                    else scales[which][page]
                )
                part = slice(i * page_size, i * page_size + used)
                kv[which, part] = stored[which].astype(np.float64) * np.asarray(unit, np.float64)[:, None]
        sequences.append(kv)
    return pages.view(FORMATS[kind]), table, np.array(lens, np.int32), scales, sequences


@pytest.mark.parametrize("scale_shape", [None, "head", "page"])
@pytest.mark.parametrize("kind", FORMATS)
def test_decode(device, rng, monkeypatch, kind, scale_shape):
    """float16 and bfloat16 queries, head_dim with and without a power of two, page sizes below and above a tile.

    With scales, two KV heads share an item.
    """
    if scale_shape is not None:
        monkeypatch.setattr(_paged_kv_kernel, "_MUCH", 0)
        forget_plans(monkeypatch)
    few = QUERIES[(list(FORMATS).index(kind) + [None, "head", "page"].index(scale_shape)) % 3]
    for dtype, head_dim, page_size in [few] if device.is_emulated else QUERIES:
        pages, table, lens, scales, kv = quantised(rng, [33, 1], 2, head_dim, page_size, kind, scale_shape)
        q = (rng.standard_normal((2, 6, head_dim)) * (0.05 if kind == "int8" else 0.5)).astype(DTYPES[dtype])
        options = {} if scale_shape is None else {"k_scale": device.put(scales[0]), "v_scale": device.put(scales[1])}
        arrays = (device.put(x) for x in (q, pages.view(np.uint8), table, lens))
        q_there, bytes_there, *rest = arrays
        out = rawops.paged_attention(q_there, bytes_there.view(FORMATS[kind]), *rest, **options)
        for b, (keys, values) in enumerate(kv):
            want, _ = attend(q[b : b + 1], keys, values)
            bits = 2.0**17 if dtype == "float16" else 2.0**20  # weights are rounded to the queries' type
            got = device.get(out)[b : b + 1]
            assert_close(got, want, DTYPES[dtype], k=int(bits), magnitude=np.abs(values).max())


@pytest.mark.parametrize("group", [1, 3, 4])
def test_heads_side_by_side(device, rng, monkeypatch, group):
    """Two heads are read together. NaN and infinity in all of the odd ones change no bit of the even ones."""
    monkeypatch.setattr(_paged_kv_kernel, "_MUCH", 0)
    forget_plans(monkeypatch)
    pages, table, lens, scales, kv = quantised(rng, [70, 33], 4, 64, 16, "float8_e5m2", "head")
    q = (0.5 * rng.standard_normal((2, 4 * group, 64))).astype(np.float16)
    even = np.arange(4 * group) // group % 2 == 0
    others = pages.view(np.uint8).copy()
    others[:, :, :, 1::2] = 0x7E
    others[:, :, :, 1::2, ::2] = 0x7C
    found = []
    for stored in (pages.view(np.uint8), others):
        arrays = [device.put(x) for x in (q, stored, table, lens)]
        arrays[1] = arrays[1].view(FORMATS["float8_e5m2"])
        options = {"k_scale": device.put(scales[0]), "v_scale": device.put(scales[1])}
        found.append(device.get(rawops.paged_attention(*arrays, **options)))
    for b, (keys, values) in enumerate(kv):
        want, _ = attend(q[b : b + 1], keys, values)
        assert_close(found[0][b : b + 1], want, np.float16, k=2**17, magnitude=np.abs(values).max())
    np.testing.assert_array_equal(found[0][:, even], found[1][:, even])
    assert np.isnan(found[1][:, ~even].astype(np.float32)).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_every_byte_is_widened_exactly(device, kind):
    """One key a sequence: the result is its value, for all 256 bytes."""
    bits = np.arange(256, dtype=np.uint8).reshape(4, 1, 64)
    pages = np.zeros((4, 2, 1, 1, 64), np.uint8)
    pages[:, 1, 0] = bits
    table, lens = np.arange(4, dtype=np.int32)[:, None], np.ones(4, np.int32)
    for dtype in DTYPES.values():
        arrays = [device.put(x) for x in (np.zeros((4, 1, 64), dtype), pages, table, lens)]
        arrays[1] = arrays[1].view(FORMATS[kind])
        got = device.get(rawops.paged_attention(*arrays)).astype(np.float64)
        np.testing.assert_array_equal(got, bits.view(FORMATS[kind]).astype(np.float64))


def test_every_byte_is_widened_exactly_on_older_cards():
    """Those before sm_89 convert e4m3 in software."""
    bits = np.arange(128, 192, dtype=np.uint8).reshape(1, 1, 64)
    pages = np.zeros((1, 2, 1, 1, 64), np.uint8)
    pages[:, 1, 0] = bits
    kind = FORMATS["float8_e4m3fn"]
    with rawops.emulate(arch="sm_80"):
        one = np.ones(1, np.int32)
        got = rawops.paged_attention(np.zeros((1, 1, 64), np.float16), pages.view(kind), one[None] * 0, one)
    np.testing.assert_array_equal(got, bits.view(kind).astype(np.float16))


def test_ragged_queries(device, rng):
    pages, table, lens, scales, kv = quantised(rng, [40, 5], 1, 64, 8, "float8_e5m2", "page")
    q = (0.5 * rng.standard_normal((12, 2, 64))).astype(np.float16)
    arrays = [device.put(x) for x in (q, pages.view(np.uint8), table, lens)]
    arrays[1] = arrays[1].view(FORMATS["float8_e5m2"])
    options = {"k_scale": device.put(scales[0]), "v_scale": device.put(scales[1])}
    out = device.get(
        rawops.paged_attention(*arrays, cu_seqlens_q=device.put(np.array([0, 7, 12], np.int32)), **options)
    )
    for part, (keys, values) in zip((out[:7], out[7:]), kv, strict=True):
        rows = q[:7] if len(part) == 7 else q[7:]
        want, _ = attend(rows, keys, values)
        assert_close(part, want, np.float16, k=2**17, magnitude=np.abs(values).max())


@pytest.mark.parametrize("kind", FORMATS)
def test_cache(device, rng, kind):
    """Append and decode through a cache with scales, a fork and a swap on the way."""
    cache = rawops.PagedKVCache(8, 4, 2, 64, "bfloat16", kind)
    cache.k_scale[...] = device.put(np.array([0.05, 0.03], np.float32))
    cache.v_scale[...] = device.put(np.array([0.04, 0.06], np.float32))
    s = cache.add_sequence()
    k, v = (rng.standard_normal((7, 2, 64)).astype(DTYPES["bfloat16"]) for _ in "kv")
    cache.append(device.put(k), device.put(v), [s], [7])
    t = cache.fork(s)
    saved = cache.save(t)
    cache.free(t)
    t = cache.restore(saved)
    one = (device.put(x[:1]) for x in (k, v))
    cache.append(*one, [t])
    q = rng.standard_normal((2, 4, 64)).astype(DTYPES["bfloat16"])
    out = device.get(cache.decode(device.put(q), [s, t]))
    for row, count in ((0, 7), (1, 8)):
        kv = []
        for x, scale in ((k, [0.05, 0.03]), (v, [0.04, 0.06])):
            unit = np.array(scale, np.float32)[:, None]
            x = np.concatenate([x, x[:1]])[:count].astype(np.float32)
            kv.append(nearest(x / unit, kind).view(FORMATS[kind]).astype(np.float64) * unit)
        want, _ = attend(q[row : row + 1], *kv)
        assert_close(out[row : row + 1], want, DTYPES["bfloat16"], k=2**20, magnitude=4.0)


# --- RoPE -----------------------------------------------------------------------------------------------------------


def rotated(x, positions, cos, sin, interleaved):
    """RoPE of rows (tokens, heads, head_dim) in float64."""
    x, half = x.astype(np.float64), cos.shape[1]
    out = x.copy()
    c, s = cos[positions][:, None].astype(np.float64), sin[positions][:, None].astype(np.float64)
    first = x[..., 0 : 2 * half : 2] if interleaved else x[..., :half]
    second = x[..., 1 : 2 * half : 2] if interleaved else x[..., half : 2 * half]
    turned = first * c - second * s, second * c + first * s
    if interleaved:
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = turned
    else:
        out[..., :half], out[..., half : 2 * half] = turned
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [32, 16, 5])
def test_rotated_keys_and_queries(device, rng, half, interleaved):
    """All columns or some, chunks or elements; values as they are, skipped tokens left alone."""
    tokens, head_dim = 4, 64
    angles = rng.uniform(0, 6, (20, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    k, v, q = (rng.standard_normal((tokens, h, head_dim)).astype(np.float16) for h in (2, 2, 6))
    positions = np.array([3, 19, -1, 20], np.int32)
    pages, q_out = device.guarded((6, 2, 4, 2, head_dim), np.float16), device.guarded(q.shape, np.float16)
    put = device.put
    rawops.append_paged_kv(
        *(put(k), put(v), pages, put(np.array([0, 5, 2, 1, 4, 3], np.int32)), put(positions)),
        cos=put(cos),
        sin=put(sin),
        interleaved=interleaved,
        q=put(q),
        q_out=q_out,
    )
    got, turned = device.get(pages).astype(np.float64), rotated(k[:2], positions[:2], cos, sin, interleaved)
    assert_close(np.stack([got[0, 0, 3], got[4, 0, 3]]), turned, np.float16, k=8)
    np.testing.assert_array_equal(np.stack([got[0, 1, 3], got[4, 1, 3]]), v[:2].astype(np.float64))
    assert np.isnan(got).sum() == got.size - 4 * 2 * head_dim
    got = device.get(q_out)
    assert_close(got[:2], rotated(q[:2], positions[:2], cos, sin, interleaved), np.float16, k=8)
    assert np.isnan(got[2:]).all()


def test_rotated_and_rounded(device, rng):
    """Keys are turned in float32 and rounded to 8 bits once."""
    angles = rng.uniform(0, 6, (9, 8))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    k, v = (rng.integers(-8, 9, (2, 1, 16)).astype(np.float16) for _ in "kv")
    pages = device.put(np.zeros((2, 2, 8, 1, 16), np.int8))
    table, positions = (device.put(np.array(x, np.int32)) for x in ([[0], [1]], [2, 7]))
    scale = np.array([0.125], np.float32)
    options = {"cos": device.put(cos), "sin": device.put(sin), "k_scale": device.put(scale)}
    rawops.append_paged_kv(*map(device.put, (k, v)), pages, table, positions, **options)
    got = device.get(pages)
    want = rotated(k, np.array([2, 7]), cos, sin, False) / 0.125
    assert np.abs(got[[0, 1], 0, [2, 7]] - np.clip(want, -128, 127)).max() <= 0.5 + 1e-4
    np.testing.assert_array_equal(got[[0, 1], 1, [2, 7]], v)


# --- checks ---------------------------------------------------------------------------------------------------------

MISTAKES = {
    "k_scale must be None for a pool of float16": ("float16", lambda x: {"k_scale": x(1)}),
    r"v_scale must have shape \(1,\) or \(2, 1\)": ("int8", lambda x: {"v_scale": x(2)}),
    "v_scale must have shape": ("int8", lambda x: {"k_scale": x(1), "v_scale": x(2, 1)}),
    "sin must be an array": ("int8", lambda x: {"cos": x(4, 4)}),
    "cos must have shape": ("float16", lambda x: {"cos": x(4, 5), "sin": x(4, 5)}),
    "sin must have shape": ("float16", lambda x: {"cos": x(4, 4), "sin": x(4, 3)}),
    "q must be None without cos and sin": ("float16", lambda x: {"q": x(1, 1, 8)}),
    "q_out must be given with q": ("float16", lambda x: {"cos": x(4, 4), "sin": x(4, 4), "q": x(1, 1, 8)}),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(device, message):
    kind, make = MISTAKES[message]
    pages = device.put(np.zeros((2, 2, 4, 1, 8), np.uint8 if kind == "int8" else np.float16))
    pages = pages.view(np.int8) if kind == "int8" else pages
    k = device.put(np.zeros((1, 1, 8), np.float16))
    table, positions = (device.put(np.zeros(shape, np.int32)) for shape in ((1, 1), 1))
    options = make(lambda *shape: device.put(np.ones(shape, np.float32)))
    with pytest.raises((TypeError, ValueError), match="append_paged_kv: " + message):
        rawops.append_paged_kv(k, k, pages, table, positions, **options)
