"""Integer PTX instructions against exact arithmetic: wide products, carries, bit fields, masks of a warp."""

from __future__ import annotations

import numpy as np
import pytest
from emulated_ptx import execute, hard_integers

INTEGERS = {np.uint32: "u32", np.int32: "s32", np.uint64: "u64", np.int64: "s64", np.int16: "s16", np.uint16: "u16"}


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
