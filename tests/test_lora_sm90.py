"""Fused LoRA on Hopper: ranks, layouts, tiles and clusters, asynchrony in any order, what is read, what is chosen."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hopper_gemm import padded, ran_on_hopper

import rawops
from rawops import _gemm_sm90 as sm90
from rawops.lora import lora_linear
from rawops.testing import has_gpu, references
from rawops.testing.tolerances import assert_close

FLOAT16, BFLOAT16 = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)
H200 = {"sm_count": 132, "max_shared_bytes": 232448}

IN_TURN = {"rides": False, "ping_pong": True}  # two consumers, one of which adds y @ b while the other multiplies

# block_m, block_n, cluster
TILES = [(64, 256, 1), (64, 64, 2), (64, 256, 2), (64, 128, 8), (128, 192, 1), (128, 64, 2)]


def operands(rng, M, N, K, rank, dtype=FLOAT16) -> dict[str, np.ndarray]:
    shapes = {"x": (M, K), "c": (K, N), "a": (K, rank), "b": (rank, N)}
    return {name: rng.integers(-2, 3, shape).astype(dtype) for name, shape in shapes.items()}


def check(device, inputs: dict, layouts: str, **keywords) -> None:
    """Compare with the exact sum; `layouts` has "n" (row-major) or "t" for each of x, c, a and b."""
    views = {
        name: padded(device, x, "row" if layout == "n" else "col")
        for (name, x), layout in zip(inputs.items(), layouts, strict=True)
    }
    out = device.guarded((inputs["x"].shape[0], inputs["c"].shape[1]), inputs["x"].dtype)
    lora_linear(**views, scaling=0.5, out=out, **keywords)
    assert ran_on_hopper(device, "lora_sm90")
    want = references.lora_linear(**inputs, scaling=0.5)
    np.testing.assert_array_equal(device.get(out).astype(float), want.astype(out.dtype).astype(float))


@pytest.mark.parametrize("layouts", ["".join(majors) for majors in itertools.product("nt", repeat=4)])
def test_layouts(hopper, force, rng, layouts):
    force(64, block_m=64)
    check(hopper, operands(rng, 72, 136, 200, 16), layouts)


@pytest.mark.parametrize("rank", [1, 5, 8, 17, 24, 40, 64])
@pytest.mark.parametrize("layouts", ["nnnn", "nttt"])
@pytest.mark.parametrize("way", [{}, {"rides": False}, IN_TURN], ids=str)
def test_ranks(hopper, force, rng, rank, layouts, way):
    """Ranks between the padded ones; what lies past them is NaN. x @ a made here, and by a product before."""
    force(128, block_m=64, **way)
    check(hopper, operands(rng, 50, 200, 136, rank), layouts)


@pytest.mark.parametrize("rank", [72, 130])
@pytest.mark.parametrize("layouts, epilogue", [("nnnn", {}), ("tttt", {"activation": "swiglu"})])
def test_ranks_past_those_of_a_stage(hopper, force, rng, rank, layouts, epilogue):
    """64 at a time; the columns of a are more than a tile of the product that makes x @ a has."""
    force(128, block_m=128, stages=3, rides=False)
    inputs = {name: np.sign(x) for name, x in operands(rng, 136, 208, 72, rank, BFLOAT16).items()}
    views = {
        name: padded(hopper, x, "row" if o == "n" else "col")
        for (name, x), o in zip(inputs.items(), layouts, strict=True)
    }
    out = hopper.guarded((136, 104 if epilogue else 208), np.float32)
    lora_linear(**views, scaling=0.01, out=out, **epilogue)
    assert ran_on_hopper(hopper, "lora_sm90")
    want = references.lora_linear(**inputs, scaling=0.01, **epilogue)
    assert_close(hopper.get(out), want, np.float32, k=4 * (72 + rank), magnitude=np.abs(want) + 72 + rank)


@pytest.mark.parametrize("tile", [{}, {"cluster": 2}, {"block_m": 128}], ids=str)
def test_eight_ranks_without_gaps(hopper, force, rng, tile):
    """TMA reads eight rows of a as one; in the last block of K, and with other ranks or gaps, as in other layouts."""
    force(64, **{"block_m": 64, **tile}, stages=3)
    for K in (64, 200, 328):
        inputs = operands(rng, 50, 136, K, 8, BFLOAT16)
        views = {name: padded(hopper, inputs[name], "row") for name in "xcb"}
        got = lora_linear(**views, a=hopper.put(inputs["a"]), scaling=0.5)
        assert ran_on_hopper(hopper, "lora_sm90")
        want = references.lora_linear(**inputs, scaling=0.5).astype(BFLOAT16)
        np.testing.assert_array_equal(hopper.get(got).astype(float), want.astype(float))


@pytest.mark.parametrize("block_m, block_n, cluster", TILES)
@pytest.mark.parametrize("layouts, dtype", [("nnnn", BFLOAT16), ("tttt", FLOAT16)])
@pytest.mark.parametrize("rides", [True, False])
def test_tiles(hopper, force, rng, block_m, block_n, cluster, layouts, dtype, rides):
    """Several tiles a block, and slices of K of different length; the sum is linear in x @ a."""
    force(block_n, block_m=block_m, cluster=cluster, stages=3, rides=rides)
    inputs = operands(rng, block_m + 8, block_n + 72, 328, 24, dtype)
    inputs["x"], inputs["b"] = np.sign(inputs["x"]), np.sign(inputs["b"])
    check(hopper, inputs, layouts)


@pytest.mark.parametrize("block_n, layouts, dtype", [(192, "nnnn", FLOAT16), (128, "tttt", BFLOAT16)])
@pytest.mark.parametrize("rank, stages", [(24, 2), (72, 3)])
def test_consumers_take_turns(hopper, force, rng, block_n, layouts, dtype, rank, stages):
    """128 rows each, tiles in any number, a ring longer than K; lora_b sixteen ranks at a time."""
    force(block_n, stages=stages, **IN_TURN)
    for M, N, K in ((136, 3 * block_n + 8, 264), (300, block_n - 8, 72)):
        inputs = operands(rng, M, N, K, rank, dtype)
        inputs["x"], inputs["a"], inputs["b"] = np.sign(inputs["x"]), np.sign(inputs["a"]), np.sign(inputs["b"])
        check(hopper, inputs, layouts)


@pytest.mark.parametrize("block_n, way", [(48, {}), (80, {}), (208, {}), (80, IN_TURN), (176, IN_TURN)])
def test_widths(hopper, force, rng, block_n, way):
    """lora_b comes in boxes of 16 columns, or as it lies along the rank."""
    force(block_n, block_m=64, **way)
    for layouts in ("ntnn", "nttt"):
        check(hopper, operands(rng, 30, block_n + 24, 72, 16), layouts)


@pytest.mark.parametrize("rank", [8, 16, 40])
def test_boxes_are_shared_out(hopper, force, rng, rank):
    """Seven blocks have one or two of nine boxes of c, and b of all columns of a tile."""
    force(128, block_m=64, stages=3, blocks=7)
    check(hopper, operands(rng, 13, 568, 136, rank), "nnnn")


@pytest.mark.parametrize("name, shape", [("bias", (568,)), ("residual", (13, 568))])
def test_boxes_are_shared_out_before_an_epilogue(hopper, force, rng, name, shape):
    force(128, block_m=64, stages=3, blocks=7)
    inputs, more = operands(rng, 13, 568, 136, 16), rng.integers(-2, 3, shape).astype(FLOAT16)
    out = hopper.guarded((13, 568), FLOAT16)
    lora_linear(*map(hopper.put, inputs.values()), **{name: hopper.put(more)}, out=out)
    assert ran_on_hopper(hopper, "lora_sm90")
    want = references.lora_linear(**inputs) + more
    np.testing.assert_array_equal(hopper.get(out).astype(float), want.astype(FLOAT16).astype(float))


@pytest.mark.parametrize("way", [{}, {"rides": False}, IN_TURN], ids=str)
def test_batches(hopper, force, rng, way):
    """Rows of x @ a are found across batches."""
    force(64, block_m=64, **way)
    inputs = operands(rng, 6 * 20, 72, 136, 8)
    x = inputs["x"].reshape(3, 2, 20, 136).swapaxes(0, 1)
    views = {name: hopper.put(inputs[name]) for name in "cab"}
    got = lora_linear(hopper.put(inputs["x"]).reshape(3, 2, 20, 136).swapaxes(0, 1), **views)
    assert ran_on_hopper(hopper, "lora_sm90")
    want = references.lora_linear(x, inputs["c"], inputs["a"], inputs["b"]).astype(FLOAT16)
    np.testing.assert_array_equal(hopper.get(got), want)


@pytest.mark.parametrize("layouts", ["nnnn", "nttt"])
@pytest.mark.parametrize(
    "tile",
    [{"block_m": 64}, {"block_m": 64, "cluster": 2}, {"block_m": 128, "rides": False}, {"block_m": 128, **IN_TURN}],
    ids=str,
)
def test_epilogue(hopper, force, rng, layouts, tile):
    """swiglu, whose tile holds columns of gate and of up, with bias and residual."""
    force(128, **tile)
    M, N, K, rank = 70, 208, 72, 12
    shapes = {"x": (M, K), "c": (K, N), "a": (K, rank), "b": (rank, N)}
    inputs = {name: (rng.standard_normal(shape) * 0.3).astype(FLOAT16) for name, shape in shapes.items()}
    bias, residual = rng.standard_normal(N).astype(FLOAT16), rng.standard_normal((M, N // 2)).astype(np.float32)
    want = references.lora_linear(**inputs, scaling=0.5, bias=bias, activation="swiglu") + residual
    orders = dict(zip("xcab", layouts, strict=True))
    views = {name: padded(hopper, x, "row" if orders[name] == "n" else "col") for name, x in inputs.items()}
    epilogue = {"bias": hopper.put(bias), "residual": hopper.put(residual), "activation": "swiglu"}
    out = hopper.guarded((M, N // 2), FLOAT16)
    lora_linear(**views, scaling=0.5, **epilogue, out=out)
    assert ran_on_hopper(hopper, "lora_sm90")
    assert_close(hopper.get(out), want, FLOAT16, k=4 * (K + rank))


@pytest.mark.parametrize("rank", [8, 40])
@pytest.mark.parametrize("tile", [{}, {"cluster": 2}, {"rides": False}, IN_TURN], ids=str)
def test_intermediate_is_float32(hopper, force, rng, rank, tile):
    """In a float32 result, where a rounding of x @ a to 16 bits, or to TF32, would show; and past 65504."""
    force(64, block_m=64, **tile)
    shapes = {"x": (20, 328), "c": (328, 136), "a": (328, rank), "b": (rank, 136)}
    inputs = {name: rng.standard_normal(shape).astype(FLOAT16) for name, shape in shapes.items()}
    inputs["c"][...] = 0
    inputs["x"] *= 200
    inputs["a"] *= 200
    out = hopper.guarded((20, 136), np.float32)
    lora_linear(**{name: hopper.put(x) for name, x in inputs.items()}, scaling=1.7, out=out)
    assert ran_on_hopper(hopper, "lora_sm90")
    low = references.gemm_magnitude(inputs["x"], inputs["a"])
    assert low.max() > 65504
    magnitude = 1.7 * references.gemm_magnitude(low, inputs["b"])
    assert_close(hopper.get(out), references.lora_linear(**inputs, scaling=1.7), "float32", k=16, magnitude=magnitude)


@pytest.mark.parametrize("tile", [{}, {"cluster": 2}, {"rides": False}, IN_TURN], ids=str)
def test_intermediate_of_a_bfloat16_result_has_sixteen_bits(hopper, force, tile):
    """The difference of 32769 and 32768, which have one value in fewer bits."""
    force(64, block_m=64, **tile)
    inputs = {name: np.zeros(shape, BFLOAT16) for name, shape in {"x": (20, 136), "c": (136, 72)}.items()}
    inputs |= {"a": np.zeros((136, 8), BFLOAT16), "b": np.zeros((8, 72), BFLOAT16)}
    inputs["x"][:, :2], inputs["a"][:2, :2], inputs["b"][:2] = [256, 1], [[128, 128], [1, 0]], [[1], [-1]]
    got = lora_linear(**{name: hopper.put(x) for name, x in inputs.items()})
    assert ran_on_hopper(hopper, "lora_sm90")
    np.testing.assert_array_equal(hopper.get(got).astype(float), np.ones((20, 72)))


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("tile", [{}, {"cluster": 2}, {"rides": False}, IN_TURN], ids=str)
def test_non_finite_values(hopper, force, rng, tile, dtype):
    """Of x and of scaling, too: what ranks that do not exist must not make NaN of."""
    force(64, block_m=64, **tile)
    inputs = operands(rng, 20, 136, 72, 8, dtype)
    inputs["x"][3], inputs["b"][:, 7] = 0, 0
    inputs["a"][2], inputs["c"][2] = 1, 1
    inputs["x"][5, 2], inputs["x"][9, 4], inputs["b"][:, 8:20] = np.inf, np.nan, 1
    for scaling in (1.0, np.nan, np.inf):
        got = hopper.get(lora_linear(**{name: hopper.put(x) for name, x in inputs.items()}, scaling=scaling))
        assert ran_on_hopper(hopper, "lora_sm90")
        with np.errstate(invalid="ignore"):
            want = references.gemm(inputs["x"], inputs["c"])
            want += (scaling * references.gemm(inputs["x"], inputs["a"])) @ inputs["b"].astype(np.float64)
        assert np.isnan(want[9]).all() and np.isnan(want[3]).all() == (scaling != 1)
        assert np.isinf(want[5, 8:20]).all() == (scaling == scaling)
        np.testing.assert_array_equal(got.astype(np.float64), want)


@pytest.mark.skipif(has_gpu(), reason="the emulator's orders of completion")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "tile",
    [{"block_m": 64}, {"block_m": 128, "rides": False}, {"block_m": 128, **IN_TURN}, {"block_m": 64, "cluster": 2}],
    ids=str,
)
def test_any_order_of_completion(force, rng, tile, seed):
    """Copies and products that land late, early or with the warps in another order: the same bits."""
    force(64, stages=2 + seed % 2, blocks=1 + seed % 2, **tile)
    shapes = {"x": (200, 200), "c": (200, 136), "a": (200, 24), "b": (24, 136)}
    inputs = {name: rng.standard_normal(shape).astype(FLOAT16) for name, shape in shapes.items()}
    results = []
    for completion in ("late", "early", "random"):
        with rawops.emulate(arch="sm_90a", completion=completion, seed=seed) as emu:
            results.append(lora_linear(**inputs))
        assert "lora_sm90" in emu.report[-1].kernel
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint16), other.view(np.uint16))


@pytest.mark.skipif(has_gpu(), reason="reads the emulator's report")
@pytest.mark.parametrize("layouts", ["nnnn", "nttt"])
def test_one_launch_without_bank_conflicts(force, rng, layouts):
    for tile in ({"block_m": 64}, {"block_m": 64, "cluster": 2}):
        force(256, **tile)
        inputs = operands(rng, 64, 256, 64, 16)
        for name, layout in zip("xcab", layouts, strict=True):
            inputs[name] = inputs[name].copy("C" if layout == "n" else "F")
        with rawops.emulate(arch="sm_90a") as emu:
            lora_linear(**inputs)
        (launch,) = emu.report
        assert "lora_sm90" in launch.kernel and launch.total.shared_conflicts == 0


@pytest.mark.skipif(has_gpu(), reason="reads the emulator's report")
def test_what_tma_cannot_read_runs_elsewhere(rng):
    """Rows of lora_a off 16-byte boundaries, up columns off 16-byte boundaries."""
    cases = [(operands(rng, 20, 40, 72, 5), None)]
    cases.append((operands(rng, 20, 2 * 44, 72, 8), "swiglu"))
    with rawops.emulate(arch="sm_90a") as emu:
        for inputs, activation in cases:
            got = lora_linear(**inputs, activation=activation)
            assert "lora_sm90" not in emu.report[-1].kernel
            want = references.lora_linear(**inputs, activation=activation)
            np.testing.assert_allclose(got.astype(float), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("k_major", [True, False])
def test_select_config(rank, k_major):
    """x @ a rides where the memory is the limit and so costs little; with many rows it is made before."""
    for M, N in ((1, 28672), (64, 28672), (64, 6144), (2048, 28672), (8192, 4096)):
        plain = sm90.select_config(sm90.Problem(M, N, 4096, b_k_major=k_major), **H200)
        config = sm90.select_config(sm90.Problem(M, N, 4096, b_k_major=k_major, rank=rank), **H200)
        assert config.rides == (M <= 64) and config.stages >= 3
        assert config.cost <= 1.25 * plain.cost
        spare = config.waves * 132 - -(-M // config.block_m) * -(-N // config.block_n)  # SMs with a tile less
        assert config.rides or 0 < config.beside <= spare


@pytest.mark.gpu
def test_launches_that_overlap_keep_their_order(hopper, rng):
    """Calls close behind each other, which share workspaces, have the bits of calls that are alone."""
    shapes = {"c": (4096, 2048), "a": (4096, 16), "b": (16, 2048)}
    c, a, b = (hopper.put((rng.standard_normal(shape) * 0.1).astype(BFLOAT16)) for shape in shapes.values())
    inputs = [hopper.put(rng.standard_normal((M, 4096)).astype(BFLOAT16)) for M in (1000, 300, 1000, 64)]
    douts = [hopper.put(rng.standard_normal((x.shape[0], 2048)).astype(BFLOAT16)) for x in inputs]
    layer, many = rawops.FusedLoRA(c, a, b), rawops.MultiLoRA(c, 3, 16)
    many.load(1, a, b)
    indices = [hopper.put(rng.integers(-1, 3, x.shape[0]).astype(np.int32)) for x in inputs]

    def results(wait) -> list:
        found = []
        for x, dout, rows in zip(inputs, douts, indices, strict=True):
            for call in (
                lambda x=x: (layer(x),),
                lambda x=x, rows=rows: (many(x, rows),),
                lambda x=x, dout=dout: rawops.lora_linear_backward(dout, x, c, a, b),
            ):
                found += call()
                wait()
        return [hopper.get(one).view(np.uint16) for one in found]

    import cupy

    alone = results(cupy.cuda.Device().synchronize)
    for _ in range(10):
        for one, other in zip(results(lambda: None), alone, strict=True):
            np.testing.assert_array_equal(one, other)
