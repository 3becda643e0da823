"""Normalisation, softmax, gates, rotary positions and sums beside torch's eager kernels.

Bytes are each input and each output once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench_gemm import Torch, random, torch
from common import Case, cupy, main

import rawops
from rawops._runtime import dtypes
from rawops.testing.timing import rotations

if torch is None:
    sys.exit("This benchmark needs torch, which it measures beside.")

# (op, rows, columns, dtype); the first lines are the quick subset.
SHAPES = [
    ("rmsnorm", 8192, 4096, "bfloat16"),
    ("rmsnorm + residual", 8192, 4096, "bfloat16"),
    ("softmax", 4096, 32768, "bfloat16"),
    ("swiglu", 8192, 28672, "bfloat16"),
    ("rmsnorm", 64, 4096, "bfloat16"),
    ("rmsnorm", 65536, 128, "bfloat16"),
    ("rmsnorm", 8192, 8192, "float32"),
    ("rmsnorm", 8192, 5120, "float16"),
    ("rmsnorm", 8192, 4097, "bfloat16"),
    ("rmsnorm", 4096, 65536, "bfloat16"),
    ("rmsnorm + residual", 64, 4096, "bfloat16"),
    ("layernorm", 8192, 4096, "float16"),
    ("layernorm", 8192, 1024, "float32"),
    ("softmax", 32768, 1024, "float16"),
    ("softmax", 512, 151936, "float32"),
    ("softmax", 64, 128256, "bfloat16"),
    ("swiglu", 64, 28672, "bfloat16"),
    ("gelu", 8192, 16384, "float16"),
    ("gelu", 8192, 16384, "float32"),
    ("silu", 8192, 16384, "bfloat16"),
    ("row_sum", 8192, 8192, "float32"),
    ("row_sum", 65536, 256, "bfloat16"),
    ("row_sum", 8, 4194304, "float32"),
]
QUICK = 4
MOST_SETS = 16
ROPES = [(8192, 32, 8, 128, "bfloat16"), (64, 32, 8, 128, "bfloat16")]  # tokens, heads, KV heads, head_dim


def cases(quick: bool) -> Iterator[Case]:
    """Each op and shape, then rotary positions; the quick ones take ten seconds."""
    for shape in SHAPES[:QUICK] if quick else SHAPES:
        yield case(*shape)
    for shape in ROPES[: int(quick) or None]:
        yield rope(*shape)


def case(op: str, rows: int, cols: int, dtype: str) -> Case:
    """One op on rows x cols."""
    width = {"swiglu": cols // 2, "row_sum": 1}.get(op, cols)
    has_residual = op.endswith("residual")
    traffic = (rows * (cols + width) + has_residual * 2 * rows * cols) * dtypes.itemsize(dtype)
    sets = []
    for _ in range(min(rotations(traffic), MOST_SETS)):
        inputs = [random((rows, cols), dtypes.numpy(dtype))]
        if "norm" in op:
            inputs.append(random((1, cols), dtypes.numpy(dtype))[0])
        if has_residual:
            inputs += [random((rows, cols), dtypes.numpy(dtype)), cupy.empty_like(inputs[0])]
        out = cupy.empty((rows, width), inputs[0].dtype)
        sets.append((*inputs, out[:, 0] if op == "row_sum" else out))
    ours, theirs = CALLS[op]
    return Case(f"{op}, {rows} x {cols}", dtype, 0, traffic, sets, ours, {"torch": Torch(sets, Given(theirs))})


class Given:
    """A function of torch that makes its result, which is compared with ours where it is not timed."""

    def __init__(self, function) -> None:
        self._function = function

    def __call__(self, *arguments) -> None:
        made = self._function(*arguments[:-1])
        if not torch.cuda.is_current_stream_capturing():
            arguments[-1].copy_(made)


def gate(x):
    gates, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gates) * up


CALLS = {
    "rmsnorm": (
        lambda x, w, out: rawops.rmsnorm(x, w, out=out),
        lambda x, w: torch.nn.functional.rms_norm(x, w.shape, w, 1e-6),
    ),
    "rmsnorm + residual": (
        lambda x, w, r, s, out: rawops.rmsnorm(x, w, residual=r, residual_out=s, out=out),
        lambda x, w, r, s: torch.nn.functional.rms_norm(torch.add(x, r, out=s), w.shape, w, 1e-6),
    ),
    "layernorm": (
        lambda x, w, out: rawops.layernorm(x, w, out=out),
        lambda x, w: torch.nn.functional.layer_norm(x, w.shape, w),
    ),
    "softmax": (lambda x, out: rawops.softmax(x, out=out), lambda x: torch.softmax(x, -1)),
    "swiglu": (lambda x, out: rawops.swiglu(x, out=out), gate),
    "gelu": (lambda x, out: rawops.gelu(x, out=out), lambda x: torch.nn.functional.gelu(x)),
    "silu": (lambda x, out: rawops.silu(x, out=out), lambda x: torch.nn.functional.silu(x)),
    "row_sum": (lambda x, out: rawops.row_sum(x, out=out), lambda x: torch.sum(x, -1)),
}


def rope(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> Case:
    """Rotary positions of q and k, of which out has both; torch has its cosines and sines ready."""
    kind, both = dtypes.numpy(dtype), heads + kv_heads
    traffic = 2 * tokens * both * head_dim * kind.itemsize + 8 * tokens
    angles = cupy.arange(tokens)[:, None] * 10000.0 ** (-cupy.arange(head_dim // 2) * 2 / head_dim)
    cos, sin = (turn(cupy.concatenate([angles, angles], 1))[:, None].astype("float32") for turn in (cupy.cos, cupy.sin))
    sets = []
    for _ in range(min(rotations(traffic), MOST_SETS)):
        qk = random((tokens, both * head_dim), kind).reshape(tokens, both, head_dim)
        sets.append((qk, cupy.arange(tokens), cos, sin, cupy.empty_like(qk)))

    def ours(qk, positions, cos, sin, out):
        q_out, k_out = out[:, :heads], out[:, heads:]
        rawops.rope(qk[:, :heads], qk[:, heads:], positions, q_out=q_out, k_out=k_out)

    def theirs(qk, positions, cos, sin):
        first, second = qk.chunk(2, -1)
        return (qk * cos + torch.cat([-second, first], -1) * sin).to(qk.dtype)

    shape = f"rope, {tokens} x ({heads} + {kv_heads}) x {head_dim}"
    return Case(shape, dtype, 0, traffic, sets, ours, {"torch": Torch(sets, Given(theirs))})


if __name__ == "__main__":
    sys.exit(main("rowwise", cases))
