"""Products of float8 and int8: exact over sizes, layouts and scales; what is read; results of 8 bits; the checks."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from conftest import Device

import rawops
from rawops import _gemm_8bit
from rawops import _gemm_8bit_config as kernels
from rawops import _gemm_sm90 as sm90
from rawops._gemm_8bit import asked_ahead_of_bytes
from rawops._gemm_config import PROMOTED
from rawops.gemm import Gemm, gemm
from rawops.testing import has_gpu, references

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
BFLOAT16, INT8, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype("int8"), np.dtype("float32")
PAIRS = [*itertools.product((E4M3, E5M2), repeat=2), (INT8, INT8)]
SIZES = [(1, 1, 1), (2, 3, 17), (7, 65, 8), (17, 8, 133), (63, 129, 64), (64, 17, 65), (129, 2, 127), (133, 192, 63)]
H200 = {"sm_count": 132, "max_shared_bytes": 232448}


@pytest.fixture(params=["sm_80", "sm_90a"])
def device(request):
    """Both families of kernels; `test_products_before_hopper` has Ada's."""
    if has_gpu():
        if request.param != "sm_90a":
            pytest.skip("the GPU has one architecture")
        yield request.getfixturevalue("hopper")
        return
    found = Device(np)
    with rawops.emulate(arch=request.param, check=True) as emu:
        found.report = emu.report
        yield found
    found.check_guards()


def integers(rng, shape, dtype) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(dtype)


def powers(rng, shape) -> np.ndarray:
    return (2.0 ** rng.integers(-3, 3, shape)).astype(np.float32)


def exact(a, b) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64)


def laid_out(device, x: np.ndarray, layout: str):
    """x row-major ("row"), column-major ("col") or with rows of an odd length ("odd"), NaN or 77 around it."""
    stored = x.swapaxes(-1, -2) if layout == "col" else x
    pad = 1 if layout == "odd" else -stored.shape[-1] % 16 + 16
    nothing = 77 if x.dtype == INT8 else np.nan
    room = np.full((*stored.shape[:-2], stored.shape[-2] + 1, stored.shape[-1] + pad), nothing)
    room[..., :-1, :-pad] = stored
    view = device.put(room.astype(x.dtype))[..., :-1, :-pad]
    return view.swapaxes(-1, -2) if layout == "col" else view


def same(device, got, want) -> None:
    want = np.asarray(want, np.float64).astype(got.dtype).astype(np.float64)
    np.testing.assert_array_equal(device.get(got).astype(np.float64), want)


# --- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [132, 130])
def test_operands_across_k(device, rng, rows):
    """Transposed first: four bytes at a time where these begin on words and are whole ones, else one by one."""
    a, b = integers(rng, (2, rows, 135), E4M3), integers(rng, (135, 132), E4M3)
    out = device.guarded((2, rows, 132), FLOAT32)
    gemm(laid_out(device, a, "col"), laid_out(device, b, "row"), out=out)
    np.testing.assert_array_equal(device.get(out), exact(a, b))
    if device.xp is np:
        copies = [launch.kernel for launch in device.report if "repack" in launch.kernel]
        first = "gemm_repack_bytes" if rows % 4 == 0 else "gemm_repack_transposed<1>"
        assert copies == [f"rawops::{first}", "rawops::gemm_repack_bytes"]


@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
@pytest.mark.parametrize("layouts", [("row", "col"), ("odd", "row"), ("col", "odd")], ids="-".join)
def test_sizes_and_layouts(device, rng, dtypes, layouts):
    """K-major operands as they are, the others by way of a copy."""
    for M, N, K in SIZES if dtypes in ((E4M3, E5M2), (INT8, INT8)) else SIZES[3:5]:
        a, b = integers(rng, (M, K), dtypes[0]), integers(rng, (K, N), dtypes[1])
        out = device.guarded((M, N), BFLOAT16)
        gemm(laid_out(device, a, layouts[0]), laid_out(device, b, layouts[1]), out=out)
        same(device, out, exact(a, b))


