"""`python -m rawops explain`: what it says is what the ops do, and its arithmetic is right."""

import argparse
import json
import sys

import numpy as np
import pytest

import rawops
from rawops import __main__ as cli
from rawops._runtime.boards import BOARDS, LIMITS, blocks_on_an_sm, board_of
from rawops._runtime.explain import Explanation
from rawops._runtime.paper import PaperDevice


def explained(capsys, *argv: str) -> dict:
    assert cli.main(["explain", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# --- arrays and devices on paper ------------------------------------------------------------------------------------


def test_arrays_on_paper_have_an_address_and_nothing_else():
    device = PaperDevice(BOARDS["H200"])
    a, b = device.array((1 << 20, 1 << 20), "float16"), device.array((3, 4, 5), "float32", offset=8)
    assert a.strides == (1 << 21, 2) and b.strides == (80, 20, 4)
    assert device.pointer(a) % 256 == 0 and device.pointer(b) % 256 == 8
    assert device.pointer(a[5, 7:]) == device.pointer(a) + 5 * (1 << 21) + 14
    assert device.pointer(b.swapaxes(0, 2)[::-1]) == device.pointer(b) + 16
    assert abs(device.pointer(a) - device.pointer(b)) >= 1 << 40
    assert device.pointer(None) == 0 == device.pointer(device.array((0, 4), "int8"))
    for touch in (lambda: a + a, lambda: a.__setitem__(0, 1), lambda: a == a):
        with pytest.raises(TypeError):
            touch()


CALLS = {
    "one kernel": lambda put: rawops.gemm(put((65, 40)), put((40, 72))),
    "split": lambda put: rawops.gemm(put((5, 4096)), put((4096, 24)), split_k=3),
    "epilogue": lambda put: rawops.gemm(put((64, 64)), put((64, 64)), bias=put((64,)), activation="swiglu"),
    "attention": lambda put: rawops.flash_attention(*[put((1, 300, 2, 64))] * 3, causal=True, num_splits=1),
    "attention of few queries": lambda put: rawops.flash_attention(put((1, 3, 2, 64)), *[put((1, 900, 2, 64))] * 2),
    "lora": lambda put: rawops.lora_linear(put((9, 64)), put((64, 48)), put((64, 8)), put((8, 48))),
}


@pytest.mark.parametrize("arch, gpu", [("sm_90a", "H200"), ("sm_80", "A100")])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_paper_notes_what_the_emulator_runs(call, arch, gpu):
    device = PaperDevice(BOARDS[gpu])
    with device.current():
        call(lambda shape: device.array(shape, "float16"))
    with rawops.emulate(arch=arch, check=False) as emu:
        call(lambda shape: np.zeros(shape, "float16"))
    assert [(x.kernel, x.grid, x.block) for x in device.launches] == [(x.kernel, x.grid, x.block) for x in emu.report]
    assert all(x.resources.registers > 0 for x in device.launches)


def test_occupancy():
    """Against the CUDA occupancy calculator."""

    def blocks(capability, *block):
        room = blocks_on_an_sm(LIMITS[capability], *block)
        return min(room.values()), min(room, key=room.get)

    assert blocks(80, 32, 256, 0) == (8, "registers")
    assert blocks(80, 40, 256, 0) == (6, "registers")
    assert blocks(80, 33, 1024, 0) == (1, "registers")
    assert blocks(90, 255, 128, 0) == (2, "registers")
    assert blocks(89, 32, 512, 0) == (3, "threads")
    assert blocks(80, 16, 32, 0) == (32, "blocks")
    assert blocks(80, 32, 128, 80 << 10) == (2, "shared memory")
    assert blocks(90, 24, 128, 227 << 10) == (1, "shared memory")


def test_boards():
    board = board_of("A100", sm_count=54)
    assert (board.arch, board.sm_count, board.capability) == ("sm_80", 54, 80)
    other = board_of("H200", "sm_120a")
    assert (other.name, other.bandwidth, other.limits) == ("sm_120a", 0, LIMITS[120])
    for options, text in (({"arch": "sm_70"}, "--arch must be one of sm_80"), ({"sm_count": 0}, "--sm-count must")):
        with pytest.raises(ValueError, match=text):
            board_of("H200", **options)


# --- gemm -----------------------------------------------------------------------------------------------------------


def test_hopper_gemm(capsys):
    found = explained(capsys, "gemm", "4096", "6144", "4096")
    (launch,) = found["launches"]
    assert "gemm_sm90<__nv_bfloat16" in launch["kernel"] and launch["spill_bytes"] == 0
    assert (launch["grid"], launch["threads"], launch["blocks_per_sm"]) == ("132x1x1", 384, 1)
    tile_m, tile_n, tile_k = map(int, found["tile"].split(" x "))
    assert f"{tile_m}, {tile_n}, {found['stages']}" in launch["kernel"] and tile_k == 64
    assert found["tiles"] == -(-4096 // tile_m) * -(-6144 // tile_n)
    assert found["waves"] == -(-found["tiles"] // 132)
    assert found["wave_efficiency"] == found["tiles"] / (132 * found["waves"])
    assert found["operations"] == 2 * 4096 * 6144 * 4096
    assert found["bytes"] == 2 * (4096 * 4096 + 4096 * 6144 + 4096 * 6144)
    assert found["compute_floor_us"] == pytest.approx(found["operations"] / 989e12 * 1e6)
    assert found["memory_floor_us"] == pytest.approx(found["bytes"] / 4.8e12 * 1e6)
    assert found["limited_by"] == "the arithmetic"
    costs = [row["cost"] for row in found["candidates"]]
    assert costs == sorted(costs) and found["predicted_cycles"] == 4 * costs[0]
    assert found["candidates"][0]["tile"] == f"{tile_m} x {tile_n}"


def test_gemm_on_another_card(capsys):
    found = explained(capsys, "gemm", "512", "512", "4096", "--gpu", "A100", "--dtype", "float32", "--layout", "nn")
    partial, reduce = found["launches"]
    assert "gemm_simt" in partial["kernel"] and "gemm_reduce" in reduce["kernel"]
    assert found["split_k"] > 1 and partial["grid"].split("x")[1] == str(found["split_k"])
    assert found["why"][0] == "Hopper's kernel does not exist for sm_80."
    assert found["tiles_at_a_time"] == 108 * partial["blocks_per_sm"] and found["tiles"] % found["split_k"] == 0
    assert found["candidates"][0]["tile"] == found["tile"]


@pytest.mark.parametrize(
    "options, kernel, why",
    [
        (["--layout", "tn"], "gemm_sm90<__nv_bfloat16, __nv_bfloat16, 128, 256, 3, false, false", "Hopper's kernel: "),
        (["--offset", "2", "--split-k", "2"], "gemm_repack", "copied first"),
        (["--split-k", "2"], "gemm_sm80", "split_k is given"),
        (["--dtype", "float32", "--precision", "tf32"], "gemm_sm90<float, float", "Hopper's kernel: "),
        (
            ["--dtype", "float32", "--precision", "tf32", "--layout", "nn"],
            "gemm_sm90<float, float",
            "of the transposes",
        ),
        (["--dtype", "float32"], "gemm_simt", "does not take float32"),
        (["--out-dtype", "float32"], "gemm_sm90<__nv_bfloat16, float", "Hopper's kernel: "),
        (["--activation", "swiglu", "--bias"], ", 5, 2, ", "Hopper's kernel: "),
        (["--batch", "3"], "gemm_sm90", "Hopper's kernel: "),
        (["--groups", "5"], "gemm_grouped_sm90", "Hopper's kernel: "),
        (["--groups", "5", "--layout", "tn"], "gemm_grouped_sm80", "Groups begin at any row"),
        (["--dtype", "float8_e4m3fn"], "gemm_8bit_sm90<", "Hopper's kernel: "),
        (["--dtype", "int8", "--layout", "nn"], "gemm_repack_bytes", "others are copied first"),
        (["--dtype", "int8", "--bias"], "gemm_8bit_sm90<", "Hopper's kernel: "),
        (["--dtype", "float8_e4m3fn", "--bias", "--activation", "silu"], "gemm_8bit_sm90<", "Hopper's kernel: "),
        (
            ["--dtype", "float8_e5m2", "--precision", "fast", "--gpu", "L40S"],
            "gemm_8bit_sm80<",
            "tiles for 8-bit operands",
        ),
        (["--dtype", "float8_e5m2", "--gpu", "A100"], "gemm_8bit_sm80<", "tiles for 8-bit promoted operands"),
        (["--sm-count", "16"], "gemm_sm90", "Hopper's kernel: "),
        (["--arch", "sm_120a"], "gemm_sm80", "does not exist for sm_120a"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_gemm_options(capsys, options, kernel, why):
    found = explained(capsys, "gemm", "2048", "2048", "2048", *options)
    assert any(kernel in launch["kernel"] for launch in found["launches"])
    assert any(why in sentence for sentence in found["why"])
    if "--batch" in options:
        assert found["operations"] == 3 * 2 * 2048**3
    if "--sm-count" in options:
        assert found["tiles_at_a_time"] == 16
    if "--arch" in options or options[-1] == "A100":
        assert "compute_floor_us" not in found and found["floors"] == "unknown"
    tile = found["tile"].split(" x ")
    assert any(f"{', '.join(tile[:2])}, " in launch["kernel"] for launch in found["launches"])


@pytest.mark.parametrize("options, may", [([], True), (["--split-k", "2"], False), (["--groups", "5"], False)])
def test_k_is_said_to_be_split_where_it_may_be(capsys, options, may):
    found = explained(capsys, "gemm", "64", "2048", "2048", "--gpu", "A100", *options)
    assert any("K is split" in sentence for sentence in found["why"]) == may


def test_copies_show_as_launches(capsys):
    found = explained(capsys, "gemm", "8191", "4095", "4097")
    kernels = [launch["kernel"] for launch in found["launches"]]
    assert [kernel.split("<")[0] for kernel in kernels] == ["gemm_repack", "gemm_repack", "gemm_sm90"]
    assert "copied first" in found["why"][0]


def test_one_row(capsys):
    found = explained(capsys, "gemm", "1", "4096", "4096", "--dtype", "float32")
    assert found["launches"][0]["kernel"].startswith("gemv<float, float") and "One row" in found["why"][0]
    assert found["limited_by"] == "the memory"


@pytest.mark.parametrize("sizes", [("0", "5", "8"), ("5", "5", "0"), ("0", "0", "0"), ("1", "8", "8")])
def test_small_sizes(capsys, sizes):
    found = explained(capsys, "gemm", *sizes)
    assert (found["launches"] == []) == ("0" in sizes[:2])


# --- lora, usage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, kernels, why",
    [
        (["64", "4096", "28672", "16"], ["lora_sm90"], "ride along the main loop"),
        (["8192", "4096", "4096", "64"], ["lora_narrow_sm90", "lora_sm90"], "a launch of its own beside"),
        (["64", "512", "512", "0", "--layout", "nn"], ["gemm"], "Rank 0"),
        (["64", "512", "512", "8", "--dtype", "float32"], ["gemm"], "three products"),
        (["2048", "4096", "4096", "8", "--gpu", "A100"], ["gemm", "lora_sm80"], "a launch of its own."),
        (["8", "512", "512", "8", "--gpu", "A100"], ["lora_sm80"], "ride along the main loop"),
    ],
)
def test_lora(capsys, argv, kernels, why):
    found = explained(capsys, "lora", *argv)
    assert all(any(kernel in launch["kernel"] for launch in found["launches"]) for kernel in kernels)
    assert any(why in sentence for sentence in found["why"])
    M, K, N, r = map(int, argv[:4])
    assert found["operations"] == 2 * M * (K * N + r * (K + N))


@pytest.mark.parametrize(
    ("argv", "kernels", "why", "pairs"),
    [
        ("1 2 2 300 300 64 --causal", 1, "wgmma", 300 * 301 // 2),
        ("1 2 2 200 4000 64 --causal --window 10", 2, "split", 200 * 11),
        ("1 8 2 8 4096 128 --dtype float16", 2, "so few queries", 8 * 4096),
        ("2 2 1 100 70 80 --softcap 5 --alibi --arch sm_80", 1, "sm_80 has no wgmma", 7000),
        ("1 1 1 100 70 64 --dtype float32 --dropout 0.5", 1, "CUDA cores", 7000),
        ("0 1 1 100 70 64", 0, "", 7000),
    ],
)
def test_attention(capsys, argv, kernels, why, pairs):
    found = explained(capsys, "attention", *argv.split())
    assert len(found["launches"]) == kernels
    assert why in " ".join(found["why"])
    assert found["pairs"] == pairs


def test_text(capsys):
    assert cli.main(["explain", "gemm", "64", "4096", "4096"]) == 0
    out = capsys.readouterr().out
    for part in ("gemm 64 x 4096 x 4096, bfloat16, NT; H200", "launches", "candidates", "memory_floor_us", "waves"):
        assert part in out


@pytest.mark.parametrize(
    "argv, text",
    [
        (["gemm", "1", "2", "-3"], "K must be between 0"),
        (["gemm", "1", "2", "3", "--arch", "sm_70"], "--arch must be one of"),
        (["gemm", "1", "2", "3", "--batch", "0"], "--batch must be between 1"),
        (["gemm", "1", "2", "3", "--groups", "2", "--batch", "2"], "--groups must be given without"),
        (["gemm", "1", "3", "3", "--activation", "swiglu"], "even number of columns"),
        (["gemm", "1", "2"], "usage"),
        (["gemm", "1", "2", "3", "--gpu", "K80"], "usage"),
        (["nothing"], "usage"),
        ([], "usage"),
    ],
)
def test_usage_errors(capsys, argv, text):
    try:
        code = cli.main(["explain", *argv])
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and text in err


def test_an_op_brings_its_own_explanation(capsys, monkeypatch):
    """A module _<op>_explain is found by its name."""
    assert {"attention", "gemm", "lora"} <= set(cli._explainers())

    class Module:
        """What the help says."""

        @staticmethod
        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("n", type=int)

        @staticmethod
        def explain(options: argparse.Namespace, device: PaperDevice) -> Explanation:
            return Explanation(f"thing of {options.n} on {device}", ["Because."], [("twice", 2 * options.n, "2 n")])

    monkeypatch.setitem(sys.modules, "rawops._thing_explain", Module)
    monkeypatch.setattr(cli.pkgutil, "iter_modules", lambda path: [argparse.Namespace(name="_thing_explain")])
    found = explained(capsys, "thing", "21", "--sm-count", "7")
    assert found == {
        "call": "thing of 21 on H200 on paper",
        "why": ["Because."],
        "launches": [],
        "twice": 42,
        "candidates": [],
    }
