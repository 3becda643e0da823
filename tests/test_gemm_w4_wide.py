"""Many tokens and 4-bit weights, either way round: the kernel of Hopper that dequantises for wgmma."""

import dataclasses
import itertools

import numpy as np
import pytest
from hopper_gemm import ran_on_hopper
from packed_weights import Weights, integers, same

import rawops
from rawops import _gemm_w4_wide
from rawops._gemm_w4_wide import BY_RING, BY_SLAB
from rawops.testing import references, tolerances

KERNEL, PAIRS = "gemm_w4_wide_sm90<", "gemm_w4_wide_sm90_pairs"
LIMITS = 132, 227 * 1024


@pytest.fixture
def tile(monkeypatch):
    """Fix the tile, the ring, the number of blocks and the slices of K.

    A few blocks take many tiles. Without their number each has one, whose sums go through the ring.
    """

    def fix(tile, blocks=2, split_k=1, cluster=1) -> None:
        stages = 3 if tile[2] == 1 else 2 * tile[2]

        def chosen(problem, *limits):
            k_blocks = -(-problem.K // 128 // (split_k * cluster))
            config = _gemm_w4_wide.configure(problem, *limits, tile, k_blocks, cluster)
            if blocks is None:
                return config
            finish = BY_SLAB if config.finish == BY_RING else config.finish
            rows = 1 if tile[0] == 16 else 8
            return dataclasses.replace(config, stages=stages, blocks=blocks, raster_rows=rows, finish=finish)

        monkeypatch.setattr(_gemm_w4_wide, "select_config", chosen)

    return fix


def check(hopper, rng, size, b_dtype, group, *, dtype="float16", last=KERNEL, **how):
    M, N, K = size
    weights = Weights(hopper, rng, K, N, group, b_dtype, **how)
    a = integers(rng, (M, K), dtype)
    out = hopper.guarded((M, N), np.float32)
    weights.gemm(hopper.put(a), out=out)
    assert ran_on_hopper(hopper, last)
    same(hopper, out, a.astype(float) @ weights.values)


def check_epilogue(hopper, rng, last):
    M, N, K = 50, 160, 512
    weights = Weights(hopper, rng, K, N, 128, "uint4", zeros=True)
    a, c, bias = integers(rng, (M, K)), integers(rng, (M, N)), integers(rng, (N,), "float32")
    keywords = {"alpha": 0.5, "beta": 2.0, "bias": bias, "activation": "swiglu"}
    given = {**keywords, "bias": hopper.put(bias)}
    got = weights.gemm(hopper.put(a), hopper.put(c), residual=hopper.put(c[:, : N // 2].copy()), **given)
    assert ran_on_hopper(hopper, last)
    want = references.gemm(a, weights.values, c, residual=c[:, : N // 2], **keywords)
    tolerances.assert_close(hopper.get(got), want, "float16", k=K)


@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize(
    "b_dtype, zeros, group", [("int4", False, 128), ("uint4", True, 64), ("float4_e2m1fn", False, 32)]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_formats(hopper, rng, b_dtype, zeros, group, k_major, dtype):
    size = (23, 144, 384)
    check(hopper, rng, size, b_dtype, group, dtype=dtype, zeros=zeros, k_major=k_major, scale_dtype=dtype)


@pytest.mark.parametrize("shape", _gemm_w4_wide.TILES)
def test_tiles(hopper, rng, tile, shape):
    """A ragged last tile along each axis, more tiles than blocks, a ring that comes round."""
    tokens, units, slices = shape
    tile(shape)
    size = (tokens + 9, units * 64 + 16, 416)
    check(hopper, rng, size, "uint4", 32, zeros=True, k_major=slices != 2, scale_dtype="float32")


@pytest.mark.parametrize("shape, cluster", [((16, 1, 4), 1), ((16, 1, 4), 2), ((64, 2, 2), 2), ((48, 2, 1), 2)])
def test_blocks_of_one_tile(hopper, rng, tile, shape, cluster):
    """Alone, or two for a tile, which share K: evenly, so that the second has less, or nothing. A part of a tile."""
    tokens, units, _ = shape
    for K in (1024, 640, 128):
        tile(shape, blocks=None, cluster=cluster)
        last = PAIRS if cluster > 1 else KERNEL
        check(hopper, rng, (tokens + 9, units * 64 + 16, K), "int4", 128, k_major=units > 1, last=last)


@pytest.mark.parametrize("shape, cluster", [((64, 1, 4), 2), ((48, 2, 1), 2), ((48, 2, 1), 1)])
def test_any_order_of_completion(rng, tile, shape, cluster):
    """Two blocks a tile or two tiles a block, copies that land late, early or in the order of warps: the same bits."""
    tile(shape, blocks=None if cluster > 1 else 1, cluster=cluster)
    a, scale = rng.standard_normal((40, 1280)).astype(np.float16), np.ones((10, 144), np.float16)
    b = np.ascontiguousarray(rng.integers(0, 256, (144, 640), np.uint8)).T
    results = []
    for completion in ("late", "early", "random"):
        with rawops.emulate(arch="sm_90a", completion=completion) as emu:
            results.append(rawops.gemm(a, b, scale_b=scale, b_dtype="int4", out_dtype="float32"))
        assert (PAIRS if cluster > 1 else KERNEL) in emu.report[0].kernel
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("shape, cluster", [((64, 2, 2), 2), ((16, 4, 1), 1)])
def test_epilogue_of_one_tile(hopper, rng, tile, shape, cluster):
    tile(shape, blocks=None, cluster=cluster)
    check_epilogue(hopper, rng, PAIRS if cluster > 1 else KERNEL)


@pytest.mark.parametrize("shape", [(32, 4, 1), (48, 2, 1), (16, 1, 4)])
@pytest.mark.parametrize("group", [64, 128])
def test_groups(hopper, rng, tile, shape, group):
    tile(shape)
    check(hopper, rng, (20, 80, 640), "int4", group, k_major=group == 64)


def test_slices_of_k(hopper, rng, tile):
    tile((32, 2, 2), split_k=3, blocks=4)
    check(hopper, rng, (40, 160, 1024), "int4", 128, last="gemm_reduce")


@pytest.mark.parametrize("shape, split_k", [((48, 2, 1), 1), ((48, 2, 1), 2), ((32, 4, 1), 1), ((64, 2, 2), 1)])
def test_epilogue(hopper, rng, tile, shape, split_k):
    tile(shape, split_k=split_k)
    check_epilogue(hopper, rng, KERNEL if split_k == 1 else "gemm_reduce")


@pytest.mark.parametrize("shape", [(48, 2, 1), (32, 4, 1)])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_results_that_leave_by_tma(hopper, rng, tile, shape, activation):
    """A ragged last tile along each axis, rows apart, and what lies between them untouched."""
    tile(shape)
    M, N, K = 60, 280, 256
    weights = Weights(hopper, rng, K, N, 128, "int4")
    a, bias = integers(rng, (M, K)), integers(rng, (N,), "float32") if activation else None
    room = hopper.put(np.full((M, N + 24), 99, np.float16))
    out = room[:, 8:-16]
    given = None if bias is None else hopper.put(bias)
    weights.gemm(hopper.put(a), alpha=0.125, bias=given, activation=activation, out=out)
    assert ran_on_hopper(hopper, KERNEL)
    want = references.gemm(a, weights.values, alpha=0.125, bias=bias, activation=activation)
    tolerances.assert_close(hopper.get(out), want, "float16", k=K)
    same(hopper, room[:, :8], np.full((M, 8), 99))
    same(hopper, room[:, -16:], np.full((M, 16), 99))


def test_large_zero_points(hopper, rng):
    """Whole bytes, with a sign and without."""
    for sign, dtype in ((0, np.uint8), (128, np.int8)):
        weights = Weights(hopper, rng, 128, 128, 64, "uint4", zeros=True)
        zero = rng.integers(0, 256, (2, 128)) - sign
        codes = weights.values / np.repeat(hopper.get(weights.scale_b).astype(float), 64, 0)
        codes += np.repeat(hopper.get(weights.zero_b).astype(float), 64, 0)
        weights.zero_b = hopper.put(zero.astype(dtype))
        weights.values = (codes - np.repeat(zero, 64, 0)) * np.repeat(hopper.get(weights.scale_b).astype(float), 64, 0)
        a = integers(rng, (20, 128), "bfloat16")
        got = weights.gemm(hopper.put(a), out_dtype="float32")
        assert ran_on_hopper(hopper, KERNEL)
        same(hopper, got, a.astype(float) @ weights.values)


def test_views(hopper, rng):
    """NaN on all sides of what is read."""
    M, N, K = 20, 32, 256
    weights = Weights(hopper, rng, K, N, 128, "uint4", zeros=True)
    wide = np.full((M + 2, K + 16), np.nan, np.float16)
    wide[1:-1, 8:-8] = integers(rng, (M, K))
    scale = np.full((4, N + 16), np.nan, np.float16)
    scale[1:-1, 8:-8] = hopper.get(weights.scale_b)
    weights.scale_b = hopper.put(scale)[1:-1, 8:-8]
    same(
        hopper,
        weights.gemm(hopper.put(wide)[1:-1, 8:-8], out_dtype="float32"),
        wide[1:-1, 8:-8].astype(float) @ weights.values,
    )
    assert ran_on_hopper(hopper, KERNEL)


def test_nothing_read_without_alpha_and_nan_where_it_is_read(hopper, rng):
    weights = Weights(hopper, rng, 256, 16, 128, "int4")
    c, a = integers(rng, (18, 16)), integers(rng, (18, 256))
    a[1, 40], a[2, 7] = np.nan, np.inf
    same(hopper, weights.gemm(hopper.put(a), hopper.put(c), alpha=0.0, beta=1.0), c)
    got = hopper.get(weights.gemm(hopper.put(a)))
    assert ran_on_hopper(hopper, KERNEL)
    assert np.isnan(got[1]).all()
    assert not np.isfinite(got[2]).any()
    assert np.isfinite(got[3:]).all()


@pytest.mark.parametrize("change", ["columns", "split", "start", "layout", "batch"])
def test_others_take_the_general_kernel(hopper, rng, change):
    N = 11 if change == "columns" else 16
    weights = Weights(hopper, rng, 256, N, 128, "int4")
    a = integers(rng, (2, 264, 264))
    part = hopper.put(a)[0, :20, 1:257] if change == "start" else hopper.put(a)[0, :20, :256]
    if change in ("layout", "batch"):
        part = hopper.put(a)[0, :256, :24].T if change == "layout" else hopper.put(a)[:, :20, :256]
    got = weights.gemm(part, out_dtype="float32", **({"split_k": 2} if change == "split" else {}))
    assert not hopper.report or not ran_on_hopper(hopper, KERNEL)
    same(hopper, got, hopper.get(part).astype(float) @ weights.values)


@pytest.mark.parametrize("cluster, k_major", [(1, False), (2, True)])
def test_what_is_asked_for_ahead_changes_nothing(hopper, rng, tile, cluster, k_major):
    """Enough blocks of K for that, ragged columns, and tiles of which only the first row asks."""
    tile((16, 1, 4), cluster=cluster, blocks=2 if cluster == 1 else None)
    last = KERNEL if cluster == 1 else PAIRS
    check(hopper, rng, (18, 80, 128 * 25 * cluster), "uint4", 128, zeros=True, k_major=k_major, last=last)


def test_configurations():
    """Everything has a tile, and no more memory than there is."""
    sizes = itertools.product(
        (1, 17, 1000, 70000), (16, 28672), (32, 4096), (1, 2), (True, False), (32, 128), (2, 4), (0, 1)
    )
    for values in sizes:
        problem = _gemm_w4_wide.Problem(*values)
        config = _gemm_w4_wide.select_config(problem, *LIMITS)
        assert config.units % config.parts == 0
        assert config.stages % config.slices == 0 < config.stages - config.slices
        assert config.shared_bytes <= LIMITS[1]
        slices = config.split_k * config.cluster
        assert problem.K <= slices * config.k_per_split < problem.K + slices * 128
        if config.finish == BY_RING:
            sums = config.slices * config.tokens * (config.units * 64 + 4) * 4
            assert sums <= config.stages * config.stage_bytes


def test_a_plan(hopper, rng):
    weights = Weights(hopper, rng, 512, 24, 128, "float4_e2m1fn")
    plan = rawops.Gemm(20, 24, 512, "float16", out_dtype="float32", scale_b=weights.scale_b, b_dtype="float4_e2m1fn")
    for _ in range(2):
        a = integers(rng, (20, 512))
        same(hopper, plan(hopper.put(a), weights.b), a.astype(float) @ weights.values)


@pytest.mark.parametrize(
    "M, cols, zeros, k_major", [(20, 40, True, True), (12, 40, True, True), (20, 24, False, False)]
)
def test_copies_of_up_begin_on_16_bytes(hopper, rng, M, cols, zeros, k_major):
    """Where they cannot, the kernel without TMA takes the product."""
    weights = Weights(hopper, rng, 256, 2 * cols, 128, "uint4", zeros=zeros, k_major=k_major)
    a = integers(rng, (M, 256))
    got = weights.gemm(hopper.put(a), activation="swiglu")
    assert ran_on_hopper(hopper, "gemm_w4<")
    want = references.gemm(a, weights.values, activation="swiglu")
    tolerances.assert_close(hopper.get(got), want, "float16", k=256)
