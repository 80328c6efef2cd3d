// What the kernels of the backward are given, and what a thread block derives from it.
#pragma once

#include <cuda.h>

#include "../attn/numeric.cuh"
#include "../attn/seqlen.h"
#include "../ptx/mbarrier.cuh"
#include "bwd_layout.h"
#include "bwd_tile.h"
#include "option.h"

namespace flash::sm90 {

struct BwdArgs {
  CUtensorMap map_q, map_k, map_v, map_dout, map_bias;
  BwdParams p;
  BwdOrder order;
  bool batch_first;       // of neighbouring heads in the order: the same head of all sequences
  int64_t bands;          // of one head in the workspace
  float* stats;           // (num_heads, bands, 2, 16)
  float* dq_accum;        // (num_heads, bands, head_dim / 8, 32, 4)
  float* row_scale;       // (num_heads, bands, 16)       deterministic only, like what follows
  KeyBounds* key_bounds;  // (num_heads_kv, key_groups)
  int64_t key_groups;     // of one head in the workspace
  int counter_slot;       // of the counters from which blocks claim their tiles, -1: dealt out statically
  float lse_scale;        // stats hold lse times this: log2(e), or 1 where a bias may be added (bwd_general.cuh)
  bool copies_bias;       // the copy engine brings it; else the main warpgroups read it where they need it
  ptx::CoordinateSteps step_q, step_k, step_v, step_dout, step_bias;
};

// The type of one kernel: dtype, head dims and variant, and the numbers that follow from them.
template <DType kDType_, int kHeadDim_, bool kGeneral_, Option kOption_ = Option::kAny>
struct BwdTraits {
  static constexpr DType kDType = kDType_;
  using T = Element<kDType>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr Option kOption = kOption_;  // of a general variant
  static constexpr bool kMayBias = kGeneral && may_have(kOption, Option::kBias);
  static constexpr bool kMayDrop = kGeneral && may_have(kOption, Option::kDropout);
  static constexpr BwdTile kTile = bwd_tile(kHeadDim, kHeadDim);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  // Tiles of bias take the place of a stage.
  static constexpr int kStages = kTile.stages - kMayBias, kKvStages = kTile.kv_stages;
  static constexpr int kDsStages = kMayBias ? 2 : kTile.ds_stages;
  static constexpr int kMainWarpgroups = kBlockN / 64;
  // The warps that make dropout's bits are slowed down by spills most.
  static constexpr int kLent = kMayDrop && kHeadDim <= 64 ? 8 : 0;
  static constexpr int kRegistersMain = kTile.registers_main - kLent;
  static constexpr int kRegistersProducer = kTile.registers_producer + 2 * kLent;
  static constexpr int kMainWarps = 4 * kMainWarpgroups;
  static constexpr int kThreads = 128 * (kMainWarpgroups + 2);
  static constexpr int kPanels = ceil_div(kHeadDim, 64);  // of 64 columns: what one copy brings
  static constexpr bool kJoint = kTile.joint, kKvInRegisters = kTile.kv_in_registers && !kMayDrop;
  // Delta before the wait for dP. Where P is unpacked from fp16, or dropout's bits are, there are no registers for it.
  static constexpr bool kDeltaEarly = kJoint || (kDType == DType::kBF16 && !kMayDrop);

  static constexpr int kKvBytes = kPanels * kBlockN * 128;
  static constexpr int kQBytes = kPanels * kBlockM * 128;
  static constexpr int kStatsBytes = kBlockM * 2 * int(sizeof(float));
  static constexpr int kDsBytes = kMainWarpgroups * kBlockM * 128;
  static constexpr int kBiasBytes = kMayBias ? kMainWarpgroups * kBlockM * 128 : 0;          // of a stage
  static constexpr int kKeptBytes = kMayDrop ? kMainWarpgroups * kKeptBytesOfWarpgroup : 0;  // of a stage
};

// The keys of a thread block.
struct BwdKeys {
  int batch, head_kv, n_block;
  SeqInfo seq;
  int rows_k;  // rows of dk and dv that belong to the segment: seqlen_k and the unused ones behind it
  bool empty;  // the segment has no such keys

  // Number `index` in the order of blocks of `block_n` keys.
  __device__ static BwdKeys of(const BwdArgs& args, int index, int block_n) {
    const AttnParams& p = args.p;
    const BwdOrder::Item item = args.order.at(index);
    BwdKeys k{item.head / p.num_heads_kv, item.head % p.num_heads_kv, item.n_block};
    if (args.batch_first) k.batch = item.head % p.batch, k.head_kv = item.head / p.batch;
    k.seq = SeqInfo::of(p, k.batch);
    k.rows_k = SeqInfo::rows_of_k(p, k.batch);
    k.empty = k.n_block * block_n >= k.rows_k;
    return k;
  }
};

// The keys and the queries that see them. Lies in shared memory: the main warpgroups have no registers to spare, and
// all but the ranges is needed rarely.
struct BwdBlock : BwdKeys {
  Band band;
  BwdSteps steps;
  BlockRange mine[2];  // the queries that see the 64 keys of each main warpgroup
  int foreign_m;       // the tile of queries that holds rows of another segment; -1: none
  int64_t band0;       // first band of the segment's queries

