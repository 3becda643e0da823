// The parameters of the products with packed 4-bit weights, as _gemm_w4.py packs them.
#pragma once
#include "gemm_problem.cuh"

namespace rawops {

// Scales and zero points, (K / GROUP, N). A zero point is a byte; zero_sign is 128 for int8, 0 for uint8.
struct GroupParams {
    const void *scale, *zero;
    int64_t scale_row, scale_col, zero_row, zero_col;
    int zero_sign;
};

struct W4Params {
    GemmCall call;
    GemmShape shape;
    GroupParams groups;
};

}  // namespace rawops
