// The stream of key blocks through one tile of queries.
#pragma once

#include "../attn/mask.h"
#include "fwd_traits.cuh"
#include "gemm.cuh"
#include "general.cuh"
#include "load.cuh"
#include "softmax.cuh"
#include "work.h"

namespace flash::sm80 {

__device__ __forceinline__ int kv_head(const AttnParams& p, int head) { return head / (p.num_heads / p.num_heads_kv); }

template <class Traits>
struct FwdMainloop {
  using T = typename Traits::T;
  using TileQ = typename Traits::TileQ;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  static constexpr int kBlockN = Traits::kBlockN, kRowTiles = Traits::kRowTiles;
  static constexpr int kBlocksPerCheck = 8;  // whether the sums are in range: at the end, and now and then before
  static constexpr bool kQInRegs = Traits::kTile.kQInRegs;
  static constexpr int kKSteps = kQInRegs ? Traits::kHeadDim / 16 : 1;

  float acc_s[kRowTiles][kBlockN / 8][4];            // (warp's rows, kBlockN)
  float acc_o[kRowTiles][Traits::kHeadDimV / 8][4];  // (warp's rows, head_dim_v), not normalised
  Softmax<T, kRowTiles> softmax;
  uint32_t q_regs[kRowTiles][kKSteps][4];

  const FwdParams& params;
  const Band band;
  const int warp_row0;       // the warp's first row in the tile
  const int row0;            // and in the sequence
  const BlockRange blocks;   // of the whole tile
  const BlockRange visible;  // of the warp's rows
  const int raise_from;      // blocks before it may go without a maximum
  const bool tail_masked;    // blocks from there on may need a mask
  const Fragments<TileQ> q;
  const uint32_t smem_kv;
  const RowLoader<T, TileK, Traits::kThreads> load_k;
  const RowLoader<T, TileV, Traits::kThreads> load_v;

  __device__ __forceinline__ FwdMainloop(const FwdParams& p, const Work& work, const SeqInfo& seq, uint32_t smem)
      : params(p),
        band(Band::of(p, seq)),
        warp_row0(threadIdx.x / 32 * Traits::kWarpRows),
        row0(work.tile * Traits::kBlockM + warp_row0),
        blocks(key_blocks(band, work.tile * Traits::kBlockM, Traits::kBlockM, kBlockN)),
        visible(key_blocks(band, row0, Traits::kWarpRows, kBlockN)),
        // Every row must have seen a key before the first block without a maximum.
        raise_from(min_of(visible.full_end, floor_div(band.key_end(row0) - 1, kBlockN))),
        tail_masked(visible.full_end < visible.end),
        q(smem),
        smem_kv(smem + TileQ::kBytes),
        load_k(p.k, work.batch_index, seq.k0, kv_head(p, work.head), seq.seqlen_k, p.head_dim),
        load_v(p.v, work.batch_index, seq.k0, kv_head(p, work.head), seq.seqlen_k, p.head_dim_v) {
    const RowLoader<T, TileQ, Traits::kThreads> load_q(p.q, work.batch_index, seq.q0, work.head, seq.seqlen_q,
                                                       p.head_dim);
    load_q.load(smem, work.tile * Traits::kBlockM);
  }

  __device__ __forceinline__ void run(const General<T>& general) {
    for (bool raise_always = Traits::kGeneral; !run_blocks(general, raise_always); raise_always = true) {
    }
  }

  // A lane's accumulator element i of row tile m and column tile n: row_of(m, i / 2), col_of(n) + i % 2.
  __device__ __forceinline__ int row_of(int m, int half) const {
    return row0 + 16 * m + int(threadIdx.x % 32 / 4) + 8 * half;
  }

 private:
  // Key blocks go from right to left. Returns whether the sums stayed in range, which they cannot leave if every block
  // raises the references.
  __device__ __forceinline__ bool run_blocks(const General<T>& general, bool raise_always) {
    reset();
    copy_block(0);
    for (int i = 0; i < blocks.count(); i++) {
      // Before it: this block's copies by all threads. After it: nobody reads the stage of the block before.
      ptx::cp_async_wait_group<0>();
      if (i % kBlocksPerCheck == kBlocksPerCheck - 1) {
        if (__syncthreads_or(!raise_always && softmax.out_of_range())) return false;
      } else {
        __syncthreads();
      }
      copy_block(i + 1);
      if (kQInRegs && i == 0) load_q_regs();
      const int n_block = blocks.end - 1 - i;
      if (n_block >= visible.begin && n_block < visible.end) add_block(general, n_block, stage_of(i), raise_always);
    }
    ptx::cp_async_wait_group<0>();
    return !__syncthreads_or(!raise_always && softmax.out_of_range());
  }

