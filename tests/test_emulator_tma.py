"""The emulator's tensor copies by TMA: boxes, swizzles, bounds, reductions, and their misuse."""

import ml_dtypes
import numpy as np
import pytest
from hopper import launch, swizzle, tensor_map

from rawops.errors import BarrierError, MemoryFault, RaceError, UninitializedRead

TMA = """
template <int RANK> __device__ void load(void* dst, const TMap* m, int x, int y, int z, u64* bar) {
  if (RANK == 2) return load_2d(dst, m, x, y, bar);
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3, %4}], [%5];"
               ::"r"(at(dst)), "l"(m), "r"(x), "r"(y), "r"(z), "r"(at(bar)) : "memory");
}
template <int RANK> __device__ void store(const TMap* m, int x, int y, int z, const void* src) {
  if (RANK == 2)
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(m), "r"(x), "r"(y), "r"(at(src)) : "memory");
  else
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];"
                 ::"l"(m), "r"(x), "r"(y), "r"(z), "r"(at(src)) : "memory");
}
// Loads a box, gives away its image in shared memory, and stores it elsewhere.
template <int RANK>
__global__ void copy(const __grid_constant__ TMap src, const __grid_constant__ TMap dst, u32* image, int bytes,
                     int x, int y, int z, int tx, int ty, int tz) {
  extern __shared__ __align__(1024) unsigned char buffer[];
  __shared__ u64 bar;
  if (threadIdx.x == 0) {
    init(&bar, 1);
    fence_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&src) : "memory");
    expect(&bar, bytes);
    load<RANK>(buffer, &src, x, y, z, &bar);
  }
#ifndef NO_WAIT
  wait(&bar, 0);
#endif
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) image[i] = ((u32*)buffer)[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    store<RANK>(&dst, tx, ty, tz, buffer);
    commit();
    wait_bulk();
  }
}
"""


def box_of(array, first, size, fill=0):
    """The elements array[first : first + size] with `fill` where that is outside."""
    out = np.full(size, fill, array.dtype)
    inside = [(max(f, 0), min(f + n, m)) for f, n, m in zip(first, size, array.shape, strict=True)]
    if all(low < high for low, high in inside):
        target = tuple(slice(low - f, high - f) for (low, high), f in zip(inside, first, strict=True))
        out[target] = array[tuple(slice(low, high) for low, high in inside)]
    return out


def tma_case(src, dst, box, first, target, span, **modes):
    """Copy a box by TMA; returns image and destination, and what they should be."""
    rank, nbytes = src.ndim, int(np.prod(box)) * src.itemsize
    image = np.zeros(nbytes, np.uint8)
    pads = (0,) * (3 - rank)
    args = (
        tensor_map(src, box, swizzle=span), tensor_map(dst, box, swizzle=span), image, nbytes,
        *first[::-1], *pads, *target[::-1], *pads,
    )  # fmt: skip
    want = box_of(src, first, box)
    report = launch(TMA, f"copy<{rank}>", args, shared=nbytes, **modes)
    assert np.array_equal(image, swizzle(np.ascontiguousarray(want).reshape(-1).view(np.uint8), span))
    return want, report


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_tma_2d_round_trip_of_every_swizzle(span, dtype, rng):
    width = (span or 64) // np.dtype(dtype).itemsize
    src = rng.integers(1, 100, (40, 2 * width)).astype(dtype)
    dst = np.zeros_like(src)
    want, _ = tma_case(src, dst, (16, width), (8, width), (24, 0), span)
    expected = np.zeros_like(src)
    expected[24:40, :width] = want
    assert np.array_equal(dst, expected)


@pytest.mark.parametrize("first", [(-3, -8), (30, 40), (-20, 0), (33, -16)])
def test_tma_zero_fills_and_clips_what_is_out_of_bounds(first, rng):
    src = rng.integers(1, 100, (40, 64)).astype(np.float16)[:37, :56]
    dst = np.full((40, 64), np.nan, np.float16)
    row, column = target = np.maximum(first, 0)
    want, _ = tma_case(src, dst[:37, :56], (16, 32), first, tuple(target.tolist()), 64)
    expected = np.full_like(dst, np.nan)
    there = expected[row : min(row + 16, 37), column : min(column + 32, 56)]
    there[:] = want[: there.shape[0], : there.shape[1]]
    assert np.array_equal(dst, expected, equal_nan=True)


def test_a_store_ends_with_the_16_bytes_in_which_a_row_ends(rng):
    """As on hardware: elements 50 to 55 lie behind the row, and one of the last row outside the array."""
    src, dst = rng.integers(1, 100, (40, 64)).astype(np.float16), np.zeros((40, 64), np.float16)
    with pytest.raises(MemoryFault, match="12 bytes past the end"):
        tma_case(src, dst[:, :50], (16, 32), (30, 40), (30, 40), 64)


