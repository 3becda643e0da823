"""Sources, NVRTC, specs and reload, without a launch: nothing here needs a GPU or the emulator."""

import os
import threading
from pathlib import Path

import pytest

import rawops
from rawops._runtime import cache, compiler, kernel, sources

KERNELS = Path(__file__).parent / "kernels"
SAXPY = (KERNELS / "saxpy.cu").read_text()
STEP = (KERNELS / "step.cuh").read_text()
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def saxpy(tmp_path):
    """A copy of the kernel and its header that a test may edit."""
    (tmp_path / "saxpy.cu").write_text(SAXPY)
    (tmp_path / "step.cuh").write_text(STEP)
    return rawops.Kernel(tmp_path / "saxpy.cu", "saxpy<float>")


def kinds(compiled) -> str:
    return "".join(p.kind for p in compiled.parameters)


# --- sources, expressions, options ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", compiler.ARCHS)
def test_one_compilation_gives_cubin_ptx_signature_and_resources(arch):
    compiled = rawops.Kernel(KERNELS / "saxpy.cu", "saxpy<double>").compile(arch)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert f".entry {compiled.lowered}(" in compiled.ptx
    assert f".target {arch}" in compiled.ptx
    assert [(p.kind, p.size, p.align) for p in compiled.parameters] == [
        ("f", 8, 8), ("p", 8, 8), ("p", 8, 8), ("i", 4, 4),
    ]  # fmt: skip
    assert 4 <= compiled.resources.registers <= 64
    assert compiled.resources.spill_bytes == 0


def test_a_refused_architecture_leaves_the_last_one():
    kernel = rawops.Kernel(KERNELS / "saxpy.cu", "saxpy<float>")
    kernel.compile("sm_80")
    with pytest.raises(rawops.UnsupportedError):
        kernel.compile("sm_12")
    assert kernel.resources.registers > 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
def test_ptx_alone_is_the_same_and_the_rest_is_made_when_asked_for(arch, compilations, tmp_path):
    header = tmp_path / "step.cuh"
    header.write_text(STEP)
    (tmp_path / "saxpy.cu").write_text(SAXPY)
    source = sources.library_source(str(tmp_path / "saxpy.cu"))
    first = compiler.compile_instance(source, "saxpy<double>", (), arch, to_ptx=True)
    assert compilations == ["saxpy<double>"]
    whole = compiler.compile_instance(source, "saxpy<double>", (), arch)
    assert (first.ptx, first.parameters, first.lowered) == (whole.ptx, whole.parameters, whole.lowered)
    cache.clear()
    header.write_text(STEP.replace("a * x + y", "a * x * y"))  # what was compiled is not what is there now
    assert first.cubin == whole.cubin and first.resources == whole.resources
    assert compilations == 3 * ["saxpy<double>"]


def test_a_path_as_a_string_is_a_path():
    assert kinds(rawops.Kernel(str(KERNELS / "saxpy.cu"), "saxpy<float>").compile("sm_80")) == "fppi"


def test_text_with_an_extern_c_kernel_namespace_and_library_header():
    text = """
    #include "common/numeric.cuh"
    namespace a { template <class T, int N, bool B> __global__ void f(T* x, unsigned long long n) { x[n] = N + B; } }
    extern "C" __global__ void plain() {}
    """
    compiled = rawops.Kernel(text, "plain").compile("sm_80")
    assert (compiled.lowered, compiled.parameters) == ("plain", ())
    assert kinds(rawops.Kernel(text, "a::f<long long, 3, true>").compile("sm_80")) == "pu"


def test_every_parameter_type_is_told_apart():
    compiled = rawops.Kernel(KERNELS / "arguments.cu", "scalars").compile("sm_80")
    assert kinds(compiled) == "piuiubffhgi"
    assert [p.size for p in compiled.parameters] == [8, 4, 4, 8, 1, 1, 4, 8, 2, 2, 4]


def test_enums_are_what_lies_under_them_and_references_are_told_from_structs():
    text = (
        "enum class A : unsigned char {};\nenum class B : long long {};\nenum class C : bool {};\n"
        "enum D { kFirst = -1 };\nstruct S { char c[3]; };\n"
        "__global__ void f(A, B, C, D, S, const S& by_reference, int* p) {}\n"
    )
    compiled = rawops.Kernel(text, "f").compile("sm_80")
    assert kinds(compiled) == "uibisrp"
    assert [(p.size, p.align) for p in compiled.parameters] == [(1, 1), (8, 8), (1, 1), (4, 4), (3, 1), (8, 8), (8, 8)]


