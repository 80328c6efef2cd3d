// The stream of query blocks through one tile of keys.
#pragma once

#include "../attn/mask.h"
#include "bwd_traits.cuh"
#include "dq_add.cuh"
#include "gemm.cuh"
#include "general.cuh"
#include "load.cuh"
#include "work.h"

namespace flash::sm80 {

template <class Traits>
struct BwdMainloop {
  using T = typename Traits::T;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  using TileQ = typename Traits::TileQ;
  using TileDo = typename Traits::TileDo;
  using TileDs = typename Traits::TileDs;
  using Pieces = typename Traits::DqPieces;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kSubM = Traits::kSubM;
  static constexpr int kRowTiles = Traits::kRowTiles, kThreads = Traits::kThreads;
  static constexpr int kCols = Traits::kHeadDim / Traits::kColWarps, kColsV = Traits::kHeadDimV / Traits::kColWarps;

  float acc_dk[kRowTiles][kCols / 8][4];   // (warp's keys, warp's columns of head_dim), to be scaled
  float acc_dv[kRowTiles][kColsV / 8][4];  // (warp's keys, warp's columns of head_dim_v)

  const BwdParams& params;
  const SeqInfo seq;
  const Band band;
  const int batch_index, head_kv, group;  // group: query heads of a kv head
  const int warp_row0;                    // the warp's first key in the tile
  const int col_warp;                     // which of the warps with these keys
  const int col0;                         // the tile's first key, and the warp's, in the sequence
  const int warp_col0;
  const BlockRange blocks;   // of kBlockM queries, for the tile
  const BlockRange visible;  // of kSubM queries, for the warp
  const uint32_t smem;
  const int stages;  // of queries: 2, or 1 where shared memory is short

  __device__ __forceinline__ BwdMainloop(const BwdParams& p, const Work& work, const SeqInfo& s, uint32_t shared,
                                         int num_stages)
      : params(p),
        seq(s),
        band(Band::of(p, s)),
        batch_index(work.batch_index),
        head_kv(work.head),
        group(p.num_heads / p.num_heads_kv),
        warp_row0(threadIdx.x / 32 % Traits::kTile.key_warps() * Traits::kWarpRows),
        col_warp(threadIdx.x / 32 / Traits::kTile.key_warps()),
        col0(work.tile * kBlockN),
        warp_col0(work.tile * kBlockN + warp_row0),
        blocks(query_blocks(band, col0, kBlockN, kBlockM)),
        visible(query_blocks(band, warp_col0, Traits::kWarpRows, kSubM)),
        smem(shared),
        stages(num_stages) {}

