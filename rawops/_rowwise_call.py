"""The row-wise kernels: their instances, and the plan of a call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rawops._rowwise_layout import (
    CLUSTERS,
    GROUPS,
    LOADS,
    MAX_COLS,
    ROW_FIELDS,
    TEAMS,
    Dense,
    Rows,
    View,
    access_of,
    array_fields,
    parts_of,
    rows_of,
    team_of,
    width_of,
)
from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.call import Op, keep_apart
from rawops._runtime.kernel import Function, KernelSpec, ParamStruct
from rawops._runtime.workspace import workspace_of_stream

DTYPES = ("float16", "bfloat16", "float32", "float64")
WIDTHS = (1, 2, 4, 8)  # columns that a thread moves as one
ACCESSES = (0, *WIDTHS)  # 0: one, with any stride
ACTIVATIONS = {"gelu": 2, "gelu_tanh": 3, "silu": 4, "swiglu": 5}  # Activation in epilogue.cuh
_ACTIVATION_THREADS = 256
_MANY_GROUPS = 2**14  # an SM
_LEAST_THREADS = 128  # of a block, see RowTeam in rows.cuh


def spec_of(name: str, fields: dict, choices: dict, smoke: tuple[tuple, ...]) -> KernelSpec:
    """Declare the kernel rowwise_<name>, whose parameters are the rows' own and then `fields`."""
    return KernelSpec(
        source=f"rowwise_{name}.cu",
        entry=f"rawops::rowwise_{name}",
        template=tuple(choices),
        choices=choices,
        smoke=[dict(zip(choices, values, strict=True)) for values in smoke],
        needs=lambda cluster=1, **_: 90 if cluster > 1 else 80,
        params=ParamStruct(f"{name.title()}Params", **ROW_FIELDS, **fields),
    )


_TEAM = {"access": ACCESSES, "groups": GROUPS, "team": TEAMS, "cluster": CLUSTERS}
NORM = spec_of(
    "norm",
    {
        **array_fields("x", "residual", "out", "residual_out"),
        **dict.fromkeys(("weight", "bias"), "pointer"),
        **dict.fromkeys(("weight_col", "bias_col", "whole_weights"), "int64"),
        "eps": "float64",
    },
    {"dtype": DTYPES, "weight_dtype": DTYPES, **_TEAM, "centered": (False, True), "residual": (False, True)},
    (
        ("float16", "float16", 8, 4, 128, 1, False, False),
        ("bfloat16", "float32", 8, 8, 512, 1, False, True),
        ("bfloat16", "bfloat16", 8, 0, 512, 1, True, True),
        ("float32", "float32", 4, 2, 8, 1, True, True),
        ("float16", "float16", 1, 4, 512, 1, True, True),
        ("float64", "float64", 2, 1, 32, 1, False, False),
        ("float16", "float16", 8, 8, 512, 8, False, True),
        ("bfloat16", "float32", 8, 4, 256, 2, True, True),
    ),
)
SOFTMAX = spec_of(
    "softmax",
    array_fields("x", "out"),
    {"dtype": DTYPES, **_TEAM},
    (
        ("float16", 8, 4, 128, 1),
        ("bfloat16", 8, 0, 512, 1),
        ("float32", 0, 4, 32, 1),
        ("float64", 2, 2, 8, 1),
        ("bfloat16", 8, 8, 512, 8),
        ("float32", 4, 4, 256, 2),
    ),
)
SUM = spec_of(
    "sum",
    {**array_fields("x", "out"), "span": "int32"},
    {"dtype": DTYPES, "out_dtype": DTYPES, "access": ACCESSES, "team": TEAMS, "cluster": CLUSTERS},
    (
        ("float16", "float32", 8, 512, 1),
        ("float32", "bfloat16", 0, 8, 1),
        ("float64", "float64", 2, 32, 1),
        ("bfloat16", "float32", 8, 512, 8),
        ("float32", "float32", 4, 256, 2),
    ),
)
ACTIVATION = spec_of(
    "activation",
    {**array_fields("x", "out"), "columns": "int64", "up": "int64"},
    {"dtype": DTYPES, "access": ACCESSES, "groups": (1, 2), "activation": tuple(ACTIVATIONS.values())},
    (("float16", 8, 2, 5), ("bfloat16", 8, 1, 4), ("float32", 4, 2, 2), ("float32", 0, 1, 3), ("float64", 2, 2, 5)),
)


