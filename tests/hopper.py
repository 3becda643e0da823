"""What the Hopper tests share: device functions, launches in the emulator, tensor maps, the swizzle."""

import numpy as np

import rawops
from rawops._runtime.tensormap import TensorMap

PRELUDE = """
typedef unsigned long long u64;
typedef unsigned u32;
struct alignas(64) TMap { u64 opaque[16]; };
__device__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void init(u64* bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(bar)), "r"(count) : "memory");
}
__device__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void expect(u64* bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at(bar)), "r"(bytes) : "memory");
}
__device__ void arrive(u64* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(bar)) : "memory");
}
__device__ void wait(u64* bar, u32 parity) {
  asm volatile("{\\n.reg .pred p;\\nW:\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, 0x989680;\\n"
               "@p bra D;\\nbra W;\\nD:\\n}" ::"r"(at(bar)), "r"(parity) : "memory");
}
__device__ void bulk_load(void* dst, const void* src, u32 bytes, u64* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(at(dst)), "l"(src), "r"(bytes), "r"(at(bar)) : "memory");
}
__device__ void load_2d(void* dst, const TMap* map, int x, int y, u64* bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(at(dst)), "l"(map), "r"(x), "r"(y), "r"(at(bar)) : "memory");
}
__device__ void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ void wait_bulk() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
"""


def launch(source, name, args, *, grid=1, block=128, options=(), shared=0, **modes):
    """Run a kernel in the emulator for Hopper and return the report."""
    with rawops.emulate(arch="sm_90a", **modes) as emu:
        ready = tuple(arg(emu.device.pointer) if callable(arg) else arg for arg in args)
        rawops.Kernel(PRELUDE + source, name, options)(grid, block, ready, shared)
    return emu.report[0]


def tensor_map(array, box, **options):
    """The encoded map of an array, once the emulator's address of it is known."""
    return lambda pointer: TensorMap(
        pointer(array), array.dtype, array.shape, array.strides, box, **options
    ).encode_emulated()


def swizzle(image, span):
    """Reorder the 16-byte chunks of bytes that start at a multiple of 1024, as shared memory holds them."""
    out = np.empty_like(image)
    for byte in range(0, len(image), 16):
        line = byte // 128
        chunk = byte // 16 ^ {0: 0, 32: line // 1 % 2, 64: line % 4, 128: line % 8}[span]
        out[chunk * 16 : chunk * 16 + 16] = image[byte : byte + 16]
    return out
