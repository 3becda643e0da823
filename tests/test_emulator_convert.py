"""Conversions and moves of PTX against exact arithmetic: rounding, clamping, packed types."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from emulated_ptx import MODES, execute, hard_floats, hard_integers, rounded, same_bits


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("s32", np.int32), ("u32", np.uint32), ("s64", np.int64), ("u16", np.uint16)]
)
def test_float_to_integer_clamps(mode, kind, dtype):
    values = [0.5, 1.5, -0.5, -1.5, 2.5, 1e10, -1e10, np.inf, -np.inf, np.nan, 3.7, -3.2, 1e20, 65535.7]
    a = np.array(values, np.float32)
    out = execute(f"cvt.{mode}.{kind}.f32 $0, $1;", [dtype], a)
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    limits = np.iinfo(dtype)
    for x, r in zip(a, out, strict=True):
        if np.isnan(x):
            assert int(r) == (-(1 << 63) if kind == "s64" else 0)
        elif np.isinf(x):
            assert int(r) == (limits.max if x > 0 else limits.min)
        else:
            assert int(r) == min(max(int(function(np.float64(x))), limits.min), limits.max)


def test_integer_to_float_and_between_integers():
    rng = np.random.default_rng(8)
    a = hard_integers(rng, np.int64)
    for mode in MODES:
        single, double = execute(f"cvt.{mode}.f32.s64 $0, $2; cvt.{mode}.f64.s64 $1, $2;", [np.float32, np.float64], a)
        nonzero = a != 0
        same_bits(single[nonzero], [rounded(Fraction(int(x)), np.float32, mode) for x in a[nonzero]])
        same_bits(double[nonzero], [rounded(Fraction(int(x)), np.float64, mode) for x in a[nonzero]])
    narrow, saturated, wide = execute(
        "cvt.s8.s64 $0, $3; cvt.sat.u16.s64 $1, $3; cvt.s64.s16 $2, $3;", [np.int32, np.uint16, np.int64], a
    )
    np.testing.assert_array_equal(narrow, a.astype(np.int8))
    np.testing.assert_array_equal(saturated, np.clip(a, 0, 65535))
    np.testing.assert_array_equal(wide, a.astype(np.int16))


def test_sixteen_bit_conversions():
    rng = np.random.default_rng(9)
    a = hard_floats(rng, np.float32, 3000)
    a[:4] = [np.nan, np.inf, -np.inf, 65519.996]
    half, bfloat, relu = execute(
        "cvt.rn.f16.f32 $0, $3; cvt.rn.bf16.f32 $1, $3; cvt.rn.relu.f16.f32 $2, $3;",
        [np.float16, np.uint16, np.float16], a,
    )  # fmt: skip
    number = ~np.isnan(a)
    with np.errstate(over="ignore"):
        same_bits(half[number], a[number].astype(np.float16))
    same_bits(bfloat[number], a[number].astype(ml_dtypes.bfloat16).view(np.uint16))
    assert half.view(np.uint16)[0] == bfloat[0] == 0x7FFF
    with np.errstate(over="ignore"):
        same_bits(relu[number], np.where(a[number] > 0, a[number], 0).astype(np.float16))
    b = np.roll(a, 1)
    pair, both = execute(
        "cvt.rn.f16x2.f32 $0, $2, $3; cvt.rn.bf16x2.f32 $1, $2, $3;", [np.uint32, np.uint32], a[10:], b[10:]
    )
    with np.errstate(over="ignore"):
        expected = np.stack([b[10:], a[10:]], 1).astype(np.float16).view(np.uint32).ravel()
    np.testing.assert_array_equal(pair, expected)
    expected = np.stack([b[10:], a[10:]], 1).astype(ml_dtypes.bfloat16).view(np.uint32).ravel()
    np.testing.assert_array_equal(both, expected)
    for mode in ("rz", "rm", "rp"):
        finite = np.isfinite(a) & (a != 0)
        out = execute(f"cvt.{mode}.f16.f32 $0, $1;", [np.float16], a[finite])
        same_bits(out, [rounded(Fraction(float(x)), np.float16, mode) for x in a[finite]])


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)])
def test_float8_conversions(kind, dtype):
    rng = np.random.default_rng(10)
    a, b = ((rng.standard_normal(500) * 10.0 ** rng.integers(-4, 5, 500)).astype(np.float32) for _ in range(2))
    a[:3] = [np.nan, 1e9, -1e9]
    packed = execute(f"cvt.rn.satfinite.{kind}x2.f32 $0, $1, $2;", [np.uint16], a, b)
    largest = float(ml_dtypes.finfo(dtype).max)
    expected = np.clip(np.stack([b, a], 1), -largest, largest).astype(dtype).view(np.uint8)
    expected[0, 1] = 0x7F
    np.testing.assert_array_equal(packed.view(np.uint8).reshape(-1, 2), expected)
    every = np.arange(0, 65536, 7, dtype=np.uint16)
    halves = execute(f"cvt.rn.f16x2.{kind}x2 $0, $1;", [np.uint32], every).view(np.float16)
    np.testing.assert_array_equal(halves, every.view(np.uint8).view(dtype).astype(np.float16))


def test_tf32_conversion():
    a = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, -(1 + 2.0**-11), np.nan, np.inf, 3.4028e38, 1e-40], np.float32)
    away, even = execute("cvt.rna.tf32.f32 $0, $2; cvt.rn.tf32.f32 $1, $2;", [np.float32] * 2, a)
    assert away[0] == 1 + 2.0**-10 and even[0] == 1
    assert away[1] == even[1] == 1 + 2.0**-9
    assert away[2] == -(1 + 2.0**-10)
    assert np.isnan(away[3]) and np.isinf(away[4]) and np.isinf(away[5])


def test_moves_and_packed_halves():
    rng = np.random.default_rng(11)
    a, b = rng.integers(0, 1 << 32, (2, 100)).astype(np.uint32)
    wide, low, high = execute(
        "mov.b64 $0, {$3, $4}; { .reg .b16 lo, hi; mov.b32 {lo, hi}, $3; mov.b32 $1, {hi, lo}; }"
        "{ .reg .b32 lo; mov.b64 {lo, $2}, $0; }",
        [np.uint64, np.uint32, np.uint32], a, b,
    )  # fmt: skip
    np.testing.assert_array_equal(wide, a | (b.astype(np.uint64) << 32))
    np.testing.assert_array_equal(low, (a >> 16) | (a << 16))
    np.testing.assert_array_equal(high, b)
    x, y = rng.standard_normal((2, 100, 2)).astype(np.float16)
    outs = execute(
        "fma.rn.f16x2 $0, $4, $5, $4; max.f16x2 $1, $4, $5; neg.f16x2 $2, $4; fma.rn.relu.f16x2 $3, $4, $5, $5;",
        [np.uint32] * 4, x.view(np.uint32).ravel(), y.view(np.uint32).ravel(),
    )  # fmt: skip
    wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
    expected = [wide_x * wide_y + wide_x, np.maximum(wide_x, wide_y), -wide_x, np.maximum(wide_x * wide_y + wide_y, 0)]
    for actual, values in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(actual.view(np.float16).reshape(-1, 2), values.astype(np.float16))
