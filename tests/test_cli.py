"""The command line: exit codes, tables and JSON."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from processes import python

import rawops
from rawops import __main__ as cli
from rawops._runtime import cache, compiler, progress
from rawops._runtime.kernel import KernelSpec
from rawops.testing import has_gpu

SPILLS = str(Path(__file__).parent / "kernels" / "spills.cu")
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def registry(monkeypatch):
    """A library of one kernel: N = 16 fits into registers, 128 spills."""
    monkeypatch.setattr(KernelSpec, "registry", [])
    KernelSpec(source=SPILLS, entry="hold", template=("N",), choices={"N": (16, 128)}, smoke=({"N": 16},))


def run(capsys, *argv) -> tuple[int, str, str]:
    try:
        code = cli.main([*argv])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_info(capsys):
    code, out, _ = run(capsys, "info")
    assert code == 0
    for word in ("rawops", "nvrtc", "headers", "cupy", "cache", "cuda sources"):
        assert word in out
    code, out, _ = run(capsys, "info", "--json")
    facts = json.loads(out)
    assert facts["nvrtc"] == ".".join(map(str, compiler.loaded_nvrtc_version()))


def test_info_without_nvrtc_says_how_to_get_it(capsys, monkeypatch):
    def missing():
        raise compiler.UnsupportedError(f"rawops: NVRTC was not found. {compiler.INSTALL_HINT}")

    monkeypatch.setattr(compiler, "loaded_nvrtc_version", missing)
    code, out, _ = run(capsys, "info", "--json")
    assert code == 1
    assert "pip install" in json.loads(out)["nvrtc"]


def test_kernels(capsys, registry):
    code, out, _ = run(capsys, "kernels", "--json", "--arch", "sm_80", "--arch", "sm_90a")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(line["kernel"], line["arch"]) for line in lines] == [("hold<16>", "sm_80"), ("hold<16>", "sm_90a")]
    assert all(line["registers"] > 0 and line["spill_bytes"] == 0 and line["source"] == SPILLS for line in lines)
    code, out, _ = run(capsys, "kernels", "--arch", "sm_80", "--all")
    assert code == 0 and "2 kernel instances" in out
    assert "hold<16>" in out and "hold<128>" in out


@pytest.mark.parametrize("command", ["kernels", "compile"])
def test_a_long_compilation_says_how_far_it_is(capsys, registry, monkeypatch, command):
    """On stderr: in a terminal a bar, elsewhere a line now and then, and nothing where it is soon over."""
    arguments = (command, "--arch", "sm_80", "--all", "--json")
    _, out, err = run(capsys, *arguments)
    assert err == ""
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    _, again, err = run(capsys, *arguments)
    assert err == "compiling for sm_80: 1 of 2\ncompiling for sm_80: 2 of 2\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, barred, err = run(capsys, *arguments)
    assert "compiling for sm_80" in err and "100%" in err
    assert rawops.precompile("sm_80", []) == 0 and capsys.readouterr().err == ""
    for line in (out, again, barred):
        assert all(map(json.loads, line.splitlines())) and line


def test_compile_fails_when_an_instance_spills(capsys, registry):
    code, out, _ = run(capsys, "compile", "--arch", "sm_80")
    assert code == 0 and "no spills" in out
    code, out, _ = run(capsys, "compile", "--arch", "sm_80", "--all")
    assert code == 1 and "hold<128> (sm_80)" in out and "hold<16>" not in out
    code, out, _ = run(capsys, "compile", "--arch", "sm_80", "--all", "--json")
    (fault,) = json.loads(out)["faults"]
    assert code == 1 and fault["kernel"] == "hold<128>" and fault["spill_bytes"] > 0


def test_compile_accepts_the_spills_that_a_spec_names(capsys, registry):
    (spec,) = KernelSpec.registry
    spills = spec.instance(N=128).compile("sm_80").resources.spill_bytes
    for accepted, expected in ((spills, 0), (spills - 1, 1)):
        spec.spills = {"sm_80": accepted}
        assert run(capsys, "compile", "--arch", "sm_80", "--all")[0] == expected


def test_compile_knows_all_architectures_and_no_others(capsys, registry):
    code, out, _ = run(capsys, "compile", "--arch", "all", "--json")
    assert code == 0 and tuple(json.loads(out)["archs"]) == compiler.ARCHS


@pytest.mark.parametrize("command", ["kernels", "compile"])
@pytest.mark.parametrize("arch", ["sm_1", "sm_33", "SM_80", "90a", "sm_90x", ""])
def test_an_architecture_without_kernels_is_a_usage_error(capsys, registry, command, arch):
    code, out, err = run(capsys, command, "--arch", "sm_80", "--arch", arch)
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert all(known in err for known in compiler.ARCHS) and repr(arch) in err


def test_an_architecture_that_nvrtc_does_not_know_fails(capsys, registry):
    code, _, err = run(capsys, "kernels", "--arch", "sm_999")
    assert code == 1 and "UnsupportedError" in err and "sm_999" in err


@pytest.mark.skipif(has_gpu(), reason="with a GPU the demo does not ask for the emulator")
def test_a_wrong_variable_is_a_usage_error(tmp_path):
    child = "import sys; from rawops.__main__ import main; sys.stderr = sys.stdout; print(main(['demo']))"
    changes = {"RAWOPS_EMULATE": "1", "RAWOPS_EMULATE_ARCH": "sm_70"}
    line, code = python(child, cache=tmp_path / "cache", cwd=tmp_path, **changes).stdout.decode().splitlines()
    assert code == "2"
    assert re.fullmatch(r"emulate: .*RAWOPS_EMULATE_ARCH.* must be .*'sm_90a', got 'sm_70'", line)


def test_defects_are_no_usage_errors(monkeypatch):
    def defect():
        raise ValueError("broken")

    monkeypatch.setattr(cache, "entries", defect)
    with pytest.raises(ValueError, match="broken"):
        cli.main(["cache"])


def test_cache(capsys, registry, tmp_path):
    run(capsys, "compile", "--arch", "sm_80")
    code, out, _ = run(capsys, "cache", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["entries"] == 1 and facts["bytes"] > 1000 and facts["removed"] == 0
    assert facts["folder"] == str(tmp_path / "cache")
    other = tmp_path / "cache" / "folder.kernel"
    other.mkdir()
    code, out, _ = run(capsys, "cache", "--clear")
    assert code == 0 and list((tmp_path / "cache").iterdir()) == [other]
    code, out, _ = run(capsys, "cache", "--clear", "--json")
    assert code == 0 and json.loads(out)["removed"] == 0


def test_a_cache_that_cannot_be_cleared_fails(capsys, registry, monkeypatch):
    run(capsys, "compile", "--arch", "sm_80")

    def denied(self, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", denied)
    code, _, err = run(capsys, "cache", "--clear")
    assert code == 1 and "Permission denied" in err


def test_usage_errors(capsys):
    for argv in ((), ("nonsense",), ("info", "--nonsense"), ("info", "extra"), ("bench",), ("kernels", "--arch")):
        code, out, err = run(capsys, *argv)
        assert code == 2 and "usage" in err and out == ""
    code, _, err = run(capsys, "bench", "nonsense")
    assert code == 2 and "OP must be one of" in err and "'nonsense'" in err


def test_a_bench_without_its_rival_says_so(capsys, monkeypatch):
    def run_path(*_, **__):
        raise ModuleNotFoundError(name="cupyx.cusparse")

    monkeypatch.setattr(runpy, "run_path", run_path)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    code, _, error = run(capsys, "bench", "sparse")
    assert code == 1 and error == "bench sparse: needs a GPU, CuPy and its rivals: cupyx.cusparse was not found\n"


def test_options_of_a_bench_are_its_own(capsys, monkeypatch):
    monkeypatch.setattr(runpy, "run_path", lambda *_, **__: print(sys.argv[1:]))
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    assert run(capsys, "bench", "gemm", "--quick", "--help") == (0, "['--quick', '--help']\n", "")


def test_version_and_help(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.startswith("rawops ")
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in ("info", "demo", "kernels", "compile", "bench", "explain", "cache"):
        assert command in out


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_stops_early_is_no_error(tmp_path, unbuffered):
    child = """
import os, subprocess, sys
reading, writing = os.pipe()
os.close(reading)
command = [sys.executable, "-m", "rawops", "cache", "--json"]
done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE)
print(done.returncode, done.stderr)
"""
    done = python(child, cache=tmp_path / "cache", cwd=tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert done.stdout.decode().strip() == "1 b''"


def test_the_module_runs(tmp_path):
    child = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-m', 'rawops', 'cache', '--json']))"
    facts = json.loads(python(child, cache=tmp_path / "other", cwd=tmp_path).stdout)
    assert facts["folder"] == str(tmp_path / "other") and facts["entries"] == 0
