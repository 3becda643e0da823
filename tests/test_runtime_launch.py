"""`Kernel` launches: arguments, structs, views, shared memory, bad calls. On the GPU or in the emulator."""

import functools
import itertools
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from conftest import Device

import rawops
from rawops._runtime import arrays, checks
from rawops._runtime import device as devices
from rawops._runtime.kernel import KernelSpec, ParamStruct

KERNELS = Path(__file__).parent / "kernels"
ARGUMENTS = KERNELS / "arguments.cu"


# --- scalars --------------------------------------------------------------------------------------------------------

# The parameters of `scalars` after `out`: C++ type, and values that do not fit it.
SCALARS = [
    ("int", [2**31, -(2**31) - 1, 1e10]),
    ("unsigned", [-1, 2**32]),
    ("long long", [2**63, -(2**63) - 1]),
    ("unsigned char", [256, -1]),
    ("bool", []),
    ("float", [1e39, -1e39, 10**400]),
    ("double", [10**400]),
    ("__half", [65520, -1e6]),
    ("__nv_bfloat16", [3.4e38 * 1.01, -1e39]),
    ("Mode", [2**31]),
]
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def scalars():
    return rawops.Kernel(ARGUMENTS, "scalars")


def values_of(device, scalars, values) -> list:
    out = device.put(np.full(10, np.nan))
    scalars(1, 1, (out, *values))
    return device.get(out).tolist()


ONES = [1, 1.0, True, np.bool_(True), np.array(1), np.array(1.0, np.float32), ml_dtypes.bfloat16(1)]
ONES += [kind(1) for kind in (np.int8, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64)]


@pytest.mark.parametrize("one", ONES, ids=lambda one: f"{type(one).__name__}-{getattr(one, 'dtype', '')}")
def test_every_kind_of_number_goes_into_every_parameter(device, scalars, one):
    assert values_of(device, scalars, [one] * 10) == [1] * 10
    if isinstance(one, np.ndarray) and not device.is_emulated:
        assert values_of(device, scalars, [device.put(one)] * 10) == [1] * 10


def test_values_arrive_exactly(device, scalars):
    given = [-(2**31), 2**32 - 1, -(2**53), 255, True, 0.1, 0.1, 0.1, 0.1, 1]
    rounded = [np.float32(0.1), 0.1, np.float16(0.1), ml_dtypes.bfloat16(0.1)]
    assert values_of(device, scalars, given) == [*given[:5], *map(float, rounded), 1]
    infinite = values_of(device, scalars, [0] * 5 + [np.inf, -np.inf, np.float32(np.inf), -np.inf, 0])
    assert infinite[5:9] == [np.inf, -np.inf, np.inf, -np.inf]
    assert np.isnan(values_of(device, scalars, [0] * 5 + [np.nan] * 4 + [0])[5:9]).all()


def test_values_that_do_not_fit_raise(device, scalars):
    out = device.put(np.zeros(10))
    for i, (name, values) in enumerate(SCALARS):
        for value in values:
            given = [1] * 10
            given[i] = value
            with pytest.raises(ValueError, match=rf"scalars: args\[{i + 1}\] must fit the parameter \(.*, got"):
                scalars(1, 1, (out, *given))
        if name in ("int", "unsigned", "long long", "unsigned char", "Mode"):
            for value in (1.5, np.nan, np.inf, np.float32(0.1)):
                given = [1] * 10
                given[i] = value
                with pytest.raises(TypeError, match=rf"args\[{i + 1}\] must be an integer"):
                    scalars(1, 1, (out, *given))
    assert not device.get(out).any()


@pytest.mark.parametrize("value", ["1", None, 1j, [1], np.ones(1), np.ones(2, np.float32)])
def test_what_is_no_number_raises(device, scalars, value):
    value = device.put(value) if isinstance(value, np.ndarray) else value
    with pytest.raises(TypeError, match=r"scalars: args\[1\] must be a number"):
        scalars(1, 1, (device.put(np.zeros(10)), value, *[1] * 9))


