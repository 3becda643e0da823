"""The Hopper GEMM: every layout, tile width and way out, ragged edges, asynchrony in any order, the choice of tiles."""

import itertools
import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hopper_gemm import padded, ran_on_hopper

import rawops
from rawops import _gemm_sm90 as sm90
from rawops._gemm_operands import Operand
from rawops._gemm_sm90_config import candidates
from rawops._runtime.kernel import KernelSpec
from rawops.gemm import gemm
from rawops.testing import has_gpu, references

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype("float16")
H200 = {"sm_count": 132, "max_shared_bytes": 232448}


def integers(rng, shape, dtype) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(dtype)


def exact(a, b) -> np.ndarray:
    return a.astype(np.int64) @ b.astype(np.int64)


def check(device, a, b, layouts=("row", "row"), out_dtype=None) -> None:
    """Compare with the exact product; the output lies between guard bands, the operands in NaN."""
    want = exact(a, b)
    out = device.guarded(want.shape, out_dtype or a.dtype)
    gemm(padded(device, a, layouts[0]), padded(device, b, layouts[1]), out=out)
    assert ran_on_hopper(device)
    np.testing.assert_array_equal(device.get(out).astype(float), want.astype(float).astype(out.dtype).astype(float))


@pytest.mark.parametrize("layouts", [*itertools.product(("row", "col"), repeat=2)], ids="-".join)
@pytest.mark.parametrize("block_n, ping_pong, dtype", [(64, False, FLOAT16), (128, True, BFLOAT16)])
def test_layouts(hopper, force, rng, layouts, block_n, ping_pong, dtype):
    force(block_n, ping_pong)
    check(hopper, integers(rng, (136, 200), dtype), integers(rng, (200, 264), dtype), layouts)


@pytest.mark.parametrize("block_n, ping_pong", [(16, True), (48, False), (80, True), (176, False), (208, False)])
def test_widths(hopper, force, rng, block_n, ping_pong):
    """Boxes of 16, 32 and 64 columns leave the staging tile."""
    force(block_n, ping_pong, stages=3)
    check(hopper, integers(rng, (129, 72), FLOAT16), integers(rng, (72, block_n + 24), FLOAT16), ("row", "col"))


# block_n, cluster, ping_pong of tiles of 64 rows
SHORT = [(64, 1, False), (256, 1, True), (64, 2, False), (192, 2, False), (128, 8, False)]


@pytest.mark.parametrize("layouts", [*itertools.product(("row", "col"), repeat=2)], ids="-".join)
@pytest.mark.parametrize("block_n, cluster, ping_pong", SHORT)
def test_short_tiles(hopper, force, rng, layouts, block_n, cluster, ping_pong):
    """64 rows, alone and in clusters that split K; eleven K blocks leave slices of different length."""
    force(block_n, ping_pong, block_m=64, cluster=cluster)
    check(hopper, integers(rng, (72, 696), FLOAT16), integers(rng, (696, block_n + 72), FLOAT16), layouts)


@pytest.mark.parametrize("block_n, cluster", [(128, 2), (192, 2), (128, 8)])
def test_clusters_of_tall_tiles(hopper, force, rng, block_n, cluster):
    force(block_n, cluster=cluster, stages=3)
    check(hopper, integers(rng, (130, 328), BFLOAT16), integers(rng, (328, 264), BFLOAT16), ("row", "col"))


@pytest.mark.parametrize("layouts", [*itertools.product(("row", "col"), repeat=2)], ids="-".join)
@pytest.mark.parametrize("block_n, ping_pong", [(128, False), (128, True), (256, False)])
def test_pairs_load_b_once(hopper, force, rng, layouts, block_n, ping_pong):
    """Five rows of tiles of two batches, and a sixth that does not exist, in bands of four; the ring wraps."""
    force(block_n, ping_pong, pairs=True, blocks=4, raster_rows=4)
    a, b = integers(rng, (2, 516, 200), BFLOAT16), integers(rng, (2, 200, block_n + 8), BFLOAT16)
    check(hopper, a, b, layouts)
    assert ran_on_hopper(hopper, "gemm_sm90_pairs")


