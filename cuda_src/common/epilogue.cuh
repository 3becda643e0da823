// D = activation(alpha * acc + beta * c + bias) + residual, in registers, before the only write of D.
#pragma once
#include "copy.cuh"

namespace rawops {

// The numbers are those of ACTIVATIONS in _gemm_config.py. swiglu takes two halves of the columns, silu(gate) * up.
enum Activation : int { kIdentity, kRelu, kGelu, kGeluTanh, kSilu, kSwiglu };

// The approximations of the special function unit, right to an ulp or two, which take what is below 2^-126 as 0.
__device__ inline float approximate_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float approximate_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x * Phi(x), Phi the distribution function of the normal distribution, to 1.5 ulp from -1 on and to 5.5 below, of
// results from 2^-126 on; docs/rowwise.md has the errors. Both ranges are computed: no thread waits for another.
__device__ inline float exact_gelu(float x) {
    const float size = fminf(fabsf(x), 15), half_size = 0.5f * size, square = half_size * size;  // x * x / 2
    // Near 0: x / 2 + x * x / sqrt(2 pi), and a polynomial for the rest.
    float rest = -0.000427459163f;
    rest = rest * square + 0.00353711564f;
    rest = rest * square - 0.018930804f;
    rest = rest * square + 0.0797758251f;
    rest = rest * square - 0.265960813f;
    const float near = fmaf(x, fmaf(x, 0.398942292f, 0.5f), square * square * rest);
    // Else the tail, which is exp(-x * x / 2) times a smooth function of x: of 1 / (|x| + 2.25) here.
    const float t = approximate_reciprocal(size + 2.25f);
    float tail = -72.5591965f;
    tail = tail * t + 91.6570816f;
    tail = tail * t - 31.7959614f;
    tail = tail * t - 1.14115739f;
    tail = tail * t - 2.12744641f;
    tail = tail * t - 0.382144153f;
    tail = tail * t - 0.000420157186f;
    tail = tail * t + 0.39894563f;
    // What the rounded exponent of 2 lacks of x * x / 2, of which `square` is the larger part.
    const float exponent = square * -1.44269502f;
    const float lacking = fmaf(half_size, size, -square) + fmaf(exponent, 0.693147182f, square);
    const float power = approximate_exp2(exponent);
    const float far = fmaf(-tail, fmaf(-power, lacking, power), fmaxf(x, -0.0f));
    return fabsf(x) >= 1.25f ? far : near;  // NaN is near
}
__device__ inline double exact_gelu(double x) {
    x = x < -1e4 ? -1e4 : x;
    return x * normcdf(x);
}

// 1 / x for x from 1 to 2. A division calls a function for a 0 above it, or what is no normal number.
__device__ inline float near_reciprocal(float x) {
    const float y = approximate_reciprocal(x);
    return fmaf(fmaf(-x, y, 1.0f), y, y);
}
__device__ inline double near_reciprocal(double x) { return 1 / x; }

// Safe for every value: exponentials are those of negative numbers. The limit at -inf is taken, 0; NaN stays NaN.
template <int kActivation, class V> __device__ inline V activate(V x, V up) {
    if constexpr (kActivation == kIdentity) {
        return x;
    } else if constexpr (kActivation == kGelu) {
        return exact_gelu(x);
    } else {
        x = x < V(-1e4) ? V(-1e4) : x;
        if constexpr (kActivation == kRelu) return x < V(0) ? V(0) : x;
        // x / (1 + exp(-u)). 1 + tanh(u / 2) = 2 / (1 + exp(-u)) does not cancel for negative u.
        const V u = kActivation == kGeluTanh ? V(1.5957691216057308) * (x + V(0.044715) * x * x * x) : x;
        // What is small has a factor of exp(32) to the end, as no digit of a float may be lost before up has its part.
        const bool is_far = sizeof(V) == 4 && u < V(-64);
        const V power = exp((is_far ? V(32) : V(0)) - fabs(u)), factor = near_reciprocal(V(1) + power);
        V result = (u < V(0) ? x * power : x) * factor;
        if constexpr (kActivation == kSwiglu) result *= up;
        return result * (is_far ? V(1.2664165549094176e-14) : V(1));
    }
}

// The same to about 5e-6, for what comes from 16 bits: a division and exp take several times as long as a product
// leaves for its epilogue. An exponential has a factor of 2^16, or its reciprocal does: else it would be 0, or past
// what has a reciprocal, where results are still numbers of bfloat16.
template <int kActivation> __device__ inline float activate_approximately(float x, float up) {
    constexpr float kLog2E = 1.4426950408889634f, kSmall = 1.0f / 65536;
    if constexpr (kActivation == kIdentity || kActivation == kRelu) return activate<kActivation>(x, up);
    if constexpr (kActivation == kGelu) {
        // The tail of the normal distribution is exp(-x * x / 2) times a smooth function, fitted here as a polynomial
        // in t. For x > 0 it is what the factor lacks of 1, for x < 0 it is the factor.
        const float size = fabsf(x) > 1e4f ? 1e4f : fabsf(x), t = approximate_reciprocal(1 + 0.31f * size);
        float tail = -0.07392796f * kSmall;
        tail = tail * t + 0.18044689f * kSmall;
        tail = tail * t + 0.01574869f * kSmall;
        tail = tail * t + 0.13342752f * kSmall;
        tail = tail * t + 0.12044191f * kSmall;
        tail = tail * t + 0.12386063f * kSmall;
        return fmaxf(x, 0.0f) - size * (tail * t) * approximate_exp2(size * size * (-0.5f * kLog2E) + 16);
    } else {
        x = x < -1e4f ? -1e4f : x;
        float slope = -kLog2E;
        if constexpr (kActivation == kGeluTanh) slope *= 1.5957691216057308f + 0.07135481282f * x * x;
        const float silu = x * kSmall * approximate_reciprocal(kSmall + approximate_exp2(slope * x - 16));
        return kActivation == kSwiglu ? silu * up : silu;
    }
}

// Strides in elements; the batch axes are collapsed to three.
struct Strides {
    int64_t row, col, batch[3];

