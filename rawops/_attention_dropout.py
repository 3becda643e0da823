"""Dropout of attention's weights: the caller's seed and offset, and how kernels are told (dropout.cuh)."""

from __future__ import annotations

import numbers
from dataclasses import dataclass

from rawops._attention_config import DROPOUT
from rawops._runtime import arrays, checks

NUMBERS = 1 << 16  # that a weight's own is drawn from
_NONE = bytes(DROPOUT.size)
_LARGEST = {"dropout_seed": 2**64 - 1, "dropout_offset": 2**32 - 1}
_WRAP = 1 << 64


def checked_probability(function: str, p) -> float:
    """Return the probability, or raise."""
    p = checks.number(function, "dropout_p", p)
    if not 0 <= p < 1:
        checks.fail(ValueError, function, "dropout_p", "be at least 0 and less than 1", p)
    return p


@dataclass(frozen=True)
class Dropout:
    """What a call drops: kept is a weight whose number is less than `keep` of `NUMBERS`.

    `seed` and `offset` are ints, or arrays of one 64-bit integer that the kernels read.
    """

    keep: int
    seed: object
    offset: object

    @property
    def arrays(self) -> dict:
        """What the kernels read, by name."""
        given = {"dropout_seed": self.seed, "dropout_offset": self.offset}
        return {name: x for name, x in given.items() if not isinstance(x, int)}

    def fields(self, function: str, device) -> dict:
        """Return the fields of the AttentionDropout of a launch on `device`."""
        found = {"dropout_keep": self.keep, "dropout_scale": NUMBERS / self.keep}
        for name, x in (("dropout_seed", self.seed), ("dropout_offset", self.offset)):
            if isinstance(x, int):
                found[name] = x - _WRAP * (x >= _WRAP // 2)
                continue
            its_device = arrays.device_of(function, **{name: x})
            if its_device is not device:
                checks.fail(ValueError, function, name, f"be on the device of q ({device})", str(its_device))
            found[f"{name}_at"] = device.pointer(x)
        return found


def dropout_of(function: str, p: float, seed, offset) -> Dropout | None:
    """Check the arguments of a call whose probability is `checked_probability`; None where nothing is dropped."""
    if p == 0:
        return None
    hint = "The same seed and offset give the same weights to the forward and the backward pass."
    taken = []
    for name, x in (("dropout_seed", seed), ("dropout_offset", offset)):
        if isinstance(x, numbers.Number) or x is None:
            taken.append(checks.int_range(function, name, x, 0, _LARGEST[name], hint))
            continue
        (x,), _ = arrays.take(function, **{name: x})
        checks.dtype(function, name, x, ("int64", "uint64"))
        if x.size != 1:
            checks.fail(ValueError, function, name, "have one entry", f"shape {tuple(x.shape)}")
        taken.append(x)
    return Dropout(max(1, round((1 - p) * NUMBERS)), *taken)


def packed(function: str, dropout: Dropout | None, device) -> bytes:
    """Return the AttentionDropout of a launch, with or without one."""
    if dropout is None:
        return _NONE
    fields = dropout.fields(function, device)
    return DROPOUT.pack(*(fields.get(name, 0) for name in DROPOUT.fields))