@pytest.mark.parametrize("block_n, out_dtype", [(48, "float16"), (176, "float32")])
def test_pairs_of_any_width_and_way_out(hopper, force, rng, block_n, out_dtype):
    force(block_n, pairs=True, stages=3)
    a, b = integers(rng, (129, 72), FLOAT16), integers(rng, (72, 200), FLOAT16)
    check(hopper, a, b, ("row", "col"), np.dtype(out_dtype))


def test_slices_without_work(hopper, force, rng):
    """K blocks for three of eight blocks, and for none where alpha is 0."""
    force(128, block_m=64, cluster=8)
    a, b = integers(rng, (64, 136), FLOAT16), integers(rng, (136, 128), FLOAT16)
    check(hopper, a, b)
    a, b = np.full_like(a, np.nan), np.full_like(b, np.nan)
    assert (hopper.get(gemm(hopper.put(a), hopper.put(b), alpha=0.0)) == 0).all()


@pytest.mark.parametrize(
    "M, N, K", [(2, 8, 1), (9, 72, 200), (64, 8, 63), (127, 16, 64), (133, 248, 65), (257, 128, 8)]
)
def test_edges(hopper, rng, M, N, K):
    check(hopper, integers(rng, (M, K), BFLOAT16), integers(rng, (K, N), BFLOAT16), ("row", "col"))


def test_bands_of_the_raster(hopper, force, rng):
    """Five rows of tiles in bands of two and a last one of a single row, of two batches."""
    force(64, block_m=64, raster_rows=2)
    check(hopper, integers(rng, (2, 260, 40), FLOAT16), integers(rng, (40, 136), FLOAT16), ("row", "col"))


@pytest.mark.parametrize("N, dtype", [(125, "float16"), (128, "float32"), (131, "float32")])
@pytest.mark.parametrize("tile", [{}, {"ping_pong": True}, {"block_m": 64, "cluster": 2}], ids=str)
def test_results_that_tma_cannot_write(hopper, force, rng, N, dtype, tile):
    force(64, **tile)
    check(hopper, integers(rng, (130, 72), FLOAT16), integers(rng, (72, N), FLOAT16), ("row", "col"), np.dtype(dtype))


@pytest.mark.parametrize("N", [131, 132])
@pytest.mark.parametrize("tile", [{}, {"ping_pong": True}, {"block_m": 64, "cluster": 2}], ids=str)
def test_float32_results_in_rows_on_16_bytes(hopper, force, rng, N, tile):
    """They leave the accumulators as they are, and what lies beside them alone."""
    force(96, **tile)
    a, b = integers(rng, (75, 72), BFLOAT16), integers(rng, (72, N), BFLOAT16)
    room = hopper.put(np.full((77, 144), 7, "float32"))
    gemm(hopper.put(a), padded(hopper, b, "col"), alpha=0.5, out=room[1:-1, 4 : 4 + N])
    assert ran_on_hopper(hopper)
    want = np.full((77, 144), 7.0)
    want[1:-1, 4 : 4 + N] = exact(a, b) / 2
    np.testing.assert_array_equal(hopper.get(room), want)


def test_a_view_that_ends_inside_16_bytes_leaves_its_neighbours_alone(hopper, rng):
    """TMA would store the whole of the last 16 bytes of each row."""
    a, b = integers(rng, (130, 72), FLOAT16), integers(rng, (72, 125), FLOAT16)
    wide = hopper.put(np.full((130, 136), 7, FLOAT16))
    gemm(padded(hopper, a, "row"), padded(hopper, b, "col"), out=wide[:, :125])
    assert ran_on_hopper(hopper)
    np.testing.assert_array_equal(hopper.get(wide), np.hstack([exact(a, b), np.full((130, 11), 7)]).astype(FLOAT16))


@pytest.mark.parametrize("shape_a, shape_b", [((3, 40, 72), (3, 72, 24)), ((2, 1, 40, 72), (3, 72, 24))])
def test_batches(hopper, force, rng, shape_a, shape_b):
    force(16, blocks=5)
    check(hopper, integers(rng, shape_a, FLOAT16), integers(rng, shape_b, FLOAT16), ("row", "col"))
    check(hopper, integers(rng, shape_a, FLOAT16), integers(rng, shape_b, FLOAT16), ("col", "col"))


