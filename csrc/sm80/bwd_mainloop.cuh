// The stream of query blocks through one tile of keys.
#pragma once

#include "../attn/mask.h"
#include "bwd_barriers.cuh"
#include "bwd_dq.cuh"
#include "bwd_place.cuh"
#include "bwd_scores.cuh"
#include "bwd_traits.cuh"
#include "gemm.cuh"
#include "general.cuh"
#include "load.cuh"
#include "schedule.h"

namespace flash::sm80 {

template <class Traits>
struct BwdMainloop {
  using T = typename Traits::T;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  using TileQ = typename Traits::TileQ;
  using TileDo = typename Traits::TileDo;
  using TileDs = typename Traits::TileDs;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kSubM = Traits::kSubM;
  static constexpr int kRowTiles = Traits::kRowTiles, kThreads = Traits::kThreads;
  static constexpr int kCols = Traits::kHeadDim / Traits::kColWarps, kColsV = Traits::kHeadDimV / Traits::kColWarps;

  float acc_dk[kRowTiles][kCols / 8][4];   // (warp's keys, warp's columns of head_dim), to be scaled
  float acc_dv[kRowTiles][kColsV / 8][4];  // (warp's keys, warp's columns of head_dim_v)

  const BwdParams& params;
  BwdPlace<T>& place;  // in shared memory
  const Band band;
  const int num_heads, first_head;  // the block's query heads
  const int warp_row0;              // the warp's first key in the tile
  const int col_warp;               // which of the warps with these keys
  const int col0;                   // the tile's first key, and the warp's, in the sequence
  const int warp_col0;
  const BlockRange blocks;   // of kBlockM queries, for the tile
  const BlockRange visible;  // of kSubM queries, for the warp
  const BwdScores<Traits> score_tile;
  const uint32_t smem;
  const int stages;  // of queries: 2, or 1 where shared memory is short
  const BwdBarriers<Traits> barriers;

  __device__ __forceinline__ BwdMainloop(const BwdParams& p, const Work& work, const SeqInfo& seq,
                                         const BwdSchedule& schedule, char* shared_memory)
      : params(p),
        place(*reinterpret_cast<BwdPlace<T>*>(shared_memory + Traits::kSmem.place)),
        band(Band::of(p, seq)),
        num_heads(schedule.num_heads),
        first_head(work.head * num_heads),
        warp_row0(threadIdx.x / 32 % Traits::kTile.key_warps() * Traits::kWarpRows),
        col_warp(threadIdx.x / 32 / Traits::kTile.key_warps()),
        col0(work.tile * kBlockN),
        warp_col0(work.tile * kBlockN + warp_row0),
        blocks(query_blocks(band, col0, kBlockN, kBlockM)),
        visible(query_blocks(band, warp_col0, Traits::kWarpRows, kSubM)),
        score_tile{p, band, warp_col0},
        smem(uint32_t(__cvta_generic_to_shared(shared_memory))),
        stages(schedule.stages),
        barriers{smem + Traits::kSmem.barriers, schedule.stages} {
    static_assert(sizeof(place) <= Traits::kSmem.stage - Traits::kSmem.place);
    const int head_kv = schedule.splits.quotient(work.head);
    if (threadIdx.x == 0) place = BwdPlace<T>::template of<Traits>(p, seq, work.batch_index, head_kv, first_head);
    if constexpr (Traits::kHasBarriers) barriers.init();
    if (blocks.count() > 0) load_keys(seq, work.batch_index, head_kv);
    __syncthreads();
  }

  __device__ __forceinline__ void run() {
    clear(acc_dk);
    clear(acc_dv);
    if (blocks.count() == 0) return;
    Step step{first_head, blocks.end - 1, 0};
    load_queries(step);
    for (; step.head < first_head + num_heads; step = after(step)) {
      const General<T> general(params, band, place.batch_index, step.head);
      if constexpr (Traits::kSharesP) {
        add_block_sharing(general, step, after(step));
      } else if constexpr (!Traits::kHasBarriers) {
        add_block_synchronised(general, step, after(step));
      } else {
        add_block_alone(general, step, after(step));
      }
    }
    __syncthreads();
    if (!Traits::kSharesP) add_dq(before(step));
    __syncthreads();  // shared memory is free
  }

