"""GEMM: exact products over sizes, layouts and alignments; what is read and what is not; the epilogue; plans; tiles."""

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest

import rawops
from rawops import _gemm_call
from rawops._gemm_config import TILES, Config, Problem, select_config
from rawops.gemm import Gemm, gemm
from rawops.testing import references

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    "float16": np.dtype("float16"),
    "bfloat16": BFLOAT16,
    "float32": np.dtype("float32"),
    "float64": np.dtype("float64"),
}
DTYPE_OF = {"tf32": "float32", "float32 across K": "float32", "16-bit": "float16", "16-bit narrow": "bfloat16"}
KINDS_OF_TILES = {kind: tiles for kind, tiles in TILES.items() if not kind.startswith("8-bit")}  # see test_gemm_8bit
KINDS = [("float16", None), ("bfloat16", None), ("float32", None), ("float32", "tf32"), ("float64", None)]


def integers(rng, shape, dtype) -> np.ndarray:
    """Small integers: products of up to 200 of them are exact in every type but for the last rounding."""
    return rng.integers(-3, 4, shape).astype(DTYPES.get(dtype, dtype))


def expected(a, b) -> np.ndarray:
    """The exact product, rounded once to the type of a."""
    return (a.astype(np.int64) @ b.astype(np.int64)).astype(np.float64).astype(a.dtype)


def laid_out(device, x: np.ndarray, layout: str):
    """x on the device with the last two axes in row-major ("row") or column-major ("col") order."""
    return device.put(x) if layout == "row" else device.put(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2)


def same(device, got, want) -> None:
    np.testing.assert_array_equal(device.get(got).astype(np.float64), np.asarray(want, np.float64))


# --- products -------------------------------------------------------------------------------------------------------

SIZES = [(1, 1, 1), (1, 65, 33), (17, 8, 3), (2, 129, 64), (63, 7, 65), (64, 64, 17), (65, 133, 127), (129, 3, 192)]
# bfloat16 is moved as float16 is; its products and its rounding differ.
PRODUCTS = [(*kind, size) for kind in KINDS for size in (SIZES[::3] if "bfloat16" in kind else SIZES)]


@pytest.mark.parametrize("dtype, precision, size", PRODUCTS, ids=str)
def test_sizes_and_layouts(device, rng, size, dtype, precision):
    M, N, K = size
    a, b = integers(rng, (M, K), dtype), integers(rng, (K, N), dtype)
    for order_a, order_b in itertools.product(("row", "col"), repeat=2):
        out = device.guarded((M, N), a.dtype)
        gemm(laid_out(device, a, order_a), laid_out(device, b, order_b), out=out, precision=precision)
        same(device, out, expected(a, b))


