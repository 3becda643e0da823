"""Declare, instantiate, launch and reload kernels."""

from __future__ import annotations

import itertools
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

from rawops._runtime import arrays, compiler, dtypes, sources
from rawops._runtime import device as devices
from rawops._runtime.checks import fail, flag
from rawops._runtime.progress import shown
from rawops.errors import CompileError, UnsupportedError

_COMPILERS = min(os.cpu_count() or 1, 16)  # at a time: each takes some 30 MB

# struct code, size and alignment of the fields that a parameter struct can have
_FIELDS = {
    "pointer": ("Q", 8, 8),
    "int32": ("i", 4, 4),
    "int64": ("q", 8, 8),
    "float32": ("f", 4, 4),
    "float64": ("d", 8, 8),
    "tensormap": ("128s", 128, 64),
}


class ParamStruct:
    """A by-value kernel parameter: the Python mirror of a C++ struct with natural alignment.

    Parameters
    ----------
    name : str
        The C++ name, for messages.
    **fields
        Type by field name in C++ order: "pointer", "int32", "int64", "float32", "float64" or "tensormap".

    Attributes
    ----------
    pack : callable
        Takes one value a field, in order, and returns the bytes of the struct.
    """

    def __init__(self, name: str, **fields: str) -> None:
        code, offset, widest = "<", 0, 1
        for kind in fields.values():
            field, size, align = _FIELDS[kind]
            code += f"{-offset % align}x{field}"
            offset += -offset % align + size
            widest = max(widest, align)
        self.name, self.fields = name, tuple(fields)
        self.size = offset + -offset % widest
        self.pack = struct.Struct(f"{code}{self.size - offset}x").pack


class Instance:
    """One kernel instance: a source, a name expression and options, compiled for any number of architectures.

    The emulator takes the library's instances as PTX; with `always_native` ptxas has its say there too.
    """

    _all: ClassVar[weakref.WeakSet[Instance]] = weakref.WeakSet()

    def __init__(
        self,
        source: sources.Source,
        expression: str,
        options: tuple = (),
        struct_size: int | None = None,
        always_native: bool = False,
    ) -> None:
        self.source, self.expression, self.options = source, expression, tuple(options)
        self.struct_size, self.always_native = struct_size, always_native
        self.compiled: dict[str, compiler.Compiled] = {}
        self._functions: weakref.WeakSet[Function] = weakref.WeakSet()  # on all devices
        self._stale: set[str] = set()
        self.lock = threading.RLock()
        Instance._all.add(self)

    def compile(self, arch: str, to_ptx: bool = False) -> compiler.Compiled:
        """Return the instance compiled for `arch`, from memory, disk or NVRTC; with `to_ptx`, as far as that.

        When the source was edited, a failure is raised once and the last good result stays in place. An interrupt is no
        failure: the edited source is compiled at the next call.
        """
        to_ptx = to_ptx and not self.always_native
        if arch not in self.compiled or arch in self._stale:
            with self.lock:
                if arch not in self.compiled or arch in self._stale:
                    try:
                        self.compiled[arch] = self._fresh(arch, to_ptx)
                    except Exception:
                        self._stale.discard(arch)
                        raise
                    self._stale.discard(arch)
        compiled = self.compiled[arch]
        if not to_ptx:
            compiled.native()
        return compiled

    def outdate(self, archs: Iterable[str]) -> None:
        """Have the source compiled anew for `archs` before the next launch."""
        with self.lock:
            self._stale.update(archs)
            for function in self._functions:
                function.outdate()

    def _fresh(self, arch: str, to_ptx: bool) -> compiler.Compiled:
        compiled = compiler.compile_instance(self.source, self.expression, self.options, arch, to_ptx)
        structs = [p.size for p in compiled.parameters if p.kind == "s"]
        if self.struct_size is not None and self.struct_size not in structs:
            raise CompileError(
                f"{self.expression}: the parameter struct has {structs} bytes in C++ and {self.struct_size} in Python"
            )
        return compiled

    def on(self, device: devices.Device) -> Function:
        """Return the instance loaded on a device."""
        if self not in device.functions:
            with self.lock:
                if self not in device.functions:
                    device.functions[self] = function = Function(self, device)
                    self._functions.add(function)
        return device.functions[self]


