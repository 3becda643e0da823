"""Matrix products with a fused epilogue: D = activation(alpha * (a @ b) + beta * c + bias) + residual."""

from __future__ import annotations

import functools

from rawops._gemm_8bit import ALL_DTYPES, ScaleArguments, ScaledProduct
from rawops._gemm_8bit import DTYPES as BYTE_DTYPES
from rawops._gemm_call import ZERO, Product, scalar, scalars
from rawops._gemm_grouped import GroupedProduct
from rawops._gemm_operands import MAX_SIZE, Options, Types, check_addend, check_bias, split_count
from rawops._gemm_tune import tune
from rawops._gemm_w4 import FORMATS, WeightProduct
from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.copies import ByArguments


class _PlainProduct(Product):
    """A product whose operands have one type, neither packed nor of 8 bits."""

    types = Types(ALL_DTYPES)


@functools.lru_cache(maxsize=256)
def _product(kind: tuple, *options) -> Product:
    """Return the product that all calls of `gemm` with these options share; `kind` is that of `_product_of`."""
    return _product_of("gemm", Options(*options), kind)


def _product_of(function: str, options: Options, kind: tuple, workspaces=None) -> Product:
    """Make a product whose operands have one type (), of packed weights or of 8 bits, with what tells those apart."""
    make, *of_kind = kind or (_PlainProduct,)
    return make(function, options, *of_kind, workspaces)


def _weights(function: str, b_dtype: str, scale_b, zero_b) -> tuple:
    """Return the operands that packed weights have beside the others."""
    checks.choice(function, "b_dtype", b_dtype, FORMATS)
    if scale_b is None:
        checks.fail(ValueError, function, "scale_b", f"be given for {b_dtype} weights", "None")
    return (scale_b,) if zero_b is None else (scale_b, zero_b)


def _check_without(function: str, hint: str, **named) -> None:
    """Check that arguments of another kind of product are not given."""
    for name, x in named.items():
        if x is not None:
            checks.fail(ValueError, function, name, f"be None {hint}", type(x).__name__)


_PLAIN = "without b_dtype or operands of 8 bits"


