// The stream of key blocks through one tile of queries.
#pragma once

#include <type_traits>

#include "fwd_copies.cuh"
#include "fwd_pair.cuh"
#include "fwd_place.cuh"
#include "fwd_scores.cuh"
#include "fwd_softmax.cuh"
#include "fwd_traits.cuh"
#include "gemm.cuh"
#include "general.cuh"

namespace flash::sm80 {

template <class Traits>
struct FwdMainloop {
  using T = typename Traits::T;
  using TileQ = typename Traits::TileQ;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  static constexpr int kBlockN = Traits::kBlockN, kRowTiles = Traits::kRowTiles, kWarpCols = Traits::kWarpCols;
  static constexpr bool kIsPair = Traits::kIsPair, kQInRegs = Traits::kTile.kQInRegs;
  static constexpr int kBlocksPerCheck = 8;  // whether the sums are in range: at the end, and now and then before
  // What a step needs once is read from shared memory, unless registers are left for it: by ptxas' report, on sm_80,
  // sm_86, sm_90 and sm_120 alike.
  static constexpr bool kKeeps = kRowTiles == 1 || kIsPair;
  static constexpr bool kMoves = kRowTiles == 1 || kQInRegs;
  using Place = std::conditional_t<kKeeps, const FwdPlace, const FwdPlace&>;
  static constexpr int kStageBytes = FwdCopies<Traits>::kStageBytes;
  static constexpr int kKSteps = kQInRegs ? Traits::kHeadDim / 16 : 1;

  float acc_s[kRowTiles][kWarpCols / 8][4];           // (warp's rows, warp's keys of the block)
  float acc_o[kRowTiles][Traits::kWarpColsV / 8][4];  // (warp's rows, warp's columns of head_dim_v), not normalised
  Softmax<T, kRowTiles> softmax;
  uint32_t q_regs[kRowTiles][kKSteps][4];

  const FwdParams& params;
  FwdPlace& place;  // in shared memory, like the blocks of each warp
  RowBlocks* const all_warp_blocks;
  const int warp_row0;       // the warp's first row in the tile
  int n_block;               // of kBlockN keys: the one that is added
  int count = 0;             // of blocks before it, for pairs
  const Fragments<TileQ> q;  // the warp's rows
  const Fragments<TileK> k;  // stage 0, the warp's keys
  const Fragments<TileV> v;  // stage 0, the warp's columns
  const FwdCopies<Traits> copies;
  const FwdPair<Traits> pair;

  // at: what `place` will be.
  __device__ __forceinline__ FwdMainloop(const FwdParams& p, const FwdPlace& at, char* shared_memory, uint32_t shared)
      : params(p),
        place(*reinterpret_cast<FwdPlace*>(shared_memory + Traits::kSmem.place)),
        all_warp_blocks(reinterpret_cast<RowBlocks*>(shared_memory + Traits::kSmem.warps)),
        warp_row0(threadIdx.x / 32 / Traits::kColWarps * Traits::kWarpRows),
        q(kIsPair ? Fragments<TileQ>(shared).from(warp_row0, 0) : Fragments<TileQ>(shared).from(warp_row0, 0).kept()),
        k(Fragments<TileK>(shared + TileQ::kBytes).from(col_warp() * kWarpCols, 0).kept()),
        v(Fragments<TileV>(shared + TileQ::kBytes + TileK::kBytes).from(0, col_warp() * Traits::kWarpColsV).kept()),
        copies{p, shared},
        pair{shared} {
    if constexpr (kIsPair) {
      copies.barriers().init();
      __syncthreads();
    }
    copy_last_block(at);
  }

  __device__ __forceinline__ void run(const General<T>& general) {
    while (!run_blocks(general)) {
      // Again with the running maximum in every block: the sums cannot leave their range.
      copy_last_block(place);
      if (threadIdx.x == 0) place.raise_always = true, place.plain_end = 0;
    }
  }

