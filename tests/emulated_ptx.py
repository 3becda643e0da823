"""Single PTX instructions run on arrays, and exact references for what they compute."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from rawops._emulator import GlobalMemory, emulate_launch, parse


def execute(text, outputs, *inputs, target="sm_90a"):
    """Run PTX text on arrays, one element a thread.

    `text` names its operands $0, $1, ... for the outputs and then the inputs; `outputs` are dtypes.
    """
    n = len(inputs[0])
    kinds = [f"b{8 * np.dtype(d).itemsize}" for d in outputs] + [f"b{8 * a.itemsize}" for a in inputs]
    arrays = [np.zeros(n, d) for d in outputs] + [np.ascontiguousarray(a) for a in inputs]
    lines = [".reg .b32 %t<3>;", ".reg .b64 %a<99>;", ".reg .pred %p<9>;"]
    lines += [f".reg .{kind} %v{i};" for i, kind in enumerate(kinds)]
    lines += [
        "mov.u32 %t0, %tid.x;", "mov.u32 %t1, %ctaid.x;", "mad.lo.u32 %t0, %t1, 32, %t0;",
    ]  # fmt: skip
    for i, kind in enumerate(kinds):
        size = int(kind[1:]) // 8
        lines += [f"ld.param.u64 %a{i}, [k_{i}];", f"mad.wide.u32 %a{i}, %t0, {size}, %a{i};"]
        if i >= len(outputs):
            lines.append(f"ld.global.{kind} %v{i}, [%a{i}];")
    for i in reversed(range(len(kinds))):
        text = text.replace(f"${i}", f"%v{i}")
    lines.append(text)
    lines += [f"st.global.{kinds[i]} [%a{i}], %v{i};" for i in range(len(outputs))]
    parameters = ", ".join(f".param .u64 k_{i}" for i in range(len(kinds)))
    ptx = f".version 8.5\n.target {target}\n.address_size 64\n.visible .entry k({parameters})\n{{\n"
    ptx += "\n".join(lines) + "\nret;\n}\n"
    memory = GlobalMemory()
    padded = [np.resize(a, -(-n // 32) * 32) for a in arrays]
    params = b"".join(np.uint64(memory.map(a)).tobytes() for a in padded)
    emulate_launch(parse(ptx, "k"), (-(-n // 32), 1, 1), (32, 1, 1), params, memory=memory)
    results = [a[:n] for a in padded[: len(outputs)]]
    return results[0] if len(results) == 1 else results


FORMATS = {np.float16: (11, -14), np.float32: (24, -126), np.float64: (53, -1022)}

MODES = ["rn", "rz", "rm", "rp"]


def rounded(exact: Fraction, dtype, mode: str):
    """An exact non-zero number rounded to a float type."""
    precision, smallest = FORMATS[dtype]
    magnitude = abs(exact)
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1, smallest)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    ulp = Fraction(2) ** (exponent - precision + 1)
    units, rest = divmod(magnitude, ulp)
    up = {
        "rn": rest * 2 > ulp or (rest * 2 == ulp and units % 2),
        "rz": False,
        "rm": exact < 0 and rest > 0,
        "rp": exact > 0 and rest > 0,
    }[mode]
    value = (units + bool(up)) * ulp
    largest = Fraction(float(np.finfo(dtype).max))
    if value > largest:
        toward_zero = mode == "rz" or (mode == "rm" and exact > 0) or (mode == "rp" and exact < 0)
        value = largest if toward_zero else None
    magnitude = float("inf") if value is None else float(value)
    return dtype(magnitude if exact > 0 else -magnitude)


def same_bits(actual, expected):
    unsigned = f"u{actual.itemsize}"
    np.testing.assert_array_equal(actual.view(unsigned), np.asarray(expected, actual.dtype).view(unsigned))


def hard_floats(rng, dtype, n):
    """Floats of all magnitudes, many with short mantissas, so that ties and cancellations happen."""
    unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64}[np.dtype(dtype).itemsize]
    values = rng.integers(0, np.iinfo(unsigned).max, n, dtype=unsigned, endpoint=True).view(dtype)
    near = (rng.integers(-64, 64, n) * 2.0 ** rng.integers(-8, 9, n)).astype(dtype)
    low, high = (-24, 12) if dtype == np.float16 else (-140, 100) if dtype == np.float32 else (-1060, 900)
    with np.errstate(over="ignore"):
        wide = (rng.integers(-4096, 4096, n) * 2.0 ** rng.integers(low, high, n)).astype(dtype)
    choice = rng.integers(0, 3, n)
    values = np.where(choice == 0, values, np.where(choice == 1, near, wide))
    return np.where(np.isfinite(values), values, dtype(1.5))


def hard_integers(rng, dtype, n=600):
    limits = np.iinfo(dtype)
    special = np.array([0, 1, limits.max, limits.min, limits.max // 2, 7], dtype)
    values = rng.integers(limits.min, limits.max, n, dtype=dtype, endpoint=True)
    return np.where(rng.random(n) < 0.3, rng.choice(special, n), values)
