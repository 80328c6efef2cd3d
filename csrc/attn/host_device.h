// FLASH_HD marks functions that run on the host and in kernels alike, so that index logic is tested without a GPU.
#pragma once

#ifdef __CUDACC__
#define FLASH_HD __host__ __device__ __forceinline__
#else
#define FLASH_HD inline
#endif

namespace flash {

FLASH_HD constexpr int min_of(int a, int b) { return a < b ? a : b; }
FLASH_HD constexpr int max_of(int a, int b) { return a > b ? a : b; }
FLASH_HD constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }                        // a >= 0, b > 0
FLASH_HD constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }  // b > 0
FLASH_HD constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

}  // namespace flash
