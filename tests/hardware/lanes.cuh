// Kernels that try one instruction after the other on the same operands, one lane a thread.
//
// LANES declares such a kernel over operands a, b and c. Inside it each ROW appends one row of n results to `out`.
// Kernels are templates so that only the one asked for (as `name<>`) is compiled, for the architecture it exists on.
// Everything is inline PTX on untyped registers, so that the instruction is the one written down and the bits of a
// NaN travel through no conversion. The k-th inline assembly block of the compiled PTX names the k-th row.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define LANES(name, In, Out)                                                                                          \
  template <class = void>                                                                                             \
  __global__ void name(const In* x, const In* y, const In* z, Out* out, int n) {                                      \
    const int lane = blockIdx.x * blockDim.x + threadIdx.x;                                                           \
    const In a = x[lane], b = y[lane], c = z[lane];                                                                   \
    out += lane;
#define END }

// The two letters are the register classes of result and operands: h 16 bits, r 32 bits, l 64 bits.
#define ROW_(Out, result, operand, text)                                                                              \
  {                                                                                                                   \
    Out d;                                                                                                            \
    asm volatile(text : result(d) : operand(a), operand(b), operand(c));                                              \
    *out = d, out += n;                                                                                               \
  }
#define ROW_HH(text) ROW_(u16, "=h", "h", text)
#define ROW_HR(text) ROW_(u16, "=h", "r", text)
#define ROW_HL(text) ROW_(u16, "=h", "l", text)
#define ROW_RH(text) ROW_(u32, "=r", "h", text)
#define ROW_RR(text) ROW_(u32, "=r", "r", text)
#define ROW_RL(text) ROW_(u32, "=r", "l", text)
#define ROW_LH(text) ROW_(u64, "=l", "h", text)
#define ROW_LR(text) ROW_(u64, "=l", "r", text)
#define ROW_LL(text) ROW_(u64, "=l", "l", text)
