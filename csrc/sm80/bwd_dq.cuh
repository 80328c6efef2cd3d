// The gradient of q, summed over the blocks of keys.
#pragma once

#include "../attn/mask.h"
#include "bwd_workspace.cuh"
#include "dq_add.cuh"
#include "gemm.cuh"

namespace flash::sm80 {

// A block of kBlockM queries of one head, and the tile's first key.
struct DqPlace {
  const SeqInfo& seq;
  const Band& band;
  int batch_index, head, block, col0;
};

// dq of the block's queries += dS K over the tile's keys: ds (kBlockN, kBlockM) transposed, k (kBlockN, head_dim).
template <class Traits>
__device__ __forceinline__ void add_dq_of_block(const BwdParams& params, const DqPlace& at,
                                                const Fragments<typename Traits::TileDs>& ds,
                                                const Fragments<typename Traits::TileK>& k) {
  using Pieces = typename Traits::DqPieces;
  const int warp = threadIdx.x / 32;
  const BwdWorkspace<Traits> workspace{params};
  const int64_t tile = workspace.dq_tile(at.batch_index, at.seq, at.head, at.block);
  float* sums = workspace.dq_sums(tile);
  uint32_t* counter = workspace.dq_turn(tile, warp);
  const int turn = params.deterministic ? dq_turn(at.band, at.block * Traits::kBlockM, Traits::kBlockM,
                                                  at.col0 / Traits::kBlockN, Traits::kBlockN)
                                        : 0;
  if (params.deterministic) wait_for_turn(counter, turn);
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
  if (params.deterministic) end_turn(counter, turn);
}

}  // namespace flash::sm80
