// Running sums over blocks of threads within one launch ("decoupled look-back"): a block leaves its own sum for those
// behind it, adds up what those before it left, and leaves that sum too, so that nobody has to look further back.
#pragma once
#include "numeric.cuh"

namespace rawops {

using Word = unsigned long long;  // a sum of at most 62 bits and what it is; 0: nothing yet
constexpr Word kOwnSum = Word(1) << 62, kWholeSum = Word(2) << 62, kSumMask = kOwnSum - 1;

// A number for the calling block that no block has which started later. One thread calls it, `turns` starts as 0.
__device__ inline int take_turn(Word* turns) { return int(atomicAdd(turns, Word(1))); }

__device__ inline void leave_sum(volatile Word* word, Word state, Word sum) { *word = state | sum; }

// The sum before place `at` of words that are `stride` apart, for one thread.
__device__ inline Word look_back(const volatile Word* words, int64_t stride, int at) {
    constexpr int AHEAD = 4;
    Word sum = 0;
    while (true) {
        Word found[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) found[i] = at - 1 - i >= 0 ? words[(at - 1 - i) * stride] : kWholeSum;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (found[i] < kOwnSum) break;  // not there yet: again from here
            sum += found[i] & kSumMask, --at;
            if (found[i] >= kWholeSum) return sum;
        }
    }
}

// The same for a warp, in all lanes.
__device__ inline Word look_back_warp(const volatile Word* words, int at) {
    const int lane = threadIdx.x % kWarpSize;
    Word sum = 0;
    while (true) {
        const Word found = at - 1 - lane >= 0 ? words[at - 1 - lane] : kWholeSum;
        const unsigned whole = __ballot_sync(~0u, found >= kWholeSum);
        const unsigned wanted = whole != 0 ? whole ^ (whole - 1) : ~0u;  // up to the nearest one
        if (__ballot_sync(~0u, found < kOwnSum) & wanted) continue;
        sum += wanted >> lane & 1 ? found & kSumMask : 0;
        if (whole != 0) break;
        at -= kWarpSize;
    }
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    return sum;
}

// The sum of `value` over the threads before this one; all threads of the block call it. shared: one T a warp.
template <class T> __device__ inline T sum_before(T value, T* shared) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    T sum = value;
    for (int step = 1; step < kWarpSize; step *= 2) {
        const T other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == kWarpSize - 1) shared[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += shared[w];
    return sum - value;
}

}  // namespace rawops
