// Values of a sparse matrix in another order: for the second format, for COO input, and when values change.
#include "common/spmv.cuh"

namespace rawops {

// out[i] = data[order[i]]; with `starts`, the sum of data[order[j]] for j from starts[i] to starts[i + 1].
template <class V>
__global__ void __launch_bounds__(256)
    sparse_gather(const V* __restrict__ data, const int64_t* __restrict__ order, const int64_t* __restrict__ starts,
                  V* __restrict__ out, int64_t count) {
    const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
    if (i >= count) return;
    if (starts == nullptr) {
        out[i] = data[order[i]];
        return;
    }
    Accumulator<V> sum = {};
    for (int64_t j = starts[i]; j < starts[i + 1]; ++j) sum = add(sum, Accumulator<V>(widen(data[order[j]])));
    out[i] = narrow<V>(sum);
}

}  // namespace rawops
