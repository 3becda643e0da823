"""NVRTC: one kernel instance in, cubin, PTX, signature and resource report out, with a disk cache between.

The emulator needs the PTX alone, which is the same text without ptxas and takes some 60% of the time: an instance may
be compiled to PTX first, and whoever asks for its cubin or resources has them made then.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import threading
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rawops._runtime import cache, sources
from rawops.errors import CompileError, UnsupportedError

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
ARCH_NAME = re.compile(r"sm_\d+[af]?")
# NVRTC has a cache of its own where there is a driver; what comes out of it has no ptxas report.
_OPTIONS = ("-std=c++17", "-lineinfo", "--ptxas-options=-v", "--no-cache")
_UNIT_NAME = "rawops_unit.cu"
_SIGNATURE = "rawops_kernel_signature"

# The translation unit includes the real file and names one instance. The kernel's parameter types are written into a
# device constant, from where the compiler's output tells Python what to pack: kind, bytes (16 bits) and alignment.
# The odd names keep out of the way of the source's macros.
_UNIT = """#include "{name}"
namespace rawops_signature {{
template <class T__, bool = __is_enum(T__)> struct kind__ {{ enum {{ value__ = 's' }}; }};
template <class T__> struct kind__<T__, true> : kind__<__underlying_type(T__)> {{}};
template <class T__> struct kind__<T__*> {{ enum {{ value__ = 'p' }}; }};
template <class T__> struct kind__<T__&> {{ enum {{ value__ = 'r' }}; }};
#define RAWOPS_KIND(k__, ...) template <> struct kind__<__VA_ARGS__> {{ enum {{ value__ = k__ }}; }};
RAWOPS_KIND('b', bool) RAWOPS_KIND('f', float) RAWOPS_KIND('f', double)
RAWOPS_KIND('i', signed char) RAWOPS_KIND('i', char) RAWOPS_KIND('i', short) RAWOPS_KIND('i', int)
RAWOPS_KIND('i', long) RAWOPS_KIND('i', long long)
RAWOPS_KIND('u', unsigned char) RAWOPS_KIND('u', unsigned short) RAWOPS_KIND('u', unsigned int)
RAWOPS_KIND('u', unsigned long) RAWOPS_KIND('u', unsigned long long)
#ifdef __CUDA_FP16_TYPES_EXIST__
RAWOPS_KIND('h', __half)
#endif
#ifdef __CUDA_BF16_TYPES_EXIST__
RAWOPS_KIND('g', __nv_bfloat16)
#endif
#undef RAWOPS_KIND
template <class T__> struct held__ {{ T__ value__; }};  // a reference takes a pointer's bytes
struct entry__ {{ unsigned char kind__, low__, high__, align__; }};
template <class T__> struct list__;
template <class... T__> struct list__<void (*)(T__...)> {{
  entry__ entries__[sizeof...(T__) + 1] = {{
      {{kind__<T__>::value__, sizeof(held__<T__>) & 255, sizeof(held__<T__>) >> 8, alignof(held__<T__>)}}...,
      {{0, 0, 0, 0}}}};
}};
}}
extern "C" __device__ const rawops_signature::list__<decltype(&{expression})> {signature} = {{}};
"""


@dataclass(frozen=True)
class Parameter:
    """One parameter: p(ointer), r(eference), i(nt), u(nsigned), f(loat), b(ool), h(alf), g (bfloat16) or s(truct)."""

    kind: str
    size: int
    align: int


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for a kernel: registers a thread, static shared memory, stack and spills in bytes."""

    registers: int
    shared_bytes: int
    local_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Native:
    """What ptxas makes of an instance."""

    cubin: bytes
    resources: Resources


