"""Few tokens and 4-bit weights with K contiguous in groups of 128: the kernels that stream them on Hopper."""

import itertools

import numpy as np
import pytest
from hopper_gemm import ran_on_hopper
from packed_weights import Weights, integers, same

import rawops
from rawops import _gemm_w4_gemv as direct
from rawops import _gemm_w4_sm90 as streamed
from rawops._emulator.machine import Machine
from rawops._gemm_w4_sm90 import select_config
from rawops.testing import references, tolerances

KERNEL = "gemm_w4_sm90"
DIRECT = "gemv_w4"  # up to eight tokens
CASES = [
    ((1, 16, 128), "int4", False),
    ((1, 48, 768), "uint4", True),
    ((2, 144, 256), "uint4", True),
    ((8, 64, 512), "float4_e2m1fn", False),
    ((8, 256, 256), "int4", False),
    ((9, 32, 1280), "uint4", False),
    ((16, 112, 256), "uint4", True),
    ((16, 136, 256), "float4_e2m1fn", False),
]


def kernel_of(M: int) -> str:
    return DIRECT if M <= 8 else KERNEL


@pytest.mark.parametrize("size, b_dtype, zeros", CASES)
def test_sizes_and_formats(hopper, rng, size, b_dtype, zeros):
    M, N, K = size
    dtype = "bfloat16" if M % 2 else "float16"
    weights = Weights(hopper, rng, K, N, 128, b_dtype, zeros=zeros, scale_dtype=dtype)
    a = integers(rng, (M, K), dtype)
    out = hopper.guarded((M, N), np.float32)
    weights.gemm(hopper.put(a), out=out)
    assert ran_on_hopper(hopper, kernel_of(M))
    same(hopper, out, a.astype(float) @ weights.values)