  __device__ __forceinline__ void run() {
    clear(acc_dk);
    clear(acc_dv);
    if (blocks.count() == 0) return;
    load_keys();
    Step step{head_kv * group, blocks.begin, 0};
    load_queries(step);
    for (; step.head < (head_kv + 1) * group; step = after(step)) {
      const Step next = after(step);
      const bool last = next.head == (head_kv + 1) * group;
      // Before it: this step's copies by all threads; without sP, dS of the step before. After it: nobody reads what
      // the step before read.
      ptx::cp_async_wait_group<0>();
      __syncthreads();
      if (stages == 2 && !last) load_queries(next);
      if (!Traits::kSharesP && step.count > 0) add_dq(before(step));
      const General<T> general(params, band, batch_index, step.head);
#pragma unroll 1
      for (int sub = 0; sub < Traits::kSubs; sub++) sub_step(general, step, (col_warp * Traits::kSubs + sub) * kSubM);
      if constexpr (Traits::kSharesP) {
        __syncthreads();  // P and dS are complete
        add_dk_dv(step);
        add_dq(step);
      }
      if (stages == 1 && !last) {
        __syncthreads();  // nobody reads this step's queries
        load_queries(next);
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

  // A block of queries of one of the group's heads, the heads one after the other.
  struct Step {
    int head, block, count;  // count: steps before it
  };
  __device__ __forceinline__ Step after(const Step& step) const {
    const bool same_head = step.block + 1 < blocks.end;
    return {same_head ? step.head : step.head + 1, same_head ? step.block + 1 : blocks.begin, step.count + 1};
  }
  __device__ __forceinline__ Step before(const Step& step) const {
    const bool same_head = step.block > blocks.begin;
    return {same_head ? step.head : step.head - 1, same_head ? step.block - 1 : blocks.end - 1, step.count - 1};
  }
  __device__ __forceinline__ uint32_t stage_of(const Step& step) const {
    return smem + Traits::kSmem.stage + (stages == 2 ? step.count % 2 : 0) * Traits::kSmem.stage_bytes;
  }
  __device__ __forceinline__ uint32_t ds_of(const Step& step) const {
    return smem + Traits::kSmem.ds + (Traits::kSharesP ? 0 : step.count % 2 * TileDs::kBytes);
  }
  __device__ __forceinline__ uint32_t p_tile() const { return smem + Traits::kSmem.ds + TileDs::kBytes; }

  __device__ __forceinline__ void load_keys() const {
    RowLoader<T, TileK, kThreads>(params.k, batch_index, seq.k0, head_kv, seq.seqlen_k, params.head_dim)
        .load(smem, col0);
    RowLoader<T, TileV, kThreads>(params.v, batch_index, seq.k0, head_kv, seq.seqlen_k, params.head_dim_v)
        .load(smem + Traits::kSmem.v, col0);
  }

  __device__ __forceinline__ void load_queries(const Step& step) const {
    const uint32_t stage = stage_of(step);
    const int row0 = step.block * kBlockM;
    RowLoader<T, TileQ, kThreads>(params.q, batch_index, seq.q0, step.head, seq.seqlen_q, params.head_dim)
        .load(stage, row0);
    RowLoader<T, TileDo, kThreads>(params.dout, batch_index, seq.q0, step.head, seq.seqlen_q, params.head_dim_v)
        .load(stage + TileQ::kBytes, row0);
    static_assert(2 * kBlockM <= kThreads);
    const int j = threadIdx.x, row = row0 + j % kBlockM;
    if (j < 2 * kBlockM) {  // lse, then delta
      const float* lse = params.lse.ptr + offset_of(params.lse, batch_index, seq.q0, row, step.head);
      const float* delta = params.delta.ptr + offset_of(params.delta, batch_index, seq.q0, row, step.head);
      ptx::cp_async_4(stage + TileQ::kBytes + TileDo::kBytes + 4 * j, j < kBlockM ? lse : delta, row < seq.seqlen_q);
    }
    ptx::cp_async_commit_group();
  }

  // acc (warp's keys, kSubM) = rows of a key-side tile times the transpose of rows of a query-side one; both start
  // there.
  template <class TileA, class TileB>
  __device__ __forceinline__ void scores(float (&acc)[kRowTiles][kSubM / 8][4], const Fragments<TileA>& a_tile,
                                         const Fragments<TileB>& b_tile) const {
    clear(acc);
    constexpr int kSteps = TileA::kCols / 16;
    uint32_t a[2][kRowTiles][4], b[2][kSubM / 16][4];
    const auto load = [&](int d) {
#pragma unroll
      for (int m = 0; m < kRowTiles; m++) a_tile.load_a(a[d % 2][m], 16 * m, 16 * d);
#pragma unroll
      for (int n = 0; n < kSubM / 16; n++) b_tile.load_b(b[d % 2][n], 16 * n, 16 * d);
    };
    load(0);
#pragma unroll
    for (int d = 0; d < kSteps; d++) {
      if (d + 1 < kSteps) load(d + 1);
#pragma unroll
      for (int n = 0; n < kSubM / 16; n++)
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
          ptx::mma_m16n8k16<T>(acc[m][2 * n], a[d % 2][m], b[d % 2][n][0], b[d % 2][n][1]);
          ptx::mma_m16n8k16<T>(acc[m][2 * n + 1], a[d % 2][m], b[d % 2][n][2], b[d % 2][n][3]);
        }
    }
  }

  __device__ __forceinline__ void sub_step(const General<T>& general, const Step& step, int row0) {
    const uint32_t stage = stage_of(step);
    const int sub_block = (step.block * kBlockM + row0) / kSubM;
    float acc_s[kRowTiles][kSubM / 8][4], acc_dp[kRowTiles][kSubM / 8][4];  // (warp's keys, kSubM)
    if (sub_block < visible.begin || sub_block >= visible.end) {
      clear(acc_dp);
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
      probabilities_general(acc_s, acc_dp, stats, general, sub_block * kSubM);
    } else {
      probabilities(acc_s, acc_dp, stats);
      if (visible.needs_mask(sub_block)) {
        mask(acc_s, sub_block * kSubM);
        mask(acc_dp, sub_block * kSubM);
      }
    }
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

  // A lane's accumulator element i of row tile m, column tile n: key key_of(m, i / 2), query query_of(n) + i % 2.
  __device__ __forceinline__ int key_of(int m, int half) const {
    return warp_col0 + 16 * m + int(threadIdx.x % 32 / 4) + 8 * half;
  }
  __device__ __forceinline__ static int query_of(int n) { return 8 * n + int(threadIdx.x % 4) * 2; }

  // lse (or delta) of the lane's two queries of column tile n. Queries past the sequence have 0 there and zeros in q
  // and dout.
  __device__ __forceinline__ static float2 stats_at(uint32_t stats, int n) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(stats + 4 * query_of(n)));
    return x;
  }

  // acc_s: scores become probabilities; acc_dp: their gradients become those of the scores.
  __device__ __forceinline__ void probabilities(float (&acc_s)[kRowTiles][kSubM / 8][4],
                                                float (&acc_dp)[kRowTiles][kSubM / 8][4], uint32_t stats) const {
    const float scale = params.softmax_scale * kLog2e;
#pragma unroll
    for (int n = 0; n < kSubM / 8; n++) {
      const float2 lse = stats_at(stats, n), delta = stats_at(stats + 4 * kBlockM, n);
      const float lse2[2] = {lse.x * kLog2e, lse.y * kLog2e}, deltas[2] = {delta.x, delta.y};
#pragma unroll
      for (int m = 0; m < kRowTiles; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float p = exp2_approx(acc_s[m][n][i] * scale - lse2[i % 2]);
          acc_s[m][n][i] = p;
          acc_dp[m][n][i] = p * (acc_dp[m][n][i] - deltas[i % 2]);
        }
    }
  }

  // Entries that the mask hides become 0, whatever they are: exp2 of an unmasked score may be infinite.
  __device__ __forceinline__ void mask(float (&acc)[kRowTiles][kSubM / 8][4], int row0) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int key = key_of(m, half), begin = band.query_begin(key) - row0, end = band.query_end(key) - row0;
#pragma unroll
        for (int n = 0; n < kSubM / 8; n++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            if (query_of(n) + i < begin || query_of(n) + i >= end) acc[m][n][2 * half + i] = 0.f;
      }
  }