  // Of the warp's rows and the block of keys. Made where it is needed: the loop has no registers for it.
  __device__ __forceinline__ FwdScores<Traits> score_tile() const {
    const int warp_row = int(thread() / 32 / Traits::kColWarps);
    return {Band::of(params, place.seq), place.work.tile * Traits::kBlockM + warp_row * Traits::kWarpRows,
            n_block * kBlockN + col_warp() * kWarpCols};
  }
  // threadIdx.x, as little as possible kept in registers (by ptxas' report).
  __device__ __forceinline__ static unsigned thread() { return kIsPair ? thread_again() : forget(threadIdx.x); }
  // Which of the warps with these rows.
  __device__ __forceinline__ static int col_warp() { return int(thread() / 32 % Traits::kColWarps); }
  __device__ __forceinline__ RowBlocks& warp_blocks() const { return all_warp_blocks[thread() / 32]; }

 private:
  // The lane's, in shared memory.
  __device__ __forceinline__ uint32_t references() const {
    return copies.smem + Traits::kSmem.references + thread() / 4 * (8 * kRowTiles);
  }

  // Key blocks go from right to left. Returns whether the sums stayed in range.
  __device__ __forceinline__ bool run_blocks(const General<T>& general) {
    reset();
    if constexpr (kQInRegs) ptx::cp_async_wait_group<0>();
    __syncthreads();
    if constexpr (kQInRegs) load_q_regs();
    Place at = place;
    if constexpr (kIsPair) {
      return run_pair_blocks(general, at);
    } else {
#pragma unroll 1
      for (;; n_block--) {
        if constexpr (!Traits::kGeneral) {
          if (n_block < at.plain_end) {
            const int plain_begin = at.plain_begin;
            const T *k = nullptr, *v = nullptr;
            if constexpr (kMoves) copies.first_chunks(n_block - 1, k, v);
#pragma unroll 1
            for (; n_block >= plain_begin; n_block--) {
              if (!(has_short_wait() ? next_plain_block(k, v, at.begin) : next_block(at))) return false;
              add_block(general, true, [] {});
            }
          }
        }
        if (!next_block(at)) return false;
        if (n_block < at.begin) break;
        add_block(general, false, [] {});
      }
      if constexpr (!kKeeps) softmax.load_references(references());
      return true;
    }
  }

  // Waits for block n_block and begins to copy the one before it. Now and then, and behind the last block, returns
  // false if the sums have left their range.
  __device__ __forceinline__ bool next_block(const FwdPlace& at) {
    // Before it: this block's copies by all threads. After it: nobody reads the stage of the block before.
    ptx::cp_async_wait_group<0>();
    if (n_block % kBlocksPerCheck == 0 || n_block < at.begin) {
      if (__syncthreads_or(!place.raise_always && softmax.out_of_range())) return false;
    } else {
      __syncthreads();
    }
    copies.block(n_block - 1, place);
    return true;
  }

  // Whether ptxas has registers for the wait below.
  __device__ static constexpr bool has_short_wait() {
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890
    return Traits::kHeadDim != 128;
#elif __CUDA_ARCH__ >= 1000
    return Traits::kHeadDim != 96;
#else
    return true;
#endif
  }

  // The same where neither this block nor the one before it has edges, `begin` being the last one. k, v: the thread's
  // first chunks, which move on, if it keeps them.
  __device__ __forceinline__ bool next_plain_block(const T*& k, const T*& v, int begin) {
    if constexpr (!kMoves) copies.load_pointers(k, v);  // while the block is waited for
    ptx::cp_async_wait_group<0>();
    if (n_block % kBlocksPerCheck == 0) {
      if (__syncthreads_or(softmax.out_of_range())) return false;
    } else {
      __syncthreads();
    }
    // The branch also keeps ptxas from mixing the copies with what follows, for which it has no registers.
    if (n_block > begin) {
      if constexpr (kMoves) {
        copies.whole_chunks(n_block - 1, k, v);
      } else {
        copies.whole_block(n_block - 1, k, v);
      }
    }
    ptx::cp_async_commit_group();
    return true;
  }

  __device__ bool run_pair_blocks(const General<T>& general, const FwdPlace& at);  // fwd_pair_mainloop.cuh
  __device__ bool wait_pair_block(bool check);

  __device__ __forceinline__ void copy_last_block(const FwdPlace& at) {
    n_block = at.end - 1;
    copies.block(n_block, at, count);
  }

  __device__ __forceinline__ void reset() {
    softmax.reset();
    if constexpr (!kKeeps) softmax.store_references(references());
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int d = 0; d < Traits::kWarpColsV / 8; d++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc_o[m][d][i] = 0.f;
  }

