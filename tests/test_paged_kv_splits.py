"""Decoding over pages by several blocks a sequence: splits, shares of the line of tiles, clusters."""

import contextlib
import dataclasses

import numpy as np
import pytest
from paged_pool import Paged, close, decode_reference, forget_plans, queries, run

import rawops
from rawops import _paged_kv_attention, _paged_kv_kernel
from rawops._runtime.workspace import Workspace

LENS = [33, 1, 16, 0]


def test_splits_agree(device, rng):
    """One block a head, a fixed number, more than there are tiles, and as many as the device finds fit."""
    lens = [5, 0, 150, 17]
    p = Paged(rng, lens, 2, 64, 16)
    q = queries(rng, len(lens), 8, 64)
    want = decode_reference(q, p)
    for splits in (None, 1, 3, 30):
        close(*run(device, p, q, num_splits=splits), *want, "float16", 150)


def test_more_splits_than_tiles_take_no_memory(device, rng, monkeypatch):
    asked, shares = [], Workspace.shares
    monkeypatch.setattr(
        Workspace, "shares", lambda self, device, floats: asked.append(floats) or shares(self, device, floats)
    )
    forget_plans(monkeypatch)
    p = Paged(rng, [20], 1, 64, 16)
    q = queries(rng, 1, 1, 64)
    close(*run(device, p, q, num_splits=1024), *decode_reference(q, p), "float16", 20)
    assert asked == [2 * p.table.shape[1] * 16 * (64 + 2)]


GRIDS = {  # blocks for sequences of these lengths
    (5, 0, 150, 64, 17, 1): (1, 2, 5, 17, 100),
    (40, 40, 40, 40): (2, 3, 8, 9),  # items end where blocks do, or blocks are few too many for that
    (40, 40, 40, 35): (8,),
}


@pytest.mark.parametrize("lens", GRIDS, ids=str)
def test_shares_of_the_line_of_tiles(device, rng, monkeypatch, lens):
    """Grids that cut the line of tiles anywhere: within items, at their ends, several items a block.

    Each launch finds no parts of items in the workspace, and leaves none.
    """
    p = Paged(rng, lens, 2, 64, 16)
    q = queries(rng, len(lens), 4, 64)
    want = decode_reference(q, p)
    plan, workspace = _paged_kv_attention.plan_launch, Workspace()
    monkeypatch.setattr(_paged_kv_attention, "workspace_of_stream", lambda device: workspace)
    for blocks in GRIDS[lens]:

        def with_grid(*args, blocks=blocks, **kind):
            changes = {"grid": (blocks, 1, 1), "partial_floats": 2 * blocks * 16 * 66}
            return _paged_kv_kernel.Launch(**{**vars(plan(*args, **kind)), **changes})

        monkeypatch.setattr(_paged_kv_attention, "plan_launch", with_grid)
        monkeypatch.setattr(_paged_kv_attention.OP, "_plans", {})
        monkeypatch.setattr(_paged_kv_attention.OP, "_last", (None,) * 4)
        close(*run(device, p, q), *want, "float16", 150)
        assert not any(x.any() for x in workspace._arrays["shares"])


@pytest.mark.parametrize("lens", [[*[128] * 6, 113, 120, 127], [*[128] * 4, *[60] * 4, 0]], ids=str)
def test_clusters(device, rng, lens):
    """Two blocks of a cluster share an item; lengths that differ are cut otherwise, by the same launch."""
    with rawops.emulate(arch="sm_90a", check=True) if device.is_emulated else contextlib.nullcontext() as emu:
        p = Paged(rng, lens, 2, 64, 16)
        p.table = np.ascontiguousarray(p.table[:, :-2])
        q = queries(rng, len(lens), 8, 64)
        close(*run(device, p, q), *decode_reference(q, p), "float16", max(lens))
        assert not device.is_emulated or any("in_clusters" in launch.kernel for launch in emu.report)


