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

}  // namespace rawops
