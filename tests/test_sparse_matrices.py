"""The generated matrices: valid compressed rows, the same from every call, and statistics as published."""

import numpy as np
import pytest

from rawops.testing import matrices

SMALL = {
    "stencil": lambda xp: matrices.stencil(xp, (9, 10, 11)),
    "elasticity": lambda xp: matrices.elasticity(xp, (4, 5, 6)),
    "dense_row": lambda xp: matrices.dense_row(xp, 8),
    "rmat": lambda xp: matrices.rmat(xp, 9, 8),
    "web": lambda xp: matrices.web(xp, 4000, 300),
    "circuit": lambda xp: matrices.circuit(xp, 3000, (2000, 500)),
    "power_law": lambda xp: matrices.power_law(xp, 5000),
    "set_cover": lambda xp: matrices.set_cover(xp, 200, 5000),
    "rays": lambda xp: matrices.rays(xp, 2000, 6.5, 10),
    "tomography": lambda xp: matrices.tomography(xp, 24, 12, 35),
    "bundle": lambda xp: matrices.bundle(xp, 12, 300, 1200),
    "hub_column": lambda xp: matrices.hub_column(xp, 9000, 700),
}


@pytest.mark.parametrize("name", SMALL)
def test_compressed_rows(name):
    a = SMALL[name](np)
    assert (a.data.dtype, a.indices.dtype, a.indptr.dtype) == (np.float32, np.int32, np.int32)
    assert a.indptr[0] == 0 and a.indptr[-1] == a.data.size == a.indices.size and a.indptr.size == a.shape[0] + 1
    lengths = np.diff(a.indptr)
    assert (lengths >= 0).all() and a.indices.min() >= 0 and a.indices.max() < a.shape[1]
    key = np.repeat(np.arange(a.shape[0]), lengths) * a.shape[1] + a.indices
    assert (np.diff(key) > 0).all(), "entries rise, and none is there twice"
    assert np.isfinite(a.data).all() and (a.data != 0).all()
    for x, y in zip(a[:3], SMALL[name](np)[:3], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_the_same_pattern_from_cupy(name):
    import cupy

    want, got = SMALL[name](np), SMALL[name](cupy)
    assert got.shape == want.shape
    # Sines, cosines and powers differ in the last bit, which moves few entries.
    assert abs(got.data.size - want.data.size) <= 1e-3 * want.data.size
    if name not in ("rays", "tomography", "power_law", "web", "circuit"):
        np.testing.assert_array_equal(cupy.asnumpy(got.indices), want.indices)
        np.testing.assert_array_equal(cupy.asnumpy(got.data), want.data)


def statistics(a) -> dict:
    lengths, columns = np.diff(a.indptr), np.bincount(a.indices, minlength=a.shape[1])
    found = {"rows": a.shape[0], "cols": a.shape[1], "nnz": a.data.size, "mean": lengths.mean(), "max": lengths.max()}
    return found | {"median": np.median(lengths), "std": lengths.std(), "column": columns.max()}


PUBLISHED = {
    "cant": (matrices.elasticity, {"rows": 62451, "nnz": 4007383, "mean": 64.2, "max": 78, "std": 14.1}),
    "Ladybug-49": (matrices.bundle, {"rows": 63686, "cols": 23769, "nnz": 764232, "max": 12}),
    "8kv, a tenth": (
        lambda xp: matrices.rays(xp, 30_614),
        {"cols": 6177, "nnz": 558889, "max": 28, "mean": 18.26},
    ),
    "atmosmodl, a tenth": (lambda xp: matrices.stencil(xp, (114, 114, 12)), {"max": 7, "mean": 6.8}),
    "webbase-1M, a tenth": (
        lambda xp: matrices.web(xp, 100_000),
        {"nnz": 310554, "median": 2, "max": 4700},
    ),
    "rail4284, a tenth": (lambda xp: matrices.set_cover(xp, 4284, 109_689), {"nnz": 1128403, "mean": 263.4}),
    "sls, a tenth": (
        lambda xp: matrices.hub_column(xp, 174_812, 6273),
        {"nnz": 680430, "mean": 3.9, "column": 168539, "max": 4},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_statistics(name):
    make, want = PUBLISHED[name]
    found = statistics(make(np))
    assert {key: found[key] for key in want} == pytest.approx(want, rel=0.08)


def test_power_law_of_few_rows():
    lengths = np.diff(matrices.power_law(np, 10).indptr)
    assert (lengths >= 1).all() and (lengths <= 10).all()


def test_a_dense_row_is_full():
    a = matrices.dense_row(np, 8)
    lengths = np.diff(a.indptr)
    assert lengths[256] == 512 and np.delete(lengths, 256).max() == 7


def test_ray_lengths_add_up_to_the_chord():
    """Siddon's lengths: a ray through the middle of a square crosses all of it."""
    a = matrices.tomography(np, 16, 4, 17)
    for angle, chord in ((0, 16), (1, 16 * np.sqrt(2)), (2, 16)):
        row = slice(*a.indptr[[angle * 17 + 8, angle * 17 + 9]])
        assert a.data[row].sum() == pytest.approx(chord, rel=1e-6)
