"""Every op on a machine with several GPUs: it runs on the device of its arrays, whichever is CuPy's current one."""

import dataclasses
import itertools
import warnings

import numpy as np
import pytest
from device_calls import CALLS, CHECKED, Place

import rawops
from rawops import config
from rawops.testing import has_gpu

pytestmark = pytest.mark.gpu

if has_gpu():
    import cupy as cp

    _COUNT = cp.cuda.runtime.getDeviceCount()
else:
    _COUNT = 0

_SPIN = rawops.Kernel("__global__ void spin(long long n) { for (auto t = clock64(); clock64() - t < n;) {} }", "spin")
_CYCLES = 200_000_000  # about a tenth of a second


@pytest.fixture(autouse=True)
def two_gpus():
    if _COUNT < 2:
        pytest.skip("needs two GPUs")
    before = cp.cuda.runtime.getDevice()
    with warnings.catch_warnings():
        warnings.simplefilter("error", cp._util.PerformanceWarning)  # a kernel of CuPy on memory of another device
        yield
    assert cp.cuda.runtime.getDevice() == before


def place(ordinal: int, large: bool = True) -> Place:
    def put(array):
        with cp.cuda.Device(ordinal):
            return cp.asarray(array)

    return Place(put, lambda: cp.cuda.Device(ordinal), large)


def host(x) -> np.ndarray:
    with x.device:
        return cp.asnumpy(x if x.itemsize > 1 else x.view("uint8"))


def run(call: str, ordinal: int, current: int, large: bool) -> list[np.ndarray]:
    """Make a call on one device while another is the current one, which it leaves as it is; return the results."""
    with cp.cuda.Device(current):
        made = CALLS[call](place(ordinal, large))
        assert cp.cuda.runtime.getDevice() == current
    assert [x.device.id for x in made] == [ordinal] * len(made)
    return [host(x) for x in made]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_the_current_device_makes_no_difference(call, large):
    """The same bits as where the device of the arrays is the current one, and on the same device."""
    expected = run(call, 0, 0, large)
    for ordinal, current in ((1, 0), (0, 1), (1, 1)):
        made = run(call, ordinal, current, large)
        for i, (x, y) in enumerate(zip(made, expected, strict=True)):
            np.testing.assert_array_equal(x, y, err_msg=f"result {i} on device {ordinal}, current {current}")


@pytest.mark.parametrize("call", CHECKED)
def test_values_are_checked_where_the_arrays_are(call, monkeypatch):
    settings = dataclasses.replace(config.current(), check=True)
    monkeypatch.setattr(config, "current", lambda: settings)
    run(call, 1, 0, False)


def test_torch_gets_its_tensors_back_where_they_were():
    torch = pytest.importorskip("torch")
    x = torch.randn(64, 64, device="cuda:1", dtype=torch.bfloat16)
    for made in (rawops.softmax(x), rawops.gemm(x, x), rawops.flash_attention(*[x[None, :, None]] * 3)):
        assert made.device == x.device
        assert torch.isfinite(made).all()
    assert torch.equal(rawops.gemm(x, x), rawops.gemm(x.to("cuda:0"), x.to("cuda:0")).to("cuda:1"))


def test_launches_go_to_the_current_stream_of_the_arrays_device():
    """A stream of device 1 is busy: what is launched there waits, and what another of its streams copies does not."""
    x = place(1).reals(64, 64, dtype=np.float32)
    out, aside = place(1).reals(64, 64, dtype=np.float32), place(1).reals(64, 64, dtype=np.float32)
    expected = host(rawops.softmax(x))
    with cp.cuda.Device(1):
        busy, other = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    with cp.cuda.Device(1), busy:
        _SPIN(1, 1, (_CYCLES,))
        with cp.cuda.Device(0):
            rawops.softmax(x, out=out)
            assert not busy.done
    with cp.cuda.Device(1), other:
        with cp.cuda.Device(0):
            rawops.softmax(x, out=aside)
        other.synchronize()
        assert not busy.done
    busy.synchronize()
    assert (host(out) == expected).all() and (host(aside) == expected).all()


# --- arrays of two devices ------------------------------------------------------------------------------------------


