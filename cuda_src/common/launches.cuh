// Launches that overlap, from sm_90 on; before, and for a launch that does not ask for it, all of this is nothing.
#pragma once

namespace rawops {

// Lets the next launch on the stream begin when every block of this one has called it or is done, on SMs with room.
__device__ inline void start_next_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the launch before this one is complete. What that one writes may not be read earlier, and what it reads
// may not be written.
__device__ inline void await_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Brings parameters near, all of which takes long where it is read first: for while a launch waits anyway. The
// condition hardly ever holds, and then does nothing: it is there so that the compiler keeps the reads.
template <class Params> __device__ inline void fetch_parameters(const Params& params) {
    constexpr int kLine = 64;
    unsigned mixed = 1;
#pragma unroll
    for (int at = 0; at < int(sizeof(Params)); at += kLine) {
        mixed ^= *reinterpret_cast<const unsigned*>(reinterpret_cast<const char*>(&params) + at);
    }
    if (mixed == 0) start_next_launch();
}

}  // namespace rawops
