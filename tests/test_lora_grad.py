"""The gradients of a LoRA layer: sums over sizes, ranks, layouts and dtypes, precision, what is not read, checks."""

import numpy as np
import pytest
from lora_operands import DTYPES, put

from rawops import _lora_product
from rawops.lora import lora_linear_backward
from rawops.testing import references
from rawops.testing.tolerances import assert_close


def operands(rng, M, N, K, rank, dtype="float16") -> dict[str, np.ndarray]:
    shapes = {"dout": (M, N), "x": (M, K), "c": (K, N), "a": (K, rank), "b": (rank, N)}
    return {name: rng.integers(-1, 2, shape).astype(DTYPES.get(dtype, dtype)) for name, shape in shapes.items()}


def reference(dout, x, c, a, b, scaling=1.0) -> tuple[np.ndarray, ...]:
    """The three products by their definition, in float64."""
    dout, x, c, a, b = (np.asarray(m).astype(np.float64) for m in (dout, x, c, a, b))
    dout_rows, x_rows = dout.reshape(-1, dout.shape[-1]), x.reshape(-1, x.shape[-1])
    dx = dout @ c.T + scaling * (dout @ b.T) @ a.T
    return dx, scaling * x_rows.T @ (dout_rows @ b.T), scaling * (x_rows @ a).T @ dout_rows


def same(device, got, want) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(device.get(one).astype(np.float64), other.astype(one.dtype).astype(np.float64))


SIZES = [((1, 7, 129), 8), ((70, 65, 24), 33), ((700, 9, 24), 3), ((9, 64, 1), 1)]  # (M, N, K), rank


@pytest.mark.parametrize("size, rank", SIZES, ids=str)
def test_sizes_and_ranks(device, rng, size, rank):
    M, N, K = size
    inputs = operands(rng, *size, rank)
    out = [device.guarded(shape, np.float16) for shape in ((M, K), (K, rank), (rank, N))]
    got = lora_linear_backward(**put(device, inputs), scaling=0.5, out=out)
    assert all(one is other for one, other in zip(got, out, strict=True))
    same(device, got, reference(**inputs, scaling=0.5))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_dtypes(device, rng, dtype):
    inputs = operands(rng, 19, 40, 24, 5, dtype)
    same(device, lora_linear_backward(**put(device, inputs), scaling=2.0), reference(**inputs, scaling=2.0))


def test_factor_gradients_in_float32(device, rng):
    """Sums that 16 bits cannot hold, with an intermediate past 65504, and dX in float32 as well."""
    inputs = {name: rng.standard_normal(x.shape) for name, x in operands(rng, 150, 40, 72, 8).items()}
    inputs = {name: (x * (40 if name in "xb" else 200)).astype(np.float16) for name, x in inputs.items()}
    out = [device.guarded(inputs[name].shape, np.float32) for name in "xab"]
    got = lora_linear_backward(**put(device, inputs), scaling=0.7, out=out)
    magnitudes = reference(**{name: abs(x.astype(np.float64)) for name, x in inputs.items()}, scaling=0.7)
    low = references.gemm_magnitude(inputs["dout"], inputs["b"].T)
    assert low.max() > 65504
    for one, want, magnitude in zip(got, reference(**inputs, scaling=0.7), magnitudes, strict=True):
        assert_close(device.get(one), want, "float32", k=200, magnitude=magnitude)


@pytest.mark.parametrize("rides", [True, False])
def test_the_intermediate_of_dx_serves_da(device, rng, rides, monkeypatch):
    """Where dX has made dO @ b^T, there is no second product for it."""
    chosen = _lora_product.select_config
    if not rides:
        monkeypatch.setattr("rawops._lora_config._rides_in", lambda *_: False)
    inputs = operands(rng, 20, 40, 24, 8)
    seen = []
    monkeypatch.setattr(_lora_product, "select_config", lambda *args: seen.append(chosen(*args)) or seen[-1])
    same(device, lora_linear_backward(**put(device, inputs)), reference(**inputs))
    assert [config.rides for config in seen] in ([rides], [])


