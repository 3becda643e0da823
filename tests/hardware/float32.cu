// float32: the correctly rounded instructions, minimum and maximum, and the approximations.
#include "lanes.cuh"

#define ARITHMETIC(mode)                                                                                              \
  ROW_RR("add." mode ".f32 %0, %1, %2;")                                                                              \
  ROW_RR("sub." mode ".f32 %0, %1, %2;")                                                                              \
  ROW_RR("mul." mode ".f32 %0, %1, %2;")                                                                              \
  ROW_RR("fma." mode ".f32 %0, %1, %2, %3;")

LANES(arithmetic, u32, u32)
  ARITHMETIC("rn")
  ARITHMETIC("rz")
  ARITHMETIC("rm")
  ARITHMETIC("rp")
  ARITHMETIC("rn.ftz")
  ARITHMETIC("rz.ftz")
  ARITHMETIC("rn.sat")
  ARITHMETIC("rp.ftz.sat")
END

#define DIVISION(mode)                                                                                                \
  ROW_RR("div." mode ".f32 %0, %1, %2;")                                                                              \
  ROW_RR("rcp." mode ".f32 %0, %1;")                                                                                  \
  ROW_RR("sqrt." mode ".f32 %0, %1;")

LANES(division, u32, u32)
  DIVISION("rn")
  DIVISION("rz")
  DIVISION("rm")
  DIVISION("rp")
  DIVISION("rn.ftz")
END

#define EXTREMUM(op)                                                                                                  \
  ROW_RR(op ".f32 %0, %1, %2;")                                                                                       \
  ROW_RR(op ".ftz.f32 %0, %1, %2;")                                                                                   \
  ROW_RR(op ".NaN.f32 %0, %1, %2;")                                                                                   \
  ROW_RR(op ".xorsign.abs.f32 %0, %1, %2;")                                                                           \
  ROW_RR(op ".NaN.xorsign.abs.f32 %0, %1, %2;")

LANES(extremum, u32, u32)
  EXTREMUM("min")
  EXTREMUM("max")
  ROW_RR("abs.f32 %0, %1;")
  ROW_RR("neg.f32 %0, %1;")
  ROW_RR("abs.ftz.f32 %0, %1;")
  ROW_RR("neg.ftz.f32 %0, %1;")
  ROW_RR("copysign.f32 %0, %1, %2;")
END

LANES(approximate, u32, u32)
  ROW_RR("ex2.approx.f32 %0, %1;")
  ROW_RR("ex2.approx.ftz.f32 %0, %1;")
  ROW_RR("rcp.approx.f32 %0, %1;")
  ROW_RR("rcp.approx.ftz.f32 %0, %1;")
  ROW_RR("rsqrt.approx.f32 %0, %1;")
  ROW_RR("rsqrt.approx.ftz.f32 %0, %1;")
  ROW_RR("sqrt.approx.f32 %0, %1;")
  ROW_RR("sqrt.approx.ftz.f32 %0, %1;")
  ROW_RR("div.full.f32 %0, %1, %2;")
  ROW_RR("div.approx.f32 %0, %1, %2;")
END

LANES(logarithm, u32, u32)
  ROW_RR("lg2.approx.f32 %0, %1;")
  ROW_RR("lg2.approx.ftz.f32 %0, %1;")
END

LANES(trigonometric, u32, u32)
  ROW_RR("sin.approx.f32 %0, %1;")
  ROW_RR("cos.approx.f32 %0, %1;")
  ROW_RR("sin.approx.ftz.f32 %0, %1;")
  ROW_RR("cos.approx.ftz.f32 %0, %1;")
END

LANES(hyperbolic, u32, u32)
  ROW_RR("tanh.approx.f32 %0, %1;")
END
