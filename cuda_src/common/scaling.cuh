// Scales of operands of 8 bits: what a kernel knows of them, and where they take part.
//
// Scales of a whole operand go into alpha. Scales of rows of a and columns of b multiply finished sums, in the
// epilogue. Scales of blocks of 128 along K multiply the sums of one block, which are then added up in float32.
#pragma once
#include "gemm_problem.cuh"
#include "operands_8bit.cuh"

namespace rawops {

constexpr int kScaleBlock = 128;  // along K, and of columns of b

// The numbers are those of _gemm_config.py. The tensor cores of Hopper add float8 products with about 14 bits: a sum
// over all of K is the faster for it; the others take each 128 of K to a float32 sum outside.
enum Promotion : int {
    kInPlace,        // no sum beside the tensor core's
    kPromoted,       // without scales
    kBlockScaled,    // of rows of a and of 128 columns of b
    kColumnScaled,   // of rows of a and of columns of b
};

struct ScaleParams {
    const float *whole_a, *whole_b, *whole_d;  // one number each, null where absent
    const float *a, *b;                        // null where absent
    Strides a_strides, b_strides;              // a: row is M, col is K / 128; b: row is K / 128, col is N or N / 128
    int b_count;                               // scales along N
};

struct ScaledParams {
    GemmCall call;
    GemmShape shape;
    ScaleParams scales;

    // What all of a @ b is multiplied with. Where alpha or K is 0, the scales take no part either, NaN or not.
    __device__ float factor() const {
        double factor = call.alpha.read();
        if (scales.whole_a != nullptr) factor *= *scales.whole_a;
        if (scales.whole_b != nullptr) factor *= *scales.whole_b;
        return call.alpha.is_zero() || shape.K == 0 ? 0 : float(factor);
    }
};

// The scales of sums over one block of K for a thread's rows and columns. `block` counts them along K.
struct BlockScales {
    const float *a, *b;
    const Strides &a_strides, &b_strides;
    int64_t a_batch, b_batch;
    int rows, b_count;

    // Without `reads`, none are there.
    __device__ BlockScales(const ScaledParams& params, const int (&batch)[3], bool reads = true)
        : a(reads ? params.scales.a : nullptr),
          b(reads ? params.scales.b : nullptr),
          a_strides(params.scales.a_strides),
          b_strides(params.scales.b_strides),
          a_batch(a_strides.offset(batch)),
          b_batch(b_strides.offset(batch)),
          rows(params.shape.M),
          b_count(params.scales.b_count) {}

    // Where a scale is; past the last row or column, that of the last one.
    __device__ const float* of_row(int m, int block) const {
        return a + a_batch + min_of(m, rows - 1) * a_strides.row + block * a_strides.col;
    }
    // `index` is that of a column, or of 128 columns.
    __device__ const float* of_column(int index, int block) const {
        return b + b_batch + block * b_strides.row + min_of(index, b_count - 1) * b_strides.col;
    }
};

// The epilogue with scales of rows and columns before it, and that of a float8 result after it.
template <class Addend, class Out, int kActivation, bool kVectors>
class ScaledEpilogue : public Epilogue<Addend, Out, kActivation> {
    using Base = Epilogue<Addend, Out, kActivation>;

public:
    using Group = typename Base::Group;

    __device__ ScaledEpilogue(const ScaledParams& params, const int (&batch)[3], typename Base::Value alpha,
                              int rows_end)
        : Base(params.call.epilogue, params.shape.epilogue, batch, alpha, rows_end),
          scales(params.scales),
          a(alpha == 0 ? nullptr : scales.a),
          b(alpha == 0 ? nullptr : scales.b),
          a_batch(scales.a_strides.offset(batch)),
          b_batch(scales.b_strides.offset(batch)) {}

    __device__ void transform(int m, int n, Group& value, Group& up) const {
        const int count = min_of(this->shape.cols - n, Base::WIDTH);
        if (m >= this->rows_end || count <= 0) return;
        if constexpr (kVectors) {
            multiply(m, n, count, value);
            if constexpr (Base::kGated) multiply(m, n + this->shape.cols, count, up);
        }
        Base::transform(m, n, value, up);
        if constexpr (sizeof(Out) == 1) {
            const float scale = scales.whole_d == nullptr ? 1 : *scales.whole_d;
#pragma unroll
            for (int i = 0; i < Base::WIDTH; ++i) value[i] *= scale;
        }
    }

    __device__ void finish(int m, int n, Group& value, Group& up) const {
        transform(m, n, value, up);
        Base::write(m, n, value);
    }

private:
    const ScaleParams& scales;
    const float *a, *b;  // null where they take no part
    int64_t a_batch, b_batch;

    __device__ void multiply(int m, int64_t n, int count, Group& value) const {
        const float row = a == nullptr ? 1 : a[a_batch + m * scales.a_strides.row];
#pragma unroll
        for (int i = 0; i < Base::WIDTH; ++i) {
            const int64_t at = b_batch + (n + i) * scales.b_strides.col;
            value[i] *= b == nullptr || i >= count ? row : row * b[at];
        }
    }
};

// What the kernels' tiles take for their Scaling: the counterpart of NoScaling.
template <class Addend, int kPromotion, bool kVectors> struct Scaling {
    static constexpr bool kPromotes = kPromotion != kInPlace;
    template <class T, class Out, int kActivation>
    using Epilogue = ScaledEpilogue<Addend, Out, kActivation, kVectors>;

    template <class Epilogue>
    static __device__ Epilogue epilogue(const ScaledParams& params, const int (&batch)[3], float alpha, int rows_end) {
        return Epilogue(params, batch, alpha, rows_end);
    }
    static __device__ float factor(const ScaledParams& params) { return params.factor(); }
};

}  // namespace rawops
