// After the backward: dq = softmax_scale * dq_accum in the dtype of q. One warp per band, head and 64 columns (32, if
// head_dim is no multiple of that): what it loads is in flight together.
#pragma once

#include "../ptx/griddep.cuh"
#include "bwd_epilogue.cuh"

namespace flash::sm90 {

struct PostprocessGrid {
  int bands;  // of the longest segment
  FLASH_HD int64_t count(int64_t batch, int heads, int pieces) const {
    return ceil_div_64(int64_t(bands) * pieces * batch * heads, kWarps);
  }
  static constexpr int kWarps = 4;
  FLASH_HD static int64_t ceil_div_64(int64_t a, int64_t b) { return (a + b - 1) / b; }
};

// A lane's four numbers of a group of eight columns are those of rows lane / 4 and lane / 4 + 8.
struct DqUnits {
  bool integers;
  float rows[2];

  __device__ __forceinline__ static DqUnits of(const BwdArgs& args, int64_t band) {
    const float dq_scale = args.p.softmax_scale;
    if (!args.p.deterministic) return {false, {dq_scale, dq_scale}};
    const float* scale = args.row_scale + band * kBandRows + threadIdx.x % 32 / 4;
    return {bool(signbit(scale[0])), {dq_scale / fabsf(scale[0]), dq_scale / fabsf(scale[8])}};
  }

  // The lane's four numbers of the first `count` of kCount groups.
  template <int kCount>
  __device__ __forceinline__ void load(uint4 (&sums)[kCount], const float* groups, int count) const {
    const uint4* floats = reinterpret_cast<const uint4*>(groups) + threadIdx.x % 32;
    const uint32_t* integers_of = reinterpret_cast<const uint32_t*>(groups) + threadIdx.x % 32;
    if (!integers && count >= kCount) {  // without a branch each, which would make each wait for the one before
#pragma unroll
      for (int i = 0; i < kCount; i++) sums[i] = __ldcs(floats + 32 * i);
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      sums[i] = uint4{0, 0, 0, 0};
      if (i >= count) continue;
      const uint32_t* of = integers_of + 128 * i;
      sums[i] =
          integers ? uint4{__ldcs(of), __ldcs(of + 32), __ldcs(of + 64), __ldcs(of + 96)} : __ldcs(floats + 32 * i);
    }
  }

  __device__ __forceinline__ float dq(uint32_t sum, int row) const {
    return (integers ? float(int32_t(sum)) : __uint_as_float(sum)) * rows[row];
  }
};

// Columns of one warp: groups of eight whose loads are in flight together.
template <int kHeadDim>
struct PostprocessTile {
  static constexpr int kGroups = kHeadDim % 64 == 0 ? 8 : 4, kPieces = ceil_div(kHeadDim / 8, kGroups);
};

// dq of one band, from group `first` on.
template <class T, int kHeadDim>
__device__ __forceinline__ void write_dq(const BwdArgs& args, const SeqInfo& seq, int batch, int head, int band,
                                         int first) {
  constexpr int kGroups = PostprocessTile<kHeadDim>::kGroups;
  const BwdParams& p = args.p;
  const int groups = p.head_dim / 8;
  const int64_t band_index = head * args.bands + first_band(p, seq, batch) + band;
  const DqUnits units = DqUnits::of(args, band_index);
  T* dst = static_cast<T*>(p.dq.ptr) + offset_of(p.dq, batch, seq.q0, 0, head);
  uint4 sums[kGroups];
  units.load(sums, args.dq_accum + (band_index * groups + first) * 128, groups - first);
  float acc[4 * kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    acc[4 * i] = units.dq(sums[i].x, 0), acc[4 * i + 1] = units.dq(sums[i].y, 0);
    acc[4 * i + 2] = units.dq(sums[i].z, 1), acc[4 * i + 3] = units.dq(sums[i].w, 1);
  }
  store_rows<T, 8 * kGroups>(dst + 8 * first, p.dq.row, band * kBandRows, seq.seqlen_q, p.head_dim - 8 * first, acc,
                             1.f);
}

template <class T, int kHeadDim>
__global__ void __launch_bounds__(32 * PostprocessGrid::kWarps)
    bwd_postprocess(const __grid_constant__ BwdArgs args, PostprocessGrid grid) {
  using Tile = PostprocessTile<kHeadDim>;
  const BwdParams& p = args.p;
  // Columns, then heads vary fastest. The last ones come first, whose sums are still in the L2 cache.
  const int64_t item = int64_t(gridDim.x - 1 - blockIdx.x) * PostprocessGrid::kWarps + threadIdx.x / 32;
  const int64_t row = item / Tile::kPieces;
  const int head = int(row % p.num_heads), band = int(row / p.num_heads % grid.bands);
  const int64_t batch = row / p.num_heads / grid.bands;
  ptx::griddepcontrol_wait();  // also without work: what follows this kernel may need what main writes
  if (batch >= p.batch) return;
  const SeqInfo seq = SeqInfo::of(p, int(batch));
  if (band * kBandRows >= seq.seqlen_q) return;
  write_dq<T, kHeadDim>(args, seq, int(batch), head, band, int(item % Tile::kPieces) * Tile::kGroups);
}

}  // namespace flash::sm90
