// Copies into shared memory.
#pragma once

#include "../ptx/fence.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "bwd_args.cuh"

namespace flash::sm90 {

// `kPanels` panels of 64 columns, from panel `first` and row `row` of the segment on: [kPanels][rows][64]
template <int kPanels>
__device__ __forceinline__ void load_tile(uint32_t dst, int panel_bytes, const CUtensorMap* map, uint32_t bar, int row,
                                          int head, int batch, int first = 0) {
#pragma unroll
  for (int i = 0; i < kPanels; i++) ptx::tma_load(dst + i * panel_bytes, map, bar, 64 * (first + i), row, head, batch);
}

template <class Traits>
__device__ __forceinline__ void load_keys(const BwdArgs& args, const BwdKeys& block, BwdSmem<Traits> smem, int stage) {
  const int row = int(block.seq.k0) + block.n_block * Traits::kBlockN;
  const int batch = args.p.cu_seqlens_k ? 0 : block.batch;
  const uint32_t bar = smem.kv_full(stage);
  ptx::mbarrier_arrive_expect_tx(bar, 2 * Traits::kKvBytes);
  load_tile<Traits::kPanels>(smem.k(stage), Traits::kBlockN * 128, &args.map_k, bar, row,
                             block.head_kv * args.step_k.head, batch * args.step_k.batch);
  load_tile<Traits::kPanels>(smem.v(stage), Traits::kBlockN * 128, &args.map_v, bar, row,
                             block.head_kv * args.step_v.head, batch * args.step_v.batch);
}

// Q, dO and their rows' stats of a step into a stage that nobody uses.
template <class Traits>
__device__ __forceinline__ void load_queries(const BwdArgs& args, const BwdBlock& block, BwdSmem<Traits> smem,
                                             int stage, BwdSteps::Step step) {
  const int head = block.head_kv * block.steps.group + step.head;
  const int row = int(block.seq.q0) + step.m_block * Traits::kBlockM;
  const int batch = args.p.cu_seqlens_q ? 0 : block.batch;
  const int64_t band = head * args.bands + block.band0 + step.m_block * (Traits::kBlockM / kBandRows);
  const uint32_t bar = smem.full(stage);
  const bool copies_bias = Traits::kMayBias && args.copies_bias;
  ptx::mbarrier_arrive_expect_tx(bar,
                                 2 * Traits::kQBytes + Traits::kStatsBytes + (copies_bias ? Traits::kBiasBytes : 0));
  load_tile<Traits::kPanels>(smem.q(stage), Traits::kBlockM * 128, &args.map_q, bar, row, head * args.step_q.head,
                             batch * args.step_q.batch);
  ptx::bulk_load(smem.stats(stage), args.stats + band * kBandStats, bar, Traits::kStatsBytes);
  load_tile<Traits::kPanels>(smem.dout(stage), Traits::kBlockM * 128, &args.map_dout, bar, row,
                             head * args.step_dout.head, batch * args.step_dout.batch);
  if constexpr (Traits::kMayBias) {
    if (!copies_bias) return;
#pragma unroll
    for (int w = 0; w < Traits::kMainWarpgroups; w++)
      ptx::tma_load(smem.bias(stage, w), &args.map_bias, bar, block.n_block * Traits::kBlockN + 64 * w,
                    step.m_block * Traits::kBlockM, head * args.step_bias.head, block.batch * args.step_bias.batch);
  }
}

// Whether memory goes on behind the last key that is used; where it does not, the copies bring zeros.
__device__ __forceinline__ bool may_hold_unused_keys(const AttnParams& p) {
  return p.cu_seqlens_k != nullptr || p.seqused_k != nullptr;
}

// Rows [first, rows) of a tile become zeros: rows of another segment, or unused ones, may hold NaN, and 0 * NaN is NaN.
// By kThreads threads, which synchronise afterwards.
template <int kThreads>
__device__ __forceinline__ void zero_rows(uint32_t tile, int panels, int rows, int first, int thread) {
  const int chunks = (rows - first) * 8;  // of 16 bytes; whole rows, so the swizzle does not matter
  for (int i = thread; i < panels * chunks; i += kThreads) {
    const uint32_t address = tile + (i / chunks) * rows * 128 + first * 128 + (i % chunks) * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
  }
  ptx::fence_proxy_async();
}

// The same in less code, for the pairs, whose loops over steps hold many copies of it.
template <int kThreads>
__device__ __forceinline__ void zero_rows_compact(uint32_t tile, int panels, int rows, int first, int thread) {
  const uint32_t chunk = tile + thread % 8 * 16;
#pragma unroll 1
  for (int panel = 0; panel < panels; panel++) {
#pragma unroll 1
    for (int row = first + thread / 8; row < rows; row += kThreads / 8)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(chunk + (panel * rows + row) * 128), "r"(0)
                   : "memory");
  }
  ptx::fence_proxy_async();
}

}  // namespace flash::sm90