def test_products_before_hopper(rng):
    """Ada's tensor cores take float8, through mma.sync."""
    if has_gpu():
        pytest.skip("the GPU has one architecture")
    host = Device(np)
    with rawops.emulate(arch="sm_89", check=True):
        for dtypes in PAIRS:
            a, b = integers(rng, (17, 133), dtypes[0]), integers(rng, (133, 40), dtypes[1])
            same(host, gemm(a, laid_out(host, b, "col"), out_dtype="float32"), exact(a, b))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_code(device, dtype):
    """All numbers, subnormal ones too; NaN and infinity stay what they are."""
    codes = np.arange(256, dtype=np.uint8).view(dtype).reshape(-1, 1)
    one = np.ones((1, 1), dtype)
    for out_dtype in ("float32", "float16"):
        same(device, gemm(device.put(codes), device.put(one), out_dtype=out_dtype), codes.astype(np.float64))
        same(device, gemm(device.put(one), device.put(codes.T.copy()), out_dtype=out_dtype), codes.T.astype(np.float64))


def test_int8_is_exact(device, rng):
    """At both ends of the range, and for sums that float32 does not hold."""
    a, b = rng.integers(-128, 128, (33, 700)).astype(INT8), rng.integers(-128, 128, (700, 24)).astype(INT8)
    a[0], b[:, 0] = -128, -128
    b[:, 1] = 127
    for order in ("row", "col"):
        got = gemm(laid_out(device, a, "row"), laid_out(device, b, order))
        assert got.dtype == np.int32
        np.testing.assert_array_equal(device.get(got), a.astype(np.int64) @ b.astype(np.int64))


def test_int32_addends(device, rng):
    """alpha, beta, c, bias and residual in integers, past what float32 holds and past the end of int32."""
    a, b = rng.integers(-128, 128, (33, 96)).astype(INT8), rng.integers(-128, 128, (96, 20)).astype(INT8)
    c, residual = (rng.integers(-(2**30), 2**30, shape, dtype=np.int32) for shape in ((33, 20), (33, 1)))
    bias = rng.integers(-(2**31), 2**31, 20).astype(np.int32)
    want = -3 * (a.astype(np.int64) @ b.astype(np.int64)) + 5 * c.astype(np.int64) + bias + residual
    terms = {"c": device.put(c), "bias": device.put(bias), "residual": device.put(residual)}
    got = gemm(device.put(a), device.put(b), **terms, alpha=-3, beta=5)
    np.testing.assert_array_equal(device.get(got), want.astype(np.int32))
    op = Gemm(33, 20, 96, "int8", bias=terms["bias"], residual=terms["residual"], alpha=0, beta=1)
    want = c.astype(np.int64) + bias + residual
    np.testing.assert_array_equal(device.get(op(device.put(a), device.put(b), terms["c"])), want.astype(np.int32))


def test_sums_in_place(device, rng):
    """precision="fast": one sum over all of K in the tensor cores."""
    a, b = integers(rng, (65, 700), E4M3), integers(rng, (700, 40), E4M3)
    got = gemm(device.put(a), laid_out(device, b, "col"), precision="fast", out_dtype="float32")
    same(device, got, exact(a, b))


def test_batches(device, rng):
    """Broadcast axes, more than a kernel has, rows that stack; scales with them and without."""
    for shape_a, shape_b in [((3, 5, 32), (3, 32, 4)), ((2, 1, 5, 9), (3, 9, 4)), ((4, 1, 16), (16, 4))]:
        a, b = integers(rng, shape_a, E4M3), integers(rng, shape_b, E5M2)
        same(device, gemm(device.put(a), device.put(b)), exact(a, b))
        rows, cols = powers(rng, (*shape_a[:-1], 1)), powers(rng, shape_b[-1])
        got = gemm(device.put(a), device.put(b), scale_a=device.put(rows), scale_b=device.put(cols))
        same(device, got, exact(a * rows.astype(float), b * cols.astype(float)))
    a, b = integers(rng, (2, 2, 2, 2, 3, 9), INT8), integers(rng, (2, 2, 1, 2, 9, 4), INT8)
    rows = powers(rng, (2, 1, 1, 2, 3, 1))
    same(device, gemm(device.put(a), device.put(b)), exact(a, b))
    same(device, gemm(device.put(a), device.put(b), scale_a=device.put(rows)), exact(a * rows.astype(float), b))


