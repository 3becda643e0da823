"""Parameter structs, and the declared kernels of the library: instances, architectures, `precompile`, `kernels`."""

from pathlib import Path

import numpy as np
import pytest

import rawops
from rawops._runtime import cache, compiler, device
from rawops._runtime.kernel import KernelSpec, ParamStruct

KERNELS = Path(__file__).parent / "kernels"
MIXED = {"a": "pointer", "M": "int32", "stride": "int64", "alpha": "float32", "map": "tensormap", "beta": "float64"}
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def registry(monkeypatch):
    """No declared kernels but those of one test."""
    monkeypatch.setattr(KernelSpec, "registry", [])


def test_a_param_struct_has_the_layout_of_its_mirror():
    params = ParamStruct("Mixed", **MIXED, last="int32")
    _, struct, _ = rawops.Kernel(KERNELS / "arguments.cu", "mixed").compile("sm_90a").parameters
    assert (struct.kind, struct.size, struct.align) == ("s", params.size, 64) == ("s", 256, 64)
    natural = np.dtype("u8,i4,i8,f4", align=True)
    packed = ParamStruct("P", a="pointer", M="int32", stride="int64", alpha="float32").pack(2**63, -5, -(2**40), 1.5)
    assert np.frombuffer(packed, natural)[0].tolist() == (2**63, -5, -(2**40), 1.5)


def spec(**changes) -> KernelSpec:
    fields = {
        "source": str(KERNELS / "saxpy.cu"),
        "entry": "saxpy",
        "template": ("dtype",),
        "choices": {"dtype": ("float32", "float64", "int64")},
        "smoke": ({"dtype": "float32"}, {"dtype": "int64"}),
    }
    return KernelSpec(**{**fields, **changes})


def test_a_spec_makes_name_expressions(registry):
    choices = {"N": (16, 128), "flag": (True,)}
    hold = spec(source=str(KERNELS / "spills.cu"), entry="hold", template=("N", "flag"), choices=choices)
    assert hold.instance(N=16, flag=True).expression == "hold<16, true>"
    assert spec().instance(dtype="int64").expression == "saxpy<long long>"
    assert spec().instance(dtype="int64").compile("sm_80").parameters[0] == compiler.Parameter("i", 8, 8)
    plain = spec(template=(), choices={}, smoke=({},))
    assert plain.instance().expression == "saxpy"
    with pytest.raises(ValueError, match="saxpy: dtype must be one of 'float32', 'float64', 'int64', got 'int8'"):
        spec().instance(dtype="int8")


def test_a_spec_knows_where_it_exists(registry):
    with pytest.raises(rawops.UnsupportedError, match=r"saxpy: needs sm_90 or newer, found sm_80"):
        spec(min_arch=90).kernel(device.EmulatedDevice("sm_80"), dtype="float32")
    with pytest.raises(rawops.UnsupportedError, match=r"needs sm_80 to sm_89, found sm_90a"):
        spec(max_arch=89).kernel(device.EmulatedDevice("sm_90a"), dtype="float32")


def test_a_struct_of_another_size_does_not_compile(registry):
    fields = {"source": str(KERNELS / "arguments.cu"), "entry": "mixed", "template": (), "choices": {}, "smoke": ({},)}
    right = KernelSpec(**fields, params=ParamStruct("Mixed", **MIXED, last="int32"))
    assert right.instance().compile("sm_80").lowered
    wrong = KernelSpec(**fields, params=ParamStruct("Mixed", **MIXED, a_tensormap="tensormap"))
    with pytest.raises(rawops.CompileError, match=r"mixed: the parameter struct has \[256\] bytes in C\+\+ and 384"):
        wrong.instance().compile("sm_80")


