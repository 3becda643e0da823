"""What the tests of the Hopper GEMM and LoRA share: the device, a tile of the test's choice, operands in NaN."""

import dataclasses

import numpy as np
import pytest
from conftest import Device

import rawops
from rawops import _gemm_8bit_config
from rawops import _gemm_sm90 as sm90
from rawops import _gemm_sm90_split as split
from rawops._gemm_sm90_config import configure
from rawops.testing import has_gpu


@pytest.fixture
def hopper():
    """A Hopper GPU, or the emulator of one; `report` tells which kernels ran there."""
    if has_gpu():
        import cupy

        found = Device(cupy)
        found.report = []
        if cupy.cuda.Device().compute_capability != "90":
            pytest.skip("needs a GPU of compute capability 9.0")
        yield found
    else:
        found = Device(np)
        with rawops.emulate(arch="sm_90a") as emu:
            found.report = emu.report
            yield found
    found.check_guards()


@pytest.fixture
def four_slices(monkeypatch):
    """Have gemm split K into four, however small the product is."""

    def chosen(problem, *limits):
        return split.Slices(4, configure(split.partial(problem, 4), *limits, 64, 64))

    monkeypatch.setattr(split, "select_slices", chosen)


@pytest.fixture
def force(monkeypatch):
    """Fix tile, ring and number of blocks: few blocks walk over many tiles, short rings wrap often."""

    def fix(
        block_n: int,
        ping_pong=False,
        stages: int = 2,
        blocks: int = 2,
        block_m: int = 128,
        cluster=1,
        rides=True,
        raster_rows: int | None = None,
        pairs=False,
    ) -> None:
        def chosen(problem, *limits):
            if problem.finish == sm90.DIRECT and problem.N <= 64 and not rides:
                return select(problem, *limits)  # the product that makes y
            riding = rides and problem.rank > 0
            config = configure(problem, *limits, block_m, block_n, cluster, ping_pong, riding, pairs)
            assert config.stages >= stages
            if cluster == 1:
                config = dataclasses.replace(config, blocks=blocks)
            return dataclasses.replace(config, stages=stages, raster_rows=raster_rows or config.raster_rows)

        select = sm90.select_config
        for module in (sm90, _gemm_8bit_config):
            monkeypatch.setattr(module, "select_config", chosen)
        monkeypatch.setattr(sm90, "wants_split", lambda *_: False)
        monkeypatch.setattr(split, "select_slices", lambda *_: None)

    return fix


def padded(device, x: np.ndarray, layout: str):
    """x with the last two axes in row-major ("row") or column-major ("col") order, rows of 16 bytes apart, in NaN."""
    stored = x if layout == "row" else x.swapaxes(-1, -2)
    rows, cols = stored.shape[-2:]
    room = np.full((*x.shape[:-2], rows + 2, -(-cols // 8) * 8 + 16), np.nan, x.dtype)
    room[..., 1:-1, 8 : 8 + cols] = stored
    view = device.put(room)[..., 1:-1, 8 : 8 + cols]
    return view if layout == "row" else view.swapaxes(-1, -2)


def ran_on_hopper(device, entry: str = "gemm_sm90") -> bool:
    """Tell whether the last launch was of that kernel, as far as the device reports it."""
    return not device.report or entry in device.report[-1].kernel
