"""A call of paged attention: its checks, and which kernel it goes to."""

from __future__ import annotations

import dataclasses
import functools
import math

from rawops import _paged_kv_cascade_sm90, _paged_kv_kernel, _paged_kv_prefill, config
from rawops._attention_operands import in_float32
from rawops._paged_kv_call import Plan, check_vector, contiguous, in_order
from rawops._paged_kv_kernel import Launch, Options
from rawops._paged_kv_pool import DTYPES, Pool, check_pages, check_rows, describe, scale_strides
from rawops._paged_kv_prefill import Parts
from rawops._runtime import arrays, checks
from rawops._runtime.call import Op, keep_apart
from rawops._runtime.workspace import Workspace, workspace_of_stream

_UNLIMITED = 2**30 - 2  # the kernels add and subtract it in 32 bits
_DEFAULTS = {"causal": True, "softmax_scale": None, "window": (None, None), "softcap": 0.0, "num_splits": None}


def options_of(function: str, causal, softmax_scale, window, softcap, num_splits) -> Options:
    """Check what a call asks for beside its arrays; what was checked before is remembered."""
    try:  # with the window's entries once more, since the cache tells no types apart within a tuple
        return _checked_options(function, causal, softmax_scale, window, softcap, num_splits, *window)
    except TypeError:  # a mistake, or what cannot be hashed: a list for a window
        return _checked_options.__wrapped__(function, causal, softmax_scale, window, softcap, num_splits)


@functools.lru_cache(maxsize=256, typed=True)
def _checked_options(function: str, causal, softmax_scale, window, softcap, num_splits, *_) -> Options:
    softcap = checks.number(function, "softcap", softcap)
    if not 0 <= softcap < math.inf:
        checks.fail(ValueError, function, "softcap", "be finite and not negative (0: none)", softcap)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        checks.fail(ValueError, function, "window", "be a pair (left, right) of int or None", repr(window))
    left, right = (
        _UNLIMITED if side is None else min(checks.int_range(function, f"window[{i}]", side, 0, 2**63), _UNLIMITED)
        for i, side in enumerate(window)
    )
    if num_splits is not None:
        num_splits = checks.int_range(function, "num_splits", num_splits, 1, 1024)
    if softmax_scale is not None:
        softmax_scale = checks.number(function, "softmax_scale", softmax_scale)
        if not math.isfinite(softmax_scale):
            checks.fail(ValueError, function, "softmax_scale", "be finite", softmax_scale)
    softmax_scale = in_float32(function, softmax_scale, softcap)
    is_causal = checks.flag(function, "causal", causal)
    return Options(softmax_scale, softcap, (left, 0 if is_causal else right), num_splits or 0)


def named_options(function: str, options: dict) -> Options:
    """Check the options that a call has by name, without alibi_slopes."""
    for name in options:
        if name not in _DEFAULTS:
            checks.fail(TypeError, function, "options", f"be among alibi_slopes, {', '.join(_DEFAULTS)}", repr(name))
    return options_of(function, **_DEFAULTS | options)


def attend(
    function: str,
    operands: tuple,
    options: Options,
    return_lse: bool,
    layout: str,
    workspace: Workspace | None = None,
    **prior: Parts,
):
    """Run on arrays of any kind in the order of `OP`; returns out, or out and lse."""
    return_lse = checks.flag(function, "return_lse", return_lse)
    found = OP.resolve(function, operands, (options, layout))
    if found is None:
        taken, give, device = OP.take(function, operands)
        with device.current():
            made = attend(function, taken, options, return_lse, layout, workspace, **prior)
            return tuple(map(give, made)) if return_lse else give(made)
    plan, addresses = found
    q, pages, *small, out = operands
    device = plan.device
    if out is None:
        out = device.empty(q.shape, q.dtype)
    lse = device.empty((q.shape[1], q.shape[0]), "float32") if return_lse else None
    if plan.launch is not None:
        if config.current().check:
            if small[2] is not None:
                check_rows(function, small[2], q.shape[0])
            check_pages(function, pages, *small[:3], plan.page_size, options.window[0], options.skipped)
        if plan.launch.copies_q:
            q = _even(device, q)
            addresses = [device.pointer(q), *addresses[1:]]
        small_addresses = addresses[2:8]
        if plan.copies:
            small = [*map(in_order, small[:-2]), *map(contiguous, small[-2:])]
            small_addresses = map(device.pointer, small)
        placed = (addresses[0], device.pointer(out), device.pointer(lse), addresses[1], *small_addresses)
        plan.launch.run(device, placed, workspace or workspace_of_stream(device), **prior)
    return (out, lse) if return_lse else out