def test_a_wrong_number_of_arguments_raises(device, scalars):
    for count in (0, 9, 11):
        with pytest.raises(TypeError, match=rf"scalars: args must have 11 entries, got {count + 1}"):
            scalars(1, 1, (device.put(np.zeros(10)), *[1] * count))


# --- structs --------------------------------------------------------------------------------------------------------

FIELDS = {"a": "pointer", "M": "int32", "stride": "int64", "alpha": "float32", "map": "tensormap", "beta": "float64"}
PARAMS = ParamStruct("Mixed", **FIELDS, last="int32")
MAP = bytes([7]) + bytes(126) + bytes([9])
MIXED = PARAMS.pack(0, -3, 2**40, 0.5, MAP, 0.1, 11)
MIRROR = np.dtype(
    {
        "names": ["a", "M", "stride", "alpha", "map", "beta", "last"],
        "formats": ["u8", "i4", "i8", "f4", "V128", "f8", "i4"],
        "offsets": [0, 8, 16, 24, 64, 192, 200],
        "itemsize": 256,
    }
)


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "array", "array of dimension 0", "array of bytes"])
def test_structs_travel_by_value(device, kind):
    array = np.frombuffer(MIXED, MIRROR)
    struct = {
        "bytes": MIXED,
        "bytearray": bytearray(MIXED),
        "array": array,
        "array of dimension 0": array[0],
        "array of bytes": array.view("V256"),
    }[kind]
    out = device.put(np.zeros(8))
    rawops.Kernel(ARGUMENTS, "mixed")(1, 1, (5, struct, out))
    assert device.get(out).tolist() == [5, -3, 2**40, 0.5, 7, 9, 0.1, 11]


def test_a_struct_of_the_wrong_size_or_kind_raises(device):
    kernel, out = rawops.Kernel(ARGUMENTS, "mixed"), device.put(np.zeros(8))
    for wrong, got in ((MIXED[:-1], "bytes of 255 bytes"), (np.zeros(2, MIRROR), "ndarray of 512"), (3, "3")):
        with pytest.raises(TypeError, match=rf"args\[1\] must be bytes or a size-one .* of 256 bytes .*got {got}"):
            kernel(1, 1, (5, wrong, out))
    swapped = np.zeros(1, [("a", ">f8"), ("rest", "V248")])
    with pytest.raises(TypeError, match=r"args\[1\] must have native byte order"):
        kernel(1, 1, (5, swapped, out))


def test_a_spec_launches_with_packed_values(device, monkeypatch):
    monkeypatch.setattr(KernelSpec, "registry", [])
    spec = KernelSpec(source=str(ARGUMENTS), entry="mixed", template=(), choices={}, smoke=(), params=PARAMS)
    out = device.put(np.zeros(8))
    place = arrays.device_of("test", out=out)
    spec.kernel(place).launch((1, 1, 1), (1, 1, 1), (5, MIXED, place.pointer(out)))
    assert device.get(out)[7] == 11
    assert spec.kernel(place) is spec.kernel(place)


# --- arrays ---------------------------------------------------------------------------------------------------------


SWAPPED = np.dtype(np.float32).newbyteorder()


def test_a_view_passes_its_first_element(device):
    kernel, out = rawops.Kernel(ARGUMENTS, "first_element"), device.put(np.zeros(1, np.float32))
    x = device.put(np.arange(24, dtype=np.float32).reshape(4, 6))
    for view in (x, x[1:], x[:, 1:], x[2, 3:], x.T[1:], x[::2, ::-1], x[1:].reshape(-1), x[3:, 5:]):
        kernel(1, 1, (view, out))
        assert device.get(out)[0] == device.get(view).flat[0]


def test_a_pointer_is_an_address_too(device):
    kernel, out = rawops.Kernel(ARGUMENTS, "first_element"), device.put(np.zeros(1, np.float32))
    x = device.put(np.arange(10, dtype=np.float32))
    place = arrays.device_of("test", x=x)
    for address in (place.pointer(x[3:]), np.uint64(place.pointer(x) + 12)):
        kernel(1, 1, (address, out))
        assert device.get(out)[0] == 3
    for wrong in (1.0, "x", None, -1, 2**64, True):
        with pytest.raises(TypeError, match=r"args\[0\] must be an array or an address"):
            kernel(1, 1, (wrong, out))


