"""The emulator's wgmma, alone and in a GEMM that is fed by TMA."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hopper import launch, tensor_map

from rawops._emulator.instructions import wgmma
from rawops.errors import EmulatorError, RaceError

WGMMA_TYPES = {  # operand type, accumulator, elements along K
    "f16": ("f16", "f32"),
    "f16.f16": ("f16", "f16"),
    "bf16": ("bf16", "f32"),
    "tf32": ("tf32", "f32"),
    "e4m3": ("e4m3", "f32"),
    "e5m2": ("e5m2", "f16"),
    "s8": ("s8", "s32"),
    "u8": ("u8", "s32"),
}
STORAGE = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
    "f32": np.float32,
    "s32": np.int32,
}


def wgmma_source(kind, registers_a, n):
    """A kernel for one product: operands come as images of shared memory, A maybe as fragment registers."""
    operand, acc = WGMMA_TYPES[kind]
    k = 32 // np.dtype(STORAGE[operand]).itemsize
    count = n // 4 if acc == "f16" else n // 2
    c_type, constraint = {"f32": ("float", "f"), "f16": ("u32", "r"), "s32": ("int", "r")}[acc]
    d = "{" + ",".join(f"%{i}" for i in range(count)) + "}"
    a = "{" + ",".join(f"%{count + 2 + i}" for i in range(4)) + "}" if registers_a else f"%{count + 2}"
    majors = "" if operand not in ("f16", "bf16") else (", TB" if registers_a else ", TA, TB")
    signs = "" if acc == "s32" else ", NEGATE, 1"
    text = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{acc}.{operand}.{operand} "
    text += f"{d}, {a}, %{count + 1}, p{signs}{majors};"
    for name in ("TA", "TB", "NEGATE"):
        text = text.replace(name, f'" {name} "')
    outs = ", ".join(f'"+{constraint}"(d[{i}])' for i in range(count))
    ins = ", ".join(f'"r"(fa[{i}])' for i in range(4)) if registers_a else '"l"(desc_a)'
    return f"""
