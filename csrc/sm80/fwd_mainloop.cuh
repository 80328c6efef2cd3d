// The stream of key blocks through one tile of queries.
#pragma once

#include <type_traits>

#include "fwd_place.cuh"
#include "fwd_scores.cuh"
#include "fwd_traits.cuh"
#include "gemm.cuh"
#include "general.cuh"
#include "softmax.cuh"
#include "stream_loader.cuh"

namespace flash::sm80 {

__device__ __forceinline__ int kv_head(const AttnParams& p, int head) { return head / (p.num_heads / p.num_heads_kv); }

template <class Traits>
struct FwdMainloop {
  using T = typename Traits::T;
  using TileQ = typename Traits::TileQ;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  using LoaderK = StreamLoader<T, TileK, Traits::kThreads>;
  using LoaderV = StreamLoader<T, TileV, Traits::kThreads>;
  static constexpr int kBlockN = Traits::kBlockN, kRowTiles = Traits::kRowTiles;
  static constexpr int kBlocksPerCheck = 8;  // whether the sums are in range: at the end, and now and then before
  // What a step needs once is read from shared memory, unless registers are left for it: by ptxas' report, on sm_80,
  // sm_86, sm_90 and sm_120 alike.
  static constexpr bool kKeepsChunk = kRowTiles == 1;
  static constexpr bool kKeeps = kKeepsChunk || Traits::kHeadDim == 96;
  using Place = std::conditional_t<kKeeps, const FwdPlace, const FwdPlace&>;
  static constexpr int kStageBytes = TileK::kBytes + TileV::kBytes;
  static constexpr bool kQInRegs = Traits::kTile.kQInRegs;
  static constexpr int kKSteps = kQInRegs ? Traits::kHeadDim / 16 : 1;

  float acc_s[kRowTiles][kBlockN / 8][4];            // (warp's rows, kBlockN)
  float acc_o[kRowTiles][Traits::kHeadDimV / 8][4];  // (warp's rows, head_dim_v), not normalised
  Softmax<T, kRowTiles> softmax;
  uint32_t q_regs[kRowTiles][kKSteps][4];

  const FwdParams& params;
  FwdPlace& place;  // in shared memory
  float* const all_references;
  const int warp_row0;       // the warp's first row in the tile
  int n_block;               // of kBlockN keys: the one that is added
  const Fragments<TileQ> q;  // the warp's rows
  const Fragments<TileK> k;  // stage 0
  const Fragments<TileV> v;  // stage 0
  const uint32_t smem_kv;
  LoaderK load_k;
  LoaderV load_v;
  const int kept_chunk;  // the thread's first, in a tile of K or V

  // at: what `place` will be.
  __device__ __forceinline__ FwdMainloop(const FwdParams& p, const FwdPlace& at, char* shared_memory, uint32_t smem)
      : params(p),
        place(*reinterpret_cast<FwdPlace*>(shared_memory + Traits::kSmem.place)),
        all_references(reinterpret_cast<float*>(shared_memory + Traits::kSmem.references)),
        warp_row0(threadIdx.x / 32 * Traits::kWarpRows),
        q(Fragments<TileQ>(smem).from(warp_row0, 0).kept()),
        k(Fragments<TileK>(smem + TileQ::kBytes).kept()),
        v(Fragments<TileV>(smem + TileQ::kBytes + TileK::kBytes).kept()),
        smem_kv(smem + TileQ::kBytes),
        load_k(loader_k(at)),
        load_v(loader_v(at)),
        kept_chunk(forget(kKeepsChunk ? load_k.first_chunk() : 0)) {
    copy_last_block(at);
  }

  __device__ __forceinline__ void run(const General<T>& general) {
    while (!run_blocks(general)) {
      // Again with the running maximum in every block: the sums cannot leave their range.
      load_k = loader_k(place), load_v = loader_v(place);
      copy_last_block(place);
      if (threadIdx.x == 0) place.raise_always = true;
    }
  }

  // Of the warp's rows and the block of keys. Made where it is needed: the loop has no registers for it.
  __device__ __forceinline__ FwdScores<Traits> score_tile() const {
    const int warp = int(forget(threadIdx.x) / 32);
    return {Band::of(params, place.seq), place.work.tile * Traits::kBlockM + warp * Traits::kWarpRows,
            n_block * kBlockN};
  }

 private:
  // The lane's, in shared memory.
  __device__ __forceinline__ float* references() const { return all_references + threadIdx.x / 4 * (2 * kRowTiles); }

  __device__ __forceinline__ LoaderK loader_k(const FwdPlace& at) const {
    return LoaderK(params.k, at.work.batch_index, at.seq.k0, (at.end - 1) * kBlockN, kv_head(params, at.work.head),
                   params.head_dim);
  }
  __device__ __forceinline__ LoaderV loader_v(const FwdPlace& at) const {
    return LoaderV(params.v, at.work.batch_index, at.seq.k0, (at.end - 1) * kBlockN, kv_head(params, at.work.head),
                   params.head_dim_v);
  }

  // Key blocks go from right to left. Returns whether the sums stayed in range.
  __device__ __forceinline__ bool run_blocks(const General<T>& general) {
    reset();
    if constexpr (kQInRegs) ptx::cp_async_wait_group<0>();
    __syncthreads();
    if constexpr (kQInRegs) load_q_regs();
    Place at = place;
#pragma unroll 1
    for (;; n_block--) {
      if constexpr (!Traits::kGeneral) {
#pragma unroll 1
        for (; n_block >= at.plain_begin && n_block < at.plain_end && !at.raise_always; n_block--) {
          if (!next_block(at)) return false;
          add_block(general, true);
        }
      }
      if (!next_block(at)) return false;
      if (n_block < at.begin) break;
      add_block(general, false);
    }
    if constexpr (!kKeeps) softmax.load_references(references());
    return true;
  }