@pytest.mark.parametrize(("load", "store", "wrong"), [(4, 0, 4), (-1, 0, -1), (8, 9, 9)])
def test_an_innermost_coordinate_off_16_bytes_is_misaligned(load, store, wrong):
    src, image = np.zeros((8, 64), np.float16), np.zeros(512, np.uint8)
    maps = tensor_map(src, (8, 32)), tensor_map(src, (8, 32))
    message = f"innermost coordinate {wrong} of a tensor copy is misaligned: {2 * wrong} bytes are no multiple of 16"
    with pytest.raises(MemoryFault, match=message):
        launch(TMA, "copy<2>", (*maps, image, 512, load, 0, 0, store, 0, 0), shared=512)


@pytest.mark.parametrize(("x", "y"), [(-8, 0), (0, -3)])
def test_a_store_at_negative_coordinates_is_caught(x, y):
    src, image = np.zeros((8, 64), np.float16), np.zeros(512, np.uint8)
    maps = tensor_map(src, (8, 32)), tensor_map(src, (8, 32))
    with pytest.raises(MemoryFault, match=rf"a tensor store at \({x}, {y}\)"):
        launch(TMA, "copy<2>", (*maps, image, 512, 0, 0, 0, x, y, 0), shared=512)


@pytest.mark.parametrize("completion", ["late", "early", "random"])
def test_tma_3d(completion, rng):
    src = rng.integers(1, 100, (5, 20, 64)).astype(ml_dtypes.bfloat16)
    dst = np.zeros((5, 20, 64), ml_dtypes.bfloat16)
    want, report = tma_case(src, dst, (2, 8, 64), (3, 15, 0), (1, 2, 0), 128, completion=completion)
    expected = np.zeros_like(dst)
    expected[1:3, 2:10] = want
    assert np.array_equal(dst, expected)
    assert report.loads.global_bytes >= 2 * 5 * 64 * 2


def test_tma_element_strides_and_nan_fill(rng):
    src = rng.integers(1, 100, (40, 32)).astype(np.float16)
    image, dst = np.zeros((4, 32), np.float16), np.zeros((4, 32), np.float16)
    source = tensor_map(src, (8, 32), element_strides=(2, 1), fill="nan")
    launch(TMA, "copy<2>", (source, tensor_map(dst, (4, 32)), image, 256, 0, 35, 0, 0, 0, 0), shared=256)
    want = np.full((4, 32), np.nan, np.float16)
    want[:3] = src[35::2]
    assert np.array_equal(image, want, equal_nan=True)


def test_reading_a_tma_box_before_the_wait_is_caught():
    src, image = np.zeros((8, 32), np.float16), np.zeros(512, np.uint8)
    maps = tensor_map(src, (8, 32)), tensor_map(src, (8, 32))
    with pytest.raises(UninitializedRead, match="not yet waited for"):
        launch(TMA, "copy<2>", (*maps, image, 512, 0, 0, 0, 0, 0, 0), shared=512, options=["-DNO_WAIT"])


def test_waiting_for_bytes_that_never_come_is_a_deadlock():
    src, image = np.zeros((8, 32), np.float16), np.zeros(1024, np.uint8)
    maps = tensor_map(src, (8, 32)), tensor_map(src, (8, 32))
    with pytest.raises(BarrierError, match="1024 bytes, of which 512 are in flight"):
        launch(TMA, "copy<2>", (*maps, image, 1024, 0, 0, 0, 0, 0, 0), shared=1024)


REDUCE = """
__global__ void reduce(const __grid_constant__ TMap dst, const float* add, float* sums) {
  __shared__ __align__(128) float tile[8 * 16];
  tile[threadIdx.x] = add[threadIdx.x];
#ifndef NO_FENCE
  fence_async();
#endif
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(&dst), "r"(0), "r"((int)blockIdx.x * 4), "r"(at(tile)) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.max.s32 [%0], [%1], %2;"
                 ::"l"(sums), "r"(at(tile)), "r"(64) : "memory");
    commit();
#ifndef OVERWRITE
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#else
    tile[3] = 7;
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
  }
}
"""


def test_tma_and_bulk_reductions(rng):
    dst = rng.integers(0, 9, (10, 16)).astype(np.float32)
    add = rng.integers(1, 9, (8, 16)).astype(np.float32)
    most = np.zeros(16, np.int32)
    most[3] = 2**31 - 1
    expected = dst.copy()
    expected[0:8] += add
    expected[4:10] += add[:6]
    launch(REDUCE, "reduce", (tensor_map(dst, (8, 16)), add, most), grid=2)
    assert np.array_equal(dst, expected)
    assert np.array_equal(most, np.where(np.arange(16) == 3, 2**31 - 1, add[0].view(np.int32)))


@pytest.mark.parametrize(
    ("option", "message"),
    [("NO_FENCE", "fence.proxy.async"), ("OVERWRITE", "was overwritten before it was waited for")],
)
def test_misused_tma_stores_are_races(option, message):
    dst, add, most = np.zeros((10, 16), np.float32), np.zeros((8, 16), np.float32), np.zeros(16, np.int32)
    with pytest.raises(RaceError, match=message):
        launch(REDUCE, "reduce", (tensor_map(dst, (8, 16)), add, most), options=[f"-D{option}"])
