"""Fused LoRA: O = activation(x @ c + scaling * (x @ a) @ b + bias) + residual for the price of x @ c.

The base weight c is multiplied as in `rawops.gemm`. The low-rank part lands on the same float32 accumulators before
the only write of O, and `select_config` of _lora_config.py decides where x @ a comes from:

- It rides: the columns of a go along the K loop of x @ c as a second, narrow tile. One launch reads x once. This is
  free where the memory is the limit, which it is for the few rows of decoding.
- It is read: a product of its own leaves x @ a in float32, and the main kernel takes it in, any rank, 16 or 64 at a
  time. That is a launch more, beside the main one on Hopper; where the tensor cores are the limit it costs less than
  riding, which every tile repeats.
"""

from __future__ import annotations

import functools
import math

from rawops._gemm_config import DTYPES
from rawops._gemm_operands import check_bias
from rawops._lora_grad import lora_linear_backward as lora_linear_backward
from rawops._lora_merge import MergeError, merge_into
from rawops._lora_multi import MultiLoRA as MultiLoRA
from rawops._lora_multi import SlicedLoRA
from rawops._lora_product import LowRankProduct, check_columns, check_weights
from rawops._lora_slices import take_factors
from rawops._runtime import arrays, checks
from rawops._runtime.copies import NotCopied


@functools.lru_cache(maxsize=256)
def _product(activation: str | None, scaling: float) -> LowRankProduct:
    """Return the product that all calls of `lora_linear` with these options share."""
    return LowRankProduct("lora_linear", activation, scaling)


def _peft_matrices(**named) -> list:
    """Convert and check the weight, lora_a and lora_b of `FusedLoRA.from_peft`, under these names."""
    function = "FusedLoRA.from_peft"
    checks.arrays_given(function, **named)
    matrices, _ = arrays.take(function, **named)
    arrays.device_of(function, **dict(zip(named, matrices, strict=True)))
    dtype = checks.dtype(function, "weight", matrices[0], DTYPES)
    for name, x in zip(named, matrices, strict=True):
        checks.dtype(function, name, x, (dtype,), "All three have one dtype; convert one of them.")
        if x.ndim != 2:
            checks.fail(ValueError, function, name, "have 2 dimensions", f"shape {tuple(x.shape)}")
    (rows, cols), rank = matrices[0].shape, matrices[1].shape[0]
    hint = f"The weight is (out_features, in_features) = ({rows}, {cols}): transpose it?"
    checks.shape(function, "lora_a", matrices[1], (rank, cols), hint)
    checks.shape(function, "lora_b", matrices[2], (rows, rank), hint)
    return matrices


def lora_linear(
    x, c, a, b, *, scaling: float = 1.0, slices=None, bias=None, residual=None, activation: str | None = None, out=None
):
    """Compute ``activation(x @ c + scaling * (x @ a) @ b + bias) + residual`` in one pass over the result.

    Both products are added in one float32 accumulator before the only write of the result, and the intermediate
    ``x @ a`` is float32: 65504 is not its limit. On Hopper it meets ``b`` with 16 bits where the result is bfloat16,
    which has 8. The low-rank factors are those of LoRA (Hu et al., 2021, arXiv:2106.09685).

    Parameters
    ----------
    x : array (..., M, K)
        float16 or bfloat16 for the fused kernel; float32 and float64 run as three products.
    c : array (K, N)
        The base weight. All operands have one dtype and may have any strides; contiguous along either axis, with
        rows on 16-byte boundaries, is fastest.
    a : array (K, rank)
    b : array (rank, N)
        The low-rank factors, of any rank from 0 up. Nothing past the rank is read.
    scaling : float
        Usually ``lora_alpha / rank``. With 0, as with rank 0, `a` and `b` are not read. An infinity or a NaN is a
        factor of ``x @ a`` as any other: every entry that has a low-rank part becomes what IEEE arithmetic makes of it.
    slices : sequence of (start, stop), optional
        Ranges of the N columns with factors of their own, such as the query, key and value columns of one fused weight:
        `a` and `b` are then sequences of arrays (K, rank) and (rank, stop - start), with None for both where a range
        has none. float16 and bfloat16 only; runs as a `MultiLoRA` of one slot, into which the factors are copied.
    bias : array (N,), optional
        Added to every row before the activation.
    residual : array broadcastable to the result, optional
        Of two axes at least. Added after the activation. `bias` and `residual` have the inputs' dtype, or float32
        beside 16-bit inputs.
    activation : {None, "relu", "gelu", "gelu_tanh", "silu", "swiglu"}
        As for `rawops.gemm`: "swiglu" returns N/2 columns.
    out : array, optional
        Where the result goes, of the inputs' dtype or float32. Where it overlaps an input, other than as `residual`
        itself, the result is computed aside and copied.

    Returns
    -------
    array (..., M, N), or (..., M, N/2) for swiglu

    Raises
    ------
    TypeError, ValueError
        For dtypes, shapes or layouts that do not fit, before anything is launched.

    Notes
    -----
    Up to rank 64 and where the memory is the limit (few rows), one kernel does it all; with many rows or a higher
    rank, ``x @ a`` is a launch of its own into a workspace (see `select_config`). Nothing synchronises, and the same
    call gives the same bits. To capture it in a CUDA graph, use `FusedLoRA` with ``out=``.
    """
    if type(scaling) is not float:
        scaling = checks.number("lora_linear", "scaling", scaling)
    if slices is not None:
        sliced = SlicedLoRA("lora_linear", c, a, b, scaling, slices, bias, activation)
        return sliced(x, residual=residual, out=out)
    try:
        product = _product(activation, scaling)
    except TypeError:  # what cannot be hashed is no activation: the checks say so
        product = _product.__wrapped__(activation, scaling)
    return product((x, c, out, None, bias, residual, a, b))