def test_a_reference_is_an_array_and_no_number(device):
    kernel = rawops.Kernel("__global__ void f(const int& x, int& out) { out = x + 1; }\n", "f")
    x, out = (device.put(np.full(3, value, np.int32)) for value in (41, 0))
    kernel(1, 1, (x, out))
    assert device.get(out).tolist() == [42, 0, 0]
    for wrong in (41, b"abcd"):
        with pytest.raises(TypeError, match=r"f: args\[0\] must be an array \(the parameter is a reference\), got"):
            kernel(1, 1, (wrong, out))


def test_arrays_of_the_small_float_types_are_arrays(device):
    kernel = rawops.Kernel("__global__ void copy(const short* x, short* y) { *y = *x; }\n", "copy")
    x, y = (device.put(np.full(1, bits, np.int16)) for bits in (12345, 0))
    kernel(1, 1, (x.view(ml_dtypes.bfloat16), y.view(ml_dtypes.bfloat16)))
    assert device.get(y)[0] == 12345


@pytest.mark.parametrize("first_call", [True, False])
def test_arrays_whose_elements_a_kernel_cannot_read_raise(first_call):
    out = np.zeros(2, np.float32)
    kernel = rawops.Kernel(ARGUMENTS, "first_element")
    with rawops.emulate():
        if not first_call:
            kernel(1, 1, (out, out))
        for wrong in (np.full(2, None), np.array(None), np.array([(None,)], [("x", object)])):
            with pytest.raises(TypeError, match=r"first_element: args\[0\] must have numbers for elements, got dtype"):
                kernel(1, 1, (wrong, out))
        for wrong in (np.ones(2, SWAPPED), np.array(1, SWAPPED), np.ones(1, [("x", SWAPPED)])):
            with pytest.raises(TypeError, match=r"first_element: args\[0\] must have native byte order, got dtype"):
                kernel(1, 1, (wrong, out))
    assert out[0] == 0


def test_ops_take_no_swapped_bytes():
    a, swapped = np.ones((4, 4), np.float32), np.ones((4, 4), SWAPPED)
    with rawops.emulate():
        for operands, name in (((swapped, a), "a"), ((a, swapped), "b"), ((a, a, swapped), "c")):
            with pytest.raises(TypeError, match=f"gemm: {name} must have native byte order"):
                rawops.gemm(*operands, beta=len(operands) - 2)
        with pytest.raises(TypeError, match="gemm: out must have native byte order"):
            rawops.gemm(a, a, out=swapped)


class Fast(np.ndarray):
    """As CuPy's arrays, which the fast path of the ops takes: data has an address."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data, device_id=0)


def test_the_fast_path_of_the_ops_leaves_swapped_bytes_to_take(monkeypatch):
    monkeypatch.setattr(arrays, "_native", Fast)
    x = np.ones(2, np.float32).view(Fast)
    assert arrays.signature((x, None, x)) is not None
    assert arrays.signature((x, None, x.astype(SWAPPED))) is None


def test_the_fast_path_of_the_ops_refuses_arrays_between_elements(monkeypatch):
    """When it plans a call; the key of a plan has the strides, and of the address what counts."""
    x, positions = np.ones((8, 8), np.float16).view(Fast), np.zeros(8, np.int32).view(Fast)
    between = Device.between(x)
    with rawops.emulate():
        adapters = rawops.MultiLoRA(x.view(np.ndarray), 1, 4)
        adapters.c = x
        monkeypatch.setattr(arrays, "_native", Fast)
        for name, call in (
            ("b", lambda: rawops.gemm(x, between)),
            ("scale_b", lambda: rawops.gemm(x.view("i1"), x.view("i1").T, scale_b=Device.between(x.astype("f4")))),
            ("group_offsets", lambda: rawops.grouped_gemm(x, x[None], Device.between(positions[:2]))),
            ("b", lambda: rawops.lora_linear(x, x, x, between)),
            ("lora_indices", lambda: adapters(x, Device.between(positions))),
            ("v", lambda: rawops.flash_attention(x[None, None], x[None, None], between[None, None])),
            ("out", lambda: rawops.softmax(x, out=between)),
        ):
            with pytest.raises(ValueError, match=f": {name} must lie on whole elements, got address"):
                call()


def test_objects_are_made_of_no_arrays_between_elements():
    """What copies them would fault as a kernel does; a kernel of one's own takes what it likes."""
    x = np.ones((8, 8), np.float16)
    between = Device.between(x)
    with rawops.emulate():
        adapters = rawops.MultiLoRA(x, 1, 8)
        for name, call in (
            ("c", lambda: rawops.MultiLoRA(between, 1, 8)),
            ("c", lambda: rawops.FusedLoRA(between, x, x)),
            ("a", lambda: adapters.load(0, between, x)),
            ("weight", lambda: rawops.FusedLoRA.from_peft(between, x, x, 1.0)),
            ("bias", lambda: rawops.Gemm(8, 8, 8, "float16", bias=between[0])),
        ):
            with pytest.raises(ValueError, match=f": {name} must lie on whole elements, got address"):
                call()
        text = 'extern "C" __global__ void first(const char* x, char* y) { *y = *x; }\n'
        out = np.zeros(1, np.int8)
        rawops.Kernel(text, "first")(1, 1, (between, out))
        assert out[0] == between.reshape(-1).view(np.int8)[0]


