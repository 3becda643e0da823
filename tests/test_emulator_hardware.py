"""The emulator computes what a GPU computes: every instruction family against results recorded on an H200."""

import json

import numpy as np
import pytest
from hardware.families import FAMILIES, RECORDED, Family

import rawops

each_family = pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])


@pytest.fixture(scope="module")
def recorded():
    """What scripts/record_hardware.py wrote."""
    with np.load(RECORDED) as file:
        yield dict(file)


def test_every_family_was_recorded_with_the_operands_it_has_now(recorded):
    about = json.loads(recorded["about"].item())
    assert about["operands"] == {family.name: family.fingerprint() for family in FAMILIES}


@each_family
def test_the_emulator_agrees_with_the_gpu(family: Family, recorded):
    assert family.name in recorded, "not recorded: run scripts/record_hardware.py on an H200"
    with rawops.emulate(arch="sm_90a"):
        got = family.run(np)
    difference = family.differences(recorded[family.name], got)
    assert not difference, difference


@pytest.mark.gpu
@each_family
def test_this_gpu_agrees_with_the_recorded_one(family: Family, recorded):
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("recorded on, and for, sm_90a")
    difference = family.differences(recorded[family.name], family.run(cupy))
    assert not difference, difference
