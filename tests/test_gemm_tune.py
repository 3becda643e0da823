"""gemm.tune: candidates that are all right, the fastest of them from then on, and the file that keeps the choice."""

import itertools
import json
import warnings

import numpy as np
import pytest

import rawops
from rawops import _gemm_choices as choices
from rawops import _gemm_config, _gemm_tune
from rawops import _gemm_sm90 as sm90
from rawops._gemm_call import Product
from rawops.gemm import gemm

H200 = {"sm_count": 132, "max_shared_bytes": 232448}


@pytest.fixture
def own_choices(tmp_path, monkeypatch):
    """A file of this test's own, not read yet, and few candidates: each is compiled."""
    monkeypatch.setattr(choices, "MOST", 3)
    monkeypatch.setattr(choices, "path", lambda: tmp_path / "choices" / "gemm_choices.json")
    another_process()
    yield
    another_process()


def another_process() -> None:
    choices._kept.cache_clear()
    Product.prepare_anew()


@pytest.fixture
def fake_times(monkeypatch):
    """Have the candidate with this index be the fastest."""

    def fix(fastest: int) -> None:
        def time_runs(device, runs):
            return [abs(i - fastest) + 1.0 for i in range(len(runs))]

        monkeypatch.setattr(_gemm_tune, "time_runs", time_runs)

    return fix


def operands(device, rng, M, N, K, dtype="float16") -> tuple:
    return tuple(device.put(rng.integers(-3, 4, shape).astype(dtype)) for shape in ((M, K), (K, N)))


def exact(device, a, b) -> np.ndarray:
    return device.get(a).astype(int) @ device.get(b).astype(int)


def test_every_candidate_is_right_and_the_fastest_is_used(hopper, own_choices, fake_times, rng, monkeypatch):
    monkeypatch.setattr(choices, "MOST", 8)
    a, b = operands(hopper, rng, 66, 80, 136)
    fake_times(0)
    count = len(gemm.tune(a, b).microseconds)
    assert count == 8
    for fastest in range(count):
        fake_times(fastest)
        tuned = gemm.tune(a, b)
        assert [*tuned.microseconds.values()] == sorted(tuned.microseconds.values())
        assert tuned.chosen == next(iter(tuned.microseconds))
        np.testing.assert_array_equal(hopper.get(gemm(a, b)), exact(hopper, a, b))
        if hopper.is_emulated and "sm90" in tuned.chosen:
            block_m, block_n = (tuned.chosen.split(f"{name} ")[1].split(",")[0] for name in ("block_m", "block_n"))
            assert f", {block_m}, {block_n}, " in hopper.report[-1].kernel


@pytest.mark.parametrize("dtype, precision", [("float16", None), ("float32", "tf32"), ("float64", None)])
def test_kernels_of_every_card(device, own_choices, fake_times, rng, monkeypatch, dtype, precision):
    a, b = operands(device, rng, 65, 24, 264, dtype)
    fake_times(2)
    assert "split_k" in gemm.tune(a, b, precision=precision).chosen or not device.is_emulated
    monkeypatch.setattr(Product, "configure", None)  # nobody asks for the rule's choice
    np.testing.assert_array_equal(device.get(gemm(a, b, precision=precision)), exact(device, a, b))


def test_choices_outlive_the_process(hopper, own_choices, fake_times, rng):
    a, b = operands(hopper, rng, 66, 80, 136)
    gemm(a, b)
    default = hopper.report[-1].kernel if hopper.is_emulated else None
    fake_times(2)
    gemm.tune(a, b)
    gemm(a, b)
    tuned = hopper.report[-1].kernel if hopper.is_emulated else None
    another_process()
    gemm(a, b)
    if hopper.is_emulated:
        assert hopper.report[-1].kernel == tuned != default
        rawops.Gemm(66, 80, 136, "float16")(a, b)
        assert hopper.report[-1].kernel == tuned
        for other in (operands(hopper, rng, 66, 80, 72), operands(hopper, rng, 67, 80, 136)):
            gemm(*other)  # another problem
            assert hopper.report[-1].kernel != tuned
        gemm(a, b, split_k=2)  # what is prescribed stays so
        assert "gemm_reduce" in hopper.report[-1].kernel
    fake_times(0)
    gemm.tune(a, b)
    another_process()
    gemm(a, b)
    assert not hopper.is_emulated or hopper.report[-1].kernel == default