def test_empty_sizes(device, rng):
    for M, N, K in [(0, 4, 4), (4, 0, 4), (4, 4, 0)]:
        a, b = np.ones((M, K), E4M3), np.ones((K, N), E4M3)
        got = gemm(device.put(a), device.put(b), scale_a=device.put(np.ones((M, -(-K // 128)), np.float32)))
        assert got.shape == (M, N) and (device.get(got).astype(float) == 0).all()
    bias = integers(rng, 4, BFLOAT16)
    same(device, gemm(device.put(a), device.put(b), bias=device.put(bias)), np.tile(bias.astype(float), (4, 1)))


# --- scales ---------------------------------------------------------------------------------------------------------


def spread(scale: np.ndarray, shape: tuple) -> np.ndarray:
    """A scale for every entry of an operand."""
    for axis, size in enumerate(shape):
        if scale.shape[axis] not in (1, size):
            scale = np.repeat(scale, 128, axis)
        scale = np.take(scale, np.arange(min(size, scale.shape[axis])), axis)
    return np.broadcast_to(scale, shape).astype(np.float64)


def in_nan(device, x: np.ndarray):
    """A strided view of x with NaN behind every row and entry."""
    room = np.full((x.shape[0] + 1, x.shape[1] * 2 + 1), np.nan, x.dtype)
    room[:-1, : 2 * x.shape[1] : 2] = x
    return device.put(room)[:-1, : 2 * x.shape[1] : 2]


M, N, K = 70, 264, 300  # three blocks along K and N, the last ones short
FORMS = [
    ((1, 1), (1, 1)),
    ((M, 1), (1, N)),
    ((M, 1), (1, 1)),
    ((1, 1), (1, N)),
    ((M, 3), (3, 3)),
    ((M, 3), (3, N)),
    ((M, 3), (1, 1)),
    ((1, 3), (1, 3)),
    ((M, 1), (3, 1)),
    ((1, 1), (3, N)),
]


@pytest.mark.parametrize("shape_a, shape_b", FORMS, ids=str)
def test_scales(device, rng, shape_a, shape_b):
    """Whole operands, rows and columns, blocks, and what lies between; nothing beside them is read."""
    a, b = integers(rng, (M, K), E4M3), integers(rng, (K, N), E4M3)
    scale_a, scale_b = powers(rng, shape_a), powers(rng, shape_b)
    want = exact(a * spread(scale_a, a.shape), b * spread(scale_b, b.shape))
    operands = laid_out(device, a, "row"), laid_out(device, b, "col")
    out = device.guarded((M, N), FLOAT32)
    gemm(*operands, scale_a=in_nan(device, scale_a), scale_b=in_nan(device, scale_b), out=out)
    same(device, out, want)


def test_scales_of_vectors_and_numbers(device, rng):
    """One axis is that of rows or columns; numbers and arrays of one entry are for all, with any kind of alpha."""
    a, b = integers(rng, (9, 32), INT8), integers(rng, (32, 24), INT8)
    rows, cols = powers(rng, 9), powers(rng, 24)
    put = device.put
    got = gemm(put(a), put(b), scale_a=put(rows), scale_b=put(cols), out_dtype="float32")
    same(device, got, exact(a * rows[:, None].astype(float), b * cols.astype(float)))
    half = (0.5, np.float32(0.5), put(np.array(0.5, np.float32)), put(np.full(1, 0.5, np.float32)))
    for scale, alpha in itertools.product(half, (2.0, put(np.array(2.0, np.float32)))):
        got = gemm(put(a), put(b), scale_a=scale, scale_b=scale, alpha=alpha)
        assert got.dtype == BFLOAT16
        same(device, got, 0.5 * exact(a, b))


def test_swiglu_with_blocks(device, rng):
    """Columns of gate and up lie in blocks of their own, which need not begin where a tile's part does."""
    N = 2 * 75
    a, b = integers(rng, (40, K), E4M3), integers(rng, (K, N), E4M3)
    for shape_b in ((3, 2), (3, N), (1, N)):
        scale_a, scale_b = powers(rng, (40, 3)) / 64, powers(rng, shape_b)
        got = gemm(
            *map(device.put, (a, b)), scale_a=device.put(scale_a), scale_b=device.put(scale_b), activation="swiglu"
        )
        want = references.swiglu(exact(a * spread(scale_a, a.shape), b * spread(scale_b, b.shape)))
        np.testing.assert_allclose(device.get(got).astype(float), want, rtol=1e-2, atol=1e-2)


# --- epilogue -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation, out_dtype, addend",
    [
        (None, "bfloat16", BFLOAT16),
        ("gelu", "bfloat16", BFLOAT16),
        ("swiglu", "bfloat16", BFLOAT16),
        ("silu", "float32", FLOAT32),
    ],
    ids=str,
)
def test_epilogue(device, rng, activation, out_dtype, addend):
    M, N, K = 40, 48, 64
    a, b = integers(rng, (M, K), E4M3), integers(rng, (K, N), E5M2)
    c, bias = rng.standard_normal((M, N)).astype(addend), rng.standard_normal(N).astype(np.float32)
    residual = rng.standard_normal((M, N // 2 if activation == "swiglu" else N)).astype(addend)
    rows = powers(rng, (M, 1))
    terms = {"alpha": 0.125, "beta": -1.5, "activation": activation}
    want = references.gemm(a * rows.astype(float), b, c, bias=bias, residual=residual, **terms)
    put = device.put
    terms |= {"bias": put(bias), "residual": put(residual), "scale_a": put(rows)}
    got = gemm(put(a), put(b), put(c), out_dtype=out_dtype, **terms)
    tolerance = 1e-2 if out_dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(device.get(got).astype(float), want, rtol=tolerance, atol=tolerance)


def test_nothing_read_where_the_factor_is_zero(device, rng):
    a, b = device.put(np.full((9, 32), np.nan, E4M3)), device.put(np.full((32, 8), np.nan, E4M3))
    c, zero = integers(rng, (9, 8), BFLOAT16), device.put(np.zeros((), np.float32))
    for given in ({"alpha": 0.0}, {"alpha": zero}, {"scale_a": 0.0}, {"scale_b": zero}):
        same(device, gemm(a, b, device.put(c), beta=2.0, **given), 2 * c.astype(float))


@pytest.mark.parametrize(
    "dtype, shape_a, shape_b",
    [
        (E4M3, (), ()),
        (E4M3, (1, 1), (1, 1)),
        (E4M3, (9, 1), (1, 24)),
        (E4M3, (9, 2), (2, 1)),
        (E4M3, (9, 2), (2, 24)),
        (INT8, (1, 1), (1, 24)),
        (INT8, (9, 1), (1, 1)),
    ],
    ids=str,
)
def test_scales_take_no_part_without_alpha_or_k(device, rng, dtype, shape_a, shape_b):
    """NaN in scales of any kind, numbers too, changes nothing where `alpha` or K is 0."""
    c, zero = integers(rng, (9, 24), BFLOAT16), device.put(np.zeros((), np.float32))
    for K, alpha in ((160, 0.0), (160, zero), (0, 1.0)):
        a, b = np.ones((9, K), dtype), np.ones((K, 24), dtype)
        if dtype != INT8:
            a[...], b[...] = np.nan, np.nan
        scale_a, scale_b = np.nan, np.nan
        if shape_a:
            blocks = {2: -(-K // 128)}  # along K
            scale_a, scale_b = (
                device.put(np.full([blocks.get(n, n) for n in shape], np.nan, np.float32))
                for shape in (shape_a, shape_b)
            )
        operands = laid_out(device, a, "row"), laid_out(device, b, "col")
        same(device, gemm(*operands, alpha=alpha, scale_a=scale_a, scale_b=scale_b), np.zeros((9, 24)))
        got = gemm(*operands, device.put(c), alpha=alpha, beta=2.0, scale_a=scale_a, scale_b=scale_b)
        same(device, got, 2 * c.astype(float))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_float8_results(device, dtype):
    """Rounded to nearest even; what is too large becomes the largest number, NaN stays NaN."""
    largest = float(ml_dtypes.finfo(dtype).max)
    values = np.array([0, 1, -1.0625, 2**-9, 448, 464, 465, 57344, 61440, 1e6, -1e6, np.inf, -np.inf, np.nan, 0.1, 17])
    want = np.clip(values, -largest, largest).astype(dtype)
    a, b = np.zeros((16, 16), E4M3), np.zeros((16, 5), E4M3)
    residual = np.tile(values.astype(np.float32)[:, None], (1, 5))
    for scale in (None, 0.25, device.put(np.array(0.25, np.float32))):
        factor = 1 if scale is None else 4
        got = gemm(
            *map(device.put, (a, b)), residual=device.put(residual * np.float32(factor)), scale_d=scale, out_dtype=dtype
        )
        assert got.dtype == dtype
        np.testing.assert_array_equal(device.get(got).astype(float), np.tile(want.astype(float)[:, None], (1, 5)))


# --- plans, views, checks -------------------------------------------------------------------------------------------


def test_plan(device, rng):
    """Scales are those of the plan, read anew in every call; a plan keeps the memory of its copies."""
    a, b = integers(rng, (19, 40), E4M3), integers(rng, (40, 24), E5M2)
    scale, bias = powers(rng, 24), integers(rng, 24, BFLOAT16)
    on_device = device.put(scale.copy())
    op = Gemm(19, 24, 40, E4M3, scale_a=0.5, scale_b=on_device, bias=device.put(bias), out_dtype="float32")
    for factor in (1, 2):
        on_device[...] = device.put(scale * np.float32(factor))
        got = op(device.put(a), device.put(b))
        same(device, got, factor * 0.5 * exact(a, b * scale.astype(float)) + bias.astype(float))


def test_out_over_an_operand(device, rng):
    """The result is computed aside where it overlaps what is read."""
    a, b = integers(rng, (32, 32), INT8), integers(rng, (32, 8), INT8)
    memory = device.put(np.zeros(32 * 32, np.uint8))
    view = memory.view(INT8).reshape(32, 32)
    view[...] = device.put(a)
    out = memory.view(np.int32)[: 32 * 8].reshape(32, 8)
    gemm(view, device.put(b), out=out)
    np.testing.assert_array_equal(device.get(out), a.astype(int) @ b.astype(int))


WRONG = [
    (TypeError, "b must have dtype float8_e4m3fn or float8_e5m2, got int8", {"b": np.ones((32, 8), INT8)}),
    (TypeError, "a must have dtype float8_e4m3fn, float8_e5m2 or int8, got uint8", {"a": np.ones((9, 32), np.uint8)}),
    (TypeError, "out_dtype must be bfloat16 or", {"out_dtype": "int32"}),
    (TypeError, "scale_a must have dtype float32", {"scale_a": np.ones(9)}),
    (ValueError, r"scale_a must have one entry or shape \(9,\) for rows", {"scale_a": np.ones(8, np.float32)}),
    (ValueError, r"scale_b must have one entry or shape \(8,\) for columns", {"scale_b": np.ones((2, 8), np.float32)}),
    (ValueError, "scale_b must have batch axes", {"scale_b": np.ones((2, 1, 8), np.float32)}),
    (ValueError, "scale_d must be None for a bfloat16 result", {"scale_d": 2.0}),
    (ValueError, r"scale_d must have one entry, got shape \(8,\)", {"scale_d": np.ones(8, FLOAT32), "out_dtype": E4M3}),
    (ValueError, "split_k must be None for 8-bit operands", {"split_k": 2}),
    (ValueError, "precision must be None for float8_e4m3fn", {"precision": "tf32"}),
    (ValueError, "zero_b must be None without b_dtype", {"zero_b": np.ones(8, np.float32)}),
    (TypeError, "bias must have dtype", {"bias": np.ones(8, np.float64)}),
    (
        TypeError,
        "c, bias and residual must share one 16-bit dtype",
        {"bias": np.ones(8, np.float16), "residual": np.ones((9, 8), BFLOAT16)},
    ),
]


@pytest.mark.parametrize("kind, message, given", WRONG, ids=[message for _, message, _ in WRONG])
def test_checks(plain, kind, message, given):
    arguments = {"a": np.ones((9, 32), E4M3), "b": np.ones((32, 8), E4M3), **given}
    arguments = {name: plain.put(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    with pytest.raises(kind, match=f"gemm: {message}"):
        gemm(**arguments)


def test_checks_of_int8(plain):
    a, b = plain.put(np.ones((9, 300), INT8)), plain.put(np.ones((300, 8), INT8))
    ones = plain.put(np.ones((9, 3), np.float32))
    with pytest.raises(ValueError, match="scale_a must have one entry or one for each row"):
        gemm(a, b, scale_a=ones)
    for given in ({"scale_a": 0.5}, {"scale_b": ones[0, :1]}, {"alpha": 1.5}, {"alpha": 2**25}, {"activation": "relu"}):
        with pytest.raises(ValueError, match="gemm: out_dtype must be bfloat16, float16, float32 where"):
            gemm(a, b, out_dtype="int32", **given)
    with pytest.raises(TypeError, match="bias must have dtype int32, got float32"):
        gemm(a, b, bias=plain.put(np.ones(8, np.float32)))


def test_scales_belong_to_8_bits(plain):
    a, b = plain.put(np.ones((9, 32), np.float16)), plain.put(np.ones((32, 8), np.float16))
    for name in ("scale_a", "scale_b", "scale_d"):
        with pytest.raises(ValueError, match=f"gemm: {name} must be None without b_dtype or operands of 8 bits"):
            gemm(a, b, **{name: 1.0})
    with pytest.raises(ValueError, match="Gemm: scale_a must be None"):
        Gemm(9, 8, 32, "float16", scale_a=1.0)


@pytest.fixture
def plain():
    """Where a call that fails before anything is launched runs: anywhere."""
    if has_gpu():
        import cupy

        yield Device(cupy)
    else:
        with rawops.emulate():
            yield Device(np)


# --- the Hopper kernel ----------------------------------------------------------------------------------------------

TILES = [(128, 256, 1, False), (128, 128, 1, True), (64, 256, 1, False), (64, 192, 2, False), (64, 128, 8, False)]
# With sums beside the tensor cores: block_m, block_n, cluster; scales of a and b.
WHOLE, BLOCKS, COLUMNS = ((1, 1), (1, 1)), ((136, 9), (9, 3)), ((136, 9), (9, 280))
SUMMED = [
    (128, 160, 1, WHOLE),
    (64, 128, 2, WHOLE),
    (128, 192, 1, BLOCKS),
    (128, 160, 1, BLOCKS),
    (128, 96, 1, BLOCKS),
    (64, 128, 2, BLOCKS),
    (128, 192, 1, COLUMNS),
    (64, 112, 1, COLUMNS),
    (128, 128, 8, COLUMNS),
]


@pytest.mark.parametrize("block_m, block_n, cluster, ping_pong", TILES)
@pytest.mark.parametrize("dtype", [E4M3, INT8], ids=str)
def test_tiles(hopper, force, rng, dtype, block_m, block_n, cluster, ping_pong):
    if dtype == INT8 and cluster > 1:
        pytest.skip("clusters add up float32")
    force(block_n, ping_pong, block_m=block_m, cluster=cluster)
    a, b = integers(rng, (136, 1096), dtype), integers(rng, (1096, block_n + 72), dtype)
    out = hopper.guarded((136, block_n + 72), BFLOAT16)
    precision = None if dtype == INT8 else "fast"
    gemm(laid_out(hopper, a, "row"), laid_out(hopper, b, "col"), out=out, precision=precision)
    same(hopper, out, exact(a, b))


@pytest.mark.parametrize("block_m, block_n, cluster, forms", SUMMED)
def test_tiles_with_sums(hopper, force, rng, block_m, block_n, cluster, forms):
    force(block_n, block_m=block_m, cluster=cluster)
    a, b = integers(rng, (136, 1096), E4M3), integers(rng, (1096, 280), E5M2)
    scale_a, scale_b = (powers(rng, shape) for shape in forms)
    out = hopper.guarded((136, 280), FLOAT32)
    operands = laid_out(hopper, a, "row"), laid_out(hopper, b, "col")
    gemm(*operands, scale_a=hopper.put(scale_a), scale_b=hopper.put(scale_b), out=out)
    same(hopper, out, exact(a * spread(scale_a, a.shape), b * spread(scale_b, b.shape)))


@pytest.mark.parametrize("block_n", [192, 160, 128, 32])
def test_consumers_with_half_of_the_columns_each(hopper, force, rng, block_n):
    """Their results leave in boxes of 32, 16 and 64 columns, with a scale for each row and column."""
    force(block_n)
    N = block_n + 72
    a, b = integers(rng, (136, 300), E4M3), integers(rng, (300, N), E4M3)
    scale_a, scale_b, bias = powers(rng, (136, 1)), powers(rng, (1, N)), integers(rng, N, BFLOAT16)
    operands = laid_out(hopper, a, "row"), laid_out(hopper, b, "col")
    scales = {"scale_a": hopper.put(scale_a), "scale_b": hopper.put(scale_b)}
    want = exact(a * scale_a.astype(float), b * scale_b.astype(float))
    out = hopper.guarded((136, N), BFLOAT16)
    gemm(*operands, **scales, out=out)
    same(hopper, out, want)
    gemm(*operands, **scales, bias=hopper.put(bias), activation="relu", out=out)
    same(hopper, out, np.maximum(want + bias.astype(float), 0))


@pytest.mark.parametrize("block_m, block_n", [(128, 176), (64, 144), (128, 112)])
def test_blocks_of_columns_begin_anywhere_in_a_tile(hopper, force, rng, block_m, block_n):
    """A tile has columns of up to three blocks of 128, from any multiple of 16 on."""
    force(block_n, block_m=block_m)
    M, N, K = 40, 8 * block_n - 8, 256
    a, b = integers(rng, (M, K), E4M3), integers(rng, (K, N), E4M3)
    scale_a, scale_b = powers(rng, (M, 2)), powers(rng, (2, -(-N // 128)))
    out = hopper.guarded((M, N), FLOAT32)
    operands = laid_out(hopper, a, "row"), laid_out(hopper, b, "col")
    gemm(*operands, scale_a=hopper.put(scale_a), scale_b=hopper.put(scale_b), out=out)
    same(hopper, out, exact(a * spread(scale_a, a.shape), b * spread(scale_b, b.shape)))


@pytest.mark.skipif(has_gpu(), reason="the emulator's orders of completion")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("columns", [0, 2, 136], ids=["whole", "blocks", "columns"])
def test_any_order_of_completion(force, rng, columns, seed):
    """Copies and products that land late, early or with the warps in another order: the same bits."""
    force(96, stages=2 + seed, blocks=1 + seed)
    a, b = (rng.standard_normal(shape).astype(E4M3) for shape in ((136, 400), (400, 136)))
    scales = {"scale_a": powers(rng, (136, 4)), "scale_b": powers(rng, (4, columns))} if columns else {}
    results = []
    for completion in ("late", "early", "random"):
        with rawops.emulate(arch="sm_90a", completion=completion, seed=seed) as emu:
            results.append(gemm(a, b.T.copy().T, out_dtype="float32", **scales))
        assert "gemm_8bit_sm90" in emu.report[0].kernel
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))


@pytest.mark.gpu
@pytest.mark.parametrize("M, N", [(64, 4096), (256, 2048), (1000, 1024)])
def test_a_launch_waits_for_the_one_before(hopper, rng, M, N):
    """In a graph with nothing else between them: each reads what the last one wrote, and writes over what that read."""
    import cupy

    weights = [hopper.put((rng.standard_normal((N, N)) / N**0.5).astype(E4M3)).T for _ in range(4)]
    x = hopper.put(rng.standard_normal((M, N)).astype(E4M3))
    y, z = (hopper.put(np.zeros((M, N), E4M3)) for _ in range(2))
    op = Gemm(M, N, N, "float8_e4m3fn", out_dtype="float8_e4m3fn", alpha=2.0)

    def chain(wait) -> None:
        inputs = x
        for i in range(24):
            out = (y, z)[i % 2]
            op(inputs, weights[i % 4], out=out)
            wait()
            inputs = out

    with cupy.cuda.Stream(non_blocking=True) as stream:
        chain(stream.synchronize)
        want = z.view("uint8").get(stream)
        assert want.any()
        stream.begin_capture()
        chain(lambda: None)
        graph = stream.end_capture()
        for _ in range(10):
            y.view("uint8").fill(0), z.view("uint8").fill(0)
            graph.launch()
            np.testing.assert_array_equal(z.view("uint8").get(stream), want)


@pytest.mark.parametrize(
    "M, N, K, ahead", [(16, 28672, 4096, 8), (64, 8192, 8192, 4), (1, 4096, 4096, 4), (65, 4096, 4096, 0)]
)
def test_few_rows_ask_for_an_eighth_ahead(M, N, K, ahead):
    """Of what a block reads, and for no more stages than there are."""
    problem = kernels.BytesProblem(M, N, K, promotion=PROMOTED)
    assert asked_ahead_of_bytes(problem, kernels.select_config(problem, **H200)) == ahead
    batches = kernels.BytesProblem(M, N, K, batches=2, promotion=PROMOTED)
    assert asked_ahead_of_bytes(batches, kernels.select_config(batches, **H200)) == 0


@pytest.mark.parametrize("alpha", [1.0, 0.0])
@pytest.mark.parametrize("dtype, cluster", [(E4M3, 1), (E4M3, 2), (INT8, 1)])
def test_what_is_asked_for_ahead_changes_nothing(hopper, force, monkeypatch, rng, dtype, cluster, alpha):
    """More than there is of K, of columns and of tiles: a block may have none."""
    monkeypatch.setattr(_gemm_8bit, "asked_ahead_of_bytes", lambda *_: 7)
    force(64, block_m=64, cluster=cluster, blocks=3)
    a, b, c = integers(rng, (5, 400), dtype), integers(rng, (400, 72), dtype), integers(rng, (5, 72), FLOAT32)
    put = hopper.put
    scales = {"scale_a": put(powers(rng, ())), "scale_b": put(powers(rng, ()))}
    got = gemm(put(a), laid_out(hopper, b, "col"), put(c), out_dtype="float32", alpha=alpha, beta=1.0, **scales)
    factor = alpha * float(hopper.get(scales["scale_a"])) * float(hopper.get(scales["scale_b"]))
    same(hopper, got, factor * exact(a, b) + c)


def test_every_choice_fits():
    """Registers hold both sets of accumulators."""
    for size, promotion, parts in itertools.product((1, 64, 1000, 8192), range(4), (1, 2)):
        for M, finish in itertools.product((1, 130, 4096), (sm90.PLAIN, sm90.STAGED, sm90.DIRECT)):
            problem = kernels.BytesProblem(M, size, size, finish=finish, parts=parts, promotion=promotion)
            config = kernels.select_config(problem, **H200)
            assert config.shared_bytes(problem) <= H200["max_shared_bytes"]
            assert config.block_n in kernels.SM90.choices["block_n"]
            if promotion:
                assert config.block_n <= 192 and not config.ping_pong
