"""What `copy` and `pickle` make of the public classes, on the GPU or in the emulator."""

import copy
import pickle

import numpy as np
import pytest

import rawops

COPIES = [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
FILL = 'extern "C" __global__ void fill(float* x, int n) { for (int i = 0; i < n; ++i) x[i] = N; }\n'


def half(device, *shape):
    return device.put(np.random.default_rng(len(shape)).integers(-2, 3, shape).astype(np.float16))


def diagonal(device):
    i, ones = device.put(np.arange(8, dtype=np.int32)), device.put(np.ones(8, np.float32))
    return rawops.SparseMatrix.from_coo(ones, i, i, (8, 8))


def filled(device, kernel):
    x = device.put(np.zeros(3, np.float32))
    kernel(1, 1, (x, 3))
    return x


def attend(device, op):
    return op(half(device, 1, 16, 2, 64), half(device, 1, 24, 2, 64), half(device, 1, 24, 2, 64))


# How one is made, and a call of it.
BY_ARGUMENTS = {
    "Gemm": (
        lambda device: rawops.Gemm(16, 64, 32, "float16", bias=half(device, 64), activation="relu"),
        lambda device, op: op(half(device, 16, 32), half(device, 32, 64)),
    ),
    "FlashAttention": (lambda device: rawops.FlashAttention(causal=True, window=(8, 0)), attend),
    "Kernel": (lambda device: rawops.Kernel(FILL, "fill", options=["-DN=7"]), filled),
}
NOT_COPIED = {
    "BSRMatrix": lambda device: diagonal(device).to_bsr(4),
    "FusedLoRA": lambda device: rawops.FusedLoRA(half(device, 64, 32), half(device, 64, 8), half(device, 8, 32)),
    "LSMR": lambda device: rawops.LSMR(diagonal(device)),
    "MultiLoRA": lambda device: rawops.MultiLoRA(half(device, 64, 32), max_loras=2, max_rank=16),
    "PagedKVCache": lambda device: rawops.PagedKVCache(num_pages=4, page_size=16, num_kv_heads=1, head_dim=64),
    "SparseMatrix": diagonal,
}
# Results, and what is made of the user's own objects or lives for a block: as Python has it.
OTHERS = {"DistributedOperator", "LSMRResult", "LinearOperator", "emulate"}


def test_every_public_class_is_here():
    public = {name for name in rawops.__all__ if isinstance(getattr(rawops, name), type)}
    public -= {name for name in public if issubclass(getattr(rawops, name), Exception)}
    assert public == {*BY_ARGUMENTS, *NOT_COPIED, *OTHERS}


@pytest.mark.parametrize("name", BY_ARGUMENTS)
def test_a_copy_is_made_by_the_same_arguments(device, name):
    """Before and after the calls that give the original its kernels and workspaces."""
    make, call = BY_ARGUMENTS[name]
    original = make(device)
    early = [copied(original) for copied in COPIES]
    expected = device.get(call(device, original))
    for other in (*early, *(copied(original) for copied in COPIES)):
        assert type(other) is type(original) and other is not original
        np.testing.assert_array_equal(device.get(call(device, other)), expected)


def test_a_subclass_is_made_by_its_own_arguments():
    for copied in COPIES:
        assert copied(Relu(16)).M == 16


class Relu(rawops.Gemm):
    """A plan with a signature of its own."""

    def __init__(self, M: int) -> None:
        super().__init__(M, 64, 32, "float16", activation="relu")
        self.M = M


@pytest.mark.parametrize("name", NOT_COPIED)
def test_what_stands_for_memory_of_a_device_says_so(device, name):
    original = NOT_COPIED[name](device)
    for copied in COPIES:
        with pytest.raises(
            TypeError, match=rf"^{name}: cannot be copied or pickled, .* memory of a device\. \w+ .*\.$"
        ):
            copied(original)
