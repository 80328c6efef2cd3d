// Before the backward: delta = rowsum(dout * out) - dlse, LSE and delta as the main kernel reads them, zeros in the
// accumulator of dQ. A thread block takes one band of 16 rows and as many heads as fill 1 KiB of a row. For bitwise
// equal results other thread blocks between these bound the keys, and the norms of dO go where the scales of rows will
// be (bwd_row_scales.cuh): neither waits for the other.
#pragma once

#include "../ptx/griddep.cuh"
#include "bwd_exact_sum.cuh"

namespace flash::sm90 {

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

// What the main kernel reads of one row; `row` within the segment, may be behind its end. `lse`: -infinity there.
// `norm2`: of the row of dO.
__device__ __forceinline__ void write_stats(const BwdArgs& args, const SeqInfo& seq, int batch, int head, int row,
                                            float lse, float delta, float norm2) {
  const BwdParams& p = args.p;
  const int64_t band = head * args.bands + first_band(p, seq, batch) + row / kBandRows;
  if (row < seq.seqlen_q) {
    if (p.dlse.ptr) delta -= p.dlse.ptr[offset_of(p.dlse, batch, seq.q0, row, head)];
    p.delta.ptr[offset_of(p.delta, batch, seq.q0, row, head)] = delta;
  }
  float* stats = args.stats + band * kBandStats + row % kBandRows;
  stats[0] = lse == -INFINITY ? INFINITY : lse * args.lse_scale;  // P = 0 in rows that see nothing or do not exist
  stats[kBandRows] = delta;
  if (p.deterministic) {
    const float norm = sqrtf(norm2) * (p.dropout_p > 0.f ? 1.f / (1.f - p.dropout_p) : 1.f);
    args.row_scale[band * kBandRows + row % kBandRows] = norm;  // bwd_row_scales.cuh makes a scale of it
  }
}

template <int kLanes>
__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
  for (int lane = 1; lane < kLanes; lane *= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

template <class T, int kColumns>
__device__ __forceinline__ void prepare_rows(const BwdArgs& args, const PreprocessGrid& grid, unsigned block) {
  using Tile = PreprocessTile<kColumns>;
  const BwdParams& p = args.p;
  const int head0 = int(block % grid.head_groups) * Tile::kHeads;
  const int band = int(block / grid.head_groups % grid.bands), batch = int(block / grid.head_groups / grid.bands);
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

  // Rows one by one where they lie beside each other in memory: a thread has row `my_row` of head `my_head`.
  __shared__ float deltas[Tile::kHeads][kBandRows], norms2[Tile::kHeads][kBandRows];
  const int my_head = threadIdx.x / kBandRows, my_row = threadIdx.x % kBandRows;
  const bool has_row = my_head < heads;
  float lse = -INFINITY;
  if (has_row && band * kBandRows + my_row < seq.seqlen_q)
    lse = p.lse.ptr[offset_of(p.lse, batch, seq.q0, band * kBandRows + my_row, head0 + my_head)];

#pragma unroll
  for (int i = 0; i < Tile::kPasses; i++) {
    const int item = threadIdx.x / Tile::kLanes + i * Tile::kPerPass;
    keep_packed(out[i]), keep_packed(dout[i]);
    const float delta = sum_of_row<Tile::kLanes>(dot8<T>(out[i], dout[i]));
    const float norm2 = p.deterministic ? sum_of_row<Tile::kLanes>(dot8<T>(dout[i], dout[i])) : 0.f;
    if (column == 0) {
      deltas[item % Tile::kHeads][item / Tile::kHeads] = delta;
      norms2[item % Tile::kHeads][item / Tile::kHeads] = norm2;
    }
  }
  __syncthreads();
  if (has_row)
    write_stats(args, seq, batch, head0 + my_head, band * kBandRows + my_row, lse, deltas[my_head][my_row],
                norms2[my_head][my_row]);
}

template <class T, int kHeadDim, int kHeadDimV>
__global__ void __launch_bounds__(kPreprocessThreads, 4)
    bwd_preprocess(const __grid_constant__ BwdArgs args, PreprocessGrid grid) {
  ptx::griddepcontrol_launch_dependents();
  const PreprocessGrid::Role role = grid.role(blockIdx.x, gridDim.x);
  if (role.bounds_keys)
    bound_keys<T, kHeadDim, kHeadDimV>(args, role.index * int64_t(kPreprocessThreads / 32) + threadIdx.x / 32);
  else
    prepare_rows<T, padded_columns(kHeadDimV)>(args, grid, role.index);
}

}  // namespace flash::sm90
