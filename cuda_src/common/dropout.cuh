// Which weights of attention dropout keeps: a function of seed, offset and place alone, so that any kernel, forward or
// backward, whatever its tiles, finds the same ones.
//
// Philox4x32-10 (Salmon et al., 2011, doi:10.1145/2063384.2063405) with the seed as key makes eight numbers of 16 bits
// for two queries by four keys. They are those of one thread where the rows of accumulators are queries, and lie in two
// threads where the rows are keys:
//
//   counter            (key / 16 * 4 + key % 8 / 2, query / 16 * 8 + query % 8, batch * heads + head, offset)
//   number             word query % 16 / 8 * 2 + key % 16 / 8, half key % 2
//   kept               number < keep, with keep = round((1 - p) * 2^16)
#pragma once
#include "attention_problem.cuh"

namespace rawops {

__device__ inline void philox(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = uint64_t(0xd2511f53u) * counter[0], second = uint64_t(0xcd9e8d57u) * counter[2];
        counter[0] = uint32_t(second >> 32) ^ counter[1] ^ key0;
        counter[1] = uint32_t(second);
        counter[2] = uint32_t(first >> 32) ^ counter[3] ^ key1;
        counter[3] = uint32_t(first);
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
}

// For 16 queries by 16 keys, in the order of a thread's accumulators of two atoms: word 2 * atom + half of the rows has
// the numbers of a column and the next one in its halves.
struct DropoutNumbers {
    uint32_t words[4], limit;

    // Of element e of an atom.
    __device__ bool keeps(int atom, int e) const {
        const uint32_t word = words[atom * 2 + e / 2];
        return (e % 2 ? word : word << 16) <= limit;
    }
    // Zero in the dropped halves of the packed elements of an atom's half of rows, else ones.
    __device__ uint32_t mask(int part) const {
        return (words[part] << 16 <= limit ? 0x0000ffffu : 0) | (words[part] <= limit ? 0xffff0000u : 0);
    }
};

// Of one sequence and head.
class Dropout {
public:
    __device__ Dropout(const AttentionShape& shape, int batch, int head) : index(batch * shape.heads + head) {
        const AttentionDropout& dropout = shape.dropout;
        const uint64_t seed = dropout.seed + (dropout.seed_at ? *dropout.seed_at : 0);
        key0 = uint32_t(seed);
        key1 = uint32_t(seed >> 32);
        offset = uint32_t(dropout.offset + (dropout.offset_at ? *dropout.offset_at : 0));
        limit = (uint32_t(dropout.keep - 1) << 16) | 0xffff;
    }

    __device__ bool keeps(int query, int key) const {
        uint32_t words[4];
        make(words, query, key);
        const uint32_t word = words[query % 16 / 8 * 2 + key % 16 / 8];
        return (key % 2 ? word : word << 16) <= limit;
    }

    // Rows of accumulators are the 16 queries from `query` on, columns the keys from `key` on; both multiples of 16.
    __device__ DropoutNumbers of_queries(int query, int key, int lane) const {
        uint32_t words[4];
        make(words, query + lane / 4, key + lane % 4 * 2);
        return {{words[0], words[2], words[1], words[3]}, limit};
    }

    // Rows are keys, columns queries. Lanes of an even and the next odd row make numbers of both rows for one of their
    // two columns, and exchange half of them.
    __device__ DropoutNumbers of_keys(int query, int key, int lane) const {
        const bool is_odd = lane & 4;
        uint32_t words[4];
        make(words, query + lane % 4 * 2 + is_odd, key + lane / 4);
        const uint32_t others = is_odd ? 0x5410 : 0x7632;
        const uint32_t low = __shfl_xor_sync(~0u, __byte_perm(words[0], words[1], others), 4);
        const uint32_t high = __shfl_xor_sync(~0u, __byte_perm(words[2], words[3], others), 4);
        const uint32_t first = is_odd ? 0x3254 : 0x5410, second = is_odd ? 0x3276 : 0x7610;
        return {{__byte_perm(words[0], low, first), __byte_perm(words[1], low, second),
                 __byte_perm(words[2], high, first), __byte_perm(words[3], high, second)},
                limit};
    }

private:
    uint32_t key0, key1, offset, limit;
    int index;

    __device__ void make(uint32_t (&words)[4], int query, int key) const {
        words[0] = key / 16 * 4 + key % 8 / 2;
        words[1] = query / 16 * 8 + query % 8;
        words[2] = index;
        words[3] = offset;
        philox(words, key0, key1);
    }
};

}  // namespace rawops
