"""Products that are refused, with what was given: calls and plans."""

import numpy as np
import pytest

from rawops.gemm import Gemm, gemm


def test_errors(device):
    a, b = device.put(np.zeros((4, 6), np.float16)), device.put(np.zeros((6, 8), np.float16))
    put = device.put
    for error, text, call in [
        (ValueError, "gemm: b must have 6 rows, as a has columns, got", lambda: gemm(a, b.T)),
        (ValueError, "gemm: a must have at least 2 dimensions, got", lambda: gemm(a[0], b)),
        (TypeError, "gemm: b must have dtype float16, got float32", lambda: gemm(a, put(np.zeros((6, 8), np.float32)))),
        (TypeError, "gemm: a must have dtype", lambda: gemm(put(np.zeros((4, 6), int)), b)),
        (ValueError, "gemm: activation must be", lambda: gemm(a, b, activation="tanh")),
        (ValueError, "gemm: b must have an even number", lambda: gemm(a, b[:, :7], activation="swiglu")),
        (ValueError, "gemm: precision must be None for float16", lambda: gemm(a, b, precision="tf32")),
        (ValueError, "gemm: bias must have shape", lambda: gemm(a, b, bias=put(np.zeros(4, np.float16)))),
        (ValueError, "gemm: c must be given", lambda: gemm(a, b, beta=1.0)),
        (ValueError, "gemm: c must broadcast", lambda: gemm(a, b, b, beta=1.0)),
        (ValueError, "gemm: residual must broadcast", lambda: gemm(a, b, residual=a)),
        (ValueError, "gemm: out must have shape", lambda: gemm(a, b, out=put(np.zeros((4, 7), np.float16)))),
        (TypeError, "gemm: out must be float16 or float32", lambda: gemm(a, b, out=put(np.zeros((4, 8))))),
        (TypeError, "gemm: out_dtype must be float16 or float32", lambda: gemm(a, b, out_dtype="float64")),
        (ValueError, "gemm: split_k must be between", lambda: gemm(a, b, split_k=0)),
        (TypeError, "gemm: alpha must be a real number", lambda: gemm(a, b, alpha="1")),
        (TypeError, "gemm: beta must be a real number, got False (bool)", lambda: gemm(a, b, beta=False)),
        (ValueError, "gemm: alpha must be a number or a 0-d array", lambda: gemm(a, b, alpha=a)),
        (TypeError, "gemm: alpha must be a real number", lambda: gemm(a, b, alpha=np.complex64(1))),
        (ValueError, "gemm: alpha must fit a float, got a larger int", lambda: gemm(a, b, alpha=10**400)),
        (TypeError, "gemm: b must be an array, got None", lambda: gemm(a, None)),
        (TypeError, "gemm: a must be an array, got None", lambda: gemm(None, None)),
        (ValueError, "gemm: activation must be None, 'relu'", lambda: gemm(a, b, activation=["relu"])),
        (ValueError, "gemm: activation must be None, 'relu'", lambda: gemm(a, b, activation=np.zeros(3))),
        (ValueError, "gemm: precision must be None, 'tf32' or 'fast'", lambda: gemm(a, b, precision={})),
        (ValueError, "gemm: precision must be None, 'tf32' or 'fast', got 32", lambda: gemm(a, b, precision=32)),
        (TypeError, "gemm: out_dtype must be float16 or float32", lambda: gemm(a, b, out_dtype=[1])),
        (TypeError, "gemm: out_dtype must be float16 or float32", lambda: gemm(a, b, out_dtype="junk")),
        (TypeError, "gemm: split_k must be an integer", lambda: gemm(a, b, split_k=[2])),
        (
            ValueError,
            "gemm: b must have batch axes",
            lambda: gemm(put(np.zeros((2, 4, 6), a.dtype)), put(np.zeros((3, 6, 8), a.dtype))),
        ),
    ]:
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value).startswith(text)