def test_masked_arrays_raise():
    """A kernel would read what the mask hides."""
    masked = np.ma.masked_array(np.ones((4, 4), np.float16), mask=np.eye(4))
    with rawops.emulate(), pytest.raises(TypeError, match=r"rmsnorm: x must have no mask, .* x\.filled"):
        rawops.rmsnorm(masked)


def test_read_only_arrays_of_other_libraries_take_no_results():
    """CuPy forgets what they say of themselves, as JAX's do: what may not change would change."""
    interface = {"shape": (4, 4), "typestr": "<f2", "data": (512, True), "version": 3}
    x, out = np.ones((4, 4), np.float16), types.SimpleNamespace(__cuda_array_interface__=interface)
    positions = np.zeros(4, np.int32)
    with rawops.emulate():
        adapters = rawops.MultiLoRA(x, 1, 4)
        A, q = rawops.SparseMatrix.from_scipy(scipy.sparse.csr_array(np.eye(4, dtype=np.float32))), x[None, :, None]
        zeros = np.zeros((1, 4), np.int32)
        for name, call in (
            ("out", lambda: rawops.gemm(x, x, out=out)),
            ("out", lambda: rawops.lora_linear(x, x, x, x, out=out)),
            ("out", lambda: adapters(x[None], positions[None], out=out)),
            (r"out\[1\]", lambda: rawops.lora_linear_backward(x, x, x, x, x, out=(None, out, None))),
            ("out", lambda: rawops.softmax(x, out=out)),
            ("residual_out", lambda: rawops.rmsnorm(x, residual=x, residual_out=out)),
            ("k_out", lambda: rawops.rope(x[:, None], x[:, None], positions, k_out=out)),
            ("lse", lambda: rawops.FlashAttention()(q, q, q, lse=out)),
            ("dv", lambda: rawops.flash_attention_backward(q, q, q, q, q, q, dv=out)),
            ("out", lambda: A.matvec(x[0].astype(np.float32), out=out)),
            ("pages", lambda: rawops.append_paged_kv(x[:1, None], x[:1, None], out, zeros, zeros[0, :1])),
            ("out", lambda: rawops.paged_attention(x[:1, None], x, zeros, zeros[0, :1], out=out)),
        ):
            with pytest.raises(ValueError, match=f"{name} must be writeable, got a read-only array of "):
                call()


