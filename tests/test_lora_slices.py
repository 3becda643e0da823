"""Fused LoRA with factors for ranges of columns, and merging into the weight: exact results, errors, the checks."""

import itertools

import numpy as np
import pytest
from lora_operands import DTYPES, integers, operands, put, random, same

import rawops
from rawops import _lora_merge, config
from rawops.lora import FusedLoRA, lora_linear
from rawops.testing import references


def sliced(rng, K, slices, ranks, dtype="float16") -> tuple[list, list, np.ndarray, np.ndarray]:
    """Factors of each slice, None where the rank is, and one a and b that do the same."""
    N = max(stop for _, stop in slices) + 3
    a, b, whole_a, whole_b = [], [], np.zeros((K, 0)), np.zeros((0, N))
    for (start, stop), rank in zip(slices, ranks, strict=True):
        a.append(None if rank is None else integers(rng, (K, rank), dtype))
        b.append(None if rank is None else integers(rng, (rank, stop - start), dtype))
        if rank is not None:
            block = np.zeros((rank, N))
            block[:, start:stop] = b[-1]
            whole_a, whole_b = np.hstack([whole_a, a[-1]]), np.vstack([whole_b, block])
    return a, b, whole_a, whole_b


def put_list(device, arrays) -> list:
    return [None if x is None else device.put(x) for x in arrays]


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices(device, rng, dtype):
    """Ranges of columns with factors of their own: batches, an epilogue, a range without factors, columns in none."""
    K, slices = 40, [(0, 24), (24, 32), (40, 61)]
    a, b, whole_a, whole_b = sliced(rng, K, slices, (5, None, 12), dtype)
    N = whole_b.shape[1]
    x, c = integers(rng, (2, 3, 5, K), dtype), integers(rng, (K, N), dtype)
    bias, residual = integers(rng, N, dtype), integers(rng, (3, 1, N), dtype)
    want = references.lora_linear(x, c, whole_a, whole_b, scaling=0.5, bias=bias) + residual
    arguments = device.put(c), put_list(device, a), put_list(device, b)
    out = device.guarded((2, 3, 5, N), DTYPES[dtype])
    keywords = {"scaling": 0.5, "slices": slices, "bias": device.put(bias)}
    lora_linear(device.put(x), *arguments, **keywords, residual=device.put(residual), out=out)
    same(device, out, want.astype(DTYPES[dtype]))
    op = FusedLoRA(*arguments, **keywords)
    same(device, op(device.put(x), residual=device.put(residual)), want.astype(DTYPES[dtype]))
    same(device, op(device.put(x[0, 0])), references.lora_linear(x[0, 0], c, whole_a, whole_b, scaling=0.5, bias=bias))


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
def test_merge(device, rng, dtype):
    """Exact where the sum fits the dtype; the error that is reported where it does not."""
    inputs = operands(rng, 5, 24, 40, 6, dtype)
    on_device = put(device, inputs) | {"c": device.put(inputs["c"].copy())}
    op = FusedLoRA(on_device["c"], on_device["a"], on_device["b"], 0.5)
    merged = inputs["c"].astype(float) + 0.5 * references.gemm(inputs["a"], inputs["b"])
    assert op.merge().relative == 0 and op.merged
    same(device, op.c, merged)
    same(device, op(on_device["x"]), references.lora_linear(**inputs, scaling=0.5))
    assert op.unmerge().largest == 0 and not op.merged
    same(device, op.c, inputs["c"])
    same(device, op(on_device["x"]), references.lora_linear(**inputs, scaling=0.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_of_a_merge(device, rng, dtype):
    """A small adapter on a large weight: what of it is lost, by the definition."""
    inputs = random(rng, 1, 40, 24, 4, dtype)
    inputs["c"] = (inputs["c"].astype(float) * 100).astype(DTYPES[dtype])
    op = FusedLoRA(*(device.put(inputs[n].copy()) for n in "cab"), 0.25)
    added = 0.25 * references.gemm(inputs["a"], inputs["b"])
    error = op.merge()
    distance = device.get(op.c).astype(float) - (inputs["c"].astype(float) + added)
    assert error.largest == pytest.approx(abs(distance).max(), rel=1e-3)
    assert error.relative == pytest.approx(np.linalg.norm(distance) / np.linalg.norm(added), rel=1e-3)
    assert error.relative > 0.01
    error = op.unmerge()
    assert abs(device.get(op.c).astype(float) - inputs["c"].astype(float)).max() <= error.largest + abs(distance).max()


def test_a_merge_that_makes_nan_says_so(device):
    """inf - inf: an error that is no number is not 0."""
    c, a, b = (np.ones(shape, np.float16) for shape in ((4, 6), (4, 2), (2, 6)))
    c[1, 2], a[1] = np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        error = FusedLoRA(*map(device.put, (c, a, b))).merge()
    assert np.isnan(error.largest) and np.isnan(error.relative)


def test_merge_of_slices(device, rng):
    K, slices = 24, [(0, 16), (16, 24), (24, 40)]
    a, b, whole_a, whole_b = sliced(rng, K, slices, (5, None, 3))
    x, c = integers(rng, (5, K)), integers(rng, (K, whole_b.shape[1]))
    op = FusedLoRA(device.put(c.copy()), put_list(device, a), put_list(device, b), 2.0, slices=slices)
    op.merge()
    same(device, op.c, c + 2 * whole_a @ whole_b)
    same(device, op(device.put(x)), references.lora_linear(x, c, whole_a, whole_b, scaling=2.0))
    op.unmerge()
    same(device, op.c, c)


def test_a_merge_takes_the_copies_of_slices(device, rng):
    """As the calls do, whatever has become of the arrays since."""
    K, slices = 24, [(0, 16), (16, 24)]
    a, b, whole_a, whole_b = sliced(rng, K, slices, (5, 3))
    c = integers(rng, (K, whole_b.shape[1]))
    given = put_list(device, [x.copy() for x in (*a, *b)])
    op = FusedLoRA(device.put(c.copy()), given[:2], given[2:], 2.0, slices=slices)
    for x in given:
        x[...] = np.nan
    op.merge()
    same(device, op.c, c + 2 * whole_a @ whole_b)
    op.unmerge()
    same(device, op.c, c)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_merge_that_fails(device, rng, monkeypatch, failing):
    """Before anything is written it changes nothing; after that, the weight is neither and no call takes it."""
    calls = itertools.count(1)

    class Product(_lora_merge.Product):
        def __call__(self, *args):
            if next(calls) == failing:
                raise MemoryError
            return super().__call__(*args)

    monkeypatch.setattr(_lora_merge, "Product", Product)
    slices = [(0, 16), (16, 24)]
    a, b, *_ = sliced(rng, 24, slices, (5, 3))
    x, c = integers(rng, (5, 24)), integers(rng, (24, 24))
    op = FusedLoRA(device.put(c.copy()), put_list(device, a), put_list(device, b), slices=slices)
    x = device.put(x)
    want = device.get(op(x))
    with pytest.raises(MemoryError):
        op.merge()
    if failing == 1:
        assert op.merged is False
        np.testing.assert_array_equal(device.get(op(x)), want)
        return
    assert op.merged is None
    for call in (lambda: op(x), op.merge, op.unmerge):
        with pytest.raises(ValueError, match="c must be whole, got one that a failed merge has left half way"):
            call()


def test_a_merge_of_numpy_arrays_outside_the_emulator():
    with rawops.emulate():
        op = FusedLoRA(*(np.ones((4, 4), np.float16) for _ in "cab"))
    with pytest.raises((ImportError, TypeError), match=r"FusedLoRA\.merge: "):
        op.merge()
    assert op.merged is False and (op.c == 1).all()


def test_one_slice_takes_arrays_as_they_are(device, rng):
    """As a `MultiLoRA` of one slice does."""
    x, c = integers(rng, (5, 16), "float16"), integers(rng, (16, 24), "float16")
    a, b = integers(rng, (16, 4), "float16"), integers(rng, (4, 8), "float16")
    want = references.gemm(x, c)
    want[:, 8:16] += references.gemm(references.gemm(x, a), b)
    x, c, a, b = map(device.put, (x, c, a, b))
    for given in ((a, b), ([a], b), (a, (b,))):
        same(device, lora_linear(x, c, *given, slices=[(8, 16)]), want)
    op = FusedLoRA(c, a, b, slices=[(8, 16)])
    op.merge()
    same(device, op(x), want)


def test_errors_of_slices_and_merges(device):
    array = "an array" if device.is_emulated else "a GPU array"

    def zeros(*shape, dtype=np.float16):
        return device.put(np.zeros(shape, dtype))

    x, c, a, b = zeros(4, 6), zeros(6, 8), zeros(6, 2), zeros(2, 4)
    halves = [(0, 4), (4, 8)]
    op = FusedLoRA(c, a, zeros(2, 8))
    merged = FusedLoRA(c, a, zeros(2, 8))
    merged.merge()
    for error, text, call in [
        (ValueError, "lora_linear: a must have an array for each of 2", lambda: lora_linear(x, c, a, b, slices=halves)),
        (
            ValueError,
            "lora_linear: b[1] must have shape (2, 4)",
            lambda: lora_linear(x, c, [a, a], [b, b.T], slices=halves),
        ),
        (ValueError, "FusedLoRA: slices must not overlap", lambda: FusedLoRA(c, [a, a], [b, b], slices=[(0, 4)] * 2)),
        (
            TypeError,
            "FusedLoRA: c must have dtype float16 or bfloat16",
            lambda: FusedLoRA(zeros(6, 8, dtype="f4"), [a, a], [b, b], slices=halves),
        ),
        (ValueError, "FusedLoRA.unmerge: c must be a merged one", op.unmerge),
        (
            TypeError,
            f"FusedLoRA: x must be {array}, got list",
            lambda: FusedLoRA(c, [a], [b], slices=halves[:1])([1.0]),
        ),
        (ValueError, "FusedLoRA: x must have shape", lambda: FusedLoRA(c, [a], [b], slices=halves[:1])(zeros(6))),
        (
            ValueError,
            "FusedLoRA.merge: c must have entries of its own",
            lambda: FusedLoRA(device.xp.lib.stride_tricks.as_strided(c, c.shape, (0, 2)), a, zeros(2, 8)).merge(),
        ),
        (ValueError, "FusedLoRA.merge: c must be the base weight", merged.merge),
        (ValueError, "FusedLoRA: x must have shape (..., M, 6)", lambda: merged(zeros(4, 5))),
        (TypeError, "FusedLoRA: x must have dtype float16", lambda: merged(zeros(4, 6, dtype="f4"))),
    ]:
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value).startswith(text)


def test_ranges_without_ranks_under_checks(device, rng, monkeypatch):
    """With RAWOPS_CHECK=1, for which indices must name adapters: those of slices are none of the caller's."""
    monkeypatch.setattr(config, "current", lambda: config.Config(check=True))
    x, c = integers(rng, (2, 3, 6)), integers(rng, (6, 8))
    a, b = device.put(integers(rng, (6, 0))), device.put(integers(rng, (0, 4)))
    for factors in (([None], [None]), ([a], [b])):
        got = FusedLoRA(device.put(c), *factors, slices=[(0, 4)])(device.put(x))
        same(device, got, references.gemm(x, c))


def test_one_range_without_factors(device, rng):
    x, c = (device.put(rng.integers(-4, 5, shape).astype("float16")) for shape in ((5, 24), (24, 16)))
    out = rawops.lora_linear(x, c, [None], [None], slices=[(0, 16)])
    assert (device.get(out) == device.get(rawops.gemm(x, c))).all()
