"""Fused LoRA: O = activation(x @ c + scaling * (x @ a) @ b + bias) + residual for the price of x @ c.

The base weight c is multiplied as in `rawops.gemm`. The low-rank part lands on the same float32 accumulators before
the only write of O, and `select_config` of _lora_config.py decides where x @ a comes from:

- It rides: the columns of a go along the K loop of x @ c as a second, narrow tile. One launch reads x once. This is
  free where the memory is the limit, which it is for the few rows of decoding.
- It is read: a product of its own leaves x @ a in float32, and the main kernel takes it in, any rank 64 at a time. That
  is a launch more, but where the tensor cores are the limit it costs less than riding, which every tile repeats.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from rawops import _gemm_sm90
from rawops._gemm_call import ONE, Launch, OnHopper, Product
from rawops._gemm_config import DTYPES, SWIGLU, Problem
from rawops._gemm_operands import ROLES, Options, Request, check_bias, check_given, layout_of, number
from rawops._lora_config import LOW_RANK, READING, RIDING, LoraConfig, select_config, shared_bytes
from rawops._runtime import arrays, checks, dtypes

_NOTHING = (None,) * (len(ROLES) - 2)  # in the place of out and all of an epilogue


class _Base(Product):
    """x @ c with its epilogue. There is no addend, but its name must not be that of another operand."""

    names: ClassVar = {"a": "x", "b": "c", "c": "addend", "lora_a": "a", "lora_b": "b"}


class _LowRank(_Base):
    """x @ c with the low-rank part beside it."""

    roles = (*ROLES, "lora_a", "lora_b")

    def __init__(self, function: str, activation: str | None, scaling: float, workspaces: dict | None = None) -> None:
        options = Options(activation)
        super().__init__(function, options, workspaces)
        self.scaling = number(function, "scaling", scaling)
        self._base = _Base(function, options, workspaces)
        self._step = Product(function, Options(), workspaces)

    def prepare(self, device, operands: tuple, addresses: list) -> Launch:
        x, c, *_, a, b = operands
        _check_weights(self.function, c, a, b)
        _check_columns(self.function, c, self.options.activation)
        _check_input(self.function, x, c)
        is_plain, is_wide = a.shape[1] == 0 or self.scaling == 0, c.dtype.itemsize > 2
        if not is_plain and not is_wide:
            return super().prepare(device, operands, addresses)
        count = len(ROLES)
        launch = self._base.prepare(device, operands[:count], addresses[:count])
        # No tensor core takes wide types without rounding: three products, the sum in their own type.
        return launch if is_plain else replace(launch, overlaps=(), run=self._run_apart)

    def _run_apart(self, operands: tuple, *_) -> None:
        x, c, out, _, bias, residual, a, b = operands
        low, base = self._step((x, a, *_NOTHING)), self._step((x, c, *_NOTHING))
        self._base((low, b, out, base, bias, residual), (0, self.scaling, 0), ONE)

    def hopper(self, request: Request, described: tuple, further: dict, shape: bytes) -> OnHopper | None:
        rank = request.arrays["lora_a"].shape[1]
        low_rank = _gemm_sm90.LowRank(further["lora_a"], further["lora_b"], rank)
        if not _gemm_sm90.supports(*described, low_rank):
            return None
        plan = _gemm_sm90.plan(*described, low_rank)
        y_row, make_y = self._y_maker(described[0], request, rank)

        def tail(operands: tuple, addresses: list) -> tuple[tuple, object]:
            factors = (self.scaling, *addresses[len(ROLES) :])
            if plan.config.rides:
                return factors, None
            y, y_address = make_y(operands)
            return (*factors, y_address, y_row), y

        return OnHopper(plan, shape, tail)

    def _y_maker(self, device, request: Request, rank: int) -> tuple[int, Callable]:
        """Return y's row stride, and a function that makes y = x @ a in a workspace and returns it and its address."""
        y_row = -(-rank // 4) * 4  # rows on 16-byte boundaries
        shape = (*request.arrays["a"].shape[:-1], y_row)

        def make_y(operands: tuple) -> tuple:
            y, address = self.workspace(device, shape, dtypes.numpy("float32"))
            x, a = operands[0], operands[len(ROLES)]
            self._step((x, a, y[..., :rank], *_NOTHING[1:]))
            return y, address

        return y_row, make_y

    def configure(self, device, request: Request, problem: Problem) -> LoraConfig:
        rank = request.arrays["lora_a"].shape[1]
        return select_config(problem, rank, device.sm_count, device.max_shared_bytes)

    def kernel(self, device, request: Request, problem: Problem, config: LoraConfig, choices: dict, further: dict):
        a, b, rank = further["lora_a"], further["lora_b"], request.arrays["lora_a"].shape[1]
        half = problem.N // 2 if choices["activation"] == SWIGLU else 0
        b_k_major, access_b = layout_of(b, problem.N, rank, b.col, b.row, half)
        choices = {**choices, "rank_step": config.rank_step, "rides": config.rides}
        choices |= {"lora_b_k_major": b_k_major, "access_lora_b": access_b}
        strides = (a.row, a.col, b.row, b.col)
        if config.rides:
            a_k_major, access_a = layout_of(a, rank, problem.K, a.col, a.row, 0)
            choices |= {"lora_a_k_major": a_k_major, "access_lora_a": access_a}
            kernel = RIDING[problem.kind, config.rank_step].kernel(device, **choices)

            def tail(operands: tuple, addresses: list) -> tuple[bytes, None]:
                return LOW_RANK.pack(*addresses[len(ROLES) :], 0, *strides, 0, rank, self.scaling), None

        else:
            kernel = READING[problem.kind].kernel(device, **choices, lora_a_k_major=True, access_lora_a=16)
            y_row, make_y = self._y_maker(device, request, rank)

            def tail(operands: tuple, addresses: list) -> tuple[bytes, object]:
                y, y_address = make_y(operands)
                numbers = (y_address, *strides, y_row, rank, self.scaling)
                return LOW_RANK.pack(*addresses[len(ROLES) :], *numbers), y

        memory = shared_bytes(config.tile, config.rank_step, config.rides, dtypes.itemsize(problem.dtype))
        return kernel, memory, tail


@functools.lru_cache(maxsize=256)
def _product(activation: str | None, scaling: float) -> _LowRank:
    """Return the product that all calls of `lora_linear` with these options share."""
    return _LowRank("lora_linear", activation, scaling)


def _check_weights(function: str, c, a, b) -> None:
    dtype = checks.dtype(function, "c", c, DTYPES)
    for name, x in (("c", c), ("a", a), ("b", b)):
        checks.dtype(function, name, x, (dtype,), "x, c, a and b have one dtype; convert one of them.")
        if x.ndim != 2:
            checks.fail(ValueError, function, name, "have 2 dimensions", f"shape {tuple(x.shape)}")
    (K, N), rank = c.shape, a.shape[1]
    checks.shape(function, "a", a, (K, rank), "a is (K, rank), c is (K, N): transpose it?")
    checks.shape(function, "b", b, (rank, N), "b is (rank, N) for a (K, rank) and c (K, N): transpose it?")


def _check_columns(function: str, c, activation: str | None) -> None:
    if activation == "swiglu" and c.shape[1] % 2:
        checks.fail(ValueError, function, "c", "have an even number of columns for swiglu", c.shape[1])


def _check_input(function: str, x, c) -> None:
    checks.dtype(function, "x", x, (c.dtype.name,), "x, c, a and b have one dtype; convert one of them.")
    if x.ndim < 2 or x.shape[-1] != c.shape[0]:
        rule = f"have shape (..., M, {c.shape[0]}), as c has {c.shape[0]} rows"
        checks.fail(ValueError, function, "x", rule, f"shape {tuple(x.shape)}")


def _peft_matrices(**named) -> list:
    """Convert and check the weight, lora_a and lora_b of `FusedLoRA.from_peft`, under these names."""
    function = "FusedLoRA.from_peft"
    check_given(function, **named)
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


def lora_linear(x, c, a, b, *, scaling: float = 1.0, bias=None, residual=None, activation: str | None = None, out=None):
    """Compute ``activation(x @ c + scaling * (x @ a) @ b + bias) + residual`` in one pass over the result.

    Both products are added in one float32 accumulator before the only write of the result, and the intermediate
    ``x @ a`` is float32: 65504 is not its limit. The low-rank factors are those of LoRA (Hu et al., 2021,
    arXiv:2106.09685).

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
        Usually ``lora_alpha / rank``. With 0, as with rank 0, `a` and `b` are not read.
    bias : array (N,), optional
        Added to every row before the activation.
    residual : array broadcastable to the result, optional
        Added after the activation. `bias` and `residual` have the inputs' dtype or float32.
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
        scaling = number("lora_linear", "scaling", scaling)
    try:
        product = _product(activation, scaling)
    except TypeError:  # what cannot be hashed is no activation: the checks say so
        product = _product.__wrapped__(activation, scaling)
    return product((x, c, out, None, bias, residual, a, b))


class FusedLoRA:
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
    bias : array (N,), optional
    activation : str, optional
        As for `lora_linear`. The arrays are kept, not copied: changes of their content show in the next call.
    """

    def __init__(self, c, a, b, scaling: float = 1.0, *, bias=None, activation: str | None = None) -> None:
        check_given("FusedLoRA", c=c, a=a, b=b)
        (self.c, self.a, self.b, self.bias), _ = arrays.take("FusedLoRA", c=c, a=a, b=b, bias=bias)
        arrays.device_of("FusedLoRA", c=self.c, a=self.a, b=self.b, bias=self.bias)
        _check_weights("FusedLoRA", self.c, self.a, self.b)
        self._product = _LowRank("FusedLoRA", activation, scaling, workspaces={})
        _check_columns("FusedLoRA", self.c, activation)
        if self.bias is not None:
            check_bias("FusedLoRA", self.bias, self.c.dtype.name, self.c.shape[1])

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
        alpha, rank = number("FusedLoRA.from_peft", "lora_alpha", lora_alpha), lora_a.shape[0]
        scaling = alpha / (math.sqrt(rank) if use_rslora else rank) if rank else 0.0
        return cls(weight.T, lora_a.T, lora_b.T, scaling, **keywords)

    def __call__(self, x, *, residual=None, out=None):
        """Run on x (..., M, K); returns (..., M, N), or N/2 columns for swiglu."""
        return self._product((x, self.c, out, None, self.bias, residual, self.a, self.b))