class Function:
    """An instance on a device: what a plan keeps and launches.

    Attributes
    ----------
    launch : callable
        Takes grid, block, values in C++ parameter order (ints for pointers, numbers, bytes for structs) and
        ``shared_bytes=0, early=False``. It changes when a source is edited: look it up anew for every launch.
    loaded : CudaFunction or EmulatedFunction
        The code on the device, with the `compiled` that it is from: for values converted by its parameters.
    outdated : bool
        An edited source waits to be taken into use.
    """

    def __init__(self, instance: Instance, device: devices.Device) -> None:
        self._instance, self.device = weakref.ref(instance), device  # weak: a kernel nobody holds is not reloaded
        self._use(device.load(instance.compile(device.arch, device.runs_ptx)))

    def outdate(self) -> None:
        """Take an edited source into use at the next launch."""
        self.outdated, self.launch = True, self._refresh_and_launch

    def refresh(self) -> None:
        """Take an edited source into use now."""
        instance = self._instance()
        with instance.lock:
            loaded = self.loaded
            try:
                compiled = instance.compile(self.device.arch, self.device.runs_ptx)
                if compiled is not loaded.compiled:
                    loaded = self.device.load(compiled)
            except Exception:
                self._use(loaded)  # the last good one if the source does not compile, which is raised once
                raise
            self._use(loaded)

    def bind(self, grid, block, values: tuple, shared_bytes: int = 0, early: bool = False) -> Callable[[], None]:
        """Return a function that makes one launch on a GPU again and again, with the kernel as it is then."""
        usual, launch = self.launch, self.loaded.bind(grid, block, values, shared_bytes, early)

        def again() -> None:
            if self.launch is usual:
                launch()
            else:  # a source was edited
                self.launch(grid, block, values, shared_bytes, early)

        return again

    def _use(self, loaded) -> None:
        self.loaded, self.launch, self.outdated = loaded, loaded.launch, False

    def _refresh_and_launch(self, grid, block, values: tuple, shared_bytes: int = 0, early: bool = False) -> None:
        self.refresh()
        self.loaded.launch(grid, block, values, shared_bytes, early)


class KernelSpec:
    """A kernel of the library: where it is, what its template takes, on which architectures it exists.

    Parameters
    ----------
    source : str
        File name in ``cuda_src``.
    entry : str
        Qualified name of the kernel template.
    template : tuple of str
        Names of the template parameters in C++ order.
    choices : dict
        Allowed values by name: dtype names become C++ types, bools and ints stay what they are.
    smoke : iterable of dict
        The instances that matter: compiled by the tests on every architecture.
    min_arch, max_arch : int, optional
        First and last compute capability (80, 90, ...) the kernel exists for.
    needs : callable, optional
        Takes template values by name; returns the first compute capability that has this instance, where some instances
        want a later one than `min_arch`.
    params : ParamStruct, optional
        The struct that the kernel takes by value; its size is compared with the compiler's.
    spills : dict, optional
        Bytes of spills that an instance may have, by architecture; none where it is not named.
    """

    registry: ClassVar[list[KernelSpec]] = []

    def __init__(
        self,
        *,
        source: str,
        entry: str,
        template: tuple[str, ...],
        choices: dict[str, tuple],
        smoke: Iterable[dict],
        min_arch: int = 80,
        max_arch: int | None = None,
        needs: Callable[..., int] | None = None,
        params: ParamStruct | None = None,
        spills: dict[str, int] | None = None,
    ) -> None:
        self.source, self.entry, self.template, self.choices = source, entry, template, choices
        self.smoke, self.min_arch, self.max_arch, self.params = tuple(smoke), min_arch, max_arch, params
        self.needs, self.spills = needs, spills or {}
        self._instances: dict[tuple, Instance] = {}
        KernelSpec.registry.append(self)

    def instance(self, **choices) -> Instance:
        """Return the instance with these template values."""
        key = tuple(choices.get(name) for name in self.template)
        if key not in self._instances:
            for name, value in zip(self.template, key, strict=True):
                if value not in self.choices[name]:
                    allowed = ", ".join(map(repr, self.choices[name]))
                    fail(ValueError, self.entry, name, f"be one of {allowed}", repr(value))
            expression = f"{self.entry}<{', '.join(map(_cpp_value, key))}>" if key else self.entry
            size = self.params.size if self.params else None
            instance = Instance(sources.library_source(self.source), expression, (), size)
            self._instances.setdefault(key, instance)  # another thread may have been first
        return self._instances[key]

    def kernel(self, device: devices.Device, **choices) -> Function:
        """Return an instance compiled and loaded on a device."""
        if not self.exists_on(device.capability):
            need = f"sm_{self.min_arch}" + (f" to sm_{self.max_arch}" if self.max_arch else " or newer")
            raise UnsupportedError(f"{self.entry}: needs {need}, found {device.arch} ({device})")
        return self.instance(**choices).on(device)

    def exists_on(self, capability: int) -> bool:
        """Tell whether the kernel exists for a compute capability."""
        return self.min_arch <= capability <= (self.max_arch or 1000)

    def instances(self, every: bool = False, capability: int | None = None) -> list[Instance]:
        """Return the smoke instances, or the whole product of choices: all, or those for a compute capability."""
        chosen = self.smoke
        if every:
            product = itertools.product(*(self.choices[name] for name in self.template))
            chosen = [dict(zip(self.template, values, strict=True)) for values in product]
        if capability is not None:
            found = self.exists_on(capability)
            chosen = [c for c in chosen if found and (self.needs is None or self.needs(**c) <= capability)]
        return [self.instance(**values) for values in chosen]


