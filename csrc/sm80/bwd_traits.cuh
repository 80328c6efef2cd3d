// What a backward kernel is made of: types, tiles, where things lie in shared memory and in the workspace.
#pragma once

#include "../attn/numeric.cuh"
#include "dq_accum.h"
#include "smem_tile.h"
#include "tile.h"

namespace flash::sm80 {

template <DType kDType, int kHeadDim_, int kHeadDimV_, bool kGeneral_, bool kSmall_>
struct BwdTraits {
  using T = Element<kDType>;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr BwdTile kTile = bwd_tile(kHeadDim, kHeadDimV, kSmall_);
  static constexpr BwdSmem kSmem = bwd_smem(kTile, kHeadDim, kHeadDimV);
  static constexpr int kBlockM = kTile.kBlockM, kBlockN = kTile.kBlockN, kSubM = kTile.kSubM;
  static constexpr int kRowTiles = kTile.kRowTiles, kWarpRows = 16 * kRowTiles, kThreads = kTile.threads();
  static constexpr int kColWarps = kTile.kColWarps, kSubs = kBlockM / (kSubM * kColWarps);
  static constexpr bool kSharesP = kTile.shares_p();
  static_assert(kSubs * kSubM * kColWarps == kBlockM && (kSubs == 1 || !kSharesP));
  using TileK = SmemTile<kBlockN, kHeadDim>;
  using TileV = SmemTile<kBlockN, kHeadDimV>;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileDo = SmemTile<kBlockM, kHeadDimV>;
  using TileDs = SmemTile<kBlockN, kBlockM>;  // transposed: keys are rows
  using DqPieces = sm80::DqPieces<kBlockM, kHeadDim, kTile.warps()>;
  using DqTiles = sm80::DqTiles<kBlockM>;

  // Workspace: the sums of dq (tiles, num_heads, kFloats); then, for deterministic, a counter per warp of each (tiles,
  // num_heads, warps) and one of the blocks that have started. All zero at first.
  FLASH_HD static int64_t num_sums(const BwdParams& p) { return DqTiles::count(p) * p.num_heads * DqPieces::kFloats; }
  FLASH_HD static int64_t workspace_bytes(const BwdParams& p) {
    return 4 * (num_sums(p) + (p.deterministic ? DqTiles::count(p) * p.num_heads * kTile.warps() + 1 : 0));
  }
  // `tile` counts over (tiles, num_heads).
  __device__ static float* dq_sums(const BwdParams& p, int64_t tile) {
    return static_cast<float*>(p.workspace) + tile * DqPieces::kFloats;
  }
  __device__ static uint32_t* turn_counter(const BwdParams& p, int64_t tile, int warp) {
    return static_cast<uint32_t*>(p.workspace) + num_sums(p) + 1 + tile * kTile.warps() + warp;
  }
  __device__ static uint32_t* started_blocks(const BwdParams& p) {
    return static_cast<uint32_t*>(p.workspace) + num_sums(p);
  }
};

}  // namespace flash::sm80