VIEWS = {
    "sliced rows": lambda x: x[3:19, 8:],
    "odd offset": lambda x: x[3:19, 5:],
    "even offset": lambda x: x[3:19, 2:],
    "every other column": lambda x: x[:16, 1::2],
    "both strided": lambda x: x[::2, ::3],
    "reversed rows": lambda x: x[15::-1, 3:],
    "reversed both": lambda x: x[15::-1, ::-1],
    "one row repeated": lambda x: np.broadcast_to(x[3], (16, x.shape[1])),
    "one column repeated": lambda x: np.broadcast_to(x[:16, 3:4], (16, 21)),
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("view", VIEWS)
def test_views(device, rng, view, dtype):
    """Any strides and any alignment: the answer of contiguous copies, whatever was called before."""
    big = integers(rng, (33, 41), dtype)
    on_device = device.put(big)
    take = VIEWS[view]
    a, b = take(big), integers(rng, (9, take(big).shape[0]), dtype).T
    same(device, gemm(take(on_device), device.put(np.eye(a.shape[1], dtype=a.dtype))), a)
    same(device, gemm(take(on_device).T, laid_out(device, b, "col")), expected(a.T, b))
    same(device, gemm(device.put(b.T), take(on_device)), expected(b.T, a))
    same(device, gemm(device.put(b.T), device.put(np.ascontiguousarray(a))), expected(b.T, a))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_misaligned_arrays(device, rng, dtype):
    """Contiguous, but one element past an aligned address: for every argument in turn."""
    M, N, K = 19, 24, 40
    inputs = {
        "a": integers(rng, (M, K), dtype),
        "b": integers(rng, (K, N), dtype),
        "c": integers(rng, (M, N), dtype),
        "bias": integers(rng, (N,), dtype),
        "residual": integers(rng, (M, N), dtype),
    }
    want = references.gemm(*(inputs[n] for n in "abc"), beta=2.0, bias=inputs["bias"], residual=inputs["residual"])
    for shifted in (*inputs, "out", None):
        arrays = {}
        for name, x in {**inputs, "out": np.full((M, N), np.nan, DTYPES[dtype])}.items():
            buffer = device.put(np.concatenate([np.zeros(1 if name == shifted else 8, x.dtype), x.reshape(-1)]))
            arrays[name] = buffer[-x.size :].reshape(x.shape)
        same(device, gemm(**arrays, beta=2.0), want)


def test_strided_output(device, rng):
    a, b = integers(rng, (18, 20), "float16"), integers(rng, (20, 12), "float16")
    whole = device.put(np.full((40, 40), 7, np.float16))
    for view in (whole[:18, :12], whole[18:0:-1, 3:27:2], whole[:12, 21:39].T):
        view[...] = 7
        result = gemm(device.put(a), device.put(b), out=view)
        assert result is view
        same(device, view, expected(a, b))
        view[...] = 7
        same(device, whole, np.full((40, 40), 7))


def test_batches(device, rng):
    """Broadcast batch axes, axes of stride 0, more axes than the kernel has, and one b for all."""
    for shape_a, shape_b in [
        ((3, 5, 9), (3, 9, 4)),
        ((2, 3, 5, 9), (9, 4)),
        ((2, 1, 5, 9), (3, 9, 4)),
        ((5, 9), (3, 9, 4)),
        ((2, 2, 2, 2, 3, 9), (2, 2, 2, 2, 9, 4)),
        ((4, 1, 9), (9, 4)),
        ((0, 3, 9), (9, 4)),
    ]:
        a, b = integers(rng, shape_a, "float16"), integers(rng, shape_b, "float16")
        same(device, gemm(device.put(a), device.put(b)), expected(a, b))
    a, b = integers(rng, (5, 9), "float32"), integers(rng, (2, 9, 4), "float32")
    repeated = (
        np.broadcast_to(device.put(a), (3, 1, 5, 9))
        if device.is_emulated
        else device.xp.broadcast_to(device.put(a), (3, 1, 5, 9))
    )
    c = integers(rng, (2, 1, 4), "float32")
    got = gemm(repeated, device.put(b), device.put(c), beta=1.0)
    same(device, got, np.broadcast_to(a, (3, 1, 5, 9)).astype(float) @ b + c)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_more_batch_axes_than_a_kernel_has(device, rng, dtype):
    """Five that do not merge, into a strided view, in place, and over an operand."""
    a, b = integers(rng, (2, 1, 2, 1, 2, 3, 16), dtype), integers(rng, (1, 2, 1, 2, 1, 16, 8), dtype)
    bias, c = integers(rng, 8, dtype), integers(rng, (2, 1, 1, 3, 8), dtype)
    put, want = device.put, expected(a, b)
    for split_k in (None, 2):
        same(device, gemm(put(a), put(b), split_k=split_k), want)
    wide = put(np.zeros((2, 2, 2, 2, 2, 3, 16), want.dtype))
    gemm(put(a), put(b), put(c), beta=1.0, bias=put(bias), out=wide[..., ::2])
    same(device, wide[..., ::2], want + c + bias)
    same(device, wide[..., 1::2], np.zeros(want.shape))
    x = put(want.copy())
    assert gemm(put(a), put(b), residual=x, out=x) is x
    same(device, x, 2 * want)
    x = put(np.zeros((2, 2, 2, 2, 2, 3, 16), want.dtype))
    x[:, :1, :, :1] = put(a)
    same(device, gemm(x[:, :1, :, :1], put(b), out=x[..., 1:9]), want)


def test_strides_of_axes_of_one(device):
    """A leading dimension must not be taken from an axis of one entry."""
    a, b = device.put(np.ones((1, 2, 1), np.float16)), device.put(np.ones((1, 3, 1), np.float16)).swapaxes(1, 2)
    same(device, gemm(a, b), np.ones((1, 2, 3)))
    wide = np.arange(3 * 37).reshape(3, 37).astype(np.float16) % 5
    same(device, gemm(device.put(wide)[1:2, :], device.put(wide).T), expected(wide[1:2], wide.T))


def test_accumulates_wide(device):
    """Not in float16: 4096 ones, and partial sums past 65504 that cancel; split or not, the same bits twice."""
    ones = np.ones((1, 4096), np.float16)
    same(device, gemm(device.put(ones), device.put(ones.T)), [[4096]])
    a = np.ones((2, 256), np.float16)
    b = np.array([600] * 128 + [-600] * 127 + [-599], np.float16)[:, None]
    for split_k in (1, 2, 4):
        for _ in range(2):
            same(device, gemm(device.put(a), device.put(b), split_k=split_k), [[1], [1]])


@pytest.mark.parametrize("dtype, precision", KINDS)
def test_split_k(device, rng, monkeypatch, dtype, precision):
    if dtype in ("float16", "float64"):  # one thread adds up two or three slices, as it does of many sums
        monkeypatch.setattr(_gemm_call, "_FEW_GROUPS", 0)
    a, b = integers(rng, (2, 5, 190), dtype), integers(rng, (190, 18), dtype)
    c, bias, residual = (integers(rng, shape, dtype) for shape in ((5, 18), (18,), (2, 5, 9)))
    put = device.put
    for split_k in (2, 3, 1000):
        same(device, gemm(put(a), put(b), split_k=split_k, precision=precision), expected(a, b))
    epilogue = {"beta": 2.0, "bias": bias, "residual": residual, "activation": "swiglu"}
    want = references.gemm(a * DTYPES[dtype].type(0.125), b, c, **epilogue)
    arrays = {**epilogue, "bias": put(bias), "residual": put(residual)}
    got = gemm(put(a), put(b), put(c), alpha=0.125, split_k=3, precision=precision, **arrays)
    tolerance = 2 * np.finfo(np.float32).eps if dtype == "float64" else 4 * float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    np.testing.assert_allclose(device.get(got).astype(float), want, rtol=tolerance, atol=tolerance)


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_zero_alpha_and_beta_read_nothing(device, rng, dtype):
    M, N, K = 130, 18, 70
    a, b, c = (integers(rng, s, dtype) for s in ((M, K), (K, N), (M, N)))
    nan = {n: device.put(np.full(x.shape, np.nan, x.dtype)) for n, x in (("a", a), ("b", b), ("c", c))}
    zero = device.put(np.array(0.0, np.float32))
    for none in (0, 0.0, zero):
        out = device.guarded((M, N), c.dtype)
        same(device, gemm(device.put(a), device.put(b), nan["c"], beta=none, out=out), expected(a, b))
        same(device, gemm(nan["a"], nan["b"], device.put(c), alpha=none, beta=2.0), 2 * c.astype(float))
        same(device, gemm(nan["a"], nan["b"], nan["c"], alpha=none, beta=none), np.zeros((M, N)))
    same(device, gemm(nan["a"], nan["b"], device.put(c), alpha=zero, beta=2.0, split_k=2), 2 * c.astype(float))


def test_padding_is_not_read(device, rng):
    """Rows and columns around a view are NaN."""
    for M, N, K in ((3, 5, 7), (17, 20, 33)):
        frame_a, frame_b = np.full((M + 8, K + 16), np.nan, np.float16), np.full((K + 8, N + 16), np.nan, np.float16)
        frame_a[:M, :K], frame_b[:K, :N] = integers(rng, (M, K), "float16"), integers(rng, (K, N), "float16")
        got = gemm(device.put(frame_a)[:M, :K], device.put(frame_b)[:K, :N])
        same(device, got, expected(frame_a[:M, :K], frame_b[:K, :N]))


def test_empty_sizes(device):
    def zeros(*shape):
        return device.put(np.zeros(shape, np.float32))

    c = device.put(np.arange(9, dtype=np.float32).reshape(3, 3))
    nan = device.put(np.full((3, 3), np.nan, np.float32))
    same(device, gemm(zeros(3, 0), zeros(0, 3), nan), np.zeros((3, 3)))
    same(device, gemm(zeros(3, 0), zeros(0, 3), c, beta=1.0), device.get(c))
    same(device, gemm(zeros(3, 0), zeros(0, 3), c, beta=0.5), device.get(c) / 2)
    same(device, gemm(zeros(3, 2, 0), zeros(3, 0, 3)), np.zeros((3, 2, 3)))
    for alpha in (np.nan, np.inf, device.put(np.array(np.nan, np.float32))):
        same(device, gemm(zeros(3, 0), zeros(0, 3), c, alpha=alpha, beta=1.0), device.get(c))
    assert gemm(zeros(0, 4), zeros(4, 3)).shape == (0, 3)
    assert gemm(zeros(3, 4), zeros(4, 0), bias=zeros(0)).shape == (3, 0)
    assert gemm(zeros(0, 3, 4), zeros(4, 8), activation="swiglu").shape == (0, 3, 4)


def test_nan_spreads_along_its_row_and_column_only(device, rng):
    a, b = integers(rng, (20, 30), "float16"), integers(rng, (30, 10), "float16")
    a[3, 29], b[0, 7] = np.nan, np.inf
    a[:, 0] = 1
    with np.errstate(invalid="ignore"):
        same(device, gemm(device.put(a), device.put(b)), a.astype(float) @ b.astype(float))


# --- epilogue -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu", "swiglu"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_epilogue(device, rng, dtype, activation):
    M, N, K = 21, 38, 24
    kind = DTYPES[dtype]
    a, b, c = (rng.standard_normal(s).astype(kind) for s in ((M, K), (K, N), (M, N)))
    bias = rng.standard_normal(N).astype(kind)
    residual = rng.standard_normal((M, N // 2 if activation == "swiglu" else N)).astype(kind)
    want = references.gemm(a, b, c, alpha=0.5, beta=-1.5, bias=bias, residual=residual, activation=activation)
    put = device.put
    for alpha, beta in ((0.5, -1.5), (put(np.array(0.5, np.float32)), put(np.array(-1.5)))):
        epilogue = {"bias": put(bias), "residual": put(residual), "activation": activation}
        got = gemm(put(a), put(b), put(c), alpha=alpha, beta=beta, **epilogue)
        tolerance = {"float16": 2e-3, "float32": 4e-6, "float64": 1e-13}[dtype]
        np.testing.assert_allclose(device.get(got).astype(float), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "swiglu"])
@pytest.mark.parametrize("dtype, tolerance, least", [("float32", 2e-6, 3e-45), ("bfloat16", 2e-5, 2e-41)])
def test_activations_at_extremes(device, activation, dtype, tolerance, least):
    """Exact functions for float32, approximations for what has 16 bits; bias and result have float32."""
    x = [-np.inf, -1e30, -1e4, -100, -88.5, -87.5, -50, -5, -3, -0.1, -0.0, 0, 1e-3, 1, 4, 50, 1e4, 1e30]
    x = np.array([*x, np.inf, np.nan], np.float32)
    row = np.concatenate([x, np.ones_like(x)]) if activation == "swiglu" else x
    zeros = np.zeros((1, row.size), DTYPES[dtype])
    got = gemm(
        device.put(zeros[:, :1]), device.put(zeros), bias=device.put(row), activation=activation, out_dtype="float32"
    )
    want = references.gemm(np.zeros((1, 1)), np.zeros((1, row.size)), bias=row, activation=activation)[0]
    np.testing.assert_allclose(device.get(got)[0], want, rtol=tolerance, atol=least)


def test_output_types(device, rng):
    big = np.full((1, 4), 300, np.float16)
    overflow = device.get(gemm(device.put(big), device.put(big.T)))
    assert overflow.dtype == np.float16 and np.isposinf(overflow).all()
    wide = gemm(device.put(big), device.put(big.T), out_dtype="float32")
    assert wide.dtype == np.float32
    same(device, wide, [[360000]])
    c = device.put(np.array([[0.25]], np.float32))
    same(device, gemm(device.put(big), device.put(big.T), c, beta=1.0, out_dtype="float32"), [[360000.25]])


def test_in_place(device, rng):
    """out as c or as the residual, or over an operand: the answer of separate arrays."""
    a, b, c = (integers(rng, (24, 24), "float16") for _ in range(3))
    product = a.astype(float) @ b.astype(float)
    put = device.put
    for split_k in (1, 2):
        x = put(c.copy())
        same(device, gemm(put(a), put(b), x, beta=1.0, out=x, split_k=split_k), product + c)
        x = put(c.copy())
        same(device, gemm(put(a), put(b), residual=x, out=x, split_k=split_k), product + c)
    x = put(a.copy())
    same(device, gemm(x, put(b), out=x), product)
    x = put(b.copy())
    same(device, gemm(put(a), x, out=x.T), product)
    shifted = put(np.concatenate([c, c]))
    same(
        device, gemm(put(a), put(b), shifted[1:25], beta=1.0, out=shifted[:24]), product + np.concatenate([c, c])[1:25]
    )


# --- plan, configuration, checks ------------------------------------------------------------------------------------


def test_plan(device, rng):
    a, b, bias = integers(rng, (5, 190), "float16"), integers(rng, (190, 16), "float16"), integers(rng, 16, "float16")
    plan = Gemm(5, 16, 190, "float16", bias=device.put(bias), activation="relu", split_k=3)
    want = np.maximum(expected(a, b).astype(float) + bias, 0)
    out = device.guarded((5, 16), np.float16)
    for order in ("row", "col", "row"):
        assert plan(laid_out(device, a, order), device.put(b), out=out) is out
        same(device, out, want)
    with pytest.raises(ValueError, match=r"Gemm: a must have shape \(\.\.\., 5, 190\), got \(5, 100\)"):
        plan(device.put(a)[:, :100], device.put(b))


def test_select_config():
    for kind, tiles in KINDS_OF_TILES.items():
        dtype = DTYPE_OF.get(kind, kind)
        itemsize = DTYPES[dtype].itemsize
        lowest = {tile.block_m: tile.shared_bytes(itemsize) for tile in tiles}  # of the last tile of each height
        assert max(lowest.values()) <= 99 * 1024
        for M, N, K in itertools.product((1, 16, 65, 4096), (1, 4096), (1, 63, 4096, 32768)):
            access, across_k = 2 if kind == "16-bit narrow" else 16, kind == "float32 across K"
            problem = Problem(dtype, M, N, K, tf32=kind == "tf32", access=access, across_k=across_k)
            assert problem.kind == kind
            config = select_config(problem, 132, 99 * 1024)
            assert config.tile in tiles
            assert config.k_per_split % config.tile.block_k == 0
            assert (config.split_k - 1) * config.k_per_split < K <= config.split_k * config.k_per_split
    large = select_config(Problem("float16", 8192, 8192, 8192), 132, 232448)
    assert (large.tile.block_m, large.tile.block_n, large.split_k) == (128, 256, 1)
    decode = select_config(Problem("float16", 1, 28672, 4096), 132, 232448)
    assert (decode.tile.block_m, decode.split_k) == (16, 1)
    assert select_config(Problem("float16", 128, 128, 32768), 132, 232448).split_k == 32


def test_out_has_entries_of_its_own(device):
    """Views whose rows, columns or matrices share memory are refused; those that only interleave are not."""
    as_strided = device.xp.lib.stride_tricks.as_strided
    x = device.put(np.ones((2, 4, 4), np.float16))
    buffer = device.put(np.zeros(256, np.float16))
    for strides in ((32, 0, 2), (32, 2, 2), (32, 6, 2), (24, 8, 2), (6, 8, 2), (2, 8, 2)):
        with pytest.raises(ValueError, match="gemm: out must have entries of its own"):
            gemm(x, x, out=as_strided(buffer, (2, 4, 4), strides))
    for strides in ((32, 8, 2), (8, 16, 2), (2, 16, 4), (32, 2, 8)):
        same(device, gemm(x, x, out=as_strided(buffer, (2, 4, 4), strides)), np.full((2, 4, 4), 4))


def test_read_only_out():
    x = np.ones((4, 4), np.float16)
    out = np.zeros((4, 4), np.float16)
    out.flags.writeable = False
    with rawops.emulate(), pytest.raises(ValueError, match="gemm: out must be writeable, got a read-only array"):
        gemm(x, x, out=out)


KERNELTILES = [(kind, tile) for kind, tiles in KINDS_OF_TILES.items() for tile in tiles]


@pytest.mark.parametrize(
    "kind, tile", KERNELTILES, ids=lambda x: x if isinstance(x, str) else f"{x.block_m}x{x.block_n}"
)
def test_every_tile(monkeypatch, rng, kind, tile):
    """All layouts of every tile: exact with ragged edges, and shared memory without bank conflicts.

    The exact float32 kernel writes its tile without staging; its reads are free of conflicts too.
    """
    monkeypatch.setattr(
        sys.modules[Problem.__module__], "select_config", lambda problem, *_: Config(tile, 1, 8 * tile.block_k)
    )
    dtype, precision = DTYPE_OF.get(kind, kind), "tf32" if kind == "tf32" else None
    align = 2 if kind == "16-bit narrow" else 8
    M, N, K = tile.block_m - align, tile.block_n - align, 4 * tile.block_k + align
    a, b = integers(rng, (M, K), dtype), integers(rng, (K, N), dtype)
    gate = np.concatenate([np.zeros((K, N // 2), a.dtype), b[:, : N // 2]], axis=1)
    bias = np.repeat(np.array([30, 0], a.dtype), N // 2)  # silu(30) is 30, to the last bit of most types
    across_k = [("F", "C")]
    orders = [o for o in itertools.product("CF", repeat=2) if kind != "float32" or o not in across_k]
    orders = across_k if kind == "float32 across K" else orders
    with rawops.emulate(arch="sm_80") as emulator:
        for order_a, order_b in orders:
            assert (gemm(a.copy(order_a), b.copy(order_b), precision=precision) == expected(a, b)).all()
        assert [launch.total.shared_conflicts for launch in emulator.report] == [0] * len(orders)
        a, gate = a.copy(orders[0][0]), gate.copy(orders[0][1])
        got = gemm(a, gate, bias=bias, activation="swiglu", precision=precision, out_dtype="float32")
        np.testing.assert_allclose(got, 30.0 * expected(a, b[:, : N // 2]).astype(np.float64), rtol=1e-6)


# --- float32 and TF32 -----------------------------------------------------------------------------------------------


def test_tf32_rounding(device, rng):
    """Operands are rounded to 10 bits of mantissa, ties away from zero; infinity and every NaN stay what they are.

    Where TMA brings them, on Hopper, ties go to the even neighbour.
    """
    exponents = rng.integers(1, 254, 500, dtype=np.uint32) << 23
    mantissas = rng.integers(0, 2**23, 500, dtype=np.uint32)
    mantissas[:300] = mantissas[:300] & 0xFFFFE000 | rng.choice(np.uint32([0, 0x0FFF, 0x1000, 0x1001, 0x1FFF]), 300)
    signs = rng.integers(0, 2, 500, dtype=np.uint32) << 31
    special = np.uint32([0, 0x80000000, 0x3FFFFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000])
    nans = np.uint32([0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFF000, 0x7FC00000, 0xFFC00000, 0x7FA00000])
    bits = np.concatenate([signs | exponents | mantissas, special])
    rounded = [(bits + half) & np.uint32(0xFFFFE000) for half in (np.uint32(0x1000), 0x0FFF + (bits >> 13 & 1))]
    away, even = (np.concatenate([r.view(np.float32), np.full(6, np.nan)]) for r in rounded)
    x, one = np.concatenate([bits, nans]).view(np.float32)[:, None], np.ones((1, 1), np.float32)
    for order in ("row", "col"):  # what is contiguous decides how fragments are read
        column = laid_out(device, x, order)
        for got in (gemm(column, device.put(one), precision="tf32"), gemm(device.put(one), column.T, precision="tf32")):
            got = device.get(got).ravel()
            by_tma = not device.is_emulated and np.array_equal(got, even, equal_nan=True)
            np.testing.assert_array_equal(got, even if by_tma else away)


def test_float32_of_no_contiguous_axis(monkeypatch, device, rng):
    """Every other column of one operand beside one that is contiguous along K, in the largest tile."""
    tile, configs = TILES["float32"][0], sys.modules[Problem.__module__]
    monkeypatch.setattr(configs, "select_config", lambda problem, *_: Config(tile, 1, 8 * tile.block_k))
    M, N, K = tile.block_m - 3, tile.block_n - 6, tile.block_k + 3
    a, b = integers(rng, (M, 2 * K), "float32"), integers(rng, (K, 2 * N), "float32")
    a_of_k, b_of_k = a[:, :K].copy(), b[:, :N].copy("F")
    same(device, gemm(device.put(a_of_k), device.put(b)[:, ::2]), expected(a_of_k, b[:, ::2]))
    same(device, gemm(device.put(a)[:, ::2], device.put(b_of_k.T).T), expected(a[:, ::2], b_of_k))


@pytest.mark.parametrize("M, N, K", [(5, 140, 9), (132, 36, 24), (67, 130, 21)])
def test_float32_reads_nothing_beside_its_operands(device, rng, M, N, K):
    """Views of every alignment in a frame of NaN, in tiles that are cut at any edge."""
    a, b = integers(rng, (M, K), "float32"), integers(rng, (K, N), "float32")
    for shift, order_a, order_b in itertools.product((0, 1, 2), ("row", "col"), ("row", "col")):

        def framed(x, order, shift=shift):
            frame = np.full((x.shape[0] + 12, x.shape[1] + 12), np.nan, np.float32)
            frame = frame[: frame.shape[0] // 4 * 4, : frame.shape[1] // 4 * 4]  # both layouts are aligned
            rows, cols = (slice(4 + shift, 4 + shift + n) for n in x.shape)
            frame[rows, cols] = x
            return laid_out(device, frame, order)[rows, cols]

        same(device, gemm(framed(a, order_a), framed(b, order_b)), expected(a, b))