#define STRING(x) #x
__global__ void product(const uint4* image, const u32* a_regs, {c_type}* out, u64 desc_a, u64 desc_b, int keep) {{
  extern __shared__ __align__(1024) uint4 operands[];
  for (int i = threadIdx.x; i < BYTES / 16; i += 128) operands[i] = image[i];
#ifndef NO_FENCE
  fence_async();
#endif
  __syncthreads();
  u32 fa[4];
  for (int i = 0; i < 4; ++i) fa[i] = a_regs[i * 128 + threadIdx.x];
  desc_a += at(operands) >> 4;
  desc_b += at(operands) >> 4;
  {c_type} d[{count}];
  for (int i = 0; i < {count}; ++i) d[i] = out[i * 128 + threadIdx.x];
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count}, 0; {text} }}" : {outs} : "r"(keep), "l"(desc_b), {ins});
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#ifndef NO_WAIT
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
  for (int i = 0; i < {count}; ++i) out[i * 128 + threadIdx.x] = d[i];
}}"""


def place(matrix, span, k_major, image, offset):
    """Lay an operand (M or N, 32 bytes of K) out in shared memory; returns its descriptor, less the base.

    Written from the layouts' definition, element by element: atoms of 8 rows by the width of the swizzle.
    """
    extent, k = matrix.shape
    size = matrix.itemsize
    raw = matrix.view(f"u{size}")
    if k_major:
        leading, stride = (64 * 16, 128) if not span else (16, 8 * span)
        leading = extent * 16 if not span else leading

        def where(row, column):
            byte = column * size
            if not span:
                return byte // 16 * leading + row // 8 * stride + row % 8 * 16 + byte % 16
            return row // 8 * stride + row % 8 * span + byte
    else:
        leading, stride = (extent * 16, 128) if not span else (2 * 8 * span, 8 * span)

        def where(row, column):
            byte = row * size
            if not span:
                return byte // 16 * stride + column // 8 * leading + column % 8 * 16 + byte % 16
            return byte // span * leading + byte % span + column // 8 * stride + column % 8 * span

    for row, column in itertools.product(range(extent), range(k)):
        address = offset + where(row, column)
        address ^= {0: 0, 32: address >> 7 & 1, 64: address >> 7 & 3, 128: address >> 7 & 7}[span] << 4
        image[address : address + size] = np.frombuffer(raw[row, column].tobytes(), np.uint8)
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[span]
    return offset >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


def fragment_registers(a):
    """A (64, 32 bytes) as the registers (4, 128) of a warpgroup."""
    words = np.ascontiguousarray(a).view(np.uint32)  # (64, 8)
    thread = np.arange(128)
    rows, columns = thread // 32 * 16 + thread % 32 // 4, thread % 4
    return np.stack([words[rows + 8 * (r % 2), columns + 4 * (r // 2)] for r in range(4)])


def accumulator_registers(d):
    """D (64, N) as registers of its own type (count, 128), pairs of float16 packed."""
    thread, out = np.arange(128), []
    rows, columns = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    for i in range(d.shape[1] // 2):
        out.append(d[rows + 8 * (i // 2 % 2), columns + i // 4 * 8 + i % 2])
    registers = np.array(out)
    if d.dtype != np.float16:
        return registers
    return np.ascontiguousarray(registers.reshape(-1, 2, 128).swapaxes(1, 2)).view(np.uint32)[..., 0]


def run_wgmma(
    rng, kind="f16", n=24, spans=(128, 128), majors=(True, True), in_registers=False, keep=1, negate=False,
    change=0, options=(), **modes,
):  # fmt: skip
    """One product; returns the accumulators got and wanted."""
    operand, acc = WGMMA_TYPES[kind]
    dtype = STORAGE[operand]
    k = 32 // np.dtype(dtype).itemsize
    low = 0 if operand == "u8" else -4
    a, b = rng.integers(low, 5, (64, k)), rng.integers(low, 5, (n, k))
    c = rng.integers(-30, 30, (64, n))
    image = np.zeros(16384, np.uint8)
    desc_a = place(a.astype(dtype), spans[0], majors[0], image, 0)
    desc_b = place(b.astype(dtype), spans[1], majors[1], image, 8192)
    out = accumulator_registers(c.astype(STORAGE[acc]))
    flags = [f"-DBYTES={len(image)}", f'-DTA="{int(not majors[0])}"', f'-DTB="{int(not majors[1])}"']
    flags += [f'-DNEGATE="{-1 if negate else 1}"', *options]
    args = (image, fragment_registers(a.astype(dtype)), out, desc_a, desc_b + change, keep)
    source = wgmma_source(kind, in_registers, n)
    launch(source, "product", args, shared=len(image), options=flags, **modes)
    want = (-1 if negate else 1) * (a @ b.T) + (c if keep else 0)
    return out, accumulator_registers(want.astype(STORAGE[acc]))


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("kind", list(WGMMA_TYPES))
def test_wgmma_of_every_type(kind, in_registers, rng):
    out, want = run_wgmma(rng, kind, in_registers=in_registers)
    assert np.array_equal(out, want)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("majors", list(itertools.product([True, False], repeat=2)))
def test_wgmma_of_every_layout(span, majors, rng):
    for spans in ((span, 128), (128, span)):
        out, want = run_wgmma(rng, n=64, spans=spans, majors=majors)
        assert np.array_equal(out, want)


@pytest.mark.parametrize("completion", ["late", "early", "random"])
def test_wgmma_scales(completion, rng):
    out, want = run_wgmma(rng, "bf16", spans=(64, 32), keep=0, negate=True, completion=completion)
    assert np.array_equal(out, want)


def test_a_wrong_descriptor_gives_wrong_numbers(rng):
    for change in (1 << 32, 1 << 62, 1):  # SBO, swizzle mode, start address
        out, want = run_wgmma(rng, change=change, check=False)
        assert not np.array_equal(out, want)


def test_wgmma_results_before_the_wait_are_undefined(rng):
    out, want = run_wgmma(rng, options=["-DNO_WAIT"])
    assert np.isnan(out).all()
    assert not np.isnan(want).any()


def test_wgmma_of_unfenced_stores_is_a_race(rng):
    with pytest.raises(RaceError, match=r"fence\.proxy\.async"):
        run_wgmma(rng, options=["-DNO_FENCE"])


@pytest.mark.parametrize("span", [32, 64, 128])
def test_swizzle_is_an_involution_within_its_atom(span):
    chunks = np.arange(0, 2048, 16)
    moved = wgmma.swizzled(chunks, span)
    assert np.array_equal(wgmma.swizzled(moved, span), chunks)
    assert (moved // span == chunks // span).all()
    assert not np.array_equal(moved, chunks)


GEMM = """
// One 64x64 tile a block: a producer warp loads 64x64 boxes by TMA into a ring, a consumer warpgroup multiplies.
__device__ void product(float (&d)[32], u64 a, u64 b, int keep) {
  asm volatile("{\\n.reg .pred p;\\nsetp.ne.b32 p, %34, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, 0;\\n}"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
      "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
      "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
    : "l"(a), "l"(b), "r"(keep));
}
__device__ u64 descriptor(const void* tile) {
  return (u64)(at(tile) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__global__ void __launch_bounds__(160) gemm(const __grid_constant__ TMap ma, const __grid_constant__ TMap mb,
                                            float* c, int N, int K) {
  extern __shared__ __align__(1024) unsigned short tiles[];  // [stage][A, B][64 * 64]
  __shared__ u64 full[2], empty[2];
  int row = blockIdx.y * 64, column = blockIdx.x * 64, steps = (K + 63) / 64;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) { init(&full[i], 1); init(&empty[i], 1); }
    fence_init();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128)
      for (int i = 0; i < steps; ++i) {
        unsigned short* tile = tiles + i % 2 * 8192;
        wait(&empty[i % 2], (i / 2 & 1) ^ 1);
        expect(&full[i % 2], 16384);
        load_2d(tile, &ma, i * 64, row, &full[i % 2]);
        load_2d(tile + 4096, &mb, i * 64, column, &full[i % 2]);
      }
    return;
  }
  float d[32] = {};
  for (int i = 0; i < steps; ++i) {
    const unsigned short* tile = tiles + i % 2 * 8192;
    wait(&full[i % 2], i / 2 & 1);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; ++k) product(d, descriptor(tile) + 2 * k, descriptor(tile + 4096) + 2 * k, i | k);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#ifdef EARLY_RELEASE
    if (threadIdx.x == 0) arrive(&empty[i % 2]);
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#else
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (i > 0 && threadIdx.x == 0) arrive(&empty[(i - 1) % 2]);
#endif
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  int lane = threadIdx.x % 32, first = row + threadIdx.x / 32 * 16 + lane / 4;
  for (int i = 0; i < 32; ++i) c[(first + i / 2 % 2 * 8) * N + column + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}
"""


def run_gemm(rng, **modes):
    m, n, k = 128, 64, 250
    a = rng.integers(-4, 5, (m, 256)).astype(ml_dtypes.bfloat16)[:, :k]
    b = rng.integers(-4, 5, (n, 256)).astype(ml_dtypes.bfloat16)[:, :k]
    c = np.full((m, n), np.nan, np.float32)
    maps = tensor_map(a, (64, 64), swizzle=128), tensor_map(b, (64, 64), swizzle=128)
    report = launch(GEMM, "gemm", (*maps, c, n, k), grid=(1, 2), block=160, shared=32768, **modes)
    return c, a.astype(np.float64) @ b.astype(np.float64).T, report


@pytest.mark.parametrize("completion", ["late", "early", "random"])
def test_hopper_gemm(completion, rng):
    c, want, report = run_gemm(rng, completion=completion)
    assert np.array_equal(c, want)
    assert report.flops == 2 * 128 * 64 * 256


def test_a_stage_released_before_its_product_is_done_is_caught(rng):
    with pytest.raises(EmulatorError):
        run_gemm(rng, options=["-DEARLY_RELEASE"])
