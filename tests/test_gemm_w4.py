"""Products with packed 4-bit weights: exact by small integers, in every format, storage and epilogue."""

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
from packed_weights import DTYPES, VALUES, Weights, integers, same

import rawops
from rawops._gemm_config import Problem
from rawops._gemm_w4 import FORMATS, GROUPS, TILES, Groups, select_config
from rawops.testing import references, tolerances

# --- products -------------------------------------------------------------------------------------------------------

SIZES = [(1, 256, 512), (7, 8, 64), (16, 100, 96), (17, 1, 128), (64, 8, 256), (130, 100, 32)]
KINDS = [("int4", False), ("uint4", False), ("uint4", True), ("float4_e2m1fn", False)]


@pytest.mark.parametrize("k_major", [True, False], ids=["k-major", "n-major"])
@pytest.mark.parametrize("b_dtype, zeros", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes_formats_and_storages(device, rng, size, b_dtype, zeros, k_major):
    M, N, K = size
    group = next(g for g in reversed(GROUPS) if K % g == 0)
    weights = Weights(device, rng, K, N, group, b_dtype, zeros=zeros, k_major=k_major)
    a = integers(rng, (M, K))
    out = device.guarded((M, N), np.float32)
    weights.gemm(device.put(a), out=out)
    same(device, out, a.astype(float) @ weights.values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("b_dtype", FORMATS)
def test_every_value_is_exact(device, dtype, b_dtype):
    """Each code by each of its neighbours, picked out by a unit matrix."""
    codes = np.array(list(itertools.product(range(16), repeat=2))).reshape(16, 32).T  # pairs along K
    a, scale = np.eye(32, dtype=DTYPES[dtype]), np.ones((1, 16), np.float32)
    got = rawops.gemm(device.put(a), device.put(rawops.pack_int4(codes)), scale_b=device.put(scale), b_dtype=b_dtype)
    same(device, got, VALUES[b_dtype][codes])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("zero_dtype", ["uint8", "int8"])
def test_every_zero_point_is_exact(device, dtype, zero_dtype):
    zero = np.arange(256, dtype=np.uint8).view(zero_dtype).reshape(1, 256)
    codes = np.broadcast_to(np.arange(16)[:, None].repeat(2, 0), (32, 256))
    got = rawops.gemm(
        device.put(np.eye(32, dtype=DTYPES[dtype])),
        device.put(rawops.pack_int4(codes)),
        scale_b=device.put(np.ones((1, 256), np.float16)),
        zero_b=device.put(zero),
        b_dtype="uint4",
    )
    same(device, got, codes - zero.astype(float))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_groups_and_scales(device, rng, group, scale_dtype):
    for M, zeros in ((3, True), (20, False)):
        weights = Weights(device, rng, 384, 40, group, "uint4", zeros=zeros, scale_dtype=scale_dtype)
        a = integers(rng, (M, 384), "bfloat16")
        same(device, weights.gemm(device.put(a), out_dtype="float32"), a.astype(float) @ weights.values)


def test_weights_are_not_rounded(device, rng):
    """Scales that no 16-bit type holds: the error is that of a float32 sum."""
    weights = Weights(device, rng, 256, 24, 64, "int4")
    scale = rng.uniform(0.5, 1, (4, 24)).astype(np.float32)
    exact = weights.values / np.repeat(device.get(weights.scale_b).astype(float), 64, 0) * np.repeat(scale, 64, 0)
    weights.scale_b = device.put(scale)
    a = rng.standard_normal((5, 256)).astype(np.float16)
    got = device.get(weights.gemm(device.put(a), out_dtype="float32"))
    magnitude = references.gemm_magnitude(a, exact)
    tolerances.assert_close(got, references.gemm(a, exact), "float32", k=256 + 4, magnitude=magnitude)


@pytest.mark.parametrize("split_k", [2, 3])
def test_split_k(device, rng, split_k):
    weights = Weights(device, rng, 1536, 36, 128, "int4")
    a = integers(rng, (2, 1536))
    got = weights.gemm(device.put(a), split_k=split_k, out_dtype="float32", activation="relu")
    same(device, got, np.maximum(a.astype(float) @ weights.values, 0))


# --- layouts --------------------------------------------------------------------------------------------------------

VIEWS = {
    "shifted": lambda xp, x: x[1:, 3:],
    "every other": lambda xp, x: x[::2, ::2],
    "reversed": lambda xp, x: x[::-1, ::-1],
    "transposed": lambda xp, x: x.T,
    "one column repeated": lambda xp, x: xp.broadcast_to(x[:, :1], x.shape),
}


@pytest.mark.parametrize("name", ["a", "b", "scale_b", "zero_b"])
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides(device, rng, name, view):
    """A view of each array in turn: the answer of a contiguous copy."""
    shapes = {"a": (5, 64), "b": (32, 20), "scale_b": (2, 20), "zero_b": (2, 20)}
    dtypes = {"a": "float16", "b": "uint8", "scale_b": "float16", "zero_b": "uint8"}
    arrays = {n: device.put(rng.integers(0, 4, shape).astype(dtypes[n])) for n, shape in shapes.items()}
    rows, cols = shapes[name]
    big = device.put(rng.integers(0, 4, (130, 130)).astype(dtypes[name]))
    part = VIEWS[view](device.xp, big)[:rows, :cols]
    gemm = functools.partial(rawops.gemm, b_dtype="uint4", activation="swiglu" if name != "a" else None)
    want = gemm(**{**arrays, name: device.xp.ascontiguousarray(part)})
    same(device, gemm(**{**arrays, name: part}), device.get(want).astype(float))


def test_nothing_outside_is_read(device, rng):
    """NaN scales and activations all around a view change nothing."""
    M, N, K, group = 3, 20, 160, 32
    weights = Weights(device, rng, K, N, group, "uint4", zeros=True)
    a = integers(rng, (M, K))
    want = a.astype(float) @ weights.values
    scale = np.full((K // group + 2, N + 8), np.nan, np.float16)
    scale[1:-1, 4:-4] = device.get(weights.scale_b)
    weights.scale_b = device.put(scale)[1:-1, 4:-4]
    wide = np.full((M + 2, K + 16), np.nan, np.float16)
    wide[1:-1, 8:-8] = a
    same(device, weights.gemm(device.put(wide)[1:-1, 8:-8]), want.astype(np.float16).astype(float))


# --- the rest of gemm -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("M", [2, 40])
def test_epilogue(device, rng, M, activation):
    N, K = 44, 128
    weights = Weights(device, rng, K, N, 64, "int4", k_major=M == 2)
    a, c, bias = integers(rng, (M, K)), integers(rng, (M, N)), integers(rng, (N,), "float32")
    residual = integers(rng, (M, N // 2 if activation == "swiglu" else N))
    got = weights.gemm(
        device.put(a),
        device.put(c),
        alpha=0.5,
        beta=2.0,
        bias=device.put(bias),
        residual=device.put(residual),
        activation=activation,
    )
    keywords = {"alpha": 0.5, "beta": 2.0, "bias": bias, "residual": residual, "activation": activation}
    want = references.gemm(a, weights.values, c, **keywords)
    tolerances.assert_close(device.get(got), want, "float16", k=K)


@pytest.mark.parametrize("zeros", [True, False])
def test_a_plan_keeps_scales_and_zero_points(device, rng, zeros):
    weights = Weights(device, rng, 2048, 12, 128, "uint4", zeros=zeros)
    groups = {"scale_b": weights.scale_b, "zero_b": weights.zero_b, "b_dtype": "uint4"}
    plan = rawops.Gemm(3, 12, 2048, "float16", out_dtype="float32", split_k=2, **groups)
    for _ in range(2):
        a = integers(rng, (3, 2048))
        same(device, plan(device.put(a), weights.b), a.astype(float) @ weights.values)


def test_batches_share_the_weights(device, rng):
    weights = Weights(device, rng, 64, 12, 32, "int4")
    a = integers(rng, (2, 3, 5, 64))
    want = a.astype(float) @ weights.values
    same(device, weights.gemm(device.put(a)), want)
    same(device, weights.gemm(device.put(a)[:, ::2, :4]), want[:, ::2, :4])


def test_alpha_zero_and_empty_sizes(device, rng):
    weights = Weights(device, rng, 64, 12, 64, "int4")
    c = integers(rng, (4, 12))
    poison = device.put(np.full((4, 64), np.nan, np.float16))
    same(device, weights.gemm(poison, device.put(c), alpha=0.0, beta=1.0), c)
    assert weights.gemm(poison[:0]).shape == (0, 12)
    empty = Weights(device, rng, 0, 12, 64, "int4")
    bias = device.put(np.arange(12, dtype=np.float16))
    same(device, empty.gemm(poison[:, :0], bias=bias), np.broadcast_to(np.arange(12.0), (4, 12)))


def test_a_nan_that_is_read_propagates(device, rng):
    weights = Weights(device, rng, 64, 12, 32, "int4")
    a = integers(rng, (3, 64))
    a[1, 40] = np.nan
    assert np.isnan(device.get(weights.gemm(device.put(a)))).tolist() == [[False] * 12, [True] * 12, [False] * 12]


# --- checks ---------------------------------------------------------------------------------------------------------

MISTAKES = {
    "b_dtype": ({"b_dtype": "int3"}, ValueError, r"gemm: b_dtype must be 'int4', 'uint4' or 'float4_e2m1fn', got"),
    "a": ({"a": "float32"}, TypeError, r"gemm: a must have dtype float16 or bfloat16, got float32"),
    "b": ({"b": "int8"}, TypeError, r"gemm: b must have dtype uint8, got int8. int4 weights come packed, two a byte"),
    "scales": ({"scale_b": None}, ValueError, r"gemm: scale_b must be given for int4 weights, got None"),
    "group": ({"scale_b": (3, 8)}, ValueError, r"scale_b must have a row for each 32, 64 or 128 of K = 128, got shape"),
    "columns": ({"scale_b": (2, 7)}, ValueError, r"gemm: scale_b must have shape \(2, 8\), got \(2, 7\)"),
    "zeros": ({"zero_b": (2, 8)}, ValueError, r"gemm: zero_b must be None for int4 weights, got shape \(2, 8\)"),
    "K": (
        {"a": (4, 120)},
        ValueError,
        r"b must have a row for every two of a's 120 columns, got shape \(64, 8\)",
    ),
    "unpacked": (
        {"b": (128, 8)},
        ValueError,
        r"two of a's 128 columns, got shape \(128, 8\)\. .* by .*pack_int4",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(device, mistake):
    changes, error, message = MISTAKES[mistake]
    shapes = {"a": (4, 128), "b": (64, 8), "scale_b": (2, 8)}
    dtypes = {"a": "float16", "b": "uint8", "scale_b": "float16", "zero_b": "uint8"}
    keywords = {"b_dtype": "int4", **{n: np.zeros(shape, dtypes[n]) for n, shape in shapes.items()}}
    for name, change in changes.items():
        if isinstance(change, tuple):
            keywords[name] = np.zeros(change, dtypes[name])
        elif name in dtypes and change is not None:
            keywords[name] = keywords[name].astype(change)
        else:
            keywords[name] = change
    with pytest.raises(error, match=message):
        rawops.gemm(**{n: device.put(x) if isinstance(x, np.ndarray) else x for n, x in keywords.items()})


def test_scales_without_b_dtype(device):
    x = device.put(np.zeros((4, 4), np.float16))
    with pytest.raises(ValueError, match="scale_b must be None without b_dtype"):
        rawops.gemm(x, x, scale_b=x)


def test_pack_int4():
    packed = rawops.pack_int4(np.array([[1, -1], [-8, 7], [0, 15], [9, 2]], np.int8))
    assert packed.dtype == np.uint8
    assert packed.tolist() == [[0x81, 0x7F], [0x90, 0x2F]]
    for dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        values = np.array([[1, 5], [3, 7]]).astype(dtype) * dtype(2 if dtype is ml_dtypes.uint4 else -1)
        want = [[0x62, 0xEA]] if dtype is ml_dtypes.uint4 else [[0xDF, 0x9B]]
        assert rawops.pack_int4(values).tolist() == want
    with pytest.raises(ValueError, match="K even"):
        rawops.pack_int4(np.zeros((3, 2), np.int8))
    with pytest.raises(TypeError, match="integer dtype"):
        rawops.pack_int4(np.zeros((4, 2)))
    with pytest.raises(TypeError, match="pack_int4: q must be a NumPy or CuPy array, got list"):
        rawops.pack_int4([[1, 2], [3, 4]])


# --- configurations -------------------------------------------------------------------------------------------------


def test_configurations():
    groups = Groups(128, 2, 0)

    def config(M, N, K):
        return select_config(Problem("bfloat16", M, N, K), groups, 132, 227 * 1024)

    assert (config(1, 8192, 8192).tile, config(1, 8192, 8192).split_k) == (TILES[4], 1)
    assert config(16, 28672, 4096).tile == TILES[2]
    assert config(1, 4096, 4096).tile == TILES[5]
    assert config(300, 4096, 4096).tile == TILES[0]
    assert config(1, 128, 32768).split_k == 32
    for tile in TILES:  # every supported card has 99 KB
        assert groups.ring_bytes(tile) <= 99 * 1024
        assert tile.staging_bytes("float32") <= 99 * 1024
        assert Groups(32, 4, 1).ring_bytes(tile.shortened()[-1]) <= 99 * 1024
