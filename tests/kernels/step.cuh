#pragma once

template <class T>
__device__ T step(T a, T x, T y) {
  return a * x + y;
}
