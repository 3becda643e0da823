// What the sparse products share: values of all types, entries read once, and the end of a row.
#pragma once
#include "launches.cuh"
#include "numeric.cuh"

namespace rawops {

template <> struct AccumulatorOf<float2> { using Type = float2; };
template <> struct AccumulatorOf<double2> { using Type = double2; };

// --- arithmetic on real and complex accumulators ---------------------------------------------------------------------

template <class T> constexpr bool is_complex = is_same<T, float2> || is_same<T, double2>;

__device__ inline float2 widen(float2 x) { return x; }
__device__ inline double2 widen(double2 x) { return x; }
template <class T> __device__ inline T narrow(float2 x) { return x; }
template <class T> __device__ inline T narrow(double2 x) { return x; }

template <class A> struct RealOf { using Type = A; };
template <> struct RealOf<float2> { using Type = float; };
template <> struct RealOf<double2> { using Type = double; };
template <class A> using Real = typename RealOf<A>::Type;

template <class A> __device__ inline A make_value(double real, double imag) {
    if constexpr (is_complex<A>) return A{Real<A>(real), Real<A>(imag)};
    else return A(real);
}

template <class A> __device__ inline A add(A a, A b) {
    if constexpr (is_complex<A>) return A{a.x + b.x, a.y + b.y};
    else return a + b;
}

// sum + a * x. A real `a` times a complex x is two products, as in NumPy's promotion but for inf and NaN.
template <class A, class V> __device__ inline A multiply_add(V a, A x, A sum) {
    if constexpr (is_complex<V>) {
        sum.x = fma(Real<A>(a.x), x.x, fma(-Real<A>(a.y), x.y, sum.x));
        sum.y = fma(Real<A>(a.x), x.y, fma(Real<A>(a.y), x.x, sum.y));
        return sum;
    } else if constexpr (is_complex<A>) {
        return A{fma(Real<A>(a), x.x, sum.x), fma(Real<A>(a), x.y, sum.y)};
    } else {
        return fma(A(a), x, sum);
    }
}

// factor * a; a real factor leaves inf in one part of a complex number out of the other.
template <class A> __device__ inline A scale(A factor, A a) {
    if constexpr (is_complex<A>) {
        if (factor.y == 0) return A{factor.x * a.x, factor.x * a.y};
        return A{fma(factor.x, a.x, -factor.y * a.y), fma(factor.x, a.y, factor.y * a.x)};
    } else {
        return factor * a;
    }
}

template <bool kConjugate, class V> __device__ inline V conjugated(V a) {
    if constexpr (kConjugate && is_complex<V>) a.y = -a.y;
    return a;
}

template <class A> __device__ inline bool is_zero(A a) {
    if constexpr (is_complex<A>) return a.x == 0 && a.y == 0;
    else return a == 0;
}

template <class A> __device__ inline bool is_one(A a) {
    if constexpr (is_complex<A>) return a.x == 1 && a.y == 0;
    else return a == 1;
}

template <class A> __device__ inline double square(A a) {
    if constexpr (is_complex<A>) return double(a.x) * a.x + double(a.y) * a.y;
    else return double(a) * a;
}

// Accesses that go to the L2, where other blocks see them.
template <class A> __device__ inline void store_volatile(volatile A* to, A a) {
    if constexpr (is_complex<A>) to->x = a.x, to->y = a.y;
    else *to = a;
}

template <class A> __device__ inline A load_volatile(const volatile A* from) {
    if constexpr (is_complex<A>) return A{from->x, from->y};
    else return *from;
}

template <class A> __device__ inline A shuffle_xor(A a, int mask) {
    if constexpr (is_complex<A>) return A{__shfl_xor_sync(~0u, a.x, mask), __shfl_xor_sync(~0u, a.y, mask)};
    else return __shfl_xor_sync(~0u, a, mask);
}

// The sum over groups of `lanes` neighbouring lanes, in all of them; the whole warp takes part.
template <class A> __device__ inline A sum_lanes(A a, int lanes) {
    for (int mask = lanes >> 1; mask > 0; mask >>= 1) a = add(a, shuffle_xor(a, mask));
    return a;
}

// --- the call -------------------------------------------------------------------------------------------------------

struct ComplexScalar {
    double real, imag;
    const double* pointer;  // where given, a real number in the device's memory