    __device__ int64_t offset(const int (&index)[3]) const {
        return batch[0] * index[0] + batch[1] * index[1] + batch[2] * index[2];
    }
};

// A number, or a number times a 0-d array that is read on the device.
struct Scalar {
    const void* pointer;
    double value;
    int64_t type;  // of the array: the index in SCALAR_TYPES of _gemm_config.py

    __device__ double read() const {
        if (pointer == nullptr) return value;
        return value * entry();
    }
    // Whatever the number is where there is an array: scales may be part of it.
    __device__ bool is_zero() const { return (pointer == nullptr ? value : entry()) == 0; }

private:
    __device__ double entry() const {
        if (type == 0) return *static_cast<const float*>(pointer);
        if (type == 1) return *static_cast<const double*>(pointer);
        if (type == 2) return __half2float(*static_cast<const __half*>(pointer));
        return __bfloat162float(*static_cast<const __nv_bfloat16*>(pointer));
    }
};

// What changes from call to call ...
struct EpilogueCall {
    void* out;
    const void *c, *bias, *residual;  // null where absent
    Scalar beta;
};

// ... and what a plan keeps.
struct EpilogueShape {
    Strides out, c, residual;
    int64_t bias_stride, bias_batch;  // along the columns, along the last axis of the batch
    int rows, cols;  // of D: cols is N / 2 for swiglu
    int out_flags, c_flags, bias_flags, residual_flags;
};

enum OperandFlags : int { kAligned = 1, kFloat32 = 2 };  // groups may move as one vector; stored as float32, not T

// Reads `count` of WIDTH neighbouring elements.
template <class T, class V, int WIDTH>
__device__ inline void read_group(V (&values)[WIDTH], const void* pointer, int64_t offset, int64_t stride, int count,
                                  bool aligned) {
    const T* source = static_cast<const T*>(pointer) + offset;
    if (aligned && count == WIDTH) {
        const auto group = *reinterpret_cast<const Vector<T, WIDTH>*>(source);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] = widen(group.data[i]);
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] = i < count ? V(widen(source[i * stride])) : V(0);
    }
}

template <class T, class Out, int kActivation> class Epilogue {
public:
    using Value = Accumulator<T>;
    static constexpr int WIDTH = 16 / int(sizeof(Value));  // columns that a thread finishes together
    static constexpr bool kGated = kActivation == kSwiglu;
    using Group = Value[WIDTH];

    __device__ Epilogue(const EpilogueCall& call_, const EpilogueShape& shape_, const int (&batch)[3], Value alpha_)
        : Epilogue(call_, shape_, batch, alpha_, shape_.rows) {}

    // For rows up to rows_end - 1.
    __device__ Epilogue(const EpilogueCall& call_, const EpilogueShape& shape_, const int (&batch)[3], Value alpha_,
                        int rows_end_)
        : call(call_),
          shape(shape_),
          rows_end(rows_end_),
          out(static_cast<Out*>(call_.out) + shape_.out.offset(batch)),
          c_batch(shape_.c.offset(batch)),
          residual_batch(shape_.residual.offset(batch)),
          last_batch(batch[2]),
          alpha(alpha_),
          beta(call_.c == nullptr ? Value(0) : Value(call_.beta.read())) {}

    // Finishes columns n .. n + WIDTH - 1 of row m in registers; nothing is read for what lies outside D.
    __device__ void transform(int m, int n, Group& value, Group& up) const {
        const int count = min_of(shape.cols - n, WIDTH);
        if (m >= rows_end || count <= 0) return;
        add_linear_terms(m, n, count, value);
        if constexpr (kGated) add_linear_terms(m, n + shape.cols, count, up);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) value[i] = activated(value[i], up[i]);
        if (call.residual != nullptr) {
            Group residual;
            read(residual, call.residual, residual_batch + m * shape.residual.row + n * shape.residual.col,
                 shape.residual.col, count, shape.residual_flags);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) value[i] += residual[i];
        }
    }

    // What is added to column n, or to up's; 0 outside D.
    __device__ Value bias(int n, bool of_up) const {
        if (call.bias == nullptr || n >= shape.cols) return 0;
        const int64_t offset = last_batch * shape.bias_batch + (n + of_up * int64_t(shape.cols)) * shape.bias_stride;
        if (shape.bias_flags & kFloat32) return static_cast<const float*>(call.bias)[offset];
        return widen(static_cast<const T*>(call.bias)[offset]);
    }

    static __device__ Value activated(Value value, Value up) {
        if constexpr (sizeof(T) <= 2 && is_same<Value, float>) return activate_approximately<kActivation>(value, up);
        else return activate<kActivation>(value, up);
    }

    // The same, and writes them; what lies outside D is left alone.
    __device__ void finish(int m, int n, Group& value, Group& up) const {
        transform(m, n, value, up);
        write(m, n, value);
    }

    __device__ int cols() const { return shape.cols; }  // of D
    __device__ bool has_row(int m) const { return m < rows_end; }

    // Whether D is alpha times the product and no more, in rows that lie on 16-byte boundaries.
    __device__ bool is_plain() const {
        const bool nothing = call.bias == nullptr && call.residual == nullptr && beta == Value(0);
        return kActivation == kIdentity && nothing && (shape.out_flags & kAligned);
    }

    // The place of an element of D.
    __device__ Out* place(int m, int n) const { return out + m * shape.out.row + n * shape.out.col; }

