// Dense matrix times vectors, for LSMR: w = A x or A^H x in slices along the summed axis, which lsmr_combine adds up.
//
// Any strides. kDot: the summed axis is the contiguous one, a warp makes one entry; otherwise the entries lie side by
// side and a thread makes one.
#include "common/numeric.cuh"

namespace rawops {

constexpr int kGemvThreads = 256;

// value += a x, with a conjugated if kConjugate
template <bool kConjugate, class M, int MATRIX_PARTS, class R, int PARTS>
__device__ inline void accumulate(Vector<R, PARTS>& value, const Vector<M, MATRIX_PARTS>& a,
                                  const Vector<R, PARTS>& x) {
    const R re = R(a.data[0]);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) value.data[p] += re * x.data[p];
    if constexpr (MATRIX_PARTS == 2 && PARTS == 2) {
        const R im = kConjugate ? -R(a.data[1]) : R(a.data[1]);
        value.data[0] -= im * x.data[1];
        value.data[1] += im * x.data[0];
    }
}

// w (slices, outputs, columns); x (length, columns); grid (outputs, slices, columns)
template <class M, int MATRIX_PARTS, class R, int PARTS, bool kDot, bool kConjugate>
__global__ void __launch_bounds__(kGemvThreads)
    lsmr_gemv(const Vector<M, MATRIX_PARTS>* __restrict__ a, int64_t output_stride, int64_t length_stride,
              const Vector<R, PARTS>* __restrict__ x, Vector<R, PARTS>* __restrict__ w, int64_t outputs, int64_t length,
              int64_t slice, const double* __restrict__ alpha) {
    if (alpha != nullptr && *alpha == 0) return;  // w is not going to be read
    constexpr int LANES = kDot ? kWarpSize : 1, UNROLL = 4;
    const int lane = threadIdx.x % LANES, column = blockIdx.z, columns = gridDim.z;
    const int64_t output = int64_t(blockIdx.x) * (kGemvThreads / LANES) + threadIdx.x / LANES;
    if (output >= outputs) return;
    const int64_t begin = blockIdx.y * slice, end = begin + slice < length ? begin + slice : length;
    const auto* row = a + output * output_stride;
    Vector<R, PARTS> sums[UNROLL] = {};
    int64_t k = begin + lane;
    for (; k + (UNROLL - 1) * LANES < end; k += UNROLL * LANES) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int64_t at = k + u * LANES;
            accumulate<kConjugate>(sums[u], row[at * length_stride], x[at * columns + column]);
        }
    }
    for (; k < end; k += LANES) accumulate<kConjugate>(sums[0], row[k * length_stride], x[k * columns + column]);
#pragma unroll
    for (int u = 1; u < UNROLL; ++u) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) sums[0].data[p] += sums[u].data[p];
    }
    if constexpr (kDot) {
#pragma unroll
        for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) sums[0].data[p] += __shfl_xor_sync(~0u, sums[0].data[p], offset);
        }
        if (lane != 0) return;
    }
    w[(blockIdx.y * outputs + output) * columns + column] = sums[0];
}

}  // namespace rawops
