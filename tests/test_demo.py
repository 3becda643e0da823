"""The demo's verdict, the reader of the real model's files and the tables they are shown in."""

import json
import struct

import numpy as np
import pytest

from rawops import _demo
from rawops.testing import has_gpu, minilm, tables


@pytest.fixture
def model(tmp_path) -> minilm.MiniLM:
    """Two small tensors and a small vocabulary in the files' formats."""
    values = {"a": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.full(4, 0.5, "<f4")}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, value in values.items():
        ends = [len(data), len(data) + value.nbytes]
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": ends}
        data += value.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    words = ["[UNK]", "[CLS]", "[SEP]", "cafe", "un", "##believ", "##able", "'", "s", "_", "!"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return minilm.MiniLM(tmp_path)


def test_tensors_are_read_by_name(model):
    np.testing.assert_array_equal(model.tensor("a"), [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(model.tensor("b"), [0.5] * 4)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Café's!", ["cafe", "'", "s", "!"]),
        ("unbelievable s_s", ["un", "##believ", "##able", "s", "_", "s"]),
        ("uncafe!", ["[UNK]", "!"]),  # no piece continues a word with "cafe"
        ("", []),
    ],
)
def test_words_are_split_by_the_longest_piece(model, text, pieces):
    words = list(model._vocabulary)
    assert [words[i] for i in model.tokens(text)] == ["[CLS]", *pieces, "[SEP]"]


def test_table_shows_every_row(capsys):
    tables.show("title", [{"a": 1.23456, "b": True}, {"a": 70000.4, "c": None}], note="note")
    shown = capsys.readouterr().out
    for text in ("title", "1.235", "70000", "yes", "note"):
        assert text in shown
    tables.show("title", [{"a": 1.23456}], as_json=True)
    assert json.loads(capsys.readouterr().out) == {"table": "title", "a": 1.23456}


def test_demo_ends_well(capsys, monkeypatch):
    monkeypatch.setattr(_demo, "EMULATED_SHAPE", (33, 72, 65, 3))
    assert _demo.run(real=False, json=True) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    fused = next(row for row in rows if row.get("step") == "fused")
    assert fused["within tolerance"] is True and 0 < fused["max rel error"] < 1e-3
    assert ("median us" in fused) == has_gpu()
    if not has_gpu():
        assert sum(row["table"] == "Counted by the emulator" for row in rows) >= 2


def test_demo_fails_on_a_wrong_kernel(monkeypatch, capsys):
    """A fused kernel that forgets the low-rank part ends in exit code 1."""
    monkeypatch.setattr(_demo, "EMULATED_SHAPE", (33, 72, 65, 3))
    monkeypatch.setattr(_demo.rawops, "lora_linear", lambda x, c, a, b, *, out: _demo.rawops.gemm(x, c, out=out))
    assert _demo.run(real=False, json=True) == 1


def test_low_rank_factors_hold_what_they_say(rng):
    u, _ = np.linalg.qr(rng.standard_normal((40, 20)))
    v, _ = np.linalg.qr(rng.standard_normal((30, 20)))
    scales = np.arange(20, 0, -1.0)
    matrix = u * scales @ v.T
    a, b, captured = _demo._low_rank(matrix)
    assert captured == pytest.approx(np.sum(scales[:16] ** 2) / np.sum(scales**2))
    np.testing.assert_allclose(np.linalg.norm(matrix - a @ b) ** 2, np.sum(scales[16:] ** 2))