  __device__ __forceinline__ void probabilities_general(float (&acc_s)[kRowTiles][kSubM / 8][4],
                                                        float (&acc_dp)[kRowTiles][kSubM / 8][4], uint32_t stats,
                                                        const General<T>& general, int row0) const {
#pragma unroll
    for (int n = 0; n < kSubM / 8; n++) {
      const float2 lse = stats_at(stats, n), delta = stats_at(stats + 4 * kBlockM, n);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = row0 + query_of(n) + i;
        const float row_lse = i == 0 ? lse.x : lse.y, row_delta = i == 0 ? delta.x : delta.y;
        Philox random{};  // one octet serves all the lane's keys: they lie in one group of 32
        if (general.drops()) random = general.octet(row, key_of(0, 0));
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int key = key_of(m, half);
            float &s = acc_s[m][n][2 * half + i], &dp = acc_dp[m][n][2 * half + i];
            const float qk = s;
            // A row without keys has lse -inf; an entry that bias hides must not become exp2(-inf + inf).
            const float score = general.score(qk, row, key);
            const float p = band.visible(row, key) && score > -INFINITY ? exp2_approx((score - row_lse) * kLog2e) : 0.f;
            const float kept = !general.drops() ? 1.f : general.keep(random, key) ? general.keep_scale() : 0.f;
            s = p * kept;
            dp = p == 0.f ? 0.f : p * (dp * kept - row_delta) * general.derivative(qk);
          }
        }
      }
    }
  }

  // P^T or dS^T into rows warp_row0 ..., columns row0 ... of its shared-memory tile.
  __device__ __forceinline__ void write_transposed(const float (&x)[kRowTiles][kSubM / 8][4], uint32_t tile,
                                                   int row0) const {
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
    const int warp = threadIdx.x / 32;
    const Fragments<TileDs> ds(ds_of(step));
    const Fragments<TileK> k(smem);
    const int64_t tile = Traits::DqTiles::index(params, batch_index, seq.q0, step.block) * params.num_heads + step.head;
    float* sums = Traits::dq_sums(params, tile);
    uint32_t* counter = Traits::turn_counter(params, tile, warp);
    const int turn = params.deterministic ? dq_turn(band, step.block * kBlockM, kBlockM, col0 / kBlockN, kBlockN) : 0;
    if (params.deterministic) wait_for_turn(counter, turn);
#pragma unroll 1
    for (int piece = 0; piece < Pieces::kPieces; piece++) {
      float acc[2][Pieces::kCols / 8][4] = {};
#pragma unroll
      for (int key = 0; key < kBlockN; key += 16) {
        uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) ds.load_a_trans(a[m], key, Pieces::row0(warp) + 16 * m);
#pragma unroll
        for (int d = 0; d < Pieces::kCols / 16; d++) {
          uint32_t b[4];
          k.load_b_trans(b, key, Pieces::col0(warp, piece) + 16 * d);
#pragma unroll
          for (int m = 0; m < 2; m++) {
            ptx::mma_m16n8k16<T>(acc[m][2 * d], a[m], b[0], b[1]);
            ptx::mma_m16n8k16<T>(acc[m][2 * d + 1], a[m], b[2], b[3]);
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
};

}  // namespace flash::sm80