 private:
  template <int kN>
  __device__ __forceinline__ static void clear(float (&acc)[kRowTiles][kN][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[m][n][i] = 0.f;
  }

  // A block of queries of one of the block's heads: from the last to the first, the heads one after the other.
  struct Step {
    int head, block, count;  // count: steps before it
  };
  __device__ __forceinline__ Step after(const Step& step) const {
    const bool same_head = step.block > blocks.begin;
    return {same_head ? step.head : step.head + 1, (same_head ? step.block : forget_before_sm90(blocks.end)) - 1,
            step.count + 1};
  }
  __device__ __forceinline__ Step before(const Step& step) const {
    const bool same_head = step.block + 1 < blocks.end;
    return {same_head ? step.head : step.head - 1, same_head ? step.block + 1 : blocks.begin, step.count - 1};
  }
  __device__ __forceinline__ uint32_t stage_of(const Step& step) const {
    return smem + Traits::kSmem.stage + (stages == 2 ? step.count % 2 : 0) * Traits::kSmem.stage_bytes;
  }
  __device__ __forceinline__ uint32_t ds_of(const Step& step) const {
    return smem + Traits::kSmem.ds + (Traits::kSharesP ? 0 : step.count % 2 * TileDs::kBytes);
  }
  __device__ __forceinline__ uint32_t p_tile() const { return smem + Traits::kSmem.ds + TileDs::kBytes; }

  // bwd_copies.cuh
  __device__ void load_keys(const SeqInfo& seq, int batch_index, int head_kv) const;
  __device__ void load_queries(const Step& step) const;
  __device__ void load_stats(uint32_t stage, int row0, int head) const;

  // P and dS through shared memory (bwd_barriers.cuh).
  __device__ __forceinline__ void add_block_sharing(const General<T>& general, const Step& step, const Step& next) {
    const bool last = next.head == first_head + num_heads;
    barriers.wait_full(step.count);
    sub_step(general, step, col_warp * kSubM);
    barriers.arrive_written();
    if (stages == 2 && !last) load_queries(next);
    barriers.sync_warps_of_keys(warp_row0 / Traits::kWarpRows);
    add_dk_dv(step);
    barriers.wait_written(step.count);
    add_dq(step);
    barriers.arrive_read();
    if (stages == 1 && !last) {
      barriers.wait_read(step.count);
      load_queries(next);
    }
  }

  // Only dS, for dq of the step before.
  __device__ __forceinline__ void add_block_alone(const General<T>& general, const Step& step, const Step& next) {
    static_assert(Traits::kSubs == 2);
    const bool last = next.head == first_head + num_heads;
    barriers.wait_full(step.count);
    sub_step(general, step, 0);
    if (step.count > 0) barriers.wait_written(step.count - 1);
    if (stages == 2 && !last) load_queries(next);
    if (step.count > 0) {
      add_dq(before(step));
      barriers.arrive_read();
    }
    sub_step(general, step, kSubM);
    barriers.arrive_written();
    if (stages == 1 && !last) {
      barriers.wait_written(step.count);
      load_queries(next);
    }
  }

  // The same without barriers.
  __device__ __forceinline__ void add_block_synchronised(const General<T>& general, const Step& step,
                                                         const Step& next) {
    const bool last = next.head == first_head + num_heads;
    // Before it: this step's copies, dS of the step before. After it: nobody reads what the step before read.
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    if (stages == 2 && !last) load_queries(next);
    if (step.count > 0) add_dq(before(step));
#pragma unroll 1
    for (int sub = 0; sub < Traits::kSubs; sub++) sub_step(general, step, sub * kSubM);
    if (stages == 1 && !last) {
      __syncthreads();  // nobody reads this step's queries
      load_queries(next);
    }
  }

  // acc (warp's keys, kSubM) = rows of a key-side tile times the transpose of rows of a query-side one; both start
  // there.
  template <class TileA, class TileB>
  __device__ __forceinline__ void scores(float (&acc)[kRowTiles][kSubM / 8][4], const Fragments<TileA>& a_tile,
                                         const Fragments<TileB>& b_tile) const {
    constexpr uint32_t kNoRegs[kRowTiles][1][4] = {};
    gemm_qk<T>(acc, kNoRegs, a_tile, 0, b_tile);
  }

  __device__ __forceinline__ void sub_step(const General<T>& general, const Step& step, int row0) {
    const uint32_t stage = stage_of(step);
    const int sub_block = (step.block * kBlockM + row0) / kSubM;
    float acc_s[kRowTiles][kSubM / 8][4], acc_dp[kRowTiles][kSubM / 8][4];  // (warp's keys, kSubM)
    if (sub_block < visible.begin || sub_block >= visible.end) {
      clear(acc_dp);
      if (Traits::kHasBarriers && (Traits::kSharesP || row0 == 0)) barriers.wait_free(step.count);
      write_transposed(acc_dp, ds_of(step), row0);
      if (Traits::kSharesP) write_transposed(acc_dp, p_tile(), row0);
      return;
    }
    const Fragments<TileQ> q(stage);
    const Fragments<TileDo> dout(stage + TileQ::kBytes);
    const uint32_t stats = stage + TileQ::kBytes + TileDo::kBytes + 4 * row0;

    scores(acc_s, Fragments<TileK>(smem).from(warp_row0, 0), q.from(row0, 0));
    scores(acc_dp, Fragments<TileV>(smem + Traits::kSmem.v).from(warp_row0, 0), dout.from(row0, 0));
    if constexpr (Traits::kGeneral) {
      score_tile.probabilities_general(acc_s, acc_dp, stats, general, sub_block * kSubM);
    } else {
      score_tile.probabilities(acc_s, acc_dp, stats);
    }
    if (visible.needs_mask(sub_block)) {
      score_tile.mask(acc_s, sub_block * kSubM);
      score_tile.mask(acc_dp, sub_block * kSubM);
    }
    if (Traits::kHasBarriers && (Traits::kSharesP || row0 == 0)) barriers.wait_free(step.count);
    write_transposed(acc_dp, ds_of(step), row0);
    if constexpr (Traits::kSharesP) {
      write_transposed(acc_s, p_tile(), row0);
    } else {
      accumulate_regs(acc_dv, acc_s, dout, row0);
      accumulate_regs(acc_dk, acc_dp, q, row0);
    }
  }

  // acc (warp's keys, all columns) += x (warp's keys, kSubM) times rows row0 ... of a query-side tile.
  template <class Tile, int kN>
  __device__ __forceinline__ void accumulate_regs(float (&acc)[kRowTiles][kN][4],
                                                  const float (&x)[kRowTiles][kSubM / 8][4],
                                                  const Fragments<Tile>& tile, int row0) const {
#pragma unroll
    for (int g = 0; g < kSubM / 16; g++) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; m++) pack_a<T>(a[m], x[m][2 * g], x[m][2 * g + 1]);
      gemm_pv<T>(acc, a, tile, row0 + 16 * g);
    }
  }

