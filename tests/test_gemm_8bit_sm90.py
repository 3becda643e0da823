"""Products of 8 bits on Hopper: tiles, sums beside the tensor cores, any order of completion, the choice of tiles."""

import itertools

import numpy as np
import pytest
from bytes_operands import BFLOAT16, E4M3, E5M2, FLOAT32, INT8, exact, integers, laid_out, powers, same, spread

import rawops
from rawops import _gemm_8bit
from rawops import _gemm_8bit_config as kernels
from rawops import _gemm_sm90 as sm90
from rawops._gemm_8bit import asked_ahead_of_bytes
from rawops._gemm_config import PROMOTED
from rawops.gemm import Gemm, gemm
from rawops.testing import has_gpu

H200 = {"sm_count": 132, "max_shared_bytes": 232448}
TILES = [(128, 256, 1, False), (128, 128, 1, True), (64, 256, 1, False), (64, 192, 2, False), (64, 128, 8, False)]
# With sums beside the tensor cores: block_m, block_n, cluster; scales of a and b.
WHOLE, BLOCKS, COLUMNS = ((1, 1), (1, 1)), ((136, 9), (9, 3)), ((136, 9), (9, 280))
SUMMED = [
    (128, 160, 1, WHOLE),
    (64, 128, 2, WHOLE),
    (128, 192, 1, BLOCKS),
    (128, 160, 1, BLOCKS),
    (128, 96, 1, BLOCKS),
    (64, 128, 2, BLOCKS),
    (128, 192, 1, COLUMNS),
    (64, 112, 1, COLUMNS),
    (128, 128, 8, COLUMNS),
]


@pytest.mark.parametrize("block_m, block_n, cluster, ping_pong", TILES)
@pytest.mark.parametrize("dtype", [E4M3, INT8], ids=str)
def test_tiles(hopper, force, rng, dtype, block_m, block_n, cluster, ping_pong):
    if dtype == INT8 and cluster > 1:
        pytest.skip("clusters add up float32")
    force(block_n, ping_pong, block_m=block_m, cluster=cluster)
    a, b = integers(rng, (136, 1096), dtype), integers(rng, (1096, block_n + 72), dtype)
    out = hopper.guarded((136, block_n + 72), BFLOAT16)
    precision = None if dtype == INT8 else "fast"
    gemm(laid_out(hopper, a, "row"), laid_out(hopper, b, "col"), out=out, precision=precision)
    same(hopper, out, exact(a, b))


@pytest.mark.parametrize("block_m, block_n, cluster, forms", SUMMED)
def test_tiles_with_sums(hopper, force, rng, block_m, block_n, cluster, forms):
    force(block_n, block_m=block_m, cluster=cluster)
    a, b = integers(rng, (136, 1096), E4M3), integers(rng, (1096, 280), E5M2)
    scale_a, scale_b = (powers(rng, shape) for shape in forms)
    out = hopper.guarded((136, 280), FLOAT32)
    operands = laid_out(hopper, a, "row"), laid_out(hopper, b, "col")
    gemm(*operands, scale_a=hopper.put(scale_a), scale_b=hopper.put(scale_b), out=out)
    same(hopper, out, exact(a * spread(scale_a, a.shape), b * spread(scale_b, b.shape)))


@pytest.mark.parametrize("block_n", [192, 160, 128, 32])
def test_consumers_with_half_of_the_columns_each(hopper, force, rng, block_n):
    """Their results leave in boxes of 32, 16 and 64 columns, with a scale for each row and column."""
    force(block_n)
    N = block_n + 72
    a, b = integers(rng, (136, 300), E4M3), integers(rng, (300, N), E4M3)
    scale_a, scale_b, bias = powers(rng, (136, 1)), powers(rng, (1, N)), integers(rng, N, BFLOAT16)
    operands = laid_out(hopper, a, "row"), laid_out(hopper, b, "col")
    scales = {"scale_a": hopper.put(scale_a), "scale_b": hopper.put(scale_b)}
    want = exact(a * scale_a.astype(float), b * scale_b.astype(float))
    out = hopper.guarded((136, N), BFLOAT16)
    gemm(*operands, **scales, out=out)
    same(hopper, out, want)
    gemm(*operands, **scales, bias=hopper.put(bias), activation="relu", out=out)
    same(hopper, out, np.maximum(want + bias.astype(float), 0))


