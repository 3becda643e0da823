"""Grouped GEMM, the experts of a mixture, beside a loop of torch.mm and torch._grouped_mm."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import numpy as np
import torch
from common import Case, cupy, main

import rawops

# (groups, rows in all, N, K); the first lines are the quick subset. The sizes are skewed: expert i is chosen in
# proportion to 1 / (i + 1).
SHAPES = [
    (8, 4096, 4096, 4096),
    (128, 512, 4096, 4096),
    (8, 512, 4096, 4096),
    (8, 16384, 4096, 4096),
    (32, 512, 4096, 4096),
    (32, 4096, 4096, 4096),
    (32, 16384, 4096, 4096),
    (128, 4096, 4096, 4096),
    (128, 16384, 4096, 4096),
    (8, 4096, 28672, 4096),  # gate and up of Mixtral 8x7B
    (256, 32768, 4096, 7168),  # of DeepSeek-V3
]
QUICK = 2


class Torch:
    """The rivals, on the memory of the CuPy arrays and CuPy's current stream. They know the sizes on the host."""

    def __init__(self, offsets: np.ndarray, arrays: tuple) -> None:
        self.bounds = [*itertools.pairwise(offsets.tolist())]
        self.a, self.b, ends, self.out = (self._view(x) for x in arrays)
        self.ends = ends[1:]

    @staticmethod
    def _view(x):
        return torch.from_dlpack(x) if x.dtype.kind == "i" else torch.from_dlpack(x.view("uint16")).view(torch.bfloat16)

    def _on_stream(self):
        return torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr))

    def loop(self, *_) -> None:
        with self._on_stream():
            for g, (begin, end) in enumerate(self.bounds):
                if begin < end:
                    torch.mm(self.a[begin:end], self.b[g], out=self.out[begin:end])

    def grouped(self, *_) -> None:
        with self._on_stream():
            torch._grouped_mm(self.a, self.b, offs=self.ends)


def cases(quick: bool) -> Iterator[Case]:
    """bfloat16, weights stored (groups, N, K), as linear layers have them."""
    rng = np.random.default_rng(1)
    for groups, rows, n, k in SHAPES[: QUICK if quick else None]:
        odds = 1 / np.arange(1.0, groups + 1)
        sizes = rng.permutation(rng.multinomial(rows, odds / odds.sum()))
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        a, b = random((rows, k)), random((groups, n, k)).swapaxes(1, 2)
        arrays = a, b, cupy.asarray(offsets), cupy.empty((rows, n), a.dtype)
        size = 2 * (rows * (n + k) + np.count_nonzero(sizes) * n * k)
        rivals = Torch(offsets, arrays)
        yield Case(
            f"{groups} groups, {rows} x {n} x {k}",
            "bfloat16",
            2.0 * rows * n * k,
            size,
            [arrays],
            run,
            {"loop of torch.mm": rivals.loop, "torch._grouped_mm": rivals.grouped},
        )


def run(a, b, offsets, out) -> None:
    """Our call, in the argument order that all share."""
    rawops.grouped_gemm(a, b, offsets, out=out)


def random(shape: tuple[int, ...]):
    """Standard normal, made a group at a time to spare memory."""
    x = cupy.empty(shape, "bfloat16")
    for part in x if len(shape) > 2 else [x]:
        part[...] = cupy.random.standard_normal(part.shape, dtype="float32").astype(x.dtype)
    return x


if __name__ == "__main__":
    sys.exit(main("gemm_grouped", cases))