def _cpp_value(value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return dtypes.cpp(value) if dtypes.is_dtype(value) else str(value)


# --- reload, catalogue ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reloaded:
    """A kernel whose source changed; `before` and `after` are `Resources`, `error` the reason there is no `after`."""

    kernel: str
    arch: str
    before: compiler.Resources
    after: compiler.Resources | None = None
    error: Exception | None = None

    def __str__(self) -> str:
        def line(r):
            return f"{r.registers} registers, {r.shared_bytes} B shared, {r.spill_bytes} B spills"

        if self.error:
            return f"{self.kernel} ({self.arch}): kept at {line(self.before)}; {self.error}"
        after = f" -> {line(self.after)}" if self.after else ", compiles at the next launch"
        return f"{self.kernel} ({self.arch}): {line(self.before)}{after}"


def reload(compile: bool = False) -> list[Reloaded]:
    """Take edited kernel sources into use.

    Every kernel compiled so far whose source, or a header it includes, has changed on disk is compiled anew at its
    next launch, or at once with ``compile=True``. A source that does not compile raises CompileError once, at that
    launch (with ``compile=True``: in ``error`` of the entry, nothing is raised), and the last good kernel stays in
    use. Plans pick the new kernel up by themselves. A source whose includes are not plain to see (``#include MACRO``,
    the option ``-include``) counts as changed every time, and is not kept in the disk cache.

    Returns
    -------
    list of Reloaded
        One entry a changed kernel and architecture, with resources before and, if compiled, after.
    """
    compile = flag("reload", "compile", compile)
    digests: dict[tuple, str] = {}
    changed = []
    for instance in sorted(Instance._all, key=lambda i: i.expression):
        if not instance.compiled:
            continue
        key = instance.source, instance.options
        if key not in digests:
            digests[key] = _digest_now(*key)
        now = digests[key]
        stale = [a for a, c in sorted(instance.compiled.items()) if not now or c.digest != now]
        if stale:
            instance.outdate(stale)
            changed += [_reload_one(instance, arch, compile) for arch in stale]
    return changed


def _digest_now(source: sources.Source, options: tuple[str, ...]) -> str:
    try:
        return sources.digest(source.closure(options), options)
    except (OSError, ValueError):  # deleted or clashing: changed, and the next compilation says how
        return ""


def _reload_one(instance: Instance, arch: str, compile: bool) -> Reloaded:
    before, after, error = instance.compiled[arch].resources, None, None
    if compile:
        try:
            after = instance.compile(arch).resources
        except CompileError as failure:
            error = failure
    return Reloaded(instance.expression, arch, before, after, error)


@dataclass(frozen=True)
class KernelInfo:
    """One entry of `rawops.kernels`."""

    source: str
    expression: str
    choices: dict
    resources: dict  # arch -> Resources
    spills: dict  # arch -> bytes that are accepted


def kernels(archs: Iterable[str] = (), every: bool = False, progress: bool = False) -> list[KernelInfo]:
    """List the library's kernel instances with the choices of their template.

    Parameters
    ----------
    archs : iterable of str
        Compile each instance for these architectures ("sm_90a") to have its resources; without, those compiled so
        far in this process are listed.
    every : bool
        The whole product of choices instead of the instances that matter.
    progress : bool
        Show on stderr how many are ready.
    """
    archs = tuple(archs) if isinstance(archs, Iterable) and not isinstance(archs, str) else (archs,)
    for arch in archs:
        _check_arch("kernels", arch, KernelSpec.registry)
    jobs = [(spec, instance) for spec in KernelSpec.registry for instance in spec.instances(every)]
    work = [(i, a) for spec in KernelSpec.registry for a in archs for i in spec.instances(every, _capability(a))]
    _compile_all(work, archs, progress)
    return [
        KernelInfo(
            spec.source,
            instance.expression,
            spec.choices,
            {a: c.resources for a, c in sorted(instance.compiled.items()) if not archs or a in archs},
            spec.spills,
        )
        for spec, instance in jobs
    ]


def precompile(arch: str | None = None, ops: Iterable[str] | None = None, progress: bool = True) -> int:
    """Compile the kernels that matter into the disk cache, so that no later call waits for NVRTC.

    Parameters
    ----------
    arch : str, optional
        Architecture ("sm_90a"); the current device's, or the active emulator's, when left out.
    ops : iterable of str, optional
        Source name prefixes ("gemm", "lora"), each with a kernel; everything when left out.
    progress : bool
        Show on stderr how many are ready.

    Returns
    -------
    int
        How many instances are ready.
    """
    if arch is None:
        arch = arrays.current_device("precompile").arch
    specs = KernelSpec.registry if ops is None else _specs_of(ops)
    _check_arch("precompile", arch, specs or KernelSpec.registry)
    work = [(instance, arch) for spec in specs for instance in spec.instances(capability=_capability(arch))]
    _compile_all(work, (arch,), progress)
    return len(work)


def _compile_all(work: list[tuple[Instance, str]], archs: tuple[str, ...], progress: bool) -> None:
    """Compile instances, each for one of `archs`, and show how many are ready."""
    with ThreadPoolExecutor(_COMPILERS) as pool:
        done = pool.map(lambda job: job[0].compile(job[1]), work)
        for _ in shown(done, f"compiling for {', '.join(archs)}", len(work)) if progress and work else done:
            pass


def _specs_of(ops: Iterable[str]) -> list[KernelSpec]:
    prefixes = tuple(ops) if isinstance(ops, Iterable) and not isinstance(ops, str) else (ops,)
    sources = sorted({spec.source for spec in KernelSpec.registry})
    for prefix in prefixes:
        if not isinstance(prefix, str) or not any(source.startswith(prefix) for source in sources):
            fail(ValueError, "precompile", "ops", f"start the name of a source ({', '.join(sources)})", repr(prefix))
    return [spec for spec in KernelSpec.registry if spec.source.startswith(prefixes)]


def _check_arch(function: str, arch: str, specs: list[KernelSpec]) -> None:
    """Raise ValueError for what is no architecture's name, or one that none of these kernels exists for."""
    named = isinstance(arch, str) and compiler.ARCH_NAME.fullmatch(arch)
    if not (named and any(spec.exists_on(_capability(arch)) for spec in specs)):
        rule = f"be an architecture that its kernels exist for, such as {', '.join(compiler.ARCHS)}"
        fail(ValueError, function, "arch", rule, repr(arch))


def _capability(arch: str) -> int:
    return int("".join(c for c in arch if c.isdigit()) or 0)
