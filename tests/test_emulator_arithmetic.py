"""Single PTX instructions against exact arithmetic: rounding, NaN, saturation, bit fields, conversions."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from emulation import launch

from rawops._emulator import GlobalMemory, Program, emulate_launch

BITS = {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64}


def execute(text, outputs, *inputs, target="sm_90a"):
    """Run PTX text on arrays, one element a thread.

    `text` names its operands $0, $1, ... for the outputs and then the inputs; `outputs` are dtypes.
    """
    n = len(inputs[0])
    kinds = [f"b{8 * np.dtype(d).itemsize}" for d in outputs] + [f"b{8 * a.itemsize}" for a in inputs]
    arrays = [np.zeros(n, d) for d in outputs] + [np.ascontiguousarray(a) for a in inputs]
    lines = [".reg .b32 %t<3>;", ".reg .b64 %a<99>;", ".reg .pred %p<9>;"]
    lines += [f".reg .{kind} %v{i};" for i, kind in enumerate(kinds)]
    lines += [
        "mov.u32 %t0, %tid.x;", "mov.u32 %t1, %ctaid.x;", "mad.lo.u32 %t0, %t1, 32, %t0;",
    ]  # fmt: skip
    for i, kind in enumerate(kinds):
        size = int(kind[1:]) // 8
        lines += [f"ld.param.u64 %a{i}, [k_{i}];", f"mad.wide.u32 %a{i}, %t0, {size}, %a{i};"]
        if i >= len(outputs):
            lines.append(f"ld.global.{kind} %v{i}, [%a{i}];")
    for i in reversed(range(len(kinds))):
        text = text.replace(f"${i}", f"%v{i}")
    lines.append(text)
    lines += [f"st.global.{kinds[i]} [%a{i}], %v{i};" for i in range(len(outputs))]
    parameters = ", ".join(f".param .u64 k_{i}" for i in range(len(kinds)))
    ptx = f".version 8.5\n.target {target}\n.address_size 64\n.visible .entry k({parameters})\n{{\n"
    ptx += "\n".join(lines) + "\nret;\n}\n"
    memory = GlobalMemory()
    padded = [np.resize(a, -(-n // 32) * 32) for a in arrays]
    params = b"".join(np.uint64(memory.map(a)).tobytes() for a in padded)
    emulate_launch(Program.parse(ptx, "k"), (-(-n // 32), 1, 1), (32, 1, 1), params, memory=memory)
    results = [a[:n] for a in padded[: len(outputs)]]
    return results[0] if len(results) == 1 else results


# ---- exact references ----------------------------------------------------------------------------------

FORMATS = {np.float16: (11, -14), np.float32: (24, -126), np.float64: (53, -1022)}


def rounded(exact: Fraction, dtype, mode: str):
    """An exact non-zero number rounded to a float type."""
    precision, smallest = FORMATS[dtype]
    magnitude = abs(exact)
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1, smallest)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    ulp = Fraction(2) ** (exponent - precision + 1)
    units, rest = divmod(magnitude, ulp)
    up = {
        "rn": rest * 2 > ulp or (rest * 2 == ulp and units % 2),
        "rz": False,
        "rm": exact < 0 and rest > 0,
        "rp": exact > 0 and rest > 0,
    }[mode]
    value = (units + bool(up)) * ulp
    largest = Fraction(float(np.finfo(dtype).max))
    if value > largest:
        toward_zero = mode == "rz" or (mode == "rm" and exact > 0) or (mode == "rp" and exact < 0)
        value = largest if toward_zero else None
    magnitude = float("inf") if value is None else float(value)
    return dtype(magnitude if exact > 0 else -magnitude)


def same_bits(actual, expected):
    unsigned = f"u{actual.itemsize}"
    np.testing.assert_array_equal(actual.view(unsigned), np.asarray(expected, actual.dtype).view(unsigned))


def hard_floats(rng, dtype, n):
    """Floats of all magnitudes, many with short mantissas, so that ties and cancellations happen."""
    unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64}[np.dtype(dtype).itemsize]
    values = rng.integers(0, np.iinfo(unsigned).max, n, dtype=unsigned, endpoint=True).view(dtype)
    near = (rng.integers(-64, 64, n) * 2.0 ** rng.integers(-8, 9, n)).astype(dtype)
    low, high = (-24, 12) if dtype == np.float16 else (-140, 100) if dtype == np.float32 else (-1060, 900)
    with np.errstate(over="ignore"):
        wide = (rng.integers(-4096, 4096, n) * 2.0 ** rng.integers(low, high, n)).astype(dtype)
    choice = rng.integers(0, 3, n)
    values = np.where(choice == 0, values, np.where(choice == 1, near, wide))
    return np.where(np.isfinite(values), values, dtype(1.5))


MODES = ["rn", "rz", "rm", "rp"]


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


def test_flush_and_saturate():
    a = np.array([1e-40, -1e-40, 2, -3, np.nan, 0.5, 1e-38, np.inf], np.float32)
    b = np.array([1, 1, 3, 1, 1, 0.5, 1e-38, -np.inf], np.float32)
    flushed, saturated, product = execute(
        "add.ftz.f32 $0, $3, 0f00000000; add.sat.f32 $1, $3, $4; mul.ftz.f32 $2, $3, $4;", [np.float32] * 3, a, b
    )
    same_bits(flushed, np.where(np.isnan(a), np.uint32(0x7FFFFFFF).view(np.float32), [0, 0, 2, -3, 0, 0.5, 0, np.inf]))
    same_bits(saturated, np.array([1, 1, 1, 0, 0, 1, a[6] + b[6], 0], np.float32))
    assert product[6] == 0 and product[2] == 6


INTEGERS = {np.uint32: "u32", np.int32: "s32", np.uint64: "u64", np.int64: "s64", np.int16: "s16", np.uint16: "u16"}


def hard_integers(rng, dtype, n=600):
    limits = np.iinfo(dtype)
    special = np.array([0, 1, limits.max, limits.min, limits.max // 2, 7], dtype)
    values = rng.integers(limits.min, limits.max, n, dtype=dtype, endpoint=True)
    return np.where(rng.random(n) < 0.3, rng.choice(special, n), values)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_arithmetic(dtype):
    rng = np.random.default_rng(4)
    kind, bits = INTEGERS[dtype], 8 * np.dtype(dtype).itemsize
    a, b, c = (hard_integers(rng, dtype) for _ in range(3))
    names = [f"add.{kind}", f"sub.{kind}", f"mul.lo.{kind}", f"mul.hi.{kind}", f"min.{kind}", f"max.{kind}"]
    names += [f"div.{kind}", f"rem.{kind}"]
    text = "".join(f"{name} ${i}, $8, $9;" for i, name in enumerate(names))
    outs = execute(text, [dtype] * 8, a, b)
    mad = execute(f"mad.hi.{kind} $0, $1, $2, $3;", [dtype], a, b, c)
    for i in range(len(a)):
        x, y, z = int(a[i]), int(b[i]), int(c[i])
        quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) if y else -1
        remainder = x - quotient * y if y else -1
        expected = [x + y, x - y, x * y, x * y >> bits, min(x, y), max(x, y), quotient, remainder]
        for actual, value in zip(outs, expected, strict=True):
            assert int(actual[i]) % (1 << bits) == value % (1 << bits)
        assert int(mad[i]) % (1 << bits) == ((x * y >> bits) + z) % (1 << bits)


def test_carry_chains_and_wide_products():
    rng = np.random.default_rng(5)
    a, b = hard_integers(rng, np.uint64), hard_integers(rng, np.uint64)
    (alo, ahi), (blo, bhi) = (np.ascontiguousarray(v.view(np.uint32).reshape(-1, 2).T) for v in (a, b))
    low, high = execute("add.cc.u32 $0, $2, $4; addc.u32 $1, $3, $5;", [np.uint32] * 2, alo, ahi, blo, bhi)
    np.testing.assert_array_equal(low + (high.astype(np.uint64) << 32), a + b)
    low, high = execute("sub.cc.u32 $0, $2, $4; subc.u32 $1, $3, $5;", [np.uint32] * 2, alo, ahi, blo, bhi)
    np.testing.assert_array_equal(low + (high.astype(np.uint64) << 32), a - b)
    wide, signed = execute("mul.wide.u32 $0, $2, $3; mul.wide.s32 $1, $2, $3;", [np.uint64, np.int64], alo, blo)
    np.testing.assert_array_equal(wide, alo.astype(np.uint64) * blo)
    np.testing.assert_array_equal(signed, alo.view(np.int32).astype(np.int64) * blo.view(np.int32))
    low, high = execute(
        "mad.lo.cc.u32 $0, $2, $3, $4; madc.hi.u32 $1, $2, $3, $5;", [np.uint32] * 2, alo, blo, bhi, ahi
    )
    expected = alo.astype(object) * blo.astype(object) + bhi.astype(object) + (ahi.astype(object) << 32)
    np.testing.assert_array_equal(low + (high.astype(np.uint64) << 32), (expected % (1 << 64)).astype(np.uint64))


def test_bit_operations():
    rng = np.random.default_rng(6)
    a, b, c = (hard_integers(rng, np.uint32) for _ in range(3))
    n = rng.integers(0, 70, len(a)).astype(np.uint32)
    for lut in (0xE8, 0x96, 0xCA, 0x1B, 0x00, 0xFF, 0x80, 0x2A):
        out = execute(f"lop3.b32 $0, $1, $2, $3, {lut};", [np.uint32], a, b, c)
        expected = np.zeros_like(a)
        for i in range(8):
            if lut >> i & 1:
                expected |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        np.testing.assert_array_equal(out, expected)
    names = ["shl.b32", "shr.u32", "shr.s32", "shf.l.wrap.b32", "shf.r.clamp.b32", "prmt.b32"]
    text = "".join(f"{m} ${i}, $6, $8;" if i < 3 else f"{m} ${i}, $6, $7, $8;" for i, m in enumerate(names))
    outs = execute(text, [np.uint32] * 6, a, b, n)
    singles = execute(
        "popc.b32 $0, $5; clz.b32 $1, $5; brev.b32 $2, $5; bfind.u32 $3, $5; bfind.s32 $4, $5;", [np.uint32] * 5, a
    )
    for i in range(len(a)):
        x, y, s = int(a[i]), int(b[i]), int(n[i])
        signed = x - (1 << 32) if x >> 31 else x
        pair = y << 32 | x
        octets = [pair >> 8 * j & 0xFF for j in range(8)]
        picks = [s >> 4 * j & 15 for j in range(4)]
        chosen = [(255 if octets[p & 7] >> 7 else 0) if p & 8 else octets[p & 7] for p in picks]
        expected = [
            x << s, x >> s, signed >> s, (pair << (s & 31)) >> 32, pair >> min(s, 32),
            sum(o << 8 * j for j, o in enumerate(chosen)),
        ]  # fmt: skip
        assert [int(o[i]) for o in outs] == [e & 0xFFFFFFFF for e in expected]
        found = ~signed if signed < 0 else signed
        expected = [
            x.bit_count(), 32 - x.bit_length(), int(f"{x:032b}"[::-1], 2), x.bit_length() - 1, found.bit_length() - 1,
        ]  # fmt: skip
        assert [int(o[i]) for o in singles] == [e & 0xFFFFFFFF for e in expected]


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits):
    rng = np.random.default_rng(7)
    dtype = {32: np.uint32, 64: np.uint64}[bits]
    a, b = hard_integers(rng, dtype), hard_integers(rng, dtype)
    start, length = (rng.integers(0, bits + 10, len(a)).astype(np.uint32) for _ in range(2))
    unsigned, signed, inserted = execute(
        f"bfe.u{bits} $0, $3, $5, $6; bfe.s{bits} $1, $3, $5, $6; bfi.b{bits} $2, $3, $4, $5, $6;",
        [dtype] * 3, a, b, start, length,
    )  # fmt: skip
    everything = (1 << bits) - 1
    for i in range(len(a)):
        x, y, s, n = int(a[i]), int(b[i]), int(start[i]), int(length[i])
        mask = (1 << n) - 1
        assert int(unsigned[i]) == (x >> s) & mask
        extended = (x - (1 << bits) if x >> (bits - 1) else x) >> s
        field = extended & mask
        sign = extended >> (n - 1) & 1 if n else 0
        assert int(signed[i]) == ((field - (sign << n)) & everything if n else 0)
        assert int(inserted[i]) == ((y & ~(mask << s)) | ((x & mask) << s)) & everything


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


def test_integer_extras():
    rng = np.random.default_rng(12)
    a, b, c = (hard_integers(rng, np.int32) for _ in range(3))
    outs = execute(
        "dp4a.s32.s32 $0, $5, $6, $7; sad.s32 $1, $5, $6, $7; mul24.lo.s32 $2, $5, $6; add.sat.s32 $3, $5, $6;"
        "slct.s32.s32 $4, $5, $6, $7;",
        [np.int32] * 5, a, b, c,
    )  # fmt: skip
    wrap = lambda v: (v.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)  # noqa: E731
    a8, b8 = (v.view(np.int8).reshape(-1, 4).astype(np.int64) for v in (a, b))
    wide = [v.astype(np.int64) for v in (a, b, c)]
    np.testing.assert_array_equal(outs[0], wrap((a8 * b8).sum(1) + wide[2]))
    np.testing.assert_array_equal(outs[1], wrap(np.abs(wide[0] - wide[1]) + wide[2]))
    low = [(v << 40) >> 40 for v in wide]
    np.testing.assert_array_equal(outs[2], wrap(low[0] * low[1]))
    np.testing.assert_array_equal(outs[3], np.clip(wide[0] + wide[1], -(1 << 31), (1 << 31) - 1))
    np.testing.assert_array_equal(outs[4], np.where(c >= 0, a, b))


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


def test_masks_extensions_and_packed_integers():
    rng = np.random.default_rng(13)
    a, b = hard_integers(rng, np.uint32), hard_integers(rng, np.uint32)
    start, length = (rng.integers(0, 40, len(a)).astype(np.uint32) for _ in range(2))
    mask, signed, unsigned = execute(
        "bmsk.clamp.b32 $0, $4, $5; szext.clamp.s32 $1, $3, $5; szext.wrap.u32 $2, $3, $5;",
        [np.uint32] * 3, a, start, length,
    )  # fmt: skip
    for i in range(len(a)):
        x, s, n = int(a[i]), int(start[i]), min(int(length[i]), 32)
        assert int(mask[i]) == (((1 << n) - 1) << min(s, 32)) & 0xFFFFFFFF
        low = x & ((1 << n) - 1)
        assert int(signed[i]) == (low - (low >> (n - 1) << n) if n else 0) & 0xFFFFFFFF
        assert int(unsigned[i]) == x & ((1 << (int(length[i]) & 31)) - 1)
    added, least = execute("add.u16x2 $0, $2, $3; min.s16x2 $1, $2, $3;", [np.uint32] * 2, a, b)
    halves = [v.view(np.uint16) for v in (a, b)]
    np.testing.assert_array_equal(added.view(np.uint16), halves[0] + halves[1])
    np.testing.assert_array_equal(least.view(np.int16), np.minimum(a.view(np.int16), b.view(np.int16)))
    packed = execute("cvt.pack.sat.s16.s32 $0, $1, $2;", [np.uint32], a, b).view(np.int16).reshape(-1, 2)
    np.testing.assert_array_equal(packed, np.clip(np.stack([b, a], 1).view(np.int32), -32768, 32767))
    found = execute("fns.b32 $0, $1, 3, 2;", [np.uint32], a)
    for x, r in zip(a.tolist(), found.tolist(), strict=True):
        bits = [i for i in range(3, 32) if x >> i & 1]
        assert r == (bits[1] if len(bits) > 1 else 0xFFFFFFFF)


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


def test_warp_reductions_and_masks():
    a = np.concatenate([np.arange(-5, 27), [np.nan], np.arange(31) - 9.5]).astype(np.float32)
    text = """
    .reg .b32 m; activemask.b32 m; elect.sync %t2|%p1, m; selp.u32 $0, 1, 0, %p1;
    cvt.rzi.s32.f32 %t1, $4; redux.sync.add.s32 $1, %t1, m; redux.sync.xor.b32 $2, %t1, m;
    match.all.sync.b32 $3|%p2, m, 0xffffffff;
    """
    elected, total, parity, same = execute(text, [np.uint32, np.int32, np.uint32, np.uint32], a)
    whole = np.where(np.isnan(a), 0, np.trunc(a)).astype(np.int32).reshape(2, 32)
    np.testing.assert_array_equal(elected.reshape(2, 32), np.arange(32) == np.zeros((2, 1)))
    np.testing.assert_array_equal(total.reshape(2, 32), np.repeat(whole.sum(1)[:, None], 32, 1))
    np.testing.assert_array_equal(parity.view(np.int32).reshape(2, 32)[:, 5], np.bitwise_xor.reduce(whole, axis=1))
    assert (same == 0xFFFFFFFF).all()


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
