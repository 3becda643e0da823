// New keys and values into their pages, in one launch: rotated (RoPE) and rounded to 8 bits on the way, if so asked.
// A thread takes one 16-byte chunk, or one element, of a token's key and value; with RoPE others take the queries.
#include "common/paged_convert.cuh"
#include "common/paged_pool.cuh"

namespace rawops {

// Rows of tokens and heads: strides in elements.
struct Rows {
    const void* rows;
    int64_t token_stride, head_stride, dim_stride;

    template <class T> __device__ T* at(int token, int head) const {
        return static_cast<T*>(const_cast<void*>(rows)) + token * token_stride + head * head_stride;
    }
};

// Cosines and sines (positions, half), float32; half pairs of columns are turned: neighbours if interleaved, else
// column i and column i + half.
struct Rotation {
    const float *cos, *sin;
    int64_t stride;
    int positions, half, interleaved, q_heads;
};

struct AppendParams {
    Rows k, v, q, q_out;
    PagePool pool;
    Rotation rotation;
    const int *positions, *sequence_ids;  // no sequence_ids: token i is of sequence i
    int tokens, heads, batch;
};

// The page and the slot in it that a token goes to; no page if it is to be skipped.
struct SlotOf {
    int page = -1, slot = 0;

    __device__ SlotOf(const AppendParams& params, int token, int position) {
        const PagePool& pool = params.pool;
        const int sequence = params.sequence_ids ? params.sequence_ids[token] : token;
        const int column = position >> pool.page_shift;
        if (column >= pool.max_pages || sequence < 0 || sequence >= params.batch) return;
        slot = position & ((1 << pool.page_shift) - 1);
        page = pool.block_table[sequence * pool.table_stride + column];
        if (page >= pool.num_pages) page = -1;
    }
};

// COUNT neighbours of a row as floats.
template <class T, int COUNT> struct Piece {
    float value[COUNT];

    __device__ void read(const T* row, int column, int64_t stride) {
        const auto piece = *reinterpret_cast<const Vector<T, COUNT>*>(row + column * stride);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) value[i] = widen(piece.data[i]);
    }
    __device__ void write(T* row, int column, int64_t stride) const {
        Vector<T, COUNT> piece;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) piece.data[i] = narrow<T>(value[i]);
        *reinterpret_cast<Vector<T, COUNT>*>(row + column * stride) = piece;
    }

    // Turns the columns from `column` on by the angles of a position.
    __device__ void rotate(const T* row, int column, int64_t stride, const Rotation& rotation, int position) {
        const float *cos = rotation.cos + position * rotation.stride, *sin = rotation.sin + position * rotation.stride;
        if (column >= 2 * rotation.half) return;
        if (rotation.interleaved) {
            if constexpr (COUNT == 1) {
                const float other = widen(row[(column ^ 1) * stride]);
                value[0] = turned(value[0], other, cos[column / 2], sin[column / 2], column % 2);
            } else {
#pragma unroll
                for (int i = 0; i < COUNT; i += 2) {
                    const int pair = (column + i) / 2;
                    const float first = value[i], second = value[i + 1];
                    value[i] = turned(first, second, cos[pair], sin[pair], false);
                    value[i + 1] = turned(second, first, cos[pair], sin[pair], true);
                }
            }
        } else {
            const bool second = column >= rotation.half;
            Piece other;
            other.read(row, second ? column - rotation.half : column + rotation.half, stride);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int pair = column + i - (second ? rotation.half : 0);
                value[i] = turned(value[i], other.value[i], cos[pair], sin[pair], second);
            }
        }
    }

    static __device__ float turned(float own, float other, float cos, float sin, bool second) {
        return fmaf(own, cos, second ? other * sin : -other * sin);
    }

    // In units of a scale, saturating, ties to even; all is 0 where the scale is.
    template <class Stored> __device__ void write_bytes(Stored* row, int column, int64_t stride, float scale) const {
        Vector<unsigned char, COUNT> bytes;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            bytes.data[i] = ByteFormat<Stored>::from_float(scale == 0 ? 0 : value[i] / scale);
        }
        *reinterpret_cast<Vector<unsigned char, COUNT>*>(row + column * stride) = bytes;
    }
};

template <class T, int COUNT> __device__ inline void copy(T* to, const T* from) {
    *reinterpret_cast<Vector<T, COUNT>*>(to) = *reinterpret_cast<const Vector<T, COUNT>*>(from);
}

template <class T, class Stored, int ACCESS, bool kRotated>
__global__ void __launch_bounds__(128, 8) paged_append(const __grid_constant__ AppendParams params) {
    constexpr int COUNT = ACCESS / int(sizeof(T));
    using Piece = Piece<T, COUNT>;
    const PagePool& pool = params.pool;
    const Rotation& rotation = params.rotation;
    const int pieces = ceil_div(pool.head_dim, COUNT), heads = params.heads + (kRotated ? rotation.q_heads : 0);
    const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, row = index / pieces;
    const int token = int(row / heads), head = int(row % heads), column = int(index % pieces) * COUNT;
    if (token >= params.tokens) return;
    const int position = params.positions[token];
    if (position < 0 || (kRotated && position >= rotation.positions)) return;
    const SlotOf place(params, token, position);
    if (place.page < 0) return;  // its query too
    if (kRotated && head >= params.heads) {
        const T* from = params.q.at<const T>(token, head - params.heads);
        Piece query;
        query.read(from, column, params.q.dim_stride);
        query.rotate(from, column, params.q.dim_stride, rotation, position);
        query.write(params.q_out.at<T>(token, head - params.heads), column, params.q_out.dim_stride);
        return;
    }
    const T *k = params.k.at<const T>(token, head), *v = params.v.at<const T>(token, head);
    Stored* to = static_cast<Stored*>(const_cast<void*>(pool.pages)) + place.page * pool.page_stride +
                 place.slot * pool.token_stride + head * pool.head_stride;
    if (column + COUNT > pool.head_dim) {  // the tail of a head_dim that chunks do not divide: copied alone
        if constexpr (is_same<T, Stored>) {
            for (int i = column; i < pool.head_dim; ++i) to[i] = k[i], to[pool.value_offset + i] = v[i];
        }
        return;
    }
    Piece key, value;
    key.read(k, column, params.k.dim_stride);
    value.read(v, column, params.v.dim_stride);
    if constexpr (kRotated) key.rotate(k, column, params.k.dim_stride, rotation, position);
    if constexpr (is_same<T, Stored>) {
        if constexpr (kRotated) key.write(to, column, pool.dim_stride);
        else copy<T, COUNT>(to + column * pool.dim_stride, k + column * params.k.dim_stride);
        copy<T, COUNT>(to + pool.value_offset + column * pool.dim_stride, v + column * params.v.dim_stride);
    } else {
        const int64_t at = place.page * pool.scale_page + head * pool.scale_head;
        key.write_bytes(to, column, pool.dim_stride, pool.k_scale ? pool.k_scale[at] : 1.0f);
        value.write_bytes(to + pool.value_offset, column, pool.dim_stride, pool.v_scale ? pool.v_scale[at] : 1.0f);
    }
}

}  // namespace rawops
