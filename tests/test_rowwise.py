"""Norms, softmax, gates and sums of rows: formulas in float64, odd widths and views, extremes, results in place."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import rawops
from rawops import _rowwise_call, _rowwise_layout
from rawops._rowwise_layout import parts_of
from rawops.testing import references

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(d) for d in (np.float16, BFLOAT16, np.float32, np.float64)]
WIDTHS = [1, 2, 3, 7, 8, 9, 31, 33, 96, 130, 1025, 1234]
EPS = {"rmsnorm": 1e-6, "layernorm": 1e-5}


def norm(name: str, x, weight=None, bias=None, eps: float | None = None) -> np.ndarray:
    """rmsnorm or layernorm in float64, which squares nothing that it could not hold."""
    x = np.asarray(x, np.float64)
    x = x - x.mean(-1, keepdims=True) if name == "layernorm" else x
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + (EPS[name] if eps is None else eps))
    y = y if weight is None else y * np.asarray(weight, np.float64)
    return y if bias is None else y + np.asarray(bias, np.float64)


def softmax(x) -> np.ndarray:
    x = np.asarray(x, np.float64)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


ROWWISE = {
    "rmsnorm": (rawops.rmsnorm, lambda x: norm("rmsnorm", x)),
    "layernorm": (rawops.layernorm, lambda x: norm("layernorm", x)),
    "softmax": (rawops.softmax, softmax),
    "gelu": (rawops.gelu, references.gelu),
    "gelu_tanh": (lambda x, **out: rawops.gelu(x, "tanh", **out), references.gelu_tanh),
    "silu": (rawops.silu, references.silu),
    "swiglu": (rawops.swiglu, references.swiglu),
    "row_sum": (rawops.row_sum, lambda x: np.asarray(x, np.float64).sum(-1)),
}


@pytest.fixture
def forget_plans(monkeypatch):
    """Calls are planned anew after it is called, and once more after the test."""

    def forget() -> None:
        for op in rawops.rowwise.OPS.values():
            monkeypatch.setattr(op, "_plans", {})
            monkeypatch.setattr(op, "_last", (None,) * 4)

    return forget


def close(got, want, dtype, terms: int = 1) -> None:
    """Within a rounding of the result and of `terms` float32 (or float64) steps before it."""
    eps = float(ml_dtypes.finfo(dtype).eps)
    inner = 2.3e-16 if dtype == np.float64 else 1.2e-7
    bound = eps * np.abs(want) + (8 + np.sqrt(terms)) * inner * (1 + np.abs(want)) + float(ml_dtypes.finfo(dtype).tiny)
    bound += 2e-5 * np.abs(want) + 2e-5 if dtype.itemsize == 2 else 0
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert (np.abs(got - want) <= bound)[~np.isnan(want)].all(), np.nanmax(np.abs(got - want) / bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ROWWISE)
def test_formulas_at_odd_widths(device, rng, op, dtype):
    """Every width, with guard bands around the result and rows before and behind that must not be read."""
    run, reference = ROWWISE[op]
    for cols in WIDTHS if dtype == np.float16 else WIDTHS[3::4]:
        cols += cols % 2 if op == "swiglu" else 0
        host = np.full((5, cols), np.nan).astype(dtype)
        host[1:4] = rng.standard_normal((3, cols)) * 3
        x = device.put(host)[1:4]
        want = reference(host[1:4].astype(np.float64))
        out = device.guarded(want.shape, dtype)
        assert run(x, out=out) is out
        close(device.get(out).astype(np.float64), want, dtype, cols)
        np.testing.assert_array_equal(device.get(run(x)), device.get(out))


@pytest.mark.parametrize("op", ROWWISE)
def test_any_strides_and_alignment(device, rng, op):
    """Views give the bits of contiguous copies: shifted, odd and negative strides, transposed, broadcast, five axes."""
    run, _ = ROWWISE[op]
    flat = device.put(rng.standard_normal(6000).astype(np.float16))
    views = {
        "shifted by an element": flat[1 : 1 + 4 * 72].reshape(4, 72),
        "odd rows": flat[: 4 * 73].reshape(4, 73)[:, :72],
        "every second column": flat[: 4 * 144].reshape(4, 144)[:, ::2],
        "backwards": flat[: 4 * 72].reshape(4, 72)[::-1, ::-1],
        "transposed": flat[: 4 * 72].reshape(72, 4).T,
        "axes that do not merge": flat[: 2 * 3 * 4 * 40].reshape(4, 3, 2, 40).transpose(2, 1, 0, 3)[:, :, 1:, :24],
        "seven axes": flat[: 3**6 * 8].reshape(3, 3, 3, 3, 3, 3, 8)[::2, ::2, ::2, ::2, ::2, ::2],
        "one row for all": device.xp.broadcast_to(flat[:72], (3, 72)),
    }
    for name, x in views.items():
        want = device.get(run(device.xp.ascontiguousarray(x)))
        got = run(x)
        np.testing.assert_array_equal(device.get(got), want, name)
        apart = device.put(np.full((*want.shape, 2), np.nan, np.float16))
        out = apart[..., 0]
        assert run(x, out=out) is out
        np.testing.assert_array_equal(device.get(out), want, name)
        assert np.isnan(device.get(apart)[..., 1]).all()


def test_teams_are_those_of_all_rows(device, monkeypatch):
    """Axes that take several launches: the order of sums is that of a contiguous copy."""
    seen, choose = [], _rowwise_call.team_of
    monkeypatch.setattr(_rowwise_call, "team_of", lambda *sizes: seen.append(sizes[1]) or choose(*sizes))
    x = device.put(np.ones((3,) * 6 + (5,), np.float32))[::2, ::2, ::2, ::2, ::2, ::2]
    assert (device.get(rawops.row_sum(x)) == 5).all() and seen == [64]


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=str)
@pytest.mark.parametrize("op", ["rmsnorm", "layernorm", "softmax", "row_sum"])
@pytest.mark.parametrize("busy", [0, 4])  # the three rows are too many for a warp each, or for a block of 256
def test_teams_of_many_rows(device, rng, monkeypatch, forget_plans, busy, op, dtype):
    """Up to four and eight groups a thread: aligned, ragged and shifted rows, the bits of each other's columns."""
    monkeypatch.setattr(_rowwise_layout, "_BUSY", busy)
    forget_plans()
    run, reference = ROWWISE[op]
    per_group = 16 // np.dtype(dtype).itemsize
    for cols in (40 * per_group, 64 * per_group, 64 * per_group - 3, 250 * per_group - 1):
        host = np.full((5, cols + per_group), np.nan).astype(dtype)
        host[1:4, 1:-per_group] = rng.standard_normal((3, cols - 1)) * 3
        shifted = device.put(host)[1:4, 1:-per_group]
        want = reference(host[1:4, 1:-per_group].astype(np.float64))
        out = device.guarded(want.shape, dtype)
        run(shifted, out=out)
        close(device.get(out).astype(np.float64), want, np.dtype(dtype), cols)
        np.testing.assert_array_equal(device.get(run(device.xp.ascontiguousarray(shifted))), device.get(out))


