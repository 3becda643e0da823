"""Tensor maps: the driver's rules, and that the emulator reads what the encoder writes."""

import ml_dtypes
import numpy as np
import pytest

from rawops._emulator.instructions import tma
from rawops._runtime.tensormap import EMULATED_LAYOUT, EMULATED_MAGIC, TensorMap


def test_encoder_and_decoder_have_one_layout():
    assert (tma.LAYOUT.format, tma.MAGIC) == (EMULATED_LAYOUT.format, EMULATED_MAGIC)
    made = TensorMap(
        4096, ml_dtypes.bfloat16, (2**32, 7, 9, 64), (2**33, 2**20, 256, 2), (1, 2, 8, 64), 128,
        element_strides=(1, 2, 3, 1), fill="nan",
    )  # fmt: skip
    read = tma.decode_map(made.encode_emulated())
    assert (read.type, read.swizzle, read.fill_nan, read.address) == ("bf16", 128, True, 4096)
    for mine, theirs in ((read.sizes, made.shape), (read.strides, made.strides), (read.box, made.box)):
        assert mine == theirs[::-1]
    assert read.steps == (1, 3, 2, 1)
    assert made.box_bytes == 1 * 1 * 3 * 64 * 2
    assert tma.decode_map(bytes(128)) is None


GOOD = {"address": 0, "dtype": np.float16, "shape": (100, 64), "strides": (128, 2), "box": (8, 64), "swizzle": 128}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"address": 8}, "address must be a multiple of 16 bytes, got 0x8"),
        ({"dtype": np.complex64}, "dtype must be one of"),
        ({"shape": (1,) * 6}, "shape must have 1 to 5 axes"),
        ({"shape": (100, 0)}, "shape must have sizes from 1"),
        ({"strides": (130, 2)}, "strides must be multiples of 16 bytes below 2"),
        ({"strides": (2**40, 2)}, "strides must be multiples of 16 bytes below 2"),
        ({"strides": (128, 4)}, "strides must end in the item size"),
        ({"box": (8,)}, "box must have one entry an axis"),
        ({"box": (257, 64)}, "box must have sizes from 1 to 256"),
        ({"box": (8, 4)}, "box must have innermost rows of a multiple of 16 bytes, got 8 bytes"),
        ({"box": (8, 128)}, "box must have innermost rows of at most the swizzle's 128 bytes, got 256 bytes"),
        ({"swizzle": 16}, "swizzle must be one of"),
        ({"l2_promotion": 32}, "l2_promotion must be one of"),
        ({"element_strides": (9, 1)}, "element_strides must be from 1 to 8"),
        ({"element_strides": (1, 2)}, "element_strides must end in 1"),
        ({"fill": "one"}, "fill must be one of"),
        ({"dtype": np.int16, "fill": "nan"}, "fill must be 'zero' for a dtype"),
    ],
)
def test_a_map_that_the_driver_refuses_is_refused(change, rule):
    TensorMap(**GOOD)
    with pytest.raises(ValueError, match=rf"tensor_map: {rule}"):
        TensorMap(**{**GOOD, **change})