@dataclass(frozen=True)
class Compiled:
    """One instance compiled for one architecture; `native` makes the cubin first where it was compiled to PTX."""

    expression: str
    arch: str
    digest: str = field(repr=False)
    lowered: str = field(repr=False)
    parameters: tuple[Parameter, ...]
    ptx_zipped: bytes = field(repr=False)
    native: Callable[[], Native] = field(repr=False, compare=False)
    from_cache: bool = False

    @property
    def cubin(self) -> bytes:
        """Return the machine code, which a GPU loads."""
        return self.native().cubin

    @property
    def resources(self) -> Resources:
        """Return what the machine code takes."""
        return self.native().resources

    @property
    def ptx(self) -> str:
        """Return the PTX text, which the emulator runs."""
        return zlib.decompress(self.ptx_zipped).decode()


def compile_instance(
    source: sources.Source, expression: str, options: tuple[str, ...], arch: str, to_ptx: bool = False
) -> Compiled:
    """Return one kernel instance, from the disk cache or from NVRTC; with `to_ptx`, its cubin may be yet to make.

    Raises
    ------
    CompileError
        With the first error, its source lines and the whole log in ``.log``; also for a file that cannot be read.
    UnsupportedError
        Where NVRTC or the CUDA headers are missing, or NVRTC does not know `arch`.
    """
    if not ARCH_NAME.fullmatch(arch):
        raise UnsupportedError(f"rawops: arch must be a name such as 'sm_80' or 'sm_90a', got {arch!r}")
    try:
        files = source.closure(options)
    except (OSError, ValueError) as error:  # deleted, or two files of one name
        instance = f"{expression} for {arch}"
        raise CompileError(f"{instance} does not compile\n{error}", instance=instance) from error
    return _of_files(files, expression, options, arch, to_ptx)


def _of_files(files: dict[str, sources.File], expression: str, options, arch: str, to_ptx: bool) -> Compiled:
    digest = sources.digest(files, options)
    key = cache_key(digest, expression, options, arch)
    keys = [key, cache_key(digest, expression, options, _virtual(arch))] if to_ptx else [key]
    # of the files as they are now, not as they will be when somebody asks
    later = functools.cache(lambda: _of_files(files, expression, options, arch, False).native())
    with _lock_of(key):
        for entry in map(cache.load, keys if digest else ()):
            if entry is not None:
                return _from_entry(*entry, expression, arch, digest, later)
        compiled = _compile(files, digest, expression, options, arch, later if to_ptx else None)
        if not digest:  # an entry would outlive a file that it knows nothing of
            return compiled
        meta = {
            "lowered": compiled.lowered,
            "parameters": [[p.kind, p.size, p.align] for p in compiled.parameters],
            "resources": None if to_ptx else asdict(compiled.resources),
            "expression": expression,
            "arch": arch,
        }
        cache.store(keys[-1], meta, [b"" if to_ptx else compiled.cubin, compiled.ptx_zipped])
        return compiled


def _virtual(arch: str) -> str:
    """Return NVRTC's name of an architecture to compile for to PTX alone."""
    return arch.replace("sm_", "compute_")


def cache_key(digest: str, expression: str, options: tuple[str, ...], arch: str) -> str:
    """Return the cache key of an instance: everything that decides the compiler's output, and no path."""
    version = ".".join(map(str, nvrtc_version()))
    unit = hashlib.sha256(_UNIT.encode()).hexdigest()
    parts = (arch, *_OPTIONS, *options, version, unit, digest, expression)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


_locks: dict[str, threading.Lock] = {}


def _lock_of(key: str) -> threading.Lock:
    return _locks.setdefault(key, threading.Lock())


def _from_entry(meta: dict, blobs: list[bytes], expression: str, arch: str, digest: str, later) -> Compiled:
    cubin, ptx_zipped = blobs
    if cubin:
        native = Native(cubin, Resources(**{**meta["resources"], "warnings": tuple(meta["resources"]["warnings"])}))
    return Compiled(
        expression,
        arch,
        digest,
        meta["lowered"],
        tuple(Parameter(*p) for p in meta["parameters"]),
        ptx_zipped,
        (lambda: native) if cubin else later,
        from_cache=True,
    )


# --- the toolchain --------------------------------------------------------------------------------------------------


