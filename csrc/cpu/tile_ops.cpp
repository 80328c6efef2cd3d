#include "tile_ops.h"

// Vectors are passed only between functions that are inlined: the calling convention that this warning is about is not
// used.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace flash::cpu {

namespace {

#define FLASH_TARGET_INLINE FLASH_TARGET __attribute__((always_inline)) inline

#if defined(__x86_64__)
namespace avx512 {
#define FLASH_TARGET __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,fma")))
constexpr int kLanes = 16, kRows = 12;
#include "tile_ops_simd.h"
#undef FLASH_TARGET
}  // namespace avx512

namespace avx2 {
#define FLASH_TARGET __attribute__((target("avx2,fma")))
constexpr int kLanes = 8, kRows = 6;
#include "tile_ops_simd.h"
#undef FLASH_TARGET
}  // namespace avx2
#endif

namespace baseline {
#define FLASH_TARGET
#if defined(__aarch64__)
constexpr int kLanes = 4, kRows = 6;
#else
constexpr int kLanes = 4, kRows = 2;
#endif
#include "tile_ops_simd.h"
#undef FLASH_TARGET
}  // namespace baseline

}  // namespace

std::vector<const TileOps*> usable_tile_ops() {
  std::vector<const TileOps*> usable;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq"))
    usable.push_back(&avx512::kOps);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) usable.push_back(&avx2::kOps);
#endif
  usable.push_back(&baseline::kOps);
  return usable;
}

const TileOps& tile_ops() {
  static const TileOps& best = *usable_tile_ops().front();
  return best;
}

}  // namespace flash::cpu
