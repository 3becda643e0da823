"""Fused LoRA beside the kernels it replaces, and beside the plain products that are its lower bound."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import ml_dtypes
import numpy as np
from common import Case, cupy, main

import rawops
from rawops.testing import cublas
from rawops.testing.timing import rotations

try:
    import torch
    from triton_lora import fused_expand
except ImportError:
    torch = None

# (M, K, N, r, dtype); the first is the shape of Llama-3-8B's gate_up_proj for a batch of 64.
SHAPES = [
    (64, 4096, 28672, 8, "float16"),
    (64, 4096, 28672, 16, "float16"),
    (64, 4096, 28672, 64, "float16"),
    (64, 4096, 28672, 16, "bfloat16"),
    *((m, 4096, 28672, rank, name) for m, name in ((16, "bfloat16"), (1, "float16")) for rank in (8, 16, 64)),
    *((m, 4096, n, rank, "float16") for m in (2048, 8192) for n in (28672, 4096) for rank in (16, 64)),
    (2048, 4096, 28672, 128, "bfloat16"),
]
QUICK = 2
# (M, K, N, r, adapters in the batch, their order); dtype bfloat16.
MULTI = [
    *((64, 4096, 28672, 16, adapters, "shuffled") for adapters in (1, 8, 32, 64)),
    (4096, 4096, 28672, 16, 16, "in runs"),
    (4096, 4096, 28672, 16, 16, "shuffled"),
]
# (M, K, N, r); dtype bfloat16.
BACKWARD = [(4096, 4096, 4096, 16), (4096, 4096, 4096, 64)]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def cases(quick: bool) -> Iterator[Case]:
    """One adapter with weights row-major, an adapter for each row, the gradients."""
    yield from one_adapter(SHAPES[: QUICK if quick else None])
    if not quick:
        yield from many_adapters()
        yield from gradients()


# --- one adapter ----------------------------------------------------------------------------------------------------


def one_adapter(shapes: list[tuple]) -> Iterator[Case]:
    for m, k, n, rank, name in shapes:
        dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
        size = (m * k + k * n + k * rank + rank * n + m * n) * dtype.itemsize
        inputs = [arguments(m, k, n, rank, dtype) for _ in range(rotations(size))]
        intermediate = (cupy.empty((m, rank), dtype), cupy.empty((m, n), dtype), cupy.empty((m, n), dtype))
        rivals = {"serial": functools.partial(serial, *intermediate), "X C, cuBLAS": main_product, "X C, rawops": plain}
        if torch is not None:
            rivals["torch"] = TorchSerial(inputs)
            rivals["Triton"] = Triton(intermediate[0], inputs)
        flops = 2.0 * m * (k * n + k * rank + rank * n)
        yield Case(f"{m} x {k} x {n}, r {rank}", name, flops, size, inputs, fused, rivals)


def arguments(m: int, k: int, n: int, rank: int, dtype: np.dtype) -> tuple:
    """x, c, a, b and the output, scaled so that both products have entries of the same size."""
    shapes = ((m, k), 1.0), ((k, n), k**-0.5), ((k, rank), k**-0.5), ((rank, n), rank**-0.5)
    return *(random(shape, dtype, scale) for shape, scale in shapes), cupy.empty((m, n), dtype)


def random(shape: tuple, dtype: np.dtype, scale: float = 1.0):
    return (cupy.random.standard_normal(shape, dtype="float32") * scale).astype(dtype)


def fused(x, c, a, b, out) -> None:
    """One call of ours."""
    rawops.lora_linear(x, c, a, b, out=out)


def serial(y, z, w, x, c, a, b, out) -> None:
    """Y = X A, Z = Y B, W = X C by cuBLAS, O = W + Z by CuPy."""
    cublas.gemm(x, a, y)
    cublas.gemm(y, b, z)
    cublas.gemm(x, c, w)
    cupy.add(w, z, out=out)


def main_product(x, c, a, b, out) -> None:
    """X C alone: what a fused kernel can at best be as fast as."""
    cublas.gemm(x, c, out)


def plain(x, c, a, b, out) -> None:
    """The same by our own kernel."""
    rawops.gemm(x, c, out=out)


class Torch:
    """Tensors on the memory of CuPy arrays, and CuPy's current stream as torch's."""

    def __init__(self, inputs: list[tuple]) -> None:
        self._views = {id(x): self.view(x) for arguments in inputs for x in arguments}

    @staticmethod
    def view(x):
        return torch.from_dlpack(x.view("uint16")).view(getattr(torch, x.dtype.name))

    def of(self, *arrays) -> list:
        return [self._views[id(x)] for x in arrays]

    @staticmethod
    def stream():
        return torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr))


class TorchSerial(Torch):
    """The four kernels in torch."""

    def __call__(self, *arrays) -> None:
        x, c, a, b, out = self.of(*arrays)
        with self.stream():
            torch.add(torch.mm(x, c), torch.mm(torch.mm(x, a), b), out=out)


class Triton(Torch):
    """Y = X A by cuBLAS, then the fused kernel of the seed."""

    def __init__(self, y, inputs: list[tuple]) -> None:
        super().__init__([(y,), *inputs])
        self._y = y
        x, c, _, b, out = self.of(*inputs[0])
        fused_expand(x, c, *self.of(y), b, out)  # tunes itself, which a capture would not allow
        torch.cuda.synchronize()

    def __call__(self, x, c, a, b, out) -> None:
        cublas.gemm(x, a, self._y)
        with self.stream():
            fused_expand(*self.of(x, c, self._y, b, out))


# --- an adapter for each row ----------------------------------------------------------------------------------------


def many_adapters() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for m, k, n, rank, adapters, order in MULTI:
        used = adapters * rank * (k + n)
        size = (m * k + k * n + m * n + used) * BFLOAT16.itemsize
        indices = np.arange(m) * adapters // m
        if order == "shuffled":
            rng.shuffle(indices)
        inputs = [multi_arguments(m, k, n, rank, adapters, indices) for _ in range(rotations(size))]
        rivals = {"adapter by adapter": by_adapter, "X C, rawops": multi_plain}
        yield Case(
            f"{m} x {k} x {n}, r {rank}, {adapters} adapters {order}",
            BFLOAT16.name,
            2.0 * m * (k * n + k * rank + rank * n),
            size,
            inputs,
            multi,
            rivals,
        )


def multi_arguments(m: int, k: int, n: int, rank: int, adapters: int, indices: np.ndarray) -> tuple:
    """The layer, its factors with the rows that take them, x, indices and the output."""
    c = random((n, k), BFLOAT16, k**-0.5).T
    op, groups = rawops.MultiLoRA(c, adapters, rank), []
    for slot in range(adapters):
        a, b = random((k, rank), BFLOAT16, k**-0.5), random((rank, n), BFLOAT16, rank**-0.5)
        op.load(slot, a, b)
        rows = cupy.asarray(np.flatnonzero(indices == slot))
        groups.append((rows, a, b, cupy.empty((rows.size, rank), BFLOAT16), cupy.empty((rows.size, n), BFLOAT16)))
    x, out = random((m, k), BFLOAT16), cupy.empty((m, n), BFLOAT16)
    return op, groups, x, cupy.asarray(indices.astype(np.int32)), out


def multi(op, groups, x, indices, out) -> None:
    op(x, indices, out=out)


def by_adapter(op, groups, x, indices, out) -> None:
    """X C by cuBLAS, then for each adapter its rows: gathered, multiplied twice, added back."""
    cublas.gemm(x, op.c, out)
    for rows, a, b, y, z in groups:
        cublas.gemm(x[rows], a, y)
        cublas.gemm(y, b, z)
        out[rows] += z


def multi_plain(op, groups, x, indices, out) -> None:
    rawops.gemm(x, op.c, out=out)


# --- gradients ------------------------------------------------------------------------------------------------------


def gradients() -> Iterator[Case]:
    for m, k, n, rank in BACKWARD:
        size = (2 * m * (k + n) + k * n + 4 * rank * (k + n)) * BFLOAT16.itemsize
        inputs = [backward_arguments(m, k, n, rank) for _ in range(rotations(size))]
        rivals = {"cuBLAS and CuPy": serial_backward}
        if torch is not None:
            rivals["torch"] = TorchBackward([arrays[:-1] for arrays in inputs])
        rivals["dO C^T, rawops"] = backward_plain
        flops = 2.0 * m * (k * n + 3 * rank * (k + n))
        shape = f"backward {m} x {k} x {n}, r {rank}"
        yield Case(shape, BFLOAT16.name, flops, size, inputs, backward, rivals)


def backward_arguments(m: int, k: int, n: int, rank: int) -> tuple:
    """dO, x, c, a, b, two intermediates, and one array that holds dX, dA and dB, then these as parts of it."""
    shapes = ((m, n), 1.0), ((m, k), 1.0), ((k, n), k**-0.5), ((k, rank), k**-0.5), ((rank, n), rank**-0.5)
    operands = [random(shape, BFLOAT16, scale) for shape, scale in shapes]
    out = cupy.empty(m * k + k * rank + rank * n, BFLOAT16)
    parts = cupy.split(out, [m * k, m * k + k * rank])
    results = [part.reshape(shape) for part, shape in zip(parts, ((m, k), (k, rank), (rank, n)), strict=True)]
    return (*operands, cupy.empty((m, rank), BFLOAT16), cupy.empty((m, rank), BFLOAT16), *results, out)


def backward(dout, x, c, a, b, dy, y, dx, da, db, out) -> None:
    rawops.lora_linear_backward(dout, x, c, a, b, out=(dx, da, db))


def serial_backward(dout, x, c, a, b, dy, y, dx, da, db, out) -> None:
    """The products one after the other by cuBLAS, the sum by CuPy."""
    cublas.gemm(dout, b.T, dy)
    low = cublas.gemm(dy, a.T, cupy.empty_like(dx))
    cublas.gemm(dout, c.T, dx)
    cupy.add(dx, low, out=dx)
    cublas.gemm(x.T, dy, da)
    cublas.gemm(x, a, y)
    cublas.gemm(y.T, dout, db)


def backward_plain(dout, x, c, a, b, dy, y, dx, da, db, out) -> None:
    rawops.gemm(dout, c.T, out=dx)


class TorchBackward(Torch):
    """The same chain in torch, whose addmm adds the low-rank part of dX in place."""

    def __call__(self, *arrays) -> None:
        dout, x, c, a, b, dy, y, dx, da, db = self.of(*arrays[:-1])
        with self.stream():
            torch.mm(dout, b.T, out=dy)
            torch.mm(dout, c.T, out=dx)
            dx.addmm_(dy, a.T)
            torch.mm(x.T, dy, out=da)
            torch.mm(x, a, out=y)
            torch.mm(y.T, dout, out=db)


if __name__ == "__main__":
    sys.exit(main("lora", cases))
