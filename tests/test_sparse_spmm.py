"""SparseMatrix times dense matrices: every layout of the kernel on rows that are hard for it, columns, strides."""

import ml_dtypes
import numpy as np
import pytest
from coordinates import Coordinates, integers, same

from rawops import _sparse_operands, _sparse_spmm
from rawops._sparse_spmm import Layout, layout_for

NAN = float("nan")
# access, lanes, share, longest, split, rows_a_team
LAYOUTS = {
    "a lane a row": Layout(16, 1, 1, 64, 512, 2),
    "shared by two": Layout(16, 2, 2, 12, 60, 3),
    "shared by a warp": Layout(8, 4, 8, 100, 100, 1),
    "a warp a row": Layout(16, 32, 1, 40, 40, 2),
    "narrow": Layout(4, 16, 2, 0, 50, 1),
}
LENGTHS = {
    "even": np.full(70, 7),
    "empty": np.array([0] * 40 + [3] + [0] * 5),
    "edges": np.array([12, 13, 40, 41, 60, 61, 64, 65, 100, 101, 0, 1, 2, 3, 4, 5, 200, 201]),
    "long": np.array([0, 0, 3, 2049, 1, 2, 2, 4200, 1]),
}


@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_exact_products(device, rng, monkeypatch, name, rows):
    """Small integers: with beta, and nothing but the entries read."""
    monkeypatch.setattr(_sparse_spmm, "layout_for", lambda *found: LAYOUTS[name])
    monkeypatch.setattr(_sparse_spmm, "_SEGMENT", 512)
    lengths, columns = LENGTHS[rows], 12
    made = Coordinates(rng, (lengths.size, 40), lengths)
    made.indices += made.indices == 17  # no entry is in column 17
    A = made.put(device, dual=False)
    x, y = integers(rng, (40, columns), "float32"), integers(rng, (lengths.size, columns), "float32")
    product = made.dense() @ x
    x[17] = NAN
    x = device.put(x)
    for beta in (0, -2):
        out = device.guarded((lengths.size, columns), np.float32)
        if beta:
            out[...] = device.put(y)
        A.matmat(x, 2, beta, out=out)
        same(device, out, 2 * product + beta * y)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float64", "complex64", "complex128"], ids=str)
def test_types(device, rng, dtype):
    """Both directions, conjugated, with rows of every kind."""
    made = Coordinates(rng, (30, 26), np.array([*range(28), 300, 2100]), dtype)
    if np.dtype(dtype).kind != "c":
        made.data[:] = 1  # sums that 16 bits hold
    A, dense = made.put(device), made.dense()
    x, u = integers(rng, (26, 4), dtype), integers(rng, (30, 4), dtype)
    wide = dense.dtype
    same(device, A @ device.put(x), (dense @ x.astype(wide)).astype(dtype).astype(wide))
    same(device, A.T @ device.put(u), (dense.T @ u.astype(wide)).astype(dtype).astype(wide))
    same(device, A.H @ device.put(u), (dense.conj().T @ u.astype(wide)).astype(dtype).astype(wide))


@pytest.mark.parametrize("columns", [1, 2, 5, 64, 130])
def test_columns(device, rng, columns):
    """Row-major, column-major and cut out of a wider matrix, on both sides."""
    made = Coordinates(rng, (13, 19), rng.integers(0, 9, 13))
    A, dense = made.put(device), made.dense()
    x = integers(rng, (19, columns), "float32")
    wide = device.put(np.full((19, columns + 3), NAN, np.float32))
    wide[:, 2 : columns + 2] = device.put(x)
    tall = device.put(np.ascontiguousarray(x.T)).T
    for given in (device.put(x), wide[:, 2 : columns + 2], tall):
        same(device, A @ given, dense @ x)
        out = device.guarded((columns, 13), np.float32).T
        A.matmat(given, out=out)
        same(device, out, dense @ x)


