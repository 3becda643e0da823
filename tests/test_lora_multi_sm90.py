"""MultiLoRA on Hopper: tiles, slices of K, one launch for few rows, tiles whose consumers take turns."""

from types import SimpleNamespace

import numpy as np
import pytest
from hopper_gemm import ran_on_hopper
from lora_adapters import (
    DTYPES,
    adapter,
    bits,
    check_intermediate_is_float32,
    check_intermediate_past_65504,
    check_non_finite_scaling,
    check_non_finite_values,
    integers,
    load,
    load_sliced,
    poison,
    reference,
    same,
)

import rawops
from rawops import _gemm_sm90_config, _gemm_sm90_split, _lora_multi_config
from rawops._gemm_sm90_specs import DIRECT, PLAIN
from rawops.lora import MultiLoRA
from rawops.testing import has_gpu
from rawops.testing.tolerances import assert_close

# block_m, block_n, cluster, consumers take turns, order of the weight
TILES = [
    (64, 128, 1, False, "C"),
    (64, 64, 2, False, "F"),
    (128, 176, 1, False, "F"),
    (128, 192, 1, False, "C"),
    (128, 64, 2, False, "C"),
    (128, 144, 1, True, "F"),
]


@pytest.mark.parametrize("block_m, block_n, cluster, in_turn, order", TILES)
def test_hopper_tiles(hopper, force, rng, block_m, block_n, cluster, in_turn, order):
    """Several tiles a block, slices of K, steps of 16 ranks, slices of columns: through TMA and not."""
    force(block_n, in_turn, block_m=block_m, cluster=cluster, stages=3)
    M, N, K, slices = block_m + 20, block_n + 72, 136, [(0, block_n - 9), (block_n - 9, block_n + 30)]
    x, c = integers(rng, (M, K)), integers(rng, (K, N))
    weight = hopper.put(c) if order == "C" else hopper.put(c.T.copy()).T
    op = MultiLoRA(weight, 4, 20, slices=slices)
    adapters = load_sliced(hopper, rng, op, [(16, 5), (20, None), (None, 3)])
    indices = rng.integers(-1, 4, M).astype(np.int32)
    out = hopper.guarded((M, N), np.float16)
    op(hopper.put(x), hopper.put(indices), out=out)
    entry = "lora_multi_sm90" if cluster == 1 else "lora_multi_sm90_cluster"
    assert ran_on_hopper(hopper, f"{entry}<__half, __half, {block_m}, {block_n}, ")  # what was forced
    same(hopper, out, reference(x, c, adapters, indices))


