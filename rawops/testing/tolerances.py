"""How far a result may be from the exact one.

The bound of an entry has three terms, each of which has a reason:

* one ulp of the result's type at the exact value: the last rounding is half of one, and a value next to a power of
  two may be rounded with the wider of its two spacings;
* k unit roundoffs of the accumulator times the magnitude, the standard bound for a sum of k terms in any order;
* twice the largest error of a plain low-precision computation, where the caller gives one.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from rawops.testing.references import exact

# Sums in 16-bit and 8-bit types are accumulated in float32; the two wider types accumulate in themselves.
_UNIT_ROUNDOFF = {"float64": 2.0**-53}
_FLOAT32_UNIT_ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class Errors:
    """How far a result is from its reference.

    Attributes
    ----------
    max_abs : float
        Largest absolute difference; NaN if only one side is NaN somewhere.
    max_rel : float
        Largest difference relative to the entry, or to the root mean square of the reference where the entry is
        smaller than that: an entry that cancels to nothing has no meaningful error of its own.
    worst : tuple of int
        Where the error is furthest beyond its bound, or nearest to it.
    excess : float
        The error there, as a multiple of its bound: at most 1 is right.
    """

    max_abs: float
    max_rel: float
    worst: tuple[int, ...]
    excess: float

    @property
    def within(self) -> bool:
        return self.excess <= 1.0


def errors(got, reference, dtype, *, k: int = 1, magnitude=None, plain=None) -> Errors:
    """Compare a result with the exact reference.

    Parameters
    ----------
    got : array
        The result, on the host, of any dtype.
    reference : array
        The exact answer, float64, of the same shape.
    dtype : str or dtype
        The type that the result was rounded to.
    k : int
        Number of terms in the sums behind an entry.
    magnitude : array or float, optional
        Sum of the absolute values of those terms, from which cancelled sums take their error. By default the largest
        finite entry of the reference, which is enough for random data.
    plain : array, optional
        The same result by a plain computation in low precision; twice its largest error is allowed as well.
    """
    got, reference = exact(got), exact(reference)
    if got.shape != reference.shape:
        raise AssertionError(f"shape {got.shape}, expected {reference.shape}")
    if got.size == 0:
        return Errors(0.0, 0.0, (), 0.0)
    finite = np.isfinite(reference)
    if magnitude is None:
        magnitude = np.max(np.abs(reference), where=finite, initial=0.0)
    bound = _ulp(reference, dtype) + k * _UNIT_ROUNDOFF.get(str(np.dtype(dtype)), _FLOAT32_UNIT_ROUNDOFF) * magnitude
    if plain is not None:
        bound = bound + 2.0 * np.max(_difference(exact(plain), reference, dtype, bound))
    difference = _difference(got, reference, dtype, bound)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(difference == 0, 0.0, difference / bound)
        scale = np.maximum(np.abs(reference), np.sqrt(np.mean(np.square(np.where(finite, reference, 0.0)))))
        relative = np.where(difference == 0, 0.0, difference / scale)
    # NaN in the difference means NaN on one side only, the worst that can be.
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    worst = np.unravel_index(np.argmax(ratio), ratio.shape)
    return Errors(float(np.max(difference)), float(np.max(relative)), tuple(int(i) for i in worst), float(ratio[worst]))


def assert_close(got, reference, dtype, *, k: int = 1, magnitude=None, plain=None) -> None:
    """Fail, with the worst entry's place and values, unless every entry is within its bound (see `errors`)."""
    found = errors(got, reference, dtype, k=k, magnitude=magnitude, plain=plain)
    if not found.within:
        value, expected = np.asarray(got)[found.worst], np.asarray(reference)[found.worst]
        raise AssertionError(
            f"entry {found.worst} is {value!s}, expected {expected!s}: {found.excess:.3g} times its bound; "
            f"max abs error {found.max_abs:.3g}, max rel error {found.max_rel:.3g}"
        )


def _difference(got: np.ndarray, reference: np.ndarray, dtype, bound) -> np.ndarray:
    """|got - reference|, 0 where both are the same non-finite value, NaN where only one is NaN."""
    largest = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(invalid="ignore"):
        difference = np.abs(got - reference)
        same = (got == reference) | (np.isnan(got) & np.isnan(reference))
        # A sum that overflows the type is inf there; just below the limit it may be either.
        overflow = np.isinf(got) & (np.sign(got) == np.sign(reference)) & (np.abs(reference) + bound > largest)
    return np.where(same | overflow, 0.0, difference)


def _ulp(x: np.ndarray, dtype) -> np.ndarray:
    """Distance from |x| to the next larger number of `dtype`."""
    info = ml_dtypes.finfo(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))[1] - 1
    spacing = np.where(x == 0, 0.0, np.ldexp(float(info.eps), exponent))
    return np.maximum(spacing, float(info.smallest_subnormal))