@functools.cache
def include_folder() -> Path:
    """Return the folder of ``cuda_fp16.h``, found by cuda.pathfinder."""
    try:
        from cuda import pathfinder

        found = pathfinder.find_nvidia_header_directory("cudart")
    except ImportError:
        found = None
    if not found:
        raise UnsupportedError(f"rawops: the CUDA headers were not found. {INSTALL_HINT}")
    return Path(found)


INSTALL_HINT = 'Install with pip install "rawops[cu13]" (or cu12; rawops[cpu] to compile and emulate alone)'


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version without loading it where a file name tells, since loading costs tens of milliseconds."""
    root = include_folder().parent
    names = set()
    for folder in (root / "lib", root / "lib64", root / "bin", root.parent / "cuda_nvrtc" / "lib"):
        for path in folder.glob("*nvrtc-builtins*"):
            match = re.search(r"\.so\.(\d+)\.(\d+)$|64_(\d+)(\d)\.dll$", path.name)
            if match:
                names.add(tuple(int(g) for g in match.groups() if g))
    if len(names) == 1:
        return names.pop()
    return loaded_nvrtc_version()


def loaded_nvrtc_version() -> tuple[int, int]:
    """Load NVRTC and return the version it says it is."""
    return _check(_nvrtc().nvrtcVersion())


def _nvrtc():
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library, which is a package of its own
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(f"rawops: NVRTC was not found ({error}). {INSTALL_HINT}") from error
    return nvrtc


def _check(result: tuple):
    status, *values = result
    if int(status) != 0:
        raise CompileError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


# --- one compilation ------------------------------------------------------------------------------------------------


def _compile(files, digest, expression, options, arch, later: Callable[[], Native] | None) -> Compiled:
    """Run NVRTC: to PTX alone where the cubin is for `later`."""
    nvrtc = _nvrtc()
    unit = sources.encode(_UNIT.format(name=next(iter(files)), expression=expression, signature=_SIGNATURE))
    names, texts = map(sources.encode, files), [sources.encode(file.text) for file in files.values()]
    program = _check(nvrtc.nvrtcCreateProgram(unit, _UNIT_NAME.encode(), len(texts), texts, list(names)))
    try:
        _check(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        target = _virtual(arch) if later else arch
        arguments = [f"-arch={target}", *_OPTIONS, f"-I{include_folder()}", *options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), [*map(sources.encode, arguments)])
        raw = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        log = raw.replace(b"\0", b"").decode(errors="replace")
        if int(status) != 0:
            ptx = functools.partial(_ptx_of, files, digest, expression, options, arch)
            raise _error_of(log, files, f"{expression} for {arch}", ptx)
        lowered = _check(nvrtc.nvrtcGetLoweredName(program, expression.encode())).decode()
        ptx = _as_included(_text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0"))
        if later is None:
            cubin = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
            native = Native(cubin, parse_resources(log, lowered))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    parameters = _parameters(ptx.decode())
    return Compiled(expression, arch, digest, lowered, parameters, zlib.compress(ptx, 1), later or (lambda: native))


def _ptx_of(files, digest, expression, options, arch) -> str:
    """Return the PTX that ptxas has refused."""
    return _compile(files, digest, expression, options, arch, _no_native).ptx


def _no_native() -> Native:
    raise AssertionError("this instance has PTX alone")


def _text(size_of, fill, program) -> bytes:
    data = bytes(_check(size_of(program)))  # cuda.bindings fills the bytes object in place; this one is ours alone
    _check(fill(program, data))
    return data


def _as_included(ptx: bytes) -> bytes:
    """Name source files as the #include lines do: NVRTC writes the working directory before the name."""
    with contextlib.suppress(OSError):
        return re.sub(rb'(\.file\s+\d+ ")' + re.escape(os.fsencode(os.getcwd())) + rb"/", rb"\1", ptx)
    return ptx


def _parameters(ptx: str) -> tuple[Parameter, ...]:
    match = re.search(rf"\b{_SIGNATURE}\[\d+\]\s*=\s*\{{([^}}]*)\}}", ptx)
    raw = [int(v) for v in match.group(1).split(",")] if match else []  # trailing zeros are left out
    rows = [raw[i : i + 4] for i in range(0, len(raw) - 3, 4)]
    return tuple(Parameter(chr(kind), low | high << 8, align) for kind, low, high, align in rows if kind)


