// Conversions between the number formats.
#include "lanes.cuh"

#define TO_INTEGER(ROW, to, from)                                                                                     \
  ROW("cvt.rni." to "." from " %0, %1;")                                                                              \
  ROW("cvt.rzi." to "." from " %0, %1;")                                                                              \
  ROW("cvt.rmi." to "." from " %0, %1;")                                                                              \
  ROW("cvt.rpi." to "." from " %0, %1;")
#define ROUNDED(ROW, to, from)                                                                                        \
  ROW("cvt.rn." to "." from " %0, %1;")                                                                               \
  ROW("cvt.rz." to "." from " %0, %1;")                                                                               \
  ROW("cvt.rm." to "." from " %0, %1;")                                                                               \
  ROW("cvt.rp." to "." from " %0, %1;")

LANES(float32_to_32, u32, u32)
  TO_INTEGER(ROW_RR, "s32", "f32")
  TO_INTEGER(ROW_RR, "u32", "f32")
  TO_INTEGER(ROW_RR, "f32", "f32")
  ROW_RR("cvt.rzi.ftz.s32.f32 %0, %1;")
  ROW_RR("cvt.rni.s16.f32 %0, %1;")
  ROW_RR("cvt.rni.u16.f32 %0, %1;")
  ROW_RR("cvt.rni.s8.f32 %0, %1;")
  ROW_RR("cvt.rni.u8.f32 %0, %1;")
  ROW_RR("cvt.rni.sat.s8.f32 %0, %1;")
  ROW_RR("cvt.rzi.sat.u8.f32 %0, %1;")
  ROW_RR("cvt.sat.f32.f32 %0, %1;")
  ROW_RR("cvt.ftz.f32.f32 %0, %1;")
  ROW_RR("cvt.rna.tf32.f32 %0, %1;")
  ROW_RR("cvt.rn.f16x2.f32 %0, %1, %2;")
  ROW_RR("cvt.rz.f16x2.f32 %0, %1, %2;")
  ROW_RR("cvt.rn.relu.f16x2.f32 %0, %1, %2;")
  ROW_RR("cvt.rn.bf16x2.f32 %0, %1, %2;")
  ROW_RR("cvt.rz.bf16x2.f32 %0, %1, %2;")
  ROW_RR("cvt.rz.relu.bf16x2.f32 %0, %1, %2;")
END

LANES(float32_to_16, u32, u16)
  ROW_HR("cvt.rn.f16.f32 %0, %1;")
  ROW_HR("cvt.rz.f16.f32 %0, %1;")
  ROW_HR("cvt.rn.relu.f16.f32 %0, %1;")
  ROW_HR("cvt.rn.ftz.f16.f32 %0, %1;")
  ROW_HR("cvt.rn.sat.f16.f32 %0, %1;")
  ROW_HR("cvt.rn.bf16.f32 %0, %1;")
  ROW_HR("cvt.rz.bf16.f32 %0, %1;")
  ROW_HR("cvt.rn.relu.bf16.f32 %0, %1;")
END

LANES(float32_sm90, u32, u32)
  ROW_RR("cvt.rn.tf32.f32 %0, %1;")
  ROW_RR("cvt.rz.tf32.f32 %0, %1;")
  ROW_RR("cvt.rn.relu.tf32.f32 %0, %1;")
END

LANES(float32_to_float8, u32, u16)
  ROW_HR("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;")
  ROW_HR("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;")
  ROW_HR("cvt.rn.satfinite.relu.e4m3x2.f32 %0, %1, %2;")
  ROW_HR("cvt.rn.satfinite.relu.e5m2x2.f32 %0, %1, %2;")
END

LANES(float16x2_to_float8, u32, u16)
  ROW_HR("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;")
  ROW_HR("cvt.rn.satfinite.e5m2x2.f16x2 %0, %1;")
  ROW_HR("cvt.rn.satfinite.relu.e4m3x2.f16x2 %0, %1;")
END

LANES(float8_to_float16x2, u16, u32)
  ROW_RH("cvt.rn.f16x2.e4m3x2 %0, %1;")
  ROW_RH("cvt.rn.f16x2.e5m2x2 %0, %1;")
  ROW_RH("cvt.rn.relu.f16x2.e4m3x2 %0, %1;")
END

LANES(float16_to_32, u16, u32)
  ROW_RH("cvt.f32.f16 %0, %1;")
  ROW_RH("cvt.ftz.f32.f16 %0, %1;")
  ROW_RH("cvt.sat.f32.f16 %0, %1;")
  TO_INTEGER(ROW_RH, "s32", "f16")
  ROW_RH("cvt.rzi.u32.f16 %0, %1;")
  ROW_RH("cvt.rni.s8.f16 %0, %1;")
  ROW_RH("cvt.f32.bf16 %0, %1;")
  ROW_RH("cvt.rn.f32.s16 %0, %1;")
  ROW_RH("cvt.rn.f32.u16 %0, %1;")
  ROW_RH("cvt.s32.s16 %0, %1;")
  ROW_RH("cvt.u32.u16 %0, %1;")
  ROW_RH("cvt.s32.s8 %0, %1;")
  ROW_RH("cvt.u32.u8 %0, %1;")
END

