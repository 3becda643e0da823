// Lengths, positions and table entries of a few sequences, changed in place: the values come with the launch, so the
// host neither waits nor keeps anything for it.
#include "common/numeric.cuh"

namespace rawops {

constexpr int kChanges = 64;

// Sequence `row` has `length` tokens now, the newest at `position`, and page `page` in `column` (none if negative).
struct PageChange {
    int row, length, position, column, page;
};

struct UpdateParams {
    int *seq_lens, *positions, *block_table;
    int64_t table_stride;
    int count;
    PageChange changes[kChanges];
};

__global__ void paged_update(const __grid_constant__ UpdateParams params) {
    if (threadIdx.x >= params.count) return;
    const PageChange& change = params.changes[threadIdx.x];
    params.seq_lens[change.row] = change.length;
    params.positions[change.row] = change.position;
    if (change.column >= 0) params.block_table[change.row * params.table_stride + change.column] = change.page;
}

}  // namespace rawops