def parse_resources(log: str, lowered: str) -> Resources:
    """Read a kernel's resources out of an NVRTC log made with ``--ptxas-options=-v``."""
    registers = shared = local = spills = 0
    current = ""
    for line in log.splitlines():
        if match := re.search(r"(?:entry function '|Function properties for )([^' ]+)", line):
            current = match.group(1)
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, stores, loads = map(int, match.groups())
            if current == lowered:
                local = stack
                spills += stores + loads
        elif current == lowered and (match := re.search(r"Used (\d+) registers", line)):
            registers = int(match.group(1))
            smem = re.search(r"(\d+) bytes smem", line)
            shared = int(smem.group(1)) if smem else 0
    advisories = tuple(line.strip() for line in log.splitlines() if re.search(r"\(C75\d\d\)", line))
    return Resources(registers, shared, local, spills, advisories)


def _error_of(log: str, files: dict[str, sources.File], instance: str, ptx: Callable[[], str]) -> Exception:
    if "invalid value for --gpu-architecture" in log:
        found = ".".join(map(str, nvrtc_version()))
        return UnsupportedError(
            f"rawops: NVRTC {found} does not know the architecture of {instance}; install one that does"
        )
    lines = [f"{instance} does not compile"]
    known = {sources.encode(name).decode(errors="replace"): file for name, file in files.items()}
    name, number, error = _first_error(log, ptx)
    if name in known:
        path, text = known[name]
        text = text.splitlines()
        lines.append(f"{path}({number}): {error}")
        lines += [f"  {i:5d} | {text[i - 1]}" for i in range(max(number - 1, 1), min(number + 1, len(text)) + 1)]
    elif name == _UNIT_NAME and number < _UNIT.count("\n"):
        lines.append(f"{next(iter(files.values())).path}, at its end: {error}")
    elif name in (_UNIT_NAME, "__nv_name_map"):
        lines.append(f"the name of the kernel: {error}")
    elif name:
        lines.append(f"{name}({number}): {error}")
    else:
        logged = [line for line in log.splitlines() if line.strip()]
        lines += ([line for line in logged if re.search(r"\b(error|fatal)\b", line)] or logged)[:3]
    return CompileError("\n".join(lines), log=log, instance=instance)


def _first_error(log: str, ptx: Callable[[], str]) -> tuple[str, int, str]:
    """Return the file ("" where none is named), the line and the text of the error to begin with.

    A brace that is not closed shows in the translation unit first, a type that is not declared, of a parameter, in its
    kernel's ``__global__``; what ptxas refuses has a line of the PTX alone.
    """
    found = re.search(r"^(.+?)\((\d+)\): ((?:catastrophic )?[Ee]rror\b.*)", log, re.MULTILINE)
    if found is None or found[1] == _UNIT_NAME:
        opened = re.search(r'^(.+?)\((\d+)\): note.* to match this "\{"', log, re.MULTILINE)
        if opened:
            return opened[1], int(opened[2]), 'error: expected a "}" to match this "{"'
    if found and "does not apply here" in found[3]:
        unknown = rf'^({re.escape(found[1])})\((\d+)\): (error: identifier ".*" is undefined)'
        found = re.search(unknown, log, re.MULTILINE) or found
    if found:
        return found[1], int(found[2]), found[3]
    found = re.search(r"^ptxas application ptx input, line (\d+); (?:error|fatal)\s*: (.*)", log, re.MULTILINE)
    if found is None:
        return "", 0, ""
    text = ptx()
    above = text.splitlines()[: int(found[1])]
    places = re.findall(r"^\s*\.loc\s+(\d+) (\d+)", "\n".join(above), re.MULTILINE)
    names = dict(re.findall(r'^\s*\.file\s+(\d+) "(.*)"', text, re.MULTILINE))
    file, line = places[-1] if places else ("", 0)
    return names.get(file, ""), int(line), f"ptxas error: {found[2]}: {above[-1].strip()}"