def test_errors_of_a_plan(device):
    """What cannot become right is refused when the plan is made."""
    sizes, half = (4, 8, 6), np.float16
    array = "an array" if device.is_emulated else "a GPU array"

    def ones(*shape, dtype=half):
        return device.put(np.ones(shape, dtype))

    def packed(scale_b, zero_b=None, b_dtype="int4", K=64):
        return Gemm(4, 8, K, half, b_dtype=b_dtype, scale_b=scale_b, zero_b=zero_b)

    for error, text, call in [
        (TypeError, "dtype must be float16 or", lambda: Gemm(*sizes, None)),
        (TypeError, "dtype must be float16 or", lambda: Gemm(*sizes, "junk")),
        (TypeError, "dtype must be float16 or", lambda: Gemm(*sizes, [1])),
        (TypeError, "M must be an integer", lambda: Gemm(4.0, 8, 6, half)),
        (ValueError, "activation must be", lambda: Gemm(*sizes, half, activation="tanh")),
        (ValueError, "activation must be", lambda: Gemm(*sizes, half, activation=["relu"])),
        (ValueError, "N must be even for swiglu, got 7", lambda: Gemm(4, 7, 6, half, activation="swiglu")),
        (ValueError, "split_k must be between 1 and 1024", lambda: Gemm(*sizes, half, split_k=0)),
        (TypeError, "split_k must be an integer", lambda: Gemm(*sizes, half, split_k=2.0)),
        (ValueError, "precision must be None for float16", lambda: Gemm(*sizes, half, precision="tf32")),
        (ValueError, "precision must be None, 'tf32' or 'fast'", lambda: Gemm(*sizes, np.float32, precision="bf16")),
        (TypeError, "out_dtype must be float16 or float32", lambda: Gemm(*sizes, half, out_dtype="float64")),
        (TypeError, "alpha must be a real number", lambda: Gemm(*sizes, half, alpha="1")),
        (TypeError, "beta must be a real number", lambda: Gemm(*sizes, half, beta=None)),
        (ValueError, "alpha must fit a float", lambda: Gemm(*sizes, half, alpha=10**400)),
        (ValueError, "alpha must be a number or a 0-d", lambda: Gemm(*sizes, half, alpha=device.put(np.ones(2)))),
        (ValueError, "bias must have shape (8,)", lambda: Gemm(*sizes, half, bias=device.put(np.zeros(4, half)))),
        (TypeError, "bias must have dtype float16", lambda: Gemm(*sizes, half, bias=device.put(np.zeros(8)))),
        (TypeError, f"bias must be {array}, got list", lambda: Gemm(*sizes, half, bias=[0] * 8)),
        (
            ValueError,
            "residual must broadcast to shape (4, 4)",
            lambda: Gemm(*sizes, half, activation="swiglu", residual=device.put(np.zeros((4, 8), half))),
        ),
        (
            ValueError,
            "residual must have at least 2 dimensions, got shape (8,)",
            lambda: Gemm(*sizes, half, residual=device.put(np.zeros(8, half))),
        ),
        (ValueError, "b_dtype must be", lambda: Gemm(*sizes, half, b_dtype="int5")),
        (
            TypeError,
            "dtype must be float16 or bfloat16 with b_dtype",
            lambda: Gemm(*sizes, np.float32, b_dtype="int4", scale_b=device.put(np.ones((1, 8), half))),
        ),
        (ValueError, "scale_b must be given", lambda: Gemm(*sizes, half, b_dtype="int4")),
        (ValueError, "scale_b must have a row for each 32, 64 or 128 of K = 6", lambda: packed(ones(1, 8), K=6)),
        (ValueError, "scale_b must have shape (2, 8), got (2, 9)", lambda: packed(ones(2, 9))),
        (ValueError, "scale_b must have 2 dimensions", lambda: packed(ones(2))),
        (TypeError, "scale_b must have dtype float16, bfloat16 or float32", lambda: packed(ones(2, 8, dtype=int))),
        (TypeError, f"scale_b must be {array}, got float", lambda: packed(2.0)),
        (ValueError, "zero_b must be None for int4 weights", lambda: packed(ones(2, 8), ones(2, 8, dtype=np.int8))),
        (TypeError, "zero_b must have dtype uint8 or int8", lambda: packed(ones(2, 8), ones(2, 8), "uint4")),
    ]:
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value).startswith(f"Gemm: {text}")
