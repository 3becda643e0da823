"""``python -m rawops explain attention``: which kernel, tile and split, in how many waves, and why."""

from __future__ import annotations

import argparse
import math

import numpy as np

from rawops._runtime import checks, dtypes
from rawops._runtime.explain import Explanation, add_roofline
from rawops._runtime.paper import PaperDevice
from rawops.attention import flash_attention

_SIZES = {
    "batch": "sequences",
    "heads": "query heads",
    "kv_heads": "heads of k and v",
    "seqlen_q": "queries of a sequence",
    "seqlen_k": "keys of a sequence",
    "head_dim": "columns of q, k and v",
}
_MAX_SIZE = 2**31 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, text in _SIZES.items():
        parser.add_argument(name, type=int, help=text)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32", "float8_e4m3fn"), default="bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int, metavar="LEFT", help="keys to the left that a query sees")
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--alibi", action="store_true", help="with slopes for the heads")
    parser.add_argument("--dropout", type=float, default=0.0)


def explain(options: argparse.Namespace, device: PaperDevice) -> Explanation:
    sizes = {name: checks.int_range("explain", name, getattr(options, name), 0, _MAX_SIZE) for name in _SIZES}
    B, H, Hkv, Nq, Nk, D = sizes.values()
    dtype = dtypes.numpy(options.dtype)
    q, k, v = (device.array(shape, dtype) for shape in ((B, Nq, H, D), (B, Nk, Hkv, D), (B, Nk, Hkv, D)))
    slopes = device.array((H,), dtypes.numpy("float32")) if options.alibi else None
    with device.current():
        out = flash_attention(
            q,
            k,
            v,
            causal=options.causal,
            window=(options.window, None),
            softcap=options.softcap,
            alibi_slopes=slopes,
            dropout_p=options.dropout,
            dropout_seed=0,
        )
    shape = " x ".join(map(str, sizes.values()))
    title = f"attention {shape}, {options.dtype}"
    found = Explanation(f"{title}; {device.board.name} ({device.arch}, {device.sm_count} SMs)")
    found.why += _reasons([launch.kernel for launch in device.launches], options, device)
    pairs = _pairs(Nq, Nk, options.causal, options.window)
    found.add("pairs", pairs, "of a query and a key that it sees, in one head of one sequence")
    size = sum(math.prod(x.shape) * x.itemsize for x in (q, k, v, out))
    if size:
        add_roofline(found, device.board, options.dtype, 4.0 * B * H * D * pairs, size)
    return found


def _reasons(kernels: list[str], options: argparse.Namespace, device: PaperDevice) -> list[str]:
    why = []
    if any("sm90" in kernel for kernel in kernels):
        why.append("TMA loads the tiles, and warpgroups multiply them by wgmma.")
    elif any("simt" in kernel for kernel in kernels):
        why.append("float32 is multiplied as it is, by the CUDA cores.")
    elif kernels:
        if device.capability // 10 != 9:
            cause = f"{device.arch} has no wgmma"
        elif options.seqlen_k == 0:
            cause = "there are no keys"
        elif options.seqlen_q <= 64:
            cause = "so few queries fill no tile of the kernel for Hopper"
        else:
            cause = "TMA cannot load rows of this size"
        why.append(f"mma.sync of sm_80: {cause}.")
    if any("merge" in kernel for kernel in kernels):
        why.append("The keys are split, since tiles of queries alone would leave SMs idle; a second launch merges.")
    return why


def _pairs(seqlen_q: int, seqlen_k: int, causal: bool, window: int | None) -> int:
    own = np.arange(seqlen_q) + seqlen_k - seqlen_q
    last = np.clip(own, -1, seqlen_k - 1) if causal else np.full(seqlen_q, seqlen_k - 1)
    first = np.zeros(seqlen_q, int) if window is None else np.maximum(own - window, 0)
    return int(np.maximum(last - first + 1, 0).sum())
