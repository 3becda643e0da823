"""BSRMatrix: exact products of every block size and type, what is not read, conversion, checks."""

import ml_dtypes
import numpy as np
import pytest
from coordinates import Coordinates, integers, same
from scipy import sparse

import rawops
from rawops import BSRMatrix, _sparse_tiles

NAN = float("nan")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def blocks_of(rng, grid, block, dtype, density=0.4):
    """Random blocks of small integers: data, block columns, block row pointers, and the matrix densely."""
    there = rng.random(grid) < density
    there[min(1, grid[0] - 1)] = False  # a row of blocks without any
    row, col = np.nonzero(there)
    data = integers(rng, (row.size, block, block), dtype)
    dense = np.zeros((grid[0], block, grid[1], block), np.complex128 if data.dtype.kind == "c" else np.float64)
    dense[row, :, col, :] = data
    indptr = np.concatenate([[0], np.cumsum(there.sum(1))])
    return data, col, indptr, dense.reshape(grid[0] * block, grid[1] * block)


def put_bsr(device, rng, grid, block, dtype, density=0.4):
    *given, dense = blocks_of(rng, grid, block, dtype, density)
    return BSRMatrix.from_bsr(*map(device.put, given), dense.shape), dense


@pytest.mark.parametrize("block", [4, 8, 16, 32])
@pytest.mark.parametrize("dtype", ["float16", BFLOAT16, "float32", "tf32"], ids=str)
def test_exact_products(device, rng, dtype, block):
    """Ragged columns, empty block rows, alpha and beta, a guarded result; x has NaN where no block is."""
    precision, dtype = ("tf32", "float32") if dtype == "tf32" else (None, dtype)
    A, dense = put_bsr(device, rng, (160 // block, 64 // block), block, dtype)
    columns = 9 if block in (4, 32) else 72
    x, y = integers(rng, (64, columns), dtype), integers(rng, (160, columns), dtype)
    unread = ~dense.any(0).reshape(-1, max(block, 16)).any(1).repeat(max(block, 16))
    x[unread] = 0
    want = dense @ x.astype(float)
    x[unread] = NAN
    for beta in (0, -1):
        out = device.guarded((160, columns), dtype)
        if beta:
            out[...] = device.put(y)
        A.matmat(device.put(x), 2, beta, out=out, precision=precision)
        same(device, out, 2 * want + beta * y.astype(float))


@pytest.mark.parametrize(("dtype", "columns"), [("float64", 1), ("complex64", 5), ("complex128", 40)])
def test_other_types(device, rng, dtype, columns):
    A, dense = put_bsr(device, rng, (5, 4), 8, dtype)
    x = integers(rng, (32, columns), dtype)
    same(device, A @ device.put(x), dense @ x)


def test_promotion(device, rng):
    """float16 blocks meet a float32 matrix: exactly, in float32."""
    A, dense = put_bsr(device, rng, (3, 3), 16, "float16")
    x = integers(rng, (48, 8), "float32") * 1025
    y = A @ device.put(x)
    assert y.dtype == np.float32
    same(device, y, dense @ x)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("density", [0.02, 1])
def test_tall_groups(device, rng, monkeypatch, dtype, density):
    """32 tile rows to a group, which the rule takes for many of them only, and cp.async, as before Hopper."""
    monkeypatch.setattr(_sparse_tiles.BSR_SM90, "max_arch", 80)
    monkeypatch.setattr(_sparse_tiles.Layout, "rows_of", lambda layout, *sizes: layout.rows)
    A, dense = put_bsr(device, rng, (33, 7), 16, dtype, density)
    x = integers(rng, (112, 64), dtype)
    y = A.matmat(device.put(x), precision="tf32" if dtype == "float32" else None)
    same(device, y, (dense @ x.astype(float)).astype(dtype))


@pytest.mark.parametrize("dtype", [BFLOAT16, "float32"], ids=str)
@pytest.mark.parametrize(("is_tall", "density"), [(False, 0.03), (False, 0.5), (True, 0.3), (True, 1)])
def test_on_hopper(hopper, rng, monkeypatch, is_tall, density, dtype):
    """Clusters of two groups, one of them without tiles; single columns and spans; rings that wrap; ragged edges."""
    monkeypatch.setattr(_sparse_tiles.Layout, "rows_of", lambda layout, *sizes: layout.rows if is_tall else 1)
    monkeypatch.setattr(_sparse_tiles, "_STAGES", (2,))
    A, dense = put_bsr(hopper, rng, (19, 75), 8, dtype, density)
    x = integers(rng, (600, 100), dtype)
    out = hopper.guarded((152, 100), dtype)
    A.matmat(hopper.put(x), out=out, precision="tf32" if dtype == "float32" else None)
    if hopper.is_emulated:
        assert "spmm_bsr_sm90" in hopper.report[-1].kernel
    same(hopper, out, (dense @ x.astype(float)).astype(dtype).astype(float))


@pytest.mark.parametrize("kind", ["heavy rows", "a band"])
@pytest.mark.parametrize("tall", [1, 2])
def test_rows_are_dealt_out(device, rng, monkeypatch, kind, tall):
    """Where some rows have many tiles, all warps get as many; in a band, neighbours share x and stay together."""
    monkeypatch.setattr(_sparse_tiles.Layout, "rows_of", lambda layout, *sizes: tall)
    n, cols = (35, 40) if kind == "heavy rows" else (128, 128)  # a band that fills its groups
    there = np.abs(np.subtract.outer(np.arange(n), np.arange(cols))) < 2
    if kind == "heavy rows":
        there = rng.random((n, cols)) < np.where(np.arange(n) < 6, 0.9, 0.1)[:, None]
    row, col = np.nonzero(there)
    data = integers(rng, (row.size, 16, 16), "float16")
    dense = np.zeros((n, 16, cols, 16))
    dense[row, :, col, :] = data
    dense = dense.reshape(n * 16, cols * 16)
    A = BSRMatrix.from_bsr(*map(device.put, (data, col, np.append(0, np.cumsum(there.sum(1))))), dense.shape)
    x = integers(rng, (cols * 16, 16), "float16")
    out = device.guarded((n * 16, 16), "float16")
    A.matmat(device.put(x), out=out)
    same(device, out, dense @ x.astype(float))
    (packed,) = A._on_tensor_cores.packed.values()
    rows, pairs = device.get(packed.rows), np.diff(device.get(packed.pairs))
    assert (sorted(rows) == np.arange(rows.size)).all()
    assert (rows != np.arange(rows.size)).any() == (kind == "heavy rows")
    if kind == "heavy rows":
        assert pairs.max() <= (there.sum(1).max() + 1) // 2 + (tall - 1) * 3  # a heavy row and a light one


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_layout(device, rng, dtype):
    A, dense = put_bsr(device, rng, (4, 4), 8, dtype)
    big = integers(rng, (40, 72), dtype)
    for take in (
        lambda x: x[:32, 1:24],
        lambda x: x[:32, :48:2],
        lambda x: x.T[:32, :9],
        lambda x: x[31::-1, 23::-1],
        lambda x: x[3:35, :1],
        lambda x: x[:32, 8:16],
    ):
        x = take(big)
        y = integers(rng, (x.shape[1], 32), dtype)
        out = device.put(y.copy()).T
        A.matmat(take(device.put(big)), 1, 2, out=out)
        same(device, out, dense @ x.astype(float) + 2 * y.T.astype(float))


def test_out_over_x(device, rng):
    A, dense = put_bsr(device, rng, (2, 2), 16, "float16")
    x = integers(rng, (32, 16), "float16")
    whole = device.put(x.copy())
    A.matmat(whole, out=whole)
    same(device, whole, dense @ x.astype(float))


@pytest.mark.parametrize(("dtype", "block"), [("float16", 4), ("float16", 32), ("float32", 16), ("complex64", 8)])
def test_conversion(device, rng, dtype, block):
    """A shape that is no multiple of the block, duplicates; the transposed and the conjugated view."""
    made = Coordinates(rng, (37, 53), rng.integers(0, 9, 37), dtype)
    A, dense = made.put(device, dual=False), made.dense()
    for view, matrix in ((A, dense), (A.T, dense.T), (A.H, dense.conj().T)):
        bsr = view.to_bsr(block)
        x = integers(rng, (matrix.shape[1], 8), dtype)
        assert bsr.shape == matrix.shape and bsr.dtype == dtype and bsr.block == block
        assert bsr.nnz == np.unique(made.row * 53 + made.indices).size
        same(device, bsr @ device.put(x), matrix @ x)


def test_fill(device):
    """Two blocks of 16, one of them full and one with a single entry."""
    dense = np.zeros((32, 48), np.float32)
    dense[:16, 16:32], dense[20, 40] = 2, 3
    coo = sparse.coo_array(dense)
    A = rawops.SparseMatrix.from_coo(*map(device.put, (coo.data, coo.row, coo.col)), dense.shape).to_bsr(16)
    assert A.blocks == 2 and A.nnz == 257 and A.fill == 257 / 512 and A.density == 2 / 6
    assert repr(A) == "BSRMatrix 32 x 48 float32: 2 blocks of 16 x 16, 33.3% of all, 50.2% filled"


def test_blocked_ell(device, rng):
    """-1 is padding, whose values are not read."""
    columns = np.array([[2, -1, 0], [-1, -1, -1], [1, 3, -1]])
    data = integers(rng, (48, 48), "float16")
    dense = np.zeros((48, 64))
    for i, row in enumerate(columns):
        for j, c in enumerate(row):
            block = data[16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
            if c < 0:
                block[...] = NAN
            else:
                dense[16 * i : 16 * i + 16, 16 * c : 16 * c + 16] = block
    A = BSRMatrix.from_blocked_ell(device.put(data), device.put(columns), (48, 64))
    x = integers(rng, (64, 24), "float16")
    same(device, A @ device.put(x), dense @ x.astype(float))


@pytest.mark.parametrize("dtype", [BFLOAT16, "float64", "complex64", "complex128"], ids=str)
def test_blocks_of_any_strides(device, rng, dtype):
    """Blocks come transposed, as SciPy's bsr_array gives those of its transpose, column-major and backwards."""
    *given, dense = blocks_of(rng, (3, 3), 8, dtype)
    x = integers(rng, (24, 5), dtype)
    data, *places = map(device.put, given)
    turned = data.transpose(0, 2, 1).copy().transpose(0, 2, 1)
    for blocks in (turned, device.xp.asfortranarray(data), data[::-1].copy()[::-1]):
        same(device, BSRMatrix.from_bsr(blocks, *places, dense.shape) @ device.put(x), dense @ x.astype(dense.dtype))
    ell = integers(rng, (16, 16), dtype)
    A = BSRMatrix.from_blocked_ell(
        device.xp.asfortranarray(device.put(ell)), device.put(np.array([[0, 1]] * 2)), (16, 16)
    )
    same(device, A @ device.put(x[:16]), ell.astype(dense.dtype) @ x[:16].astype(dense.dtype))


def test_nothing_stored(device):
    """No block, no rows, no columns; a factor of zero leaves x unread."""
    for shape in ((32, 16), (0, 16), (32, 0)):
        none = np.zeros((0, 16, 16), np.float16), np.zeros(0, np.int32), np.zeros(shape[0] // 16 + 1, np.int32)
        A = BSRMatrix.from_bsr(*map(device.put, none), shape)
        x = device.put(np.full((shape[1], 3), NAN, np.float16))
        same(device, A @ x, np.zeros((shape[0], 3)))
        assert (A @ x[:, :0]).shape == (shape[0], 0)
    for width in (0, 2):
        data, columns = np.zeros((0, 16 * width), np.float16), np.zeros((0, width), np.int32)
        A = BSRMatrix.from_blocked_ell(device.put(data), device.put(columns), (0, 32))
        assert (A @ device.put(np.full((32, 3), NAN, np.float16))).shape == (0, 3)
    A = BSRMatrix.from_bsr(*map(device.put, (np.ones((1, 4, 4), np.float16), np.zeros(1, int), np.arange(2))), [4, 4])
    assert A.shape == (4, 4)
    out = device.put(np.full((4, 2), 3, np.float16))
    same(device, A.matmat(device.put(np.full((4, 2), NAN, np.float16)), 0, 2, out=out), np.full((4, 2), 6.0))


def test_same_bits_again(device, rng):
    A, _ = put_bsr(device, rng, (4, 5), 16, "float16")
    x = device.put(rng.standard_normal((80, 64)).astype(np.float16))
    same(device, A @ x, device.get(A @ x).astype(float))


def test_checks(device, rng):
    data, indices, indptr = np.ones((2, 16, 16), np.float16), np.array([0, 1]), np.array([0, 2])

    def make(shape=(16, 32), **changes):
        given = {"data": data, "indices": indices, "indptr": indptr} | changes
        return BSRMatrix.from_bsr(*(device.put(x) for x in given.values()), shape)

    with pytest.raises(ValueError, match="indices must have no block twice"):
        make(indices=np.array([1, 1]))
    with pytest.raises(ValueError, match="shape must be multiples of the block, 16"):
        make((16, 40))
    with pytest.raises(ValueError, match=r"data must have blocks of 4, 8, 16, 32, got 5"):
        make((5, 10), data=np.ones((2, 5, 5), np.float16))
    with pytest.raises(ValueError, match="indices must be between 0 and 1, got 0 to 2"):
        make(indices=np.array([0, 2]))
    A = make()
    with pytest.raises(ValueError, match=r"x must have shape \(32, any\)"):
        A @ device.put(np.ones((16, 2), np.float16))
    with pytest.raises(TypeError, match="precision must be None but for float32, got 'tf32' for float16"):
        A.matmat(device.put(np.ones((32, 2), np.float16)), precision="tf32")
    with pytest.raises(TypeError, match="got 'tf32' for float16 times float32"):
        A.matmat(device.put(np.ones((32, 2), np.float32)), precision="tf32")
    with pytest.raises(ValueError, match="columns must be -1 or between 0 and 1, got 2 to 2"):
        BSRMatrix.from_blocked_ell(device.put(np.ones((16, 16))), device.put(np.array([[2]])), (16, 32))
    with pytest.raises(ValueError, match="block must be 4, 8, 16 or 32"):
        Coordinates(rng, (3, 3), 1).put(device).to_bsr(5)


def test_one_after_another(device, rng):
    """A launch may begin before the one before it is done, and still reads what that one writes."""
    count = 3 if device.is_emulated else 200
    data = np.zeros((count, 16, 16), np.float16)  # a permutation with signs, so that numbers stay what they are
    for block in data:
        block[np.arange(16), rng.permutation(16)] = rng.choice([-1, 1], 16)
    places = rng.permutation(count).astype(np.int32)
    given = data, places, np.arange(count + 1, dtype=np.int32)
    A = BSRMatrix.from_bsr(*map(device.put, given), (16 * count, 16 * count))
    x = rng.integers(-8, 9, (16 * count, 136)).astype(np.float16)
    here, there = device.put(x), device.put(np.full_like(x, np.nan))
    for _ in range(3 if device.is_emulated else 30):
        A.matmat(here, out=there)
        here, there = there, here
        x = (data @ x.reshape(count, 16, -1)[places]).reshape(x.shape)
    np.testing.assert_array_equal(device.get(here), x)
