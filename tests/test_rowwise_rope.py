"""Rotary positions: angles in float64, both pairings, parts of a head, tables, slices of a packed qkv in place."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import rawops

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def turned(x, positions, theta=10000.0, interleaved=False, rotary_dim=None, tables=None) -> np.ndarray:
    """The rotation in float64; x (..., heads, head_dim), positions (...)."""
    x = np.array(x, np.float64)
    dim = x.shape[-1] if rotary_dim is None else rotary_dim
    if tables is None:
        angles = np.asarray(positions, np.float64)[..., None] * theta ** (-np.arange(dim // 2) * 2.0 / dim)
        cos, sin = np.cos(angles), np.sin(angles)
    else:
        cos, sin = (np.asarray(t, np.float64)[positions] for t in tables)
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, dim))
    one, two = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = one * cos - two * sin, two * cos + one * sin
    return x


def close(got, want) -> None:
    eps = float(ml_dtypes.finfo(got.dtype).eps)
    bound = eps * np.abs(want) + 5e-6 * (got.dtype != np.float64) + 1e-9
    assert (np.abs(got.astype(np.float64) - want) <= bound).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
def test_formula(device, rng, dtype, interleaved):
    for head_dim, rotary_dim in ((64, None), (80, 32), (6, 6), (10, 4), (256, 64), (7, 0)):
        q, k = (rng.standard_normal((2, 3, heads, head_dim)).astype(dtype) for heads in (4, 1))
        positions = np.array([[0, 1, 131071], [1000000, -1, 7]])
        options = {"interleaved": interleaved, "rotary_dim": rotary_dim}
        made = rawops.rope(device.put(q), device.put(k), device.put(positions), **options)
        for got, x in zip(made, (q, k), strict=True):
            got = device.get(got)
            close(got, turned(x, positions, **options))
            if rotary_dim is not None:
                np.testing.assert_array_equal(got[..., rotary_dim:], x[..., rotary_dim:])
        for narrow in (positions.astype(np.int32), np.repeat(positions, 2, 1)):
            view = device.put(narrow) if narrow.dtype == np.int32 else device.put(narrow)[:, ::2]
            again = rawops.rope(device.put(q), None, view, **options)
            np.testing.assert_array_equal(device.get(again[0]), device.get(made[0]))
            assert again[1] is None


def test_angles_are_not_those_of_16_bits(device):
    """Position 1857, pair 1 of 16: an angle of 1044.2678, which float16 rounds to 1045 and so to -0.408."""
    x = np.zeros((1, 1, 32), np.float16)
    x[0, 0, 1] = 1
    got, _ = rawops.rope(device.put(x), None, device.put(np.array([1857])))
    assert device.get(got)[0, 0, 1] == pytest.approx(0.306693, abs=3e-4)
    got, _ = rawops.rope(device.put(x.astype(np.float32)), None, device.put(np.array([10**7])))
    close(device.get(got), turned(x, [10**7]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables(device, rng, interleaved, monkeypatch):
    """float32 tables with bfloat16 heads; a position past their end makes NaN and reads nothing; checks raise."""
    angles = rng.uniform(0, 6, (9, 8))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    padded = [np.full((11, 9), np.nan, np.float32) for _ in range(2)]
    for table, values in zip(padded, (cos, sin), strict=True):
        table[1:10, :8] = values
    tables = {name: device.put(t)[1:10, :8] for name, t in zip(("cos", "sin"), padded, strict=True)}
    x = rng.standard_normal((6, 2, 20)).astype(BFLOAT16)
    positions = np.array([0, 8, 3, 9, -1, 2**31 - 1])
    got, _ = rawops.rope(device.put(x), None, device.put(positions), **tables, interleaved=interleaved)
    got = device.get(got)
    close(got[:3], turned(x[:3], positions[:3], interleaved=interleaved, rotary_dim=16, tables=(cos, sin)))
    assert np.isnan(got[3:, :, :16].astype(np.float32)).all()
    np.testing.assert_array_equal(got[:, :, 16:], x[:, :, 16:])
    monkeypatch.setattr(rawops.config, "current", lambda: rawops.config.Config(check=True))
    with pytest.raises(ValueError, match="positions must be between 0 and 8, got -1 to 2147483647"):
        rawops.rope(device.put(x), None, device.put(positions), **tables)
    with pytest.raises(ValueError, match="positions must be among 0 rows of the tables, got 0 to 0"):
        rawops.rope(device.put(x), None, device.put(positions * 0), **{n: t[:0] for n, t in tables.items()})


def test_packed_qkv_in_place(device, rng):
    """q and k as slices of one array, written where they lie; v and other tokens stay."""
    packed = rng.standard_normal((2, 5, 4 + 2 + 2, 64)).astype(np.float16)
    want = packed.copy()
    positions = np.array([0, 3, 6, 9, 12])  # for both sequences
    for part in (slice(0, 4), slice(4, 6)):
        want[:, :, part] = turned(packed[:, :, part], np.broadcast_to(positions, (2, 5)))
    qkv = device.put(packed.copy())
    q, k = qkv[:, :, :4], qkv[:, :, 4:6]
    made = rawops.rope(q, k, device.put(positions), q_out=q, k_out=k)
    assert made[0] is q and made[1] is k
    got = device.get(qkv)
    np.testing.assert_array_equal(got[:, :, 6:], packed[:, :, 6:])
    close(got, want.astype(np.float64))
    with pytest.raises(ValueError, match="q_out must not overlap k"):
        rawops.rope(qkv[:, :, :4], qkv[:, :, 3:5], device.put(positions), q_out=q)
    with pytest.raises(ValueError, match="q_out must not overlap q"):
        rawops.rope(qkv[:, :, :4], None, device.put(positions), q_out=qkv[:, :, 1:5])


@pytest.mark.parametrize("check", [False, True])
def test_wrong_and_empty(device, check, monkeypatch):
    """Checks of values come after those of types and shapes, and change none of them."""
    settings = dataclasses.replace(rawops.config.current(), check=check)
    monkeypatch.setattr(rawops.config, "current", lambda: settings)
    q, positions = device.put(np.zeros((3, 2, 8), np.float16)), device.put(np.zeros(3, np.int32))
    tables = dict.fromkeys(("cos", "sin"), q[:, 0, :4])
    assert rawops.rope(q[:0], None, positions[:0])[0].shape == (0, 2, 8)
    for wrong, kind, message in (
        ({"k": q[:2]}, ValueError, "k must have shape"),
        ({"k": q.astype(np.float32)}, TypeError, "k must have dtype"),
        ({"positions": positions[:2]}, ValueError, "positions must broadcast"),
        ({"positions": positions.astype(np.float32)}, TypeError, "positions must have dtype"),
        ({"positions": None}, TypeError, "positions must be an array"),
        ({"rotary_dim": 7}, ValueError, "rotary_dim must be even"),
        ({"rotary_dim": 8.0}, TypeError, "rotary_dim must be an int"),
        ({"rotary_dim": 10}, ValueError, "rotary_dim must be between"),
        ({"theta": 0}, ValueError, "theta must be positive"),
        ({"cos": q[:, 0, :4]}, TypeError, "sin must be an array"),
        ({name: q[0, 0, :1].reshape(()) for name in ("cos", "sin")}, ValueError, "cos must have shape"),
        (dict.fromkeys(tables, q[:, 0, :6]), ValueError, r"cos must have .* pair, at most 4, got shape \(3, 6\)"),
        ({**tables, "sin": device.between(tables["sin"])}, ValueError, "sin must lie on whole elements"),
        ({"k_out": q}, ValueError, "k_out must be None"),
        ({**tables, "positions": [0, 1, 2]}, TypeError, "positions must be an? (GPU )?array, got list"),
        ({**tables, "positions": positions.astype(np.float32) - 1}, TypeError, "positions must have dtype"),
        ({**tables, "cos": [1.0]}, TypeError, "cos must be an? (GPU )?array, got list"),
    ):
        with pytest.raises(kind, match=message):
            rawops.rope(**({"q": q, "k": None, "positions": positions} | wrong))
