"""Fused LoRA: exact products over sizes, ranks and layouts, the intermediate's precision, the epilogue, the checks."""

import itertools
import sys

import numpy as np
import pytest
from lora_operands import DTYPES, integers, operands, put, random, same

import rawops
from rawops._gemm_config import Problem
from rawops._lora_config import select_config, shared_bytes
from rawops.lora import FusedLoRA, lora_linear
from rawops.testing import references
from rawops.testing.tolerances import assert_close

MODULE = sys.modules[select_config.__module__]


@pytest.fixture(params=["rides", "is read"])
def intermediate(request, monkeypatch):
    """x @ a along the K loop, where the rank allows it, and x @ a from a product of its own."""
    if request.param == "is read":
        monkeypatch.setattr(MODULE, "_rides_in", lambda *_: False)
    return request.param


# --- products -------------------------------------------------------------------------------------------------------

SIZES = [(1, 7, 129), (7, 129, 1), (17, 64, 65), (64, 1, 17), (65, 17, 64), (129, 65, 7)]
RANKS = [0, 1, 5, 8, 16, 24, 33, 64, 70]
# Where rows and columns end and where ranks do is told apart: each size has half of the ranks, each rank three sizes.
PRODUCTS = [(size, rank) for i, size in enumerate(SIZES) for rank in RANKS[i % 2 :: 2]]


