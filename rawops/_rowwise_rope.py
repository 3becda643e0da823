"""Rotary positions: the kernel's instances and the plan of a call."""

from __future__ import annotations

import math

import numpy as np

from rawops._rowwise_call import DTYPES, WIDTHS, Plan, launch_of, result_of, spec_of
from rawops._rowwise_layout import array_fields, rows_of, width_of
from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.call import Op, keep_apart

MAX_PAIRS = 128
_THREADS = 128
_STEPS = ("q_step", "k_step", "q_out_step", "k_out_step")

ROPE = spec_of(
    "rope",
    {
        **array_fields("q", "k", "q_out", "k_out"),
        **dict.fromkeys(_STEPS, "int64"),
        **array_fields("positions"),
        **dict.fromkeys(("cos", "sin"), "pointer"),
        **dict.fromkeys(("cos_step", "cos_col", "sin_step", "sin_col", "table_rows"), "int64"),
        **dict.fromkeys(("wide_positions", "q_heads", "k_heads", "half", "copied"), "int32"),
        **{f"turns{pair}": "float64" for pair in range(MAX_PAIRS)},
    },
    {"dtype": DTYPES, "table_dtype": DTYPES, "width": WIDTHS, "interleaved": (False, True)},
    (
        ("float16", "float32", 8, False),
        ("bfloat16", "bfloat16", 8, True),
        ("float32", "float32", 1, True),
        ("float64", "float64", 2, False),
    ),
)
_Q, _POSITIONS, _K, _COS, _SIN, _Q_OUT, _K_OUT = range(7)


def _prepare(function: str, operands: tuple, addresses: list, options: tuple) -> Plan:
    """Check and plan rope; the options are theta, interleaved and rotary_dim."""
    q, positions, k, cos, sin, q_out, k_out = operands
    theta, interleaved, rotary_dim = options
    device = arrays.device_of(function, q=q)
    dtype = checks.dtype(function, "q", q, DTYPES)
    if q.ndim < 2:
        checks.fail(ValueError, function, "q", "have shape (..., num_heads, head_dim)", tuple(q.shape))
    *lead, _, head_dim = q.shape
    if k is not None:
        checks.dtype(function, "k", k, (dtype,), "q and k have one dtype; convert one of them.")
        if (*k.shape[:-2], k.shape[-1]) != (*lead, head_dim) or k.ndim != q.ndim:
            rule = f"have shape {(*lead, 'num_kv_heads', head_dim)}, as q is {tuple(q.shape)}"
            checks.fail(ValueError, function, "k", rule.replace("'", ""), tuple(k.shape))
    elif k_out is not None:
        checks.fail(ValueError, function, "k_out", "be None without k", "an array")
    pairs = _check_pairs(function, rotary_dim, head_dim, cos, sin)
    checks.dtype(function, "positions", positions, ("int32", "int64"))
    trailing = tuple(lead[len(lead) - positions.ndim :])
    if positions.ndim > len(lead) or any(p not in (1, n) for p, n in zip(positions.shape, trailing, strict=True)):
        checks.fail(ValueError, function, "positions", f"broadcast to {tuple(lead)}", tuple(positions.shape))
    results = [None] * 7
    results[_Q_OUT] = result_of(function, "q_out", q_out, q.shape, dtype)
    results[_K_OUT] = None if k is None else result_of(function, "k_out", k_out, k.shape, dtype)
    apart = keep_apart(operands, _Q_OUT, (_K, _POSITIONS, _COS, _SIN, _K_OUT)) + keep_apart(
        operands, _Q_OUT, (_Q,), same=_Q
    )
    apart += keep_apart(operands, _K_OUT, (_Q, _POSITIONS, _COS, _SIN)) + keep_apart(operands, _K_OUT, (_K,), same=_K)
    heads = [0 if x is None else x.shape[-2] for x in (q, k)]
    if 0 in (*lead, head_dim, sum(heads)):
        return Plan(device, apart, tuple(results), None)
    turned = (q, k, results[_Q_OUT] or q_out, results[_K_OUT] or k_out)
    module = np if device.is_emulated else arrays.cupy_or_raise(function)
    places = {"q": _Q, "k": _K, "q_out": _Q_OUT, "k_out": _K_OUT, "positions": _POSITIONS, "cos": _COS, "sin": _SIN}
    named = (*turned, module.broadcast_to(positions, tuple(lead)))
    order = list(places.values())[:5]
    rows = rows_of(named, [addresses[i] for i in order], tuple(lead))
    steps = [0 if x is None else x.strides[-2] // x.dtype.itemsize for x in turned]
    width = width_of(rows.views[:4], q.dtype.itemsize, pairs, *(s for s, x in zip(steps, turned, strict=True)))
    tables: dict[str, int] = {}
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            step, col = (s // table.dtype.itemsize for s in table.strides)
            tables |= {f"{name}_step": step, f"{name}_col": col, "table_rows": table.shape[0]}
    turns = {f"turns{i}": theta ** (-i / pairs) / math.tau for i in range(pairs)} if cos is None else {}
    kernel = ROPE.kernel(
        device,
        dtype=dtype,
        table_dtype="float32" if cos is None else dtypes.name(cos.dtype),
        width=width,
        interleaved=interleaved,
    )
    numbers = {
        **dict(zip(_STEPS, steps, strict=True)),
        **dict(zip(("q_heads", "k_heads"), heads, strict=True)),
        **{"cols": head_dim, "half": pairs, "copied": head_dim - 2 * pairs},
        **{"wide_positions": int(positions.dtype.itemsize == 8)},
    }
    launch = launch_of(kernel, rows.count, _THREADS, ROPE, rows, places, **numbers, **tables, **turns)
    return Plan(device, apart, tuple(results), launch)


def _check_pairs(function: str, rotary_dim: int | None, head_dim: int, cos, sin) -> int:
    """Check what is turned, and the tables if there are some; return the number of pairs."""
    if (cos is None) != (sin is None):
        checks.fail(TypeError, function, "sin" if sin is None else "cos", "be an array", "None", "Give both or none.")
    if rotary_dim is None:
        rotary_dim = head_dim if cos is None else 2 * (cos.shape[-1] if cos.ndim else 0)
        if cos is None and head_dim % 2:
            checks.fail(ValueError, function, "q", "have an even head_dim without rotary_dim", head_dim)
        if cos is not None and rotary_dim > head_dim:
            hint = "Of tables whose second half repeats the first, give the first."
            rule = f"have a column for each pair, at most {head_dim // 2}"
            checks.fail(ValueError, function, "cos", rule, f"shape {tuple(cos.shape)}", hint)
    most = min(head_dim, 2 * MAX_PAIRS)
    checks.int_range(function, "rotary_dim", rotary_dim, 0, most)
    if rotary_dim % 2:
        checks.fail(ValueError, function, "rotary_dim", "be even", rotary_dim)
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            checks.dtype(function, name, table, DTYPES if name == "cos" else (dtypes.name(cos.dtype),))
            if table.ndim != 2 or table.shape[1] != rotary_dim // 2 or table.shape[0] != cos.shape[0]:
                rule = f"have shape (positions, {rotary_dim // 2}), half of rotary_dim"
                checks.fail(ValueError, function, name, rule, tuple(table.shape))
    return rotary_dim // 2


OP = Op(("q", "positions", "k", "cos", "sin", "q_out", "k_out"), 2, _prepare, ("q_out", "k_out"))
