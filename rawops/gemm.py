"""Matrix products with a fused epilogue: D = activation(alpha * (a @ b) + beta * c + bias) + residual."""

from __future__ import annotations

import functools

from rawops._gemm_call import ZERO, Product, scalar, scalars
from rawops._gemm_config import DTYPES
from rawops._gemm_grouped import GroupedProduct
from rawops._gemm_operands import MAX_SIZE, Options, check_addend, check_bias, check_dtype, split_count
from rawops._gemm_tune import tune
from rawops._gemm_w4 import WeightProduct
from rawops._runtime import arrays, checks


@functools.lru_cache(maxsize=256)
def _product(b_dtype: str | None, has_zeros: bool, *options) -> Product:
    """Return the product that all calls of `gemm` with these options share."""
    return _product_of("gemm", Options(*options), b_dtype, has_zeros)


def _product_of(function: str, options: Options, b_dtype: str | None, has_zeros: bool, workspaces=None) -> Product:
    if b_dtype is None:
        return Product(function, options, workspaces)
    return WeightProduct(function, options, b_dtype, has_zeros, workspaces)


def _groups(function: str, b_dtype: str | None, scale_b, zero_b) -> tuple:
    """Return the operands that packed weights have beside the others."""
    if b_dtype is not None:
        if scale_b is None:
            checks.fail(ValueError, function, "scale_b", f"be given for {b_dtype} weights", "None")
        return (scale_b,) if zero_b is None else (scale_b, zero_b)
    for name, x in (("scale_b", scale_b), ("zero_b", zero_b)):
        if x is not None:
            checks.fail(ValueError, function, name, "be None without b_dtype", type(x).__name__)
    return ()


def gemm(
    a,
    b,
    c=None,
    *,
    alpha=1.0,
    beta=0.0,
    bias=None,
    residual=None,
    activation: str | None = None,
    scale_b=None,
    zero_b=None,
    b_dtype: str | None = None,
    out=None,
    out_dtype=None,
    precision: str | None = None,
    split_k: int | None = None,
    deterministic: bool = False,
):
    """Compute ``activation(alpha * (a @ b) + beta * c + bias) + residual`` in one pass over the result.

    Parameters
    ----------
    a : array (..., M, K)
        float16, bfloat16, float32 or float64. Batch axes broadcast with those of `b`; of more than three that cannot
        be merged, the outermost take a launch for each entry.
    b : array (..., K, N)
        Same dtype. Both operands may have any strides; contiguous along either axis, with rows on 16-byte
        boundaries, is fastest; a large product copies 16-bit operands that are neither into a workspace first.
    c : array broadcastable to (..., M, N), optional
        Not read when `beta` is 0.
    alpha, beta : float or 0-d array
        Arrays are read on the device, without synchronising. With `alpha` 0, `a` and `b` are not read.
    bias : array (N,), optional
        Added to every row before the activation.
    residual : array broadcastable to the result, optional
        Added after the activation. `c`, `bias` and `residual` have the inputs' dtype or float32.
    activation : {None, "relu", "gelu", "gelu_tanh", "silu", "swiglu"}
        "swiglu" takes an even N, gate in the first half of the columns and up in the second, and returns N/2 columns
        of ``silu(gate) * up``. At -inf, gelu and silu take their limit, 0; NaN stays NaN.
    scale_b, zero_b, b_dtype : array, array, {"int4", "uint4", "float4_e2m1fn"}, optional
        Packed 4-bit weights, see Notes.
    out : array, optional
        Where the result goes. It may be `c` or `residual` itself; where it overlaps an input otherwise, the result
        is computed aside and copied.
    out_dtype : dtype, optional
        The inputs' dtype (default) or float32. A float16 result past 65504 is inf.
    precision : {None, "tf32"}
        "tf32" rounds float32 inputs to TF32 for the tensor cores; without it float32 is exact to its own rounding.
    split_k : int, optional
        Over how many slices of K to share the work; chosen when left out. Partial sums stay in the accumulator's
        type and are added in a fixed order.
    deterministic : bool
        Nothing here uses atomics: the same call gives the same bits either way.

    Returns
    -------
    array (..., M, N), or (..., M, N/2) for swiglu
        Accumulated in float32 (float64 for float64), rounded once.

    Notes
    -----
    With `b_dtype`, `a` is float16 or bfloat16 and `b` is uint8 (K // 2, N): the low half of byte (i, n) is element
    (2i, n), the high half (2i + 1, n), as `pack_int4` makes them. Any strides: weights stored (N, K // 2) come in as
    a transposed view, which is as fast. `scale_b` (K // group, N), float16, bfloat16 or float32, has a scale for each
    group of 32, 64 or 128 along K, and `zero_b`, int8 or uint8 of the same shape, zero points for "uint4":
    ``b = (q - zero_b) * scale_b``. Side by side along N, on 4-byte boundaries, they are fastest. Weights are not
    rounded to a's dtype: a group's products with q - zero are exact, added up in float32, and scaled in float32.
    """
    packed_alpha, packed_beta = scalars("gemm", alpha, beta, c, a)
    if packed_beta == ZERO:
        c = None
    if split_k is not None and type(split_k) is not int:
        split_k = split_count("gemm", split_k)  # since 2.0 and True would find the products of 2 and 1
    options = (b_dtype, zero_b is not None, activation, out_dtype, precision, split_k)
    try:
        product = _product(*options)
    except TypeError:  # what cannot be hashed is no option: the checks say so
        product = _product.__wrapped__(*options)
    groups = _groups("gemm", b_dtype, scale_b, zero_b)
    return product((a, b, out, c, bias, residual, *groups), packed_alpha, packed_beta)