OF_NUMPY = [np.float16, np.int64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


@pytest.mark.parametrize("kind", OF_NUMPY)
def test_numbers_are_scalars_of_any_library(kind):
    assert checks.number("f", "x", kind(3)) == checks.number("f", "x", kind(3), complex) == 3
    assert checks.number("f", "x", np.complex64(3j), complex) == 3j
    for wrong in (np.array(3, kind), "3", np.void(b"abcd"), True, np.bool_(True), ml_dtypes.int4(3)):
        with pytest.raises(TypeError, match="f: x must be a real number, got"):
            checks.number("f", "x", wrong)
        with pytest.raises(TypeError, match="f: x must be a number, got"):
            checks.number("f", "x", wrong, complex)
    with pytest.raises(TypeError, match="f: x must be a real number, got"):
        checks.number("f", "x", np.complex64(3))


def test_numpy_arrays_outside_the_emulator_say_both_ways_out(monkeypatch):
    kernel, x = rawops.Kernel(ARGUMENTS, "first_element"), np.zeros(1, np.float32)
    cupy = types.ModuleType("cupy")
    cupy.ndarray = type("ndarray", (), {})
    cupy.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDevice=int))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(arrays, "_get_current", int)
    with pytest.raises(TypeError, match=r"first_element: args\[0\] must be a GPU array, got a NumPy array") as caught:
        kernel(1, 1, (x, x))
    assert "cupy.asarray" in str(caught.value) and "rawops.emulate()" in str(caught.value)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r'first_element: GPU arrays need CuPy: pip install "rawops\[cu13\]"'):
        kernel(1, 1, (x, x))


def test_in_the_emulator_arrays_are_numpys():
    with (
        rawops.emulate(),
        pytest.raises(TypeError, match=r"softmax: x must be an array, got list\. Pass a NumPy array\."),
    ):
        rawops.softmax([1.0])


@pytest.mark.parametrize(
    "options", [{"check": "no"}, {"seed": -1}, {"seed": 1.5}, {"seed": None}, {"completion": "soon"}]
)
def test_bad_options_of_the_emulator_raise_at_once(options):
    (name,) = options
    with pytest.raises((TypeError, ValueError), match=f"emulate: {name} must be"):
        rawops.emulate(**options)


# --- grids and shared memory ----------------------------------------------------------------------------------------


def test_grids_and_blocks_are_numbers_or_tuples(device):
    kernel = rawops.Kernel(KERNELS / "saxpy.cu", "saxpy<float>")
    for grid, block in (
        (1, 32),
        ((1,), (32,)),
        ([1, 1], [32, 1]),
        ((1, 1, 1), (32, 1, 1)),
        (np.int64(1), np.int32(32)),
    ):
        x, y = (device.put(np.full(4, value, np.float32)) for value in (1, 2))
        kernel(grid, block, (3, x, y, 4))
        assert device.get(y).tolist() == [5] * 4


def test_bad_grids_and_blocks_raise(device):
    kernel = rawops.Kernel(KERNELS / "saxpy.cu", "saxpy<float>")
    for grid in (0, -1, 2**31, (1, 65536), (1, 1, 65536), (1, 1, 1, 1), (), 1.0, "1", None, (1, 0)):
        with pytest.raises(ValueError, match="saxpy<float>: grid must be 1 to 3 integers"):
            kernel(grid, 1, (1, 0, 0, 0))
    for block in (0, 1025, (32, 33), (1, 1, 65), (2.5,), None):
        with pytest.raises(ValueError, match="saxpy<float>: block must"):
            kernel(1, block, (1, 0, 0, 0))


def test_what_was_launched_before_makes_no_bad_geometry_good(device):
    kernel, out = rawops.Kernel(ARGUMENTS, "last_shared"), device.put(np.zeros(1, np.float32))

    def launch(grid=1, block=1, shared_mem=4):
        kernel(grid, block, (out, 1), shared_mem)

    for good in (1, (1,), (1, 1), (1, 1, 1), np.int64(1)):
        launch(grid=good)
        launch(block=good)
    launch(shared_mem=1024)
    for bad in (1.0, True, (1.0,), (1, True), (1, 1, 1.0), np.float32(1), np.bool_(True), np.array([1]), (np.ones(1),)):
        for name in ("grid", "block"):
            with pytest.raises(ValueError, match=rf"last_shared: {name} must be 1 to 3 integers from 1 to .*, got"):
                launch(**{name: bad})
    for bad in (1024.0, False, True, np.array([1024]), None, [0]):
        with pytest.raises(TypeError, match="last_shared: shared_mem must be an integer, got"):
            launch(shared_mem=bad)