  __device__ __forceinline__ uint32_t stage_of(int i) const {
    return smem_kv + i % 2 * (TileK::kBytes + TileV::kBytes);
  }
  __device__ __forceinline__ void copy_block(int i) const {
    if (i < blocks.count()) {
      load_k.load(stage_of(i), (blocks.end - 1 - i) * kBlockN);
      load_v.load(stage_of(i) + TileK::kBytes, (blocks.end - 1 - i) * kBlockN);
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void reset() {
    softmax.reset();
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int d = 0; d < Traits::kHeadDimV / 8; d++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc_o[m][d][i] = 0.f;
  }

  __device__ __forceinline__ void load_q_regs() {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int d = 0; d < kKSteps; d++) q.load_a(q_regs[m][d], warp_row0 + 16 * m, 16 * d);
  }

  __device__ __forceinline__ void add_block(const General<T>& general, int n_block, uint32_t stage, bool raise_always) {
    gemm_qk<T>(acc_s, q_regs, q, warp_row0, Fragments<TileK>(stage));
    float exp2_scale = params.softmax_scale * kLog2e;
    if constexpr (Traits::kGeneral) {
      finish_general_scores(general, n_block);
      exp2_scale = kLog2e;
    } else if (raise_always || n_block >= raise_from || n_block < visible.full_begin) {
      scale_scores(exp2_scale);
      if (tail_masked || n_block < visible.full_begin) mask_scores(n_block);
      softmax.raise(acc_s, acc_o, softmax.kHeadroom, 1.f);
      exp2_scale = 1.f;
    }
    accumulate(general, n_block, Fragments<TileV>(stage + TileK::kBytes), exp2_scale);
  }

  __device__ __forceinline__ static int col_of(int n) { return 8 * n + int(threadIdx.x % 4) * 2; }

  __device__ __forceinline__ void scale_scores(float scale) {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int n = 0; n < kBlockN / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc_s[m][n][i] *= scale;
  }

  __device__ __forceinline__ void mask_scores(int n_block) {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = row_of(m, i / 2), col0 = n_block * kBlockN + i % 2;
        const int begin = band.key_begin(row) - col0, end = band.key_end(row) - col0;
#pragma unroll
        for (int n = 0; n < kBlockN / 8; n++)
          if (col_of(n) < begin || col_of(n) >= end) acc_s[m][n][i] = -INFINITY;
      }
  }

  // Scores become score - maximum, in natural units: only the difference may be multiplied by log2(e).
  __device__ __forceinline__ void finish_general_scores(const General<T>& general, int n_block) {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int n = 0; n < kBlockN / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          acc_s[m][n][i] = general.score(acc_s[m][n][i], row_of(m, i / 2), n_block * kBlockN + col_of(n) + i % 2);
    if (visible.needs_mask(n_block)) mask_scores(n_block);
    softmax.raise(acc_s, acc_o, 0.f, kLog2e);
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int n = 0; n < kBlockN / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc_s[m][n][i] -= softmax.reference[m][i / 2];
  }

  // out += exp2(scores) V, 16 keys at a time, so that the tensor cores work on one group while the next is
  // exponentiated.
  __device__ __forceinline__ void accumulate(const General<T>& general, int n_block, const Fragments<TileV>& v,
                                             float exp2_scale) {
    Philox random[kRowTiles][2];
#pragma unroll
    for (int g = 0; g < kBlockN / 16; g++) {
      uint32_t p[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
        for (int n = 2 * g; n < 2 * g + 2; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float offset = Traits::kGeneral ? 0.f : softmax.reference[m][i / 2];
            acc_s[m][n][i] = exp2_approx(acc_s[m][n][i] * exp2_scale - offset);
            softmax.row_sum[m][i / 2] += acc_s[m][n][i];
          }
        if constexpr (Traits::kGeneral) {
          if (general.drops()) {
            if (g % 2 == 0)
              for (int h = 0; h < 2; h++) random[m][h] = general.octet(row_of(m, h), n_block * kBlockN + col_of(2 * g));
#pragma unroll
            for (int n = 2 * g; n < 2 * g + 2; n++)
#pragma unroll
              for (int i = 0; i < 4; i++)
                if (!general.keep(random[m][i / 2], n_block * kBlockN + 8 * n + i % 2)) acc_s[m][n][i] = 0.f;
          }
        }
        pack_a<T>(p[m], acc_s[m][2 * g], acc_s[m][2 * g + 1]);
        if constexpr (!Traits::kGeneral)
          ptx::mma_m16n8k16<T>(softmax.rounded_sum[m], p[m], softmax.kOnes, softmax.kOnes);
      }
      gemm_pv<T>(acc_o, p, v, 16 * g);
    }
  }
};

}  // namespace flash::sm80