  // acc (warp's keys, warp's columns) += its rows of sP or sDs (x starts there) times a query-side tile.
  template <class Tile, int kN>
  __device__ __forceinline__ void accumulate_shared(float (&acc)[kRowTiles][kN][4], const Fragments<TileDs>& x,
                                                    const Fragments<Tile>& tile) const {
#pragma unroll
    for (int g = 0; g < kBlockM / 16; g++) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; m++) x.load_a(a[m], 16 * m, 16 * g);
      if constexpr (kN * 8 % Tile::kPanel == 0) {
        gemm_pv<T>(acc, a, tile.from(0, col_warp * kN * 8), 16 * g);
      } else {
        gemm_pv<T>(acc, a, tile, 16 * g, col_warp * kN * 8);
      }
    }
  }

  __device__ __forceinline__ void add_dk_dv(const Step& step) {
    const uint32_t stage = stage_of(step);
    accumulate_shared(acc_dv, Fragments<TileDs>(p_tile()).from(warp_row0, 0), Fragments<TileDo>(stage + TileQ::kBytes));
    accumulate_shared(acc_dk, Fragments<TileDs>(ds_of(step)).from(warp_row0, 0), Fragments<TileQ>(stage));
  }

  // P^T or dS^T into rows warp_row0 ..., columns row0 ... of its shared-memory tile.
  __device__ __forceinline__ void write_transposed(const float (&x)[kRowTiles][kSubM / 8][4], uint32_t tile,
                                                   int row0) const {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
    // A quarter of the instructions: 2.7 % at head_dim 64. Where P takes the same way it loses up to 8 %; for sm_120
    // ptxas spills.
    if constexpr (!Traits::kSharesP) return store_packed<T>(x, Fragments<TileDs>(tile).from(warp_row0, 0), row0);
#endif
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < kSubM / 8; n++) {
          const uint32_t address =
              tile + TileDs::offset(warp_row0 + 16 * m + lane / 4 + 8 * half, row0 + 8 * n) + lane % 4 * 4;
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(pack2<T>(x[m][n][2 * half], x[m][n][2 * half + 1]))
                       : "memory");
        }
  }

  // dq of the step's queries += dS K over the tile's keys.
  __device__ __forceinline__ void add_dq(const Step& step) const {
    const int64_t tile = place.dq_tile + step.block * params.num_heads + step.head - first_head;
    add_dq_of_block<Traits>(params, {band, tile, step.block, col0}, Fragments<TileDs>(ds_of(step)),
                            Fragments<TileK>(smem));
  }
};

}  // namespace flash::sm80