protected:
    const EpilogueCall& call;
    const EpilogueShape& shape;
    int rows_end;

    __device__ void write(int m, int n, const Group& value) const {
        const int count = min_of(shape.cols - n, WIDTH);
        if (m >= rows_end || count <= 0) return;
        Out* destination = place(m, n);
        if ((shape.out_flags & kAligned) && count == WIDTH) {
            Vector<Out, WIDTH> group;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) group.data[i] = narrow<Out>(value[i]);
            *reinterpret_cast<Vector<Out, WIDTH>*>(destination) = group;
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                if (i < count) destination[i * shape.out.col] = narrow<Out>(value[i]);
            }
        }
    }

private:
    Out* out;
    int64_t c_batch, residual_batch;
    int last_batch;
    Value alpha, beta;

    static __device__ void read(Group& values, const void* pointer, int64_t offset, int64_t stride, int count,
                                int flags) {
        if (flags & kFloat32) read_group<float>(values, pointer, offset, stride, count, flags & kAligned);
        else read_group<T>(values, pointer, offset, stride, count, flags & kAligned);
    }

    __device__ void add_linear_terms(int m, int64_t n, int count, Group& value) const {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) value[i] *= alpha;
        if (beta != Value(0)) {  // also false when c is absent
            Group c;
            read(c, call.c, c_batch + m * shape.c.row + n * shape.c.col, shape.c.col, count, shape.c_flags);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) value[i] += beta * c[i];
        }
        if (call.bias != nullptr) {
            Group bias;
            read(bias, call.bias, last_batch * shape.bias_batch + n * shape.bias_stride, shape.bias_stride, count,
                 shape.bias_flags);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) value[i] += bias[i];
        }
    }
};

// Finishes the accumulators of an MmaTile. Each warp passes its rows through its own corner of shared memory, 16 at a
// time, so that lanes end up with neighbouring columns and global accesses coalesce. n_begin counts columns of D.
template <class Tile, class Epilogue>
__device__ inline void finish_tile(const typename Tile::Accumulators& acc, const Epilogue& epilogue, void* shared,
                                   int m_begin, int n_begin, int thread) {
    using Value = typename Epilogue::Value;
    using Slab = SharedTile<Value, 16, Tile::WARP_N>;
    constexpr int WIDTH = Epilogue::WIDTH, HALF = Tile::WARP_N / 2;
    constexpr int GROUPS = (Epilogue::kGated ? HALF : Tile::WARP_N) / WIDTH;
    const int warp = thread / kWarpSize, lane = thread % kWarpSize;
    char* slab = static_cast<char*>(shared) + warp * Slab::BYTES;
    auto at = [&](int row, int col) { return reinterpret_cast<Value*>(slab + Slab::offset(row, col)); };
    m_begin += warp / Tile::WARPS_N * Tile::WARP_M;
    n_begin += warp % Tile::WARPS_N * (GROUPS * WIDTH);

#pragma unroll
    for (int i = 0; i < Tile::ATOMS_M; ++i) {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < Tile::ATOMS_N; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                *reinterpret_cast<Vector<Value, 2>*>(at(lane / 4 + half * 8, j * 8 + lane % 4 * 2)) = {
                    Value(acc[i][j][half * 2]), Value(acc[i][j][half * 2 + 1])};
            }
        }
        __syncwarp();
#pragma unroll 1
        for (int group = lane; group < 16 * GROUPS; group += kWarpSize) {
            const int row = group / GROUPS, col = group % GROUPS * WIDTH;
            auto value = *reinterpret_cast<Vector<Value, WIDTH>*>(at(row, col));
            auto up = value;
            if constexpr (Epilogue::kGated) up = *reinterpret_cast<Vector<Value, WIDTH>*>(at(row, HALF + col));
            epilogue.finish(m_begin + i * 16 + row, n_begin + col, value.data, up.data);
        }
    }
}

}  // namespace rawops
