"""MultiLoRA: every row with its adapter or none, over ranks, slots, slices, layouts and orders; what is never read."""

import numpy as np
import pytest
from lora_adapters import (
    DTYPES,
    adapter,
    bits,
    block_matrices,
    check_intermediate_is_float32,
    check_intermediate_past_65504,
    check_non_finite_scaling,
    check_non_finite_values,
    integers,
    load,
    load_sliced,
    poison,
    reference,
    same,
    sliced,
)

import rawops
from rawops import config
from rawops._gemm_call import Product
from rawops._gemm_config import Problem, select_config
from rawops.lora import MultiLoRA
from rawops.testing import references
from rawops.testing.tolerances import assert_close

# --- rows and slots -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, dtype", [((6, 40, 72), "float16"), ((70, 24, 40), "bfloat16"), ((1, 130, 33), "float16")], ids=str
)
def test_rows_without_an_adapter(device, rng, size, dtype):
    """-1, numbers that are no slot and empty slots: the bits of gemm, though other rows of the tile have adapters."""
    M, N, K = size
    op_inputs = rng.standard_normal((M, K)), rng.standard_normal((K, N))
    x, c = (device.put(values.astype(DTYPES[dtype])) for values in op_inputs)
    op = MultiLoRA(c, 5, 20)
    adapters = {slot: adapter(rng, K, N, rank, dtype=dtype) for slot, rank in ((1, 7), (3, 20))}
    load(device, op, adapters)
    indices = np.resize([-1, 0, -1, 3, 1, -1, 5, 2**31 - 1, -(2**31)], M).astype(np.int32)
    out = device.guarded((M, N), DTYPES[dtype])
    assert op(x, device.put(indices), out=out) is out
    base = [i for i, index in enumerate(indices) if index not in adapters]
    np.testing.assert_array_equal(bits(device, out)[base], bits(device, rawops.gemm(x, c))[base])
    want = reference(device.get(x), device.get(c), adapters, indices)
    assert_close(device.get(out), want, DTYPES[dtype], k=4 * (K + 20))
    none = op(x, device.put(np.full(M, -1, np.int32)))
    np.testing.assert_array_equal(bits(device, none), bits(device, rawops.gemm(x, c)))


RANKS = [1, 5, 8, 16, 24, 33, 0, 64]


@pytest.mark.parametrize("max_rank", [64, 100])
def test_mixed_ranks(device, rng, max_rank):
    """In one batch, in slots padded with NaN."""
    M, N, K = 40, 50, 70
    x, c = integers(rng, (M, K)), integers(rng, (K, N))
    op = MultiLoRA(device.put(c), 9, max_rank)
    poison(op)
    ranks = [min(rank, max_rank) for rank in RANKS]
    adapters = {slot: adapter(rng, K, N, rank, 0.25) for slot, rank in enumerate(ranks)}
    load(device, op, adapters)
    indices = rng.integers(-1, 9, M).astype(np.int32)
    out = device.guarded((M, N), np.float16)
    op(device.put(x), device.put(indices), out=out)
    same(device, out, reference(x, c, adapters, indices))


def test_slot_reuse(device, rng):
    """A smaller rank over a larger one, with its own scaling; then nothing."""
    M, N, K = 5, 24, 40
    x, c = integers(rng, (M, K)), integers(rng, (K, N))
    op, indices = MultiLoRA(device.put(c), 2, 32), np.zeros(M, np.int32)
    for rank, scaling in ((32, 0.5), (8, 2.0), (0, 1.0), (17, 0.25)):
        adapters = {0: adapter(rng, K, N, rank, scaling)}
        load(device, op, adapters)
        same(device, op(device.put(x), device.put(indices)), reference(x, c, adapters, indices))
    base = bits(device, rawops.gemm(device.put(x), device.put(c)))
    nan = [device.put(np.full(shape, np.nan, np.float16)) for shape in ((K, 8), (8, N))]
    for empty in (lambda: op.unload(0), lambda: op.load(0, *nan, scaling=0)):
        load(device, op, adapters)
        empty()
        np.testing.assert_array_equal(bits(device, op(device.put(x), device.put(indices))), base)


