// What a backward kernel is made of: types, tiles, where things lie in shared memory.
#pragma once

#include "../attn/numeric.cuh"
#include "bwd_sums.h"
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
  // Whether a step's lse and delta are copied before its rows. It matters because ptxas then orders the whole step
  // differently: by measurement 64 and 128 gain 1 %, 96 4 %, 192 / 128 5 %; 256 would lose 3 %.
  static constexpr bool kStatsFirst = kHeadDim < 256 && !kGeneral;
  // Whether warps wait for each other at mbarriers. At 64 that takes two copies of the scores' code, which is too much
  // of it where options are in it: 20 % slower.
  static constexpr bool kHasBarriers = kSharesP || !kGeneral;
  static_assert(kSubs * kSubM * kColWarps == kBlockM && (kSubs == 1 || !kSharesP));
  using TileK = SmemTile<kBlockN, kHeadDim>;
  using TileV = SmemTile<kBlockN, kHeadDimV>;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileDo = SmemTile<kBlockM, kHeadDimV>;
  using TileDs = SmemTile<kBlockN, kBlockM>;  // transposed: keys are rows
  using DqPieces = sm80::DqPieces<kBlockM, kHeadDim, kTile.warps(), kTile.kDqCols>;
};

}  // namespace flash::sm80