@pytest.mark.parametrize("size, rank", PRODUCTS, ids=str)
def test_sizes_and_ranks(device, rng, size, rank):
    inputs = operands(rng, *size, rank)
    out = device.guarded(size[:2], np.float16)
    lora_linear(**put(device, inputs), scaling=0.5, out=out)
    same(device, out, references.lora_linear(**inputs, scaling=0.5).astype(np.float16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_dtypes(device, rng, dtype):
    inputs = operands(rng, 33, 40, 72, 9, dtype)
    got = lora_linear(**put(device, inputs), scaling=2.0)
    assert got.dtype == inputs["x"].dtype
    same(device, got, references.lora_linear(**inputs, scaling=2.0).astype(inputs["x"].dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_the_same_call_again(device, rng, dtype):
    """With the same arrays, of which a plan remembers what launches they come down to."""
    inputs = operands(rng, 5, 40, 72, 9, dtype)
    want = references.lora_linear(**inputs, scaling=2.0).astype(inputs["x"].dtype)
    on_device, out, zeros = put(device, inputs), device.guarded(want.shape, want.dtype), device.put(0 * want)
    op = FusedLoRA(on_device["c"], on_device["a"], on_device["b"], 2.0)
    for _ in range(4):
        out[...] = zeros
        op(on_device["x"], out=out)
        same(device, out, want)


@pytest.mark.parametrize("rank", [16, 24])
def test_layouts(device, rng, rank, intermediate):
    """Row-major and column-major weights, as they come and as PEFT stores them, in every combination."""
    inputs = operands(rng, 24, 136, 80, rank)
    want = references.lora_linear(**inputs)
    for orders in itertools.product("CF", repeat=3):
        weights = {
            n: device.put(inputs[n]) if o == "C" else device.put(inputs[n].T.copy()).T
            for n, o in zip("cab", orders, strict=True)
        }
        same(device, lora_linear(device.put(inputs["x"]), **weights), want)


VIEWS = {
    "odd column": lambda x, xp: x[:, 1:-7],
    "even column": lambda x, xp: x[:, 2:-6],
    "every other column": lambda x, xp: x[:, ::2],
    "every other row": lambda x, xp: x[::2, 8:],
    "reversed": lambda x, xp: x[::-1, ::-1],
    "one row repeated": lambda x, xp: xp.broadcast_to(x[3], x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("operand", "xcab")
def test_views(device, rng, operand, view, intermediate):
    """One operand at a time is a view: the answer is that of a contiguous copy."""
    inputs = operands(rng, 18, 32, 40, 12)
    rows, cols = inputs[operand].shape
    big = integers(rng, (2 * rows, 2 * cols))
    inputs[operand] = VIEWS[view](big, np)[:rows, :cols]
    on_device = put(device, inputs) | {operand: VIEWS[view](device.put(big), device.xp)[:rows, :cols]}
    same(device, lora_linear(**on_device), references.lora_linear(**inputs))


def test_misaligned_arrays(device, rng):
    """Contiguous, but one element past an aligned address: for every argument in turn."""
    inputs = operands(rng, 19, 24, 40, 8) | {"bias": integers(rng, 24), "residual": integers(rng, (19, 24))}
    want = references.lora_linear(**{n: inputs[n] for n in "xcab"}, bias=inputs["bias"]) + inputs["residual"]
    for shifted in (*inputs, "out"):
        arrays = {}
        for name, x in {**inputs, "out": np.full((19, 24), np.nan, np.float16)}.items():
            buffer = device.put(np.concatenate([np.zeros(1 if name == shifted else 8, x.dtype), x.reshape(-1)]))
            arrays[name] = buffer[-x.size :].reshape(x.shape)
        same(device, lora_linear(**arrays), want)


def test_batches(device, rng, intermediate):
    """Batch axes of x: stacked into rows, strided, repeated, empty."""
    weights = operands(rng, 1, 48, 40, 8)
    del weights["x"]
    on_device = put(device, weights)
    for shape in [(3, 5, 40), (2, 3, 5, 40), (2, 1, 1, 40), (0, 4, 40), (3, 0, 40)]:
        x = integers(rng, shape)
        same(device, lora_linear(device.put(x), **on_device), references.lora_linear(x, **weights))
    x = integers(rng, (4, 6, 5, 40))
    for take in (lambda x: x[::2, 1::3], lambda x: x.swapaxes(0, 2), lambda x: x[:, :, ::-1]):
        residual = integers(rng, (*take(x).shape[:-1], 48))
        got = lora_linear(take(device.put(x)), **on_device, residual=device.put(residual))
        same(device, got, references.lora_linear(take(x), **weights) + residual)


def test_more_batch_axes_than_a_kernel_has(device, rng, intermediate):
    weights = operands(rng, 1, 48, 40, 8)
    del weights["x"]
    x = integers(rng, (4, 4, 4, 4, 3, 40))[::2, 1::2, ::2, ::-2]
    on_device = device.put(np.ascontiguousarray(x.transpose(3, 1, 2, 0, 4, 5))).transpose(3, 1, 2, 0, 4, 5)
    residual = integers(rng, (2, 1, 2, 3, 48))
    got = lora_linear(on_device, **put(device, weights), residual=device.put(residual))
    same(device, got, references.lora_linear(x, **weights) + residual)


def test_split_k(device, rng, intermediate):
    """Few tiles and a long K: every slice adds its own part, or the first adds all."""
    inputs = operands(rng, 5, 72, 2048, 8)
    inputs["b"] = np.sign(inputs["b"])
    problem = Problem("float16", 5, 72, 2048)
    assert select_config(problem, 8, 108, 166912).split_k > 1
    same(device, lora_linear(**put(device, inputs)), references.lora_linear(**inputs).astype(np.float16))


# --- what is read, and what the numbers are -------------------------------------------------------------------------


def test_nothing_to_add(device, rng):
    """K = 0, rank 0, scaling 0, no rows, no columns: the plain product, and a and b of NaN are not read."""
    inputs = operands(rng, 5, 12, 16, 4)
    plain = references.gemm(inputs["x"], inputs["c"])
    x, c = device.put(inputs["x"]), device.put(inputs["c"])
    a, b = device.put(np.full((16, 4), np.nan, np.float16)), device.put(np.full((4, 12), np.nan, np.float16))
    same(device, lora_linear(x, c, a, b, scaling=0), plain)
    same(device, lora_linear(x, c, a[:, :0], b[:0]), plain)
    b = device.put(inputs["b"])
    bias = device.put(np.arange(12, dtype=np.float16))
    empty_k = lora_linear(x[:, :0], c[:0], a[:0], b, bias=bias, out=device.guarded((5, 12), np.float16))
    same(device, empty_k, np.tile(np.arange(12), (5, 1)))
    assert lora_linear(x[:0], c, a, b).shape == (0, 12)
    assert lora_linear(x, c[:, :0], a, b[:, :0]).shape == (5, 0)


@pytest.mark.parametrize("rank", [5, 16, 33, 70])
def test_padding_is_not_read(device, rng, rank):
    """Factors in slots padded to 80 ranks of NaN, all operands in a sea of NaN."""
    M, N, K = 21, 50, 70
    inputs = operands(rng, M, N, K, rank)
    views = {}
    for name, x in inputs.items():
        slot = np.full((80, 80), np.nan, np.float16)
        slot[: x.shape[0], : x.shape[1]] = x
        views[name] = device.put(slot)[: x.shape[0], : x.shape[1]]
    got = lora_linear(**views, out=device.guarded((M, N), np.float16))
    same(device, got, references.lora_linear(**inputs).astype(np.float16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_intermediate_past_65504(device, dtype, intermediate):
    K = 512 if device.is_emulated else 4096
    x, a = np.full((3, K), 64, DTYPES[dtype]), np.full((K, 16), 64, DTYPES[dtype])
    b, c = np.full((16, 40), 2.0**-14, DTYPES[dtype]), np.zeros((K, 40), DTYPES[dtype])
    for _ in range(2):
        same(device, lora_linear(*map(device.put, (x, c, a, b))), np.full((3, 40), 16.0 * 64 * 64 * K * 2.0**-14))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [7, 64, 100])
def test_intermediate_is_float32(device, rng, rank, dtype):
    """Against float64 in a float32 output, where a rounding of x @ a to 16 bits, or to TF32, would show."""
    inputs = random(rng, 20, 40, 96, rank, dtype)
    inputs["c"][...] = 0
    out = device.guarded((20, 40), np.float32)
    lora_linear(**put(device, inputs), scaling=1.7, out=out)
    want = references.lora_linear(**inputs, scaling=1.7)
    low = references.gemm_magnitude(inputs["x"], inputs["a"])
    magnitude = 1.7 * references.gemm_magnitude(low, inputs["b"])
    assert_close(device.get(out), want, "float32", k=16, magnitude=magnitude)


def test_non_finite_values(device, rng, intermediate):
    """Inf and NaN reach the entries that IEEE arithmetic says, and no others."""
    inputs = operands(rng, 20, 40, 33, 8)
    inputs["a"][:, 0], inputs["a"][2], inputs["c"][2], inputs["b"][:, 8:] = 1, 1, 1, 1
    inputs["x"][:, 0] += inputs["x"].sum(axis=1) == 0  # so that x @ a has no zero in its first column
    inputs["x"][7, 2], inputs["x"][9, 4], inputs["b"][0, 3], inputs["b"][0, 5] = np.inf, np.nan, np.inf, np.nan
    got = device.get(lora_linear(**put(device, inputs))).astype(np.float64)
    with np.errstate(invalid="ignore"):
        want = references.lora_linear(**inputs)
    np.testing.assert_array_equal(got, want)
    assert (
        np.isinf(got[:7, 3]).all()
        and np.isinf(got[7, 8:]).all()
        and np.isnan(got[9]).all()
        and np.isnan(got[:, 5]).all()
    )


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_infinities_meet_no_ranks_that_there_are_not(device, rng, rank, intermediate):
    """Which would be 0 times infinity: of x, and of the scaling."""
    inputs = operands(rng, 20, 40, 33, rank)
    for name in "acb":
        inputs[name][...] = 1
    inputs["x"][7, 2], inputs["x"][9, 4], inputs["x"][:, 0] = np.inf, -np.inf, 200
    for scaling in (0.5, np.inf):
        got = device.get(lora_linear(**put(device, inputs), scaling=scaling)).astype(np.float64)
        np.testing.assert_array_equal(got, references.lora_linear(**inputs, scaling=scaling))
        assert np.isinf(got[7]).all() and np.isinf(got).all() == (scaling == np.inf)


def check_non_finite_scaling(device, rng, dtype):
    inputs = operands(rng, 20, 40, 33, 8, dtype)
    inputs["x"][3], inputs["b"][:, 7] = 0, 0
    for scaling, factor in ((np.nan, np.nan), (np.inf, np.inf), (-np.inf, -np.inf), (-1e39, -np.inf)):
        got = device.get(lora_linear(**put(device, inputs), scaling=scaling)).astype(np.float64)
        with np.errstate(invalid="ignore"):
            want = references.gemm(inputs["x"], inputs["c"])
            want += (factor * references.gemm(inputs["x"], inputs["a"])) @ inputs["b"].astype(np.float64)
        assert np.isnan(want[3]).all() and np.isnan(want[:, 7]).all()  # times 0
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
def test_non_finite_scaling(device, rng, intermediate, dtype):
    check_non_finite_scaling(device, rng, dtype)


# --- epilogue -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogue(device, rng, dtype, activation, intermediate):
    """swiglu with an odd half, so that gate and up columns of c and b differ in alignment."""
    M, N, K, rank = 37, 2 * 51, 64, 12
    inputs = random(rng, M, N, K, rank, dtype)
    cols = N // 2 if activation == "swiglu" else N
    bias, residual = rng.standard_normal(N).astype(np.float32), rng.standard_normal((M, cols)).astype(DTYPES[dtype])
    epilogue = {"activation": activation, "bias": device.put(bias), "residual": device.put(residual)}
    out = device.guarded((M, cols), DTYPES[dtype])
    lora_linear(**put(device, inputs), scaling=1.5, **epilogue, out=out)
    want = references.lora_linear(**inputs, scaling=1.5, bias=bias, activation=activation) + residual
    assert_close(device.get(out), want, DTYPES[dtype], k=4 * (K + rank))


def test_output_over_an_input(device, rng):
    """out as the residual itself, over x, and over b: as if it were elsewhere."""
    for target in ("residual", "x", "b"):
        inputs = operands(rng, 16, 16, 16, 16)
        residual = integers(rng, (16, 16))
        want = references.lora_linear(**inputs) + residual
        on_device = put(device, inputs | {"residual": residual})
        got = lora_linear(**on_device, out=on_device[target])
        assert got is on_device[target]
        same(device, got, want)


# --- FusedLoRA ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [6, 70])
def test_plan(device, rng, rank):
    """Calls of several sizes; weights changed in place show; equal calls use the same workspaces."""
    inputs = operands(rng, 9, 34, 50, rank) | {"bias": integers(rng, 34)}
    weights = {name: inputs[name] for name in ("c", "a", "b", "bias")}
    on_device = put(device, weights)
    op = FusedLoRA(**on_device, scaling=0.25, activation="relu")
    for rows in (9, 1, 9):
        x = integers(rng, (rows, 50))
        out = device.guarded((rows, 34), np.float16)
        assert op(device.put(x), out=out) is out
        same(device, out, references.lora_linear(x, **weights, scaling=0.25, activation="relu"))
    kept = list(op._product.workspaces.values())
    on_device["b"][...] = 0
    same(device, op(device.put(x), out=out), references.gemm(x, weights["c"], bias=weights["bias"], activation="relu"))
    assert all(before is after for before, after in zip(kept, op._product.workspaces.values(), strict=True))


def test_from_peft(device, rng):
    """Weights as (out, in), views without copies, and the scaling of the true rank."""
    inputs = operands(rng, 5, 24, 40, 4)
    weight, lora_a, lora_b = (device.put(inputs[n].T.copy()) for n in "cab")
    x = device.put(inputs["x"])
    op = FusedLoRA.from_peft(weight, lora_a, lora_b, 8)
    assert op.scaling == 2.0
    assert all(device.xp.shares_memory(view, base) for view, base in ((op.c, weight), (op.a, lora_a), (op.b, lora_b)))
    same(device, op(x), references.lora_linear(**inputs, scaling=2.0))
    assert FusedLoRA.from_peft(weight, lora_a, lora_b, 8, use_rslora=True).scaling == 4.0
    same(
        device, FusedLoRA.from_peft(weight, lora_a[:0], lora_b[:, :0], 8)(x), references.gemm(inputs["x"], inputs["c"])
    )


# --- configuration, checks ------------------------------------------------------------------------------------------

CARDS = {"A100": (108, 166912), "L40": (142, 101376), "H200": (132, 232448)}


@pytest.mark.parametrize("card", CARDS)
def test_select_config(card):
    """It fits every card, rides where the memory is the limit, and reads where the tensor cores are."""
    for M, N, K, rank, access in itertools.product(
        (1, 33, 64, 128, 4096), (128, 28672), (64, 4096), (1, 16, 33, 64, 200), (2, 16)
    ):
        config = select_config(Problem("float16", M, N, K, access=access), rank, *CARDS[card])
        assert shared_bytes(config.tile, config.rank_step, config.rides, 2) <= CARDS[card][1]
        assert config.tile.stages >= 3
        assert rank <= config.rank_step or not config.rides
    for M, rank in itertools.product((1, 16, 64), (8, 16)):
        assert select_config(Problem("float16", M, 28672, 4096), rank, *CARDS[card]).rides
    for M, N in itertools.product((2048, 8192), (4096, 28672)):
        assert not select_config(Problem("float16", M, N, 4096), 16, *CARDS[card]).rides


def test_one_launch_without_bank_conflicts(rng):
    """The tile of the decoding shape, K-major and not, riding: one launch, no extra cycle in shared memory."""
    for rank, order in itertools.product((16, 64), "CF"):
        inputs = {name: x.copy(order) for name, x in operands(rng, 64, 128, 256, rank).items()}
        with rawops.emulate(arch="sm_90a") as emulator:
            got = lora_linear(**inputs)
        np.testing.assert_array_equal(got, references.lora_linear(**inputs))
        (launch,) = emulator.report
        assert launch.total.shared_conflicts == 0


def test_errors(device):
    def zeros(*shape, dtype=np.float16):
        return device.put(np.zeros(shape, dtype))

    x, c, a, b = zeros(4, 6), zeros(6, 8), zeros(6, 2), zeros(2, 8)
    for error, text, call in [
        (ValueError, "lora_linear: x must have shape (..., M, 6)", lambda: lora_linear(zeros(4, 5), c, a, b)),
        (ValueError, "lora_linear: x must have shape (..., M, 6)", lambda: lora_linear(zeros(6), c, a, b)),
        (ValueError, "lora_linear: a must have shape (6, 3), got (2, 3)", lambda: lora_linear(x, c, zeros(2, 3), b)),
        (ValueError, "lora_linear: b must have shape (2, 8), got (8, 2)", lambda: lora_linear(x, c, a, b.T)),
        (ValueError, "lora_linear: b must have 2 dimensions", lambda: lora_linear(x, c, a, b[None])),
        (TypeError, "lora_linear: a must have dtype float16", lambda: lora_linear(x, c, zeros(6, 2, dtype="f4"), b)),
        (TypeError, "lora_linear: x must have dtype float16", lambda: lora_linear(zeros(4, 6, dtype="f4"), c, a, b)),
        (TypeError, "lora_linear: c must have dtype", lambda: lora_linear(x, zeros(6, 8, dtype="i4"), a, b)),
        (TypeError, "lora_linear: scaling must be a real number", lambda: lora_linear(x, c, a, b, scaling="1")),
        (ValueError, "lora_linear: activation must be", lambda: lora_linear(x, c, a, b, activation="tanh")),
        (
            ValueError,
            "lora_linear: c must have an even number of columns",
            lambda: lora_linear(x, c[:, :7], a, b[:, :7], activation="swiglu"),
        ),
        (ValueError, "lora_linear: bias must have shape (8,)", lambda: lora_linear(x, c, a, b, bias=zeros(4))),
        (ValueError, "lora_linear: out must have shape (4, 8)", lambda: lora_linear(x, c, a, b, out=zeros(8, 4))),
        (ValueError, "FusedLoRA: a must have shape", lambda: FusedLoRA(c, a.T, b)),
        (ValueError, "FusedLoRA: activation must be", lambda: FusedLoRA(c, a, b, activation="tanh")),
        (ValueError, "FusedLoRA: x must have shape", lambda: FusedLoRA(c, a, b)(zeros(4, 5))),
        (TypeError, "FusedLoRA: a must be an array, got None", lambda: FusedLoRA(c, None, b)),
        (TypeError, "FusedLoRA: scaling must be a real number", lambda: FusedLoRA(c, a, b, "1")),
        (ValueError, "FusedLoRA: bias must have shape (8,)", lambda: FusedLoRA(c, a, b, bias=zeros(4))),
        (TypeError, "FusedLoRA: bias must have dtype", lambda: FusedLoRA(c, a, b, bias=zeros(8, dtype="f8"))),
        (
            ValueError,
            "FusedLoRA: c must have an even number of columns",
            lambda: FusedLoRA(c[:, :7], a, b[:, :7], activation="swiglu"),
        ),
        (TypeError, "lora_linear: a must be an array, got None", lambda: lora_linear(x, c, None, None)),
        (ValueError, "lora_linear: activation must be", lambda: lora_linear(x, c, a, b, activation=["relu"])),
        (ValueError, "lora_linear: scaling must fit a float", lambda: lora_linear(x, c, a, b, scaling=10**400)),
        (ValueError, "FusedLoRA.from_peft: lora_a must have 2", lambda: FusedLoRA.from_peft(c.T, a[0], b.T, 8)),
        (ValueError, "FusedLoRA.from_peft: lora_a must have shape", lambda: FusedLoRA.from_peft(c, a.T, b.T, 8)),
        (ValueError, "FusedLoRA.from_peft: lora_b must have shape", lambda: FusedLoRA.from_peft(c.T, a.T, b, 8)),
        (TypeError, "FusedLoRA.from_peft: weight must be an array", lambda: FusedLoRA.from_peft(None, a.T, b.T, 8)),
        (
            TypeError,
            "FusedLoRA.from_peft: use_rslora must be True or False",
            lambda: FusedLoRA.from_peft(c.T, a.T, b.T, 8, use_rslora="no"),
        ),
        (
            TypeError,
            "FusedLoRA.from_peft: lora_b must have dtype float16",
            lambda: FusedLoRA.from_peft(c.T, a.T, zeros(8, 2, dtype="f4"), 8),
        ),
    ]:
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value).startswith(text)


@pytest.mark.gpu
@pytest.mark.parametrize("M, rank", [(64, 16), (64, 80), (2048, 16)])
def test_graph_capture(device, rng, M, rank):
    """After one warm-up a call with out= is captured; a replay sees new contents."""
    import cupy

    inputs = operands(rng, M, 1024, 256, rank)
    on_device = put(device, inputs)
    op = FusedLoRA(on_device["c"], on_device["a"], on_device["b"])
    out = cupy.empty((M, 1024), cupy.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        op(on_device["x"], out=out)
        stream.begin_capture()
        op(on_device["x"], out=out)
        graph = stream.end_capture()
        inputs["x"] = integers(rng, (M, 256))
        on_device["x"].set(inputs["x"])
        graph.launch()
        stream.synchronize()
    same(device, out, references.lora_linear(**inputs).astype(np.float16))