def test_more_columns_than_a_grid_has_room_for(device, rng, monkeypatch):
    """2^20 at a time; here 4."""
    monkeypatch.setattr(_sparse_operands, "MOST_COLUMNS", 4)
    made = Coordinates(rng, (13, 19), 3)
    A, x, out = made.put(device), integers(rng, (19, 10), "float32"), device.guarded((13, 10), np.float32)
    for matrix in (A, A.to_bsr(4)):
        out[...] = 1
        matrix.matmat(device.put(x), 2.0, 3.0, out)
        same(device, out, 2 * made.dense() @ x + 3)
        same(device, matrix @ device.put(np.ascontiguousarray(x.T)).T, made.dense() @ x)


@pytest.mark.gpu
def test_millions_of_columns(device, rng):
    made = Coordinates(rng, (3, 4), 2)
    A, x = made.put(device), device.xp.ones((4, 2200001), np.float32)
    for matrix in (A, A.to_bsr(4)):
        assert ((matrix @ x) == (A @ x[:, 0])[:, None]).all()


def test_many_long_rows_are_not_cut(device, rng, monkeypatch):
    """Where rows are long and enough to fill the device several times, only what is longer than most is cut."""
    lengths = np.array([*([600] * 20), 1300])
    made = Coordinates(rng, (21, 60), lengths)
    A, x = made.put(device, dual=False), device.put(integers(rng, (60, 32), "float32"))
    for waves, count in ((4, 21), (0, 1)):
        monkeypatch.setattr(_sparse_spmm, "_WAVES", waves)
        same(device, A @ x, made.dense() @ device.get(x))
        _, segments, _ = list(A._store.dense[False]._segments.values())[-1]
        assert len({*device.get(segments)[:, 2]}) == count


def test_same_bits_again(device, rng):
    made = Coordinates(rng, (40, 60), np.array([*range(38), 900, 5000]))
    made.data = rng.standard_normal(made.data.size).astype(np.float32)
    x = device.put(rng.standard_normal((60, 8)).astype(np.float32))
    A, B = made.put(device), made.put(device)
    for _ in range(2):
        same(device, A @ x, device.get(B @ x))


def test_factors_of_zero(device, rng):
    """alpha 0 reads neither A nor x, beta 0 does not read out, and 0-d arrays are read on the device."""
    made = Coordinates(rng, (9, 8), np.array([0, 1, 5, 300, 2500, 2, 2, 2, 2]))
    A, x = made.put(device), integers(rng, (8, 4), "float32")
    A._store.values.data[...] = NAN
    out = device.put(np.full((9, 4), 3, np.float32))
    same(device, A.matmat(device.put(np.full_like(x, NAN)), 0, 2, out=out), np.full((9, 4), 6.0))
    A.update_values(device.put(made.data))
    out[...] = NAN
    alpha, beta = device.put(np.array(-1.0)), device.put(np.array(0.0))
    same(device, A.matmat(device.put(x), alpha, beta, out=out), -(made.dense() @ x))
    product = A.matmat(device.put(x), alpha=device.put(np.array(2.0)))  # of which nobody else keeps the factor
    same(device, product, 2 * (made.dense() @ x))
    same(device, A.to_bsr(4).matmat(device.put(x), alpha=device.put(np.array(2.0))), 2 * (made.dense() @ x))


@pytest.mark.parametrize("mean", [1, 7, 60, 3000])
@pytest.mark.parametrize("itemsize", [2, 4, 8, 16])
def test_every_layout_exists(mean, itemsize):
    """The rule asks for instances that the kernel has, and for no more columns than a row of x has."""
    choices = _sparse_spmm.SPMM.choices
    for columns in range(1, 300):
        for alignment in (itemsize, 16):
            layout = layout_for(columns, itemsize, alignment, mean)
            assert all(value in choices[name] for name, value in layout.choices.items())
            assert layout.lanes * layout.share <= 32 and layout.longest <= layout.split
            assert columns * itemsize % layout.access == 0 and layout.rows_a_team >= 1
