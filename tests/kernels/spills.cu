// 1024 threads leave 64 registers to each: N = 16 values fit, 128 do not.
template <int N>
__global__ void __launch_bounds__(1024) hold(float* x) {
  float values[N];
#pragma unroll
  for (int i = 0; i < N; i++) values[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; i++) x[i * 1024 + threadIdx.x] = values[i] * values[N - 1 - i];
}
