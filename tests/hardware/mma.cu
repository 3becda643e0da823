// mma.sync of every type and shape. Operands and results are fragments as they lie in registers:
// word r of lane l of problem p is at [p][r][l].
#include "lanes.cuh"

// Declares a kernel of one problem a block: A, B and D = C fragments of so many words.
#define MMA(name, Word, words_a, words_b, words_d, ...)                                                               \
  template <class = void>                                                                                             \
  __global__ void name(const Word* x, const Word* y, const Word* z, Word* out) {                                      \
    Word a[words_a], b[words_b], d[words_d];                                                                          \
    for (int i = 0; i < words_a; ++i) a[i] = x[(blockIdx.x * words_a + i) * 32 + threadIdx.x];                        \
    for (int i = 0; i < words_b; ++i) b[i] = y[(blockIdx.x * words_b + i) * 32 + threadIdx.x];                        \
    for (int i = 0; i < words_d; ++i) d[i] = z[(blockIdx.x * words_d + i) * 32 + threadIdx.x];                        \
    asm volatile("mma.sync.aligned." __VA_ARGS__);                                                                    \
    for (int i = 0; i < words_d; ++i) out[(blockIdx.x * words_d + i) * 32 + threadIdx.x] = d[i];                      \
  }

#define D2 "+r"(d[0]), "+r"(d[1])
#define D4 D2, "+r"(d[2]), "+r"(d[3])
#define A2 "r"(a[0]), "r"(a[1])
#define A4 A2, "r"(a[2]), "r"(a[3])
#define B1 "r"(b[0])
#define B2 B1, "r"(b[1])

// names by the registers of D, A and B
#define MMA_442(name, text)                                                                                           \
  MMA(name, u32, 4, 2, 4, text " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : D4 : A4, B2)
#define MMA_421(name, text)                                                                                           \
  MMA(name, u32, 2, 1, 4, text " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" : D4 : A2, B1)
#define MMA_242(name, text)                                                                                           \
  MMA(name, u32, 4, 2, 2, text " {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};" : D2 : A4, B2)
#define MMA_221(name, text) MMA(name, u32, 2, 1, 2, text " {%0, %1}, {%2, %3}, {%4}, {%0, %1};" : D2 : A2, B1)

MMA_442(f16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA_421(f16_k8, "m16n8k8.row.col.f32.f16.f16.f32")
MMA_242(f16_f16, "m16n8k16.row.col.f16.f16.f16.f16")
MMA_221(f16_f16_k8, "m16n8k8.row.col.f16.f16.f16.f16")
MMA_442(bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA_421(bf16_k8, "m16n8k8.row.col.f32.bf16.bf16.f32")
MMA_442(tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
MMA_421(tf32_k4, "m16n8k4.row.col.f32.tf32.tf32.f32")
MMA_442(s8, "m16n8k32.row.col.s32.s8.s8.s32")
MMA_442(s8_satfinite, "m16n8k32.row.col.satfinite.s32.s8.s8.s32")
MMA_442(u8_s8, "m16n8k32.row.col.s32.u8.s8.s32")
MMA_421(s8_k16, "m16n8k16.row.col.s32.s8.s8.s32")
MMA_421(u8_k16, "m16n8k16.row.col.s32.u8.u8.s32")
MMA_442(e4m3, "m16n8k32.row.col.f32.e4m3.e4m3.f32")
MMA_442(e5m2, "m16n8k32.row.col.f32.e5m2.e5m2.f32")
MMA_442(e4m3_e5m2, "m16n8k32.row.col.f32.e4m3.e5m2.f32")
MMA_242(e4m3_f16, "m16n8k32.row.col.f16.e4m3.e4m3.f16")

MMA(f64, u64, 1, 1, 2, "m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
    : "+l"(d[0]), "+l"(d[1]) : "l"(a[0]), "l"(b[0]))
MMA(f64_k16, u64, 8, 4, 4, "m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11},"
    " {%12, %13, %14, %15}, {%0, %1, %2, %3};"
    : "+l"(d[0]), "+l"(d[1]), "+l"(d[2]), "+l"(d[3])
    : "l"(a[0]), "l"(a[1]), "l"(a[2]), "l"(a[3]), "l"(a[4]), "l"(a[5]), "l"(a[6]), "l"(a[7]),
      "l"(b[0]), "l"(b[1]), "l"(b[2]), "l"(b[3]))
