// float64: the correctly rounded instructions, minimum and maximum.
#include "lanes.cuh"

#define ROUNDED(mode)                                                                                                 \
  ROW_LL("add." mode ".f64 %0, %1, %2;")                                                                              \
  ROW_LL("sub." mode ".f64 %0, %1, %2;")                                                                              \
  ROW_LL("mul." mode ".f64 %0, %1, %2;")                                                                              \
  ROW_LL("fma." mode ".f64 %0, %1, %2, %3;")                                                                          \
  ROW_LL("div." mode ".f64 %0, %1, %2;")                                                                              \
  ROW_LL("rcp." mode ".f64 %0, %1;")                                                                                  \
  ROW_LL("sqrt." mode ".f64 %0, %1;")

LANES(float64, u64, u64)
  ROUNDED("rn")
  ROUNDED("rz")
  ROUNDED("rm")
  ROUNDED("rp")
  ROW_LL("min.f64 %0, %1, %2;")
  ROW_LL("max.f64 %0, %1, %2;")
  ROW_LL("abs.f64 %0, %1;")
  ROW_LL("neg.f64 %0, %1;")
  ROW_LL("copysign.f64 %0, %1, %2;")
END
