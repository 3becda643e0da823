"""Hopper's kernel on slices of K: exact sums, every epilogue after them, and when slices pay."""

import dataclasses
import math
import re

import numpy as np
import pytest
from hopper_gemm import padded

from rawops import _gemm_call
from rawops import _gemm_sm90_split as split
from rawops._gemm_sm90_config import Problem, configure
from rawops._gemm_sm90_specs import BIASED, DIRECT, PLAIN, STAGED
from rawops.gemm import Gemm, gemm
from rawops.testing import references

FLOAT16 = np.dtype("float16")
H200 = {"sm_count": 132, "max_shared_bytes": 232448}


def ran_in_slices(device, lanes: int | None = None) -> bool:
    """Tell whether the last product did; and with as many threads for the slices of a sum, if `lanes` says so."""
    if not device.report:
        return True
    first, second = (launch.kernel for launch in device.report[-2:])
    found = re.search(r"gemm_reduce<\w+, \w+, (\d+), \d+, true>", second)
    return "gemm_sm90" in first and found is not None and lanes in (None, int(found[1]))


@pytest.mark.parametrize("layouts", [("row", "row"), ("row", "col"), ("col", "col")], ids="-".join)
@pytest.mark.parametrize("M, N, K", [(64, 72, 512), (130, 66, 256)])
def test_exact(hopper, four_slices, rng, M, N, K, layouts):
    a, b = rng.integers(-3, 4, (M, K)).astype(FLOAT16), rng.integers(-3, 4, (K, N)).astype(FLOAT16)
    out = hopper.guarded((M, N), FLOAT16)
    gemm(padded(hopper, a, layouts[0]), padded(hopper, b, layouts[1]), out=out)
    np.testing.assert_array_equal(hopper.get(out), (a.astype(int) @ b.astype(int)).astype(FLOAT16))
    assert ran_in_slices(hopper)


@pytest.mark.parametrize("layouts", [("row", "row"), ("row", "col"), ("col", "row")], ids="-".join)
@pytest.mark.parametrize(
    "sizes, tile, count, together, ahead, lanes",
    [
        ((130, 66, 456), (64, 64), 4, None, 2, 4),  # the last slice ends inside a block of K
        ((130, 136, 448), (64, 128), 3, "pairs", 9, 1),  # the last slice is shorter
        ((20, 70, 648), (64, 64), 5, None, 1, 2),
        ((250, 260, 520), (128, 128), 2, "pairs", 0, 1),
        ((100, 24, 1280), (64, 64), 18, None, 0, 8),  # the last slices have nothing
        ((100, 72, 456), (64, 64), 3, "squares", 5, 1),
        ((130, 300, 328), (64, 64), 2, "squares", 0, 1),  # tiles with nothing
        ((200, 130, 456), (128, 128), 2, "squares", 3, 1),
        ((120, 260, 392), (64, 128), 3, "squares", 2, 1),
    ],
)
def test_every_slice(hopper, monkeypatch, rng, sizes, tile, count, together, ahead, lanes, layouts):
    """Slices of any length, by tiles that share what they load or do not, with what is asked for ahead.

    `lanes` threads add up a sum, as few as they are of many sums alone.
    """
    if lanes < 4:
        monkeypatch.setattr(_gemm_call, "_FEW_GROUPS", 0)

    def chosen(problem, *limits):
        sharing = {} if together is None else {together: True}
        config = configure(split.partial(problem, count), *limits, *tile, **sharing)
        return split.Slices(count, dataclasses.replace(config, stages=3), ahead)

    monkeypatch.setattr(split, "select_slices", chosen)
    M, N, K = sizes
    a, b = rng.integers(-3, 4, (M, K)).astype(FLOAT16), rng.integers(-3, 4, (K, N)).astype(FLOAT16)
    out = hopper.guarded((M, N), FLOAT16)
    gemm(padded(hopper, a, layouts[0]), padded(hopper, b, layouts[1]), out=out)
    np.testing.assert_array_equal(hopper.get(out), (a.astype(int) @ b.astype(int)).astype(FLOAT16))
    assert ran_in_slices(hopper, lanes)


@pytest.mark.parametrize("activation, lanes", [("gelu", 4), ("swiglu", 4), ("swiglu", 1)])
def test_epilogue_comes_after_the_sum(hopper, four_slices, monkeypatch, rng, activation, lanes):
    monkeypatch.setattr(_gemm_call, "_FEW_GROUPS", 0 if lanes == 1 else 2**15)
    a, b, c = (rng.standard_normal(shape).astype(FLOAT16) for shape in ((66, 256), (256, 80), (66, 80)))
    bias = rng.standard_normal(80).astype(FLOAT16)
    op = Gemm(66, 80, 256, "float16", alpha=0.25, beta=2.0, activation=activation, out_dtype="float32")
    for sign in (1, -1):  # the plan keeps its workspace
        got = op(hopper.put(a * FLOAT16.type(sign)), hopper.put(b), hopper.put(c), bias=hopper.put(bias))
        wide = [x.astype(float) for x in (sign * a, b, c)]
        want = references.gemm(*wide, alpha=0.25, beta=2.0, bias=bias.astype(float), activation=activation)
        np.testing.assert_allclose(hopper.get(got), want, rtol=1e-5, atol=1e-4)
    assert ran_in_slices(hopper, lanes)