def attend_to_prefix(function: str, operands: tuple, options: Options, layout: str, workspace: Workspace):
    """Leave partial results in the workspace and return them; None where no kernel does so."""
    options = dataclasses.replace(options, parts=True)
    found = OP.resolve(function, operands, (options, layout))
    if found is None:
        taken, _, device = OP.take(function, operands)
        with device.current():
            return attend_to_prefix(function, taken, options, layout, workspace)
    plan, addresses = found
    if plan.launch is None or plan.copies:
        return None
    return plan.launch.run_parts(plan.device, (addresses[0], 0, 0, *addresses[1:8]), workspace)


def _even(device, q):
    """Return a copy of q with an even number of columns, which the kernel reads in pairs."""
    rows, heads, head_dim = q.shape
    copy = device.empty((rows, heads, head_dim + head_dim % 2), q.dtype)
    copy[..., :head_dim] = q
    copy[..., head_dim:] = 0
    return copy


def plan_launch(
    device,
    function: str,
    pool: Pool,
    scales: tuple,
    q,
    out,
    options: Options,
    q_address: int,
    out_address: int,
    *,
    ragged: bool,
    has_slopes: bool,
) -> Launch | _paged_kv_prefill.Prefill | None:
    """Choose the kernel and lay out what does not change from call to call; None where none leaves partial results."""
    _, heads, head_dim = q.shape
    scale = options.scale if options.scale is not None else 1 / math.sqrt(head_dim)
    out_strides = [s // out.dtype.itemsize for s in out.strides] if out is not None else [heads * head_dim, head_dim, 1]
    if ragged and _paged_kv_prefill.takes(pool, q, q_address, options.num_splits, options.beside):
        alignments = q_address % 16, out_address % 16
        prefill = _paged_kv_prefill.plan(device, pool, q, out_strides, options, scale, has_slopes, alignments)
        if prefill is not None:
            return prefill
    if options.parts:
        return None
    if options.beside:
        return _paged_kv_cascade_sm90.plan(device, pool, q, out_strides, scale, options.skipped)
    return _paged_kv_kernel.plan(device, function, pool, scales, q, out_strides, options, scale, q_address, ragged)


def _prepare(function: str, operands: tuple, addresses: list, options: tuple) -> Plan:
    """Check a call and plan its launch."""
    q, pages, block_table, seq_lens, cu_seqlens_q, alibi_slopes, k_scale, v_scale, out = operands
    asked, layout = options
    device = arrays.device_of(function, q=q)
    dtype = checks.dtype(function, "q", q, DTYPES)
    if q.ndim != 3:
        checks.fail(ValueError, function, "q", "have shape (total_q, num_heads, head_dim)", tuple(q.shape))
    pool = describe(function, pages, block_table, layout, addresses[1])
    if pool.dtype in DTYPES:
        checks.dtype(function, "pages", pages, (dtype,), "q and a 16-bit pool have one dtype; convert one of them.")
    scales = scale_strides(function, pool, pages.shape[0], k_scale, v_scale)
    total_q, heads, head_dim = q.shape
    if head_dim != pool.head_dim:
        checks.fail(ValueError, function, "q", f"have the pool's head_dim {pool.head_dim}", tuple(q.shape))
    if heads % max(pool.num_heads, 1) or (heads and not pool.num_heads):
        rule = f"have a multiple of the pool's {pool.num_heads} KV heads"
        checks.fail(ValueError, function, "q", rule, f"{heads} heads")
    check_vector(function, "seq_lens", seq_lens, pool.batch, "int32")
    if cu_seqlens_q is not None:
        check_vector(function, "cu_seqlens_q", cu_seqlens_q, pool.batch + 1, "int32")
    elif total_q != pool.batch:
        hint = "Give cu_seqlens_q where sequences have other numbers of queries than one."
        checks.fail(ValueError, function, "q", f"have {pool.batch} rows, one a sequence", total_q, hint)
    if alibi_slopes is not None:
        check_vector(function, "alibi_slopes", alibi_slopes, heads, "float32")
    if out is not None:
        checks.dtype(function, "out", out, (dtype,))
        checks.shape(function, "out", out, q.shape)
        checks.output(function, "out", out)
    apart = keep_apart(operands, 8, tuple(range(8)), same=0)
    if 0 in q.shape:
        return Plan(device, None, pool.page_size, apart)
    kind = {"ragged": cu_seqlens_q is not None, "has_slopes": alibi_slopes is not None}
    launch = plan_launch(device, function, pool, scales, q, out, asked, addresses[0], addresses[8], **kind)
    copies = any(in_order(x) is not x for x in operands[2:6]) or any(contiguous(x) is not x for x in operands[6:8])
    return Plan(device, launch, pool.page_size, apart, copies)


OP = Op(
    ("q", "pages", "block_table", "seq_lens", "cu_seqlens_q", "alibi_slopes", "k_scale", "v_scale", "out"), 4, _prepare
)
