// Before the backward: delta = rowsum(dout * out) - dlse, LSE and delta as the main kernel reads them, zeros in the
// accumulator of dQ. A thread block takes one band of 16 rows and as many heads as fill 1 KiB of a row.
#pragma once

#include "../ptx/griddep.cuh"
#include "bwd_exact_sum.cuh"

namespace flash::sm90 {

struct PreprocessGrid {
  int bands;  // of the longest segment
  int head_groups;
  FLASH_HD int64_t count(int batch) const { return int64_t(bands) * head_groups * batch; }
};

inline constexpr int kPreprocessThreads = 256;

// kLanes: threads of one row of one head, eight columns each; 64: head_dim_v up to 64
template <int kColumns>
struct PreprocessTile {
  static constexpr int kLanes = kColumns / 8, kHeads = 512 / kColumns;
  static constexpr int kPerPass = kPreprocessThreads / kLanes;   // rows of heads at once
  static constexpr int kPasses = kBandRows * kHeads / kPerPass;  // their loads are in flight together
};

// Zeros in the accumulators of dQ of one band of `heads` heads.
__device__ __forceinline__ void clear_accumulators(const BwdArgs& args, int head0, int heads, int64_t band0) {
  const int accum_floats = kBandRows * args.p.head_dim;
  for (int h = 0; h < heads; h++) {
    float4* dst = reinterpret_cast<float4*>(args.dq_accum + ((head0 + h) * args.bands + band0) * accum_floats);
    for (int i = threadIdx.x; i < accum_floats / 4; i += kPreprocessThreads) dst[i] = float4{0.f, 0.f, 0.f, 0.f};
  }
}

// What the main kernel reads of one row; `row` within the segment, may be behind its end. `norm2`: of the row of dO.
__device__ __forceinline__ void write_stats(const BwdArgs& args, const SeqInfo& seq, int batch, int head, int row,
                                            float delta, float norm2) {
  const BwdParams& p = args.p;
  const int64_t band = head * args.bands + first_band(p, seq, batch) + row / kBandRows;
  float lse = INFINITY;  // of rows that see nothing or do not exist: P = 0
  if (row < seq.seqlen_q) {
    if (p.dlse.ptr) delta -= p.dlse.ptr[offset_of(p.dlse, batch, seq.q0, row, head)];
    p.delta.ptr[offset_of(p.delta, batch, seq.q0, row, head)] = delta;
    const float natural = p.lse.ptr[offset_of(p.lse, batch, seq.q0, row, head)];
    if (natural != -INFINITY) lse = natural * args.lse_scale;
  }
  float* stats = args.stats + band * kBandStats + row % kBandRows;
  stats[0] = lse;
  stats[kBandRows] = delta;
  if (p.deterministic) {
    const float norm = sqrtf(norm2) * (p.dropout_p > 0.f ? 1.f / (1.f - p.dropout_p) : 1.f);
    const ExactSum sum = exact_sum(args, seq, batch, head / (p.num_heads / p.num_heads_kv));
    args.row_scale[band * kBandRows + row % kBandRows] = sum.scale(norm, delta);
  }
}

template <class T, int kColumns>
__global__ void __launch_bounds__(kPreprocessThreads)
    bwd_preprocess(const __grid_constant__ BwdArgs args, PreprocessGrid grid) {
  using Tile = PreprocessTile<kColumns>;
  ptx::griddepcontrol_launch_dependents();
  const BwdParams& p = args.p;
  const int head0 = int(blockIdx.x % grid.head_groups) * Tile::kHeads;
  const int band = int(blockIdx.x / grid.head_groups % grid.bands),
            batch = int(blockIdx.x / grid.head_groups / grid.bands);
  const SeqInfo seq = SeqInfo::of(p, batch);
  if (band * kBandRows >= seq.seqlen_q) return;
  const int64_t band0 = first_band(p, seq, batch) + band;
  const int heads = min_of(Tile::kHeads, p.num_heads - head0);

  uint4 out[Tile::kPasses], dout[Tile::kPasses];
  const int column = threadIdx.x % Tile::kLanes * 8;
#pragma unroll
  for (int i = 0; i < Tile::kPasses; i++) {
    const int item = threadIdx.x / Tile::kLanes + i * Tile::kPerPass;  // heads vary fastest: neighbours in memory
    const int head = head0 + item % Tile::kHeads, row = band * kBandRows + item / Tile::kHeads;
    out[i] = dout[i] = uint4{0, 0, 0, 0};
    if (row < seq.seqlen_q && head < p.num_heads && column < p.head_dim_v) {
      out[i] = __ldcs(reinterpret_cast<const uint4*>(static_cast<const T*>(p.out.ptr) +
                                                     offset_of(p.out, batch, seq.q0, row, head) + column));
      dout[i] = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.dout.ptr) +
                                                offset_of(p.dout, batch, seq.q0, row, head) + column);
    }
  }

  clear_accumulators(args, head0, heads, band0);
  if (p.deterministic) ptx::griddepcontrol_wait();  // for bwd_key_bounds

#pragma unroll
  for (int i = 0; i < Tile::kPasses; i++) {
    const int item = threadIdx.x / Tile::kLanes + i * Tile::kPerPass;
    const int head = head0 + item % Tile::kHeads, row = band * kBandRows + item / Tile::kHeads;
    float delta = dot8<T>(out[i], dout[i]);
#pragma unroll
    for (int lane = 1; lane < Tile::kLanes; lane *= 2) delta += __shfl_xor_sync(~0u, delta, lane);
    float norm2 = 0.f;
    if (p.deterministic) {
      norm2 = dot8<T>(dout[i], dout[i]);
#pragma unroll
      for (int lane = 1; lane < Tile::kLanes; lane *= 2) norm2 += __shfl_xor_sync(~0u, norm2, lane);
    }
    if (threadIdx.x % Tile::kLanes == 0 && head < p.num_heads) write_stats(args, seq, batch, head, row, delta, norm2);
  }
}

}  // namespace flash::sm90