def test_precompile_and_kernels_go_through_the_registry(registry, compilations):
    spec()
    spec(source=str(KERNELS / "spills.cu"), entry="hold", template=("N",), choices={"N": (16, 24)}, smoke=({"N": 16},))
    spec(min_arch=90, smoke=({"dtype": "float64"},))
    assert rawops.precompile("sm_80", progress=False) == 3
    assert sorted(compilations) == ["hold<16>", "saxpy<float>", "saxpy<long long>"]
    assert rawops.precompile("sm_80", ops=[str(KERNELS / "spills")], progress=False) == 1
    listed = rawops.kernels()
    assert [info.expression for info in listed] == ["saxpy<float>", "saxpy<long long>", "hold<16>", "saxpy<double>"]
    assert [sorted(info.resources) for info in listed] == [["sm_80"]] * 3 + [[]]
    assert listed[2].choices == {"N": (16, 24)}
    every = rawops.kernels(["sm_80", "sm_90a"], every=True)
    assert len(every) == 3 + 2 + 3
    assert all(info.resources["sm_90a"].registers for info in every)
    assert "sm_80" not in every[-1].resources


def test_instances_that_need_a_later_architecture(registry, compilations):
    """Some template values exist on later architectures alone; they are listed, and compiled where they exist."""
    spec(needs=lambda dtype: 90 if dtype == "float64" else 80, smoke=({"dtype": "float32"}, {"dtype": "float64"}))
    listed = rawops.kernels(["sm_80", "sm_90a"])
    assert [sorted(info.resources) for info in listed] == [["sm_80", "sm_90a"], ["sm_90a"]]
    assert sorted(compilations) == ["saxpy<double>", "saxpy<float>", "saxpy<float>"]
    assert rawops.precompile("sm_80", progress=False) == 1
    assert rawops.precompile("sm_90a", progress=False) == 2
    every = rawops.kernels(["sm_80"], every=True)
    assert [info.expression for info in every if not info.resources] == ["saxpy<double>"]


@pytest.mark.parametrize("arch", ["sm_1", "sm_33", "SM_80", "90a", None])
def test_architectures_without_kernels_raise(registry, compilations, arch):
    spec()
    for call in (lambda: rawops.kernels(("sm_80", arch)), lambda: rawops.precompile(arch or "", progress=False)):
        with pytest.raises(ValueError, match=r"arch must be an architecture that its kernels exist for, .* got"):
            call()
    with pytest.raises(ValueError, match=r"kernels: arch must be an architecture .* got 5"):
        rawops.kernels(5)
    assert compilations == []


def test_precompile_takes_names_of_sources(registry, compilations):
    spec(source="gemm_sm90.cu", min_arch=90)
    spec(source=str(KERNELS / "saxpy.cu"))
    for ops, word in ((["nope"], "'nope'"), ([str(KERNELS), "nope"], "'nope'"), ([4], "4")):
        with pytest.raises(ValueError, match=rf"precompile: ops must start .*gemm_sm90\.cu.* got {word}"):
            rawops.precompile("sm_80", ops, progress=False)
    with pytest.raises(ValueError, match="precompile: arch must be"):
        rawops.precompile("sm_80", ["gemm"], progress=False)
    with pytest.raises(ValueError, match=r"precompile: ops must start .* got 5"):
        rawops.precompile("sm_80", 5, progress=False)
    assert rawops.precompile("sm_80", [], progress=False) == 0
    assert compilations == []
    assert rawops.precompile("sm_80", str(KERNELS / "sax"), progress=False) == 2
    assert rawops.kernels("sm_80") == rawops.kernels(["sm_80"])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_emulator_compiles_the_library_to_ptx_and_users_kernels_to_the_end(arch, registry):
    text = "__global__ void f(float* x) { __shared__ float s[60000]; s[*(int*)x] = 1; *x = s[7]; }\n"
    with rawops.emulate(arch=arch) as emu:
        function = spec().kernel(emu.device, dtype="float32")
        assert [path.suffix for path in cache.folder().iterdir()] == [".kernel"]
        entry, _ = cache.entries()[0]
        assert function.loaded.compiled.cubin[:4] == b"\x7fELF"
        assert len(cache.entries()) == 2 and cache.load(entry.stem)[1][0] == b""
        with pytest.raises(rawops.CompileError, match="too much shared data"):
            rawops.Kernel(text, "f")(1, 1, (np.zeros(1, np.float32),))
