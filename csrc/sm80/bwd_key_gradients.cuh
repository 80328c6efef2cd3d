// dk and dv leave a block: as rows or, where blocks share a tile of keys, as additions to fp32 sums.
#pragma once

#include "bwd_copies.cuh"
#include "store.cuh"

namespace flash::sm80 {

// From the tiles in shared memory to rows of dk and dv.
template <class Traits>
__device__ __forceinline__ void store_key_tiles(const BwdParams& p, int batch_index, int head_kv, int col0,
                                                const char* smem) {
  using T = typename Traits::T;
  const SeqInfo seq = SeqInfo::of(p, batch_index);  // again: the loop has no registers for it
  T* dk = static_cast<T*>(p.dk.ptr) + offset_of(p.dk, batch_index, seq.k0, col0, head_kv);
  T* dv = static_cast<T*>(p.dv.ptr) + offset_of(p.dv, batch_index, seq.k0, col0, head_kv);
  const int rows = SeqInfo::rows_of_k(p, batch_index) - col0;  // unused keys get zeros
  store_rows<T, typename Traits::TileK, Traits::kBlockN, Traits::kThreads>(smem, 0, dk, p.dk.row, rows, p.head_dim,
                                                                           chunks_aligned(p.dk), threadIdx.x);
  store_rows<T, typename Traits::TileV, Traits::kBlockN, Traits::kThreads>(
      smem + Traits::kSmem.v, 0, dv, p.dv.row, rows, p.head_dim_v, chunks_aligned(p.dv), threadIdx.x);
}

template <class Traits>
__device__ __forceinline__ void write_key_gradients(const BwdMainloop<Traits>& main, char* smem) {
  using T = typename Traits::T;
  using Main = BwdMainloop<Traits>;
  stage_rows<T, typename Traits::TileK>(smem, main.warp_row0, main.col_warp * Main::kCols, main.acc_dk,
                                        main.params.softmax_scale);
  stage_rows<T, typename Traits::TileV>(smem + Traits::kSmem.v, main.warp_row0, main.col_warp * Main::kColsV,
                                        main.acc_dv, 1.f);
  __syncthreads();
  store_key_tiles<Traits>(main.params, main.place.batch_index, main.place.head_kv, main.col0, smem);
}

// The fragments of a warp's accumulator (kRowTiles, kN) lie one after the other: f(fragment, where its sums lie).
template <int kRowTiles, int kN, class Acc, class F>
__device__ __forceinline__ void for_fragments(Acc& acc, float* sums, const F& f) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int m = 0; m < kRowTiles; m++)
#pragma unroll
    for (int n = 0; n < kN; n++) f(acc[m][n], sums + ((warp * kRowTiles + m) * kN + n) * 128);
}

template <class Traits>
__device__ __forceinline__ void add_key_gradients(const BwdMainloop<Traits>& main, int split) {
  using Main = BwdMainloop<Traits>;
  const BwdWorkspace<Traits> workspace{main.params};
  const SeqInfo seq = SeqInfo::of(main.params, main.place.batch_index);
  const int64_t tile = workspace.key_tile(main.place.batch_index, seq, main.place.head_kv, main.col0 / Traits::kBlockN);
  uint32_t* counter = workspace.key_turn(tile, threadIdx.x / 32);
  const auto add = [](const float (&x)[4], float* sums) { add_fragment(sums, x); };
  if (main.params.deterministic) wait_for_turn(counter, split);
  for_fragments<Traits::kRowTiles, Main::kCols / 8>(main.acc_dk, workspace.dk_sums(tile), add);
  for_fragments<Traits::kRowTiles, Main::kColsV / 8>(main.acc_dv, workspace.dv_sums(tile), add);
  if (main.params.deterministic) end_turn(counter, split);
}

// After the main kernel, one block per (batch, kv head, kBlockN keys): the sums become rows.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    bwd_key_postprocess(const __grid_constant__ BwdParams p, const __grid_constant__ TileOrder order) {
  using T = typename Traits::T;
  using Main = BwdMainloop<Traits>;
  extern __shared__ __align__(128) char smem[];  // sK | sV
  const Work work = order.work_of(blockIdx.x);
  const SeqInfo seq = SeqInfo::of(p, work.batch_index);
  const int col0 = work.tile * Traits::kBlockN;
  if (col0 >= SeqInfo::rows_of_k(p, work.batch_index)) return;

  const BwdWorkspace<Traits> workspace{p};
  const int64_t tile = workspace.key_tile(work.batch_index, seq, work.head, work.tile);
  const int warp = threadIdx.x / 32, row0 = warp % Traits::kTile.key_warps() * Traits::kWarpRows;
  const int col_warp = warp / Traits::kTile.key_warps();
  const auto load = [](float (&x)[4], float* sums) { load_fragment(x, sums); };
  float dk[Traits::kRowTiles][Main::kCols / 8][4], dv[Traits::kRowTiles][Main::kColsV / 8][4];
  for_fragments<Traits::kRowTiles, Main::kCols / 8>(dk, workspace.dk_sums(tile), load);
  stage_rows<T, typename Traits::TileK>(smem, row0, col_warp * Main::kCols, dk, p.softmax_scale);
  for_fragments<Traits::kRowTiles, Main::kColsV / 8>(dv, workspace.dv_sums(tile), load);
  stage_rows<T, typename Traits::TileV>(smem + Traits::kSmem.v, row0, col_warp * Main::kColsV, dv, 1.f);
  __syncthreads();
  store_key_tiles<Traits>(p, work.batch_index, work.head, col0, smem);
}

}  // namespace flash::sm80