@pytest.mark.parametrize("block_m, block_n", [(128, 176), (64, 144), (128, 112)])
def test_blocks_of_columns_begin_anywhere_in_a_tile(hopper, force, rng, block_m, block_n):
    """A tile has columns of up to three blocks of 128, from any multiple of 16 on."""
    force(block_n, block_m=block_m)
    M, N, K = 40, 8 * block_n - 8, 256
    a, b = integers(rng, (M, K), E4M3), integers(rng, (K, N), E4M3)
    scale_a, scale_b = powers(rng, (M, 2)), powers(rng, (2, -(-N // 128)))
    out = hopper.guarded((M, N), FLOAT32)
    operands = laid_out(hopper, a, "row"), laid_out(hopper, b, "col")
    gemm(*operands, scale_a=hopper.put(scale_a), scale_b=hopper.put(scale_b), out=out)
    same(hopper, out, exact(a * spread(scale_a, a.shape), b * spread(scale_b, b.shape)))


@pytest.mark.skipif(has_gpu(), reason="the emulator's orders of completion")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("columns", [0, 2, 136], ids=["whole", "blocks", "columns"])
def test_any_order_of_completion(force, rng, columns, seed):
    """Copies and products that land late, early or with the warps in another order: the same bits."""
    force(96, stages=2 + seed, blocks=1 + seed)
    a, b = (rng.standard_normal(shape).astype(E4M3) for shape in ((136, 400), (400, 136)))
    scales = {"scale_a": powers(rng, (136, 4)), "scale_b": powers(rng, (4, columns))} if columns else {}
    results = []
    for completion in ("late", "early", "random"):
        with rawops.emulate(arch="sm_90a", completion=completion, seed=seed) as emu:
            results.append(gemm(a, b.T.copy().T, out_dtype="float32", **scales))
        assert "gemm_8bit_sm90" in emu.report[0].kernel
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))


@pytest.mark.gpu
@pytest.mark.parametrize("M, N", [(64, 4096), (256, 2048), (1000, 1024)])
def test_a_launch_waits_for_the_one_before(hopper, rng, M, N):
    """In a graph with nothing else between them: each reads what the last one wrote, and writes over what that read."""
    import cupy

    weights = [hopper.put((rng.standard_normal((N, N)) / N**0.5).astype(E4M3)).T for _ in range(4)]
    x = hopper.put(rng.standard_normal((M, N)).astype(E4M3))
    y, z = (hopper.put(np.zeros((M, N), E4M3)) for _ in range(2))
    op = Gemm(M, N, N, "float8_e4m3fn", out_dtype="float8_e4m3fn", alpha=2.0)

    def chain(wait) -> None:
        inputs = x
        for i in range(24):
            out = (y, z)[i % 2]
            op(inputs, weights[i % 4], out=out)
            wait()
            inputs = out

    cupy.cuda.Device().synchronize()  # the operands were made on another stream
    with cupy.cuda.Stream(non_blocking=True) as stream:
        chain(stream.synchronize)
        want = z.view("uint8").get(stream)
        assert want.any()
        stream.begin_capture()
        chain(lambda: None)
        graph = stream.end_capture()
        for _ in range(10):
            y.view("uint8").fill(0), z.view("uint8").fill(0)
            graph.launch()
            np.testing.assert_array_equal(z.view("uint8").get(stream), want)


@pytest.mark.parametrize(
    "M, N, K, ahead", [(16, 28672, 4096, 8), (64, 8192, 8192, 4), (1, 4096, 4096, 4), (65, 4096, 4096, 0)]
)
def test_few_rows_ask_for_an_eighth_ahead(M, N, K, ahead):
    """Of what a block reads, and for no more stages than there are."""
    problem = kernels.BytesProblem(M, N, K, promotion=PROMOTED)
    assert asked_ahead_of_bytes(problem, kernels.select_config(problem, **H200)) == ahead
    batches = kernels.BytesProblem(M, N, K, batches=2, promotion=PROMOTED)
    assert asked_ahead_of_bytes(batches, kernels.select_config(batches, **H200)) == 0


@pytest.mark.parametrize("alpha", [1.0, 0.0])
@pytest.mark.parametrize("dtype, cluster", [(E4M3, 1), (E4M3, 2), (INT8, 1)])
def test_what_is_asked_for_ahead_changes_nothing(hopper, force, monkeypatch, rng, dtype, cluster, alpha):
    """More than there is of K, of columns and of tiles: a block may have none."""
    monkeypatch.setattr(_gemm_8bit, "asked_ahead_of_bytes", lambda *_: 7)
    force(64, block_m=64, cluster=cluster, blocks=3)
    a, b, c = integers(rng, (5, 400), dtype), integers(rng, (400, 72), dtype), integers(rng, (5, 72), FLOAT32)
    put = hopper.put
    scales = {"scale_a": put(powers(rng, ())), "scale_b": put(powers(rng, ()))}
    got = gemm(put(a), laid_out(hopper, b, "col"), put(c), out_dtype="float32", alpha=alpha, beta=1.0, **scales)
    factor = alpha * float(hopper.get(scales["scale_a"])) * float(hopper.get(scales["scale_b"]))
    same(hopper, got, factor * exact(a, b) + c)


def test_every_choice_fits():
    """Registers hold both sets of accumulators."""
    for size, promotion, parts in itertools.product((1, 64, 1000, 8192), range(4), (1, 2)):
        for M, finish in itertools.product((1, 130, 4096), (sm90.PLAIN, sm90.STAGED, sm90.DIRECT)):
            problem = kernels.BytesProblem(M, size, size, finish=finish, parts=parts, promotion=promotion)
            config = kernels.select_config(problem, **H200)
            assert config.shared_bytes(problem) <= H200["max_shared_bytes"]
            assert config.block_n in kernels.SM90.choices["block_n"]
            if promotion:
                assert config.block_n <= 192 and not config.ping_pong