def test_options_reach_the_compiler_and_the_key(compilations):
    text = "__global__ void f(float (*x)[N]) { x[1][0] = N; }\n"
    with pytest.raises(rawops.CompileError, match='identifier "N" is undefined'):
        rawops.Kernel(text, "f").compile("sm_80")
    four, eight = (rawops.Kernel(text, "f", [f"-DN={n}"]).compile("sm_80") for n in (4, 8))
    assert len(compilations) == 3
    assert four.ptx != eight.ptx


def test_macros_of_the_source_do_not_meddle():
    names = ("T", "A", "F", "N", "kind", "value", "entry", "list", "low", "align", "c", "k")
    text = "".join(f"#define {name} 1\n" for name in names) + "__global__ void f(int*, float) {}\n"
    assert kinds(rawops.Kernel(text, "f").compile("sm_80")) == "pf"
    text = "__global__ void f(int*, float) {}\n"
    options = [f"-D{name}=1" for name in ("A", "entry", "list")]  # NVRTC's own headers mind T and N
    assert kinds(rawops.Kernel(text, "f", options).compile("sm_80")) == "pf"


def test_resources_name_spills_shared_and_local_memory():
    fits = rawops.Kernel(KERNELS / "spills.cu", "hold<16>").compile("sm_80").resources
    spills = rawops.Kernel(KERNELS / "spills.cu", "hold<128>").compile("sm_80").resources
    assert (fits.spill_bytes, fits.local_bytes) == (0, 0)
    assert spills.registers == 64
    assert spills.spill_bytes > 0 and spills.local_bytes > 0
    text = "__global__ void f(int* x) { __shared__ int s[100]; s[*x] = 1; __syncthreads(); *x = s[0]; }\n"
    k = rawops.Kernel(text, "f")
    assert k.compile("sm_90a").resources.shared_bytes >= 400
    assert k.resources == k.compile("sm_90a").resources


def test_a_header_asked_for_by_two_names_is_included_once(tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "a.cuh").write_text("#pragma once\nstruct A { int x; };\n")
    (tmp_path / "common" / "b.cuh").write_text('#pragma once\n#include "a.cuh"\n')
    (tmp_path / "k.cu").write_text(
        f'#include "common/a.cuh"\n  # include "common/b.cuh"\n#include "{tmp_path}/common/../common/a.cuh"\n'
        "__global__ void f(A a, int* p) { *p = a.x; }\n"
    )
    assert kinds(rawops.Kernel(tmp_path / "k.cu", "f").compile("sm_80")) == "sp"


def test_headers_of_include_folders_are_part_of_the_kernel(tmp_path, compilations):
    (tmp_path / "include").mkdir()
    header = tmp_path / "include" / "value.h"
    options = ("-I", str(tmp_path / "include")), (f"-I{tmp_path}/include",), (f"--include-path={tmp_path}/include",)
    text = "#include <value.h>\n__global__ void f(int* x) { *x = VALUE; }\n"
    for i, option in enumerate(options):
        header.write_text(f"#define VALUE {700 + i}\n")
        assert str(700 + i) in rawops.Kernel(text, "f", option).compile("sm_80").ptx
    assert len(compilations) == 3


@pytest.mark.parametrize(
    "text, options",
    [
        ('#include "value.h"\n', ()),
        ("#include <value.h>\n", ("-I .",)),
        ("#include <value.h>\n", ("--include-path", ".")),
        ('#define HEADER "value.h"\n#include HEADER\n', ()),
        ("#include HEADER\n", ('-DHEADER="value.h"',)),
        ('#include \\\n "value.h"\n', ()),
        ('/* of\n */ #include /* a */ "value.h"\n', ()),
        ('%:include "value.h"\n', ()),
        ('#if __has_include("value.h")\n#define HEADER "value.h"\n#include HEADER\n#endif\n', ()),
        ("", ("-include", "value.h")),
        ("", ("--pre-include=value.h",)),
    ],
)
def test_whatever_way_a_header_comes_in_its_edits_are_seen(tmp_path, monkeypatch, text, options):
    """By later kernels, which the disk cache has another version of, and by `reload`."""
    monkeypatch.chdir(tmp_path)
    header = tmp_path / "value.h"
    text += "__global__ void f(int* x) { *x = VALUE; }\n"
    for value in (701, 702):
        header.write_text(f"#define VALUE {value}\n")
        kernel = rawops.Kernel(text, "f", options)
        assert str(value) in kernel.compile("sm_80").ptx
    header.write_text("#define VALUE 703\n")
    assert [change.kernel for change in rawops.reload()] == ["f"]
    assert "703" in kernel.compile("sm_80").ptx