def test_the_epilogue_is_part_of_the_problem(hopper, own_choices, fake_times, rng):
    a, b = operands(hopper, rng, 66, 80, 72)
    c = hopper.put(np.full((66, 80), np.nan, np.float16))
    fake_times(1)
    gemm.tune(a, b, c, beta=0.0, bias=b[0], activation="relu")
    assert len(json.loads(choices.path().read_text())) == 1
    gemm.tune(a, b)
    assert len(json.loads(choices.path().read_text())) == 2


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"key": 5}', "\0\0", '{"key": {"kernel"'])
def test_a_damaged_file_costs_one_warning(device, own_choices, fake_times, rng, content):
    a, b = operands(device, rng, 20, 24, 40)
    choices.path().parent.mkdir()
    choices.path().write_text(content)
    another_process()
    with pytest.warns(RuntimeWarning, match="gemm.tune has kept in .*gemm_choices.json is ignored") as caught:
        gemm(a, b)
        gemm(a.T[:, :20].T, b)
    assert len(caught) == 1
    fake_times(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemm.tune(a, b)
        another_process()
        gemm(a, b)
    assert len(json.loads(choices.path().read_text())) == 1


def test_a_choice_that_is_no_candidate_is_ignored(device, own_choices, fake_times, rng):
    a, b = operands(device, rng, 20, 24, 40)
    fake_times(1)
    gemm.tune(a, b)
    (key,) = json.loads(choices.path().read_text())
    for strange in ({}, {"kernel": "sm90", "block_m": 7}, {"kernel": "sm80", "tile": "x", "split_k": 1}):
        choices.path().write_text(json.dumps({key: strange}))
        another_process()
        np.testing.assert_array_equal(device.get(gemm(a, b)), exact(device, a, b))


def test_processes_keep_each_others_choices(device, own_choices, fake_times, rng):
    a, b = operands(device, rng, 20, 24, 40)
    fake_times(1)
    gemm.tune(a, b)
    choices._kept()  # read before the other process writes
    others = json.loads(choices.path().read_text()) | {"of another": {"kernel": "sm80"}}
    choices.path().write_text(json.dumps(others))
    gemm.tune(a[:5], b)
    assert len(json.loads(choices.path().read_text())) == 3
    assert not [p for p in choices.path().parent.iterdir() if p.suffix == ".tmp"]


def test_without_a_folder_the_choice_holds_for_the_process(device, own_choices, fake_times, rng, monkeypatch):
    a, b = operands(device, rng, 20, 24, 40)
    monkeypatch.setattr(choices, "path", lambda: None)
    fake_times(1)
    tuned = gemm.tune(a, b)
    assert len(choices._kept()) == 1
    np.testing.assert_array_equal(device.get(gemm(a, b)), exact(device, a, b))
    assert "kernel sm80" in tuned.chosen or not device.is_emulated  # a Hopper card has kernels of its own


# --- what there is to try, and when it is measured ------------------------------------------------------------------


class Card:
    name, sm_count, max_shared_bytes = "a card", *H200.values()


def test_two_to_eight_candidates():
    for M, N, K, dtype in itertools.product((1, 20, 4096), (24, 28672), (40, 4096), ("float16", "float32", "float64")):
        problem = _gemm_config.Problem(dtype, M, N, K)
        hopper = sm90.Problem(M, N, K) if dtype == "float16" else None
        found = choices.Question(Card, problem, hopper).candidates()
        assert 2 <= len(found) <= 8 and found[0] is None
        described = [json.dumps(choices.describe(c)) for c in found]
        assert len(set(described)) == len(found)
        assert all(choices.Question(Card, problem, hopper).read(choices.describe(c)) == c for c in found)


def test_the_emulator_has_no_time(device, own_choices, rng):
    if device.is_emulated:
        with pytest.raises(rawops.UnsupportedError, match=r"gemm\.tune: needs a GPU, found emulated sm_80"):
            gemm.tune(*operands(device, rng, 8, 8, 8))
        assert not choices.path().exists()


def test_checks(device, own_choices, rng):
    a, b = operands(device, rng, 8, 8, 8)
    for kind, text, call in [
        (TypeError, "gemm.tune: b must be an array", lambda: gemm.tune(a, None)),
        (ValueError, "gemm.tune: b must have 8 rows", lambda: gemm.tune(a, b[:5])),
        (ValueError, "gemm.tune: c must be given", lambda: gemm.tune(a, b, beta=1.0)),
        (TypeError, "gemm.tune: b must have dtype float16", lambda: gemm.tune(a, b.astype("float32"))),
    ]:
        with pytest.raises(kind, match=text):
            call()


def test_nothing_to_tune(device, own_choices, fake_times):
    fake_times(0)
    assert len(gemm.tune(device.put(np.ones((0, 8), "f2")), device.put(np.ones((8, 4), "f2"))).microseconds) == 1
    assert not choices.path().exists()


def test_more_batch_axes_than_a_kernel_has_leave_the_choice_for_their_entries(device, own_choices, monkeypatch):
    def time_runs(device, runs):
        for run in runs:
            run()
        return [float(-i) for i in range(len(runs))]

    monkeypatch.setattr(_gemm_tune, "time_runs", time_runs)
    a, b = device.put(np.ones((3,) * 7, "f2"))[:, :2, :2, :2, :2], device.put(np.ones((3, 8), "f2"))
    gemm.tune(a[0], b)
    kept = dict(choices._kept())
    assert len(kept) == 1 and len(gemm.tune(a, b).microseconds) == 1
    assert choices._kept() == kept


@pytest.mark.gpu
def test_tuning_measures(device, own_choices, rng):
    a, b = operands(device, rng, 512, 1024, 2048)
    tuned = gemm.tune(a, b)
    times = [*tuned.microseconds.values()]
    assert len(times) >= 2 and times == sorted(times) and 1 < times[0] < 1000
    np.testing.assert_array_equal(device.get(gemm(a, b)), exact(device, a, b).astype("float16"))
