// float16 and bfloat16, one and two a register.
#include "lanes.cuh"

#define FLOAT16(ROW, type)                                                                                            \
  ROW("add." type " %0, %1, %2;")                                                                                     \
  ROW("sub." type " %0, %1, %2;")                                                                                     \
  ROW("mul." type " %0, %1, %2;")                                                                                     \
  ROW("add.sat." type " %0, %1, %2;")                                                                                 \
  ROW("mul.ftz." type " %0, %1, %2;")                                                                                 \
  ROW("sub.ftz.sat." type " %0, %1, %2;")                                                                             \
  ROW("fma.rn." type " %0, %1, %2, %3;")                                                                              \
  ROW("fma.rn.ftz." type " %0, %1, %2, %3;")                                                                          \
  ROW("fma.rn.sat." type " %0, %1, %2, %3;")                                                                          \
  ROW("fma.rn.relu." type " %0, %1, %2, %3;")                                                                         \
  ROW("min.ftz." type " %0, %1, %2;")                                                                                 \
  ROW("max.ftz.NaN." type " %0, %1, %2;")                                                                             \
  EITHER(ROW, type)

#define EITHER(ROW, type)                                                                                             \
  ROW("min." type " %0, %1, %2;")                                                                                     \
  ROW("max." type " %0, %1, %2;")                                                                                     \
  ROW("min.NaN." type " %0, %1, %2;")                                                                                 \
  ROW("max.NaN." type " %0, %1, %2;")                                                                                 \
  ROW("min.xorsign.abs." type " %0, %1, %2;")                                                                         \
  ROW("max.NaN.xorsign.abs." type " %0, %1, %2;")                                                                     \
  ROW("neg." type " %0, %1;")                                                                                         \
  ROW("abs." type " %0, %1;")

LANES(float16, u16, u16)
  FLOAT16(ROW_HH, "f16")
END

LANES(float16x2, u32, u32)
  FLOAT16(ROW_RR, "f16x2")
END

#define BFLOAT16(ROW, type)                                                                                           \
  ROW("fma.rn." type " %0, %1, %2, %3;")                                                                              \
  ROW("fma.rn.relu." type " %0, %1, %2, %3;")                                                                         \
  EITHER(ROW, type)

LANES(bfloat16, u16, u16)
  BFLOAT16(ROW_HH, "bf16")
END

LANES(bfloat16x2, u32, u32)
  BFLOAT16(ROW_RR, "bf16x2")
END

#define BFLOAT16_SM90(ROW, type)                                                                                      \
  ROW("add.rn." type " %0, %1, %2;")                                                                                  \
  ROW("sub.rn." type " %0, %1, %2;")                                                                                  \
  ROW("mul.rn." type " %0, %1, %2;")

LANES(bfloat16_sm90, u16, u16)
  BFLOAT16_SM90(ROW_HH, "bf16")
END

LANES(bfloat16x2_sm90, u32, u32)
  BFLOAT16_SM90(ROW_RR, "bf16x2")
END

LANES(float16_approximate, u16, u16)
  ROW_HH("ex2.approx.f16 %0, %1;")
  ROW_HH("tanh.approx.f16 %0, %1;")
END

LANES(float16x2_approximate, u32, u32)
  ROW_RR("ex2.approx.f16x2 %0, %1;")
  ROW_RR("tanh.approx.f16x2 %0, %1;")
END

LANES(bfloat16_approximate, u16, u16)
  ROW_HH("ex2.approx.ftz.bf16 %0, %1;")
  ROW_HH("tanh.approx.bf16 %0, %1;")
END

LANES(bfloat16x2_approximate, u32, u32)
  ROW_RR("ex2.approx.ftz.bf16x2 %0, %1;")
  ROW_RR("tanh.approx.bf16x2 %0, %1;")
END