@pytest.mark.parametrize("M", [5, 70])
def test_hopper_slices_of_k(hopper, four_slices, rng, M):
    """Where gemm adds up slices of K, adapters come in as an addend; without one, gemm's bits."""
    N, K, slices = 72, 512, [(0, 33), (40, 72)]
    x, c = (rng.standard_normal(shape).astype(np.float16) for shape in ((M, K), (K, N)))
    residual = rng.standard_normal((M, N)).astype(np.float32)
    on_device = [hopper.put(array) for array in (x, c, residual)]
    op = MultiLoRA(on_device[1], 3, 20, slices=slices, activation="silu")
    poison(op)
    adapters = load_sliced(hopper, rng, op, [(20, 3), (None, 16)])
    indices = rng.integers(-1, 3, M).astype(np.int32)
    out = hopper.guarded((M, N), np.float16)
    op(on_device[0], hopper.put(indices), residual=on_device[2], out=out)
    assert ran_on_hopper(hopper, "gemm_reduce")
    assert_close(hopper.get(out), reference(x, c, adapters, indices, activation="silu") + residual, np.float16, k=2000)
    base = rawops.gemm(*on_device[:2], residual=on_device[2], activation="silu")
    np.testing.assert_array_equal(bits(hopper, out)[indices % 3 == 2], bits(hopper, base)[indices % 3 == 2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_turn", [False, True])
def test_hopper_intermediate(hopper, force, rng, dtype, in_turn):
    """float32, without a limit, and what is infinite or NaN stays where it belongs."""
    if in_turn:
        force(144, True, block_m=128, stages=3)
    check_intermediate_past_65504(hopper, dtype)
    check_intermediate_is_float32(hopper, rng, dtype)
    check_non_finite_values(hopper, rng, dtype)
    check_non_finite_scaling(hopper, rng, dtype)
    assert ran_on_hopper(hopper, "lora_multi_sm90")


@pytest.mark.parametrize("in_turn", [False, True])
def test_hopper_rows_without_an_adapter(hopper, force, rng, in_turn):
    """The bits of gemm with the configuration that gemm takes, plain, and with an epilogue."""
    M, N, K = 40, 72, 200
    if in_turn:
        force(144, True, block_m=128, stages=3)
    x, c = (hopper.put(rng.standard_normal(shape).astype(DTYPES["bfloat16"])) for shape in ((M, K), (N, K)))
    c = c.T
    residual, bias = (hopper.put(rng.standard_normal(shape).astype(np.float32)) for shape in ((M, N), (N,)))
    indices = rng.integers(-1, 1, M).astype(np.int32)
    for always, now in (({}, {}), ({}, {"residual": residual}), ({"bias": bias, "activation": "silu"}, {})):
        op = MultiLoRA(c, 2, 8, **always)
        load(hopper, op, {0: adapter(rng, K, N, 8, dtype="bfloat16")})
        got = op(x, hopper.put(indices), **now)
        assert ran_on_hopper(hopper, "lora_multi_sm90" if in_turn and not always and not now else "lora_")
        base = rawops.gemm(x, c, **always, **now)
        np.testing.assert_array_equal(bits(hopper, got)[indices < 0], bits(hopper, base)[indices < 0])
        assert (bits(hopper, got)[indices == 0] != bits(hopper, base)[indices == 0]).any()


@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
def test_hopper_epilogue(hopper, force, rng, out_dtype):
    """swiglu on tiles that hold gate and up, with rows put back and residuals of their own."""
    force(128, block_m=64)
    M, N, K = 70, 2 * 72, 72
    x, c = ((rng.standard_normal(shape) * 0.3).astype(np.float16) for shape in ((M, K), (K, N)))
    residual = rng.standard_normal((M, N // 2)).astype(np.float16)
    op, adapters = MultiLoRA(hopper.put(c), 3, 8, activation="swiglu"), {}
    for slot in (0, 1):
        adapters[slot] = adapter(rng, K, N, 5 + slot, 0.25)
    load(hopper, op, adapters)
    indices = rng.integers(-1, 3, M).astype(np.int32)
    out = hopper.guarded((M, N // 2), out_dtype)
    op(hopper.put(x), hopper.put(indices), residual=hopper.put(residual), out=out)
    assert ran_on_hopper(hopper, "lora_multi_sm90")
    want = reference(x, c, adapters, indices, activation="swiglu") + residual
    assert_close(hopper.get(out), want, np.float16, k=4 * (K + 8))


# dtype, columns of a tile, rows, ranks, activation, order of the weight
BESIDE = [
    ("float16", 64, 64, (7, 16, 5), None, "F"),
    ("bfloat16", 128, 40, (16, 1, 3), None, "C"),
    ("bfloat16", 128, 20, (4, 9, 16), "swiglu", "F"),
    ("float16", 96, 64, (2, 16, 16), "gelu", "F"),
]


@pytest.mark.parametrize("dtype, block_n, M, ranks, activation, order", BESIDE)
def test_hopper_beside(hopper, force, rng, monkeypatch, dtype, block_n, M, ranks, activation, order):
    """Few rows with few ranks: y is made in the same launch; several tiles a block, more adapters than a stage has."""
    force(block_n, block_m=64, stages=3)
    monkeypatch.setattr(_gemm_sm90_split, "slices_of", lambda *described: None)  # which such small products may take
    N, K, slots = block_n * 3 + 16, 640, 20
    x, c = ((rng.standard_normal(shape) * 0.3).astype(DTYPES[dtype]) for shape in ((M, K), (K, N)))
    weight = hopper.put(c) if order == "C" else hopper.put(c.T.copy()).T
    bias = rng.standard_normal(N).astype(np.float32) if activation == "gelu" else None
    op = MultiLoRA(weight, slots, max(ranks), bias=None if bias is None else hopper.put(bias), activation=activation)
    poison(op)
    adapters = {slot: adapter(rng, K, N, ranks[slot % 3], 0.25, dtype) for slot in range(slots - 1)}
    load(hopper, op, adapters)
    on_device, cols = hopper.put(x), N // 2 if activation == "swiglu" else N
    base = rawops.gemm(on_device, weight, bias=op.bias, activation=activation)
    for choices in (range(-1, slots + 1), [3], [-1], [5, -1, 7, 7]):
        indices = rng.choice(list(choices), M).astype(np.int32)
        out = hopper.guarded((M, cols), DTYPES[dtype])
        op(on_device, hopper.put(indices), out=out)
        assert ran_on_hopper(hopper, "lora_beside_sm90")
        want = reference(x, c, adapters, indices, bias=bias, activation=activation)
        assert_close(hopper.get(out), want, DTYPES[dtype], k=4 * (K + 16))
        without = [i for i, index in enumerate(indices) if index not in adapters]
        np.testing.assert_array_equal(bits(hopper, out)[without], bits(hopper, base)[without])
        order = rng.permutation(M)
        again = op(hopper.put(x[order]), hopper.put(indices[order]))
        np.testing.assert_array_equal(bits(hopper, again), bits(hopper, out)[order])


@pytest.mark.parametrize("patience", [20000, 0])
def test_hopper_adapter_for_every_row(hopper, force, monkeypatch, rng, patience):
    """A block's parts of x @ a take several rounds, and then most rows have none; it may have to make all."""
    monkeypatch.setattr("rawops._lora_beside._PATIENCE", patience)
    force(64, block_m=64, stages=3)
    M, N, K = 64, 136, 320
    x, c = integers(rng, (M, K)), integers(rng, (K, N))
    op = MultiLoRA(hopper.put(c), M, 16)
    adapters = {slot: adapter(rng, K, N, 1 + slot % 16) for slot in range(M)}
    load(hopper, op, adapters)
    for indices in (rng.permutation(M), np.resize([-1, 40, -1, -1, 2], M), np.full(M, 9)):
        indices = indices.astype(np.int32)
        got = op(hopper.put(x), hopper.put(indices))
        assert ran_on_hopper(hopper, "lora_beside_sm90")
        same(hopper, got, reference(x, c, adapters, indices))


def test_hopper_beside_rounds_y(hopper, force):
    """To 16 bits on its way into a result of 8, and not down: 2^18 - 1 to 2^18, of which 2^18 is taken."""
    force(64, block_m=64, stages=3)
    M, N, K = 20, 72, 64
    x, a, b = (np.zeros(shape, DTYPES["bfloat16"]) for shape in ((M, K), (K, 2), (2, N)))
    x[:, 3], x[:, 40], a[3], a[40, 0], b[0], b[1] = 256, 1, 1024, -1, 1, -1
    op = MultiLoRA(hopper.put(np.zeros((N, K), DTYPES["bfloat16"])).T, 1, 2)
    load(hopper, op, {0: (a, b, 1.0)})
    same(hopper, op(hopper.put(x), hopper.put(np.zeros(M, np.int32))), np.zeros((M, N)))
    assert ran_on_hopper(hopper, "lora_beside_sm90")
    out = hopper.guarded((M, N), np.float32)  # all of it where the result has them
    same(hopper, op(hopper.put(x), hopper.put(np.zeros(M, np.int32)), out=out), np.full((M, N), -1.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hopper_beside_intermediate(hopper, force, rng, dtype):
    """float32, without a limit, and what is infinite or NaN stays where it belongs."""
    force(64, block_m=64, stages=3)
    check_intermediate_past_65504(hopper, dtype)
    assert ran_on_hopper(hopper, "lora_beside_sm90")
    check_non_finite_scaling(hopper, rng, dtype, K=64)
    assert ran_on_hopper(hopper, "lora_beside_sm90")
    M, N, K = 12, 40, 64
    x, c = integers(rng, (M, K), dtype), integers(rng, (K, N), dtype)
    x[:, 0] += x.sum(axis=1) == 0
    x[4, 7] = np.nan
    op = MultiLoRA(hopper.put(c.T.copy()).T, 3, 8)
    adapters = {slot: adapter(rng, K, N, 8, 1.0, dtype) for slot in (0, 1)}
    adapters[0][0][:, 0], adapters[0][1][0, 3], adapters[0][1][0, 5] = 1, np.inf, np.nan
    load(hopper, op, adapters)
    indices = np.resize([0, 1, -1], M).astype(np.int32)
    got = hopper.get(op(hopper.put(x), hopper.put(indices)))
    assert ran_on_hopper(hopper, "lora_beside_sm90")
    with np.errstate(invalid="ignore"):
        want = reference(x, c, adapters, indices)
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(DTYPES[dtype]).astype(np.float64))
    assert np.isinf(want[indices == 0][:, 3]).any() and np.isfinite(want[indices == 1]).any()


@pytest.mark.skipif(has_gpu(), reason="the emulator's orders of completion")
@pytest.mark.parametrize("cluster, in_turn", [(1, False), (2, False), (1, True)])
def test_any_order_of_completion(force, rng, cluster, in_turn):
    """Copies and products that land late, early or with the warps in another order: the same bits."""
    if in_turn:
        force(144, True, blocks=1)
    else:
        force(64, block_m=64, cluster=cluster, stages=3, blocks=1)
    x, c = (rng.standard_normal(shape).astype(np.float16) for shape in ((20, 136), (136, 136)))
    c = c.T
    indices, results = rng.integers(-1, 3, 20).astype(np.int32), []
    adapters = {slot: adapter(rng, 136, 136, 10 + 8 * slot) for slot in (0, 1)}
    for seed, completion in enumerate(("late", "early", "random")):
        with rawops.emulate(arch="sm_90a", completion=completion, seed=seed) as emu:
            op = MultiLoRA(c, 3, 20)
            for slot, factors in adapters.items():
                op.load(slot, *factors)
            results.append(op(x, indices).view(np.uint16))
        assert "lora_multi_sm90" in emu.report[-1].kernel
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize(
    ("M", "N", "block_n", "in_turn"),
    [
        (4096, 28672, 176, True),  # as of gemm
        (2200, 28672, 176, True),  # gemm has 128 columns in turn, multiplied before the other half has ended
        (4096, 4096, 176, True),  # likewise
        (2200, 4096, 144, True),  # gemm has 192 columns in turn, which leave the ranks no registers
        (1024, 4096, 128, False),  # gemm has 256 columns in one wave; two of 128 are shorter than two of 176
    ],
)
def test_which_tiles(M, N, block_n, in_turn):
    """The tile of gemm, or the one with the least predicted time of those that adapters ride on."""
    device = SimpleNamespace(sm_count=132, max_shared_bytes=232448)
    problem = _gemm_sm90_config.Problem(M, N, 4096, b_k_major=True)
    config = _lora_multi_config._configure(problem, device)
    assert (config.block_m, config.block_n, config.ping_pong, config.pairs) == (128, block_n, in_turn, False)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("b_k_major", [True, False])
def test_any_size_has_a_tile(b_k_major, parts):
    """Whatever gemm takes, of the same slices of K, which alone change bits."""
    device = SimpleNamespace(sm_count=132, max_shared_bytes=232448)
    for M in (1, 64, 65, 128, 129, 300, 1000, 5000):
        for N in (8, 200, 1000, 4096, 30000):
            for K in (64, 1000, 20000):
                finish = PLAIN if parts == 1 else DIRECT
                problem = _gemm_sm90_config.Problem(M, N, K, b_k_major=b_k_major, parts=parts, finish=finish)
                config = _lora_multi_config._configure(problem, device)
                assert _lora_multi_config._takes_adapters(problem, config)
                assert config.cluster == _gemm_sm90_config.select_config(problem, 132, 232448).cluster
