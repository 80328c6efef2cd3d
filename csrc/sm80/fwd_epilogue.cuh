// Normalises out, writes it through shared memory in 16-byte pieces, and writes the lse.
#pragma once

#include "fwd_pair_mainloop.cuh"
#include "store.cuh"

namespace flash::sm80 {

// factor: what out is multiplied by. The sums are of the whole row, 0 where it sees no key (the largest probability is
// 1).
struct RowResult {
  float factor, lse;
};

// Plain: the reference is in log2 units.
__device__ __forceinline__ RowResult finish_row(float reference, float sum, float rounded_sum) {
  if (sum == 0.f) return {0.f, -INFINITY};
  return {1.f / rounded_sum, (reference + log2f(sum)) * kLn2};
}

// General: natural units; a sink joins the denominator.
__device__ __forceinline__ RowResult finish_row_general(float row_max, float sum, const float* sink, float keep_scale) {
  if (sum == 0.f) row_max = -INFINITY;
  if (sink != nullptr) {
    const float with_sink = fmaxf(row_max, *sink);
    if (with_sink == -INFINITY) return {0.f, -INFINITY};
    const float shrink = expf(row_max - with_sink);
    const float total = sum * shrink + expf(*sink - with_sink);
    return {keep_scale * shrink / total, with_sink + logf(total)};
  }
  if (row_max == -INFINITY) return {0.f, -INFINITY};
  return {keep_scale / sum, row_max + logf(sum)};
}

template <class Traits>
__device__ __forceinline__ void write_results(const FwdMainloop<Traits>& main,
                                              const General<typename Traits::T>& general, const Work& work,
                                              const SeqInfo& seq, char* smem) {
  using T = typename Traits::T;
  using TileO = typename Traits::TileO;
  const FwdParams& p = main.params;
  const float* sink = p.sinks ? p.sinks + work.head : nullptr;
  const FwdScores<Traits> tile = main.score_tile();
  float factor[Traits::kRowTiles][2], sums[Traits::kRowTiles][2], rounded_sums[Traits::kRowTiles][2];
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sums[m][h] = quad_sum(main.softmax.row_sum[m][h]);
      rounded_sums[m][h] = main.softmax.rounded_sum[m][2 * h];
    }
  main.pair.to_sum(sums);
  if constexpr (!Traits::kGeneral) main.pair.to_sum(rounded_sums);
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float sum = sums[m][h], reference = main.softmax.reference[m][h];
      const RowResult row = Traits::kGeneral ? finish_row_general(reference, sum, sink, general.keep_scale())
                                             : finish_row(reference, sum, rounded_sums[m][h]);
      factor[m][h] = row.factor;
      const int i = tile.row_of(m, h);
      if (threadIdx.x % 4 == 0 && i < seq.seqlen_q)
        p.lse.ptr[offset_of(p.lse, work.batch_index, seq.q0, i, work.head)] = row.lse;
    }
  // All warps have read Q.
  char* staged = smem + thread_again() / 32 * TileO::kBytes;
  stage_rows<T, TileO>(staged, 0, 0, main.acc_o, factor);
  __syncwarp();
  const int col0 = main.col_warp() * Traits::kWarpColsV;
  T* out = static_cast<T*>(p.out.ptr) + offset_of(p.out, work.batch_index, seq.q0, tile.row0, work.head) + col0;
  store_rows<T, TileO, Traits::kWarpRows, 32>(staged, 0, out, p.out.row, seq.seqlen_q - tile.row0, p.head_dim_v - col0,
                                              chunks_aligned(p.out), threadIdx.x % 32);
}

}  // namespace flash::sm80
