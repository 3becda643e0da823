"""CUDA kernels for Python with no build step: NVRTC compiles them on first use, or an emulator runs them."""

from rawops._gemm_w4 import pack_int4
from rawops._runtime.custom import Kernel
from rawops._runtime.device import emulate
from rawops._runtime.kernel import kernels, precompile, reload
from rawops.attention import (
    FlashAttention,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    merge_attention_states,
)
from rawops.errors import (
    BarrierError,
    CompileError,
    EmulatorError,
    MemoryFault,
    OutOfPagesError,
    RaceError,
    RawopsError,
    UninitializedRead,
    UnsupportedError,
    UnsupportedPTX,
)
from rawops.gemm import Gemm, gemm, grouped_gemm
from rawops.lora import FusedLoRA, MultiLoRA, lora_linear, lora_linear_backward
from rawops.lsmr import LSMR, DistributedOperator, LinearOperator, LSMRResult, lsmr
from rawops.paged_kv import PagedKVCache, append_paged_kv, paged_attention
from rawops.rowwise import gelu, layernorm, rmsnorm, rope, row_sum, silu, softmax, swiglu
from rawops.sparse import BSRMatrix, SparseMatrix

__version__ = "0.1.0"

__all__ = [
    "LSMR",
    "BSRMatrix",
    "BarrierError",
    "CompileError",
    "DistributedOperator",
    "EmulatorError",
    "FlashAttention",
    "FusedLoRA",
    "Gemm",
    "Kernel",
    "LSMRResult",
    "LinearOperator",
    "MemoryFault",
    "MultiLoRA",
    "OutOfPagesError",
    "PagedKVCache",
    "RaceError",
    "RawopsError",
    "SparseMatrix",
    "UninitializedRead",
    "UnsupportedError",
    "UnsupportedPTX",
    "append_paged_kv",
    "emulate",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_varlen",
    "gelu",
    "gemm",
    "grouped_gemm",
    "kernels",
    "layernorm",
    "lora_linear",
    "lora_linear_backward",
    "lsmr",
    "merge_attention_states",
    "pack_int4",
    "paged_attention",
    "precompile",
    "reload",
    "rmsnorm",
    "rope",
    "row_sum",
    "silu",
    "softmax",
    "swiglu",
]