@pytest.mark.parametrize("op", ROWWISE)
def test_empty_and_wrong(device, op):
    run, _ = ROWWISE[op]
    for shape in ((0, 8), (3, 0), (2, 0, 4)):
        want = shape[:-1] if op == "row_sum" else (*shape[:-1], shape[-1] // (2 if op == "swiglu" else 1))
        got = run(device.put(np.zeros(shape, np.float32)))
        assert got.shape == want and (device.get(got) == 0).all()
    x = device.put(np.zeros((3, 8), np.float32))
    shape = run(x).shape
    with pytest.raises(TypeError, match="must have dtype"):
        run(device.put(np.zeros((3, 8), np.int32)))
    with pytest.raises(TypeError, match="out must have dtype"):
        run(x, out=device.put(np.zeros(shape, np.float64)))
    with pytest.raises(ValueError, match="out must have shape"):
        run(x, out=device.put(np.zeros((4, *shape[1:]), np.float32)))
    with pytest.raises(ValueError, match="entries of its own"):
        steps = (0, *(4 for _ in shape[1:]))
        run(x, out=device.xp.lib.stride_tricks.as_strided(device.put(np.zeros(8, np.float32)), shape, steps))
    with pytest.raises(TypeError, match="must be an array"):
        run(None)
    if op not in ("gelu", "gelu_tanh", "silu"):
        with pytest.raises(ValueError, match="at least one axis"):
            run(device.put(np.zeros((), np.float32)))


@pytest.mark.parametrize("op", ["rmsnorm", "layernorm", "softmax", "gelu", "silu"])
def test_in_place(device, rng, op):
    run, _ = ROWWISE[op]
    for cols in (130, 40000 if device.is_emulated and op in ("rmsnorm", "softmax") else 257):
        x = device.put(rng.standard_normal((2, cols)).astype(np.float16))
        want = device.get(run(x))
        assert run(x, out=x) is x
        np.testing.assert_array_equal(device.get(x), want)
    with pytest.raises(ValueError, match="out must not overlap x"):
        run(x[:, :-1], out=x[:, 1:])


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32], ids=str)
@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_norms_with_residual_and_weights(device, rng, name, dtype):
    """Each array with its own row stride; the norm is that of the sum before it is rounded."""
    run = getattr(rawops, name)
    rows, cols = 3, 136
    wide = [rng.standard_normal((rows, cols + extra)).astype(dtype) for extra in (8, 3, 0)]
    x, residual = (device.put(w)[:, :cols] for w in wide[:2])
    weight, bias = (rng.standard_normal(cols).astype(np.float32) for _ in range(2))
    given = {"weight": device.put(weight)} | ({"bias": device.put(bias)} if name == "layernorm" else {})
    sums, out = device.guarded((rows, cols), dtype), device.put(wide[2])
    run(x, **given, residual=residual, residual_out=sums, out=out)
    exact = wide[0][:, :cols].astype(np.float64) + wide[1][:, :cols].astype(np.float64)
    want = norm(name, exact, weight, bias if name == "layernorm" else None)
    close(device.get(out).astype(np.float64), want, np.dtype(dtype), cols)
    np.testing.assert_array_equal(device.get(sums), exact.astype(np.float32).astype(dtype))
    apart = {key: device.put(np.stack([device.get(value)] * 2, 1))[:, 0] for key, value in given.items()}
    np.testing.assert_array_equal(device.get(run(x, **apart, residual=residual)), device.get(out))
    own = {key: value.astype(dtype) for key, value in given.items()}  # weights of x's dtype
    got = device.get(run(x, **own, residual=residual)).astype(np.float64)
    host = {key: device.get(value).astype(np.float64) for key, value in own.items()}
    close(got, norm(name, exact, **host), np.dtype(dtype), cols)