@pytest.mark.parametrize(("folder", "is_own"), [("cuda_src", True), ("cuda_src_of_mine", False)])
def test_includes_are_looked_for_in_all_but_the_librarys_own_files(tmp_path, monkeypatch, folder, is_own):
    monkeypatch.setattr(sources, "cuda_src", lambda: tmp_path / "cuda_src")
    path = tmp_path / folder / "k.cu"
    path.parent.mkdir()
    path.write_text('#define HEADER "value.h"\n#include HEADER\n__global__ void f() {}\n')
    assert bool(sources.digest(sources.user_source(path).closure())) == is_own


def test_a_header_that_is_asked_for_by_its_name_is_seen_to_come(tmp_path, monkeypatch):
    """The disk cache keeps what the includes of a kernel tell, also whether a header is there."""
    monkeypatch.chdir(tmp_path)
    text = '#if defined(__has_include)\n#if __has_include("value.h")\n#include "value.h"\n#endif\n#endif\n'
    text += "#ifndef VALUE\n#define VALUE 801\n#endif\n__global__ void f(int* x) { *x = VALUE; }\n"
    for value in (801, 802):
        made = [rawops.Kernel(text, "f").compile("sm_80") for _ in range(2)]
        assert [compiled.from_cache for compiled in made] == [False, True]
        assert all(str(value) in compiled.ptx for compiled in made)
        (tmp_path / "value.h").write_text("#define VALUE 802\n")


def test_a_working_folder_that_is_gone_takes_nothing_along(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert rawops.Kernel('#include "common/numeric.cuh"\n__global__ void f() {}\n', "f").compile("sm_80")


def test_text_that_is_not_utf8_compiles(tmp_path):
    (tmp_path / "k.cu").write_bytes(b"// caf\xe9\n__global__ void f(int* x) { *x = 1; }\n")
    assert kinds(rawops.Kernel(tmp_path / "k.cu", "f").compile("sm_80")) == "p"


def test_a_byte_order_mark_is_no_part_of_the_source(tmp_path):
    (tmp_path / "k.cu").write_text("__global__ void f(int* x) { *x = 1; }\n", encoding="utf-8-sig")
    assert kinds(rawops.Kernel(tmp_path / "k.cu", "f").compile("sm_80")) == "p"


@pytest.mark.parametrize("name", ["ÄÖ 测试.cu", "c'd e(f)(3).cu", 'quo"te.cu', "back\\n.cu", "%s{x}.cu"])
def test_odd_file_names(tmp_path, name):
    path = tmp_path / name
    path.write_text("__global__ void f(int* x) {\n  *x = y;\n}\n")
    with pytest.raises(rawops.CompileError) as caught:
        rawops.Kernel(path, "f").compile("sm_80")
    assert f"{path}(2): error" in str(caught.value)
    path.write_text("__global__ void f(int* x) { *x = 1; }\n")
    (entry,) = os.scandir(tmp_path)
    for source in (path, str(path), entry):
        assert kinds(rawops.Kernel(source, "f").compile("sm_80")) == "p"


# --- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_shows_the_true_path_line_and_neighbours(tmp_path):
    path = tmp_path / "broken.cu"
    path.write_text("// one\n__global__ void f(float* x) {\n  x[0] = undefined_name;\n}\n// five\n")
    with pytest.raises(rawops.CompileError) as caught:
        rawops.Kernel(path, "f").compile("sm_90a")
    message = str(caught.value)
    assert f'{path}(3): error: identifier "undefined_name" is undefined' in message
    assert "2 | __global__ void f(float* x) {" in message
    assert "3 |   x[0] = undefined_name;" in message
    assert "4 | }" in message
    assert "one" not in message and "five" not in message
    assert caught.value.instance == "f for sm_90a"
    assert "undefined_name" in caught.value.log and "1 error detected" in caught.value.log


def test_an_error_in_a_header_names_the_header(tmp_path, saxpy):
    (tmp_path / "step.cuh").write_text(STEP.replace("a * x + y", "a * x + z"))
    with pytest.raises(rawops.CompileError) as caught:
        saxpy.compile("sm_80")
    assert f"{tmp_path / 'step.cuh'}(5): error" in str(caught.value)
    assert "return a * x + z;" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("// one\n__global__ void f(float* x) {\n  if (x) {\n}\n", '(2): error: expected a "}" to match this "{"\n'),
        ('extern "C" {\n__global__ void f() {}\n', '(1): error: expected a "}" to match this "{"\n'),
        ("__global__ void f() {}\n__device__ int x", ', at its end: error: expected a ";"'),
        ("__global__ void f(", '(1): error: attribute "__global__" does not apply here'),
    ],
)
def test_a_source_that_ends_too_early(text, words):
    with pytest.raises(rawops.CompileError) as caught:
        rawops.Kernel(text, "f").compile("sm_80")
    assert str(caught.value).startswith(f"f for sm_80 does not compile\nsource.cu{words}")


