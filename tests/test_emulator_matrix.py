"""The emulator's mma, ldmatrix, stmatrix and cp.async, against small integers, where every sum is exact."""

import functools

import ml_dtypes
import numpy as np
import pytest

import rawops
from rawops.errors import BarrierError, UninitializedRead, UnsupportedPTX

# shape, A format, B format, D and C type, modifiers
MMA = [
    ("m16n8k16", "f16", "f16", "f32", ""),
    ("m16n8k8", "f16", "f16", "f32", ""),
    ("m16n8k16", "f16", "f16", "f16", ""),
    ("m16n8k8", "f16", "f16", "f16", ""),
    ("m16n8k16", "bf16", "bf16", "f32", ""),
    ("m16n8k8", "bf16", "bf16", "f32", ""),
    ("m16n8k8", "tf32", "tf32", "f32", ""),
    ("m16n8k4", "tf32", "tf32", "f32", ""),
    ("m8n8k4", "f64", "f64", "f64", ""),
    ("m16n8k4", "f64", "f64", "f64", ""),
    ("m16n8k8", "f64", "f64", "f64", ""),
    ("m16n8k16", "f64", "f64", "f64", ""),
    ("m8n8k16", "s8", "u8", "s32", ""),
    ("m16n8k16", "s8", "s8", "s32", ""),
    ("m16n8k32", "s8", "s8", "s32", ""),
    ("m16n8k32", "u8", "s8", "s32", ".satfinite"),
    ("m8n8k32", "s4", "s4", "s32", ""),
    ("m16n8k32", "u4", "s4", "s32", ""),
    ("m16n8k64", "s4", "u4", "s32", ".satfinite"),
    ("m16n8k32", "e4m3", "e4m3", "f32", ""),
    ("m16n8k32", "e4m3", "e5m2", "f32", ""),
    ("m16n8k32", "e5m2", "e4m3", "f16", ""),
    ("m16n8k256", "b1", "b1", "s32", ".and.popc"),
    ("m16n8k128", "b1", "b1", "s32", ".xor.popc"),
]
BITS = {"f64": 64, "tf32": 32, "f16": 16, "bf16": 16, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "s4": 4, "u4": 4, "b1": 1}
STORAGE = {
    "f64": np.float64,
    "tf32": np.float32,
    "f32": np.float32,
    "s32": np.int32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}
RANGE = {"u8": (0, 9), "u4": (0, 16), "s4": (-8, 8), "b1": (0, 2), "e4m3": (-4, 5), "e5m2": (-4, 5)}
CPP = {"f32": ("float", "f"), "f64": ("double", "d"), "s32": ("int", "r"), "b32": ("unsigned", "r")}


def sizes(shape):
    rows, rest = shape[1:].split("n8k")
    return int(rows), int(rest)


def counts(shape, fmt, d_type):
    """Registers of A, B and D a lane."""
    rows, k = sizes(shape)
    width = max(BITS[fmt], 32)
    per_lane = BITS[fmt] / width / 32
    return round(rows * k * per_lane), round(8 * k * per_lane), rows // (8 if d_type == "f16" else 4)


def mma_case(number, case):
    """One `case` of the switch: load fragments [register][lane], multiply, store."""
    shape, a, b, d, modifiers = case
    na, nb, nd = counts(shape, a, d)
    word, wc = CPP["f64" if a == "f64" else "b32"]
    acc, ac = CPP["b32" if d == "f16" else d]

    def operands(start, n):
        return "{" + ",".join(f"%{start + i}" for i in range(n)) + "}"

    loads = "".join(f"{word} a{i} = (({word}*)pa)[{i} * 32 + lane]; " for i in range(na))
    loads += "".join(f"{word} b{i} = (({word}*)pb)[{i} * 32 + lane]; " for i in range(nb))
    loads += "".join(f"{acc} c{i} = (({acc}*)pc)[{i} * 32 + lane]; " for i in range(nd))
    before, after = ("", modifiers) if "popc" in modifiers else (modifiers, "")
    text = f"mma.sync.aligned.{shape}.row.col{before}.{d}.{a}.{b}.{d}{after}"
    text += f" {operands(0, nd)}, {operands(nd, na)}, {operands(nd + na, nb)}, {operands(0, nd)};"
    outs = ", ".join(f'"+{ac}"(c{i})' for i in range(nd))
    ins = ", ".join([f'"{wc}"(a{i})' for i in range(na)] + [f'"{wc}"(b{i})' for i in range(nb)])
    stores = "".join(f"(({acc}*)pd)[{i} * 32 + lane] = c{i}; " for i in range(nd))
    return f'case {number}: {{ {loads} asm volatile("{text}" : {outs} : {ins}); {stores} break; }}\n'