def test_clusters_with_an_idle_block(device, rng, monkeypatch):
    """A sequence too short to be split like the others: their blocks of a cluster have nothing."""
    plan = _paged_kv_attention.plan_launch

    def in_pairs(device, *args, **kind):
        launch = plan(device, *args, **kind)
        if not _paged_kv_kernel.CLUSTERS.exists_on(device.capability):
            return launch
        choices = {"dtype": "float16", "head_dim": 64, "access": 16, "warps": 4, "stages": 6, "blocks": 2}
        kernel = _paged_kv_kernel.CLUSTERS.kernel(device, **choices, cluster=2)
        return dataclasses.replace(launch, function=kernel, grid=(34, 1, 1))

    monkeypatch.setattr(_paged_kv_attention, "plan_launch", in_pairs)
    forget_plans(monkeypatch)
    with rawops.emulate(arch="sm_90a", check=True) if device.is_emulated else contextlib.nullcontext():
        p = Paged(rng, [*[144] * 8, 5, *[144] * 8], 1, 64, 16)
        q = queries(rng, 17, 4, 64)
        close(*run(device, p, q), *decode_reference(q, p), "float16", 144)


def test_more_sequences_than_lengths_are_kept(device, rng):
    p = Paged(rng, [*[3, 1, 0, 5] * 65, 40], 1, 64, 16)
    q = queries(rng, 261, 2, 64)
    close(*run(device, p, q), *decode_reference(q, p), "float16", 40)


def test_clusters_of_large_blocks(device, rng, monkeypatch):
    """Twelve warps a block, two blocks an item."""
    plan = _paged_kv_attention.plan_launch
    config = _paged_kv_kernel.Config(12, 2, 1)

    def in_pairs(device, *args, **kind):
        launch = plan(device, *args, **kind)
        if not _paged_kv_kernel.CLUSTERS.exists_on(device.capability):
            return launch
        choices = {"dtype": "float16", "head_dim": 128, "access": 16, "warps": 12, "stages": 2, "blocks": 1}
        changes = {"grid": (6, 1, 1), "block": (384, 1, 1), "shared_bytes": config.shared_bytes(128, "float16")}
        kernel = _paged_kv_kernel.CLUSTERS.kernel(device, **choices, cluster=2)
        return dataclasses.replace(launch, function=kernel, **changes)

    monkeypatch.setattr(_paged_kv_attention, "plan_launch", in_pairs)
    forget_plans(monkeypatch)
    with rawops.emulate(arch="sm_90a", check=True) if device.is_emulated else contextlib.nullcontext():
        p = Paged(rng, [400, 399, 385], 1, 128, 16)
        q = queries(rng, 3, 4, 128)
        close(*run(device, p, q), *decode_reference(q, p), "float16", 400)


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [[900] * 8, [900, 870, 10, 0, 900, 33, 512, 1]], ids=["alike", "not alike"])
def test_sequences_and_heads_for_all_sms(rng, lens):
    """On a Hopper of 132 SMs two of them have an item."""
    import cupy

    p = Paged(rng, lens, 8, 128, 16)
    q = queries(rng, 8, 32, 128)
    out, lse = rawops.paged_attention(*map(cupy.asarray, (q, p.pages, p.table, p.lens)), return_lse=True)
    close(out.get(), lse.get(), *decode_reference(q, p), "float16", 900)


def test_batch_does_not_matter_with_one_split(device, rng):
    p = Paged(rng, LENS, 2, 64, 16)
    q = queries(rng, len(LENS), 4, 64)
    together, _ = run(device, p, q, num_splits=1)
    for b in range(len(LENS)):
        args = (device.put(x) for x in (q[b : b + 1], p.pages, p.table[b : b + 1], p.lens[b : b + 1]))
        np.testing.assert_array_equal(device.get(rawops.paged_attention(*args, num_splits=1))[0], together[b])


@pytest.mark.parametrize("completion", ["early", "random"])
def test_asynchronous_copies_land_at_any_time(completion, rng):
    p = Paged(rng, [150, 20], 1, 64, 16)
    q = queries(rng, 2, 4, 64)
    bits = []
    for order in ("late", completion):
        with rawops.emulate(completion=order, seed=3):
            bits.append(rawops.paged_attention(q, p.pages, p.table, p.lens))
    np.testing.assert_array_equal(*bits)
