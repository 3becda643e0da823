"""From arrays to a launch: what makes two calls the same to the cache, and when a result would overwrite an input."""

import itertools

import numpy as np
import pytest

import rawops
from rawops import _gemm_maps
from rawops._gemm_call import Product, scalars
from rawops._gemm_operands import Options
from rawops._gemm_steps import ONE, ZERO
from rawops._runtime import arrays
from rawops._runtime.kernel import Function

CURRENT = [0]  # the number of the device that stands in for CuPy's current one


class Memory:
    def __init__(self, ptr, device_id):
        self.ptr, self.device_id = ptr, device_id


class Native:
    """Stands in for a CuPy array, on a GPU that is not there."""

    def __init__(self, shape, dtype="float16", strides=None, address=1 << 20, ordinal=0):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.strides = strides or np.empty(shape, dtype).strides
        self.ndim, self.size = len(shape), int(np.prod(shape))
        self.data = Memory(address, ordinal)


@pytest.fixture
def prepared(monkeypatch):
    """A product of stand-ins, whose launches are counted and run by nothing."""
    CURRENT[0] = 0
    monkeypatch.setattr(arrays, "_native", Native)
    monkeypatch.setattr(arrays, "_get_current", lambda: CURRENT[0])
    monkeypatch.setattr(arrays, "device_of", lambda function, **named: None)
    calls = []

    class Counted(Product):
        def _steps(self, device, request, *_):
            calls.append(request)
            return self

        def run(self, *_):
            pass

    return Counted("gemm", Options()), calls


def operands(**changes) -> dict:
    return {"a": Native((4, 8)), "b": Native((8, 6)), "out": Native((4, 6), address=1 << 24)} | changes


DIFFERENT = [
    {"a": Native((5, 8)), "out": Native((5, 6), address=1 << 24)},
    {"a": Native((4, 8), strides=(2, 8))},
    {"a": Native((4, 8), address=(1 << 20) + 2)},
    {"b": Native((8, 6), strides=(24, 2))},
    {"out": Native((4, 6), "float32", address=1 << 24)},
    {"c": Native((4, 6))},
    {"residual": Native((4, 6))},
    {"bias": Native((6,))},
    {
        "a": Native((4, 8), "bfloat16"),
        "b": Native((8, 6), "bfloat16"),
        "out": Native((4, 6), "bfloat16", None, 1 << 24),
    },
    {name: Native(x.shape, address=x.data.ptr, ordinal=1) for name, x in operands().items()},
]


def test_a_launch_is_prepared_once_for_each_key(prepared):
    """Every difference that a kernel depends on counts, in any order of calls; other addresses do not."""
    product, calls = prepared
    kinds = [operands(**changes) for changes in ({}, *DIFFERENT)]
    for _ in range(2):
        for first, second in itertools.product(kinds, kinds):
            for named in (first, second, second):
                CURRENT[0] = named["a"].data.device_id
                product(tuple(named.get(role) for role in product.roles))
    assert len(calls) == len(kinds)
    CURRENT[0] = 0
    product(tuple(operands(a=Native((4, 8), address=1 << 22)).get(role) for role in product.roles))
    assert len(calls) == len(kinds)


def test_arrays_that_need_more_thought_have_no_signature(prepared):
    x = Native((4, 4))
    assert arrays.signature((x, None, x)) is not None
    assert arrays.signature((x, np.zeros((4, 4)))) is None
    assert arrays.signature((x, Native((4, 4), ordinal=1))) is None
    assert arrays.signature((Native((4, 4), ordinal=1), x)) is None