@pytest.mark.parametrize("M, scale_dtype", [(1, "float16"), (3, "float32"), (16, "bfloat16"), (16, "float32")])
def test_epilogue(hopper, rng, M, scale_dtype):
    N, K = 160, 256
    weights = Weights(hopper, rng, K, N, 128, "uint4", zeros=True, scale_dtype=scale_dtype)
    a, c, bias = integers(rng, (M, K)), integers(rng, (M, N)), integers(rng, (N,), "float32")
    keywords = {"alpha": 0.5, "beta": 2.0, "bias": bias, "activation": "swiglu"}
    given = {**keywords, "bias": hopper.put(bias)}
    got = weights.gemm(hopper.put(a), hopper.put(c), residual=hopper.put(c[:, : N // 2].copy()), **given)
    assert ran_on_hopper(hopper, kernel_of(M))
    want = references.gemm(a, weights.values, c, residual=c[:, : N // 2], **keywords)
    tolerances.assert_close(hopper.get(got), want, "float16", k=K)


def test_more_rounds_than_stages(hopper, rng):
    """The ring comes round, and the last round has groups for a few of the slices only."""
    K = 128 * 92
    config = select_config(16, K, 1, (2, 0), 132, 227 * 1024)
    assert config.stages * config.groups * 128 < K
    assert K // 128 % config.slices
    weights = Weights(hopper, rng, K, 16, 128, "int4")
    a = integers(rng, (16, K))
    got = weights.gemm(hopper.put(a), out_dtype="float32")
    assert ran_on_hopper(hopper, KERNEL)
    same(hopper, got, a.astype(float) @ weights.values)


@pytest.mark.parametrize("M, N, seed", [(16, 16, 0), (12, 64, 1)])
def test_any_order_of_completion(rng, M, N, seed):
    """Copies that land late, early or with the warps in another order: the same bits."""
    K = 128 * 42
    a = rng.standard_normal((M, K)).astype(np.float16)
    b, scale = np.ascontiguousarray(rng.integers(0, 256, (N, K // 2), np.uint8)).T, np.ones((42, N), np.float16)
    results = []
    for completion in ("late", "early", "random"):
        with rawops.emulate(arch="sm_90a", completion=completion, seed=seed) as emu:
            results.append(rawops.gemm(a, b, scale_b=scale, b_dtype="int4", out_dtype="float32"))
        assert KERNEL in emu.report[0].kernel
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("units", [1, 99])
@pytest.mark.parametrize("slow", [0, 9])
def test_a_warp_that_stands_still(rng, monkeypatch, slow, units):
    """One warp goes on only where no other one can; what it passes has been filled twice by then."""
    end_of_block = Machine._end_of_block

    def let_others_go_on(self, *where):
        fronts = end_of_block(self, *where)
        self._poll()
        return fronts

    def choose(self):
        others = [key for key in self._fronts if key[0] != slow]
        if not others and self._poll():
            others = [key for key in self._fronts if key[0] != slow]
        return min(others or self._fronts)

    monkeypatch.setattr(Machine, "_end_of_block", let_others_go_on)
    monkeypatch.setattr(Machine, "_choose", choose)
    monkeypatch.setattr(streamed, "_SHARED", units)
    K = 128 * 92
    config = select_config(16, K, 1, (2, 0), 132, 227 * 1024)
    assert slow < config.slices
    assert config.slices > config.groups, "a warp has no group in some stages"
    assert 2 * config.stages * config.groups < K // 128
    a = integers(rng, (12, K))
    q, scale = rng.integers(0, 256, (16, K // 2), np.uint8), np.ones((K // 128, 16), np.float16)
    with rawops.emulate(arch="sm_90a", completion="random", seed=0) as emu:
        got = rawops.gemm(a, q.T, scale_b=scale, b_dtype="int4", out_dtype="float32")
    assert KERNEL in emu.report[0].kernel
    weights = np.stack([(q & 15 ^ 8) - 8.0, (q >> 4 ^ 8) - 8.0], -1).reshape(16, K)
    np.testing.assert_array_equal(got, a.astype(float) @ weights.T)


@pytest.mark.parametrize("units, N", [(1, 64), (99, 96)])
def test_tokens_are_paired_once_or_by_each_warp(hopper, rng, monkeypatch, units, N):
    """In products of different sizes, since what has been prepared for one is kept."""
    monkeypatch.setattr(streamed, "_SHARED", units)
    weights = Weights(hopper, rng, 2304, N, 128, "uint4", zeros=True)
    a = integers(rng, (11, 2304))
    got = weights.gemm(hopper.put(a), out_dtype="float32")
    assert ran_on_hopper(hopper, KERNEL)
    same(hopper, got, a.astype(float) @ weights.values)


@pytest.mark.parametrize("split, asks", [(4, True), (4, False), (8, True), (16, False), (32, False)])
def test_warps_of_a_block(hopper, rng, monkeypatch, split, asks):
    """Groups that the warps share out, and fewer groups than warps; what is asked for ahead changes nothing."""
    monkeypatch.setattr(direct, "select_config", lambda N, *_: direct.Config(split, -(-N // 32), asks))
    weights = Weights(hopper, rng, 128 * 9, 48, 128, "uint4", zeros=True)
    a = integers(rng, (2, 128 * 9))
    got = weights.gemm(hopper.put(a), out_dtype="float32")
    assert ran_on_hopper(hopper, DIRECT)
    same(hopper, got, a.astype(float) @ weights.values)


def test_scales_that_no_lane_reads_at_once(hopper, rng):
    """Columns that are no multiple of four go through tensor maps, however few the tokens."""
    weights = Weights(hopper, rng, 512, 16, 128, "int4")
    weights.b, weights.scale_b = weights.b[:, :14], weights.scale_b[:, :14]
    a = integers(rng, (3, 512))
    got = weights.gemm(hopper.put(a), out_dtype="float32")
    assert ran_on_hopper(hopper, KERNEL)
    same(hopper, got, a.astype(float) @ weights.values[:, :14])


def test_views_and_batches(hopper, rng):
    """NaN on all sides of what is read; rows that do not stack take the general kernel."""
    N, K = 32, 256
    weights = Weights(hopper, rng, K, N, 128, "uint4", zeros=True)
    wide = np.full((3, 7, K + 16), np.nan, np.float16)
    wide[:, 2:5, 8:-8] = integers(rng, (3, 3, K))
    scale = np.full((4, N + 16), np.nan, np.float16)
    scale[1:-1, 8:-8] = hopper.get(weights.scale_b)
    weights.scale_b = hopper.put(scale)[1:-1, 8:-8]
    a = hopper.put(wide)[:, 2:5, 8:-8]
    same(hopper, weights.gemm(a[1], out_dtype="float32"), wide[1, 2:5, 8:-8].astype(float) @ weights.values)
    assert ran_on_hopper(hopper, DIRECT)
    same(hopper, weights.gemm(a, out_dtype="float32"), wide[:, 2:5, 8:-8].astype(float) @ weights.values)
    assert not hopper.report or not (ran_on_hopper(hopper, DIRECT) or ran_on_hopper(hopper, KERNEL))


def test_nothing_read_without_alpha_and_nan_where_it_is_read(hopper, rng):
    weights = Weights(hopper, rng, 256, 16, 128, "int4")
    c, a = integers(rng, (4, 16)), integers(rng, (4, 256))
    a[1, 40] = np.nan
    same(hopper, weights.gemm(hopper.put(a), hopper.put(c), alpha=0.0, beta=1.0), c)
    assert np.isnan(hopper.get(weights.gemm(hopper.put(a)))).all(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("change", ["group", "columns", "rows", "split", "scales", "start"])
def test_others_take_the_general_kernel(hopper, rng, change):
    N, group, rows = 11 if change == "columns" else 16, 64 if change == "group" else 128, 17 if change == "rows" else 3
    weights = Weights(hopper, rng, 256, N, group, "int4", k_major=change != "scales")
    a = integers(rng, (rows, 264))
    part = hopper.put(a)[:, 1:257] if change == "start" else hopper.put(a)[:, :256]
    got = weights.gemm(part, out_dtype="float32", **({"split_k": 2} if change == "split" else {}))
    assert not hopper.report or not (ran_on_hopper(hopper, DIRECT) or ran_on_hopper(hopper, KERNEL))
    same(hopper, got, hopper.get(part).astype(float) @ weights.values)


def test_configurations():
    """One round of blocks where that is possible, and no more memory than there is."""
    sizes = itertools.product((16, 4096, 28672, 152064), (128, 4096, 14336), (1, 2), ((2, 0), (4, 1)))
    for N, K, parts, group_bytes in sizes:
        config = select_config(N, K, parts, group_bytes, 132, 227 * 1024)
        assert config.blocks * config.units * 32 >= N
        assert config.threads <= 608
        assert config.shared_bytes <= 227 * 1024
        assert config.units * 32 <= 256
    for slices, units in itertools.product(range(1, 18), range(1, 9)):
        if slices * units <= 17 and (config := streamed._with_ring(slices, units, 1, 1, (2, 0), 227 * 1024)):
            assert slices <= config.groups * streamed._MIN_STAGES, "a warp's next group is past the ring"
    config = select_config(28672, 4096, 1, (2, 0), 132, 227 * 1024)
    assert (config.blocks, config.units, config.slices) == (128, 7, 2)
    splits = [direct.select_config(N, 4096, 132).split for N in (16, 4096, 8192, 10240, 28672)]
    assert splits == [32, 32, 16, 8, 4]
    sizes = (4096, 4096, False), (6144, 4096, False), (4096, 8192, True), (262144, 512, False)
    for N, K, asks in sizes:
        assert direct.select_config(N, K, 132).asks == asks


def test_a_plan(hopper, rng):
    weights = Weights(hopper, rng, 512, 24, 128, "float4_e2m1fn")
    plan = rawops.Gemm(2, 24, 512, "float16", out_dtype="float32", scale_b=weights.scale_b, b_dtype="float4_e2m1fn")
    for _ in range(2):
        a = integers(rng, (2, 512))
        same(hopper, plan(hopper.put(a), weights.b), a.astype(float) @ weights.values)
    assert ran_on_hopper(hopper, DIRECT)