EPILOGUES = [(activation, {}) for activation in (None, "relu", "gelu", "gelu_tanh", "silu", "swiglu")]
# What tiles differ in is who has which columns: one function of a number is like another, and a gate has two of them.
EPILOGUES += [(a, tile) for a in ("gelu", "swiglu") for tile in ({"ping_pong": True}, {"block_m": 64, "cluster": 2})]


@pytest.mark.parametrize("activation, tile", EPILOGUES, ids=str)
def test_epilogue(hopper, force, rng, activation, tile):
    force(128, **tile)
    M, N, K = 136, 208, 72
    a, b, c = (rng.standard_normal(s).astype(FLOAT16) for s in ((M, K), (K, N), (M, N)))
    bias = rng.standard_normal(N).astype(FLOAT16)
    residual = rng.standard_normal((M, N // 2 if activation == "swiglu" else N)).astype(np.float32)
    terms = {"alpha": 0.25, "beta": -1.5, "bias": bias, "residual": residual, "activation": activation}
    want = references.gemm(a, b, c, **terms)
    put = hopper.put
    terms |= {"bias": put(bias), "residual": put(residual)}
    for out_dtype in ("float16", "float32"):  # staged for TMA, written directly
        got = gemm(put(a), put(b), put(c), out_dtype=out_dtype, **terms)
        assert ran_on_hopper(hopper)
        np.testing.assert_allclose(hopper.get(got).astype(float), want, rtol=2e-3, atol=2e-3)
    got = gemm(put(a), put(b), activation=activation)
    np.testing.assert_allclose(
        hopper.get(got).astype(float), references.gemm(a, b, activation=activation), rtol=2e-3, atol=4e-3
    )


@pytest.mark.parametrize("tile", [{}, {"ping_pong": True}, {"block_m": 64, "cluster": 2}], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
def test_bias(hopper, force, rng, activation, tile):
    """A bias of either type, its entries apart and between NaN; columns that end inside a tile; a batch."""
    force(128, **tile)
    M, N, K = 72, 304, 40
    a, b = rng.standard_normal((2, M, K)).astype(FLOAT16), rng.standard_normal((K, N)).astype(FLOAT16)
    for dtype, step in ((FLOAT16, 1), (np.float32, 3)):
        bias = rng.standard_normal(N).astype(dtype)
        room = np.full(N * step + 2, np.nan, dtype)
        room[1:-1:step] = bias
        got = gemm(hopper.put(a), hopper.put(b), alpha=0.5, bias=hopper.put(room)[1:-1:step], activation=activation)
        assert ran_on_hopper(hopper)
        want = references.gemm(a, b, alpha=0.5, bias=bias, activation=activation)
        np.testing.assert_allclose(hopper.get(got).astype(float), want, rtol=2e-3, atol=2e-3)


def test_nothing_read_for_alpha_zero(hopper, rng):
    a, b = hopper.put(np.full((136, 72), np.nan, FLOAT16)), hopper.put(np.full((72, 64), np.nan, FLOAT16))
    c = hopper.put(integers(rng, (136, 64), FLOAT16))
    for alpha in (0.0, hopper.put(np.zeros((), np.float32))):
        out = gemm(a, b, c, alpha=alpha, beta=2.0)
        np.testing.assert_array_equal(hopper.get(out), 2 * hopper.get(c))
        assert (hopper.get(gemm(a, b, alpha=alpha)) == 0).all()


def test_nan_stays_in_its_row(hopper, rng):
    a, b = integers(rng, (136, 72), FLOAT16), integers(rng, (72, 64), FLOAT16)
    a[133, 71] = np.nan
    got = hopper.get(gemm(hopper.put(a), hopper.put(b)))
    assert np.isnan(got[133]).all() and np.isfinite(np.delete(got, 133, 0)).all()


@pytest.mark.skipif(has_gpu(), reason="the emulator's orders of completion")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tile", [{}, {"ping_pong": True}, {"block_m": 64, "cluster": 2}], ids=str)
def test_any_order_of_completion(force, rng, tile, seed):
    """Copies and products that land late, early or with the warps in another order: the same bits."""
    force(64, stages=2 + seed % 2, blocks=1 + seed % 2, **tile)
    a, b = (rng.standard_normal(shape).astype(FLOAT16) for shape in ((264, 200), (200, 136)))
    results = []
    for completion in ("late", "early", "random"):
        with rawops.emulate(arch="sm_90a", completion=completion, seed=seed) as emu:
            results.append(gemm(a, b))
        assert "gemm_sm90" in emu.report[0].kernel
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint16), other.view(np.uint16))


@pytest.mark.skipif(has_gpu(), reason="reads the emulator's report")
def test_shared_memory_without_bank_conflicts(force, rng):
    for tile in ({}, {"block_m": 64, "cluster": 2}):
        force(128, **tile)
        with rawops.emulate(arch="sm_90a") as emu:
            gemm(integers(rng, (128, 64), FLOAT16), integers(rng, (64, 128), FLOAT16))
        assert emu.report[0].total.shared_conflicts == 0


def test_what_tma_cannot_read_runs_elsewhere(rng):
    """Odd strides, misaligned starts and both axes strided: the other kernel, the same answer."""
    a, b = integers(rng, (40, 80), FLOAT16), integers(rng, (80, 24), FLOAT16)
    odd = np.zeros((40, 81), FLOAT16)[:, :80]
    shifted = np.zeros(40 * 80 + 1, FLOAT16)[1:].reshape(40, 80)
    strided = np.zeros((40, 160), FLOAT16)[:, ::2]
    with rawops.emulate(arch="sm_90a") as emu:
        for view in (odd, shifted, strided):
            view[...] = a
            np.testing.assert_array_equal(gemm(view, b).astype(np.int64), exact(a, b))
            assert "gemm_sm90" not in emu.report[-1].kernel


# --- the choice of tiles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "M, N, K, block_n, waves, ping_pong",
    [
        (8192, 8192, 8192, 192, 21, True),  # 2752 tiles fill 21 waves to 99 %
        (2048, 6144, 4096, 192, 4, True),  # 512 tiles: as full as three waves of 256 columns, whose epilogues show
        (2048, 4096, 14336, 256, 2, False),  # 256
        (512, 28672, 4096, 176, 5, True),  # 652; of 224 columns 512, in four waves to 97 %
    ],
)
def test_select_config(M, N, K, block_n, waves, ping_pong):
    config = sm90.select_config(sm90.Problem(M, N, K), **H200)
    assert (config.block_m, config.block_n, config.waves) == (128, block_n, waves)
    assert (config.ping_pong, config.cluster) == (ping_pong, 1)
    tiles = -(-M // 128) * -(-N // block_n)
    assert config.waves == -(-tiles // 132) and config.blocks == min(tiles, 132)


def test_rows_that_straddle_lines_are_read_by_fewer_blocks():
    """1000 elements are 15.6 lines of 128 bytes: a box takes two lines a row then, so pairs of blocks load b once."""
    even, odd = (sm90.select_config(sm90.Problem(1000, 1000, 1000, row_bytes=n), **H200) for n in (128, 16))
    assert (even.block_n, even.blocks, even.pairs) == (64, 128, False)
    assert (odd.block_n, odd.blocks, odd.pairs) == (128, 64, True)
    assert sm90.select_config(sm90.Problem(4000, 4000, 4000, row_bytes=64), **H200).pairs is False  # whole sectors


def test_launches_begin_early_where_they_come_to_lie_evenly():
    assert [blocks for blocks in (1, 66, 67, 100, 123, 124, 132) if sm90.may_begin_early(blocks, 132)] == [
        1,
        66,
        124,
        132,
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("M, N", [(1, 4096), (16, 6144), (64, 4096), (128, 2048), (1000, 1000)])
def test_a_launch_waits_for_the_one_before(hopper, M, N):
    """In a graph with nothing else between them: each reads what the last one wrote, and writes over what that read."""
    import cupy

    def random(*shape):
        return cupy.random.standard_normal(shape, dtype="float32")

    weights = [(random(N, N) / N**0.5).astype(FLOAT16) for _ in range(4)]
    x, y, z = random(M, N).astype(FLOAT16), cupy.empty((M, N), FLOAT16), cupy.empty((M, N), FLOAT16)
    op = rawops.Gemm(M, N, N, "float16")

    def chain(wait) -> None:
        inputs = x
        for i in range(24):
            out = (y, z)[i % 2]
            op(inputs, weights[i % 4].T, out=out)
            wait()
            inputs = out

    cupy.cuda.Device().synchronize()  # the operands were made on another stream
    with cupy.cuda.Stream(non_blocking=True) as stream:
        chain(stream.synchronize)
        want = z.get()
        stream.begin_capture()
        chain(lambda: None)
        graph = stream.end_capture()
        for _ in range(10):
            y.fill(0), z.fill(0)
            graph.launch()
            np.testing.assert_array_equal(z.get(stream).view("uint16"), want.view("uint16"))


@pytest.mark.parametrize("M, N, K", [(64, 4096, 4096), (64, 6144, 4096), (64, 4096, 14336), (64, 28672, 4096)])
@pytest.mark.parametrize("k_major", [True, False])
def test_decoding_keeps_the_memory_busy(M, N, K, k_major):
    """Short tiles in one wave on most SMs, each with 64 KB under way."""
    problem = sm90.Problem(M, N, K, b_k_major=k_major)
    config = sm90.select_config(problem, **H200)
    assert (config.block_m, config.waves) == (64, 1) and 96 <= config.blocks <= 132
    assert config.stages * config.block_n * 128 >= 65536


def test_a_last_wave_that_is_not_full_costs():
    """One wave of 128 tiles, 224 wide, rather than 1.7 waves of tiles 128 wide."""
    assert sm90.select_config(sm90.Problem(2, 28672, 4096), **H200).waves == 1


@pytest.mark.parametrize("M, N, halved", [(16, 28672, 112), (2, 32000, 128), (17, 28672, None), (16, 14336, None)])
def test_few_rows_in_halves(monkeypatch, M, N, halved):
    """Up to 16 rows take two tiles of half the width an SM, which the L2 fetches 128 bytes at a time."""
    problem = sm90.Problem(M, N, 4096)
    chosen = sm90.select_config(problem, **H200)
    config = sm90.in_halves(problem, chosen, **H200)
    assert (config.block_n, config.waves) == ((halved, 2) if halved else (chosen.block_n, 1))
    assert config.halved == bool(halved) and config.cluster == 1 and config.stages == 8 - 3 * (config.block_n == 224)
    fetched = []
    monkeypatch.setattr("rawops._gemm_maps.map_of", lambda *arguments: fetched.append(arguments[7:]))
    row = Operand("float16", 2, 0, 4096, 1, [0, 0, 0])
    col = Operand("float16", 2, 0, 1, 4096, [0, 0, 0])
    out = Operand("float16", 2, 0, N, 1, [0, 0, 0])
    sm90.tensor_maps(None, {"a": row, "b": col, "out": out}, problem, config, (M, N, 4096), (1, 1, 1))
    assert fetched == [(128 if halved else 256,)] * 2 + [()]


@pytest.mark.parametrize("other", [{"rank": 16}, {"batches": 2}, {"b_k_major": False}, {"grouped": True}, {"parts": 2}])
def test_others_are_not_halved(other):
    problem = sm90.Problem(16, 28672, 4096, **other)
    config = sm90.select_config(problem, **H200)
    assert sm90.in_halves(problem, config, **H200) == config


@pytest.mark.parametrize("M", [1, 13, 64])
@pytest.mark.parametrize("N, block_n, blocks", [(1000, 256, 5), (568, 192, 8), (576, 128, 7), (576, 128, 9)])
def test_boxes_of_a_row_major_b_are_shared_out(hopper, force, rng, M, N, block_n, blocks):
    """More blocks than tiles: some of them have a box less, all have one, or the last box is ragged."""
    force(block_n, stages=3, block_m=64, blocks=blocks)
    check(hopper, integers(rng, (M, 392), BFLOAT16), integers(rng, (392, N), BFLOAT16))


def test_boxes_are_shared_out_among_all_SMs():
    problem = sm90.Problem(16, 28672, 4096, b_k_major=False)
    config = sm90.select_config(problem, **H200)
    assert (config.block_n, config.waves, config.blocks) == (256, 1, 132) and config.shares_boxes(problem)
    assert config.with_whole_tiles(problem).blocks == 112


@pytest.mark.parametrize(
    "other", [{"b_k_major": True}, {"batches": 2}, {"finish": sm90.DIRECT}, {"parts": 2}, {"grouped": True}, {"M": 65}]
)
def test_others_have_whole_tiles(other):
    problem = sm90.Problem(**{"M": 16, "N": 28672, "K": 4096, "b_k_major": False} | other)
    assert not any(config.shares_boxes(problem) for config in candidates(problem, **H200))


@pytest.mark.parametrize("M, N, early", [(1, 28672, True), (16, 14336, True), (16, 7168, False), (16, 34816, False)])
def test_few_rows_of_a_row_major_b_begin_early_in_one_wave(monkeypatch, M, N, early):
    """112 tiles of 64 columns leave too many SMs idle, and 136 of 256 columns are two waves.

    Until it may read, a launch that begins early has the L2 fetch as much of b as its ring holds.
    """
    monkeypatch.setattr(KernelSpec, "kernel", lambda *_, **__: None)
    row, out = Operand("float16", 2, 0, 4096, 1, [0, 0, 0]), Operand("float16", 2, 0, N, 1, [0, 0, 0])
    operands = {"a": row, "b": out, "out": out}
    plan = sm90.plan(SimpleNamespace(**H200), operands, M, N, 4096, (1, 1, 1), 0)
    assert (plan.early, plan.ahead) == (early, plan.config.stages if early else 0)
    assert plan.order == 1 + plan.ahead


@pytest.mark.parametrize("M, N, ahead", [(16, 28672, 8), (64, 28672, 2), (64, 4096, 4)])
def test_the_L2_is_asked_for_what_the_ring_holds(M, N, ahead):
    """Of 8, 5 and 8 stages; each brings the next one along where the L2 fetches 256 bytes at a time."""
    problem = sm90.Problem(M, N, 4096)
    config = sm90.in_halves(problem, sm90.select_config(problem, **H200), **H200)
    assert sm90.asked_ahead(problem, config) == ahead


@pytest.mark.parametrize("other", [{"M": 65}, {"M": 128, "N": 28672}, {"batches": 2}])
def test_others_ask_for_nothing_ahead(other):
    problem = sm90.Problem(**{"M": 16, "N": 4096, "K": 4096} | other)
    assert sm90.asked_ahead(problem, sm90.select_config(problem, **H200)) == 0


def test_a_choice_takes_no_longer_for_many_waves():
    """Two milliseconds for any product: 2^31 small ones are 16 million waves."""
    start = time.perf_counter()
    config = sm90.select_config(sm90.Problem(8, 8, 8, 2**31 - 2**16), **H200)
    assert config.waves > 10**7 and time.perf_counter() - start < 2


def test_split_is_left_to_another_kernel():
    """Where K is so long and tiles are so few that clusters leave most SMs idle."""

    def split(*sizes):
        problem = sm90.Problem(*sizes)
        return sm90.wants_split(problem, sm90.select_config(problem, **H200), H200["sm_count"])

    assert split(64, 64, 65536)
    others = ((64, 4096, 4096), (512, 512, 4096), (128, 128, 512), (128, 128, 32768), (1, 28672, 4096))
    assert not any(split(*sizes) for sizes in others)


def test_every_choice_fits():
    shapes = itertools.product((1, 130, 4096), (16, 1000, 28672), (8, 4096), (1, 7), (True, False), (0, 16, 64))
    for M, N, K, batches, k_major, rank in shapes:
        for finish, parts in itertools.product((sm90.PLAIN, sm90.STAGED, sm90.BIASED, sm90.DIRECT), (1, 2)):
            problem = sm90.Problem(M, N, K, batches, True, k_major, finish, parts, rank)
            config = sm90.select_config(problem, **H200)
            assert config.shared_bytes(problem) <= H200["max_shared_bytes"]
            chosen = {"block_m": config.block_m, "block_n": config.block_n, "stages": config.stages}
            assert all(value in sm90.SM90.choices[name] for name, value in chosen.items())
            assert config.share(problem) % 16 == 0 and (k_major or config.block_n // parts % 64 == 0)
            assert config.cluster == 1 or config.blocks % config.cluster == 0
