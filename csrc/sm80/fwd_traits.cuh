// What a forward kernel is made of: types and tiles.
#pragma once

#include "../attn/numeric.cuh"
#include "smem_tile.h"
#include "tile.h"

namespace flash::sm80 {

template <DType kDType, int kHeadDim_, int kHeadDimV_, bool kGeneral_, bool kSmall_>
struct FwdTraits {
  using T = Element<kDType>;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr FwdTile kTile = fwd_tile(kHeadDim, kHeadDimV, kSmall_);
  static constexpr int kBlockM = kTile.kBlockM, kBlockN = kTile.kBlockN;
  static constexpr int kRowTiles = kTile.kRowTiles, kWarpRows = 16 * kRowTiles, kThreads = kTile.threads();
  static constexpr int kColWarps = kTile.kColWarps;
  static constexpr bool kIsPair = kColWarps == 2;  // fwd_pair.cuh
  // Of a warp: keys of the scores, columns of out.
  static constexpr int kWarpCols = kBlockN / kColWarps, kWarpColsV = kHeadDimV / kColWarps;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileK = SmemTile<kBlockN, kHeadDim>;
  using TileV = SmemTile<kBlockN, kHeadDimV>;
  using TileO = SmemTile<kWarpRows, kWarpColsV>;  // of a warp; all take Q's place
  static_assert(kTile.threads() / 32 * TileO::kBytes <= TileQ::kBytes);
  static constexpr FwdSmem kSmem = fwd_smem(kTile, kHeadDim, kHeadDimV);
};

}  // namespace flash::sm80
