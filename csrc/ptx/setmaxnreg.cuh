// setmaxnreg: moves registers between warpgroups. Every warp of a warpgroup executes it; needs __launch_bounds__(n, 1).
#pragma once

namespace flash::ptx {

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash::ptx