  // Waits for block n_block and begins to copy the one before it. Now and then, and behind the last block, returns
  // false if the sums have left their range.
  __device__ __forceinline__ bool next_block(const FwdPlace& at) {
    // Before it: this block's copies by all threads. After it: nobody reads the stage of the block before.
    ptx::cp_async_wait_group<0>();
    if (n_block % kBlocksPerCheck == 0 || n_block < at.begin) {
      if (__syncthreads_or(!at.raise_always && softmax.out_of_range())) return false;
    } else {
      __syncthreads();
    }
    copy_block(n_block - 1, at, kBlockN);
    return true;
  }

  __device__ __forceinline__ void copy_last_block(const FwdPlace& at) {
    n_block = at.end - 1;
    copy_block(n_block, at, at.seq.seqlen_k - n_block * kBlockN);
  }

  __device__ __forceinline__ static int stage_bytes(int block) { return (block & 1) * kStageBytes; }

  // `rows` of its keys exist: only the last block can be short.
  __device__ __forceinline__ void copy_block(int block, const FwdPlace& at, int rows) {
    if (block >= at.begin) {
      if (at.whole_rows && rows >= kBlockN) {
        const uint32_t chunk = smem_kv + stage_bytes(block) + (kKeepsChunk ? kept_chunk : load_k.first_chunk());
        load_k.load_whole(chunk);
        load_v.load_whole(chunk + TileK::kBytes);
      } else {
        load_k.load_edge(smem_kv + stage_bytes(block), rows);
        load_v.load_edge(smem_kv + stage_bytes(block) + TileK::kBytes, rows);
      }
      load_k.move(-kBlockN);
      load_v.move(-kBlockN);
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void reset() {
    softmax.reset(references());
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
      for (int d = 0; d < kKSteps; d++) q.load_a(q_regs[m][d], 16 * m, 16 * d);
  }

  __device__ __forceinline__ void scores() {
    gemm_qk<T>(acc_s, q_regs, q, 0, k.behind(stage_bytes(n_block)));
    if constexpr (!kKeeps) softmax.load_references(references());
  }

  // plain: it needs neither a mask nor a maximum.
  __device__ __forceinline__ void add_block(const General<T>& general, bool plain) {
    if (!plain) {
      const BlockRange visible = visible_blocks();
      if (n_block < visible.begin || n_block >= visible.end) return;
    }
    scores();
    float exp2_scale = params.softmax_scale * kLog2e;
    if constexpr (Traits::kGeneral) {
      finish_general_scores(general);
      exp2_scale = kLog2e;
    } else if (!plain && needs_maximum()) {
      FwdScores<Traits>::scale(acc_s, exp2_scale);
      if (visible_blocks().needs_mask(n_block)) score_tile().mask(acc_s);
      softmax.raise(acc_s, acc_o, softmax.kHeadroom, 1.f);
      if constexpr (!kKeeps) softmax.store_references(references());
      exp2_scale = 1.f;
    }
    accumulate(general, exp2_scale);
  }

  // For the warp's rows, of which every one must have seen a key before a block without a maximum.
  __device__ __forceinline__ bool needs_maximum() const {
    const FwdScores<Traits> tile = score_tile();
    return place.raise_always || visible_blocks().needs_mask(n_block) ||
           n_block >= floor_div(tile.band.key_end(tile.row0) - 1, kBlockN);
  }

  // Blocks that the warp's rows see.
  __device__ __forceinline__ BlockRange visible_blocks() const {
    const FwdScores<Traits> tile = score_tile();
    return key_blocks(tile.band, tile.row0, Traits::kWarpRows, kBlockN);
  }

  // Scores become score - maximum, in natural units: only the difference may be multiplied by log2(e).
  __device__ __forceinline__ void finish_general_scores(const General<T>& general) {
    score_tile().modify(acc_s, general);
    if (visible_blocks().needs_mask(n_block)) score_tile().mask(acc_s);
    softmax.raise(acc_s, acc_o, 0.f, kLog2e);
    softmax.store_references(references());
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int n = 0; n < kBlockN / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc_s[m][n][i] -= softmax.reference[m][i / 2];
  }

  // out += exp2(scores) V, 16 keys at a time, so that the tensor cores work on one group while the next is
  // exponentiated.
  __device__ __forceinline__ void accumulate(const General<T>& general, float exp2_scale) {
    const Fragments<TileV> v = this->v.behind(stage_bytes(n_block));
    float rounded[kRowTiles][4] = {};  // all columns are equal
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
            if (g % 2 == 0) {
              const FwdScores<Traits> tile = score_tile();
              for (int h = 0; h < 2; h++) random[m][h] = general.draw(tile.row_of(m, h), tile.col_of(2 * g));
            }
#pragma unroll
            for (int n = 2 * g; n < 2 * g + 2; n++)
#pragma unroll
              for (int i = 0; i < 4; i++)
                if (!general.keep(random[m][i / 2], n_block * kBlockN + 8 * n + i % 2)) acc_s[m][n][i] = 0.f;
          }
        }
        pack_a<T>(p[m], acc_s[m][2 * g], acc_s[m][2 * g + 1]);
        if constexpr (!Traits::kGeneral) ptx::mma_m16n8k16<T>(rounded[m], p[m], softmax.kOnes, softmax.kOnes);
      }
      gemm_pv<T>(acc_o, p, v, 16 * g);
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) softmax.rounded_sum[m][h] += rounded[m][2 * h];
  }
};

}  // namespace flash::sm80
