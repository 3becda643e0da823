// What the products of a sparse and a dense matrix share: the strides of the dense ones, and the end of a row.
#pragma once
#include "spmv.cuh"

namespace rawops {

struct DenseShape {
    int64_t x_row, y_row, y_col;  // strides in elements; neighbouring columns of x lie side by side
    int columns;
    int is_vector_y;  // neighbouring columns of y lie side by side, and its rows take whole vectors
};

// Finishes entries of y: the only place where y is read and written.
template <class X> struct SpmmEnd : RowEnd<X> {
    using A = Accumulator<X>;
    using RowEnd<X>::call;
    using RowEnd<X>::reads_a;
    using RowEnd<X>::reads_y;
    const DenseShape& shape;

    __device__ SpmmEnd(const SpmvCall& call, const DenseShape& shape) : RowEnd<X>(call), shape(shape) {}

    __device__ X finished(A sum, X old) const {
        A value = {};
        if (reads_a) value = scale(this->alpha, sum);
        if (reads_y) value = add(value, scale(this->beta, A(widen(old))));
        return narrow<X>(value);
    }

    __device__ X* row_of(int64_t row) const { return static_cast<X*>(call.y) + row * shape.y_row; }

    __device__ void finish_one(X* y_row, int column, A sum) const {
        X* y = y_row + column * shape.y_col;
        *y = finished(sum, reads_y ? *y : X{});
    }

    // VEC neighbouring columns, all of which exist where is_vector_y.
    template <int VEC> __device__ void finish_vector(X* y_row, int column, const A (&sums)[VEC]) const {
        if (!shape.is_vector_y) {
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                if (column + j < shape.columns) finish_one(y_row, column + j, sums[j]);
            }
            return;
        }
        using Stretch = Vector<X, VEC>;
        Stretch* y = reinterpret_cast<Stretch*>(y_row + column);
        Stretch old = {};
        if (reads_y) old = *y;
#pragma unroll
        for (int j = 0; j < VEC; ++j) old.data[j] = finished(sums[j], old.data[j]);
        *y = old;
    }
};

}  // namespace rawops