def test_a_load_that_fails_leaves_an_empty_slot(device, rng, monkeypatch):
    """Neither the old adapter nor a mixture of the two, also of the slices that were copied already."""
    x, c, indices = integers(rng, (5, 40)), integers(rng, (40, 24)), device.put(np.zeros(5, np.int32))
    op = MultiLoRA(device.put(c), 2, 8, slices=[(0, 8), (8, 24)])
    a, b = ([device.put(integers(rng, s)) for s in sizes] for sizes in (((40, 8), (40, 8)), ((8, 8), (8, 16))))
    op.load(0, a, b)
    failing = iter([False])
    monkeypatch.setattr("rawops._lora_multi.has_non_finite", lambda x: next(failing))
    with pytest.raises(StopIteration):
        op.load(0, a[::-1], b, 2.0)
    monkeypatch.undo()
    same(device, op(device.put(x), indices), references.gemm(x, c))
    op.load(0, a, b)
    monkeypatch.setattr(config, "current", lambda: config.Config(check=True))
    op(device.put(x), indices)


@pytest.mark.parametrize("M", [19, 300])
def test_permutations(device, rng, M):
    """Rows in another order give the same bits in that order; 300 rows are sorted by a kernel of its own."""
    N, K = 24, 40
    x, c = rng.standard_normal((M, K)).astype(np.float16), rng.standard_normal((K, N)).astype(np.float16)
    op = MultiLoRA(device.put(c), 6, 16)
    adapters = {slot: adapter(rng, K, N, 3 + slot) for slot in (0, 2, 3, 5)}
    load(device, op, adapters)
    indices = rng.integers(-1, 6, M).astype(np.int32)
    got = bits(device, op(device.put(x), device.put(indices)))
    order = rng.permutation(M)
    np.testing.assert_array_equal(bits(device, op(device.put(x[order]), device.put(indices[order]))), got[order])
    assert_close(got.view(np.float16), reference(x, c, adapters, indices), np.float16, k=4 * (K + 16))


def test_strided_indices(device, rng):
    x, c = integers(rng, (5, 16)), integers(rng, (16, 8))
    op, adapters = MultiLoRA(device.put(c), 3, 4), {1: adapter(rng, 16, 8, 4)}
    load(device, op, adapters)
    for view in (lambda i: i[::2][:5], lambda i: i[::-1][:5], lambda i: i[3:8]):
        indices = rng.integers(0, 3, 12).astype(np.int32)
        same(device, op(device.put(x), view(device.put(indices))), reference(x, c, adapters, view(indices)))


# --- operands -------------------------------------------------------------------------------------------------------