LANES(float16_to_16, u16, u16)
  TO_INTEGER(ROW_HH, "f16", "f16")
  ROW_HH("cvt.rzi.s16.f16 %0, %1;")
  ROW_HH("cvt.rzi.u16.f16 %0, %1;")
  ROUNDED(ROW_HH, "f16", "s16")
  ROUNDED(ROW_HH, "f16", "u16")
  ROW_HH("cvt.sat.s8.s16 %0, %1;")
  ROW_HH("cvt.sat.u8.s16 %0, %1;")
END

LANES(bfloat16_sm90, u16, u32)
  TO_INTEGER(ROW_RH, "s32", "bf16")
  ROW_RH("cvt.rzi.u32.bf16 %0, %1;")
  ROW_RH("{ .reg .b16 t; cvt.rn.bf16.f16 t, %1; mov.b32 %0, {t, t}; }")
  ROW_RH("{ .reg .b16 t; cvt.rn.f16.bf16 t, %1; mov.b32 %0, {t, t}; }")
  ROW_RH("{ .reg .b16 t; cvt.rn.bf16.s16 t, %1; mov.b32 %0, {t, t}; }")
  ROW_RH("{ .reg .b16 t; cvt.rz.bf16.u16 t, %1; mov.b32 %0, {t, t}; }")
END

LANES(integer_to_32, u32, u32)
  ROUNDED(ROW_RR, "f32", "s32")
  ROUNDED(ROW_RR, "f32", "u32")
  ROW_RR("cvt.rn.f32.s8 %0, %1;")
  ROW_RR("cvt.rn.f32.u8 %0, %1;")
  ROW_RR("cvt.rn.sat.f32.s32 %0, %1;")
  ROW_RR("cvt.s8.s32 %0, %1;")
  ROW_RR("cvt.u8.u32 %0, %1;")
  ROW_RR("cvt.s16.s32 %0, %1;")
  ROW_RR("cvt.u16.u32 %0, %1;")
  ROW_RR("cvt.sat.s8.s32 %0, %1;")
  ROW_RR("cvt.sat.u8.s32 %0, %1;")
  ROW_RR("cvt.sat.s16.s32 %0, %1;")
  ROW_RR("cvt.sat.u16.s32 %0, %1;")
  ROW_RR("cvt.sat.s8.u32 %0, %1;")
  ROW_RR("cvt.sat.u8.u32 %0, %1;")
  ROW_RR("cvt.sat.s32.u32 %0, %1;")
  ROW_RR("cvt.sat.u32.s32 %0, %1;")
  ROW_RR("cvt.pack.sat.s16.s32 %0, %1, %2;")
  ROW_RR("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;")
END

LANES(integer_to_16, u32, u16)
  ROUNDED(ROW_HR, "f16", "s32")
  ROUNDED(ROW_HR, "f16", "u32")
END

LANES(float64_to_64, u64, u64)
  TO_INTEGER(ROW_LL, "s64", "f64")
  TO_INTEGER(ROW_LL, "u64", "f64")
  TO_INTEGER(ROW_LL, "f64", "f64")
END

LANES(float64_to_32, u64, u32)
  TO_INTEGER(ROW_RL, "s32", "f64")
  TO_INTEGER(ROW_RL, "u32", "f64")
  ROUNDED(ROW_RL, "f32", "f64")
  ROW_RL("cvt.rn.ftz.f32.f64 %0, %1;")
  ROW_RL("{ .reg .b16 t; cvt.rn.f16.f64 t, %1; mov.b32 %0, {t, t}; }")
END

LANES(integer64_to_64, u64, u64)
  ROUNDED(ROW_LL, "f64", "s64")
  ROUNDED(ROW_LL, "f64", "u64")
END

LANES(integer64_to_32, u64, u32)
  ROUNDED(ROW_RL, "f32", "s64")
  ROUNDED(ROW_RL, "f32", "u64")
  ROW_RL("cvt.u32.u64 %0, %1;")
  ROW_RL("cvt.sat.s32.s64 %0, %1;")
  ROW_RL("cvt.sat.u32.s64 %0, %1;")
  ROW_RL("cvt.sat.s32.u64 %0, %1;")
  ROW_RL("{ .reg .b16 t; cvt.rn.f16.s64 t, %1; mov.b32 %0, {t, t}; }")
END

LANES(integer_to_64, u32, u64)
  ROW_LR("cvt.rn.f64.s32 %0, %1;")
  ROW_LR("cvt.rn.f64.u32 %0, %1;")
  ROW_LR("cvt.s64.s32 %0, %1;")
  ROW_LR("cvt.u64.u32 %0, %1;")
  ROW_LR("cvt.sat.u64.s32 %0, %1;")
END

LANES(float32_to_64, u32, u64)
  ROW_LR("cvt.f64.f32 %0, %1;")
  ROW_LR("cvt.ftz.f64.f32 %0, %1;")
  TO_INTEGER(ROW_LR, "s64", "f32")
  TO_INTEGER(ROW_LR, "u64", "f32")
END

LANES(float16_to_64, u16, u64)
  ROW_LH("cvt.f64.f16 %0, %1;")
  ROW_LH("cvt.rzi.s64.f16 %0, %1;")
END