  __device__ __forceinline__ void load_q_regs() {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int d = 0; d < kKSteps; d++) q.load_a(q_regs[m][d], 16 * m, 16 * d);
  }

  __device__ __forceinline__ void scores() {
    gemm_qk<T>(acc_s, q_regs, q, 0, k.behind(((kIsPair ? count : n_block) & 1) * kStageBytes));
    if constexpr (!kKeeps) softmax.load_references(references());
  }

  // plain: it needs neither a mask nor a maximum. behind_scores() comes between the two products.
  template <class F>
  __device__ __forceinline__ void add_block(const General<T>& general, bool plain, const F& behind_scores) {
    if (!plain) {
      if (!warp_blocks().sees(n_block)) return behind_scores();
    }
    scores();
    behind_scores();
    float scale = params.softmax_scale * kLog2e;
    if constexpr (Traits::kGeneral) {
      finish_general_scores(general);
      accumulate(general, kLog2e);
    } else {
      if (!plain && (place.raise_always || warp_blocks().needs_maximum(n_block))) {
        if (warp_blocks().needs_mask(n_block)) score_tile().mask(acc_s);
        if (place.raise_always) {  // scaled first, so that the maximum gives exactly 1 however large it is
          FwdScores<Traits>::scale(acc_s, scale);
          scale = 1.f;
        }
        softmax.raise(acc_s, acc_o, {scale, softmax.kHeadroom, 1.f}, [&](auto& x) { pair.to_larger(x); });
        if (!place.raise_always) softmax.check_references();
        if constexpr (!kKeeps) softmax.store_references(references());
      }
      accumulate(general, scale);
    }
  }

  // Scores become score - maximum, in natural units: only the difference may be multiplied by log2(e).
  __device__ __forceinline__ void finish_general_scores(const General<T>& general) {
    score_tile().modify(acc_s, general);
    if (warp_blocks().needs_mask(n_block)) score_tile().mask(acc_s);
    softmax.raise(acc_s, acc_o, {1.f, 0.f, kLog2e}, [&](auto& x) { pair.to_larger(x); });
    if constexpr (!kKeeps) softmax.store_references(references());
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int n = 0; n < kWarpCols / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc_s[m][n][i] -= softmax.reference[m][i / 2];
  }

  // out += exp2(scores) V, 16 keys at a time, so that the tensor cores work on one group while the next is
  // exponentiated.
  __device__ __forceinline__ void accumulate(const General<T>& general, float exp2_scale) {
    const Fragments<TileV> v = this->v.behind(((kIsPair ? count : n_block) & 1) * kStageBytes);
    const auto exchange = pair.exchange();
    const int key0 = exchange.warp % Traits::kColWarps * kWarpCols;  // the warp's first in the block
    uint32_t kept[kRowTiles][2] = {};  // of the lane's columns of its rows, as in lane_columns
    if constexpr (Traits::kGeneral)
      if (general.drops()) score_tile().draw_kept(kept, general);
#pragma unroll
    for (int g = 0; g < kWarpCols / 16; g++) {
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
#pragma unroll
            for (int n = 2 * g; n < 2 * g + 2; n++)
#pragma unroll
              for (int i = 0; i < 4; i++)
                if ((kept[m][i / 2] >> (2 * n + i % 2) & 1) == 0) acc_s[m][n][i] = 0.f;
          }
        }
        pack_a<T>(p[m], acc_s[m][2 * g], acc_s[m][2 * g + 1]);
        if constexpr (!Traits::kGeneral)
          ptx::mma_m16n8k16<T>(softmax.rounded_sum[m], p[m], softmax.kOnes, softmax.kOnes);
      }
      if constexpr (kIsPair) {
        exchange.write(p, g);
        if (g == kWarpCols / 16 - 1) exchange.arrive_written();
      }
      gemm_pv<T>(acc_o, p, v.from(key0, 0), 16 * g);
    }
    if constexpr (kIsPair) {
      exchange.wait_written();
#pragma unroll
      for (int g = 0; g < kWarpCols / 16; g++) {
        uint32_t p[kRowTiles][4];
        exchange.read(p, g);
        gemm_pv<T>(acc_o, p, v.from(kWarpCols - key0, 0), 16 * g);
      }
    }
  }
};

}  // namespace flash::sm80