def _is_8bit(a) -> bool:
    itemsize = getattr(getattr(a, "dtype", None), "itemsize", None)
    if itemsize is None and a is not None:  # an array of another library, which may not tell
        itemsize = arrays.take("gemm", a=a)[0][0].dtype.itemsize
    return itemsize == 1


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
    scale_a=None,
    scale_b=None,
    scale_d=None,
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
        float16, bfloat16, float32, float64, or of 8 bits, see Notes. Batch axes broadcast with those of `b`; of more
        than three that cannot be merged, the outermost take a launch for each entry.
    b : array (..., K, N)
        Same dtype. Both operands may have any strides; contiguous along either axis, with rows on 16-byte
        boundaries, is fastest; a large product copies 16-bit operands that are neither into a workspace first.
    c : array broadcastable to (..., M, N), optional
        Of two axes at least. Not read when `beta` is 0.
    alpha, beta : float or 0-d array of float16, bfloat16, float32 or float64
        Arrays are read on the device, without synchronising. With `alpha` 0, `a` and `b` are not read, nor do their
        scales take part: NaN there changes nothing.
    bias : array (N,), optional
        Added to every row before the activation.
    residual : array broadcastable to the result, optional
        Of two axes at least. Added after the activation. `c`, `bias` and `residual` have the inputs' dtype, or float32
        beside 16-bit inputs.
    activation : {None, "relu", "gelu", "gelu_tanh", "silu", "swiglu"}
        "swiglu" takes an even N, gate in the first half of the columns and up in the second, and returns N/2 columns
        of ``silu(gate) * up``. At -inf, gelu and silu take their limit, 0; NaN stays NaN.
    scale_a, scale_b, scale_d : float or array, optional
        Of operands and results of 8 bits, see Notes.
    scale_b, zero_b, b_dtype : array, array, {"int4", "uint4", "float4_e2m1fn"}, optional
        Packed 4-bit weights, see Notes.
    out : array, optional
        Where the result goes. It may be `c` or `residual` itself; where it overlaps an input otherwise, the result
        is computed aside and copied.
    out_dtype : dtype, optional
        The inputs' dtype (default) or float32. A float16 result past 65504 is inf.
    precision : {None, "tf32", "fast"}
        "tf32" rounds float32 inputs to TF32 for the tensor cores; without it float32 is exact to its own rounding.
        On Hopper, large operands that are not contiguous along K are copied into a workspace first.
        "fast" is for float8, see Notes.
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
    Operands of 8 bits are float8_e4m3fn and float8_e5m2, in any mix, or int8 both. `scale_a` and `scale_b` multiply
    them: a number, or a float32 array with one entry for all, with one for each row of a (M,) or column of b (N,), or,
    of float8, with one for each 128 along K: (..., M, K / 128) for a and (..., K / 128, N or N / 128) for b, sizes
    rounded up. The result is bfloat16 by default, float16 or float32; of int8 without scales it is int32 by default,
    which wraps past 2^31: there `c`, `bias` and `residual` are int32, alpha and beta whole numbers up to 2^24, with no
    activation. Of float8 it may be float8, multiplied by `scale_d` before it is rounded to nearest even. There,
    what is too large becomes the largest number, infinity too, and NaN stays NaN. For other results `c`, `bias` and
    `residual` are float32, or share one 16-bit dtype. Where alpha or a scale of a whole operand is 0, `a` and `b` are
    not read. Contiguous along K with rows on 16-byte boundaries is what the kernels take: other operands are copied so
    into a workspace first.

    The tensor cores of Hopper add float8 products with about 14 bits. So sums over 128 of K are added up in float32
    outside, for a few per cent of the time, which ``precision="fast"`` spares. (DeepSeek-V3, arXiv:2412.19437, 3.3.2.)

    With `b_dtype`, `a` is float16 or bfloat16 and `b` is uint8 (K // 2, N): the low half of byte (i, n) is element
    (2i, n), the high half (2i + 1, n), as `pack_int4` makes them. Any strides: weights stored (N, K // 2) come in as
    a transposed view, which is as fast, and on Hopper faster for up to 16 rows of `a` with groups of 128. `scale_b`
    (K // group, N), float16, bfloat16 or float32, has a scale for each group of 32, 64 or 128 along K, which is whole
    groups, and `zero_b`, int8 or uint8 of the same shape, zero points for "uint4": ``b = (q - zero_b) * scale_b``. Side
    by side along N, on 16-byte boundaries, they are fastest. Weights are not rounded to a's dtype: a group's products
    with q - zero are exact, added up in float32, and scaled in float32.
    """
    if deterministic is not False:
        checks.flag("gemm", "deterministic", deterministic)
    packed_alpha, packed_beta = scalars("gemm", alpha, beta, c, a)
    if packed_beta == ZERO:
        c = None
    if split_k is not None and type(split_k) is not int:
        split_k = split_count("gemm", split_k)  # since 2.0 and True would find the products of 2 and 1
    kind, further, scales = (), (), None
    if b_dtype is not None:
        _check_without("gemm", "with b_dtype", scale_a=scale_a, scale_d=scale_d)
        kind, further = (WeightProduct, b_dtype, zero_b is not None), _weights("gemm", b_dtype, scale_b, zero_b)
    elif _is_8bit(a):
        _check_without("gemm", "without b_dtype", zero_b=zero_b)
        kind = (ScaledProduct, scale_a is not None or scale_b is not None)
        scales = ScaleArguments.of("gemm", scale_a, scale_b, scale_d)
    else:
        _check_without("gemm", _PLAIN, scale_a=scale_a, scale_b=scale_b, scale_d=scale_d, zero_b=zero_b)
    options = (activation, out_dtype, precision, split_k)
    try:
        product = _product(kind, *options)
    except TypeError:  # what cannot be hashed is no option: the checks say so
        product = _product.__wrapped__(kind, *options)
    if scales is not None:
        packed_alpha, further = scales.applied_to(packed_alpha), scales.on_device(product, a, out).arrays
    return product((a, b, out, c, bias, residual, *further), packed_alpha, packed_beta)


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
        an offset before it as that one; with RAWOPS_CHECK=1 both raise ValueError, which waits for the device.
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
    if deterministic is not False:
        checks.flag("grouped_gemm", "deterministic", deterministic)
    packed_alpha, packed_beta = scalars("grouped_gemm", alpha, beta, c, a)
    if packed_beta == ZERO:
        c = None
    options = (activation, out_dtype, precision)
    try:
        product = _grouped_product(*options)
    except TypeError:  # what cannot be hashed is no option: the checks say so
        product = _grouped_product.__wrapped__(*options)
    return product((a, b, out, c, bias, residual, group_offsets), packed_alpha, packed_beta)


class Gemm(ByArguments):
    """A GEMM of fixed sizes, for repeated calls: it keeps its workspace, so a call with ``out=`` allocates nothing.

    Calls of one plan share that workspace: they belong on one stream, or in an order that streams keep.

    Parameters
    ----------
    M, N, K : int
    dtype : dtype
        Of `a` and `b`.
    alpha, beta, bias, residual, activation, out_dtype, precision, split_k, deterministic
        As for `gemm`.
    scale_a, scale_b, scale_d, zero_b, b_dtype
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
        scale_a=None,
        scale_b=None,
        scale_d=None,
        zero_b=None,
        b_dtype: str | None = None,
        out_dtype=None,
        precision: str | None = None,
        split_k: int | None = None,
        deterministic: bool = False,
    ) -> None:
        sizes = (checks.int_range("Gemm", n, v, 0, MAX_SIZE) for n, v in (("M", M), ("N", N), ("K", K)))
        plan = (*sizes, checks.named_dtype("Gemm", "dtype", dtypes.shown(dtype), ALL_DTYPES))
        checks.flag("Gemm", "deterministic", deterministic)
        options = Options(activation, out_dtype, precision, split_k, plan)
        kind, self._further, self._scales = (), (), None
        if b_dtype is not None:
            _check_without("Gemm", "with b_dtype", scale_a=scale_a, scale_d=scale_d)
            kind, self._further = (
                (WeightProduct, b_dtype, zero_b is not None),
                _weights("Gemm", b_dtype, scale_b, zero_b),
            )
        elif plan[-1] in BYTE_DTYPES:
            _check_without("Gemm", "without b_dtype", zero_b=zero_b)
            kind = (ScaledProduct, scale_a is not None or scale_b is not None)
            self._scales = ScaleArguments.of("Gemm", scale_a, scale_b, scale_d)
        else:
            _check_without("Gemm", _PLAIN, scale_a=scale_a, scale_b=scale_b, scale_d=scale_d, zero_b=zero_b)
        self._product = _product_of("Gemm", options, kind, workspaces={})
        self._alpha, self._beta = scalar("Gemm", "alpha", alpha), scalar("Gemm", "beta", beta)
        numbers = type(self._alpha) is float and type(self._beta) is float and self._beta == 0
        self._factors = ((0, self._alpha, 0), ZERO) if numbers else None  # as packed, if c takes no part
        if self._scales is not None:
            self._product.check_plan(self._scales, self._alpha, self._beta)
        elif self._further:
            self._product.check_plan(*self._further)
        (self._bias, self._residual), _ = arrays.take("Gemm", bias=bias, residual=residual)
        self._check_epilogue(*plan)

    def _check_epilogue(self, M: int, N: int, K: int, dtype: str) -> None:
        bias, residual, options = self._bias, self._residual, self._product.options
        out_dtype = None if options.out_dtype is None else dtypes.name(options.out_dtype)
        allowed = self._product.types.of_addends(dtype, out_dtype)
        if bias is not None:
            check_bias("Gemm", bias, allowed, N)
        if residual is not None:
            cols = N // 2 if options.activation == "swiglu" else N
            check_addend("Gemm", "residual", residual, allowed, (*residual.shape[:-2], M, cols))

    def __call__(self, a, b, c=None, *, bias=None, residual=None, out=None):
        """Run the plan; `bias` and `residual` given here stand in for those of the plan."""
        bias = self._bias if bias is None else bias
        residual = self._residual if residual is None else residual
        if self._factors is not None:
            c, (alpha, beta) = None, self._factors
        else:
            alpha, beta = scalars("Gemm", self._alpha, self._beta, c, a)
            c = None if beta == ZERO else c
        if self._scales is not None:
            self._scales = self._scales.on_device(self._product, a, out)
            alpha, self._further = self._scales.applied_to(alpha), self._scales.arrays
        return self._product((a, b, out, c, bias, residual, *self._further), alpha, beta)