class FusedLoRA(NotCopied, instead="Make a new one of c, a and b."):
    """A linear layer with one low-rank adapter, for repeated calls; see `lora_linear`.

    It keeps its workspaces, so after a first call a call of the same sizes with ``out=`` allocates nothing and can be
    captured in a CUDA graph. Calls of one object share the workspaces: they belong on one stream, or in an order that
    streams keep.

    Parameters
    ----------
    c : array (K, N)
    a : array (K, rank)
    b : array (rank, N)
    scaling : float
    slices : sequence of (start, stop), optional
    bias : array (N,), optional
    activation : str, optional
        As for `lora_linear`. The arrays are kept, not copied: changes of their content show in the next call. With
        `slices`, a and b are copied, once for the calls and once for a merge.

    Attributes
    ----------
    merged : bool or None
        Whether c holds the adapter, see `merge`; None where one that failed has left it half way.
    """

    def __init__(self, c, a, b, scaling: float = 1.0, *, slices=None, bias=None, activation: str | None = None) -> None:
        function = "FusedLoRA"
        checks.arrays_given(function, c=c, a=a, b=b)
        self.merged, self._sliced = False, None
        (self.c, self.bias), _ = arrays.take(function, c=c, bias=bias)
        self._product = LowRankProduct(function, activation, scaling, workspaces={})
        if slices is None:
            (self.a, self.b, _), _ = arrays.take(function, a=a, b=b, c=c)
            arrays.device_of(function, c=self.c, a=self.a, b=self.b, bias=self.bias)
            check_weights(function, self.c, self.a, self.b)
            self.slices = ((0, self.c.shape[1]),)
        else:
            self._sliced = SlicedLoRA(function, c, a, b, self.scaling, slices, bias, activation)
            self.slices = self._sliced.slices
            pairs = take_factors(function, self.c, a, b, self.slices)
            with arrays.device_of(function, c=self.c).current():
                self._pairs = [pair and tuple(x.copy() for x in pair) for pair in pairs]
        check_columns(function, self.c, activation)
        if self.bias is not None:
            check_bias(function, self.bias, self._product.types.of_addends(self.c.dtype.name), self.c.shape[1])

    @property
    def scaling(self) -> float:
        return self._product.scaling

    @classmethod
    def from_peft(cls, weight, lora_a, lora_b, lora_alpha: float, *, use_rslora: bool = False, **keywords) -> FusedLoRA:
        """Make one from the matrices of a Hugging Face PEFT layer, as transposed views.

        Parameters
        ----------
        weight : array (out_features, in_features)
        lora_a : array (rank, in_features)
        lora_b : array (out_features, rank)
        lora_alpha : float
            The scaling is ``lora_alpha / rank``.
        use_rslora : bool
            Rank-stabilised LoRA (arXiv:2312.03732): ``lora_alpha / sqrt(rank)``.
        **keywords
            `bias` and `activation`.
        """
        weight, lora_a, lora_b = _peft_matrices(weight=weight, lora_a=lora_a, lora_b=lora_b)
        alpha, rank = checks.number("FusedLoRA.from_peft", "lora_alpha", lora_alpha), lora_a.shape[0]
        is_stabilised = checks.flag("FusedLoRA.from_peft", "use_rslora", use_rslora)
        scaling = alpha / (math.sqrt(rank) if is_stabilised else rank) if rank else 0.0
        return cls(weight.T, lora_a.T, lora_b.T, scaling, **keywords)

    def __call__(self, x, *, residual=None, out=None):
        """Run on x (..., M, K); returns (..., M, N), or N/2 columns for swiglu."""
        if self.merged is None:
            self._fail_half_way("FusedLoRA")
        if self.merged:
            return self._product.base((x, self.c, out, None, self.bias, residual))
        if self._sliced is not None:
            return self._sliced(x, residual=residual, out=out)
        return self._product((x, self.c, out, None, self.bias, residual, self.a, self.b))

    def merge(self) -> MergeError:
        """Add ``scaling * a @ b`` to c in place, rounded once; calls then cost what ``x @ c`` costs.

        Returns
        -------
        MergeError
            What the rounding to c's dtype did. Reading it waits for the device, so a merge cannot be captured.
        """
        return self._add_to_weight("FusedLoRA.merge", 1)

    def unmerge(self) -> MergeError:
        """Take ``scaling * a @ b`` out of c again; c is then the base weight but for two roundings.

        a and b must be as they were at the merge, if they are not copied.

        Returns
        -------
        MergeError
            What the second rounding did.
        """
        return self._add_to_weight("FusedLoRA.unmerge", -1)

    def _add_to_weight(self, function: str, sign: int) -> MergeError:
        if self.merged is None:
            self._fail_half_way(function)
        if self.merged is (sign > 0):
            got = "a merged one" if self.merged else "the base weight"
            checks.fail(ValueError, function, "c", f"be {'the base weight' if sign > 0 else 'a merged one'}", got)
        pairs = [(self.a, self.b)] if self._sliced is None else self._pairs
        error = merge_into(function, self.c, pairs, self.slices, sign * self.scaling, self._begin_writing)
        self.merged = sign > 0
        return error

    def _begin_writing(self) -> None:
        self.merged = None

    @staticmethod
    def _fail_half_way(function: str) -> None:
        hint = "Load the base weight again."
        checks.fail(ValueError, function, "c", "be whole", "one that a failed merge has left half way", hint)
