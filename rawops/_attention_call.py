"""How a call of attention becomes launches: checks, strides, configuration, and what a repeated call does not redo."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from rawops import _attention_config as config
from rawops import _attention_sm90
from rawops import config as settings
from rawops._attention_config import DTYPES, FLOAT8, SIMT, SM80, Problem
from rawops._attention_dropout import Dropout, packed
from rawops._attention_merge import merge_parts
from rawops._attention_operands import (
    AS_BFLOAT16,
    AXES,
    Layout,
    Options,
    Sizes,
    access_of,
    check_scales,
    check_scores,
    check_values,
    dense,
    problem_of,
    scale_strides,
    shape_fields,
    sizes_of,
    strides_of,
)
from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.call import check_apart, check_apart_once, keep_apart
from rawops._runtime.kernel import Function
from rawops.errors import UnsupportedError

_MAX_LAUNCHES = 256
_FORWARD = (*DTYPES, FLOAT8)  # dtypes of a forward call

# --- launches -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneKernel:
    """Attention in one launch."""

    kernel: Function
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    shape: bytes

    def run(self, addresses: list, dropout: bytes) -> None:
        params = config.CALL.pack(*addresses[:_SCALES], 0, 0) + self.shape + dropout
        self.kernel.launch(self.grid, (self.threads, 1, 1), (params,), self.shared_bytes)


@dataclass(frozen=True)
class OnHopper:
    """Attention in one launch of the Hopper kernel."""

    plan: _attention_sm90.Plan
    shape: bytes
    scales: tuple[int, ...]  # their strides, with float8
    counter: Callable[[], tuple]

    def run(self, addresses: list, dropout: bytes) -> None:
        params = config.CALL.pack(*addresses[:_SCALES], 0, 0) + self.shape + dropout
        _kept, taken = self.counter() if self.plan.wants_counter else (None, 0)
        scales = _attention_sm90.SCALES.pack(*addresses[_SCALES:], *self.scales) if self.scales else b""
        self.plan.run(*addresses[: _OUT + 1], params, scales, taken)


@dataclass(frozen=True)
class SplitKeys:
    """Results of ranges of keys in a workspace, and the kernel that joins them."""

    partial: OneKernel | OnHopper
    merge: Callable[[int, int, int, int], None]  # addresses of the parts, their lse, out and lse
    workspace: Callable[[], tuple]

    def run(self, addresses: list, dropout: bytes) -> None:
        _kept, parts, lses = self.workspace()
        self.partial.run([*addresses[:3], parts, lses, *addresses[5:]], dropout)
        self.merge(parts, lses, addresses[3], addresses[4])


@dataclass(frozen=True)
class Launch:
    """Everything about a call that does not change while its key stays the same; `run` is None with nothing to do."""

    device: object
    out_shape: tuple[int, ...]
    out_dtype: np.dtype
    lse_shape: tuple[int, ...]
    overlaps: tuple[tuple[int, int, int], ...]
    apart: tuple  # where lse must not lie, see `_runtime.call`
    run: Callable[[list, bytes], None] | None
    aside: bool = False  # the kernel cannot write to out as it lies

    def collides(self, addresses: list) -> bool:
        """Tell whether the result would overwrite what is still to be read."""
        return any(low < addresses[index] - addresses[_OUT] < high for index, low, high in self.overlaps)


def _overlaps(operands: tuple) -> tuple:
    out = operands[_OUT]
    if out is None or out.size == 0:
        return ()
    span = arrays.span(out)
    others = ((i, x) for i, x in enumerate(operands) if i != _OUT and x is not None and x.size)
    return tuple((i, *arrays.distances(span, arrays.span(x))) for i, x in others)


ROLES = ("q", "k", "v", "out", "lse", "alibi_slopes", "bias", "cu_seqlens_q", "cu_seqlens_k")
ROLES += ("scale_q", "scale_k", "scale_v")
_OUT, _LSE, _SCALES = (ROLES.index(role) for role in ("out", "lse", "scale_q"))


class Attention:
    """Attention with fixed options, called with arrays in the order of `ROLES`; see flash_attention.

    Parameters
    ----------
    function : str
        For messages.
    options : Options
        As `checked` returns them.
    varlen : Layout, optional
    workspaces : dict, optional
        Keeps workspaces from call to call; without, each call allocates its own.
    """

    required: ClassVar = ("q", "k", "v")

    def __init__(
        self, function: str, options: Options, varlen: Layout | None = None, workspaces: dict | None = None
    ) -> None:
        self.function, self.options, self.varlen, self.workspaces = function, options, varlen, workspaces
        self._launches: dict[tuple, Launch] = {}
        self._last: tuple = (None, None)

    def __call__(self, operands: tuple, dropout: Dropout | None = None):
        """Run on arrays of any kind; returns out, or out and lse. `dropout` goes with the options' probability."""
        found = arrays.signature(operands)
        if found is None:
            return self._call_converted(operands, dropout)
        self._check_values(operands)
        key, addresses = found
        last, launch = self._last
        if key != last:
            launch = self._launch_of(key, operands, addresses)
        return self._run(launch, operands, addresses, dropout)

    def _call_converted(self, operands: tuple, dropout: Dropout | None):
        named = dict(zip(ROLES, operands, strict=True))
        self._check_given(named)
        converted, give = arrays.take(self.function, ("out", "lse"), **named)
        device = arrays.device_of(self.function, **dict(zip(ROLES, converted, strict=True)))
        operands = tuple(converted)
        with device.current():
            if not device.is_emulated:
                result = self(operands, dropout)
            else:
                self._check_values(operands)
                addresses = [device.pointer(x) for x in operands]
                result = self._run(self.prepare(device, operands, addresses), operands, addresses, dropout)
        return tuple(give(x) for x in result) if isinstance(result, tuple) else give(result)

    def _check_values(self, operands: tuple) -> None:
        has_scales = operands[_SCALES] is not None or operands[_SCALES + 1] is not None
        if not (self.varlen or has_scales) or not settings.current().check:
            return
        named = dict(zip(ROLES, operands, strict=True))
        self._check_given(named)
        sizes = sizes_of(self.function, named, self.varlen, _FORWARD)
        check_scales(self.function, named, sizes)
        check_values(self.function, named, sizes, self.varlen)

    def _check_given(self, named: dict) -> None:
        required = self.required if self.varlen is None else (*self.required, "cu_seqlens_q", "cu_seqlens_k")
        checks.arrays_given(self.function, **{name: named[name] for name in required})

    def _launch_of(self, key: list, operands: tuple, addresses: list) -> Launch:
        frozen = tuple(key)
        launch = self._launches.get(frozen)
        if launch is None:
            self._check_given(dict(zip(ROLES, operands, strict=True)))
            checks.all_on_elements(self.function, ROLES, operands, addresses)
            device = arrays.device_of(self.function, q=operands[0])
            launch = self.prepare(device, operands, addresses)
            if len(self._launches) >= _MAX_LAUNCHES:
                self._launches.clear()
            self._launches[frozen] = launch
        self._last = key, launch
        return launch

    def _run(self, launch: Launch, operands: tuple, addresses: list, dropout: Dropout | None):
        out, lse = operands[_OUT], operands[_LSE]
        if launch.apart:
            check_apart(self.function, ROLES, launch.apart, addresses)
        drawn = {} if dropout is None else dropout.arrays
        if drawn and lse is not None:
            check_apart_once(self.function, launch.device, {"lse": lse, **drawn}, ("lse",))
        is_drawn_from = out is not None and drawn and any(arrays.overlap(out, x) for x in drawn.values())
        if out is None:
            out = launch.device.empty(launch.out_shape, launch.out_dtype)
            addresses[_OUT] = launch.device.pointer(out)
        elif launch.aside or launch.collides(addresses) or is_drawn_from:
            # A dense result aside has strides of its own, so a launch of its own.
            aside = launch.device.empty(launch.out_shape, launch.out_dtype)
            made = self((*operands[:_OUT], aside, *operands[_OUT + 1 :]), dropout)
            out[...] = aside
            return (out, made[1]) if self.options.return_lse else out
        if lse is None and self.options.return_lse:
            lse = launch.device.empty(launch.lse_shape, np.dtype(np.float32))
            addresses[_LSE] = launch.device.pointer(lse)
        if launch.run is not None:
            launch.run(addresses, packed(self.function, dropout, launch.device))
        return (out, lse) if self.options.return_lse else out

    def workspace(self, device, shapes: tuple) -> tuple:
        """Return float32 arrays of these shapes and their addresses; kept ones, if workspaces are kept."""
        key, found = (device, shapes), None
        if self.workspaces is not None:
            found = self.workspaces.get(key)
        if found is None:
            found = [device.empty(shape, np.dtype(np.float32)) for shape in shapes]
            if self.workspaces is not None:
                self.workspaces[key] = found
        return (found, *(device.pointer(x) for x in found))

    def counter(self, device) -> tuple:
        """Return a zero that kernels count with and leave as it was, and its address; kept like a workspace."""
        found = None if self.workspaces is None else self.workspaces.get(device)
        if found is None:
            found = device.zero()
            if self.workspaces is not None:
                self.workspaces[device] = found
        return found, device.pointer(found)

    # How a call is prepared.

    def prepare(self, device, operands: tuple, addresses: list) -> Launch:
        """Check the arguments, choose the kernel and pack what does not change."""
        named = dict(zip(ROLES, operands, strict=True))
        sizes = sizes_of(self.function, named, self.varlen, _FORWARD)
        check_scores(self.function, named, sizes)
        check_scales(self.function, named, sizes)
        dtype, allowed = named["q"].dtype, (named["q"].dtype.name,)
        if dtype.name == FLOAT8:
            dtype, allowed = dtypes.numpy("bfloat16"), ("bfloat16", "float16")
        if named["out"] is not None:
            dtype = dtypes.numpy(checks.dtype(self.function, "out", named["out"], allowed))
            checks.shape(self.function, "out", named["out"], sizes.out)
            checks.output(self.function, "out", named["out"])
        lse = named["lse"]
        if lse is not None:
            checks.dtype(self.function, "lse", lse, ("float32",))
            checks.shape(self.function, "lse", lse, sizes.lse)
            checks.output(self.function, "lse", lse)
            if not lse.flags.c_contiguous:
                checks.fail(ValueError, self.function, "lse", "be C-contiguous", f"strides {lse.strides}")
        apart = keep_apart(operands, _LSE, tuple(i for i in range(len(ROLES)) if i != _LSE))
        launch = Launch(device, sizes.out, dtype, sizes.lse, _overlaps(operands), apart, None)
        if sizes.heads * sizes.total_q * (sizes.batches if self.varlen is None else 1) == 0:
            return launch
        if self._is_aside(named, addresses, sizes):
            return replace(launch, aside=True)
        return replace(launch, run=self._steps(device, named, addresses, sizes).run)

    def _is_aside(self, named: dict, addresses: list, sizes: Sizes) -> bool:
        """Tell whether out is one that the float8 kernel cannot write to, but a dense result it can."""
        if named["out"] is None or named["q"].dtype.name != FLOAT8 or sizes.out[-1] % 16:
            return False
        return not _attention_sm90.movable(self._views(named, addresses, sizes)["out"])

    def _steps(self, device, named: dict, addresses: list, sizes: Sizes):
        options = self.options
        read = zip("qkv", addresses, strict=False)
        is_8bit = named["q"].dtype.name == FLOAT8
        access = 16 if is_8bit else min(access_of(named[name], address) for name, address in read)
        problem = problem_of(named, sizes, options, access)
        out_dtype = "bfloat16" if named["out"] is None else named["out"].dtype.name
        out_dtype = out_dtype if is_8bit else problem.dtype
        hopper = self._on_hopper(device, named, addresses, sizes, problem, out_dtype)
        if hopper is None and is_8bit:
            self._refuse_8bit(device, named, sizes, problem)
            # without keys the queries do not matter: the other kernel is told that they have no columns
            sizes, problem = replace(sizes, head_dim=0), replace(problem, dtype=out_dtype, head_dim=0)
        if hopper is not None:
            splits, launch = hopper.plan.config.splits, hopper
        else:
            chosen = config.select_config(problem, device.sm_count, device.max_shared_bytes, options.num_splits)
            splits, launch = chosen.splits, self._one_kernel(device, named, sizes, problem, chosen, addresses[_OUT])
        if splits == 1:
            return launch
        shape, lse_shape = (splits, *sizes.out), (splits, *sizes.lse)
        merge = merge_parts(device, out_dtype, shape, lse_shape, sizes.axes, self._out_strides(named, sizes))
        return SplitKeys(launch, merge, functools.partial(self.workspace, device, (shape, lse_shape)))

    def _out_strides(self, named: dict, sizes: Sizes) -> tuple[int, ...]:
        out = named["out"]
        if out is not None:
            return strides_of(out, sizes.axes)
        return dense(sizes.out, sizes.axes)

    def _views(self, named: dict, addresses: list, sizes: Sizes) -> dict[str, _attention_sm90.View]:
        """Return q, k, v and out as the Hopper kernels see them."""
        strides = {name: strides_of(named[name], sizes.axes) for name in "qkv"}
        strides["out"] = self._out_strides(named, sizes)
        shapes = {"out": sizes.out} | {name: named[name].shape for name in "qkv"}
        return {
            name: _attention_sm90.View(
                (1,) * (4 - len(shapes[name])) + tuple(shapes[name]),
                strides[name],
                address % 16,
                2 if name == "out" else named[name].dtype.itemsize,
            )
            for name, address in zip(ROLES, addresses[: _OUT + 1], strict=False)
        }

    def _on_hopper(
        self, device, named: dict, addresses: list, sizes: Sizes, problem: Problem, out_dtype: str
    ) -> OnHopper | None:
        """Return the launch of the Hopper kernel, where it is the one to run."""
        views = self._views(named, addresses, sizes)
        if not _attention_sm90.supports(device, problem, views):
            return None
        plan = _attention_sm90.plan(device, problem, views, out_dtype, self.options.num_splits)
        fields = shape_fields(named, sizes, problem, self.options)
        fields |= {"packed": 1, "row_tiles": plan.row_tiles} | _parts(sizes, plan.config.splits)
        out_strides = views["out"].strides if plan.config.splits == 1 else dense(sizes.out, sizes.axes)
        fields |= {f"out_{axis}": s for axis, s in zip(AXES, out_strides, strict=True)}
        shape = config.SHAPE.pack(*(fields.get(name, 0) for name in config.SHAPE.fields))
        scales = scale_strides(named) if problem.dtype == FLOAT8 else ()
        return OnHopper(plan, shape, scales, functools.partial(self.counter, device))

    def _refuse_8bit(self, device, named: dict, sizes: Sizes, problem: Problem) -> None:
        """Raise for what the float8 kernel cannot do, but for doing without keys."""
        if not _attention_sm90.SM90_8BIT.exists_on(device.capability):
            message = f"{self.function}: float8 needs a GPU of compute capability 9.0, got {device.capability / 10}"
            raise UnsupportedError(f"{message}. {AS_BFLOAT16}")
        if problem.score:
            rule = "come with a positive softmax_scale and without softcap and dropout if it is float8"
            options = self.options
            found = f"softmax_scale {options.scale(sizes.head_dim)}, softcap {options.softcap}, "
            checks.fail(ValueError, self.function, "q", rule, f"{found}dropout_p {options.dropout_p}", AS_BFLOAT16)
        if sizes.total_keys == 0:
            return
        rule = "have a head_dim and rows that are multiples of 16 bytes, as k and v, if it is float8"
        found = {name: (named[name].shape, named[name].strides) for name in "qkv"}
        checks.fail(ValueError, self.function, "q", rule, found)

    def _one_kernel(self, device, named: dict, sizes: Sizes, problem: Problem, chosen, address: int) -> OneKernel:
        is_partial = chosen.splits > 1
        fields = shape_fields(named, sizes, problem, self.options)
        fields |= {"packed": chosen.packed, "row_tiles": chosen.row_tiles} | _parts(sizes, chosen.splits)
        out_strides = dense(sizes.out, sizes.axes) if is_partial else self._out_strides(named, sizes)
        fields |= {f"out_{axis}": s for axis, s in zip(AXES, out_strides, strict=True)}
        itemsize = 4 if is_partial else dtypes.itemsize(problem.dtype)
        fields["out_pairs"] = _width_of_out(0 if is_partial else address, sizes.out, out_strides, itemsize)
        shape = config.SHAPE.pack(*(fields.get(name, 0) for name in config.SHAPE.fields))
        units = chosen.splits * (sizes.heads // chosen.packed) * (sizes.batches + (self.varlen is not None))
        if chosen.tile is None:
            kernel = SIMT.kernel(device, score=problem.score)
            return OneKernel(kernel, (chosen.row_tiles * units, 1, 1), 128, 0, shape)
        grid = config.grid_of(problem, chosen.row_tiles, units)
        kernel = SM80.kernel(
            device,
            dtype=problem.dtype,
            out_dtype="float32" if is_partial else problem.dtype,
            tile=chosen.tile.cpp,
            access=problem.access,
            score=problem.score,
            packed=chosen.packed > 1,
        )
        return OneKernel(kernel, grid, chosen.tile.threads, chosen.tile.shared_bytes, shape)


def _parts(sizes: Sizes, splits: int) -> dict:
    """Fields of AttentionShape for results of ranges of keys that lie one after another."""
    return {"splits": splits, "out_split": math.prod(sizes.out), "lse_split": math.prod(sizes.lse)}


def _width_of_out(address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Return 2 where 16 bytes of each row of out can be written at once, 1 where elements 2i and 2i + 1 can, else 0."""
    *steps, col = strides

    def allows(count: int) -> bool:
        return (col == 1 or shape[-1] == 1) and not address % (count * itemsize) and not any(s % count for s in steps)

    return 2 if shape[-1] % 8 == 0 and itemsize == 2 and allows(8) else int(allows(2))