def test_a_result_over_an_input_is_found(prepared):
    """The byte ranges decide, except where out is c or the residual, entry for entry."""
    product, _ = prepared
    last = 2 * 4 * 8
    for role, shape in {"a": (4, 8), "b": (8, 8), "c": (4, 8), "residual": (4, 8)}.items():
        for shift in (-128, -last, -last + 16, -16, 0, 16, last - 16, last):
            named = {"a": Native((4, 8)), "b": Native((8, 8)), "out": Native((4, 8), address=1 << 24)}
            named[role] = x = Native(shape, address=(1 << 24) + shift)
            found = tuple(named.get(role) for role in product.roles)
            product(found) if shift in (-128, last) else None
            key, addresses = arrays.signature(found)
            launch = product._launch_of(key, found, addresses)
            overlapping = -2 * x.size < shift < last
            assert launch.collides(addresses) == (overlapping and not (shift == 0 and role in ("c", "residual")))


@pytest.fixture
def repeated(prepared, monkeypatch):
    """The product of `prepared`, and the calls that were made again as a launch alone."""
    product, _ = prepared
    again = []
    bind = lambda self, addresses, *scalars: lambda: again.append((addresses, *scalars))  # noqa: E731
    monkeypatch.setattr(type(product), "bind", bind, raising=False)
    return product, again


def test_the_same_arrays_are_launched_again(repeated):
    """From the third time on, with other calls in between or not."""
    product, again = repeated
    x = tuple(operands().get(role) for role in product.roles)
    y = (Native((4, 8), address=1 << 22), *x[1:])
    for call in (x, x, y, y, x, y, x, y, y, y, y):
        assert product(call) is x[2]
    first, second = (([address, 1 << 20, 1 << 24, 0, 0, 0], ONE, ZERO) for address in (1 << 20, 1 << 22))
    assert again == [first, second, first, second, second, second, second]
    assert product._repeat.is_of(y, ONE, ZERO)
    for _ in range(3):
        product(y, (0, 2.0, 0))
    assert again[7:] == [(second[0], (0, 2.0, 0), ZERO)]
    y[0].shape = (4, 8, 1)  # in place, as CuPy's arrays may
    with pytest.raises(ValueError, match="gemm"):
        product(y, (0, 2.0, 0))


def test_an_array_that_died_is_not_launched_again(repeated):
    product, again = repeated
    x = [operands().get(role) for role in product.roles]
    for _ in range(4):
        product(tuple(x))
    assert len(again) == 2
    number = id(x[0])
    x[0] = None
    found = [Native((4, 8), address=1 << 22) for _ in range(100)]  # one of them has the identity of the dead
    for a in found:
        if id(a) == number:
            x[0] = a
            product(tuple(x))
    assert len(again) == 2


def test_calls_that_never_come_again_are_forgotten(repeated):
    product, again = repeated
    for call in range(600):
        x = operands(a=Native((4, 8), address=(call + 9) << 22))
        product(tuple(x.get(role) for role in product.roles))
    (launch,) = product._launches.values()
    assert not again and product._repeat is None
    assert len(launch.bound) <= 256


def test_a_result_over_an_input_is_never_a_launch_alone(repeated):
    product, _ = repeated
    x = tuple(operands(a=Native((4, 8), address=(1 << 24) + 16)).get(role) for role in product.roles)
    key, addresses = arrays.signature(x)
    launch = product._launch_of(key, x, addresses)
    for _ in range(3):
        product._note(launch, (*addresses, ONE, ZERO), addresses)
    assert set(launch.bound.values()) == {None}


class Loaded:
    """Stands in for code on a GPU, whose launches are noted."""

    def __init__(self, name, calls):
        self.name, self.calls, self.compiled = name, calls, None

    def launch(self, grid, block, values, shared_bytes=0, early=False):
        self.calls.append((self.name, values, shared_bytes, early))

    def bind(self, grid, block, values, shared_bytes=0, early=False):
        return lambda: self.calls.append((self.name, "alone", early))


def test_a_launch_alone_takes_an_edited_kernel_into_use():
    calls = []
    function = Function.__new__(Function)
    function._use(Loaded("first", calls))
    again = function.bind((1, 1, 1), (32, 1, 1), (7,), 64, True)
    again()
    function._use(Loaded("second", calls))
    again()
    assert calls == [("first", "alone", True), ("second", (7,), 64, True)]