    template <class A> __device__ A read() const {
        return pointer != nullptr ? make_value<A>(*pointer, 0) : make_value<A>(real, imag);
    }
};

// y = alpha * op(A) x + beta * y, where op(A) has the rows that `indptr` bounds.
struct SpmvCall {
    const void* data;
    const int* indices;
    const void* indptr;  // int or int64_t
    const void* x;
    void* y;
    ComplexScalar alpha, beta;
    double* partials;  // where given, one sum of |y|^2 for each block
    int64_t nnz;
    int rows, cols;
};

// Finishes rows: the only place where y is read and written. X is the type of x and y. Before it is made, nothing is
// read that the launch before may have written.
template <class X> struct RowEnd {
    using A = Accumulator<X>;
    const SpmvCall& call;
    A alpha, beta;
    bool reads_a, reads_y;  // what a factor of zero leaves unread
    bool keeps_y;           // y = 0 A x + 1 y: there is nothing to do, and partials stay too
    double squares = 0;

    __device__ explicit RowEnd(const SpmvCall& call)
        : call(begun(call)),
          alpha(call.alpha.read<A>()),
          beta(call.beta.read<A>()),
          reads_a(!is_zero(alpha)),
          reads_y(!is_zero(beta)),
          keeps_y(!reads_a && is_one(beta)) {}

    __device__ static const SpmvCall& begun(const SpmvCall& call) {
        await_launch_before();
        start_next_launch();
        return call;
    }

    __device__ void finish(int64_t row, A sum) {
        X* y = static_cast<X*>(call.y);
        A value = {};
        if (reads_a) value = scale(alpha, sum);
        if (reads_y) value = add(value, scale(beta, A(widen(y[row]))));
        const X stored = narrow<X>(value);
        y[row] = stored;
        squares += square(widen(stored));
    }

    // Adds up the squares of the block's rows in a fixed order. All threads call it, once, at the end.
    template <int THREADS> __device__ void store_partial(double* partials, int index) const {
        if (partials == nullptr) return;
        __shared__ double sums[THREADS / kWarpSize];
        const double sum = sum_lanes(squares, kWarpSize);
        if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            double total = 0;
            for (int i = 0; i < THREADS / kWarpSize; ++i) total += sums[i];
            partials[index] = total;
        }
    }
};

// Ends a row that `count` warps have parts of, from part `first` on: the last of them to arrive adds the parts up, in
// their order. The whole warp calls it with sums of its lanes. sums (parts); tickets (parts), zero between products, or
// null where no row has two parts. Else the square of such a row has a place of its own behind those of the blocks,
// since any block may be the last.
template <class X>
__device__ void finish_part(RowEnd<X>& end, void* sums, unsigned int* tickets, int part, int row, int first, int count,
                            Accumulator<X> sum) {
    using A = Accumulator<X>;
    const int lane = threadIdx.x % kWarpSize;
    const bool has_none = end.call.partials == nullptr || tickets == nullptr;
    double* const squares = has_none ? nullptr : end.call.partials + gridDim.x;
    sum = sum_lanes(sum, kWarpSize);
    if (lane == 0 && squares != nullptr && (count == 1 || part != first)) squares[part] = 0;
    if (count == 1) {
        if (lane == 0) end.finish(row, sum);
        return;
    }
    volatile A* parts = static_cast<volatile A*>(sums);
    int is_last = 0;
    if (lane == 0) {
        store_volatile(parts + part, sum);
        __threadfence();
        is_last = atomicInc(tickets + first, count - 1) == count - 1;  // back to zero by itself
    }
    if (!__shfl_sync(~0u, is_last, 0)) return;
    __threadfence();
    sum = A{};
    constexpr int AHEAD = 8;  // loads that are on their way
    for (int i = lane; i < count; i += AHEAD * kWarpSize) {
        A found[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            found[k] = A{};
            if (i + k * kWarpSize < count) found[k] = load_volatile(parts + first + i + k * kWarpSize);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) sum = add(sum, found[k]);
    }
    sum = sum_lanes(sum, kWarpSize);
    if (lane == 0) {
        RowEnd<X> own = end;
        own.squares = 0;
        own.finish(row, sum);
        if (squares != nullptr) squares[first] = own.squares;
    }
}

}  // namespace rawops
