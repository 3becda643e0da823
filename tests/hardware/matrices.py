"""The families of matrix instructions: mma.sync on fragments, wgmma on tiles of each layout."""

from functools import partial

import numpy as np
from hardware import operands
from hardware.family import BOTH, HOPPER, Family
from hardware.rules import Rule, close, exact

_WORD = {"f64": np.uint64}
_PER_WORD = {"f16": 2, "bf16": 2, "e4m3": 4, "e5m2": 4, "s8": 4, "u8": 4}
_RESULT = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def _tolerance(result: str, products: int, unit: float | None = None) -> Rule:
    """What another order of the sum of so many products of numbers in (-1, 1) may change; `unit` is its rounding."""
    if result == "s32":
        return exact
    unit = unit or {"f16": 2.0**-11, "f32": 2.0**-24, "f64": 2.0**-53}[result]
    return close(_RESULT[result], absolute=products * unit, relative=2 * unit)


# --- mma.sync: name, types of A, B and C, words of A, B and C in a lane, K, architectures -----------------------------

_MMA = [
    ("f16", "f16", "f16", "f32", (4, 2, 4), 16, BOTH),
    ("f16_k8", "f16", "f16", "f32", (2, 1, 4), 8, BOTH),
    ("f16_f16", "f16", "f16", "f16", (4, 2, 2), 16, BOTH),
    ("f16_f16_k8", "f16", "f16", "f16", (2, 1, 2), 8, BOTH),
    ("bf16", "bf16", "bf16", "f32", (4, 2, 4), 16, BOTH),
    ("bf16_k8", "bf16", "bf16", "f32", (2, 1, 4), 8, BOTH),
    ("tf32", "tf32", "tf32", "f32", (4, 2, 4), 8, BOTH),
    ("tf32_k4", "tf32", "tf32", "f32", (2, 1, 4), 4, BOTH),
    ("s8", "s8", "s8", "s32", (4, 2, 4), 32, BOTH),
    ("s8_satfinite", "s8", "s8", "s32", (4, 2, 4), 32, BOTH),
    ("u8_s8", "u8", "s8", "s32", (4, 2, 4), 32, BOTH),
    ("s8_k16", "s8", "s8", "s32", (2, 1, 4), 16, BOTH),
    ("u8_k16", "u8", "u8", "s32", (2, 1, 4), 16, BOTH),
    ("e4m3", "e4m3", "e4m3", "f32", (4, 2, 4), 32, HOPPER),
    ("e5m2", "e5m2", "e5m2", "f32", (4, 2, 4), 32, HOPPER),
    ("e4m3_e5m2", "e4m3", "e5m2", "f32", (4, 2, 4), 32, HOPPER),
    ("e4m3_f16", "e4m3", "e4m3", "f16", (4, 2, 2), 32, HOPPER),
    ("f64", "f64", "f64", "f64", (1, 1, 2), 4, BOTH),
    ("f64_k16", "f64", "f64", "f64", (8, 4, 4), 16, HOPPER),
]

_PROBLEMS = 3


