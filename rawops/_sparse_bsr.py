"""Matrices of dense blocks, for products with dense matrices: on the tensor cores where the values allow it."""

from __future__ import annotations

from typing import Any

import numpy as np

from rawops import _sparse_formats as formats
from rawops import _sparse_operands as given
from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.copies import NotCopied
from rawops._runtime.device import on_own_device
from rawops._sparse_tiles import BLOCKS, Blocks, OnCudaCores, OnTensorCores, aligned


class BSRMatrix(NotCopied, instead="Make a new one by to_bsr() of a SparseMatrix."):
    """A sparse matrix of square dense blocks (block compressed rows).

    Make one with `SparseMatrix.to_bsr`, `from_bsr` or `from_blocked_ell`. It multiplies dense matrices: ``A @ x``.

    float16 and bfloat16 go to the tensor cores, with float32 sums, and so does float32 with ``precision="tf32"``; all
    other products are exact in the type of the result, on the CUDA cores. An absent entry within a block is a stored
    zero: it multiplies (0 * NaN is NaN). On the tensor cores so is one within a tile of 16 x 16 of which blocks of 4 or
    8 are a part: there a NaN or an infinity of x reaches all 16 rows of such a tile. Every product gives the same bits
    again.

    Construction copies the arrays, checks all indices and synchronises. The first product on the tensor cores sorts
    tiles of 16 x 16 into the order of its kernel, which takes as much memory again, and synchronises too; later ones
    do not.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    block : int
        Rows and columns of a block: 4, 8, 16 or 32.
    blocks : int
        Stored blocks.
    nnz : int
        Entries that the blocks were made of.
    """

    ndim = 2
    __array_priority__ = 1000
    __array_ufunc__ = None

    def __init__(self, device, blocks: Blocks, nnz: int) -> None:
        self._device, self._blocks, self.nnz = device, blocks, nnz
        self._exact, self._on_tensor_cores = OnCudaCores(device, blocks), OnTensorCores(device, blocks)

    @classmethod
    def from_bsr(cls, data, indices, indptr, shape) -> BSRMatrix:
        """Make a matrix from block compressed rows, as SciPy's ``bsr_array`` has them.

        Parameters
        ----------
        data : array (blocks, block, block)
        indices : array (blocks,), integer
            The block column of each block; none twice in a row.
        indptr : array (block rows + 1,), integer
        shape : (rows, columns)
            Multiples of the block.
        """
        function = "BSRMatrix.from_bsr"
        device, (data, indices, indptr) = given.taken(function, data=data, indices=indices, indptr=indptr)
        with device.current():
            if data.ndim != 3 or data.shape[1] != data.shape[2]:
                checks.fail(ValueError, function, "data", "have shape (blocks, block, block)", f"{tuple(data.shape)}")
            data = data.astype(formats.value_dtype(function, "data", data.dtype), copy=False)
            shape = formats.check_shape(function, shape)
            grid = _grid(function, shape, data.shape[2])
            numbers = formats.module_of(data).arange(data.shape[0], dtype=np.int32)
            rows = formats.from_compressed(function, device, numbers, indices, indptr, grid, "block row")
            return cls._of_blocks(
                function, device, data[: rows.nnz], formats.row_numbers(rows), rows.indices, shape, "indices"
            )

    @classmethod
    def from_blocked_ell(cls, data, columns, shape) -> BSRMatrix:
        """Make a matrix from Blocked-ELL, as cuSPARSE has it: as many blocks for each row of blocks.

        Parameters
        ----------
        data : array (rows, width * block)
            The blocks of a row of blocks side by side.
        columns : array (rows / block, width), integer
            The block column of each block, none twice in a row; -1 for padding, whose data are not read.
        shape : (rows, columns)
            Multiples of the block.
        """
        function = "BSRMatrix.from_blocked_ell"
        device, (data, columns) = given.taken(function, data=data, columns=columns)
        shape = formats.check_shape(function, shape)
        if columns.ndim != 2 or columns.dtype.kind not in "iu":
            got = f"{columns.dtype} {tuple(columns.shape)}"
            checks.fail(ValueError, function, "columns", "be integers (rows / block, width)", got)
        block_rows, width = columns.shape
        block = shape[0] // max(block_rows, 1)
        if shape[0] == block_rows == 0:  # only the width tells, if anything does
            block = sum(data.shape[1:]) // max(width, 1) or BLOCKS[0]
        grid = _grid(function, shape, block)
        checks.shape(function, "columns", columns, (grid[0], width))
        checks.shape(function, "data", data, (shape[0], width * block))
        with device.current():
            data = data.astype(formats.value_dtype(function, "data", data.dtype), copy=False)
            xp = formats.module_of(data)
            if columns.size and (int(columns.min()) < -1 or int(columns.max()) >= grid[1]):
                got = f"{int(columns.min())} to {int(columns.max())}"
                rule = f"be -1 or {checks.places(grid[1], 'block columns')}"
                checks.fail(ValueError, function, "columns", rule, got)
            row, place = xp.nonzero(columns >= 0)
            blocks = data.reshape(block_rows, block, width, block)[row, :, place]
            return cls._of_blocks(function, device, blocks, row, columns[row, place], shape, "columns")

    @classmethod
    def _of_blocks(cls, function: str, device, data, row, col, shape, name: str) -> BSRMatrix:
        """Sort blocks by row and column and keep a copy; `name` is that of the argument with the columns."""
        xp, block = formats.module_of(data), data.shape[2]
        grid = -(-shape[0] // block), -(-shape[1] // block)
        key = row.astype(np.int64) * max(grid[1], 1) + col
        order = xp.argsort(key)
        key = key[order]
        if key.size > 1 and bool((key[1:] == key[:-1]).any()):
            checks.fail(ValueError, function, name, "have no block twice", "a block twice")
        bits = f"uint{8 * data.itemsize}"
        data = _gathered(xp.ascontiguousarray(data), order, bits)
        kept = Blocks(data, col[order].astype(np.int32), formats.pointers(xp, row, grid[0]).astype(np.int32), shape)
        return cls(device, kept, data.size)

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        return self._blocks.shape

    @property
    def dtype(self) -> np.dtype:
        return self._blocks.data.dtype

    @property
    def block(self) -> int:
        return self._blocks.block

    @property
    def blocks(self) -> int:
        return self._blocks.data.shape[0]

    @property
    def density(self) -> float:
        """Share of all blocks that are stored."""
        rows, cols = (-(-extent // self.block) for extent in self.shape)
        return self.blocks / max(rows * cols, 1)

    @property
    def fill(self) -> float:
        """Share of the stored blocks' entries that the matrix had: what is left is zeros that conversion has added."""
        return self.nnz / max(self._blocks.data.size, 1)

    @property
    def nbytes(self) -> int:
        """Device memory of the blocks, and of the tiles that the tensor cores have asked for."""
        kept = self._blocks
        packed = sum(found.nbytes for found in self._on_tensor_cores.packed.values())
        return kept.data.nbytes + kept.indices.nbytes + kept.indptr.nbytes + packed

    def __repr__(self) -> str:
        rows, cols = self.shape
        return (
            f"BSRMatrix {rows} x {cols} {self.dtype}: {self.blocks} blocks of {self.block} x {self.block}, "
            f"{self.density:.1%} of all, {self.fill:.1%} filled"
        )

    # --- products ---------------------------------------------------------------------------------------------------

    @on_own_device
    def matmat(self, x, alpha=1.0, beta=0.0, out=None, *, precision=None):
        """Compute ``out = alpha * A @ x + beta * out`` for a dense matrix x (columns, any), in one pass.

        Parameters
        ----------
        x : array (columns, any)
            Where its rows do not begin at multiples of 16 bytes, or it is not row-major or narrower than the result, a
            copy is made.
        alpha, beta : number or 0-d float64 array
            Arrays are read on the device. With beta 0 `out` is not read, with alpha 0 neither are A and x.
        out : array (rows, any), optional
            Of the result's dtype, NumPy's `result_type` of A and x, and of any strides. Where it overlaps x, the result
            is computed aside and copied.
        precision : {None, "tf32"}
            "tf32" rounds float32 values to TF32 for the tensor cores; sums stay float32.

        Notes
        -----
        After a first call that is large enough, nothing synchronises; with `out` and an x that needs no copy, nothing
        is allocated either, and the call can be captured in a CUDA graph.
        """
        function, device = "BSRMatrix.matmat", self._device
        x, out, give = given.operands(function, device, x, out, (self.shape[1], None))
        dtype = given.promoted(function, "x", self.dtype, x.dtype)
        checks.choice(function, "precision", precision, (None, "tf32"))
        is_float32 = self.dtype == dtype == np.float32
        if precision == "tf32" and not is_float32:
            checks.fail(
                TypeError, function, "precision", "be None but for float32", f"'tf32' for {self.dtype} times {x.dtype}"
            )
        *factors, _kept = given.scalars(function, device, dtype, alpha, beta, out)
        target = given.target(function, device, out, (self.shape[0], x.shape[1]), dtype, factors[1])
        if target.size:
            aside = target if out is None or not arrays.overlap(out, x) else target.copy()
            is_16_bit = self.dtype == dtype and dtypes.name(dtype) in ("float16", "bfloat16")
            on = self._on_tensor_cores if (is_16_bit or precision) and self.blocks else self._exact
            for piece in given.pieces(aligned(device, x.astype(dtype, copy=False)), aside):
                on.run(*piece, *factors)
            if aside is not target:
                target[...] = aside
        return give(target)

    def __matmul__(self, x):
        return self.matmat(x)


def from_rows(function: str, device, rows: formats.Rows, block: int, conjugated: bool) -> BSRMatrix:
    """Return compressed rows as blocks; entries of one place add up. It synchronises."""
    checks.choice(function, "block", block, BLOCKS)
    row = formats.row_numbers(rows)
    rows, _, _ = formats.from_coordinates(function, device, rows.data, row, rows.indices, rows.shape)
    xp, bits = formats.module_of(rows.data), f"uint{8 * rows.data.itemsize}"
    row, col = formats.row_numbers(rows).astype(np.int64), rows.indices.astype(np.int64)
    cols = max(-(-rows.shape[1] // block), 1)
    key, owner = xp.unique(row // block * cols + col // block, return_inverse=True)
    data = xp.zeros((key.size, block, block), rows.data.dtype)
    values = rows.data.conj() if conjugated else rows.data
    if bits in ("uint16", "uint32", "uint64"):
        data.view(bits)[owner, row % block, col % block] = values.view(bits)
    else:
        data[owner, row % block, col % block] = values
    indptr = formats.pointers(xp, key // cols, -(-rows.shape[0] // block)).astype(np.int32)
    return BSRMatrix(device, Blocks(data, (key % cols).astype(np.int32), indptr, rows.shape), rows.nnz)


def _grid(function: str, shape, block: int) -> tuple[int, int]:
    """Return the shape in blocks."""
    if block not in BLOCKS:
        checks.fail(ValueError, function, "data", f"have blocks of {', '.join(map(str, BLOCKS))}", block)
    if shape[0] % block or shape[1] % block:
        checks.fail(ValueError, function, "shape", f"be multiples of the block, {block}", shape)
    return shape[0] // block, shape[1] // block


def _gathered(data: Any, order, bits: str):
    """Return blocks in another order, a copy."""
    return data.view(bits)[order].view(data.dtype) if bits in ("uint16", "uint32", "uint64") else data[order]