def test_a_parameter_of_a_type_that_is_not_declared():
    with pytest.raises(rawops.CompileError, match=r'source.cu\(2\): error: identifier "__half" is undefined'):
        rawops.Kernel("__global__ void f(\n    __half* x) {}\n", "f").compile("sm_80")


def test_what_ptxas_refuses_has_its_source_line(tmp_path):
    (tmp_path / "fence.cuh").write_text(
        '#pragma once\n__device__ void fence() {\n  asm("wgmma.fence.sync.aligned;");\n}\n'
    )
    (tmp_path / "f.cu").write_text('#include "fence.cuh"\n__global__ void f() { fence(); }\n')
    with pytest.raises(rawops.CompileError) as caught:
        rawops.Kernel(tmp_path / "f.cu", "f").compile("sm_80")
    assert f"{tmp_path / 'fence.cuh'}(3): ptxas error: Instruction 'wgmma.fence' not supported" in str(caught.value)
    assert '3 |   asm("wgmma.fence.sync.aligned;");' in str(caught.value)
    text = "__global__ void f(float* x) {\n  __shared__ float s[60000];\n  s[threadIdx.x] = x[0];\n}\n"
    text = text.replace("}\n", "  __syncthreads();\n  x[1] = s[0];\n}\n")
    with pytest.raises(
        rawops.CompileError, match=r"does not compile\nptxas error.*uses too much shared data"
    ) as caught:
        rawops.Kernel(text, "f").compile("sm_80")
    assert "\0" not in caught.value.log


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("g", 'identifier "g" is undefined'),
        ("f", "cannot determine which instance"),
        ("f<float", 'expected a ">"'),
        ("device", "non-__global__"),
    ],
)
def test_a_wrong_kernel_name_is_called_that(expression, words):
    text = "template <class T> __global__ void f(T* x) {}\n__device__ void device(int) {}\n"
    with pytest.raises(rawops.CompileError, match="the name of the kernel: error") as caught:
        rawops.Kernel(text, expression).compile("sm_80")
    assert words in str(caught.value)


def test_a_missing_header_and_an_unknown_option_say_so():
    with pytest.raises(rawops.CompileError, match=r'source.cu\(1\).*cannot open source file "nowhere.cuh"'):
        rawops.Kernel('#include "nowhere.cuh"\n__global__ void f() {}\n', "f").compile("sm_80")
    with pytest.raises(rawops.CompileError, match="unrecognized option -bogus"):
        rawops.Kernel("__global__ void f() {}\n", "f", ["-bogus"]).compile("sm_80")


@pytest.mark.parametrize("arch", ["sm_33", "sm_999", "compute_90", "90a", "sm_90x", ""])
def test_an_unknown_architecture(arch):
    with pytest.raises(rawops.UnsupportedError, match="arch"):
        rawops.Kernel("__global__ void f() {}\n", "f").compile(arch)
    assert issubclass(rawops.UnsupportedError, NotImplementedError)


def test_a_missing_file():
    with pytest.raises(FileNotFoundError, match=r"source must be an existing file or CUDA text, got 'nowhere\.cu'"):
        rawops.Kernel("nowhere.cu", "f")
    for text in ("", "x" * 5000, "a\0b"):  # longer than a name may be, or no name at all
        with pytest.raises(FileNotFoundError, match="Kernel: source must be an existing file or CUDA text"):
            rawops.Kernel(text, "f")
    for source in (None, b"__global__ void f() {}\n"):
        with pytest.raises(TypeError, match="Kernel: source must be a path or CUDA text, got "):
            rawops.Kernel(source, "f")


def test_what_is_no_kernel_raises():
    text = "__global__ void f() {}\n"
    for expression in (None, b"f", 4):
        with pytest.raises(TypeError, match="Kernel: expression must be a string such as"):
            rawops.Kernel(text, expression)
    for options in ([4], "-DN=4", None, 4, [b"-DN=4"]):
        with pytest.raises(TypeError, match="Kernel: options must be a tuple of strings, got"):
            rawops.Kernel(text, "f", options)
    for option in ("-arch=sm_90a", "--gpu-architecture=compute_80"):
        with pytest.raises(ValueError, match="Kernel: options must leave the architecture to the device"):
            rawops.Kernel(text, "f", ["-DN=4", option])
    for arch in (None, 80, ["sm_80"]):
        with pytest.raises(TypeError, match="f: arch must be a name such as 'sm_90a', got"):
            rawops.Kernel(text, "f").compile(arch)


