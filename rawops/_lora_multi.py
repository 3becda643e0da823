"""Many LoRA adapters on one base weight, each row of a batch with its own: `MultiLoRA`."""

from __future__ import annotations

import functools
import math

import numpy as np

from rawops import config
from rawops._gemm_operands import MAX_SIZE, check_addend, check_bias
from rawops._lora_multi_config import DTYPES
from rawops._lora_multi_product import MultiProduct
from rawops._lora_product import check_columns, check_input
from rawops._lora_slices import check_slices, per_slice, take_factors
from rawops._lora_stack import Stack, has_non_finite
from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.copies import NotCopied
from rawops._runtime.device import on_own_device


class MultiLoRA(NotCopied, instead="Make a new one of c, and load the adapters."):
    """A linear layer with a stack of LoRA adapters, of which each row of x has its own or none.

    Row i of the result is ``activation(x[i] @ c + scaling * (x[i] @ a) @ b + bias) + residual[i]`` with the adapter in
    slot ``lora_indices[i]``. Both products are added in one float32 accumulator before the only write of the result,
    and the intermediate ``x @ a`` is float32, of which a bfloat16 result on Hopper may take 16 bits. Rows without an
    adapter have the bits of `rawops.gemm`, as it is configured without tuning.

    One launch sorts the rows by adapter and makes ``x @ a`` on tensor cores (two launches for more than 256 rows; up to
    64 rows stay as they are on Hopper, where the GEMM does not wait for it, or makes ``x @ a`` itself, if ranks are
    few). The next is the GEMM, whose tiles take in ``b`` once for all their rows of an adapter: segments of
    rows as in Punica's SGMV (arXiv:2310.18547), where a row alone is a segment of one. Nothing synchronises, and the
    grid does not depend on lora_indices: a captured call may be replayed with others.

    Parameters
    ----------
    c : array (K, N)
        The base weight, float16 or bfloat16; kept, not copied.
    max_loras : int
        Slots; with none all rows are base rows. Their memory is allocated here: ``(K * slices + N) * max_rank`` entries
        each, with max_rank rounded up to a multiple of 16.
    max_rank : int
        The largest rank that a slot takes; smaller ones cost no more time than they need.
    slices : sequence of (start, stop), optional
        Ranges of the N columns, each with an ``a`` and ``b`` of its own, as the query, key and value columns of one
        fused weight. They must not overlap; columns outside of all have no adapter. One slice with all columns if left
        out.
    bias : array (N,), optional
    activation : str, optional
        As for `rawops.gemm`.

    Raises
    ------
    TypeError, ValueError
        For what does not fit, before anything is allocated.

    Notes
    -----
    After a first call, a call of the same sizes with ``out=`` allocates nothing and can be captured in a CUDA graph.
    Calls of one object share workspaces: they belong on one stream, or in an order that streams keep. The same call
    gives the same bits.
    """

    _function, _load_function = "MultiLoRA", "MultiLoRA.load"

    def __init__(
        self, c, max_loras: int, max_rank: int, *, slices=None, bias=None, activation: str | None = None
    ) -> None:
        function = self._function
        checks.arrays_given(function, c=c)
        (self.c, self.bias), _ = arrays.take(function, c=c, bias=bias)
        device = arrays.device_of(function, c=self.c, bias=self.bias)
        dtype = checks.dtype(function, "c", self.c, DTYPES)
        if self.c.ndim != 2:
            checks.fail(ValueError, function, "c", "have 2 dimensions", f"shape {tuple(self.c.shape)}")
        self.max_loras = checks.int_range(function, "max_loras", max_loras, 0, MAX_SIZE)
        self.max_rank = checks.int_range(function, "max_rank", max_rank, 0, MAX_SIZE)
        self.slices = check_slices(function, slices, self.c.shape[1])
        self._product = MultiProduct(function, activation)
        if self.bias is not None:
            check_bias(function, self.bias, self._product.types.of_addends(dtype), self.c.shape[1])
        check_columns(function, self.c, activation)
        self._device = device
        with device.current():
            stack = Stack.empty(device, self.c.dtype, self.c.shape, self.max_loras, self.max_rank, self.slices)
        self._product.use(stack)
        self._stack, self._loaded = stack, set()

    def load(self, slot: int, a, b, scaling: float = 1.0) -> None:
        """Copy an adapter into a slot, in the place of what was there.

        The copies are queued on the current stream: calls queued before see the slot as it was, those after as it is.

        Parameters
        ----------
        slot : int
        a : array (K, rank)
        b : array (rank, N)
            Of c's dtype, any strides, any rank up to max_rank. With `slices`, sequences of arrays, one for each: a
            of (K, rank), b of (rank, stop - start), or None for both where the slice has no low-rank part.
        scaling : float
            Usually ``lora_alpha / rank``; an infinity or a NaN reaches the rows of this adapter and no others. With 0,
            `a` and `b` are not read.
        """
        function = self._load_function
        slot = self._checked_slot(function, slot)
        scaling = checks.number(function, "scaling", scaling)
        pairs = take_factors(function, self.c, a, b, self.slices, self.max_rank)
        if scaling == 0:  # a and b are not read, as by `lora_linear`
            pairs = [None] * len(pairs)
        self._loaded.discard(slot)
        stack, K = self._stack, self.c.shape[0]
        with self._device.current():
            stack.non_finite[slot] = 0
            stack.ranks[slot] = 0  # no adapter until all of it is there: a copy may fail, or be interrupted
            for i, (pair, (start, stop)) in enumerate(zip(pairs, self.slices, strict=True)):
                rank = 0 if pair is None else pair[0].shape[1]
                if rank:
                    stack.a[slot, i, :rank, :K] = pair[0].T
                    stack.put_b(self._device, slot, start, stop, pair[1])
                    stack.non_finite[slot] |= has_non_finite(pair[1])
            stack.scalings[slot] = dtypes.as_float32(scaling)
            for i, pair in enumerate(pairs):
                if pair is not None:
                    stack.ranks[slot, i] = pair[0].shape[1]
        self._loaded.add(slot)

    def unload(self, slot: int) -> None:
        """Empty a slot, in stream order as `load`; rows with its index then have no adapter."""
        slot = self._checked_slot("MultiLoRA.unload", slot)
        with self._device.current():
            self._stack.ranks[slot] = 0
        self._loaded.discard(slot)

    def _checked_slot(self, function: str, slot) -> int:
        if self.max_loras == 0:
            checks.fail(ValueError, function, "slot", f"be {checks.places(0, 'slots')}", slot)
        return checks.int_range(function, "slot", slot, 0, self.max_loras - 1)

    def __call__(self, x, lora_indices, *, residual=None, out=None):
        """Run on x (..., M, K) with the adapters in the slots lora_indices (..., M), int32 on the device, in any order.

        -1, any other number that is no slot, and that of an empty slot stand for no adapter; with RAWOPS_CHECK=1 the
        latter two raise ValueError, for which the indices are read on the host.

        Returns
        -------
        array (..., M, N), or (..., M, N/2) for swiglu
        """
        if config.current().check:
            self._check_indices(lora_indices)
        if getattr(x, "ndim", 2) == 2:
            return self._product((x, self.c, out, None, self.bias, residual, lora_indices))
        return self._call_flat(x, lora_indices, residual, out)

    @on_own_device
    def _call_flat(self, x, lora_indices, residual, out):
        """Run on x with batch axes, as rows."""
        function = self._function
        named = {"x": x, "lora_indices": lora_indices, "residual": residual, "out": out}
        checks.arrays_given(function, x=x, lora_indices=lora_indices)
        taken, give = arrays.take(function, **named)
        arrays.device_of(function, c=self.c, **dict(zip(named, taken, strict=True)))
        x, indices, residual, out = taken
        check_input(function, x, self.c)
        checks.shape(function, "lora_indices", indices, x.shape[:-1], "One index a row of x.")
        count = math.prod(x.shape[:-1])  # since -1 says nothing where an axis is 0
        shape = (*x.shape[:-1], self.c.shape[1] // (2 if self._product.options.activation == "swiglu" else 1))
        if residual is not None:
            check_addend(function, "residual", residual, self._product.types.of_addends(self.c.dtype.name), shape)
            residual = np.broadcast_to(residual, shape).reshape(count, shape[-1])
        flat = None
        if out is not None:
            checks.shape(function, "out", out, shape)
            checks.output(function, "out", out)
            make = out.reshape if out.flags.c_contiguous else functools.partial(self._device.empty, dtype=out.dtype)
            flat = make((count, shape[-1]))
        rows = (x.reshape(count, x.shape[-1]), self.c, flat, None, self.bias, residual, indices.reshape(count))
        result = self._product(rows).reshape(shape)
        if out is not None and not out.flags.c_contiguous:
            out[...] = result
        return give(result if out is None else out)

    @on_own_device
    def _check_indices(self, lora_indices) -> None:
        checks.arrays_given("MultiLoRA", lora_indices=lora_indices)
        (indices,), _ = arrays.take("MultiLoRA", lora_indices=lora_indices)
        arrays.device_of("MultiLoRA", c=self.c, lora_indices=indices)
        checks.dtype("MultiLoRA", "lora_indices", indices, ("int32",))
        for index in sorted({*indices.ravel().tolist()} - {-1}):
            if not 0 <= index < self.max_loras:
                rule = f"be -1 or {checks.places(self.max_loras, 'slots')}"
                checks.fail(ValueError, "MultiLoRA", "lora_indices", rule, index)
            if index not in self._loaded:
                checks.fail(ValueError, "MultiLoRA", "lora_indices", "name slots with an adapter", f"empty {index}")


class SlicedLoRA(MultiLoRA):
    """A linear layer with one adapter that has a part for each of some ranges of columns: a stack of one slot."""

    def __init__(self, function: str, c, a, b, scaling: float, slices, bias, activation: str | None) -> None:
        self._function = self._load_function = function
        checks.arrays_given(function, c=c, a=a, b=b)
        ranks = [x.shape[1] for x in per_slice(a) if getattr(x, "ndim", 0) == 2]
        super().__init__(c, 1, max(ranks, default=0), slices=slices, bias=bias, activation=activation)
        self.load(0, a, b, scaling)
        self._index = self._device.empty((1,), np.dtype("int32"))
        with self._device.current():
            self._index[...] = 0

    def __call__(self, x, *, residual=None, out=None):
        checks.arrays_given(self._function, x=x)
        (taken,), _ = arrays.take(self._function, x=x)
        check_input(self._function, taken, self.c)
        return super().__call__(x, np.broadcast_to(self._index, taken.shape[:-1]), residual=residual, out=out)
