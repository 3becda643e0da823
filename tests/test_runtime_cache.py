"""The disk cache: many processes, damaged entries, folders that cannot be used, and what the key must hold."""

import errno
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from processes import INSTALLED, environment, python

import rawops
from rawops import config
from rawops._runtime import cache, compiler, sources

TEXT = "template <int N> __global__ void f(int* x) { *x = N; }\n"

# Prints how a kernel came to be and a hash of it; used as a child process.
CHILD = f"""
import hashlib, rawops
compiled = rawops.Kernel({TEXT!r}, "f<7>").compile("sm_80")
print(compiled.from_cache, hashlib.sha256(compiled.cubin).hexdigest())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A cache folder for this process; it does not exist yet."""
    path = tmp_path / "cache"
    monkeypatch.setattr(cache, "folder", lambda: path)
    monkeypatch.setattr(cache, "_unwarned", threading.Lock())
    return path


def compile(expression="f<7>", arch="sm_80", options=(), text=TEXT) -> compiler.Compiled:
    return rawops.Kernel(text, expression, options).compile(arch)


def only_entry(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


# --- damage and concurrency -----------------------------------------------------------------------------------------


def test_an_entry_comes_back_whole(folder):
    first, again = compile(), compile()
    assert (first.from_cache, again.from_cache) == (False, True)
    for field in ("cubin", "ptx", "lowered", "parameters", "resources", "digest", "arch", "expression"):
        assert getattr(first, field) == getattr(again, field)


@pytest.mark.parametrize("damage", ["empty", "ten bytes", "half", "one byte less", "one bit", "not ours", "a folder"])
def test_a_damaged_entry_is_compiled_again(folder, damage):
    first = compile()
    path = only_entry(folder)
    raw = path.read_bytes()
    kept = {"empty": 0, "ten bytes": 10, "half": len(raw) // 2, "one byte less": len(raw) - 1}
    if damage == "a folder":
        path.unlink()
        path.mkdir()
        with pytest.warns(RuntimeWarning, match="not kept"):
            assert compile().cubin == first.cubin
        return
    if damage == "one bit":
        path.write_bytes(raw[:-100] + bytes([raw[-100] ^ 1]) + raw[-99:])
    else:
        path.write_bytes(b"something else" if damage == "not ours" else raw[: kept[damage]])
    again = compile()
    assert (again.from_cache, again.cubin) == (False, first.cubin)
    assert compile().from_cache


def test_processes_that_start_and_die_together_leave_a_right_cache(tmp_path):
    folder = tmp_path / "cache"
    wait = "import sys, rawops; from rawops._runtime import compiler; compiler._nvrtc(); sys.stdin.readline()\n"

    def race(victims: int) -> list[str]:
        command = [sys.executable, "-c", wait + CHILD]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        children = [subprocess.Popen(command, env=environment(folder), cwd=tmp_path, **pipes) for _ in range(6)]
        for child in children:  # all are past their imports, or will be: a line in the pipe is the starting gun
            child.stdin.write(b"\n")
            child.stdin.flush()
        for child in children[:victims]:
            child.send_signal(signal.SIGKILL)
        outputs = [child.communicate(timeout=120) for child in children]
        assert [child.returncode for child in children[victims:]] == [0] * (6 - victims)
        assert not any(errors for _, errors in outputs[victims:])
        return [output.decode().split()[1] for output, _ in outputs[victims:]]

    assert len(set(race(victims=2))) == 1
    (folder / ".0123-4-5678.tmp").write_bytes(b"left by a process that was killed while it wrote")
    hashes = race(victims=0)
    assert len(set(hashes)) == 1
    assert [path.suffix for path in folder.iterdir()].count(".kernel") == 1
    done = python(CHILD, cache=folder, cwd=tmp_path)
    assert done.stdout.decode().split() == ["True", hashes[0]]


def test_a_writer_killed_before_the_move_leaves_no_entry(folder, monkeypatch):
    def killed(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        compile()
    monkeypatch.undo()
    monkeypatch.setattr(cache, "folder", lambda: folder)
    assert only_entry(folder).suffix == ".tmp"
    assert not compile().from_cache
    assert cache.clear() == 2
    assert list(folder.iterdir()) == []


def test_16_threads_with_a_cold_cache(folder):
    start, results = threading.Barrier(16), []

    def work(i):
        start.wait()
        results.append(compile(f"f<{i % 2}>").cubin)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 16 and len(set(results)) == 2
    assert len(list(folder.iterdir())) == 2


# --- the folder -----------------------------------------------------------------------------------------------------


def failing(number: int):
    """A function that fails as the operating system would, having made a file for nothing when it is given one."""

    def fail(path, *_):
        if number == errno.ENOSPC:
            path.touch()
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("trouble", ["below a file", "is a file", "none", "full", "read-only", "no rename"])
def test_a_folder_that_cannot_be_used_costs_one_warning(tmp_path, folder, monkeypatch, trouble):
    path = folder
    if trouble == "below a file":
        (tmp_path / "file").touch()
        path = tmp_path / "file" / "cache"
    elif trouble == "is a file":
        path.touch()
    elif trouble == "none":
        path = None
    elif trouble == "full":
        monkeypatch.setattr(Path, "write_bytes", failing(errno.ENOSPC))
    elif trouble == "read-only":
        monkeypatch.setattr(Path, "write_bytes", failing(errno.EROFS))
    elif trouble == "no rename":
        monkeypatch.setattr(os, "replace", failing(errno.EXDEV))
    monkeypatch.setattr(cache, "folder", lambda: path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernels = [compile(f"f<{n}>") for n in (1, 2, 1)]
    assert kernels[0].cubin == kernels[2].cubin != kernels[1].cubin
    assert [w.category for w in caught] == [RuntimeWarning]
    assert "RAWOPS_CACHE_DIR" in str(caught[0].message)
    assert cache.entries() == [] and cache.clear() == 0


def test_a_folder_of_mode_0500(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o500)
    done = python(CHILD, cache=folder, cwd=tmp_path)
    assert done.stdout.startswith(b"False")
    assert done.stderr.count(b"RuntimeWarning") == (0 if os.geteuid() == 0 else 1)


@pytest.mark.parametrize("name", ["a b/c'd/e(f)/ÄÖ 测试", "%s{0}/$HOME/-x"])
def test_odd_folder_names_and_a_tight_umask(tmp_path, name):
    folder = tmp_path / name
    child = "import os; os.umask(0o77)\n" + CHILD
    for found in (b"False", b"True"):
        done = python(child, cache=folder, cwd=tmp_path, TMPDIR="/nonexistent/tmp")
        assert done.stdout.startswith(found)
        assert done.stderr == b""
    assert only_entry(folder).stat().st_mode & 0o77 == 0


def test_a_home_that_does_not_exist_is_not_made(tmp_path):
    home = tmp_path / "nobody"
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    done = python(CHILD, cache="", cwd=cwd, HOME=home, XDG_CACHE_HOME=None)
    assert done.stdout.startswith(b"False")
    assert done.stderr.count(b"RuntimeWarning") == 1
    assert not home.exists() and list(cwd.iterdir()) == []


def test_a_given_folder_stays_where_it_is(tmp_path, monkeypatch):
    """Relative to where the program was when it was read, and below the home for what no shell has expanded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    relative, of_home = (config.parse({"RAWOPS_CACHE_DIR": name}).cache_dir for name in ("a/b", "~/c"))
    assert relative == tmp_path / "a/b" and of_home == tmp_path / "home/c"
    assert config.parse({"RAWOPS_CACHE_DIR": ""}).cache_dir is None


def test_the_default_folder_is_below_the_home(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.config, "current", cache.config.Config)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder.__wrapped__().is_relative_to(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # a user id that the machine does not know
    assert cache.folder.__wrapped__() is None


# --- the key --------------------------------------------------------------------------------------------------------


def test_a_second_process_compiles_nothing_wherever_rawops_is_installed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    for name in ("rawops", "cuda_src"):
        shutil.copytree(INSTALLED / name, elsewhere / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for folder in ("one", "two"):
        (tmp_path / folder / "k.cu").write_text('#include "common/numeric.cuh"\n' + TEXT)
    child = """
import pathlib, rawops
print(pathlib.Path(rawops.__file__).parent.parent)
print(rawops.Kernel("k.cu", "f<7>").compile("sm_80").from_cache)
"""
    cache_folder = tmp_path / "cache"
    first = python(child, cache=cache_folder, cwd=tmp_path / "one").stdout.split()
    again = python(child, cache=cache_folder, cwd=tmp_path / "one").stdout.split()
    moved = python(child, cache=cache_folder, cwd=tmp_path / "two", PYTHONPATH=elsewhere).stdout.split()
    assert first == [os.fsencode(INSTALLED), b"False"]
    assert again == [os.fsencode(INSTALLED), b"True"]
    assert moved == [os.fsencode(elsewhere), b"True"]


def test_whatever_changes_the_result_changes_the_key(folder, tmp_path, monkeypatch):
    header, source = tmp_path / "h.cuh", tmp_path / "k.cu"
    header.write_text("#define V 1\n")
    source.write_text('#ifdef NEVER\n#include "h.cuh"\n#endif\n' + TEXT)

    def is_fresh(**changes) -> bool:
        arguments = {"expression": "f<7>", "arch": "sm_80", "options": (), "text": source, **changes}
        return not compile(**arguments).from_cache

    assert is_fresh() and not is_fresh()
    assert is_fresh(expression="f<8>")
    assert is_fresh(arch="sm_90a") and is_fresh(arch="sm_90")
    assert is_fresh(options=("-DA=1",)) and is_fresh(options=("-DA=2",))
    source.write_text(source.read_text() + "// edited\n")
    assert is_fresh() and not is_fresh()
    header.write_text("#define V 2\n")
    assert is_fresh() and not is_fresh()
    header.write_text("#define V 1\n")
    assert not is_fresh()
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (12, 9))
    assert is_fresh() and not is_fresh()


def test_an_entry_under_the_key_of_another_is_refused(folder):
    digest = rawops.Kernel(TEXT, "f<7>").compile("sm_80").digest
    other = compiler.cache_key(digest, "f<7>", (), "sm_90a")
    only_entry(folder).rename(folder / f"{other}.kernel")
    compiled = compile(arch="sm_90a")
    assert not compiled.from_cache
    assert ".target sm_90a" in compiled.ptx
    assert compile(arch="sm_90a").from_cache


def test_ptx_alone_is_an_entry_of_its_own(folder):
    """It is no answer where a cubin is wanted, under whatever name; a whole entry is one where PTX is."""
    source = sources.user_source(TEXT)

    def compile(to_ptx: bool) -> compiler.Compiled:
        return compiler.compile_instance(source, "f<7>", (), "sm_80", to_ptx)

    assert [compile(True).from_cache for _ in range(2)] == [False, True]
    path = only_entry(folder)
    key = compiler.cache_key(compile(True).digest, "f<7>", (), "sm_80")
    shutil.copy(path, folder / f"{key}.kernel")
    assert not compile(False).from_cache and compile(False).cubin[:4] == b"\x7fELF"
    path.write_bytes(path.read_bytes()[:100])
    assert compile(True).from_cache and compile(True).cubin == compile(False).cubin
    (folder / f"{key}.kernel").unlink()
    assert not compile(True).from_cache and compile(True).from_cache


def test_the_version_read_from_file_names_is_that_of_the_loaded_library():
    assert compiler.nvrtc_version() == compiler.loaded_nvrtc_version()


def test_the_key_is_not_random(folder):
    compile()
    name = only_entry(folder).stem
    assert len(name) == len(hashlib.sha256().hexdigest())
    cache.clear()
    compile()
    assert only_entry(folder).stem == name