VIEWS = {
    "odd column": lambda x: x[:, 1:-7],
    "column-major": lambda x: x.T[: x.shape[0] // 2, : x.shape[1] // 2] if x.shape[0] == x.shape[1] else x.T.copy().T,
    "reversed": lambda x: x[::-1, ::-1],
}


@pytest.mark.parametrize("view, operand", [*zip(VIEWS, ("dout", "x", "a"), strict=True)])
def test_views(device, rng, operand, view):
    inputs = operands(rng, 16, 32, 24, 8)
    rows, cols = inputs[operand].shape
    big = rng.integers(-1, 2, (2 * rows, 2 * cols)).astype(np.float16)
    inputs[operand] = VIEWS[view](big)[:rows, :cols]
    on_device = put(device, inputs) | {operand: VIEWS[view](device.put(big))[:rows, :cols]}
    same(device, lora_linear_backward(**on_device), reference(**inputs))


def test_layouts_of_results(device, rng):
    """Gradients of transposed weights into transposed arrays, and over the inputs."""
    inputs = operands(rng, 40, 24, 40, 24)
    want = reference(**inputs)
    out = [device.guarded(x.shape[::-1], np.float16).T for x in (inputs["x"], inputs["a"], inputs["b"])]
    same(device, lora_linear_backward(**put(device, inputs), out=out), want)
    on_device = put(device, inputs)
    got = lora_linear_backward(**on_device, out=[on_device["x"], on_device["a"], on_device["b"]])
    assert got[0] is on_device["x"] and got[2] is on_device["b"]
    same(device, got, want)


def test_a_result_over_an_input_keeps_its_dtype(device, rng):
    """float32 gradients in the memory of dout are those of memory of their own, bit for bit."""
    inputs = operands(rng, 40, 24, 40, 8)
    on_device = put(device, inputs)
    apart = device.put(np.zeros((40, 8), np.float32))
    lora_linear_backward(**on_device, scaling=0.1, out=[None, apart, None])
    over = on_device["dout"].view(np.float32).ravel()[: 40 * 8].reshape(40, 8)
    lora_linear_backward(**on_device, scaling=0.1, out=[None, over, None])
    np.testing.assert_array_equal(device.get(over), device.get(apart))


def test_batches(device, rng):
    """Batch axes of x and dout are rows of the sums."""
    inputs = operands(rng, 2 * 3 * 5, 24, 40, 4)
    x, dout = inputs["x"].reshape(2, 3, 5, 40), inputs["dout"].reshape(2, 3, 5, 24)
    want = reference(dout, x, *(inputs[n] for n in "cab"))
    on_device = put(device, inputs)
    swapped = on_device["x"].reshape(3, 2, 5, 40).swapaxes(0, 1)
    want_swapped = reference(dout, inputs["x"].reshape(3, 2, 5, 40).swapaxes(0, 1), *(inputs[n] for n in "cab"))
    on_device["dout"] = on_device["dout"].reshape(2, 3, 5, 24)
    same(device, lora_linear_backward(**on_device | {"x": on_device["x"].reshape(2, 3, 5, 40)}), want)
    same(device, lora_linear_backward(**on_device | {"x": swapped}), want_swapped)


def test_nothing_to_add(device, rng):
    """Rank 0, scaling 0, no rows: zeros, and a and b of NaN are not read."""
    inputs = operands(rng, 6, 16, 24, 4)
    dx = references.gemm(inputs["dout"], inputs["c"].T)
    zeros = np.zeros((24, 4)), np.zeros((4, 16))
    nan = {n: np.full(inputs[n].shape, np.nan, np.float16) for n in "ab"}
    same(device, lora_linear_backward(**put(device, inputs | nan), scaling=0), (dx, *zeros))
    none = {"a": inputs["a"][:, :0], "b": inputs["b"][:0]}
    same(device, lora_linear_backward(**put(device, inputs | none)), (dx, np.zeros((24, 0)), np.zeros((0, 16))))
    empty = {"x": inputs["x"][:0], "dout": inputs["dout"][:0]}
    same(device, lora_linear_backward(**put(device, inputs | empty)), (np.zeros((0, 24)), *zeros))


@pytest.mark.parametrize("N, K", [(0, 24), (16, 0), (0, 0)])
def test_no_columns(device, rng, N, K):
    """Of c, as views whose rows lie apart as before: dX, dA and dB of what there is are zeros."""
    inputs = put(device, operands(rng, 6, 16, 24, 4))
    kept = {"dout": (slice(None), slice(N)), "x": (slice(None), slice(K)), "c": (slice(K), slice(N))}
    kept |= {"a": (slice(K), slice(None)), "b": (slice(None), slice(N))}
    got = lora_linear_backward(**{name: x[kept[name]] for name, x in inputs.items()})
    same(device, got, [np.zeros(shape) for shape in ((6, K), (K, 4), (4, N))])


def test_non_finite_values(device, rng):
    """Inf and NaN reach the entries that IEEE arithmetic says, and no others."""
    inputs = {name: abs(x) + np.float16(1) for name, x in operands(rng, 20, 24, 16, 4).items()}
    inputs["x"][3, 5], inputs["dout"][7, 9] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        want = reference(**inputs)
    same(device, lora_linear_backward(**put(device, inputs)), want)
    assert np.isinf(want[1][5, 0]) or np.isnan(want[1]).all()


def test_scaling_past_float32(device, rng):
    """It is infinite, as it is for every other product of 16 bits."""
    inputs = put(device, operands(rng, 20, 24, 16, 4))
    got, want = (lora_linear_backward(**inputs, scaling=scaling) for scaling in (1e39, np.inf))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(device.get(one), device.get(other))


def test_errors(device):
    def zeros(*shape, dtype=np.float16):
        return device.put(np.zeros(shape, dtype))

    def many(cols):
        return device.xp.broadcast_to(zeros(cols), (2**16, 2**16, cols))

    repeated = device.xp.lib.stride_tricks.as_strided(zeros(6, 2), (6, 2), (0, 2))
    dx, shared = zeros(4, 6) + np.float16(7), zeros(16)
    good = {"dout": zeros(4, 8), "x": zeros(4, 6), "c": zeros(6, 8), "a": zeros(6, 2), "b": zeros(2, 8)}
    for error, text, changes in [
        (ValueError, "dout must have shape (4, 8), got (3, 8)", {"dout": zeros(3, 8)}),
        (ValueError, "dout must have shape (..., M, 8)", {"dout": zeros(4, 6)}),
        (ValueError, "x must have shape (..., M, 6)", {"x": zeros(6)}),
        (ValueError, "a must have shape (6, 3)", {"a": zeros(2, 3)}),
        (ValueError, "b must have shape (2, 8)", {"b": zeros(8, 2)}),
        (TypeError, "b must be an array", {"b": None}),
        (TypeError, "x must have dtype float16", {"x": zeros(4, 6, dtype="f4")}),
        (TypeError, "c must have dtype", {"c": zeros(6, 8, dtype="i4")}),
        (TypeError, "scaling must be a real number", {"scaling": "1"}),
        (ValueError, "out must be three arrays", {"out": zeros(4, 6)}),
        (ValueError, "out[1] must have shape (6, 2)", {"out": (None, zeros(2, 6), None)}),
        (TypeError, "out[0] must have dtype float16 or float32", {"out": (zeros(4, 6, dtype="f8"), None, None)}),
        (
            ValueError,
            "out[1] must have entries of its own",
            {"out": (None, repeated, None)},
        ),
        (ValueError, "x must have at most 2147418112 rows, got 4294967296", {"x": many(6), "dout": many(8)}),
        (ValueError, "x must lie on whole elements", {"x": device.between(zeros(4, 6))}),
        (ValueError, "out[2] must lie on whole elements", {"out": (dx, None, device.between(zeros(2, 8)))}),
        (ValueError, "out[0] must not overlap out[1]", {"out": (dx, dx.reshape(-1)[:12].reshape(6, 2), None)}),
        (ValueError, "out[1] must not overlap out[2]", {"out": (dx, shared[:12].reshape(6, 2), shared.reshape(2, 8))}),
    ]:
        with pytest.raises(error) as raised:
            lora_linear_backward(**good | changes)
        assert str(raised.value).startswith(f"lora_linear_backward: {text}")
        assert (device.get(dx) == 7).all(), "nothing is written before"


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_at_scale(device, rng, dtype, rank):
    """Thousands of rows, where dX reads an intermediate that is made before."""
    inputs = operands(rng, 3000, 1024, 2048, rank, dtype)
    out = [device.guarded(inputs[name].shape, np.float32) for name in "xab"]
    same(device, lora_linear_backward(**put(device, inputs), out=out), reference(**inputs))