gemm.tune = tune


@functools.lru_cache(maxsize=256)
def _grouped_product(*options) -> GroupedProduct:
    """Return the product that all calls of `grouped_gemm` with these options share."""
    return GroupedProduct("grouped_gemm", Options(*options))


def grouped_gemm(
    a,
    b,
    group_offsets,
    c=None,
    *,
    alpha=1.0,
    beta=0.0,
    bias=None,
    residual=None,
    activation: str | None = None,
    out=None,
    out_dtype=None,
    precision: str | None = None,
    deterministic: bool = False,
):
    """Compute the rows of each group with the group's own b: the products of a mixture of experts in one launch.

    Rows ``group_offsets[g]`` to ``group_offsets[g + 1] - 1`` of the result are
    ``activation(alpha * (a @ b[g]) + beta * c + bias[g]) + residual``. The offsets are read on the device: nothing
    synchronises, and a captured graph may be replayed with others.

    Parameters
    ----------
    a : array (total_M, K)
        float16, bfloat16, float32 or float64, rows sorted by group.
    b : array (groups, K, N)
        Same dtype, at most 1024 groups. Any strides: weights stored (groups, N, K) come in as a transposed view.
    group_offsets : array (groups + 1,)
        int32 or int64, on the device, not decreasing: `torch._grouped_mm`'s `offs` with the first row, usually 0, in
        front. Groups may be empty. An offset outside of 0..total_M counts as the nearest of these, one smaller than
        an offset before it as that one.
    c, residual : array broadcastable to the result, optional
    bias : array (groups, N) or (N,), optional
    alpha, beta, activation, out, out_dtype, precision, deterministic
        As for `gemm`.

    Returns
    -------
    array (total_M, N), or (total_M, N/2) for swiglu
        Rows in no group, before ``group_offsets[0]`` and from ``group_offsets[-1]`` on, are not written: they keep what
        `out` held, and are undefined without `out`.

    Notes
    -----
    Fastest where `a` is row-major, as tokens are: groups begin at any row, which a column-major `a` of a 16-bit type
    pays for with accesses of one element.
    """
    packed_alpha, packed_beta = scalars("grouped_gemm", alpha, beta, c, a)
    if packed_beta == ZERO:
        c = None
    options = (activation, out_dtype, precision)
    try:
        product = _grouped_product(*options)
    except TypeError:  # what cannot be hashed is no option: the checks say so
        product = _grouped_product.__wrapped__(*options)
    return product((a, b, out, c, bias, residual, group_offsets), packed_alpha, packed_beta)


class Gemm:
    """A GEMM of fixed sizes, for repeated calls: it keeps its workspace, so a call with ``out=`` allocates nothing.

    Calls of one plan share that workspace: they belong on one stream, or in an order that streams keep.

    Parameters
    ----------
    M, N, K : int
    dtype : dtype
        Of `a` and `b`.
    alpha, beta, bias, residual, activation, scale_b, zero_b, b_dtype, out_dtype, precision, split_k, deterministic
        As for `gemm`.
    """

    def __init__(
        self,
        M: int,
        N: int,
        K: int,
        dtype,
        *,
        alpha=1.0,
        beta=0.0,
        bias=None,
        residual=None,
        activation: str | None = None,
        scale_b=None,
        zero_b=None,
        b_dtype: str | None = None,
        out_dtype=None,
        precision: str | None = None,
        split_k: int | None = None,
        deterministic: bool = False,
    ) -> None:
        sizes = (checks.int_range("Gemm", n, v, 0, MAX_SIZE) for n, v in (("M", M), ("N", N), ("K", K)))
        plan = (*sizes, check_dtype("Gemm", "dtype", dtype, DTYPES))
        options = Options(activation, out_dtype, precision, split_k, plan)
        self._product = _product_of("Gemm", options, b_dtype, zero_b is not None, workspaces={})
        self._groups = _groups("Gemm", b_dtype, scale_b, zero_b)
        self._alpha, self._beta = scalar("Gemm", "alpha", alpha), scalar("Gemm", "beta", beta)
        (self._bias, self._residual), _ = arrays.take("Gemm", bias=bias, residual=residual)
        self._check_epilogue(*plan)

    def _check_epilogue(self, M: int, N: int, K: int, dtype: str) -> None:
        bias, residual = self._bias, self._residual
        if bias is not None:
            check_bias("Gemm", bias, dtype, N)
        if residual is not None:
            cols = N // 2 if self._product.options.activation == "swiglu" else N
            check_addend("Gemm", "residual", residual, dtype, (*residual.shape[:-2], M, cols))

    def __call__(self, a, b, c=None, *, bias=None, residual=None, out=None):
        """Run the plan; `bias` and `residual` given here stand in for those of the plan."""
        bias = self._bias if bias is None else bias
        residual = self._residual if residual is None else residual
        alpha, beta = scalars("Gemm", self._alpha, self._beta, c, a)
        if beta == ZERO:
            c = None
        return self._product((a, b, out, c, bias, residual, *self._groups), alpha, beta)
