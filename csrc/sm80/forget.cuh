// Registers are what these kernels have least of, and the compiler keeps in them whatever it finds to be the same in
// every step of a loop.
#pragma once

namespace flash::sm80 {

// The same number as if nothing were known about it. In a loop: what follows from it is computed there, not kept from
// before. Before a loop: it is kept itself, not computed anew in every step.
template <class N>
__device__ __forceinline__ N forget(N x) {
  static_assert(sizeof(N) == 4 || sizeof(N) == 8);
  if constexpr (sizeof(N) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
  return x;
}

// threadIdx.x without a register that keeps it until here.
__device__ __forceinline__ unsigned thread_again() {
  unsigned x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Before sm_90 ptxas keeps more than it has registers for (by its report on the backward); from there on computing
// anew takes more registers than it frees.
template <class N>
__device__ __forceinline__ N forget_before_sm90(N x) {
#if __CUDA_ARCH__ < 900
  return forget(x);
#else
  return x;
#endif
}

}  // namespace flash::sm80