def _fragments(name: str, make, types: tuple[str, ...], counts: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    rng = operands.stream(name)
    result = []
    for kind, count in zip(types, counts, strict=True):
        values = make(rng, kind, _PROBLEMS, count, 32, _PER_WORD.get(kind, 1))
        result.append(values.view(_WORD.get(kind, np.uint32)).reshape(_PROBLEMS, count, 32))
    return tuple(result)


def _mma(mode: str, make, name: str, a: str, b: str, c: str, counts: tuple[int, ...], k: int, archs) -> Family:
    rule = _tolerance(c, k) if mode == "random" else exact
    inputs = partial(_fragments, make=make, types=(a, b, c), counts=counts)
    shape, dtype = (_PROBLEMS, counts[2], 32), _WORD.get(c, np.uint32)
    name, kernel = f"mma {name} {mode}", f"{name}<>"
    return Family(name, "mma.cu", kernel, inputs, shape, dtype, rule, archs, grid=_PROBLEMS, block=32)


_MODES = {
    "integers": operands.small_integers,
    "random": operands.fractions,
    "infinities": operands.with_infinities,
}


def _mma_families() -> list[Family]:
    return [
        _mma(mode, make, *entry)
        for entry in _MMA
        for mode, make in _MODES.items()
        if not (mode == "infinities" and entry[3] == "s32")
    ]


# --- wgmma ------------------------------------------------------------------------------------------------------------

_DEPTH = 128  # bytes of K

# product of wgmma.cu: types of A, B and D, columns, words of D in a lane
_PRODUCTS = {
    "f16": ("f16", "f16", "f32", 16, 8),
    "f16_negative": ("f16", "f16", "f32", 16, 8),
    "f16_f16": ("f16", "f16", "f16", 16, 4),
    "f16_wide": ("f16", "f16", "f32", 64, 32),
    "bf16": ("bf16", "bf16", "f32", 16, 8),
    "bf16_wide": ("bf16", "bf16", "f32", 64, 32),
    "tf32": ("tf32", "tf32", "f32", 16, 8),
    "e4m3": ("e4m3", "e4m3", "f32", 16, 8),
    "e5m2": ("e5m2", "e5m2", "f32", 16, 8),
    "e4m3_e5m2": ("e4m3", "e5m2", "f32", 16, 8),
    "e4m3_f16": ("e4m3", "e4m3", "f16", 16, 4),
    "s8": ("s8", "s8", "s32", 16, 8),
    "u8_s8": ("u8", "s8", "s32", 16, 8),
}

# product, then swizzle and whether K-major, of A and of B
_LAYOUTS = [
    ("f16", 0, True, 128, True),
    ("f16", 32, True, 64, True),
    ("f16", 64, True, 0, True),
    ("f16", 128, True, 32, True),
    ("f16", 128, True, 32, False),
    ("f16", 128, True, 0, False),
    ("f16_negative", 128, True, 128, True),
    ("f16_f16", 128, True, 64, True),
    ("f16_f16", 64, False, 128, True),
    ("f16_wide", 0, False, 128, True),
    ("f16_wide", 32, False, 64, False),
    ("f16_wide", 64, False, 32, False),
    ("f16_wide", 128, False, 0, False),
    ("f16_wide", 128, True, 128, False),
    ("bf16", 128, True, 64, True),
    ("bf16_wide", 128, False, 128, False),
    *((name, *layout) for name in ("tf32", "e4m3", "s8") for layout in ((128, True, 0, True), (32, True, 64, True))),
    ("e5m2", 64, True, 128, True),
    ("e4m3_e5m2", 128, True, 128, True),
    ("e4m3_f16", 128, True, 128, True),
    ("u8_s8", 0, True, 32, True),
]


def _tiles(name: str, make, a: str, b: str, columns: int) -> tuple[np.ndarray, ...]:
    rng = operands.stream(name)
    found = []
    for kind, rows in ((a, 64), (b, columns)):
        values = make(rng, kind, rows, _DEPTH * _PER_WORD.get(kind, 1) // 4)
        found.append(values.view(np.int8))
    return tuple(found)


def _wgmma(product: str, kernel: str, mode: str) -> Family:
    a, b, d, columns, count = _PRODUCTS[product]
    make = operands.small_integers if mode == "integers" else operands.fractions
    depth = _DEPTH * _PER_WORD.get(a, 1) // 4
    # wgmma adds up 8-bit floats with about 14 bits, mma.sync does not
    rule = exact if mode == "integers" else _tolerance(d, depth, 2.0**-14 if a in ("e4m3", "e5m2") else None)
    inputs = partial(_tiles, make=make, a=a, b=b, columns=columns)
    return Family(
        f"wgmma {kernel} {mode}", "wgmma.cu", kernel, inputs, (count, 128), np.uint32, rule, HOPPER, block=128
    )


def _cpp(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _wgmma_families() -> list[Family]:
    found = [
        _wgmma(product, f"product<{', '.join(map(_cpp, (product, *layout)))}>", "integers")
        for product, *layout in _LAYOUTS
    ]
    found += [
        _wgmma(product, f"product<{product}, 128, true, 128, true>", "random")
        for product in ("f16", "bf16", "tf32", "e4m3", "e5m2", "s8")
    ]
    found += [_wgmma(kind, f"product_rs<{kind}_rs>", "integers") for kind in ("f16", "bf16", "tf32", "e4m3", "s8")]
    return found


MATRICES = [*_mma_families(), *_wgmma_families()]
