"""``python -m rawops explain lora``: where x @ a comes from, which tile, in how many waves, and why."""

from __future__ import annotations

import argparse
import math
import re

from rawops import _gemm_sm90, _gemm_sm90_config
from rawops._gemm_explain import LAYOUTS, MAX_SIZE, explain_hopper
from rawops._gemm_operands import Operand
from rawops._gemm_sm90_low_rank import LowRank
from rawops._runtime import checks, dtypes
from rawops._runtime.explain import Explanation, add_roofline
from rawops._runtime.paper import PaperArray, PaperDevice
from rawops.lora import lora_linear

_SIZES = {"M": "rows of x", "K": "columns of x", "N": "columns of c", "r": "rank of a and b"}
_RIDES = "The columns of a ride along the main loop: x is read once, in one launch."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, text in _SIZES.items():
        parser.add_argument(name, type=int, help=text)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32", "float64"), default="bfloat16")
    parser.add_argument("--layout", **LAYOUTS)


def explain(options: argparse.Namespace, device: PaperDevice) -> Explanation:
    M, K, N, r = (checks.int_range("explain", name, getattr(options, name), 0, MAX_SIZE) for name in _SIZES)
    dtype = dtypes.numpy(options.dtype)
    x, c = (
        device.array(shape, dtype) if order == "n" else device.array(shape[::-1], dtype).T
        for shape, order in zip(((M, K), (K, N)), options.layout, strict=True)
    )
    a, b = device.array((K, r), dtype), device.array((r, N), dtype)
    with device.current():
        lora_linear(x, c, a, b)
    title = f"lora {M} x {K} x {N}, rank {r}, {options.dtype}, {options.layout.upper()}"
    found = Explanation(f"{title}; {device.board.name} ({device.arch}, {device.sm_count} SMs)")
    kernels = [launch.kernel for launch in device.launches]
    if any("lora_sm90" in kernel for kernel in kernels):
        out = device.array((M, N), dtype)
        described = {name: _operand(array) for name, array in (("a", x), ("b", c), ("out", out))}
        low_rank = LowRank(_operand(a), _operand(b), r)
        problem = _gemm_sm90.describe_problem(described, M, N, K, (1, 1, 1), 0, low_rank)
        candidates = _gemm_sm90_config.candidates(problem, device.sm_count, device.max_shared_bytes)
        found.why.append(
            _RIDES
            if candidates[0].rides
            else "x @ a is made by a launch of its own beside the first tiles: riding along would cost every tile more."
        )
        explain_hopper(found, problem, candidates, device)
    elif r == 0:
        found.why.append("Rank 0 is the plain product: see explain gemm.")
    elif dtype.itemsize > 2:
        found.why.append("No tensor core takes this type without rounding: three products, of which the last adds up.")
    elif kernels:
        makes_y = any(re.match("rawops::(gemm_(?!repack|reduce)|gemv)", kernel) for kernel in kernels)
        found.why.append("x @ a is made by a launch of its own." if makes_y else _RIDES)
    size = sum(math.prod(array.shape) for array in (x, c, a, b)) * dtype.itemsize + M * N * dtype.itemsize
    add_roofline(found, device.board, options.dtype, 2.0 * M * (K * N + r * (K + N)), size)
    return found


def _operand(x: PaperArray) -> Operand:
    row, col = (s // x.itemsize for s in x.strides)
    return Operand(x.dtype.name, x.itemsize, 0, row, col, [0, 0, 0])
