// The gradient of q, summed over the blocks of keys.
#pragma once

#include "../attn/mask.h"
#include "bwd_workspace.cuh"
#include "dq_add.cuh"
#include "gemm.cuh"

namespace flash::sm80 {

// A block of kBlockM queries of one head: its tile in the workspace, its number in the sequence; the first key.
struct DqPlace {
  const Band& band;
  int64_t tile;
  int block, col0;
};

template <class Traits>
__device__ __forceinline__ int turn_of(const DqPlace& at) {
  return dq_turn(at.band, at.block * Traits::kBlockM, Traits::kBlockM, at.col0 / Traits::kBlockN, Traits::kBlockN);
}

// dq of the block's queries += dS K over the tile's keys: ds (kBlockN, kBlockM) transposed, k (kBlockN, head_dim).
template <class Traits>
__device__ __forceinline__ void add_dq_of_block(const BwdParams& params, const DqPlace& at,
                                                const Fragments<typename Traits::TileDs>& ds,
                                                const Fragments<typename Traits::TileK>& k) {
  using Pieces = typename Traits::DqPieces;
  const int warp = threadIdx.x / 32;
  const BwdWorkspace<Traits> workspace{params};
  float* sums = workspace.dq_sums(at.tile);
  if (params.deterministic) wait_for_turn(workspace.dq_turn(at.tile, warp), turn_of<Traits>(at));
#pragma unroll 1
  for (int piece = 0; piece < Pieces::kPieces; piece++) {
    float acc[2][Pieces::kCols / 8][4] = {};
#pragma unroll
    for (int key = 0; key < Traits::kBlockN; key += 16) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; m++) ds.load_a_trans(a[m], key, Pieces::row0(warp) + 16 * m);
#pragma unroll
      for (int d = 0; d < Pieces::kCols / 16; d++) {
        uint32_t b[4];
        k.load_b_trans(b, key, Pieces::col0(warp, piece) + 16 * d);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          ptx::mma_m16n8k16<typename Traits::T>(acc[m][2 * d], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<typename Traits::T>(acc[m][2 * d + 1], a[m], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int n = 0; n < Pieces::kCols / 8; n++) add_fragment(sums + Pieces::fragment(warp, piece, m, n), acc[m][n]);
  }
  if (params.deterministic) end_turn(workspace.dq_turn(at.tile, warp), turn_of<Traits>(at));
}

}  // namespace flash::sm80
