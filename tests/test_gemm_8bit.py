"""Products of float8 and int8: exact over sizes, layouts and scales; what is read; results of 8 bits; the checks."""

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest
from bytes_operands import BFLOAT16, E4M3, E5M2, FLOAT32, INT8, exact, integers, laid_out, powers, same, spread
from conftest import Device

import rawops
from rawops.gemm import Gemm, gemm
from rawops.testing import has_gpu, references

PAIRS = [*itertools.product((E4M3, E5M2), repeat=2), (INT8, INT8)]
SIZES = [(1, 1, 1), (2, 3, 17), (7, 65, 8), (17, 8, 133), (63, 129, 64), (64, 17, 65), (129, 2, 127), (133, 192, 63)]


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


ONE = np.ones(1, np.float32)
ANY = "float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2 or int8"
WRONG = [
    (TypeError, f"a must have dtype {ANY}, got int32", {"a": np.ones((9, 32), np.int32)}),
    (TypeError, "b must have dtype float8_e4m3fn or float8_e5m2, got int8", {"b": np.ones((32, 8), INT8)}),
    *((TypeError, f"a must have dtype {ANY}, got {name}", {"a": np.ones((9, 32), name)}) for name in ("uint8", "bool")),
    (TypeError, "out_dtype must be bfloat16 or", {"out_dtype": "int32"}),
    (TypeError, "scale_a must have dtype float32", {"scale_a": np.ones(9)}),
    (ValueError, r"scale_a must have one entry or shape \(9,\) for rows", {"scale_a": np.ones(8, np.float32)}),
    (ValueError, r"scale_b must have one entry or shape \(8,\) for columns", {"scale_b": np.ones((2, 8), np.float32)}),
    (ValueError, "scale_b must have batch axes", {"scale_b": np.ones((2, 1, 8), np.float32)}),
    (ValueError, "scale_d must be None for a bfloat16 result, got 2.0. It is for float8", {"scale_d": 2.0}),
    (ValueError, "scale_d must be None for a float32 result, got one", {"scale_d": ONE, "out_dtype": "float32"}),
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


def test_a_number_for_a_result_without_scale(plain):
    """It is refused as it was given, before an array is made of it."""
    a, b = plain.put(np.ones((9, 32), E4M3)), plain.put(np.ones((32, 8), E4M3))
    out, half = plain.put(np.ones((9, 8), E4M3)), plain.put(np.ones((9, 32), np.float16))
    plan = Gemm(9, 8, 32, E4M3, scale_d=2.0)
    for call, kind, message in [
        (lambda: plan(a, b), ValueError, "scale_d must be None for a bfloat16 result, got 2.0"),
        (lambda: plan(half, b, out=out), TypeError, "a must have dtype float8_e4m3fn, got float16"),
        (lambda: plan(None, b), TypeError, "a must be an array, got None"),
        (lambda: gemm(a, b, scale_d=2.0, out_dtype="int8"), TypeError, "out_dtype must be bfloat16 or"),
        (lambda: gemm(a, b, scale_d=2.0, out=half), ValueError, "scale_d must be None for a float16 result, got 2.0"),
    ]:
        with pytest.raises(kind, match=message):
            call()


WRONG_PLANS = [
    (ValueError, "out_dtype must be .* where activation is given, got int32", "int8", {"activation": "relu"}),
    (ValueError, "out_dtype must be .* where scale_b is given, got int32", "int8", {"scale_b": ONE}),
    (ValueError, "out_dtype must be .* where alpha .* is 1.5, which is no whole", "int8", {"alpha": 3, "scale_a": 0.5}),
    (ValueError, "out_dtype must be .* where beta .* is an array", "int8", {"beta": np.ones((), np.float32)}),
    (TypeError, "bias must have dtype int32, got float32", "int8", {"bias": np.ones(8, np.float32)}),
    (ValueError, "scale_b must have one entry or one for each row", "int8", {"scale_b": np.ones((3, 8), np.float32)}),
    (ValueError, "scale_d must be None for a float16 result, got 2.0", E4M3, {"scale_d": 2, "out_dtype": "float16"}),
    (ValueError, "scale_d must be None for a float16 result, got one", E4M3, {"scale_d": ONE, "out_dtype": "float16"}),
    (TypeError, "scale_a must have dtype float32, got float64", E4M3, {"scale_a": np.ones(9)}),
    (ValueError, r"scale_b must have one entry or shape \(8,\)", E4M3, {"scale_b": np.ones(9, np.float32)}),
]


@pytest.mark.parametrize("kind, message, dtype, given", WRONG_PLANS, ids=[message for _, message, *_ in WRONG_PLANS])
def test_checks_of_a_plan(plain, kind, message, dtype, given):
    """What no call can make right is refused when the plan is made."""
    given = {name: plain.put(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    given = {"out_dtype": "int32"} | given if dtype == "int8" else given
    with pytest.raises(kind, match=f"Gemm: {message}"):
        Gemm(9, 8, 300, dtype, **given)


def test_plans_that_a_call_makes_right(plain):
    a, b = plain.put(np.ones((9, 32), INT8)), plain.put(np.ones((32, 8), INT8))
    op = Gemm(9, 8, 32, INT8, activation="relu", alpha=3, scale_a=0.5, scale_d=None)
    same(plain, op(a, b), np.full((9, 8), 48))
    with pytest.raises(ValueError, match=r"Gemm: out_dtype must be .* where activation is given"):
        op(a, b, out=plain.put(np.ones((9, 8), np.int32)))
    op = Gemm(9, 8, 32, INT8, alpha=4, scale_a=0.5, out_dtype="int32")
    same(plain, op(a, b), np.full((9, 8), 64))
    Gemm(9, 8, 32, INT8, scale_a=plain.put(np.ones((3, 9, 1), np.float32)))  # the call has the batch axes


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


def test_an_array_that_does_not_tell_its_type(monkeypatch):
    """One of another library counts as what it is converted to."""
    module = sys.modules[gemm.__module__]
    for dtype in (np.int8, np.float16):
        monkeypatch.setattr(module.arrays, "take", lambda function, a, dtype=dtype: ([np.zeros(1, dtype)], None))
        assert module._is_8bit(object()) == (dtype is np.int8)
