// Flash attention, forward, of float8 e4m3 on the tensor cores of Hopper, with scales of heads. hopper_attention.cuh
// tells how it runs, hopper_attention_8bit.cuh what is different here.
#include "common/hopper_attention_8bit.cuh"

namespace rawops {

// Of q by query head, of k and v by KV head; strides count elements, 0 where one scale is for all.
struct AttentionScales {
    const float *q, *k, *v;
    int q_batch, q_head, k_batch, k_head, v_batch, v_head;

    __device__ void set(AttentionTask& work, const AttentionParams& params) const {
        const float of_q = q ? q[work.batch * q_batch + work.head * q_head] : 1.0f;
        const float of_k = k ? k[work.batch * k_batch + work.kv_head * k_head] : 1.0f;
        const float scale = of_q * of_k * params.shape.scale;
        work.scale = scale == 0 ? 1e-37f : scale;  // the minus infinity of a hidden key has a product with it
        work.scale_v = v ? v[work.batch * v_batch + work.kv_head * v_head] : 1.0f;
    }
};

template <int D, int DV, int CONSUMERS, int BLOCK_N, int STAGES, bool kTurns, class Out,
          class Tile = HopperAttention<__nv_fp8_e4m3, D, DV, CONSUMERS, BLOCK_N, STAGES, kTurns, 0, Out>>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    attention_sm90_8bit(const __grid_constant__ AttentionMaps maps, const __grid_constant__ AttentionParams params,
                        const __grid_constant__ AttentionScales scales, int section, int* taken) {
    run_attention<Tile, AttentionProducer<Tile>>(maps, params, section, taken, scales);
}

}  // namespace rawops