@dataclass(frozen=True)
class Plan:
    """A call whose arguments were checked.

    Attributes
    ----------
    apart : tuple
        Pairs of operands that must not share memory.
    results : tuple
        For each operand a `Dense` if it is a result that the call did not give, else None.
    launch : callable or None
        Takes the addresses of all operands; None where there is nothing to compute.
    """

    device: object
    apart: tuple
    results: tuple[Dense | None, ...]
    launch: Callable[[list], None] | None


def run(op: Op, function: str, operands: tuple, options: tuple, check: Callable | None = None) -> tuple:
    """Make a call; return its operands, with what it allocated, as the kind of array that came in.

    `check` looks at the values of the arrays, which have passed all other checks.
    """
    found = op.resolve(function, operands, options)
    if found is None:
        taken, give, device = op.take(function, operands)
        with device.current():
            made = run(op, function, taken, options, check)
            return tuple(given if x is own else give(x) for given, own, x in zip(operands, taken, made, strict=True))
    plan, addresses = found
    if check is not None:
        check(*operands)
    made = list(operands)
    for i, dense in enumerate(plan.results):
        if dense is not None:
            made[i] = plan.device.empty(dense.shape, dense.dtype)
            addresses[i] = plan.device.pointer(made[i])
    if plan.launch is not None:
        plan.launch(addresses)
    return tuple(made)


def launch_of(
    kernel: Function,
    grid: int,
    threads: int,
    spec: KernelSpec,
    rows: Rows,
    places: dict[str, int],
    parts: int = 1,
    **numbers,
) -> Callable[[list], None]:
    """Return what launches a kernel on the addresses of operands.

    Parameters
    ----------
    places : dict
        The number of the operand by the name of the pointer; those of the arrays that `rows` has come first, in order.
    parts : int
        How often the grid is there, for parts of rows.
    **numbers
        Further fields.
    """
    fields = spec.params.fields
    numbers |= rows.numbers(tuple(places)[: len(rows.views)])
    pointers = {name: f"{name}_base" if f"{name}_base" in fields else name for name in places}
    static = [numbers.get(field, 0) for field in fields]
    slots = [(fields.index(pointers[name]), operand, i) for i, (name, operand) in enumerate(places.items())]

    def launch(addresses: list) -> None:
        for offsets in rows.outer:
            values = static.copy()
            for slot, operand, i in slots:
                address = addresses[operand]
                values[slot] = address and address + (offsets[i] if i < len(offsets) else 0)
            kernel.launch((grid, parts, 1), (threads, 1, 1), (spec.params.pack(*values),), early=True)

    return launch