  // Fills in what follows from the keys. In place: few registers.
  __device__ void find_steps(const BwdArgs& args, int block_m, int block_n) {
    const AttnParams& p = args.p;
    band = Band::of(p, seq);
    const BlockRange range = query_blocks(band, n_block * block_n, block_n, block_m);
    steps = {range.begin, range.count(), p.num_heads / p.num_heads_kv};
#pragma unroll 1
    for (int w = 0; w < block_n / 64; w++) mine[w] = query_blocks(band, n_block * block_n + 64 * w, 64, block_m);
    foreign_m = p.cu_seqlens_q && seq.seqlen_q % block_m ? seq.seqlen_q / block_m : -1;
    band0 = first_band(p, seq, batch);
  }
};

// Parity of the barriers of a ring of `kCount` buffers in step `index`, for the side that waits for the first fill.
// Computed, not carried along: registers are short.
template <int kCount>
__device__ __forceinline__ uint32_t phase_of(int index) {
  return uint32_t(index) / kCount % 2;
}

// Shared memory: byte offsets from its 1024-byte aligned start, and the barriers.
//
//   barrier      arrivals                              who waits                                first wait
//   tile_full    1, the query loader                   everybody, for the tile's BwdBlock       parity 0
//   tile_empty   every main and dQ warp, key loader,   query loader                             parity 1
//                2 helpers, if they have a task
//   kv_full      1 + bytes of K and V                  main and dQ warpgroups                   parity 0
//   kv_empty     every main and dQ warp                key loader                               parity 1
//   full         1 + bytes of Q, dO, stats, bias;      main warpgroups                          parity 0
//                with dropout 4 warps with its bits
//   empty        every main warp                       producer warpgroup                       parity 1
//   ds_full      every main warp                       dQ warpgroup, helpers                    parity 0
//   ds_empty     every dQ warp, 2 helpers, if they     main warpgroups                          parity 1
//                add to dbias
template <class Traits>
struct BwdSmem {
  uint32_t base;

  static constexpr int kTiles = 2;
  static constexpr int kK = 0, kV = kK + Traits::kKvStages * Traits::kKvBytes;
  static constexpr int kQ = kV + Traits::kKvStages * Traits::kKvBytes, kDout = kQ + Traits::kStages * Traits::kQBytes;
  static constexpr int kDs = kDout + Traits::kStages * Traits::kQBytes;
  static constexpr int kBias = kDs + Traits::kDsStages * Traits::kDsBytes;
  static constexpr int kKept = kBias + Traits::kStages * Traits::kBiasBytes;
  static constexpr int kStats = kKept + Traits::kStages * Traits::kKeptBytes;
  static constexpr int kBarriers = kStats + Traits::kStages * Traits::kStatsBytes;
  static constexpr int kBlocks =
      round_up(kBarriers + 8 * (2 * kTiles + 2 * Traits::kKvStages + 2 * Traits::kStages + 2 * Traits::kDsStages), 16);
  static constexpr int kBytes = kBlocks + kTiles * int(sizeof(BwdBlock));
  static_assert(kBytes <= 227 * 1024);

  // [kPanels][kBlockN][64]
  __device__ uint32_t k(int i) const { return base + kK + i * Traits::kKvBytes; }
  __device__ uint32_t v(int i) const { return base + kV + i * Traits::kKvBytes; }
  // [kPanels][kBlockM][64]
  __device__ uint32_t q(int stage) const { return base + kQ + stage * Traits::kQBytes; }
  __device__ uint32_t dout(int stage) const { return base + kDout + stage * Traits::kQBytes; }
  // [kBlockN/64][kBlockM][64]
  __device__ uint32_t ds(int stage) const { return base + kDs + stage * Traits::kDsBytes; }
  // [kBlockM][64]
  __device__ uint32_t bias(int stage, int warpgroup) const {
    return base + kBias + stage * Traits::kBiasBytes + warpgroup * Traits::kBlockM * 128;
  }
  // [128] words (bwd_kept.cuh)
  __device__ uint32_t kept(int stage, int warpgroup) const {
    return base + kKept + stage * Traits::kKeptBytes + warpgroup * kKeptBytesOfWarpgroup;
  }
  // [kBlockM/16][2][16]
  __device__ uint32_t stats(int stage) const { return base + kStats + stage * Traits::kStatsBytes; }

  __device__ uint32_t tile_full(int tile) const { return base + kBarriers + 8 * (tile % kTiles); }
  __device__ uint32_t tile_empty(int tile) const { return tile_full(tile % kTiles) + 8 * kTiles; }
  __device__ uint32_t kv_full(int i) const { return base + kBarriers + 8 * (2 * kTiles + i); }
  __device__ uint32_t kv_empty(int i) const { return kv_full(Traits::kKvStages + i); }
  __device__ uint32_t full(int stage) const { return kv_full(2 * Traits::kKvStages + stage); }
  __device__ uint32_t empty(int stage) const { return full(Traits::kStages + stage); }
  __device__ uint32_t ds_full(int stage) const { return full(2 * Traits::kStages + stage); }
  __device__ uint32_t ds_empty(int stage) const { return full(2 * Traits::kStages + Traits::kDsStages + stage); }
};

// Tile number `tile` of this thread block.
template <class Smem>
__device__ __forceinline__ BwdBlock& block_of(Smem, uint8_t* shared, int tile) {
  return reinterpret_cast<BwdBlock*>(shared + Smem::kBlocks)[tile % Smem::kTiles];
}
// An empty one says that there are no more.
template <class Smem>
__device__ __forceinline__ const BwdBlock& wait_for_tile(Smem smem, uint8_t* shared, int tile) {
  ptx::mbarrier_wait(smem.tile_full(tile), phase_of<Smem::kTiles>(tile));
  return block_of(smem, shared, tile);
}

}  // namespace flash::sm90
