"""The runtime on a real GPU: streams, other devices, threads, graphs, foreign arrays, launch and start-up time."""

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from processes import python

import rawops
from rawops._runtime import arrays

pytestmark = pytest.mark.gpu

KERNELS = Path(__file__).parent / "kernels"
TEXT = """
__global__ void spin(long long cycles) {
  for (long long start = clock64(); clock64() - start < cycles;) {}
}
__global__ void add(const float* x, float* y, float value, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + value;
}
"""
SPIN = 200_000_000  # clock cycles: about a tenth of a second
N = 1 << 16

spin, add = (rawops.Kernel(TEXT, name) for name in ("spin", "add"))


@pytest.fixture
def cp():
    return pytest.importorskip("cupy")


def run_add(x, y, value, n=N) -> None:
    add(-(-n // 256), 256, (x, y, value, n))


# --- streams --------------------------------------------------------------------------------------------------------


def test_a_launch_is_ordered_on_the_current_stream(cp):
    x, y = cp.zeros(N, cp.float32), cp.zeros(N, cp.float32)
    run_add(x, y, 0)
    x.fill(2)  # CuPy, too, compiles what it runs for the first time
    spin(1, 1, (1,))
    with cp.cuda.Stream(non_blocking=True) as stream:
        spin(1, 1, (SPIN,))
        x.fill(3)
        run_add(x, y, 4)
        assert not stream.done  # nothing waited
        got = y.get(stream=stream)
    assert (got == 7).all()


@pytest.mark.parametrize("busy", ["null", "other"])
def test_a_launch_waits_for_no_other_stream(cp, busy):
    x, y = cp.ones(N, cp.float32), cp.zeros(N, cp.float32)
    run_add(x, y, 0)
    spin(1, 1, (1,))
    cp.cuda.Device().synchronize()
    null, other = cp.cuda.Stream.null, cp.cuda.Stream(non_blocking=True)
    first, second = (null, other) if busy == "null" else (other, null)
    with first:
        spin(1, 1, (SPIN,))
    with second:
        run_add(x, y, 1)
        second.synchronize()
    assert not first.done
    first.synchronize()
    assert (y == 2).all()


def test_references_may_be_dropped_right_after_the_launch(cp):
    y = cp.zeros(N, cp.float32)
    run_add(y, y, 0)
    other = cp.cuda.Stream(non_blocking=True)
    with cp.cuda.Stream(non_blocking=True) as stream:
        x = cp.full(N, 5, cp.float32)
        spin(1, 1, (SPIN,))
        run_add(x, y, 1)
        del x
        gc.collect()
    with other:
        for _ in range(8):
            cp.full(N, -1, cp.float32)
    stream.synchronize()
    other.synchronize()
    assert (y == 6).all()


def test_a_thread_whose_first_cuda_call_is_a_launch(cp):
    x, y = cp.ones(N, cp.float32), cp.zeros(N, cp.float32)
    run_add(x, y, 0)  # loaded by this thread
    cp.cuda.Device().synchronize()
    errors = []

    def work():
        try:
            run_add(x, y, 2)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    cp.cuda.Device().synchronize()
    assert not errors
    assert (y == 3).all()


def test_two_threads_with_a_default_stream_each(tmp_path):
    child = f"""
import threading, cupy as cp, rawops
add = rawops.Kernel({TEXT!r}, "add")
spin = rawops.Kernel({TEXT!r}, "spin")
results, start = {{}}, threading.Barrier(2)

def work(i):
    start.wait()
    x = cp.full({N}, i, cp.float32)
    y = cp.zeros({N}, cp.float32)
    for step in range(20):
        spin(1, 1, (100_000,))
        add({N} // 256, 256, (x, y, step, {N}))
        x, y = y, x
    results[i] = x.get()

threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for i in range(2):
    assert (results[i] == i + sum(range(20))).all()
"""
    python(child, cache=tmp_path / "cache", cwd=tmp_path, CUPY_CUDA_PER_THREAD_DEFAULT_STREAM="1")


def test_a_launch_goes_to_the_device_of_the_arrays(cp):
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cp.cuda.Device(1):
        x, y = cp.ones(N, cp.float32), cp.zeros(N, cp.float32)
    run_add(x, y, 1)
    assert cp.cuda.runtime.getDevice() == 0
    assert (y.get() == 2).all()
    with pytest.raises(ValueError, match=r"add: args\[1\] must be on the same device as args\[0\]"):
        run_add(x, cp.zeros(N, cp.float32), 1)


# --- graphs ---------------------------------------------------------------------------------------------------------


def captured(cp, work):
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        work()
        graph = stream.end_capture()
    return graph, stream


def test_a_captured_launch_replays_on_new_contents(cp):
    x, y = cp.zeros(N, cp.float32), cp.zeros(N, cp.float32)
    run_add(x, y, 0)
    graph, stream = captured(cp, lambda: run_add(x, y, 10))
    for value in (1, 2, 3):
        x.fill(value)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert (y == value + 10).all()


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread-local", "relaxed"])
def test_the_first_call_of_a_process_may_be_inside_a_capture(tmp_path, mode):
    child = f"""
import cupy as cp, rawops
x, y = cp.zeros({N}, cp.float32), cp.zeros({N}, cp.float32)
big = cp.zeros(1, cp.float32)
add = rawops.Kernel({TEXT!r}, "add")
shared = rawops.Kernel({(KERNELS / "arguments.cu").read_text()!r}, "last_shared")
stream = cp.cuda.Stream(non_blocking=True)
with stream:
    stream.begin_capture({mode})
    add({N} // 256, 256, (x, y, 10, {N}))
    shared(1, 32, (big, 20000), shared_mem=80000)
    graph = stream.end_capture()
for value in (1, 2):
    x.fill(value)
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert (y == value + 10).all() and big.get()[0] == 33
"""
    python(child, cache=tmp_path / "cache", cwd=tmp_path)


def test_a_graph_survives_a_reload(cp, tmp_path):
    (tmp_path / "k.cu").write_text(TEXT)
    kernel = rawops.Kernel(tmp_path / "k.cu", "add")
    x, y = cp.ones(N, cp.float32), cp.zeros(N, cp.float32)
    kernel(N // 256, 256, (x, y, 1, N))
    graph, stream = captured(cp, lambda: kernel(N // 256, 256, (x, y, 1, N)))
    (tmp_path / "k.cu").write_text(TEXT.replace("x[i] + value", "x[i] - value"))
    assert len(rawops.reload()) == 1
    kernel(N // 256, 256, (x, y, 1, N))
    assert (y == 0).all()
    gc.collect()
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert (y == 2).all()


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kib", [48, 99, 227])
def test_shared_memory_past_48_kib(cp, kib):
    limit = cp.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
    out, kernel = cp.zeros(1, cp.float32), rawops.Kernel(KERNELS / "arguments.cu", "last_shared")
    for size in (kib * 1024, kib * 1024 + 16):
        if size <= limit:
            out.fill(0)
            kernel(1, 32, (out, size // 4), shared_mem=size)
            assert out.get()[0] == 33
    with pytest.raises(ValueError, match=f"shared_mem must be at most {limit} bytes"):
        kernel(1, 32, (out, 1), shared_mem=limit + 1)


def test_arrays_of_numpy_and_cupy_do_not_mix(cp):
    x, y = np.ones(N, np.float32), cp.zeros(N, cp.float32)
    with pytest.raises(TypeError, match=r"add: args\[0\] must be a GPU array, got a NumPy array"):
        run_add(x, y, 1)
    with rawops.emulate(), pytest.raises(ValueError, match="must be on the same device"):
        run_add(x, y, 1)


def plus_one(x, out=None):
    """A small op written as the library's own are."""
    (x, out), give = arrays.take("plus_one", x=x, out=out)
    device = arrays.device_of("plus_one", x=x, out=out)
    if out is None:
        out = device.empty(x.shape, x.dtype)
    add(-(-x.size // 256), 256, (x, out, 1, x.size))
    return give(out)


def test_torch_in_torch_out(cp):
    torch = pytest.importorskip("torch")
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    assert torch.equal(plus_one(x), x + 1)
    assert torch.equal(plus_one(x[100:]), x[100:] + 1)
    out = torch.empty_like(x)
    assert plus_one(x, out=out) is out and torch.equal(out, x + 1)
    assert plus_one(cp.asarray(x), out=out) is out
    add(4, 256, (x, out, 5, 1000))
    assert torch.equal(out, x + 5)
    with pytest.raises(TypeError, match="plus_one: x must be a GPU array that CuPy can view"):
        plus_one(x.cpu())
    with pytest.raises(TypeError, match="plus_one: x must be a GPU array that CuPy can view"):
        plus_one(x.clone().requires_grad_())
    add(4, 256, (x, out, torch.tensor(2.0, device="cuda"), 1000))
    assert torch.equal(out, x + 2)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_the_small_float_types_of_torch_are_views_both_ways(name):
    torch = pytest.importorskip("torch")
    x = torch.arange(12, device="cuda").reshape(3, 4).to(getattr(torch, name)).T
    (y,), give = arrays.take("test", x=x)
    assert y.dtype.name == name and y.data.ptr == x.data_ptr()
    assert y.strides == tuple(stride * x.element_size() for stride in x.stride())
    back = give(y)
    assert back.dtype == x.dtype and back.data_ptr() == x.data_ptr() and back.stride() == x.stride()


def test_the_cuda_array_interface_alone_is_enough(cp):
    class Foreign:
        def __init__(self, array):
            self.array = array

        @property
        def __cuda_array_interface__(self):
            return self.array.__cuda_array_interface__

    x, y = cp.ones(N, cp.float32), cp.zeros(N, cp.float32)
    run_add(Foreign(x), Foreign(y), 1)
    assert (y == 2).all()


# --- time -----------------------------------------------------------------------------------------------------------


def test_the_first_launch_of_a_process_is_fast(tmp_path):
    child = f"""
import time
import cupy as cp, rawops
x = cp.zeros({N}, cp.float32)
cp.cuda.Device().synchronize()
start = time.perf_counter()
rawops.Kernel({TEXT!r}, "add")({N} // 256, 256, (x, x, 1, {N}))
cp.cuda.Device().synchronize()
print(time.perf_counter() - start)
"""
    cold = float(python(child, cache=tmp_path / "cache", cwd=tmp_path).stdout)
    warm = min(float(python(child, cache=tmp_path / "cache", cwd=tmp_path).stdout) for _ in range(3))
    print(f"first launch: {cold * 1e3:.0f} ms compiled, {warm * 1e3:.1f} ms from the cache")
    assert cold < 1
    assert warm < 0.030


def test_a_launch_costs_the_host_little(cp):
    x = cp.zeros(256, cp.float32)
    run_add(x, x, 1, 256)
    device = arrays.device_of("test", x=x)
    function = add._instance.on(device)
    values = (device.pointer(x), device.pointer(x), 1.0, 256)

    def microseconds(call) -> float:
        call()
        cp.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(500):
            call()
        seconds = time.perf_counter() - start
        cp.cuda.Device().synchronize()
        return seconds / 500 * 1e6

    plan = min(microseconds(lambda: function.launch((1, 1, 1), (256, 1, 1), values)) for _ in range(5))
    kernel = min(microseconds(lambda: add(1, 256, (x, x, 1, 256))) for _ in range(5))
    print(f"launch: {plan:.1f} us from a plan, {kernel:.1f} us through Kernel")
    assert plan < 15
    assert kernel < 60
