// Comparisons of every type, predicates combined, set, selection.
#include "lanes.cuh"

#define SETP(type, ...) "{ .reg .pred p; setp." type " p, %1, %2; selp." __VA_ARGS__ ", 1, 0, p; }"
#define SETP_H(op) ROW_HH(SETP(op, "b16 %0"))
#define SETP_R(op) ROW_RR(SETP(op, "b32 %0"))
#define SETP_L(op) ROW_LL(SETP(op, "b64 %0"))

#define EQUAL(ROW, type) ROW("eq." type) ROW("ne." type)
#define ORDER(ROW, type) ROW("lt." type) ROW("le." type) ROW("gt." type) ROW("ge." type)
#define UNSIGNED(ROW, type) ROW("lo." type) ROW("ls." type) ROW("hi." type) ROW("hs." type)
#define FLOATING(ROW, type)                                                                                           \
  EQUAL(ROW, type)                                                                                                    \
  ORDER(ROW, type)                                                                                                    \
  ROW("equ." type) ROW("neu." type) ROW("ltu." type) ROW("leu." type) ROW("gtu." type) ROW("geu." type)               \
  ROW("num." type) ROW("nan." type)

LANES(compare32, u32, u32)
  EQUAL(SETP_R, "b32")
  ORDER(SETP_R, "s32")
  ORDER(SETP_R, "u32")
  UNSIGNED(SETP_R, "u32")
  FLOATING(SETP_R, "f32")
  ORDER(SETP_R, "ftz.f32")
  ROW_RR("{ .reg .pred p, q; setp.gt.s32 q, %3, 0; setp.lt.and.s32 p, %1, %2, q; selp.b32 %0, %1, %2, p; }")
  ROW_RR("{ .reg .pred p, q; setp.gt.s32 q, %3, 0; setp.lt.or.s32 p, %1, %2, !q; selp.b32 %0, %1, %2, p; }")
  ROW_RR("{ .reg .pred p, q; setp.gt.s32 q, %3, 0; setp.lt.xor.f32 p, %1, %2, q; selp.b32 %0, %1, %2, p; }")
  ROW_RR("{ .reg .pred p, q; setp.lt.f32 p|q, %1, %2; selp.b32 %0, 1, 0, p; @q or.b32 %0, %0, 2; }")
  ROW_RR("{ .reg .pred p, q; setp.eq.s32 p, %1, %2; not.pred q, p; and.pred p, p, q; selp.b32 %0, 1, 0, p; }")
  ROW_RR("set.lt.u32.f32 %0, %1, %2;")
  ROW_RR("set.geu.f32.f32 %0, %1, %2;")
  ROW_RR("set.le.s32.u32 %0, %1, %2;")
  ROW_RR("set.gt.f32.s32 %0, %1, %2;")
  ROW_RR("slct.b32.s32 %0, %1, %2, %3;")
  ROW_RR("slct.b32.f32 %0, %1, %2, %3;")
END

LANES(compare64, u64, u64)
  EQUAL(SETP_L, "b64")
  ORDER(SETP_L, "s64")
  ORDER(SETP_L, "u64")
  FLOATING(SETP_L, "f64")
END

LANES(compare16, u16, u16)
  EQUAL(SETP_H, "b16")
  ORDER(SETP_H, "s16")
  ORDER(SETP_H, "u16")
  FLOATING(SETP_H, "f16")
END

LANES(compare16_sm90, u16, u16)
  FLOATING(SETP_H, "bf16")
END

#define PACKED_(op) "{ .reg .pred p, q; setp." op " p|q, %1, %2; selp.b32 %0, 1, 0, p; @q or.b32 %0, %0, 2; }"
#define PACKED(op) ROW_RR(PACKED_(op))

LANES(compare16x2, u32, u32)
  FLOATING(PACKED, "f16x2")
  ROW_RR("set.lt.f16x2.f16x2 %0, %1, %2;")
  ROW_RR("set.geu.u32.f16x2 %0, %1, %2;")
END