_MIXED = {
    "gemm": lambda a, b: [
        lambda: rawops.gemm(a.reals(32, 32), b.reals(32, 32)),
        lambda: rawops.gemm(a.reals(32, 32), a.reals(32, 32), bias=b.reals(32)),
        lambda: rawops.gemm(a.reals(32, 32), a.reals(32, 32), alpha=b.put(np.array(1, np.float32))),
        lambda: rawops.gemm(a.reals(32, 32), a.reals(32, 32), out=b.reals(32, 32)),
        lambda: rawops.grouped_gemm(a.reals(32, 32), a.reals(1, 32, 32), b.ints([0, 32])),
        lambda: rawops.Gemm(8, 32, 32, "float16", bias=b.reals(32))(a.reals(8, 32), a.reals(32, 32)),
    ],
    "lora": lambda a, b: [
        lambda: rawops.lora_linear(a.reals(8, 32), a.reals(32, 32), b.reals(32, 4), a.reals(4, 32)),
        lambda: rawops.FusedLoRA(a.reals(32, 32), a.reals(32, 4), b.reals(4, 32)),
        lambda: rawops.MultiLoRA(a.reals(32, 32), 2, 4).load(0, b.reals(32, 4), b.reals(4, 32)),
        lambda: rawops.MultiLoRA(a.reals(32, 32), 2, 4)(b.reals(8, 32), b.ints([0] * 8)),
        lambda: rawops.MultiLoRA(a.reals(32, 32), 2, 4)(b.reals(2, 4, 64)[..., ::2], b.ints([[0] * 4] * 2)),
        lambda: rawops.lora_linear_backward(
            b.reals(8, 32), a.reals(8, 32), a.reals(32, 32), a.reals(32, 4), a.reals(4, 32)
        ),
    ],
    "attention": lambda a, b: [
        lambda: rawops.flash_attention(a.reals(1, 8, 2, 32), b.reals(1, 8, 2, 32), a.reals(1, 8, 2, 32)),
        lambda: rawops.flash_attention(
            *[a.reals(1, 8, 2, 32)] * 3, dropout_p=0.5, dropout_seed=b.put(np.array([1], np.int64))
        ),
        lambda: rawops.merge_attention_states(
            *[a.reals(1, 8, 2, 32), a.reals(1, 2, 8, dtype=np.float32)],
            *[b.reals(1, 8, 2, 32), b.reals(1, 2, 8, dtype=np.float32)],
        ),
        lambda: rawops.flash_attention_backward(
            *[a.reals(1, 8, 2, 32)] * 5, b.reals(1, 2, 8, dtype=np.float32), deterministic=True
        ),
    ],
    "rowwise": lambda a, b: [
        lambda: rawops.rmsnorm(a.reals(4, 32), b.reals(32)),
        lambda: rawops.softmax(a.reals(4, 32), out=b.reals(4, 32)),
        lambda: rawops.rope(a.reals(4, 2, 32), a.reals(4, 2, 32), b.ints(range(4))),
    ],
    "paged": lambda a, b: [
        lambda: rawops.append_paged_kv(
            *[a.reals(1, 2, 32)] * 2, b.reals(3, 2, 4, 2, 32), b.ints([[0, 1]]), b.ints([2])
        ),
        lambda: rawops.paged_attention(a.reals(1, 4, 32), a.reals(3, 2, 4, 2, 32), b.ints([[0, 1]]), a.ints([5])),
        lambda: _cache(a).append(b.reals(1, 2, 32), b.reals(1, 2, 32), [0]),
        lambda: _cache(a).decode(b.reals(1, 2, 32), [0]),
        lambda: _cache(a).prefill(b.reals(1, 2, 32), [0], [0, 1]),
    ],
    "sparse": lambda a, b: [
        lambda: rawops.SparseMatrix.from_csr(a.reals(1, dtype="f4"), b.ints([0]), a.ints([0, 1]), (1, 1)),
        lambda: rawops.SparseMatrix.from_coo(a.reals(1, dtype="f4"), a.ints([0]), b.ints([0]), (1, 1)),
        lambda: _matrix(a) @ b.reals(2, dtype="f4"),
        lambda: _matrix(a) @ b.reals(2, 3, dtype="f4"),
        lambda: _matrix(a).matvec(a.reals(2, dtype="f4"), out=b.reals(2, dtype="f4")),
        lambda: _matrix(a).matvec(a.reals(2, dtype="f4"), alpha=b.put(np.array(1.0))),
        lambda: _matrix(a).update_values(b.reals(2, dtype="f4")),
        lambda: _matrix(a).to_bsr(4) @ b.reals(2, 3, dtype="f4"),
    ],
    "lsmr": lambda a, b: [
        lambda: rawops.lsmr(_matrix(a), b.reals(2, dtype="f4")),
        lambda: rawops.lsmr(a.reals(4, 2, dtype="f4"), a.reals(4, dtype="f4"), x0=b.reals(2, dtype="f4")),
        lambda: rawops.LSMR(_matrix(a)).solve_many(b.reals(2, 3, dtype="f4")),
        lambda: rawops.lsmr(
            rawops.LinearOperator((4, 4), lambda x: b.reals(4, dtype="f4"), lambda x: x, "f4"), a.reals(4, dtype="f4")
        ),
    ],
}


def _cache(p: Place):
    with p.within():
        cache = rawops.PagedKVCache(4, 4, 2, 32)
    cache.add_sequence()
    return cache


def _matrix(p: Place):
    return rawops.SparseMatrix.from_csr(p.reals(2, dtype="f4"), p.ints([0, 1]), p.ints([0, 1, 2]), (2, 2))


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("family", _MIXED)
def test_arrays_of_two_devices_raise(family, current):
    """Whichever of them is the current one, and once more when the other calls have left their plans behind."""
    with cp.cuda.Device(current):
        for first, second in itertools.permutations((0, 1)):
            for i, call in enumerate(_MIXED[family](place(first, False), place(second, False))):
                with pytest.raises(ValueError, match="device") as caught:
                    call()
                text = str(caught.value)
                assert "CUDA device 0" in text and "CUDA device 1" in text, f"{family} {i}: {text}"
                assert cp.cuda.runtime.getDevice() == current