@pytest.mark.gpu
def test_a_launch_alone_goes_to_the_current_stream_of_any_thread():
    import threading

    import cupy

    a, b = (cupy.ones((64, 64), np.float16) for _ in range(2))
    out, found = cupy.empty((64, 64), np.float16), []
    op = rawops.Gemm(64, 64, 64, "float16")

    def work():
        for _ in range(4):
            with cupy.cuda.Stream(non_blocking=True) as stream:
                cupy.cuda.Device().synchronize()
                out.fill(0)
                op(a, b, out=out)
                found.append(float(out.astype(np.float32).sum()))
                stream.synchronize()

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [64.0**3] * 8


def test_a_thread_has_a_context_before_it_encodes_maps(monkeypatch):
    """The driver's encoder fails in a thread that has not used the GPU."""

    class Device:
        is_emulated, bound = False, False

        def bind_context(self):
            self.bound = True

    device = Device()
    monkeypatch.setattr(_gemm_maps.TensorMap, "encode_driver", lambda self: device.bound)
    assert _gemm_maps.encode(device, [lambda address: None], (0,)) == [True]


# --- scalars --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_scalar_array_lives_until_the_launch(arch, dtype):
    """Arrays that nobody but the call holds, as in alpha=1 / scale."""
    x = np.eye(16, dtype=dtype)
    with rawops.emulate(arch=arch):
        alpha, beta = np.array(2.0, np.float32), np.array(3.0, np.float64)
        for split_k in (None, 2):
            got = rawops.gemm(x, x, x, alpha=alpha.copy(), beta=beta.copy(), split_k=split_k)
            np.testing.assert_array_equal(got, 5 * x)
        plan = rawops.Gemm(16, 16, 16, dtype, alpha=alpha.copy(), beta=beta.copy())
        np.testing.assert_array_equal(plan(x, x, x), 5 * x)


def test_a_scalar_array_is_on_the_device_of_a(monkeypatch):
    class Exporting(Native):
        __dlpack__ = None

    monkeypatch.setattr(arrays, "take", lambda function, **named: (list(named.values()), None))
    monkeypatch.setattr(arrays.devices, "cuda", lambda ordinal: ("cuda:0", "cuda:1")[ordinal])
    with pytest.raises(ValueError, match="gemm: beta must be on the same device as a "):
        scalars("gemm", 1.0, Exporting((), "float32", ordinal=1), Native((4, 4)), Native((4, 4)))


def test_equal_options_of_other_types_are_no_options():
    x = np.eye(16, dtype=np.float16)
    with rawops.emulate():
        for split_k, wrong in ((2, 2.0), (1, True)):
            rawops.gemm(x, x, split_k=split_k)
            with pytest.raises(TypeError, match="gemm: split_k must be an integer"):
                rawops.gemm(x, x, split_k=wrong)
        rawops.gemm(x, x, split_k=np.int64(2))


@pytest.mark.parametrize("wrong", ["no", 2, None, 0.0])
def test_deterministic_is_true_or_false(wrong):
    x, offsets = np.eye(16, dtype=np.float16), np.array([0, 16], np.int32)
    calls = {
        "gemm": lambda value: rawops.gemm(x, x, deterministic=value),
        "grouped_gemm": lambda value: rawops.grouped_gemm(x, x[None], offsets, deterministic=value),
        "Gemm": lambda value: rawops.Gemm(16, 16, 16, "float16", deterministic=value)(x, x),
    }
    with rawops.emulate():
        for name, call in calls.items():
            with pytest.raises(TypeError, match=f"^{name}: deterministic must be True or False, got {wrong!r}"):
                call(wrong)
            assert (call(np.bool_(True)) == x).all()