# --- threads --------------------------------------------------------------------------------------------------------


def test_32_threads_compile_the_same_and_different_kernels_once_each(compilations):
    text = "template <int N> __global__ void f(int* x) { *x = N; }\n"
    shared = rawops.Kernel(text, "f<100>")
    start, results, errors = threading.Barrier(32), {}, []

    def work(i):
        start.wait()
        try:
            own = rawops.Kernel(text, f"f<{i % 4}>")  # eight threads with a Kernel each for one instance
            results[i] = shared.compile("sm_80"), own.compile("sm_80").ptx
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(compilations) == ["f<0>", "f<100>", "f<1>", "f<2>", "f<3>"]
    assert len({id(compiled) for compiled, _ in results.values()}) == 1
    assert len({ptx for _, ptx in results.values()}) == 4


# --- reload ---------------------------------------------------------------------------------------------------------


def test_reload_lists_what_changed_with_resources_before_and_after(tmp_path, saxpy):
    assert rawops.reload() == []
    old = saxpy.compile("sm_80")
    assert rawops.reload() == []
    (tmp_path / "saxpy.cu").write_text(SAXPY.replace("step(a, x[i], y[i])", "step(a, x[i], T(2))"))
    (entry,) = rawops.reload(compile=True)
    assert (entry.kernel, entry.arch, entry.before, entry.error) == ("saxpy<float>", "sm_80", old.resources, None)
    assert entry.after == saxpy.resources
    assert saxpy.compile("sm_80").ptx != old.ptx
    assert "saxpy<float> (sm_80): " in str(entry) and " -> " in str(entry)
    assert rawops.reload() == []


def test_reload_follows_headers_and_waits_for_the_next_use(tmp_path, saxpy, compilations):
    old = [saxpy.compile(arch) for arch in ("sm_80", "sm_90a")]
    (tmp_path / "step.cuh").write_text(STEP.replace("a * x + y", "a * x - y"))
    assert [entry.arch for entry in rawops.reload()] == ["sm_80", "sm_90a"]
    assert len(compilations) == 2
    assert all(saxpy.compile(c.arch).ptx != c.ptx for c in old)
    assert len(compilations) == 4


def test_a_broken_edit_is_reported_once_and_the_last_good_kernel_stays(tmp_path, saxpy):
    good = saxpy.compile("sm_80")
    for break_it in (lambda: (tmp_path / "saxpy.cu").write_text("syntax error\n"), (tmp_path / "saxpy.cu").unlink):
        break_it()
        (entry,) = rawops.reload(compile=True)
        assert (entry.before, entry.after) == (good.resources, None)
        assert isinstance(entry.error, rawops.CompileError)
        assert "kept at" in str(entry)
        assert saxpy.compile("sm_80") is good
        rawops.reload()
        with pytest.raises(rawops.CompileError, match=r"saxpy<float> for sm_80 does not compile\n.*saxpy\.cu"):
            saxpy.compile("sm_80")
        assert saxpy.compile("sm_80") is good
    (tmp_path / "saxpy.cu").write_text(SAXPY)
    assert rawops.reload() == []


def test_two_files_of_one_name_do_not_compile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source.cu").touch()
    k = rawops.Kernel('#include "source.cu"\n__global__ void f() {}\n', "f")
    with pytest.raises(rawops.CompileError, match=r'f for sm_80 does not compile\n"source\.cu" means both '):
        k.compile("sm_80")


def test_a_flag_that_is_none_reloads_nothing():
    with pytest.raises(TypeError, match="reload: compile must be True or False, got 'no'"):
        rawops.reload(compile="no")


def test_text_kernels_never_change(compilations):
    k = rawops.Kernel("__global__ void f() {}\n", "f")
    k.compile("sm_80")
    assert rawops.reload() == []
    assert kernel.reload(compile=True) == []


def test_what_a_repl_prints_of_a_kernel_is_short():
    kernel = rawops.Kernel(KERNELS / "saxpy.cu", "saxpy<float>")
    assert repr(kernel) == "Kernel saxpy<float> of saxpy.cu"
    shown = repr(kernel.compile("sm_80"))
    assert shown.startswith("Compiled(expression='saxpy<float>', arch='sm_80', parameters=") and len(shown) < 600
