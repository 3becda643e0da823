"""``python -m rawops explain gemm``: which kernel, which tile, in how many waves, and why."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from rawops import (
    _gemm_8bit_config,
    _gemm_config,
    _gemm_repack,
    _gemm_sm90,
    _gemm_sm90_config,
    _gemm_sm90_split,
)
from rawops._gemm_8bit import ScaledProduct, repacked
from rawops._gemm_8bit_config import BytesProblem
from rawops._gemm_call import Product
from rawops._gemm_config import ACTIVATIONS, DTYPES, FLOAT8, IN_PLACE, PROMOTED
from rawops._gemm_grouped import table_bytes
from rawops._gemm_operands import MAX_SIZE, ROLES, Options, Request, Sizes, describe, fold_batch, layout_of
from rawops._gemm_sm90_config import BOX_COLS
from rawops._runtime import checks, dtypes
from rawops._runtime.explain import Explanation, add_roofline, add_waves, launch_row
from rawops._runtime.paper import PaperArray, PaperDevice
from rawops.gemm import gemm, grouped_gemm

SHOWN = 10  # candidates

LAYOUTS = {
    "choices": ("nn", "nt", "tn", "tt"),
    "default": "nt",
    "help": "of both operands: n is row-major, t column-major; nt is a linear layer's",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("M", "N", "K"):
        parser.add_argument(name, type=int)
    parser.add_argument("--dtype", choices=(*DTYPES, *FLOAT8, "int8"), default="bfloat16")
    parser.add_argument("--out-dtype", choices=(*DTYPES, *FLOAT8, "int32"))
    parser.add_argument("--precision", choices=("tf32", "fast"))
    parser.add_argument("--layout", **LAYOUTS)
    parser.add_argument(
        "--offset", type=int, default=0, help="bytes from an aligned address to a's and b's first element"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--groups", type=int, help="grouped_gemm: M rows in this many groups")
    parser.add_argument("--activation", choices=ACTIVATIONS[1:])
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--split-k", type=int)


def explain(options: argparse.Namespace, device: PaperDevice) -> Explanation:
    arrays = make_arrays(options, device)
    keywords = {"activation": options.activation, "out_dtype": options.out_dtype, "precision": options.precision}
    with device.current():
        if options.groups is not None:
            offsets = device.array((options.groups + 1,), "int32")
            out = grouped_gemm(arrays["a"], arrays["b"], offsets, bias=arrays["bias"], **keywords)
        else:
            out = gemm(arrays["a"], arrays["b"], bias=arrays["bias"], split_k=options.split_k, **keywords)
    M, N, K, batch = options.M, options.N, options.K, options.batch
    title = f"gemm {M} x {N} x {K}, {options.dtype}, {options.layout.upper()}"
    title += f", batch of {batch}" if batch > 1 else ""
    title += f", {options.groups} groups" if options.groups is not None else ""
    found = Explanation(f"{title}; {device.board.name} ({device.arch}, {device.sm_count} SMs)")
    if device.launches:
        _explain_tile(found, options, device, arrays | {"out": out})
    size = sum(math.prod(x.shape) * x.itemsize for x in (*arrays.values(), out) if x is not None)
    precision = "tf32" if options.precision == "tf32" else options.dtype
    add_roofline(found, device.board, precision, 2.0 * batch * M * N * K, size)
    return found


def make_arrays(options: argparse.Namespace, device: PaperDevice) -> dict[str, PaperArray | None]:
    """Return a, b and the bias, on paper."""
    for name in ("M", "N", "K"):
        checks.int_range("explain", name, getattr(options, name), 0, MAX_SIZE)
    checks.int_range("explain", "--batch", options.batch, 1, MAX_SIZE)
    dtype = dtypes.numpy(options.dtype)
    M, N, K = options.M, options.N, options.K
    batch = (options.batch,) if options.batch > 1 else ()
    groups = batch
    if options.groups is not None:
        if batch or options.split_k is not None:
            checks.fail(ValueError, "explain", "--groups", "be given without --batch and --split-k", options.groups)
        groups = (checks.int_range("explain", "--groups", options.groups, 0, MAX_SIZE),)

    def matrix(before: tuple, rows: int, cols: int, order: str) -> PaperArray:
        shape = (*before, rows, cols) if order == "n" else (*before, cols, rows)
        x = device.array(shape, dtype, options.offset)
        return x if order == "n" else x.swapaxes(-1, -2)

    a, b = matrix(batch, M, K, options.layout[0]), matrix(groups, K, N, options.layout[1])
    types = (ScaledProduct("explain", Options(), False) if options.dtype not in DTYPES else Product).types
    result = options.out_dtype or types.of_result(options.dtype)[0]
    of_bias = types.of_addends(options.dtype, result)[0]
    return {"a": a, "b": b, "bias": device.array((N,), dtypes.numpy(of_bias)) if options.bias else None}


def _explain_tile(found: Explanation, options: argparse.Namespace, device: PaperDevice, arrays: dict) -> None:
    """Add the tile, the waves and the candidates of the launch that multiplies."""
    described, sizes, extents = _describe(options, device, arrays)
    M, N, K = sizes
    room = device.max_shared_bytes - (table_bytes(options.groups) if options.groups else 0)
    activation = ACTIVATIONS.index(options.activation)
    problem, layouts = _sm80_problem(options, described, sizes, extents)
    kernels = [launch.kernel for launch in device.launches]
    if any("gemv" in kernel for kernel in kernels):
        found.why.append("One row: a kernel that streams b, with K shared among warps until every SM is busy.")
        return
    if any("repack" in kernel for kernel in kernels):
        if problem.kind == "float32":
            found.why.append("What is contiguous along K is copied first, to lie across it: for this size that pays.")
            _, described = _gemm_repack.plan(device, problem, described, layouts, extents)
        elif options.dtype in DTYPES:
            found.why.append("What TMA or wgmma cannot take as it lies is copied first: for this size that pays.")
            _, described = _gemm_repack.plan(device, problem, described, layouts, extents)
        else:
            found.why.append("Operands of 8 bits are multiplied along contiguous rows of K: others are copied first.")
            _, described = repacked(device, described, problem, extents)
        problem, _ = _sm80_problem(options, described, sizes, extents)
    hopper = _gemm_sm90.describe_problem(described, M, N, K, extents, activation)
    if hopper is not None and options.groups:
        hopper = replace(hopper, M=-(-M // options.groups), grouped=True)
    if any("sm90" in kernel for kernel in kernels):
        if options.dtype not in DTYPES:
            is_int8 = options.dtype == "int8"
            hopper = BytesProblem(**vars(hopper), promotion=_promotion(options), is_int8=is_int8)
        found.why.append("Hopper's kernel: operands of 8 or 16 bits, or for TF32, that TMA can read.")
        if hopper.transposed:
            found.why.append("TF32 with a row-major b: the product of the transposes, whose rows are columns of D.")
        if any("gemm_reduce" in kernel for kernel in kernels):
            _explain_slices(found, hopper, device, room)
            return
        of_bytes = isinstance(hopper, BytesProblem)
        candidates = (_gemm_8bit_config if of_bytes else _gemm_sm90_config).candidates(hopper, device.sm_count, room)
        found.why.append(f"Of {len(candidates)} configurations that fit, the one with the least predicted time.")
        chosen = _gemm_sm90_config.in_halves(hopper, candidates[0], device.sm_count, room)
        if chosen.halved:
            found.why.append("For so few rows in tiles of half the width, two for an SM, which the L2 reads better.")
            candidates = [chosen, *(c for c in candidates if c != replace(chosen, halved=False))]
        explain_hopper(found, hopper, candidates, device)
        return
    found.why.append(_why_not_hopper(options, device, hopper, room))
    if any("sm80" in kernel or "simt" in kernel for kernel in kernels):
        _explain_sm80(found, options, device, problem, room)


def _explain_slices(found: Explanation, problem: _gemm_sm90_config.Problem, device: PaperDevice, room: int) -> None:
    """Add what the slices of K are, and the other tiles and slices that there were to choose from."""
    slices = _gemm_sm90_split.candidates(problem, device.sm_count, room)
    chosen, without = slices[0], _gemm_sm90_split.cost_without(problem, device.sm_count, room)
    found.why.append(f"{chosen.count} slices of K and a launch that adds them up: {without} would be the cost without.")
    partial = _gemm_sm90_split.partial(problem, chosen.count)
    explain_hopper(found, partial, [s.config for s in slices], device, "predict in _gemm_sm90_split.py")
    found.candidates = [{"slices": s.count, **row} for s, row in zip(slices, found.candidates, strict=False)]


def _sm80_problem(options: argparse.Namespace, described: dict, sizes: tuple, extents: tuple) -> tuple:
    """Return what the choice of a tile depends on, and how a and b lie in memory."""
    (M, N, K), a, b = sizes, described["a"], described["b"]
    gate = N // 2 if options.activation == "swiglu" else 0
    layouts = {"a": (*layout_of(a, M, K, a.row, a.col, 0), 0), "b": (*layout_of(b, N, K, b.col, b.row, gate), gate)}
    (a_k_major, access_a, _), (b_k_major, access_b, _) = layouts.values()
    if options.groups is not None:
        M, access_a = -(-M // options.groups), access_a if a_k_major else a.itemsize
    tf32, access = options.precision == "tf32", min(access_a, access_b)
    promoted = _promotion(options) != IN_PLACE
    across_k = options.groups is None and not a_k_major and not b_k_major
    problem = _gemm_config.Problem(options.dtype, M, N, K, math.prod(extents), tf32, access, promoted, across_k)
    return problem, layouts


def _promotion(options: argparse.Namespace) -> int:
    """Return how sums of 8-bit products are kept, where a and b have no scales: Promotion in scaling.cuh."""
    return PROMOTED if options.dtype in FLOAT8 and options.precision != "fast" else IN_PLACE


def _describe(options: argparse.Namespace, device: PaperDevice, arrays: dict) -> tuple[dict, tuple, tuple]:
    """Return the operands as the kernels see them, M, N and K with a batch folded in, and the batch axes."""
    M, N, K = options.M, options.N, options.K
    named = dict.fromkeys(ROLES) | arrays
    request = Request(
        "gemm", Options(precision=options.precision), named, [device.pointer(x) for x in named.values()], {}
    )
    cols = N // 2 if options.activation == "swiglu" else N
    sizes = Sizes(M, N, K, cols, (options.batch,) if options.batch > 1 else ())
    described = describe(request, sizes, arrays["out"].dtype.name)
    if options.groups is not None:
        for x in described.values():
            x.batch = [0, 0, *(x.batch or [0])]
        return described, (M, N, K), (1, 1, options.groups)
    M, extents = fold_batch(described, sizes)
    return described, (M, N, K), extents


def explain_hopper(
    found: Explanation,
    problem: _gemm_sm90_config.Problem,
    candidates: list,
    device: PaperDevice,
    formula: str = "_cost in _gemm_sm90_config.py",
) -> None:
    """Add what the Hopper kernel's configuration is made of; the first candidate is the chosen one."""
    config = candidates[0]
    how = "consumers take turns" if config.ping_pong else f"64 rows for each of {config.consumers} consumers"
    how = "one consumer" if config.consumers == 1 else how
    found.add("tile", f"{config.block_m} x {config.block_n} x {128 // problem.itemsize}", how)
    ring = f"{config.stages} x {config.stage_bytes(problem)} + {config.other_bytes(problem)} bytes of shared memory"
    found.add("stages", config.stages, ring)
    found.add("cluster", config.cluster, "blocks that share a tile, each a slice of K")
    if config.shares_boxes(problem):
        boxes, width = -(-problem.N // BOX_COLS), BOX_COLS
        columns = f"{boxes // config.blocks * width} or {-(-boxes // config.blocks) * width} columns each"
        found.add("boxes", boxes, f"of {width} columns, which {config.blocks} blocks share out: {columns}")
    if config.pairs:
        found.add("pairs", 2, "blocks with tiles below each other, which load b once for both")
    if config.squares:
        found.add("squares", 4, "blocks with two by two tiles, which load each half of a tile's operand once for two")
    columns = problem.N * problem.parts
    each = f"ceil({problem.M} / {config.block_m})"
    rows = "as to expect" if problem.grouped else f"{problem.batches} x {each}" if problem.batches > 1 else each
    counts = {
        f"down ({rows})": problem.row_tiles(config.block_m),
        f"across (ceil({columns} / {config.block_n}))": -(-columns // config.block_n),
    }
    at_a_time = _gemm_sm90_config.tiles_at_a_time(config.cluster, device.sm_count)
    add_waves(found, counts, at_a_time, f"one block an SM, {config.cluster} a tile")
    found.add("predicted_cycles", 4 * config.cost, f"4 x cost, see {formula}")
    sharing = [name for name in ("pairs", "squares") if any(getattr(c, name) for c in candidates)]
    found.candidates = [
        {
            "tile": f"{c.block_m} x {c.block_n}",
            "stages": c.stages,
            "cluster": c.cluster,
            "consumers": "take turns" if c.ping_pong else c.consumers,
            **{name: "yes" if getattr(c, name) else "" for name in sharing},
            **({"x @ a": "rides" if c.rides else "read"} if problem.rank else {}),
            "blocks": c.blocks,
            "waves": c.waves,
            "cost": c.cost,
        }
        for c in candidates[:SHOWN]
    ]


def _why_not_hopper(options: argparse.Namespace, device: PaperDevice, problem, room: int) -> str:
    if not _gemm_sm90.SM90.exists_on(device.capability):
        return f"Hopper's kernel does not exist for {device.arch}."
    if dtypes.itemsize(options.dtype) > 2 and options.precision != "tf32":
        return f"Hopper's kernel does not take {options.dtype}."
    if problem is None:
        return "TMA cannot read the operands: their rows must begin on 16-byte boundaries, and K must not be 0."
    if options.groups is not None:
        return "Groups begin at any row, which TMA cannot do in a column-major a."
    if options.split_k is not None:
        return "split_k is given, which Hopper's kernel does not take."
    config = _gemm_sm90_config.select_config(problem, device.sm_count, room)
    return f"Few rows or few tiles: another kernel is predicted to take less than Hopper's best cost, {config.cost}."


def _explain_sm80(found, options, device: PaperDevice, problem: _gemm_config.Problem, room: int) -> None:
    """Add what the configuration of a kernel for all architectures is made of."""
    M, N = problem.M, problem.N
    split_k = options.split_k if options.groups is None and options.dtype in DTYPES else 1
    config = _gemm_config.select_config(problem, device.sm_count, room, split_k)
    splits = "; K is split where even the smallest leaves SMs idle" if split_k is None else ""
    found.why.append(f"Of the tiles for {problem.kind} operands, the largest that gives five SMs of six one{splits}.")
    tile = config.tile
    found.add("tile", f"{tile.block_m} x {tile.block_n} x {tile.block_k}", f"{tile.threads // 32} warps")
    found.add("stages", tile.stages, f"{tile.shared_bytes(dtypes.itemsize(options.dtype))} bytes of shared memory")
    found.add("access_bytes", problem.access, "that one copy from global memory moves")
    found.add("split_k", config.split_k, f"slices of {config.k_per_split}")
    counts = {
        f"down (ceil({M} / {tile.block_m}))": -(-M // tile.block_m),
        f"across (ceil({N} / {tile.block_n}))": -(-N // tile.block_n),
        "products": problem.batches,
        "slices of K": config.split_k,
    }
    row = next(
        r for r in (launch_row(x, device.board) for x in device.launches) if tile.cpp in "rawops::" + r["kernel"]
    )
    resident = row["blocks_per_sm"]
    how = f"{device.sm_count} SMs x {resident} blocks, limited by {row['limited_by']}"
    add_waves(found, counts, resident * device.sm_count, how)
    tiles = _gemm_config.candidates(problem, room)
    tiles.sort(key=lambda t: t != tile)
    found.candidates = [
        {
            "tile": f"{t.block_m} x {t.block_n} x {t.block_k}",
            "stages": t.stages,
            "warps": t.threads // 32,
            "tiles": problem.tiles(t),
            "tiles / SMs": problem.tiles(t) / device.sm_count,
        }
        for t in tiles
    ]