def test_residual_in_place(device, rng):
    """As serving engines have it: residual takes the sum and x the norm; or both the other way round."""
    x, residual = (rng.standard_normal((3, 96)).astype(np.float16) for _ in range(2))
    want = device.get(rawops.rmsnorm(device.put(x), residual=device.put(residual)))
    for swapped in (False, True):
        a, b = device.put(x.copy()), device.put(residual.copy())
        out, sums = (b, a) if swapped else (a, b)
        assert rawops.rmsnorm(a, residual=b, out=out, residual_out=sums) is out
        np.testing.assert_array_equal(device.get(out), want)
        np.testing.assert_array_equal(device.get(sums), x + residual)
    with pytest.raises(ValueError, match="out must not overlap residual_out"):
        rawops.rmsnorm(a, residual=b, out=a, residual_out=a)
    with pytest.raises(ValueError, match="residual_out must be None without residual"):
        rawops.rmsnorm(a, residual_out=b)


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_norms_of_extremes(device, name):
    """Squares past the range of float32 and below it, sums past that of float16, rows of zeros, infinities."""
    run = getattr(rawops, name)
    signs = np.where(np.arange(4096) % 3 == 0, -1.0, 1.0)
    sizes = {np.float16: (300, 60000), BFLOAT16: (1e20,), np.float32: (1e20, 3e38)}
    for dtype, size in [(kind, one) for kind, several in sizes.items() for one in several]:
        x = (signs * size).astype(dtype)[None].repeat(2, 0)
        got = device.get(run(device.put(x))).astype(np.float64)
        close(got, norm(name, x), np.dtype(dtype), 4096)
    tiny = (signs * 1e-25).astype(np.float32)[None]
    close(device.get(run(device.put(tiny), eps=0)), norm(name, tiny, eps=0), np.dtype(np.float32), 4096)
    close(device.get(run(device.put(tiny), eps=1e-6)), norm(name, tiny), np.dtype(np.float32), 4096)
    large = device.put(np.full((1, 4096), 60000, np.float16) * signs.astype(np.float16))
    np.testing.assert_array_equal(device.get(run(large, residual=large)), device.get(run(large)))
    assert (device.get(run(device.put(np.zeros((1, 64), np.float16)))) == 0).all()
    mixed = np.ones((3, 64), np.float32)
    mixed[0, 5], mixed[2, 7] = np.nan, np.inf
    got = device.get(run(device.put(mixed)))
    want = norm(name, mixed[1:2])
    close(got[1:2], want, np.dtype(np.float32), 64)
    assert np.isnan(got[0]).all() and np.isnan(got[2, 7])
    assert np.isnan(got[2]).all() if name == "layernorm" else (np.delete(got[2], 7) == 0).all()


