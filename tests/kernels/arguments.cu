#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum Mode { kFirst, kSecond };

struct alignas(64) Map {
  char bytes[128];
};

struct Mixed {
  const void* a;
  int M;
  long long stride;
  float alpha;
  Map map;
  double beta;
  int last;
};

__global__ void scalars(double* out, int i, unsigned u, long long l, unsigned char c, bool b, float f, double d,
                        __half h, __nv_bfloat16 g, Mode m) {
  double values[] = {double(i), double(u), double(l), double(c), double(b), double(f),
                     d, double(__half2float(h)), double(__bfloat162float(g)), double(m)};
  for (int k = 0; k < 10; k++) out[k] = values[k];
}

__global__ void mixed(char before, const __grid_constant__ Mixed p, double* out) {
  out[0] = before, out[1] = p.M, out[2] = double(p.stride), out[3] = p.alpha;
  out[4] = p.map.bytes[0], out[5] = p.map.bytes[127], out[6] = p.beta, out[7] = p.last;
}

__global__ void first_element(const float* x, float* out) { out[0] = x[0]; }

__global__ void last_shared(float* out, int n) {
  extern __shared__ float shared[];
  shared[n - 1 - threadIdx.x] = threadIdx.x + 1;
  __syncthreads();
  if (threadIdx.x == 0) out[0] = shared[n - 1] + shared[n - blockDim.x];
}
