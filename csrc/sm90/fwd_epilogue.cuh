// End of a tile: O divided by the row sums, stored from registers, and LSE.
#pragma once

#include "fwd_scores.cuh"
#include "fwd_softmax.cuh"

namespace flash::sm90 {

// Denominator and LSE of one row from its reference, in score units, and its sum.
struct RowResult {
  float inverse_sum;  // 0: the row sees no key
  float lse;
};

// In natural units, since `reference` may be so large that its log2 units overflow.
// A sink (-inf: none) joins the denominator; whichever is larger becomes the reference. Without a branch: at 512 keys
// the length of this code shows.
__device__ __forceinline__ RowResult row_result(float reference, float sum, float scale, float sink) {
  const float top = reference * scale, joint = fmaxf(top, sink);
  const bool empty = !(sum != 0.f);  // a NaN is not empty
  const float share = exp2_approx((top - joint) * kLog2e);
  const float total = fmaf(sum, share, exp2_approx((sink - joint) * kLog2e));
  return {empty ? 0.f : __fdividef(share, total), empty ? sink : joint + log2_approx(total) * kLn2};
}

// What was accumulated for rows that see no key may be 0 * NaN: nothing but zeros may come out. Such rows are rare, so
// others do not pay for them in every word.
template <int kOut>
__device__ __forceinline__ void zero_empty_rows(float (&acc_o)[kOut], const bool (&empty)[2]) {
  if (!__any_sync(~0u, empty[0] || empty[1])) return;
#pragma unroll
  for (int i = 0; i < kOut; i++)
    if (empty[(i / 2) % 2]) acc_o[i] = 0.f;
}

// Row r of a thread's two, times factor; nowhere if it does not exist. Two lanes exchange words so that each stores 8
// bytes at once, and a quad the 32 bytes of a sector: 16 bytes a lane would take twice the exchanges, which cost more
// than stores do.
template <class Out, int kOut>
__device__ __forceinline__ void store_row(const float (&acc_o)[kOut], int r, float factor, bool exists, Out* out,
                                          int head_dim_v) {
  static_assert(kOut % 8 == 0, "head_dim_v: a multiple of 16");
  const int quad_lane = threadIdx.x % 4;
  const bool odd = quad_lane % 2 != 0;
  const int first = odd ? 6 + 2 * quad_lane : 2 * quad_lane;  // of this lane's four columns of 16
  const int columns = exists ? head_dim_v - (odd ? 8 : 0) : 0;
#pragma unroll
  for (int g = 0; g < kOut / 4; g += 2) {
    uint32_t word[2];  // columns 8 (g + j) + 2 quad_lane + {0, 1}
#pragma unroll
    for (int j = 0; j < 2; j++)
      word[j] = pack2<Out>(acc_o[4 * (g + j) + 2 * r] * factor, acc_o[4 * (g + j) + 2 * r + 1] * factor);
    const uint32_t other = __shfl_xor_sync(~0u, odd ? word[0] : word[1], 1);
    if (8 * g < columns)
      *reinterpret_cast<uint2*>(out + 8 * g + first) = odd ? make_uint2(other, word[1]) : make_uint2(word[0], other);
  }
}

// acc_o (64, head_dim_v) of the warpgroup.
template <class Traits>
__device__ __forceinline__ void store_tile(float (&acc_o)[Traits::kHeadDimV / 2], const FwdSoftmax<Traits>& softmax,
                                           const FwdArgs& args, const Tile& tile, FragmentPlace at) {
  using Element = typename Traits::Element;
  const FwdParams& p = args.params;
  const float sink = p.sinks != nullptr ? p.sinks[tile.head] : -CUDART_INF_F;
  // Of this thread's first row: addresses of 64 bits are long to work out.
  float* const lse = p.lse.ptr + offset_of(p.lse, tile.batch, tile.q0, at.row, tile.head);
  Element* const out = static_cast<Element*>(p.out.ptr) + offset_of(p.out, tile.batch, tile.q0, at.row, tile.head);
  float factor[2];
  bool exists[2], empty[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const RowResult result = row_result(softmax.reference[r], quad_sum(softmax.row_sum[r]), args.scale, sink);
    exists[r] = at.row + 8 * r < tile.seqlen_q;
    empty[r] = result.inverse_sum == 0.f;
    if (threadIdx.x % 4 == 0 && exists[r]) lse[8 * r] = result.lse;

    factor[r] = result.inverse_sum;
    if constexpr (Traits::kGeneral) {
      if (p.dropout_p != 0.f) factor[r] *= 1.f / (1.f - p.dropout_p);
    }
  }
  zero_empty_rows(acc_o, empty);
#pragma unroll
  for (int r = 0; r < 2; r++) store_row(acc_o, r, factor[r], exists[r], out + 8 * r * p.out.row, p.head_dim_v);
}

}  // namespace flash::sm90