@functools.cache
def mma_kernel():
    cases = "".join(mma_case(i, case) for i, case in enumerate(MMA))
    source = f"""
    __global__ void mma(int which, void* pa, void* pb, void* pc, void* pd) {{
      int lane = threadIdx.x;
      switch (which) {{ {cases} }}
    }}"""
    return rawops.Kernel(source, "mma")


def to_bits(matrix, fmt):
    """The unsigned code of every element."""
    if fmt in ("s4", "u4", "b1"):
        return matrix.astype(np.int64) & (15 if fmt != "b1" else 1)
    stored = matrix.astype(STORAGE[fmt])
    return stored.view(f"u{stored.itemsize}").astype(np.uint64)


def fragment(matrix, fmt, count, place):
    """Registers (count, 32) of a matrix; place(lane, register, element, elements a register) -> index."""
    width = max(BITS[fmt], 32)
    per = width // BITS[fmt]
    codes = to_bits(matrix, fmt)
    registers = np.zeros((count, 32), f"u{width // 8}")
    for lane in range(32):
        for register in range(count):
            code = sum(int(codes[place(lane, register, i, per)]) << (i * BITS[fmt]) for i in range(per))
            registers[register, lane] = code
    return registers


def a_place(rows):
    if rows == 8:
        return lambda lane, r, i, e: (lane // 4, lane % 4 * e + i + 4 * e * r)
    return lambda lane, r, i, e: (lane // 4 + 8 * (r % 2), lane % 4 * e + i + 4 * e * (r // 2))


def b_place(lane, r, i, e):
    return lane % 4 * e + i + 4 * e * r, lane // 4


def accumulator_lanes(matrix):
    """D as the registers (count, 32) of its own type; pairs of float16 packed."""
    rows = matrix.shape[0]
    out = np.zeros((rows // 4, 32), matrix.dtype)
    for lane in range(32):
        for i in range(rows // 4):
            out[i, lane] = matrix[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2]
    if matrix.dtype != np.float16:
        return out
    return np.ascontiguousarray(out.reshape(-1, 2, 32).swapaxes(1, 2)).view(np.uint32)[..., 0]


def run_mma(number, a, b, c):
    shape, a_fmt, b_fmt, d_type, _ = MMA[number]
    na, nb, _ = counts(shape, a_fmt, d_type)
    start = accumulator_lanes(c.astype(STORAGE[d_type]))
    out = np.zeros_like(start)
    registers = fragment(a, a_fmt, na, a_place(a.shape[0])), fragment(b, b_fmt, nb, b_place)
    with rawops.emulate(arch="sm_90a") as emu:
        mma_kernel()(1, 32, (number, *registers, start, out))
    return out, emu.report[0]


@pytest.mark.parametrize("number", range(len(MMA)), ids=[".".join(case) for case in MMA])
def test_mma(number, rng):
    shape, a_fmt, b_fmt, d_type, modifiers = MMA[number]
    rows, k = sizes(shape)
    a = rng.integers(*RANGE.get(a_fmt, (-5, 6)), (rows, k))
    b = rng.integers(*RANGE.get(b_fmt, (-5, 6)), (k, 8))
    c = rng.integers(-50, 51, (rows, 8))
    product = (a[:, :, None] ^ b).sum(1) if "xor" in modifiers else a @ b
    out, report = run_mma(number, a, b, c)
    assert np.array_equal(out, accumulator_lanes((product + c).astype(STORAGE[d_type])))
    assert report.flops == 2 * rows * 8 * k


def test_mma_integers_wrap_or_saturate():
    full = np.full((16, 32), 127)
    for number, wrapped in ((14, True), (15, False)):
        out, _ = run_mma(number, full, full[:8].T, np.full((16, 8), 2**31 - 1))
        exact = 2**31 - 1 + 32 * 127 * 127
        assert (out == (exact - 2**32 if wrapped else 2**31 - 1)).all()


def test_mma_propagates_nan_and_infinity():
    a, b, c = np.ones((16, 16)), np.ones((16, 8)), np.zeros((16, 8))
    a[1, 3], a[2, 5], b[7, 4] = np.nan, np.inf, np.inf
    a[3, 7] = 0
    out, _ = run_mma(0, a, b, c)
    with np.errstate(invalid="ignore"):
        want = a @ b
    assert np.array_equal(out, accumulator_lanes(want.astype(np.float32)), equal_nan=True)
    assert (out.view(np.uint32)[np.isnan(out)] == 0x7FFFFFFF).all()


def test_mma_tf32_ignores_the_low_mantissa_bits():
    a, b = np.ones((16, 8), np.float32), np.ones((8, 8), np.float32)
    a.view(np.uint32)[:] |= 0x1FFF
    out, _ = run_mma(6, a, b, np.zeros((16, 8)))
    assert (out == 8).all()


def test_mma_in_part_of_a_warp_is_refused():
    source = """
    __global__ void k(unsigned* x) {
      if (threadIdx.x < 8) return;
      float c[4] = {};
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%4}, {%4}, {%0,%1,%2,%3};"
                   : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(x[0]));
      x[threadIdx.x] = c[0];
    }"""
    with rawops.emulate(arch="sm_80"), pytest.raises(BarrierError, match="all lanes of the warp"):
        rawops.Kernel(source, "k")(1, 32, (np.zeros(32, np.uint32),))


def test_unknown_shape_is_refused():
    source = """
    __global__ void k(unsigned* x) {
      unsigned c[4] = {};
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%0,%1,%2,%3}, {%0,%1},"
                   "{%0,%1,%2,%3};" : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]));
      x[0] = c[0];
    }"""
    program = rawops.Kernel(source, "k").compile("sm_80").ptx.replace("m16n8k16", "m16n8k12")
    from rawops._emulator import GlobalMemory, emulate_launch, parse

    name = next(line.split("(")[0].split()[-1] for line in program.splitlines() if ".entry" in line)
    memory, x = GlobalMemory(), np.zeros(4, np.uint32)
    with pytest.raises(UnsupportedPTX, match="m16n8k12"):
        emulate_launch(parse(program, name), (1, 1, 1), (32, 1, 1), memory.map(x).to_bytes(8, "little"), memory=memory)


MATRIX_MOVES = """
template <int N> struct Regs { unsigned r[N]; };
__device__ unsigned address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__global__ void load(const unsigned short* src, unsigned* out, int which) {
  __shared__ __align__(16) unsigned short tile[32][40];
  int lane = threadIdx.x;
  for (int i = lane; i < 32 * 32; i += 32) tile[i / 32][i % 32] = src[i];
  __syncwarp();
  unsigned row = address(&tile[lane][8 * (lane / 8)]), r[4] = {};   // tile i: rows 8i.., columns 8i..
#define OUT1 "=r"(r[0])
#define OUT2 OUT1, "=r"(r[1])
#define OUT4 OUT2, "=r"(r[2]), "=r"(r[3])
  if (which == 0) asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : OUT1 : "r"(row));
  if (which == 1) asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : OUT2 : "r"(row));
  if (which == 2)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : OUT4 : "r"(row));
  if (which == 3) asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : OUT1 : "r"(row));
  if (which == 4) asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : OUT2 : "r"(row));
  if (which == 5)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : OUT4 : "r"(row));
  for (int i = 0; i < 4; ++i) out[i * 32 + lane] = r[i];
}
__global__ void store(const unsigned* in, unsigned short* dst, int which) {
  __shared__ __align__(16) unsigned short tile[32][40];
  int lane = threadIdx.x;
  for (int i = lane; i < 32 * 40; i += 32) tile[i / 40][i % 40] = 0;
  __syncwarp();
  unsigned row = address(&tile[lane][8 * (lane / 8)]), r[4];
  for (int i = 0; i < 4; ++i) r[i] = in[i * 32 + lane];
#define IN4 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
  if (which == 0)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), IN4 : "memory");
  if (which == 1)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), IN4 : "memory");
  if (which == 2)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(row), "r"(r[0]), "r"(r[1]) : "memory");
  if (which == 3) {
    unsigned t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(r[0]));
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(row), "r"(t) : "memory");
  }
  __syncwarp();
  for (int i = lane; i < 32 * 32; i += 32) dst[i] = tile[i / 32][i % 32];
}
"""


def tile_registers(matrix, transpose):
    """What each lane holds of the four 8x8 tiles on the diagonal: registers (4, 32)."""
    out = np.zeros((4, 32), np.uint32)
    for i in range(4):
        tile = matrix[8 * i : 8 * i + 8, 8 * i : 8 * i + 8].astype(int)
        tile = tile.T if transpose else tile
        for lane in range(32):
            low, high = tile[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
            out[i, lane] = low | high << 16
    return out


@pytest.mark.parametrize("which", range(6))
def test_ldmatrix(which):
    matrix = np.arange(1024, dtype=np.uint16).reshape(32, 32)
    out = np.zeros((4, 32), np.uint32)
    with rawops.emulate(arch="sm_90a"):
        rawops.Kernel(MATRIX_MOVES, "load")(1, 32, (matrix, out, which))
    want = tile_registers(matrix, which >= 3)
    want[(1, 2, 4)[which % 3] :] = 0
    assert np.array_equal(out, want)


@pytest.mark.parametrize("which", range(4))
def test_stmatrix_and_movmatrix(which):
    matrix = np.arange(1024, dtype=np.uint16).reshape(32, 32)
    registers, out = tile_registers(matrix, which in (1, 3)), np.zeros((32, 32), np.uint16)
    with rawops.emulate(arch="sm_90a"):
        rawops.Kernel(MATRIX_MOVES, "store")(1, 32, (registers, out, which))
    tiles = np.kron(np.eye(4, dtype=np.uint16), np.ones((8, 8), np.uint16))
    tiles[8 * (4, 4, 2, 1)[which] :] = 0
    assert np.array_equal(out, matrix * tiles)


GEMM = """
#include <cuda_fp16.h>
// C (64, 64) = A (64, K) @ B (K, 64): 4 warps of 32x32, K in steps of 32, two stages, rows swizzled by 16-byte chunks.
__device__ unsigned shared_at(const __half* base, int row, int chunk, int chunks) {
  return (unsigned)__cvta_generic_to_shared(base) + (row * chunks + (chunk ^ (row / (8 / chunks)) % chunks)) * 16;
}
__device__ void copy16(unsigned dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__global__ void gemm(const __half* a, const __half* b, float* c, int K, int b_rows) {
  __shared__ __align__(1024) __half as[2][64 * 32], bs[2][32 * 64];
  int tid = threadIdx.x, lane = tid % 32, wm = tid / 64 * 32, wn = tid / 32 % 2 * 32;
  auto load = [&](int stage, int k0) {
    for (int i = tid; i < 256; i += 128) {
      copy16(shared_at(as[stage], i / 4, i % 4, 4), a + (i / 4) * K + k0 + i % 4 * 8, 16);
      int row = k0 + i / 8;
      bool real = row < b_rows;
      copy16(shared_at(bs[stage], i / 8, i % 8, 8), b + (real ? row : 0) * 64 + i % 8 * 8, real ? 16 : 0);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  float acc[2][4][4] = {};
  load(0, 0);
  for (int k0 = 0, stage = 0; k0 < K; k0 += 32, stage ^= 1) {
    if (k0 + 32 < K) load(stage ^ 1, k0 + 32);
    else asm volatile("cp.async.commit_group;" ::: "memory");
#ifndef NO_WAIT
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
    __syncthreads();
    for (int kk = 0; kk < 2; ++kk) {
      unsigned fa[2][4], fb[4][2];
      for (int i = 0; i < 2; ++i)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
          : "=r"(fa[i][0]), "=r"(fa[i][1]), "=r"(fa[i][2]), "=r"(fa[i][3])
          : "r"(shared_at(as[stage], wm + 16 * i + lane % 16, 2 * kk + lane / 16, 4)));
      for (int j = 0; j < 4; ++j)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
          : "=r"(fb[j][0]), "=r"(fb[j][1])
          : "r"(shared_at(bs[stage], 16 * kk + lane % 16, wn / 8 + j, 8)));
      for (int i = 0; i < 2; ++i) for (int j = 0; j < 4; ++j)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
                     "{%0,%1,%2,%3};"
          : "+f"(acc[i][j][0]), "+f"(acc[i][j][1]), "+f"(acc[i][j][2]), "+f"(acc[i][j][3])
          : "r"(fa[i][0]), "r"(fa[i][1]), "r"(fa[i][2]), "r"(fa[i][3]), "r"(fb[j][0]), "r"(fb[j][1]));
    }
#ifndef NO_BARRIER
    __syncthreads();
#endif
  }
  for (int i = 0; i < 2; ++i) for (int j = 0; j < 4; ++j) for (int r = 0; r < 4; ++r)
    c[(wm + 16 * i + lane / 4 + r / 2 * 8) * 64 + wn + 8 * j + lane % 4 * 2 + r % 2] = acc[i][j][r];
}
"""


@pytest.mark.parametrize("completion", ["late", "early", "random"])
def test_gemm_with_cp_async(completion, rng):
    a = rng.integers(-4, 5, (64, 96)).astype(np.float16)
    b = rng.integers(-4, 5, (96, 64)).astype(np.float16)
    c = np.full((64, 64), np.nan, np.float32)
    b_rows = 75  # the rest is zero-filled, so NaN there must not matter
    b[b_rows:] = np.nan
    with rawops.emulate(arch="sm_80", completion=completion, seed=3) as emu:
        rawops.Kernel(GEMM, "gemm")(1, 128, (a, b, c, 96, b_rows))
    assert np.array_equal(c, a[:, :b_rows].astype(np.float64) @ b[:b_rows].astype(np.float64))
    assert emu.report[0].flops == 2 * 64 * 64 * 96
    assert emu.report[0].total.shared_conflicts == 0


def test_a_missing_wait_is_caught(rng):
    a, b, c = np.zeros((64, 96), np.float16), np.zeros((96, 64), np.float16), np.zeros((64, 64), np.float32)
    kernel = rawops.Kernel(GEMM, "gemm", ["-DNO_WAIT"])
    with rawops.emulate(arch="sm_80"), pytest.raises(UninitializedRead, match="not yet waited for"):
        kernel(1, 128, (a, b, c, 96, 96))


def test_a_missing_barrier_is_caught(rng):
    a, b, c = np.zeros((64, 96), np.float16), np.zeros((96, 64), np.float16), np.zeros((64, 64), np.float32)
    kernel = rawops.Kernel(GEMM, "gemm", ["-DNO_BARRIER"])
    with rawops.emulate(arch="sm_80", completion="random"), pytest.raises(rawops.errors.EmulatorError):
        kernel(1, 128, (a, b, c, 96, 96))


COPIES = """
// Copies of 4, 8 and 16 bytes: with a source size, ignored, and whole.
__global__ void copies(const unsigned* x, unsigned* out) {
  __shared__ __align__(16) unsigned words[32][8];
  int lane = threadIdx.x;
  unsigned at = (unsigned)__cvta_generic_to_shared(words[lane]);
  const unsigned* from = x + lane * 8;
  for (int i = 0; i < 2; ++i)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at + 4 * i), "l"(from + i) : "memory");
  asm volatile("{\\n.reg .pred p;\\nsetp.ne.u32 p, %2, 0;\\n"
               "cp.async.ca.shared.global.L2::128B [%0], [%1], 8, p;\\n}"
               ::"r"(at + 8), "l"(lane % 2 ? nullptr : from + 2), "r"(lane % 2) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(at + 16), "l"(from + 4), "r"(lane % 17) : "memory");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  for (int i = 0; i < 4; ++i) out[lane * 8 + i] = words[lane][i];
#ifndef EARLY_READ
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
  for (int i = 4; i < 8; ++i) out[lane * 8 + i] = words[lane][i];
}
"""


@pytest.mark.parametrize("completion", ["late", "early"])
def test_cp_async_sizes(completion, rng):
    x, out = rng.integers(1, 2**32, (32, 8)).astype(np.uint32), np.zeros((32, 8), np.uint32)
    want = x.copy()
    want[1::2, 2:4] = 0
    octets = want[:, 4:].view(np.uint8)
    octets[np.arange(16) >= (np.arange(32) % 17)[:, None]] = 0
    want[:, 4:] = octets.view(np.uint32)
    with rawops.emulate(arch="sm_80", completion=completion):
        rawops.Kernel(COPIES, "copies")(1, 32, (x, out))
    assert np.array_equal(out, want)


def test_wait_group_does_not_wait_for_the_open_group():
    x, out = np.zeros((32, 8), np.uint32), np.zeros((32, 8), np.uint32)
    with rawops.emulate(arch="sm_80"), pytest.raises(UninitializedRead, match="not yet waited for"):
        rawops.Kernel(COPIES, "copies", ["-DEARLY_READ"])(1, 32, (x, out))
