// dq = softmax_scale times the fp32 sums of the workspace, from fragment order to rows.
#pragma once

#include "bwd_workspace.cuh"
#include "dq_add.cuh"
#include "load.cuh"
#include "store.cuh"
#include "work.h"

namespace flash::sm80 {

// One block, with the warps of the main kernel, per (batch, head, kBlockM queries).
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    bwd_postprocess(const __grid_constant__ BwdParams p, const __grid_constant__ TileOrder order) {
  using T = typename Traits::T;
  using Pieces = typename Traits::DqPieces;
  using Tile = SmemTile<Traits::kBlockM, Traits::kHeadDim>;
  __shared__ __align__(128) char tile[Tile::kBytes];
  const Work work = order.work_of(blockIdx.x);
  const SeqInfo seq = SeqInfo::of(p, work.batch_index);
  const int row0 = work.tile * Traits::kBlockM;
  if (row0 >= seq.seqlen_q) return;

  const BwdWorkspace<Traits> workspace{p};
  const float* sums = workspace.dq_sums(workspace.dq_tile(work.batch_index, seq, work.head, work.tile));
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int piece = 0; piece < Pieces::kPieces; piece++) {
    float acc[2][Pieces::kCols / 8][4];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int n = 0; n < Pieces::kCols / 8; n++) load_fragment(acc[m][n], sums + Pieces::fragment(warp, piece, m, n));
    stage_rows<T, Tile>(tile, Pieces::row0(warp), Pieces::col0(warp, piece), acc, p.softmax_scale);
  }
  __syncthreads();
  T* dq = static_cast<T*>(p.dq.ptr) + offset_of(p.dq, work.batch_index, seq.q0, row0, work.head);
  store_rows<T, Tile, Traits::kBlockM, Traits::kThreads>(tile, 0, dq, p.dq.row, seq.seqlen_q - row0, p.head_dim,
                                                         chunks_aligned(p.dq), threadIdx.x);
}

}  // namespace flash::sm80