def team_launch(device, spec: KernelSpec, rows: Rows, cols: int, access: int, places: dict, choices: dict, **numbers):
    """Return what launches a kernel that has a team for each row."""
    itemsize = rows.views[0].itemsize
    count = rows.count * len(rows.outer)  # of all launches: strides must not change the order of sums
    few = 1 if "groups" in spec.choices else LOADS  # what holds no groups has some on their way at a time
    team = team_of(-(-cols * itemsize // 16), count, access * itemsize == 16, device, few)
    choices |= {name: value for name, value in team.items() if name in spec.choices}
    kernel = spec.kernel(device, **choices, access=access)
    threads = max(team["team"], _LEAST_THREADS)
    grid = -(-rows.count * team["team"] // threads) * team["cluster"]
    return launch_of(kernel, grid, threads, spec, rows, places, cols=cols, **numbers)


# --- checks ---------------------------------------------------------------------------------------------------------


def check_input(function: str, name: str, x) -> str:
    """Check the dtype and the axes of an array; return its dtype."""
    dtype = checks.dtype(function, name, x, DTYPES)
    if x.ndim == 0:
        checks.fail(ValueError, function, name, "have at least one axis", "an array without axes")
    if x.shape[-1] > MAX_COLS:
        checks.fail(ValueError, function, name, f"have at most {MAX_COLS} columns", x.shape[-1])
    return dtype


def result_of(function: str, name: str, x, shape: tuple, *allowed: str) -> Dense | None:
    """Check an array that a result goes to; return what to allocate where there is none, of the first dtype."""
    if x is None:
        return Dense(tuple(shape), dtypes.numpy(allowed[0]))
    checks.dtype(function, name, x, tuple(dict.fromkeys(allowed)))
    checks.shape(function, name, x, shape)
    checks.output(function, name, x)
    return None


# --- plans ----------------------------------------------------------------------------------------------------------

_X, _WEIGHT, _BIAS, _RESIDUAL, _OUT, _RESIDUAL_OUT = range(6)


def _prepare_norm(function: str, operands: tuple, addresses: list, options: tuple) -> Plan:
    """Check and plan rmsnorm or layernorm; the options are eps and whether the mean goes."""
    x, weight, bias, residual, out, residual_out = operands
    eps, centered = options
    device = arrays.device_of(function, x=x)
    dtype = check_input(function, "x", x)
    of_weights = dtype if weight is None and bias is None else dtypes.name((bias if weight is None else weight).dtype)
    for name, own in (("weight", weight), ("bias", bias)):
        if own is not None:
            checks.dtype(function, name, own, tuple(dict.fromkeys((dtype, "float32" if dtype != "float64" else dtype))))
            checks.dtype(function, name, own, (of_weights,), "weight and bias have one dtype.")
            checks.shape(function, name, own, x.shape[-1:], "One entry a column of x.")
    if residual is not None:
        checks.dtype(function, "residual", residual, (dtype,), "residual has x's dtype.")
        checks.shape(function, "residual", residual, x.shape)
    if residual_out is not None:
        if residual is None:
            checks.fail(ValueError, function, "residual_out", "be None without residual", "an array")
        result_of(function, "residual_out", residual_out, x.shape, dtype)
    result = result_of(function, "out", out, x.shape, dtype)
    apart = keep_apart(operands, _OUT, (_WEIGHT, _BIAS, _RESIDUAL_OUT))
    for written in (_OUT, _RESIDUAL_OUT):
        apart += keep_apart(operands, written, (_X,), same=_X) + keep_apart(operands, written, (_RESIDUAL,), _RESIDUAL)
    apart += keep_apart(operands, _RESIDUAL_OUT, (_WEIGHT, _BIAS))
    results = (None, None, None, None, result, None)
    if x.size == 0:
        return Plan(device, apart, results, None)
    named = (x, residual, result or out, residual_out)
    order = (_X, _RESIDUAL, _OUT, _RESIDUAL_OUT)
    names = ("x", "residual", "out", "residual_out")
    rows = rows_of(named, [addresses[i] for i in order], x.shape[:-1])
    given = {"weight": _WEIGHT, "bias": _BIAS}
    vectors = rows_of((weight, bias), [addresses[i] for i in given.values()], ())
    whole = access_of(vectors.views, x.dtype.itemsize) * x.dtype.itemsize == 16
    access = access_of(rows.views if whole else (*rows.views, *vectors.views), x.dtype.itemsize, x.shape[-1])
    columns = {"whole_weights": int(whole)} | {
        f"{name}_col": view.col for name, view in zip(given, vectors.views, strict=True) if view is not None
    }
    choices = {"dtype": dtype, "weight_dtype": of_weights, "centered": centered, "residual": residual is not None}
    places = {**dict(zip(names, order, strict=True)), **given}
    launch = team_launch(device, NORM, rows, x.shape[-1], access, places, choices, eps=eps, **columns)
    return Plan(device, apart, results, launch)


def _prepare_softmax(function: str, operands: tuple, addresses: list, options: tuple) -> Plan:
    x, out = operands
    device = arrays.device_of(function, x=x)
    dtype = check_input(function, "x", x)
    result = result_of(function, "out", out, x.shape, dtype)
    apart = keep_apart(operands, 1, (0,), same=0)
    if x.size == 0:
        return Plan(device, apart, (None, result), None)
    rows = rows_of((x, result or out), addresses, x.shape[:-1])
    access = access_of(rows.views, x.dtype.itemsize, x.shape[-1])
    places = {"x": 0, "out": 1}
    launch = team_launch(device, SOFTMAX, rows, x.shape[-1], access, places, {"dtype": dtype})
    return Plan(device, apart, (None, result), launch)


def _prepare_sum(function: str, operands: tuple, addresses: list, options: tuple) -> Plan:
    """Check and plan row_sum; the option is the name of the result's dtype, or None."""
    x, out = operands
    device = arrays.device_of(function, x=x)
    dtype = check_input(function, "x", x)
    allowed = (dtype,) if dtype == "float64" else (dtype, "float32")
    if options[0] is not None:
        allowed = (checks.named_dtype(function, "out_dtype", options[0], allowed, f" for {dtype} inputs"),)
    result = result_of(function, "out", out, x.shape[:-1], *allowed)
    target = result or out
    apart = keep_apart(operands, 1, (0,))
    if 0 in target.shape:
        return Plan(device, apart, (None, result), None)
    rows = rows_of((x, target), addresses, x.shape[:-1])
    access = access_of(rows.views[:1], x.dtype.itemsize, x.shape[-1])
    launch = _sum_launch(device, rows, x.shape[-1], access, dtype, dtypes.name(target.dtype))
    return Plan(device, apart, (None, result), launch)


def _sum_launch(device, rows: Rows, cols: int, access: int, dtype: str, out_dtype: str) -> Callable[[list], None]:
    """Return what sums rows: few long ones in parts, whose sums a second launch adds up."""
    per_group = 16 // rows.views[0].itemsize
    groups = -(-cols // per_group)
    wanted = parts_of(groups, rows.count * len(rows.outer), device)
    if wanted == 1:
        choices, places = {"dtype": dtype, "out_dtype": out_dtype}, {"x": 0, "out": 1}
        return team_launch(device, SUM, rows, cols, access, places, choices, span=cols)
    span = -(-groups // wanted) * per_group
    parts = -(-cols // span)
    held = np.dtype("float64" if dtype == "float64" else "float32")
    dense = Dense((*rows.extents, -(-parts // 4) * 4), held)
    view = View(held.itemsize, 16, tuple(s // held.itemsize for s in dense.strides[:-1]), 1)
    size = math.prod(dense.shape) * held.itemsize
    offsets = [i * size for i in range(len(rows.outer))]
    xs, outs = zip(*rows.outer, strict=True)
    to_parts = Rows(tuple(zip(xs, offsets, strict=True)), rows.extents, (rows.views[0], view))
    of_parts = Rows(tuple(zip(offsets, outs, strict=True)), rows.extents, (view, rows.views[1]))
    team = TEAMS[-1]
    kernel = SUM.kernel(device, dtype=dtype, out_dtype=held.name, access=access, team=team, cluster=1)
    sum_parts = launch_of(kernel, rows.count, team, SUM, to_parts, {"x": 0, "out": 2}, parts, cols=cols, span=span)
    choices, width = {"dtype": held.name, "out_dtype": out_dtype}, width_of((view,), held.itemsize, parts)
    add_up = team_launch(device, SUM, of_parts, parts, width, {"x": 2, "out": 1}, choices, span=parts)
    floats = size * len(offsets) // 4

    def launch(addresses: list) -> None:
        workspace = workspace_of_stream(device)
        addresses = [*addresses, workspace.partial(device, floats)]
        sum_parts(addresses)
        add_up(addresses)

    return launch


def _prepare_activation(function: str, operands: tuple, addresses: list, options: tuple) -> Plan:
    """Check and plan gelu, silu or swiglu; the option is the activation."""
    x, out = operands
    (activation,) = options
    gated = activation == "swiglu"
    name = "gate_up" if gated else "x"
    device = arrays.device_of(function, x=x)
    dtype = checks.dtype(function, name, x, DTYPES)
    shape = x.shape
    if gated:
        check_input(function, name, x)
        if shape[-1] % 2:
            checks.fail(ValueError, function, name, "have an even number of columns, gate and up", shape[-1])
        shape = (*shape[:-1], shape[-1] // 2)
    result = result_of(function, "out", out, shape, dtype)
    apart = keep_apart(operands, 1, (0,), same=None if gated else 0)
    if 0 in shape:
        return Plan(device, apart, (None, result), None)
    target = result or out
    if not gated and all(_is_dense(own) for own in (x, target)):
        x, target, shape = Dense((x.size,), x.dtype), Dense((x.size,), x.dtype), (x.size,)
    rows = rows_of((x, target), addresses, shape[:-1])
    up = shape[-1] * rows.views[0].col if gated else 0
    access = access_of(rows.views, x.dtype.itemsize, up, shape[-1])
    groups = rows.count * -(-shape[-1] // (16 // x.dtype.itemsize))
    # Two groups a thread where many threads have long to compute: more loads on their way at a time.
    is_long = activation == "gelu" or (x.dtype.itemsize > 2 and not gated)
    each = 2 if is_long and groups >= device.sm_count * _MANY_GROUPS else 1
    kernel = ACTIVATION.kernel(device, dtype=dtype, access=access, groups=each, activation=ACTIVATIONS[activation])
    grid, places = -(-groups // (_ACTIVATION_THREADS * each)), {"x": 0, "out": 1}
    launch = launch_of(kernel, grid, _ACTIVATION_THREADS, ACTIVATION, rows, places, columns=shape[-1], up=up)
    return Plan(device, apart, (None, result), launch)


def _is_dense(x) -> bool:
    return isinstance(x, Dense) or x.flags.c_contiguous


OPS = {
    "norm": Op(("x", "weight", "bias", "residual", "out", "residual_out"), 1, _prepare_norm, ("out", "residual_out")),
    "softmax": Op(("x", "out"), 1, _prepare_softmax),
    "row_sum": Op(("x", "out"), 1, _prepare_sum),
    "activation": Op(("x", "out"), 1, _prepare_activation),
    "swiglu": Op(("gate_up", "out"), 1, _prepare_activation),
}
