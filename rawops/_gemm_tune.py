"""`gemm.tune`: measure a few configurations for a product once, and use the fastest from then on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rawops import _gemm_choices
from rawops._gemm_call import ZERO, Product, scalars
from rawops._gemm_operands import ROLES, Options
from rawops._runtime import arrays, checks
from rawops.errors import UnsupportedError

_ROUNDS = 25
_FUNCTION = "gemm.tune"


@dataclass(frozen=True)
class Tuning:
    """What `gemm.tune` has measured.

    Attributes
    ----------
    chosen : str
        The fastest configuration, which products of this kind take from now on.
    microseconds : dict
        The median time of a call by configuration, the fastest first.
    """

    chosen: str
    microseconds: dict[str, float]


def tune(
    a,
    b,
    c=None,
    *,
    alpha=1.0,
    beta=0.0,
    bias=None,
    residual=None,
    activation: str | None = None,
    out_dtype=None,
    precision: str | None = None,
) -> Tuning:
    """Time 2 to 8 configurations of `gemm` on these arrays, and use the fastest from now on.

    The choice holds for every later call of `gemm` and `Gemm` with the same sizes, dtypes, layouts and kind of
    epilogue, in this process and in others: it is kept in ``gemm_choices.json`` in the folder of compiled kernels, for
    this model of GPU and these kernels. A file that cannot be read is ignored with a warning, and replaced. Delete it
    to choose without measurements again.

    Parameters
    ----------
    a, b, c, alpha, beta, bias, residual, activation, out_dtype, precision
        As for `gemm`, whose other options are not tuned: packed weights, and a `split_k` that is given.

    Returns
    -------
    Tuning

    Notes
    -----
    It synchronises, and takes some tens of milliseconds and what the compiler needs. The L2 is overwritten before each
    call that is timed. None of the candidates uses atomics: as before, the same call gives the same bits. But another
    configuration may add up in another order, so bits may differ from those before tuning.
    """
    packed_alpha, packed_beta = scalars(_FUNCTION, alpha, beta, c, a)
    if packed_beta == ZERO:
        c = None
    checks.arrays_given(_FUNCTION, a=a, b=b)
    product = Product(_FUNCTION, Options(activation, out_dtype, precision))
    named = dict(zip(ROLES, (a, b, None, c, bias, residual), strict=True))
    converted, _ = arrays.take(_FUNCTION, **named)
    device = arrays.device_of(_FUNCTION, **dict(zip(named, converted, strict=True)))
    addresses = [device.pointer(x) for x in converted]
    with device.current(), _gemm_choices.trying() as trial:
        first = product.prepare(device, tuple(converted), addresses)
        question = trial.question  # before runs ask: of more batch axes than a kernel has, each is a call of its own
        out = device.empty(first.out_shape, first.out_dtype)
        converted[2], addresses[2] = out, device.pointer(out)
        candidates = question.candidates() if question else [None]
        runs = []
        for trial.choice in candidates:
            run = getattr(product.prepare(device, tuple(converted), addresses).steps, "run", lambda *_: None)
            runs.append(lambda run=run: run(tuple(converted), addresses, packed_alpha, packed_beta))
        times = time_runs(device, runs)
    fastest = min(range(len(runs)), key=times.__getitem__)
    if question:
        _gemm_choices.keep(question, candidates[fastest])
        Product.prepare_anew()
    names = [", ".join(f"{k} {v}" for k, v in _gemm_choices.describe(c).items()) for c in candidates]
    order = sorted(range(len(runs)), key=times.__getitem__)
    return Tuning(names[fastest], {names[i]: times[i] for i in order})


def time_runs(device, runs: list[Callable[[], None]]) -> list[float]:
    """Return the median microseconds of each run; they take turns, and none finds its operands in the L2."""
    if device.is_emulated:
        raise UnsupportedError(f"{_FUNCTION}: needs a GPU, found {device}: the emulator models no time")
    import cupy

    flush = cupy.empty(2 * cupy.cuda.Device().attributes["L2CacheSize"], "uint8")
    for run in runs:
        run()
    samples = []
    for _ in range(_ROUNDS):
        for run in runs:
            flush.fill(0)
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            run()
            end.record()
            samples.append((start, end))
    cupy.cuda.get_current_stream().synchronize()
    elapsed = [cupy.cuda.get_elapsed_time(*pair) * 1e3 for pair in samples]
    return [float(np.median(elapsed[i :: len(runs)])) for i in range(len(runs))]