@pytest.mark.parametrize("before", [False, True])
def test_arguments_come_in_a_tuple(device, before):
    kernel, out = rawops.Kernel(ARGUMENTS, "first_element"), device.put(np.zeros(2, np.float32))
    if before:
        kernel(1, 1, [out, out])
    for wrong, got in ((5, "5"), (None, "None"), (out, r"ndarray of shape \(2,\)"), ("xy", "'xy'")):
        with pytest.raises(TypeError, match=f"first_element: args must be a tuple, got {got}"):
            kernel(1, 1, wrong)


SHARED = [48 * 1024, 48 * 1024 + 16, 99 * 1024, 227 * 1024]


@pytest.mark.parametrize(
    ("arch", "shared"),
    [("sm_90a", shared) for shared in SHARED] + [("sm_80", shared) for shared in SHARED[:3]] + [("sm_89", 99 * 1024)],
)
def test_shared_memory_past_48_kib_in_the_emulator(arch, shared):
    out = np.zeros(1, np.float32)
    with rawops.emulate(arch=arch):
        rawops.Kernel(ARGUMENTS, "last_shared")(1, 32, (out, shared // 4), shared_mem=shared)
    assert out[0] == 1 + 32


LIMITS = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90a": 232448}


@pytest.mark.parametrize(("arch", "limit"), LIMITS.items())
def test_too_much_shared_memory_raises(arch, limit):
    out = np.zeros(1, np.float32)
    kernel = rawops.Kernel(ARGUMENTS, "last_shared")
    with rawops.emulate(arch=arch), pytest.raises(ValueError, match=rf"shared_mem must be at most {limit} bytes"):
        kernel(1, 32, (out, 1), shared_mem=limit + 1)
    for wrong, kind in ((-1, ValueError), (1.5, TypeError)):
        with rawops.emulate(arch=arch), pytest.raises(kind, match="last_shared: shared_mem must be"):
            kernel(1, 32, (out, 1), shared_mem=wrong)
    assert out[0] == 0


def test_launches_are_reported_in_order():
    kernel = rawops.Kernel(KERNELS / "saxpy.cu", "saxpy<float>")
    with rawops.emulate(arch="sm_90a") as emu:
        x = np.ones(4, np.float32)
        for grid, block in itertools.product((1, 2), (32, (16, 2))):
            kernel(grid, block, (1, x, x, 4))
    assert [r.kernel for r in emu.report] == ["saxpy<float>"] * 4
    assert [r.grid for r in emu.report] == [(1, 1, 1), (1, 1, 1), (2, 1, 1), (2, 1, 1)]
    assert [r.block for r in emu.report] == [(32, 1, 1), (16, 2, 1)] * 2


def test_a_whole_program_in_the_emulator_keeps_few_reports(monkeypatch, scalars):
    monkeypatch.setattr(devices, "_devices", {})
    device = devices._default_emulator.__wrapped__()
    device.report.extend(range(10**5))
    assert len(device.report) < 100
    with devices.standing_in(device):
        scalars(1, 1, (np.zeros(10), *[1] * len(SCALARS)))
    assert device.report[-1].grid == (1, 1, 1)


@pytest.mark.parametrize("kind", ["CudaDevice", "EmulatedDevice"])
def test_threads_that_come_first_share_a_device(monkeypatch, kind):
    # else a matrix or a cache that one of them makes would be on "another" device for all others, for good
    both = threading.Barrier(2, timeout=30)

    def make(*_, **__):
        both.wait()
        return types.SimpleNamespace()

    monkeypatch.setattr(devices, kind, make)
    monkeypatch.setattr(devices, "_devices", {}, raising=False)
    get, arguments = (devices.cuda, (0,)) if kind == "CudaDevice" else (devices._default_emulator, ())
    get = functools.cache(get.__wrapped__)  # which no thread has called yet
    with ThreadPoolExecutor(2) as threads:
        first, second = [call.result() for call in [threads.submit(get, *arguments) for _ in range(2)]]
    assert first is second is get(*arguments)