def test_alpha_of_zero_reads_nothing(hopper, four_slices):
    a, b = np.full((64, 256), np.nan, FLOAT16), np.full((256, 64), np.nan, FLOAT16)
    assert (hopper.get(gemm(hopper.put(a), hopper.put(b), alpha=0.0)) == 0).all()


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((128, 128, 32768), (64, 64, 29, "squares")),
        ((64, 64, 65536), (64, 64, 64, None)),
        ((128, 256, 16384), (64, 64, 14, "squares")),
        ((256, 256, 16384), (64, 128, 14, "squares")),
        ((512, 512, 16384), (128, 128, 7, "squares")),
        ((256, 1024, 8192), (64, 128, 4, "pairs")),
        ((64, 128, 16384), (64, 64, 32, None)),
        ((16, 64, 8192), (64, 64, 64, None)),
        ((128, 128, 4096), (64, 64, 13, None)),
        ((256, 256, 4096), (64, 64, 6, None)),
        ((128, 192, 12288), (64, 64, 16, None)),  # three tiles across
        ((16, 1024, 4096), (64, 64, 8, None)),
        ((128, 128, 32760), (64, 64, 29, "squares")),  # the last slice is shorter
        ((512, 512, 4096), (64, 128, 4, "pairs")),
        ((384, 384, 8192), (64, 128, 6, "pairs")),
        ((4096, 4096, 4096), None),
        ((64, 4096, 4096), None),
        ((64, 4096, 14336), None),
        ((128, 4096, 14336), (64, 128, 2, "pairs")),
        ((4096, 64, 4096), None),
        ((128, 128, 512), None),
    ],
)
def test_when_it_pays(sizes, expected):
    problem = Problem(*sizes)
    found = split.select_slices(problem, **H200)
    assert (found and (found.config.block_m, found.config.block_n, found.count, shared_by(found.config))) == expected
    assert split.select_slices(dataclasses.replace(problem, batches=2), **H200) is None


def shared_by(config) -> str | None:
    return "pairs" if config.pairs else "squares" if config.squares else None


def test_slices_fill_one_round():
    for sizes in ((128, 192, 12288), (300, 304, 8192), (64, 2048, 8192), (17, 33, 640)):
        problem = Problem(*sizes)
        found = split.candidates(problem, **H200)
        assert [s.config.cost for s in found] == sorted(s.config.cost for s in found)
        assert found
        for s in found:
            tiles = -(-problem.M // s.config.block_m) * -(-problem.N // s.config.block_n)
            step = split.step_of(problem.K, s.count)
            assert step >= 2 * 64 and step * (s.count - 1) < problem.K <= step * s.count  # no slice has nothing
            assert s.config.blocks == tiles * s.count <= 132
            assert (s.ahead > 0) == (s.config.blocks <= 66 or s.config.squares)
            assert not shared_by(s.config) or -(-problem.M // s.config.block_m) % 2 == 0
            if s.config.squares:
                assert -(-problem.N // s.config.block_n) % 2 == 0
                assert s.config.blocks % 4 == 0
                assert s.config.blocks <= 116  # 29 clusters of four find room at a time


def test_predicted_time():
    """The sum that a reader would do: 128 x 128 x 32768 in 32 slices of 64 x 128 on 64 SMs, in pairs that share b."""
    problem = Problem(128, 128, 32768)
    config = configure(split.partial(problem, 32), *H200.values(), 64, 128, pairs=True)
    multiplying = 16 * max(132 * 64 // 160, 300 // 8)  # blocks of K, of which eight are under way
    from_l2 = 64 * 16 * (64 + 128 * 3 // 5) * 128 // 32000
    from_memory = (128 * 7 + 128 * 7) * 32768 * 2 // 71400  # neither operand is read twice
    main_loop = math.isqrt(multiplying**2 + from_l2**2 + from_memory**2)
    sums = 64 * 128 * 4 // 120 + 32 * 128 * 128 * 4 // 8200
    cost = split.predict(problem, config, 32, 132)
    assert cost == 700 + main_loop + 215 - 30 + sums
    assert abs(cost * 4 / 1755 - 7.3) < 0.4  # us, as measured


def test_predicted_time_of_squares():
    """The same in 29 slices of 64 x 64 on 116 SMs, four of which share both operands."""
    problem = Problem(128, 128, 32768)
    config = configure(split.partial(problem, 29), *H200.values(), 64, 64, squares=True)
    main_loop = math.isqrt(
        (18 * (300 // 8)) ** 2
        + (18 * (64 + 64) * 128 // 480) ** 2
        + ((128 * 7 + 128 * 7) * 32768 * 2 // 71400 * 5 // 6) ** 2
    )
    cost = split.predict(problem, config, 29, 132)
    assert cost == 700 + 200 + main_loop + 215 - 30 + 64 * 64 * 4 // 120 + 29 * 128 * 128 * 4 // 8200
    assert abs(cost * 4 / 1755 - 6.8) < 0.3  # us, as measured


@pytest.mark.parametrize("finish", [STAGED, BIASED, DIRECT])
def test_an_epilogue_changes_no_slices(finish):
    """MultiLoRA gives a product an addend, and its rows the bits of one without."""
    for sizes in ((128, 128, 32768), (64, 1024, 8192), (512, 512, 4096), (64, 4096, 4096)):
        plain, other = (split.select_slices(Problem(*sizes, finish=f), **H200) for f in (PLAIN, finish))
        assert (plain and plain.count) == (other and other.count)
