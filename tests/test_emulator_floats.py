"""Floating-point PTX instructions against exact arithmetic: rounding, NaN, saturation, comparisons."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from emulated_ptx import MODES, execute, hard_floats, rounded, same_bits
from emulation import launch


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fma_add_mul_round_once(dtype, mode):
    rng = np.random.default_rng(1)
    n = 3000
    a, b, c = (hard_floats(rng, dtype, n) for _ in range(3))
    a[:4], b[:4], c[:4] = 1 + 2.0**-12, 1 + 2.0**-12, [2.0**-60, -(2.0**-60), 2.0**-80, 0]
    with np.errstate(over="ignore"):
        c[4:300] = -(a[4:300].astype(np.float64) * b[4:300]).astype(dtype)  # cancellation
    c[~np.isfinite(c)] = 1
    kind = f"f{8 * np.dtype(dtype).itemsize}"
    outs = execute(
        f"fma.{mode}.{kind} $0, $3, $4, $5; add.{mode}.{kind} $1, $3, $5; mul.{mode}.{kind} $2, $3, $4;",
        [dtype] * 3, a, b, c,
    )  # fmt: skip
    fractions = [[Fraction(float(x)) for x in v] for v in (a, b, c)]
    exact = [(x * y + z, x + z, x * y) for x, y, z in zip(*fractions, strict=True)]
    for which, actual in enumerate(outs):
        keep = [i for i in range(n) if exact[i][which] != 0]
        expected = [rounded(exact[i][which], dtype, mode) for i in keep]
        same_bits(actual[keep], expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_div_sqrt_rcp_round_once(dtype, mode):
    rng = np.random.default_rng(2)
    n = 500
    a, b = (rng.integers(1, 1 << 20, n) * 2.0 ** rng.integers(-60, 60, n) for _ in range(2))
    a, b = a.astype(dtype), -b.astype(dtype)
    kind = f"f{8 * np.dtype(dtype).itemsize}"
    quotient, inverse, root = execute(
        f"div.{mode}.{kind} $0, $3, $4; rcp.{mode}.{kind} $1, $4; sqrt.{mode}.{kind} $2, $3;",
        [dtype] * 3, a, b,
    )  # fmt: skip
    x, y = ([Fraction(float(v)) for v in values] for values in (a, b))
    same_bits(quotient, [rounded(p / q, dtype, mode) for p, q in zip(x, y, strict=True)])
    same_bits(inverse, [rounded(1 / q, dtype, mode) for q in y])
    for x, r in zip(a, root, strict=True):
        x, r = Fraction(float(x)), dtype(r)
        below, above = (Fraction(float(np.nextafter(r, dtype(t)))) for t in (0, np.inf))
        r = Fraction(float(r))
        if mode == "rn":
            assert ((below + r) / 2) ** 2 <= x <= ((above + r) / 2) ** 2
        elif mode == "rp":
            assert below**2 < x <= r**2
        else:
            assert r**2 <= x < above**2


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_arithmetic_rounds_once(kind):
    rng = np.random.default_rng(3)
    n = 2000
    if kind == "f16":
        a, b, c = (hard_floats(rng, np.float16, n) for _ in range(3))
        dtype, exact_dtype = np.float16, np.float16
    else:
        a, b, c = (hard_floats(rng, np.float32, n).astype(ml_dtypes.bfloat16) for _ in range(3))
        dtype, exact_dtype = np.uint16, None
    outs = execute(
        f"fma.rn.{kind} $0, $3, $4, $5; add.{kind} $1, $3, $5; mul.{kind} $2, $3, $4;",
        [dtype] * 3, *(v.view(dtype) for v in (a, b, c)),
    )  # fmt: skip
    fractions = [[Fraction(float(x)) if np.isfinite(float(x)) else None for x in v] for v in (a, b, c)]
    for i in range(n):
        x, y, z = (f[i] for f in fractions)
        if None in (x, y, z):
            continue
        for which, exact in enumerate((x * y + z, x + z, x * y)):
            if exact == 0:
                continue
            if exact_dtype is not None:
                assert outs[which][i] == rounded(exact, np.float16, "rn")
            else:
                same_bits(outs[which][i : i + 1], [bf16_bits(exact)])


def bf16_bits(exact: Fraction) -> int:
    """bfloat16 is float32 with 8 bits: take the two neighbours and choose."""
    towards_zero = int(rounded(exact, np.float32, "rz").view(np.uint32)) >> 16
    candidates = []
    for bits in (towards_zero, towards_zero + 1):
        value = np.uint32(bits << 16).view(np.float32)
        beyond = Fraction(2) ** 128 * (1 if value > 0 else -1)
        candidates.append((bits, beyond if np.isinf(value) else Fraction(float(value))))
    (low, x), (high, y) = candidates
    if abs(exact - x) == abs(exact - y):
        return low if low % 2 == 0 else high
    return low if abs(exact - x) < abs(exact - y) else high


NANS = np.array([np.nan, 1, np.inf, -np.inf, 0.0, -0.0, 3], np.float32)


def test_nans_are_canonical_and_min_max_drop_them():
    a, b = (x.ravel() for x in np.meshgrid(NANS, NANS))
    a = a.copy()
    a.view(np.uint32)[np.isnan(a)] = 0xFFC12345
    outs = execute(
        "add.f32 $0, $7, $8; mul.f32 $1, $7, $8; min.f32 $2, $7, $8; max.f32 $3, $7, $8;"
        "min.NaN.f32 $4, $7, $8; max.NaN.f32 $5, $7, $8; fma.rn.f32 $6, $7, $8, $8;",
        [np.float32] * 7, a, b,
    )  # fmt: skip
    for out in outs:
        assert (out.view(np.uint32)[np.isnan(out)] == 0x7FFFFFFF).all()
    either, both = np.isnan(a) | np.isnan(b), np.isnan(a) & np.isnan(b)
    np.testing.assert_array_equal(np.isnan(outs[2]), both)
    np.testing.assert_array_equal(np.isnan(outs[3]), both)
    np.testing.assert_array_equal(np.isnan(outs[4]), either)
    np.testing.assert_array_equal(np.isnan(outs[5]), either)
    zeros = (a == 0) & (b == 0)
    np.testing.assert_array_equal(np.signbit(outs[2][zeros]), np.signbit(a[zeros]) | np.signbit(b[zeros]))
    np.testing.assert_array_equal(np.signbit(outs[3][zeros]), np.signbit(a[zeros]) & np.signbit(b[zeros]))


COMPARISONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: (a < b) | (a > b), "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("name", [*COMPARISONS, *(c + "u" for c in COMPARISONS), "num", "nan"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_float_comparisons(name, dtype):
    a, b = (x.ravel().astype(dtype) for x in np.meshgrid(NANS, NANS))
    either = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        expected = either == (name == "nan")
    elif name in COMPARISONS:
        expected = COMPARISONS[name](a, b)
    else:
        expected = COMPARISONS[name[:-1]](a, b) | either
    kind = f"f{8 * np.dtype(dtype).itemsize}"
    actual, other, combined = execute(
        f"setp.{name}.{kind} %p1|%p2, $3, $4; selp.u32 $0, 1, 0, %p1; selp.u32 $1, 1, 0, %p2;"
        f"setp.gt.f32 %p3, 0f3F800000, 0f00000000; setp.{name}.xor.{kind} %p4, $3, $4, %p3; selp.u32 $2, 1, 0, %p4;",
        [np.uint32] * 3, a, b,
    )  # fmt: skip
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(other, ~expected)
    np.testing.assert_array_equal(combined, ~expected)


def test_set_makes_numbers():
    a = np.array([1, 2, np.nan, 4], np.float32)
    b = np.array([2, 1, 3, 4], np.float32)
    integer, number, same = execute(
        "set.lt.u32.f32 $0, $3, $4; set.geu.f32.f32 $1, $3, $4; set.eq.s32.f32 $2, $3, $4;",
        [np.uint32, np.float32, np.int32], a, b,
    )  # fmt: skip
    np.testing.assert_array_equal(integer, [0xFFFFFFFF, 0, 0, 0])
    np.testing.assert_array_equal(number, [0, 1, 1, 1])
    np.testing.assert_array_equal(same, [0, 0, 0, -1])


def test_flush_and_saturate():
    a = np.array([1e-40, -1e-40, 2, -3, np.nan, 0.5, 1e-38, np.inf], np.float32)
    b = np.array([1, 1, 3, 1, 1, 0.5, 1e-38, -np.inf], np.float32)
    flushed, saturated, product = execute(
        "add.ftz.f32 $0, $3, 0f00000000; add.sat.f32 $1, $3, $4; mul.ftz.f32 $2, $3, $4;", [np.float32] * 3, a, b
    )
    same_bits(flushed, np.where(np.isnan(a), np.uint32(0x7FFFFFFF).view(np.float32), [0, 0, 2, -3, 0, 0.5, 0, np.inf]))
    same_bits(saturated, np.array([1, 1, 1, 0, 0, 1, a[6] + b[6], 0], np.float32))
    assert product[6] == 0 and product[2] == 6


def test_predicates_of_floats():
    a = np.array([0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, -1e-40], np.float32)
    names = ["finite", "infinite", "number", "notanumber", "normal", "subnormal"]
    text = "".join(f"testp.{m}.f32 %p1, $6; selp.u32 ${i}, 1, 0, %p1;" for i, m in enumerate(names))
    outs = execute(text, [np.uint32] * 6, a)
    tiny = (np.abs(a) < np.finfo(np.float32).tiny) & (a != 0)
    finite = np.isfinite(a)
    expected = [finite, np.isinf(a), ~np.isnan(a), np.isnan(a), finite & ~tiny & (a != 0), tiny]
    for actual, values in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(actual, values)
    signed = execute("copysign.f32 $0, $1, $2;", [np.float32], a, np.float32(3) + np.zeros_like(a))
    same_bits(signed, np.copysign(np.float32(3), a))


APPROXIMATE = {
    "ex2": np.exp2, "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "rsqrt": lambda a: 1 / np.sqrt(a),
}  # fmt: skip


@pytest.mark.parametrize(("name", "function"), APPROXIMATE.items())
def test_approximate_functions(name, function):
    a = np.linspace(0.01, 30, 500).astype(np.float32)
    out = execute(f"{name}.approx.f32 $0, $1;", [np.float32], a)
    np.testing.assert_array_equal(out, function(a.astype(np.float64)).astype(np.float32))


def test_rsqrt_of_doubles_is_whole_without_ftz():
    a = np.linspace(0.01, 30, 500)
    whole, rough = execute("rsqrt.approx.f64 $0, $2; rsqrt.approx.ftz.f64 $1, $2;", [np.float64] * 2, a)
    np.testing.assert_array_equal(whole, 1 / np.sqrt(a))
    np.testing.assert_allclose(rough, whole, rtol=2.0**-19)
    assert (rough != whole).any()


_HALF_FUNCTIONS = {
    "exp": np.exp,
    "exp2": np.exp2,
    "exp10": lambda x: 10**x,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@pytest.mark.parametrize("pairs", [False, True])
def test_functions_of_the_half_header(pairs):
    """cuda_fp16.h declares registers in its assembly without a blank: ``.reg.b32 f``."""
    kind, prefix = ("__half2", "h2") if pairs else ("__half", "h")
    lines = "\n".join(f"    y[n * {i} + t] = {prefix}{name}(x[t]);" for i, name in enumerate(_HALF_FUNCTIONS))
    source = f"""
#include <cuda_fp16.h>
extern "C" __global__ void k(const {kind}* x, {kind}* y, int n) {{
    const int t = blockIdx.x * 32 + threadIdx.x;
{lines}
}}
"""
    n = 256
    x = np.exp(np.random.default_rng(1).uniform(-3, 1, n)).astype(np.float16)
    y = np.zeros((len(_HALF_FUNCTIONS), n), np.float16)
    threads = n // 2 if pairs else n
    launch(source, threads // 32, 32, x, y, np.int32(threads))
    for got, (name, function) in zip(y, _HALF_FUNCTIONS.items(), strict=True):
        exact = function(x.astype(np.float64))
        ulp = np.spacing(np.abs(exact).astype(np.float16)).astype(np.float64)
        assert (np.abs(got - exact) <= ulp).all(), name
