// What the kernels of this folder share: their types, which tile a CTA works on, how tiles leave registers, and the
// launch.
#pragma once

#include "../attn/launch.cuh"
#include "../attn/mask.h"
#include "../attn/shared_memory.h"
#include "rows.cuh"
#include "tile.h"

namespace flash::simt {

template <Pass kPass, class MathOf, int kHeadDimOf, bool kCompact>
struct Traits {
  using Math = MathOf;
  static constexpr int kHeadDim = kHeadDimOf;
  static constexpr Tile kTile = tile_of(kPass, Math::kProduct, kHeadDim, kCompact);
  static constexpr int kWarpRows = kTile.warp_rows, kBlockM = kTile.block_m(), kBlockN = kTile.block_n;
  static constexpr int kThreads = kTile.threads(), kMinCtas = kTile.min_ctas;
  static constexpr int kStride = tile_stride(kHeadDim);
  static constexpr int kSharedBytes = kPass == Pass::kFwd ? fwd_shared_bytes(Math::kProduct, kHeadDim, kCompact)
                                                          : bwd_shared_bytes(Math::kProduct, kHeadDim, kCompact);
  static constexpr bool kCanAddDq = Math::kProduct == Product::kTf32x3;
  // Numbers per lane: rows, columns of a score tile, columns of an output tile.
  static constexpr int kR = kWarpRows / Math::kLaneRows, kS = kBlockN / Math::kLaneCols,
                       kO = kHeadDim / Math::kLaneCols;

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static float* warp_scratch(float* scratch) {
    return Math::kProduct == Product::kFma ? scratch + warp() * kWarpRows * scratch_stride(kBlockN) : nullptr;
  }
};

// blockIdx.x counts blocks of one head, then heads, then sequences: CTAs that run together share a head's K and V in
// L2, and no grid dimension but x (2^31 - 1) is needed.
struct WorkTile {
  int block, head, batch_index;

  __device__ static WorkTile of(int blocks, int heads) {
    const int rest = int(blockIdx.x) / blocks;
    return {int(blockIdx.x) % blocks, rest % heads, rest / heads};
  }
};

// One warp's rows of an accumulator, times `scale`, to rows row0 ... of global memory.
template <class T>
__device__ __forceinline__ void store_rows(const Rows& dst, const float (&acc)[T::kR][T::kO], int row0,
                                           const float (&scale)[T::kR]) {
#pragma unroll
  for (int r = 0; r < T::kR; r++) {
    const int row = row0 + T::Math::row(r);
    if (row >= dst.rows) continue;
#pragma unroll
    for (int c = 0; c < T::kO; c += T::Math::kOutRun) {
      float x[T::Math::kOutRun];
#pragma unroll
      for (int i = 0; i < T::Math::kOutRun; i++) x[i] = acc[r][c + i] * scale[r];
      const int col = T::Math::out_col(c);
      if (col < dst.cols) store(dst, row, col, x);
    }
  }
}

// run(Traits) with the large tiles if a CTA of the device may have the shared memory that they take.
template <class Large, class Compact, class Run>
void with_fitting_tile(int device, Run&& run) {
  if (Large::kSharedBytes <= shared_memory_of(device).per_block) {
    run(Large{});
  } else {
    run(Compact{});
  }
}

// Runs `kernel` with `grid` CTAs.
template <class T, class Params>
void launch(void (*kernel)(Params), const char* name, const Params& params, int64_t grid, Stream stream) {
  if (grid == 0) return;
  FLASH_CHECK_ARG(grid < (int64_t(1) << 31), name, " would need a grid of ", grid, " CTAs, the limit is 2^31 - 1");
  allow_shared_memory(kernel, T::kSharedBytes);
  kernel<<<unsigned(grid), T::kThreads, T::kSharedBytes, cuda_stream(stream)>>>(params);
  check_launch(name);
}

// CTAs for every block of every head of every sequence.
inline int64_t grid_of(int seqlen, int block, int heads, int batch) {
  return int64_t(ceil_div(seqlen, block)) * heads * batch;
}

}  // namespace flash::simt