VIEWS = {
    "contiguous": lambda x: x[:, :40],
    "odd column": lambda x: x[:, 1:41],
    "column-major": lambda x: x.reshape(-1)[: 6 * 40].reshape(40, 6).T,
    "every other row": lambda x: x[::2, 8:48],
    "reversed": lambda x: x[::-1, 39::-1],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_x(device, rng, view):
    """In NaN; rows with and without an adapter."""
    c, room = integers(rng, (40, 24)), integers(rng, (12, 64))
    op, adapters = MultiLoRA(device.put(c), 2, 8), {0: adapter(rng, 40, 24, 8), 1: adapter(rng, 40, 24, 5)}
    load(device, op, adapters)
    take = VIEWS[view]
    x = take(room)
    inside = np.zeros(room.shape, bool)
    take(inside)[...] = True
    room[~inside] = np.nan
    indices = np.resize([1, -1, 0], x.shape[0]).astype(np.int32)
    on_device = take(device.put(room))
    got = op(on_device, device.put(indices))
    same(device, got, reference(x, c, adapters, indices))
    base = bits(device, rawops.gemm(on_device, device.put(c)))
    np.testing.assert_array_equal(bits(device, got)[indices < 0], base[indices < 0])


def test_layouts_of_weights(device, rng):
    """c, a and b row-major, column-major and in views."""
    M, N, K, rank = 9, 48, 40, 12
    x, c = integers(rng, (M, K)), integers(rng, (K, N))
    a, b, scaling = adapter(rng, K, N, rank)
    indices = np.array([0, -1, 0, 0, -1, -1, 0, 0, 0], np.int32)
    want = reference(x, c, {0: (a, b, scaling)}, indices)
    for orders in ("CCC", "FFF", "FCF"):
        views = [
            device.put(m.T.copy()).T if o == "F" else device.put(m) for m, o in zip((c, a, b), orders, strict=True)
        ]
        op = MultiLoRA(views[0], 1, rank)
        op.load(0, views[1], views[2], scaling)
        same(device, op(device.put(x), device.put(indices)), want)


def test_split_k(device, rng):
    """Few tiles and a long K: partial products in the rows of the result."""
    M, N, K = 5, 24, 1024
    x, c = integers(rng, (M, K)), integers(rng, (K, N))
    assert select_config(Problem("float16", M, N, K), 108, 166912).split_k > 1
    op, adapters = MultiLoRA(device.put(c), 3, 8), {0: adapter(rng, K, N, 8), 2: adapter(rng, K, N, 3)}
    load(device, op, adapters)
    indices = np.array([2, -1, 0, 0, 1], np.int32)
    same(device, op(device.put(x), device.put(indices)), reference(x, c, adapters, indices))


@pytest.mark.parametrize("dtype", DTYPES)
def test_intermediate_past_65504(device, dtype):
    check_intermediate_past_65504(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_intermediate_is_float32(device, rng, dtype):
    check_intermediate_is_float32(device, rng, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_values(device, rng, dtype):
    check_non_finite_values(device, rng, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_scaling(device, rng, dtype):
    check_non_finite_scaling(device, rng, dtype)


# --- slices and epilogue --------------------------------------------------------------------------------------------


SLICES = {
    "query, key, value": ([(0, 48), (48, 64), (64, 80)], [(16, 16, 16), (5, None, 20), (None, 1, 0)]),
    "odd borders, gaps, any order": ([(61, 79), (3, 30)], [(4, 17), (2, 2), (20, None)]),
}


@pytest.mark.parametrize("case", SLICES)
def test_slices(device, rng, case):
    slices, ranks = SLICES[case]
    M, N, K = 21, 80, 40
    x, c = integers(rng, (M, K)), integers(rng, (K, N))
    op, adapters = MultiLoRA(device.put(c), 4, 20, slices=slices), {}
    poison(op)
    for slot, of_slices in enumerate(ranks):
        pairs = sliced(rng, K, slices, of_slices)
        a, b = ([None if x is None else device.put(x) for x in side] for side in zip(*pairs, strict=True))
        op.load(slot, a, b, 0.5)
        adapters[slot] = (*block_matrices(K, N, slices, pairs), 0.5)
    indices = rng.integers(-1, 4, M).astype(np.int32)
    out = device.guarded((M, N), np.float16)
    op(device.put(x), device.put(indices), out=out)
    same(device, out, reference(x, c, adapters, indices))


@pytest.mark.parametrize("dtype, activation", [("float16", None), ("bfloat16", "gelu"), ("float16", "swiglu")])
def test_epilogue(device, rng, dtype, activation):
    """Bias and residual belong to the rows of the result; gate and up have adapters of their own."""
    M, N, K = 20, 2 * 36, 40
    x, c = ((rng.standard_normal(shape) * 0.3).astype(DTYPES[dtype]) for shape in ((M, K), (K, N)))
    cols = N // 2 if activation == "swiglu" else N
    bias, residual = rng.standard_normal(N).astype(np.float32), rng.standard_normal((M, cols)).astype(DTYPES[dtype])
    slices = [(0, N // 2), (N // 2, N)]
    op = MultiLoRA(device.put(c), 2, 8, slices=slices, bias=device.put(bias), activation=activation)
    adapters = {}
    for slot in (0, 1):
        pairs = sliced(rng, K, slices, (8, 3 + slot), dtype)
        op.load(slot, [device.put(a) for a, _ in pairs], [device.put(b) for _, b in pairs], 0.25)
        adapters[slot] = (*block_matrices(K, N, slices, pairs), 0.25)
    indices = rng.integers(-1, 2, M).astype(np.int32)
    out = device.guarded((M, cols), DTYPES[dtype])
    op(device.put(x), device.put(indices), residual=device.put(residual), out=out)
    want = reference(x, c, adapters, indices, bias=bias, activation=activation) + residual
    assert_close(device.get(out), want, DTYPES[dtype], k=4 * (K + 16))
    base = rawops.gemm(
        device.put(x), device.put(c), bias=device.put(bias), residual=device.put(residual), activation=activation
    )
    np.testing.assert_array_equal(bits(device, out)[indices < 0], bits(device, base)[indices < 0])


def test_output_over_an_input(device, rng):
    x, c, residual = integers(rng, (16, 16)), integers(rng, (16, 16)), integers(rng, (16, 16))
    adapters, indices = {0: adapter(rng, 16, 16, 4)}, np.resize([0, -1], 16).astype(np.int32)
    want = reference(x, c, adapters, indices) + residual
    for target in ("x", "residual", "c"):
        on_device = {"x": device.put(x.copy()), "c": device.put(c.copy()), "residual": device.put(residual.copy())}
        op = MultiLoRA(on_device["c"], 1, 4)
        load(device, op, adapters)
        out = on_device[target]
        assert op(on_device["x"], device.put(indices), residual=on_device["residual"], out=out) is out
        same(device, out, want)


@pytest.mark.parametrize("M", [16, 80])
def test_output_over_the_indices(device, rng, monkeypatch, M):
    """Which a kernel may read when another block has written its tile: the result is computed aside."""
    x, c, adapters = integers(rng, (M, 16)), integers(rng, (16, 16)), {0: adapter(rng, 16, 16, 4)}
    op = MultiLoRA(device.put(c), 1, 4)
    load(device, op, adapters)
    aside = []
    monkeypatch.setattr(Product, "aside", lambda *args, own=Product.aside: aside.append(own(*args)) or aside[-1])
    out, indices = device.put(np.zeros((M, 16), np.float16)), np.resize([0, -1], M).astype(np.int32)
    places = out.reshape(-1)[6 : 6 + 2 * M].view(np.int32)
    places[...] = device.put(indices)
    assert op(device.put(x), places, out=out) is out
    same(device, out, reference(x, c, adapters, indices))
    assert len(aside) == 1


def test_batch_axes_write_out_as_rows_do(device, rng):
    """float32 is not rounded on its way, whether out is contiguous or not, and no copy is made where it is."""
    x, c, residual = (rng.standard_normal(shape).astype(np.float16) for shape in ((6, 24), (24, 16), (6, 16)))
    op = MultiLoRA(device.put(c), 1, 4)
    load(device, op, {0: adapter(rng, 24, 16, 4)})
    indices = device.put(np.array([0, -1, 0, 0, -1, -1], np.int32))
    want = device.guarded((6, 16), np.float32)
    op(device.put(x), indices, residual=device.put(residual), out=want)
    given = device.put(x.reshape(2, 3, 24)), indices.reshape(2, 3)
    for out in (device.guarded((2, 3, 16), np.float32), device.guarded((3, 2, 16), np.float32).swapaxes(0, 1)):
        assert op(*given, residual=device.put(residual.reshape(2, 3, 16)), out=out) is out
        np.testing.assert_array_equal(device.get(out).reshape(6, 16), device.get(want))
    with pytest.raises(TypeError, match="MultiLoRA: out must be float16 or float32"):
        op(*given, out=device.put(np.zeros((2, 3, 16))))


def test_nothing(device, rng):
    """No rows, no columns, K = 0, a stack for rank 0."""
    x, c = device.put(integers(rng, (3, 8))), device.put(integers(rng, (8, 16)))
    op = MultiLoRA(c, 1, 0, bias=device.put(np.arange(16, dtype=np.float16)))
    op.load(0, x[:1, :0].reshape(1, 0).repeat(8, 0), c[:0])
    indices = device.put(np.zeros(3, np.int32))
    same(device, op(x, indices), references.gemm(device.get(x), device.get(c)) + np.arange(16))
    assert op(x[:0], indices[:0]).shape == (0, 16)
    assert MultiLoRA(c[:, :0], 1, 4)(x, indices).shape == (3, 0)
    empty = MultiLoRA(c[:0], 1, 4, bias=device.put(np.arange(16, dtype=np.float16)))
    empty.load(0, device.put(np.zeros((0, 4), np.float16)), device.put(integers(rng, (4, 16))))
    same(device, empty(x[:, :0], indices), np.tile(np.arange(16.0), (3, 1)))
    same(device, empty(x[:1, :0], indices[:1]), np.arange(16.0)[None])
    same(device, empty(x[:, None, :0], indices[:, None]), np.tile(np.arange(16.0), (3, 1, 1)))
    assert op(x[:0, None], indices[:0, None], residual=x[:0, None, :1]).shape == (0, 1, 16)
    narrow = MultiLoRA(c, 1, 4, slices=[(3, 3), (0, 3)])  # one of no columns
    narrow.load(0, [x[:1].T, x[:1].T], [x[:1, :0], x[:1, :3]])
    want = references.gemm(device.get(x), device.get(c))
    want[:, :3] += device.get(x).astype(float) @ device.get(x[:1].T) @ device.get(x[:1, :3])
    same(device, narrow(x, indices), want)


def test_single_row(device, rng):
    """Where gemm streams the weight, an adapter comes in as an addend; without one, gemm's bits."""
    N, K, slices = 80, 72, [(0, 33), (40, 80)]
    x, c = rng.standard_normal((1, K)).astype(np.float16), rng.standard_normal((N, K)).astype(np.float16).T
    weight = device.put(c.T.copy()).T
    residual = rng.standard_normal((1, N)).astype(np.float32)
    op = MultiLoRA(weight, 3, 20, slices=slices, activation="silu")
    poison(op)
    adapters = load_sliced(device, rng, op, [(20, 3), (None, 16)])
    for index in (0, 1, 2, -1):
        out = device.guarded((1, N), np.float16)
        indices = np.array([index], np.int32)
        op(device.put(x), device.put(indices), residual=device.put(residual), out=out)
        assert_close(
            device.get(out), reference(x, c, adapters, indices, activation="silu") + residual, np.float16, k=400
        )
    base = rawops.gemm(device.put(x), weight, residual=device.put(residual), activation="silu")
    np.testing.assert_array_equal(bits(device, out), bits(device, base))


def test_no_slots(device, rng):
    x, c = device.put(integers(rng, (5, 64))), device.put(integers(rng, (64, 40)))
    got = MultiLoRA(c, 0, 8)(x, device.put(np.array([-1, 3, 0, -1, 2], np.int32)))
    np.testing.assert_array_equal(device.get(got), device.get(rawops.gemm(x, c)))


# --- checks, graphs -------------------------------------------------------------------------------------------------


def test_checked_indices(device, rng, monkeypatch):
    """With RAWOPS_CHECK=1 indices that name no adapter raise; without, they stand for none."""
    x, c = device.put(integers(rng, (3, 8))), device.put(integers(rng, (8, 16)))
    op = MultiLoRA(c, 2, 4)
    load(device, op, {1: adapter(rng, 8, 16, 4)})
    monkeypatch.setattr(config, "current", lambda: config.Config(check=True))
    op(x, device.put(np.array([1, -1, 1], np.int32)))
    minus = device.put(np.full(3, -1, np.int32))
    for index, text in ((2, "be -1 or between 0 and 1, got 2"), (-2, "between 0 and 1, got -2"), (0, "got empty 0")):
        with pytest.raises(ValueError, match=text):
            op(x, device.put(np.array([1, index, -1], np.int32)))
    with pytest.raises(ValueError, match="lora_indices must be -1 or among 0 slots, got 1"):
        MultiLoRA(c, 0, 4)(x, device.put(np.array([1, -1, -1], np.int32)))
    with pytest.raises(TypeError, match="lora_indices must have dtype int32"):
        op(x, device.put(np.array([1, -1, 1])))
    with pytest.raises(TypeError, match="lora_indices must be an array, got None"):
        op(x, None)
    same(device, op(x[:, None], device.put(np.full((3, 1), -1, np.int32))), device.get(op(x, minus)).reshape(3, 1, 16))
    op.load(0, device.put(integers(rng, (8, 0))), device.put(integers(rng, (0, 16))))
    same(device, op(x, device.put(np.zeros(3, np.int32))), device.get(op(x, minus)))  # of rank 0, and not empty
    op.unload(0)
    with pytest.raises(ValueError, match="got empty 0"):
        op(x, device.put(np.zeros(3, np.int32)))


def test_errors(device):
    def zeros(*shape, dtype=np.float16):
        return device.put(np.zeros(shape, dtype))

    array = "an array" if device.is_emulated else "a GPU array"
    x, c, indices = zeros(4, 8), zeros(8, 16), zeros(4, dtype=np.int32)
    op, sliced = MultiLoRA(c, 2, 4), MultiLoRA(c, 2, 4, slices=[(0, 8), (8, 16)])
    for error, text, call in [
        (TypeError, "MultiLoRA: c must have dtype", lambda: MultiLoRA(zeros(8, 16, dtype="f4"), 2, 4)),
        (ValueError, "MultiLoRA: c must have 2 dim", lambda: MultiLoRA(zeros(2, 8, 16), 2, 4)),
        (ValueError, "MultiLoRA: max_loras must be between 0", lambda: MultiLoRA(c, -1, 4)),
        (ValueError, "MultiLoRA.load: slot must be among 0 slots, got 0", lambda: MultiLoRA(c, 0, 4).load(0, x.T, x)),
        (TypeError, "MultiLoRA: max_rank must be an integer", lambda: MultiLoRA(c, 1, 4.0)),
        (ValueError, "MultiLoRA: activation must be", lambda: MultiLoRA(c, 1, 4, activation="tanh")),
        (ValueError, "MultiLoRA: c must have an even", lambda: MultiLoRA(c[:, :7], 1, 4, activation="swiglu")),
        (ValueError, "MultiLoRA: bias must have shape (16,)", lambda: MultiLoRA(c, 1, 4, bias=zeros(8))),
        (TypeError, "MultiLoRA: slices must be pairs", lambda: MultiLoRA(c, 1, 4, slices=[3])),
        (ValueError, "MultiLoRA: slices must have at least one", lambda: MultiLoRA(c, 1, 4, slices=[])),
        (ValueError, "MultiLoRA: slices must not overlap", lambda: MultiLoRA(c, 1, 4, slices=[(8, 16), (0, 9)])),
        (ValueError, "MultiLoRA: slices must be between 0 and 16", lambda: MultiLoRA(c, 1, 4, slices=[(0, 17)])),
        (ValueError, "MultiLoRA: slices must start before", lambda: MultiLoRA(c, 1, 4, slices=[(9, 8)])),
        (ValueError, "MultiLoRA.load: slot must be between 0 and 1", lambda: op.load(2, zeros(8, 4), zeros(4, 16))),
        (ValueError, "MultiLoRA.unload: slot must be between 0 and 1, got -1", lambda: op.unload(-1)),
        (ValueError, "MultiLoRA.unload: slot must be among 0 slots, got 0", lambda: MultiLoRA(c, 0, 4).unload(0)),
        (ValueError, "MultiLoRA.load: a must have shape (8, 4)", lambda: op.load(0, zeros(4, 4), zeros(4, 16))),
        (ValueError, "MultiLoRA.load: b must have shape (4, 16)", lambda: op.load(0, zeros(8, 4), zeros(16, 4))),
        (ValueError, "MultiLoRA.load: a must have at most 4", lambda: op.load(0, zeros(8, 5), zeros(5, 16))),
        (TypeError, "MultiLoRA.load: a must be an array", lambda: op.load(0, None, zeros(5, 16))),
        (TypeError, "MultiLoRA.load: b must have dtype", lambda: op.load(0, zeros(8, 4), zeros(4, 16, dtype="f4"))),
        (TypeError, "MultiLoRA.load: scaling must be", lambda: op.load(0, zeros(8, 4), zeros(4, 16), "1")),
        (TypeError, f"MultiLoRA.load: a[0] must be {array}, got str", lambda: op.load(0, "x", zeros(4, 16))),
        (TypeError, f"MultiLoRA.load: a[0] must be {array}, got float", lambda: op.load(0, [1.0], zeros(4, 16))),
        (TypeError, f"MultiLoRA.load: b[0] must be {array}, got str", lambda: op.load(0, zeros(8, 4), "x")),
        (ValueError, "MultiLoRA.load: a must have an array for each of 2", lambda: sliced.load(0, x, x)),
        (ValueError, "MultiLoRA.load: b must have an array for each of 2", lambda: sliced.load(0, [x, x], [x])),
        (
            ValueError,
            "MultiLoRA.load: b[1] must have shape (4, 8)",
            lambda: sliced.load(0, [None, zeros(8, 4)], [None, zeros(4, 16)]),
        ),
        (ValueError, "MultiLoRA: x must have shape (..., M, 8)", lambda: op(zeros(4, 5), indices)),
        (ValueError, "MultiLoRA: lora_indices must have shape (2, 4)", lambda: op(zeros(2, 4, 8), indices)),
        (TypeError, "MultiLoRA: x must have dtype float16", lambda: op(zeros(4, 8, dtype="f4"), indices)),
        (ValueError, "MultiLoRA: lora_indices must have shape (4,)", lambda: op(x, indices[:3])),
        (TypeError, "MultiLoRA: lora_indices must have dtype int32", lambda: op(x, zeros(4, dtype="i8"))),
        (TypeError, "MultiLoRA: lora_indices must be an array", lambda: op(x, None)),
        (ValueError, "MultiLoRA: out must have shape (4, 16)", lambda: op(x, indices, out=zeros(16, 4))),
    ]:
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value).startswith(text)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [64, 400])
def test_graph_replay(device, rng, M):
    """A captured call sees other indices, other contents of x, and adapters loaded and unloaded since."""
    import cupy

    N, K = 1024, 256
    x, c = integers(rng, (M, K)), integers(rng, (K, N))
    op = MultiLoRA(device.put(c), 40, 16)
    adapters = {slot: adapter(rng, K, N, 1 + slot % 16) for slot in range(40)}
    load(device, op, adapters)
    on_device, indices = device.put(x), device.put(np.full(M, -1, np.int32))
    out = cupy.empty((M, N), cupy.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        op(on_device, indices, out=out)
        stream.begin_capture()
        op(on_device, indices, out=out)
        graph = stream.end_capture()
        for step in range(3):
            now = rng.integers(-1, 42, M).astype(np.int32)
            x = integers(rng, (M, K))
            on_device.set(x)
            indices.set(now)
            if step == 1:
                op.unload(3)
                del adapters[3]
                adapters[5] = adapter(rng, K, N, 7, 2.0)
                load(device, op, {5: adapters[5]})
            graph.launch()
            stream.synchronize()
            same(device, out, reference(x, c, adapters, now))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 64, 300, 2048, 4100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_thousands_of_slots(device, rng, M, dtype):
    """As many as serving wants, far apart in memory; base rows have gemm's bits at these sizes as well."""
    N, K, slots = 2048, 1024, 4000
    x, c = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in ((M, K), (K, N)))
    op = MultiLoRA(device.put(c), slots, 8)
    used = rng.choice(slots, 20, replace=False)
    adapters = {int(slot): adapter(rng, K, N, 8, 0.125, dtype) for slot in used}
    load(device, op, adapters)
    indices = rng.choice([*used, -1, -1], M).astype(np.int32)
    got = op(device.put(x), device.put(indices))
    base = bits(device, rawops.gemm(device.put(x), device.put(c)))
    np.testing.assert_array_equal(bits(device, got)[indices < 0], base[indices < 0])
    rows = rng.choice(M, min(M, 40), replace=False)
    assert_close(device.get(got)[rows], reference(x[rows], c, adapters, indices[rows]), DTYPES[dtype], k=4 * K)
