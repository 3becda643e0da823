"""Grouped GEMM: exact over ragged and empty groups, rows in no group, offsets that make no sense, epilogues."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hopper_gemm import padded, ran_on_hopper

from rawops import _gemm_sm90 as sm90
from rawops import config
from rawops._gemm_grouped import MAX_GROUPS, most_tiles, table_bytes
from rawops.gemm import grouped_gemm
from rawops.testing import references

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KINDS = [("float16", None), (BFLOAT16, None), ("float32", None), ("float32", "tf32"), ("float64", None)]
LAYOUTS = [*itertools.product(("row", "col"), repeat=2)]
UNTOUCHED = 99


def integers(rng, shape, dtype) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(dtype)


def offsets_of(*sizes, first: int = 0, dtype="int32") -> np.ndarray:
    return (first + np.cumsum([0, *sizes])).astype(dtype)


def expected(a, b, offsets) -> np.ndarray:
    """The exact result, and UNTOUCHED in the rows of no group."""
    want = np.full((a.shape[0], b.shape[-1]), UNTOUCHED, np.int64)
    for g, (begin, end) in enumerate(itertools.pairwise(offsets)):
        want[begin:end] = a[begin:end].astype(np.int64) @ b[g].astype(np.int64)
    return want.astype(np.float64).astype(a.dtype)


def check(device, a, b, offsets, layouts=("row", "row"), want=None, place=padded, **options) -> None:
    """Compare with the exact result; the output lies between guard bands, the operands in NaN where they are padded."""
    rows = np.arange(a.shape[0])
    a = np.where(((rows >= offsets.min()) & (rows < offsets.max()))[:, None], a, np.nan).astype(a.dtype)
    out = device.guarded((a.shape[0], b.shape[-1]), a.dtype)
    out[...] = UNTOUCHED
    got = grouped_gemm(
        place(device, a, layouts[0]), place(device, b, layouts[1]), device.put(offsets), out=out, **options
    )
    assert got is out
    with np.errstate(invalid="ignore"):
        want = expected(a, b, offsets) if want is None else want
    np.testing.assert_array_equal(device.get(out).astype(float), want.astype(float))


def plain(device, x: np.ndarray, layout: str):
    """x without padding, whose rows lie on any boundary."""
    return device.put(x) if layout == "row" else device.put(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2)


SIZES = {
    "ragged": (17, 1, 0, 70, 3),
    "empty at both ends": (0, 0, 40, 0),
    "all in one": (0, 91, 0),
    "one group": (66,),
    "many groups": (*[0, 2, 1] * 13, 5),  # more than a warp looks at together
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_groups(device, rng, sizes):
    offsets = offsets_of(*sizes)
    a, b = integers(rng, (offsets[-1], 20), "float16"), integers(rng, (len(sizes), 20, 24), "float16")
    check(device, a, b, offsets)


@pytest.mark.parametrize("dtype, precision", KINDS)
def test_dtypes(device, rng, dtype, precision):
    offsets = offsets_of(*SIZES["ragged"])
    a, b = integers(rng, (offsets[-1], 20), dtype), integers(rng, (5, 20, 24), dtype)
    check(device, a, b, offsets, precision=precision)


@pytest.mark.parametrize("dtype, layouts", [*((dtype, x) for dtype in ("float16", "float32") for x in LAYOUTS[1:3])])
def test_layouts(device, rng, layouts, dtype):
    """Groups begin at odd rows, so those of a column-major a lie on no boundary; neither do rows of 19 or 13."""
    offsets = offsets_of(5, 38, 0, 9, dtype="int64")
    for K, N in ((19, 13), (32, 16)):
        a, b = integers(rng, (52, K), dtype), integers(rng, (4, K, N), dtype)
        check(device, a, b, offsets, layouts, place=plain)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_in_no_group_are_neither_read_nor_written(device, rng, dtype):
    a, b = integers(rng, (90, 24), dtype), integers(rng, (2, 24, 16), dtype)
    check(device, a, b, offsets_of(30, 11, first=7))
    check(device, a, b, offsets_of(0, 0, first=20))


MALFORMED = [
    ([0, 30, 10, 50], [(0, 30), (30, 30), (30, 50)]),
    ([60, 0, 0, 0], [(60, 60)] * 3),
    ([-5, 10, 2**31 - 1, 20], [(0, 10), (10, 60), (60, 60)]),
]


@pytest.mark.parametrize("given, means", MALFORMED)
def test_malformed_offsets(device, hopper, force, rng, given, means):
    """No row has two groups and nothing outside of the arrays is touched."""
    force(64, block_m=64)
    for where, dtype in ((device, "float32"), (hopper, "float16")):
        a, b = integers(rng, (60, 24), dtype), integers(rng, (3, 24, 16), dtype)
        want = np.full((60, 16), UNTOUCHED, a.dtype)
        for g, (begin, end) in enumerate(means):
            want[begin:end] = (a[begin:end].astype(int) @ b[g].astype(int)).astype(a.dtype)
        out = where.guarded((60, 16), dtype)
        out[...] = UNTOUCHED
        grouped_gemm(where.put(a), where.put(b), where.put(np.array(given, np.int64)), out=out)
        np.testing.assert_array_equal(where.get(out), want)


@pytest.mark.parametrize("given, _", MALFORMED)
def test_checked_offsets(device, rng, monkeypatch, given, _):
    """With RAWOPS_CHECK=1 they raise; those of groups that leave rows out do not."""
    a, b = device.put(integers(rng, (60, 8), "float32")), device.put(integers(rng, (3, 8, 8), "float32"))
    monkeypatch.setattr(config, "current", lambda: config.Config(check=True))
    grouped_gemm(a, b, device.put(offsets_of(10, 0, 20, first=5)))
    out = device.put(np.zeros((60, 8), np.float32))
    with pytest.raises(ValueError, match="grouped_gemm: group_offsets must rise from 0 or more to at most 60"):
        grouped_gemm(a, b, device.put(np.array(given, np.int64)), out=out)
    assert not device.get(out).any()


def test_strided_offsets_and_a_shared_b(device, rng):
    a, b = integers(rng, (40, 16), "float16"), integers(rng, (3, 16, 8), "float16")
    offsets = offsets_of(8, 20, 12)
    wide = device.put(np.stack([offsets, offsets + 5], axis=1))
    got = grouped_gemm(device.put(a), device.put(b), wide[:, 0])
    np.testing.assert_array_equal(device.get(got), expected(a, b, offsets))
    shared = device.xp.broadcast_to(device.put(b[0]), b.shape)
    got = grouped_gemm(device.put(a), shared, device.put(offsets))
    np.testing.assert_array_equal(device.get(got), expected(a, b[[0, 0, 0]], offsets))


# --- Hopper ---------------------------------------------------------------------------------------------------------

TILES = [
    ({"block_n": 64}, "row"),
    ({"block_n": 128, "ping_pong": True, "stages": 3}, "col"),
    ({"block_n": 192, "block_m": 64}, "row"),
    ({"block_n": 208, "block_m": 64, "ping_pong": True}, "col"),
]


@pytest.mark.parametrize("tile, order_b", TILES, ids=str)
def test_hopper_tiles(hopper, force, rng, tile, order_b):
    """Two blocks walk over many tiles; groups end inside, at and beyond the edges of tiles and of their halves."""
    force(**tile)
    offsets = offsets_of(1, 128, 0, 150, 64, first=3)
    a, b = integers(rng, (350, 72), "float16"), integers(rng, (5, 72, 136), "float16")
    check(hopper, a, b, offsets, ("row", order_b))
    assert ran_on_hopper(hopper, "gemm_grouped_sm90")


def test_hopper_many_groups(hopper, rng):
    sizes = [*[0, 3, 1] * 14, 70]
    a, b = integers(rng, (sum(sizes), 64), BFLOAT16), integers(rng, (len(sizes), 64, 32), BFLOAT16)
    check(hopper, a, b, offsets_of(*sizes, dtype="int64"))
    assert ran_on_hopper(hopper, "gemm_grouped_sm90")


def test_hopper_leaves_column_major_tokens_to_another_kernel(hopper, rng):
    a, b = integers(rng, (77, 64), "float16"), integers(rng, (2, 64, 32), "float16")
    check(hopper, a, b, offsets_of(5, 72), ("col", "row"))
    assert not hopper.report or ran_on_hopper(hopper, "gemm_grouped_sm80")


@pytest.mark.parametrize("activation, bias_shape", [(None, "groups"), ("relu", "shared"), ("swiglu", "groups")])
def test_epilogue(device, hopper, force, rng, activation, bias_shape):
    force(128)
    offsets = offsets_of(67, 0, 5, first=2)
    M, N, K = 76, 48, 40
    for where, dtype, out_dtypes in ((hopper, "float16", ("float16", "float32")), (device, "float32", ("float32",))):
        a, b, c = (rng.standard_normal(s).astype(dtype) for s in ((M, K), (3, K, N), (M, N)))
        bias = rng.standard_normal((3, N) if bias_shape == "groups" else N).astype(dtype)
        residual = rng.standard_normal((M, N // 2 if activation == "swiglu" else N)).astype(dtype)
        for out_dtype in out_dtypes:
            got = grouped_gemm(
                *map(where.put, (a, b, offsets, c)),
                alpha=where.put(np.array(0.25, np.float32)),
                beta=-1.5,
                bias=where.put(bias),
                residual=where.put(residual),
                activation=activation,
                out_dtype=out_dtype,
            )
            for g, (begin, end) in enumerate(itertools.pairwise(offsets)):
                terms = {"bias": bias[g] if bias.ndim == 2 else bias, "residual": residual[begin:end]}
                rows = slice(begin, end)
                want = references.gemm(a[rows], b[g], c[rows], alpha=0.25, beta=-1.5, activation=activation, **terms)
                np.testing.assert_allclose(where.get(got)[rows].astype(float), want, rtol=2e-3, atol=2e-3)


def test_alpha_and_beta_of_zero_read_nothing(device, hopper, rng):
    for where, dtype in ((device, "float32"), (hopper, "float16")):
        a, b, c = (integers(rng, s, dtype) for s in ((40, 16), (2, 16, 8), (40, 8)))
        nan = [where.put(np.full(x.shape, np.nan, dtype)) for x in (a, b, c)]
        offsets, zero = where.put(offsets_of(11, 29)), where.put(np.zeros((), np.float32))
        got = grouped_gemm(*nan[:2], offsets, where.put(c), alpha=zero, beta=2.0)
        np.testing.assert_array_equal(where.get(got), 2 * c)
        got = grouped_gemm(where.put(a), where.put(b), offsets, nan[2], beta=zero)
        np.testing.assert_array_equal(where.get(got), expected(a, b, offsets_of(11, 29)))


# --- sizes, checks, grids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("M, groups, K, N", [(0, 3, 8, 4), (5, 0, 8, 4), (5, 3, 8, 0)])
def test_empty_sizes(device, M, groups, K, N):
    put = device.put
    offsets = put(np.zeros(groups + 1, np.int32))
    got = grouped_gemm(put(np.ones((M, K), "float16")), put(np.ones((groups, K, N), "float16")), offsets)
    assert got.shape == (M, N)


def test_no_k_leaves_the_epilogue(device, hopper):
    for where in (device, hopper):
        put, bias = where.put, np.arange(12, dtype="float16").reshape(3, 4)
        a, b = put(np.ones((6, 0), "float16")), put(np.ones((3, 0, 4), "float16"))
        got = grouped_gemm(a, b, put(offsets_of(1, 2, 3)), bias=put(bias))
        np.testing.assert_array_equal(where.get(got), bias[[0, 1, 1, 2, 2, 2]])


def test_result_in_the_place_of_an_input(device, rng):
    a, b = integers(rng, (20, 16), "float32"), integers(rng, (2, 16, 16), "float32")
    offsets = offsets_of(9, 11)
    x = device.put(a.copy())
    assert grouped_gemm(x, device.put(b), device.put(offsets), out=x) is x
    np.testing.assert_array_equal(device.get(x), expected(a, b, offsets))


def test_result_in_the_place_of_an_input_keeps_rows_in_no_group(device, rng):
    a, b, offsets = integers(rng, (20, 16), "float32"), integers(rng, (2, 16, 16), "float32"), offsets_of(4, 5, first=3)
    x, want = device.put(a.copy()), a.copy()
    want[3:12] = expected(a, b, offsets)[3:12]
    assert grouped_gemm(x, device.put(b), device.put(offsets), out=x) is x
    np.testing.assert_array_equal(device.get(x), want)


def test_checks(device):
    put = device.put
    a, b, offsets = put(np.ones((6, 8), "float16")), put(np.ones((2, 8, 4), "float16")), put(np.zeros(3, np.int32))
    for kind, text, call in [
        (ValueError, "a must have shape .total_M, K., got shape .1, 6, 8.", lambda: grouped_gemm(a[None], b, offsets)),
        (ValueError, "b must have shape .groups, K, N.", lambda: grouped_gemm(a, b[0], offsets)),
        (ValueError, "b must have 8 rows a group", lambda: grouped_gemm(a, b[:, :7], offsets)),
        (ValueError, r"group_offsets must have shape \(3,\), got \(2,\)", lambda: grouped_gemm(a, b, offsets[1:])),
        (
            TypeError,
            "group_offsets must have dtype int32 or int64",
            lambda: grouped_gemm(a, b, offsets.astype("int16")),
        ),
        (TypeError, "group_offsets must be an array", lambda: grouped_gemm(a, b, None)),
        (TypeError, "b must have dtype float16", lambda: grouped_gemm(a, b.astype("float32"), offsets)),
        (
            ValueError,
            "bias must have shape .2, 4.",
            lambda: grouped_gemm(a, b, offsets, bias=put(np.ones((3, 4), "f2"))),
        ),
        (ValueError, "out must have shape", lambda: grouped_gemm(a, b, offsets, out=put(np.ones((6, 5), "f2")))),
        (ValueError, "precision must be None", lambda: grouped_gemm(a, b, offsets, precision="tf32")),
        (ValueError, "even number of columns", lambda: grouped_gemm(a, b[..., :3], offsets, activation="swiglu")),
        (ValueError, "activation must be", lambda: grouped_gemm(a, b, offsets, activation="tanh")),
    ]:
        with pytest.raises(kind, match=f"grouped_gemm: .*{text}"):
            call()
    many = device.xp.broadcast_to(b[:1], (MAX_GROUPS + 1, 8, 4))
    with pytest.raises(ValueError, match="b must have at most 1024 groups, got 1025"):
        grouped_gemm(a, many, offsets)


def test_grids_have_room_for_any_offsets(rng):
    for rows, groups, block_m in itertools.product((1, 5, 128, 1000), (1, 3, 40), (16, 128)):
        most = 0
        for _ in range(50):
            cuts = np.sort(rng.integers(0, rows + 1, groups - 1))
            sizes = np.diff([0, *cuts, rows])
            most = max(most, int((-(-sizes // block_m)).sum()))
        assert most <= most_tiles(rows, groups, block_m) <= rows
    assert most_tiles(1000, 8, 128) == 15  # seven groups of one row, and 993 more


@pytest.mark.parametrize("average, block_m", [(4, 64), (64, 64), (512, 128), (2048, 128)])
def test_tiles_are_as_high_as_groups(average, block_m):
    problem = sm90.Problem(average, 4096, 4096, 32, grouped=True)
    config = sm90.select_config(problem, 132, 232448 - table_bytes(32))
    assert config.block_m == block_m and config.cluster == 1 and config.blocks == 132
    assert config.shared_bytes(problem) + table_bytes(32) <= 232448


@pytest.mark.gpu
def test_a_captured_graph_takes_other_offsets(device, rng):
    xp = device.xp
    a, b = (device.put(integers(rng, s, "float16")) for s in ((300, 64), (4, 64, 128)))
    offsets, out = xp.asarray(offsets_of(100, 0, 50, 150)), xp.empty((300, 128), "float16")
    grouped_gemm(a, b, offsets, out=out)
    xp.cuda.Device().synchronize()
    with xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        grouped_gemm(a, b, offsets, out=out)
        graph = stream.end_capture()
        for sizes in ((300, 0, 0, 0), (0, 0, 0, 300), (3, 129, 7, 161)):
            offsets[...] = xp.asarray(offsets_of(*sizes))
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(xp.asnumpy(out), expected(*map(xp.asnumpy, (a, b, offsets))))