def check_far_from_zero(device, rng, cols: int, dtype=np.float32) -> None:
    """layernorm of rows that vary by less than their mean is rounded by, one of them by nothing."""
    far = np.asarray(0.1 / np.finfo(dtype).eps, dtype)
    host = (far + np.spacing(far) * rng.integers(-4, 5, (3, cols))).astype(dtype)
    host[1] = far
    got = device.get(rawops.layernorm(device.put(host), eps=1e-8))
    np.testing.assert_allclose(got, norm("layernorm", host - far, eps=1e-8), atol=1e-5)
    assert np.abs(got[[0, 2]]).max() > 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
def test_layernorm_far_from_zero(device, rng, dtype):
    for cols in (3, 100, 4097):
        check_far_from_zero(device, rng, cols, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_layernorm_of_one_value_in_16_bits(device, dtype):
    """Rows of one value, whose sum float32 rounds: it is long, or each entry is the sum of two."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for cols, residual in ((65541 if dtype.name == "bfloat16" else 8199, None), (999, 0.1)):
        x = np.stack([np.full(cols, v, dtype) for v in (255, 241, 239, -227)])
        if dtype.name == "float16":
            x = x * dtype.type(8) + dtype.type(7)
        other = None if residual is None else device.put(np.full(x.shape, residual, dtype))
        assert (device.get(rawops.layernorm(device.put(x), eps=1e-8, residual=other)) == 0).all()


@pytest.mark.parametrize("cols", [20000, 66000])
def test_layernorm_of_unaligned_rows_has_the_same_bits(device, cols):
    """Rows nearly of one value, held in registers where they are aligned and read again where they are not."""
    x = np.full((3, cols), 255, ml_dtypes.bfloat16)
    for row, others in enumerate((1, 2, 5)):
        x[row, :others] = 254
    aligned = rawops.layernorm(device.put(x))
    shifted = device.put(np.pad(x, ((0, 0), (1, 0))))[:, 1:]
    assert (device.get(rawops.layernorm(shifted)).view(np.uint16) == device.get(aligned).view(np.uint16)).all()


def test_norms_refuse(device):
    x = device.put(np.ones((3, 8), np.float16))
    for eps in (-1e-6, np.inf, np.nan, "1", None):
        with pytest.raises(ValueError if isinstance(eps, float) else TypeError, match="eps must be"):
            rawops.rmsnorm(x, eps=eps)
    with pytest.raises(ValueError, match="weight must have shape"):
        rawops.rmsnorm(x, device.put(np.ones(7, np.float16)))
    with pytest.raises(TypeError, match="weight must have dtype"):
        rawops.rmsnorm(x, device.put(np.ones(8, np.float64)))
    with pytest.raises(TypeError, match="bias must have dtype float16"):
        rawops.layernorm(x, device.put(np.ones(8, np.float16)), device.put(np.ones(8, np.float32)))
    with pytest.raises(ValueError, match="residual must have shape"):
        rawops.rmsnorm(x, residual=x[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_of_extremes(device, dtype):
    for cols in (1, 2, 31, 33, 1025):
        x = np.full((7, cols), -np.inf)
        x[0, -1] = 5  # all but one -inf, whole threads of nothing else
        x[2] = -1e3
        x[3] = float(ml_dtypes.finfo(dtype).max)
        x[4] = np.linspace(-1, 1, cols)
        x[4, 0] = np.inf
        x[5] = np.linspace(-1, 1, cols)
        x[5, -1] = np.nan
        x[6] = np.linspace(-1, 1, cols)
        got = device.get(rawops.softmax(device.put(x.astype(dtype)))).astype(np.float64)
        assert got[0, -1] == 1 and (got[0, :-1] == 0).all()
        assert np.isnan(got[[1, 4, 5]]).all()
        close(got[2:4], np.full((2, cols), 1 / cols), dtype, cols)
        close(got[6], softmax(x[6].astype(dtype)), dtype, cols)


def check_long_rows(device, rng, cols: int) -> None:
    host = rng.standard_normal((2, cols)).astype(np.float32)
    host[1, 7] = 1e20
    x = device.put(host)
    close(device.get(rawops.softmax(x)), softmax(host), np.dtype(np.float32), cols)
    close(device.get(rawops.rmsnorm(x)), norm("rmsnorm", host), np.dtype(np.float32), cols)
    close(device.get(rawops.layernorm(x)), norm("layernorm", host), np.dtype(np.float32), cols)
    check_far_from_zero(device, rng, cols)
    exact = rng.integers(-9, 9, (3, cols)).astype(np.float32)
    np.testing.assert_array_equal(device.get(rawops.row_sum(device.put(exact))), exact.sum(-1, dtype=np.float64))


def test_rows_longer_than_a_block_holds(device, rng):
    check_long_rows(device, rng, 40000)


@pytest.mark.parametrize("cols", [9000, 20001])
def test_rows_of_a_cluster(hopper, rng, cols):
    check_long_rows(hopper, rng, cols)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=str)
def test_sums_of_parts(device, rng, monkeypatch, dtype):
    """Rows cut into parts: ragged ones, views, axes that take several launches; nothing is written beside results."""
    monkeypatch.setattr(_rowwise_call, "parts_of", lambda *_: 5)
    for cols in (41, 64, 1003):
        host = np.full((5, cols), np.nan).astype(dtype)
        host[1:4] = rng.integers(-3, 4, (3, cols))
        x, out = device.put(host)[1:4], device.guarded((3, 2), dtype)
        rawops.row_sum(x, out=out[:, 0])
        np.testing.assert_array_equal(device.get(out)[:, 0], host[1:4].sum(-1, dtype=np.float64))
        assert np.isnan(device.get(out)[:, 1]).all()
        np.testing.assert_array_equal(device.get(rawops.row_sum(x[:, 1:])), host[1:4, 1:].sum(-1, dtype=np.float64))
    deep = rng.integers(-3, 4, (3,) * 6 + (90,)).astype(dtype)
    view = deep[::2, ::2, ::2, ::2, ::2, ::2, ::-1]
    got = rawops.row_sum(device.put(deep)[::2, ::2, ::2, ::2, ::2, ::2, ::-1])
    np.testing.assert_array_equal(device.get(got), view.sum(-1, dtype=np.float64))


def test_parts_are_for_few_long_rows():
    ampere, hopper = SimpleNamespace(capability=80, sm_count=108), SimpleNamespace(capability=90, sm_count=132)
    assert parts_of(2**20, 7, hopper) == 37 and parts_of(2**14, 1, hopper) == 8
    assert parts_of(2**14 - 1, 1, hopper) == parts_of(2**20, 17, hopper) == 1
    assert parts_of(2**12, 108, ampere) == 2 and parts_of(2**11 - 1, 1, ampere) == parts_of(2**20, 109, ampere) == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=str)
def test_two_groups_a_thread(device, rng, monkeypatch, forget_plans, dtype):
    """As many entries are computed have the bits of few: one row and several, past the groups of a block."""
    flat = device.put(rng.standard_normal(12000).astype(dtype))
    views = [flat[:size] for size in (8, 2056, 4096, 4104, 12000)] + [flat[:11600].reshape(40, 290)[:, :288]]
    want = [device.get(rawops.gelu(x)) for x in views]
    monkeypatch.setattr(_rowwise_call, "_MANY_GROUPS", 0)
    forget_plans()
    for x, few in zip(views, want, strict=True):
        out = device.guarded(x.shape, dtype)
        rawops.gelu(x, out=out)
        np.testing.assert_array_equal(device.get(out), few)


def test_gelu_of_float32(device):
    """Within 1.6 ulp from -1 on and 6 below, to the last normal number; signs and limits."""
    tiny = np.geomspace(1e-38, 1, 300)
    x = np.concatenate([np.linspace(-12.9, 6, 3000), tiny, -tiny]).astype(np.float32)
    want = references.gelu(x.astype(np.float64))
    ulps = np.abs(device.get(rawops.gelu(device.put(x))) - want) / np.spacing(np.abs(want).astype(np.float32))
    assert ulps[x > -1].max() < 1.6 and ulps.max() < 6
    ends = np.array([0.0, -0.0, 1e-40, -np.inf, np.inf, -3e38, 3e38, -14.5, 14.5, np.nan], np.float32)
    want = np.array([0.0, -0.0, 5e-41, -0.0, np.inf, -0.0, 3e38, -0.0, 14.5, np.nan], np.float32)
    got = device.get(rawops.gelu(device.put(ends)))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_gates_at_the_extremes(device):
    gate = np.array([-1e4, -100, -88.5, -87.5, -50, -0.0, 0, 50, 1e4, -np.inf, np.inf, np.nan])
    for dtype in (np.float32, np.float64):
        x = np.stack([gate, np.ones_like(gate)], 1).astype(dtype)
        want = references.silu(x[:, 0].astype(np.float64))
        gated, alone = rawops.swiglu(device.put(x)), rawops.silu(device.put(x[:, :1].copy()))
        for got in (device.get(gated)[:, 0], device.get(alone)[:, 0]):
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
            finite = np.isfinite(want)
            bound = 1e-6 * np.abs(want) + 2 * np.finfo(dtype).smallest_subnormal
            assert (np.abs(got[finite] - want[finite]) <= bound[finite]).all()
            assert got[10] == np.inf and got[9] == 0
    half = device.put(np.array([[300, 300]], np.float16))
    assert device.get(rawops.swiglu(half))[0, 0] == np.inf
    with pytest.raises(ValueError, match="even number of columns"):
        rawops.swiglu(half[:, :1])
    with pytest.raises(ValueError, match="approximate must be"):
        rawops.gelu(half, "erf")
    got = device.get(rawops.gelu(device.put(gate[:9].astype(np.float32))))
    np.testing.assert_allclose(got, references.gelu(gate[:9]), rtol=2e-6, atol=1e-37)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_gate_of_16_bits(device, dtype):
    """Right to 0.55 ulp, to the last number below the normal ones; 0 at -inf, NaN for NaN."""
    kind = np.dtype(dtype)
    x = np.arange(2**16, dtype=np.uint16).view(kind)
    with np.errstate(invalid="ignore"):
        exact, info = x.astype(np.float64), ml_dtypes.finfo(kind)
    for op in ("silu", "gelu", "gelu_tanh"):
        call, reference = ROWWISE[op]
        with np.errstate(invalid="ignore"):
            got, want = device.get(call(device.put(x))).astype(np.float64), reference(exact)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        finite = np.isfinite(exact)
        ulp = np.maximum(2.0 ** np.floor(np.log2(np.abs(want[finite]) + 1e-300)), float(info.tiny)) * float(info.eps)
        assert (np.abs(got[finite] - want[finite]) <= 0.55 * ulp).all(), op
        assert got[exact == -np.inf] == 0 and got[exact == np.inf] == np.inf


@pytest.mark.parametrize("dtype, bound", [("bfloat16", 5e-3), ("float32", 1e-6)])
def test_small_gates_of_large_numbers(device, dtype, bound):
    """A gate whose silu is below the normal numbers of float32 is a number yet where it is multiplied."""
    gate, up = (x.ravel() for x in np.meshgrid(np.linspace(-98, -80, 37), [1.0, -1e10, 1e30, 3e38, np.inf]))
    x = np.stack([gate, up], 1).astype(dtype)
    got, want = (
        device.get(rawops.swiglu(device.put(x)))[:, 0].astype(np.float64),
        references.swiglu(x.astype(float))[:, 0],
    )
    np.testing.assert_allclose(got, want, rtol=bound, atol=1e-40 if dtype == "bfloat16" else 3e-45)


def test_sums(device, rng):
    """Exact where integers are; float32 of 16-bit sums on request; past 65504 an infinity."""
    x = rng.integers(-3, 4, (4, 3, 1234)).astype(np.float16)
    want = x.astype(np.float64).sum(-1)
    np.testing.assert_array_equal(device.get(rawops.row_sum(device.put(x))), want)
    got = rawops.row_sum(device.put(np.full((2, 4096), 60000, np.float16)), out_dtype="float32")
    assert got.dtype == np.float32 and (device.get(got) == 4096 * 60000.0).all()
    assert np.isposinf(device.get(rawops.row_sum(device.put(np.full((2, 2), 60000, np.float16))))).all()
    for wrong in ("float64", ["float32"], "no dtype"):
        with pytest.raises(TypeError, match="row_sum: out_dtype must be float16 or float32 for float16 inputs, got"):
            rawops.row_sum(device.put(x), out_dtype=wrong)


@pytest.mark.gpu
def test_more_entries_than_int32_counts():
    """2**31 + 8 entries in one axis of an elementwise op, and rows whose offsets pass 2**31."""
    import cupy

    x = cupy.zeros(2**31 + 8, np.float16)
    x[-3:] = cupy.asarray([1, 2, 3], np.float16)
    got = rawops.silu(x, out=x)[-4:].get()
    np.testing.assert_allclose(got, [0, 0.731, 1.762, 2.857], atol=2e-3)
    rows = x.reshape(-1, 8)[::-1]
    got = rawops.row_sum(rows)
    assert float(got[0]) == pytest.approx(5.35, abs=0.01) and int(cupy.count_nonzero(got)) == 1


@pytest.mark.gpu
def test_capture_and_streams():
    """Each op in a graph after one call, replayed with other contents; on a stream of its own."""
    import cupy

    x = cupy.zeros((64, 512), np.float16)
    outs = {name: run(x) for name, (run, _) in ROWWISE.items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for name, (run, _) in ROWWISE.items():
            run(x, out=outs[name])
        graph = stream.end_capture()
        x[...] = cupy.random.standard_normal(x.shape).astype(np.float16)
        graph.launch(stream)
        stream.synchronize()
        for name, (run, reference) in ROWWISE.items():
            close(outs[name].get().astype(np.float64), reference(x.get().astype(np.float64)), np.dtype(np.float16), 512)
            cupy.testing.assert_array_equal(run(x), outs[name])
